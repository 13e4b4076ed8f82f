//! What an operator writes for a worker, and what it means.

use http::Uri;
use router_core::{WorkerId, WorkerSpec};

/// Where engines listen unless told otherwise.
const DEFAULT_PORT: u16 = 8_000;
/// Where our own worker listens unless told otherwise; nobody else speaks this gRPC.
const WORKER_PORT: u16 = 8_001;
/// Schemes and the ports they mean: a URL without one means its scheme's own, a bare host an engine's.
const SCHEMES: [(&str, u16); 5] =
    [("", DEFAULT_PORT), ("http", 80), ("https", 443), ("h2c", 80), ("grpc", WORKER_PORT)];
/// What runs when no worker is named.
const DEFAULT_WORKERS: [&str; 2] = ["embedded:builtin", "embedded:builtin"];

/// Reads all workers of a list; what is wrong goes to `errors`.
pub(super) fn parse_workers(list: &[String], errors: &mut Vec<String>) -> Vec<WorkerSpec> {
    let defaults = DEFAULT_WORKERS.map(str::to_owned);
    let list = if list.is_empty() { &defaults[..] } else { list };
    let mut workers: Vec<WorkerSpec> = Vec::with_capacity(list.len());
    for (index, text) in list.iter().enumerate() {
        match parse_worker(text, &format!("w{index}")) {
            Ok(spec) if workers.iter().any(|other| other.id == spec.id) => {
                errors.push(format!("workers: two workers are named {}", spec.id));
            }
            Ok(spec) => workers.push(spec),
            Err(error) => errors.push(format!("workers: {error}")),
        }
    }
    workers
}

/// Reads one worker: `[ID=]SCHEME://host[:port]` with `http`, `https`, `h2c` (HTTP/2 in plain text) or `grpc` (a Roundhouse
/// worker, in plain text), `[ID=]host[:port]` or `[ID=]embedded:MODEL`.
///
/// # Errors
/// What is wrong, and what would be right.
pub fn parse_worker(text: &str, default_id: &str) -> Result<WorkerSpec, String> {
    let text = text.trim();
    let (id, address) = match text.split_once('=') {
        Some((id, address)) if !id.contains(['/', ':']) => (id.trim(), address.trim()),
        _ => (default_id, text),
    };
    if !is_worker_id(id) {
        return Err(format!("{id:?} is no id; take up to 64 letters, digits, '-', '_' and '.'"));
    }
    Ok(WorkerSpec { id: WorkerId::new(id), address: normalise(address)? })
}

/// Whether a worker can have this name.
#[must_use]
pub fn is_worker_id(id: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    !id.is_empty() && id.len() <= 64 && id.chars().all(is_plain)
}

fn normalise(address: &str) -> Result<String, String> {
    if let Some(model) = address.strip_prefix("embedded:") {
        if model.is_empty() {
            return Err(
                "embedded: wants a model, as in embedded:builtin or embedded:/models/smollm2".to_owned()
            );
        }
        if !cfg!(feature = "embedded") {
            return Err(format!("{address}: this router was built without embedded workers"));
        }
        return Ok(address.to_owned());
    }
    let wrong = |why: &str| {
        format!(
            "{address:?} {why}; write http://host:port, https://host:port, h2c://host:port, grpc://host:port, host, \
             host:port or embedded:MODEL"
        )
    };
    let (scheme, rest) = address.split_once("://").unwrap_or(("", address));
    let Some((_, url_port)) = SCHEMES.iter().find(|(known, _)| *known == scheme) else {
        return Err(wrong("has an unknown scheme"));
    };
    let uri: Uri = format!("http://{rest}").parse().map_err(|_| wrong("is no address"))?;
    let host = uri.host().filter(|host| !host.is_empty()).ok_or_else(|| wrong("has no host"))?;
    if !matches!(uri.path(), "" | "/") || uri.query().is_some() || rest.contains('@') {
        return Err(wrong("has more than host and port"));
    }
    let authority = uri.authority().map_or("", http::uri::Authority::as_str);
    let port = match uri.port_u16() {
        Some(port) if port != 0 => port,
        None if authority == host => *url_port,
        _ => return Err(wrong("has no valid port")),
    };
    let scheme = if scheme.is_empty() { "http" } else { scheme };
    Ok(format!("{scheme}://{host}:{port}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> Result<String, String> {
        parse_worker(text, "w0").map(|spec| spec.address)
    }

    #[test]
    fn hosts_ports_and_urls() {
        for (text, expected) in [
            ("w1", "http://w1:8000"),
            ("w1:9000", "http://w1:9000"),
            ("http://w1:9000/", "http://w1:9000"),
            ("http://w1", "http://w1:80"),
            ("https://w1", "https://w1:443"),
            ("https://w1:8443/", "https://w1:8443"),
            ("h2c://w1:9000", "h2c://w1:9000"),
            ("grpc://w1:9000", "grpc://w1:9000"),
            ("grpc://w1", "grpc://w1:8001"),
            ("10.0.0.1", "http://10.0.0.1:8000"),
            ("[::1]:9000", "http://[::1]:9000"),
            ("[::1]", "http://[::1]:8000"),
        ] {
            assert_eq!(address(text).as_deref(), Ok(expected), "{text}");
        }
    }

    #[test]
    fn ids() {
        let spec = parse_worker("gpu-0=10.0.0.1:8000", "w0").unwrap();
        assert_eq!((spec.id.as_str(), spec.address.as_str()), ("gpu-0", "http://10.0.0.1:8000"));
        assert_eq!(parse_worker("a:1", "w7").unwrap().id.as_str(), "w7");
        assert!(parse_worker("a b=host", "w0").is_err());
        assert!(parse_worker("=host", "w0").is_err());
    }

    #[test]
    fn errors_name_the_valid_forms() {
        for bad in
            ["", "http://", "ftp://a", "grpcs://a:1", "a:0", "a:99999", "a:", "a/b", "http://a?b", "u@a"]
        {
            let error = address(bad).unwrap_err();
            assert!(error.contains("embedded:MODEL"), "{bad}: {error}");
        }
        assert!(address("embedded:").is_err());
    }

    #[test]
    fn every_error_of_a_list_is_reported() {
        let list = ["a", "ftp://b", "x=c", "x=d"].map(str::to_owned);
        let mut errors = Vec::new();
        let workers = parse_workers(&list, &mut errors);
        assert_eq!(workers.len(), 2);
        assert_eq!(errors.len(), 2, "{errors:?}");
    }
}
