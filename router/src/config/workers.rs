//! What an operator writes for a worker, and what it means.

use http::Uri;
use router_core::{Role, WorkerId, WorkerSpec};

/// Where engines listen unless told otherwise.
const DEFAULT_PORT: u16 = 8_000;
/// Where our own worker listens unless told otherwise; nobody else speaks this gRPC.
const WORKER_PORT: u16 = 8_001;
/// Schemes and the ports they mean: a URL without one means its scheme's own, a bare host an engine's.
const SCHEMES: [(&str, u16); 5] =
    [("", DEFAULT_PORT), ("http", 80), ("https", 443), ("h2c", 80), ("grpc", WORKER_PORT)];
/// What runs when no worker is named.
const DEFAULT_WORKERS: [&str; 2] = ["embedded:builtin", "embedded:builtin"];

/// What of an address says where a prefill worker's bootstrap server is.
const BOOTSTRAP_PORT: &str = "?bootstrap_port=";

/// Reads all workers, those that generate and those that compute prompts for them; what is wrong goes to `errors`.
pub(super) fn parse_fleet(list: &[String], prefill: &[String], errors: &mut Vec<String>) -> Vec<WorkerSpec> {
    let defaults = DEFAULT_WORKERS.map(str::to_owned);
    let list = if list.is_empty() && prefill.is_empty() { &defaults[..] } else { list };
    if list.is_empty() {
        errors.push("workers: there are none to generate from what the prefill workers compute".to_owned());
    }
    let one = |(index, text): (usize, &String)| ("workers", parse_worker(text, &format!("w{index}")));
    let other =
        |(index, text): (usize, &String)| ("prefill", parse_prefill_worker(text, &format!("p{index}")));
    let all = list.iter().enumerate().map(one).chain(prefill.iter().enumerate().map(other));
    let mut workers: Vec<WorkerSpec> = Vec::with_capacity(list.len() + prefill.len());
    for (key, parsed) in all {
        match parsed {
            Ok(spec) if workers.iter().any(|other| other.id == spec.id) => {
                errors.push(format!("{key}: two workers are named {}", spec.id));
            }
            Ok(spec) if !prefill.is_empty() && !hands_over(&spec) => {
                errors.push(format!(
                    "{key}: {} cannot hand prompts over; that takes engines over HTTP",
                    spec.address
                ));
            }
            Ok(spec) => workers.push(spec),
            Err(error) => errors.push(format!("{key}: {error}")),
        }
    }
    workers
}

/// Reads a worker that computes prompts: as [`parse_worker`], and `?bootstrap_port=PORT` may follow.
///
/// # Errors
/// What is wrong, and what would be right.
pub fn parse_prefill_worker(text: &str, default_id: &str) -> Result<WorkerSpec, String> {
    let (address, port) = match text.split_once(BOOTSTRAP_PORT) {
        Some((address, port)) => {
            let parsed = port.trim().parse::<u16>().ok().filter(|port| *port != 0);
            let wrong =
                || format!("{text:?} has no valid port after {BOOTSTRAP_PORT:?}; write one such as 8998");
            (address, Some(parsed.ok_or_else(wrong)?))
        }
        None => (text, None),
    };
    let spec = parse_worker(address, default_id)?;
    if !hands_over(&spec) {
        return Err(format!("{:?} cannot hand prompts over; that takes an engine over HTTP", spec.address));
    }
    Ok(WorkerSpec { role: Role::Prefill, bootstrap_port: port, ..spec })
}

/// Whether requests to it can be told of another worker.
fn hands_over(spec: &WorkerSpec) -> bool {
    !["embedded:", "grpc:"].iter().any(|kind| spec.address.starts_with(kind))
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
    Ok(WorkerSpec::new(WorkerId::new(id), normalise(address)?))
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
        let workers = parse_fleet(&list, &[], &mut errors);
        assert_eq!(workers.len(), 2);
        assert_eq!(errors.len(), 2, "{errors:?}");
    }

    type Told = (String, Role, Option<u16>);

    fn fleet(list: &[&str], prefill: &[&str]) -> Result<Vec<Told>, Vec<String>> {
        let owned = |list: &[&str]| list.iter().map(|&text| text.to_owned()).collect::<Vec<_>>();
        let mut errors = Vec::new();
        let workers = parse_fleet(&owned(list), &owned(prefill), &mut errors);
        let told =
            |spec: WorkerSpec| (format!("{}={}", spec.id, spec.address), spec.role, spec.bootstrap_port);
        if errors.is_empty() { Ok(workers.into_iter().map(told).collect()) } else { Err(errors) }
    }

    #[test]
    fn prefill_workers_stand_beside_those_that_generate() {
        let told = fleet(&["d"], &["p", "a=http://p2:9?bootstrap_port=7000"]);
        let expected = [
            ("w0=http://d:8000", Role::Generate, None),
            ("p0=http://p:8000", Role::Prefill, None),
            ("a=http://p2:9", Role::Prefill, Some(7_000)),
        ];
        assert_eq!(told, Ok(expected.map(|(name, role, port)| (name.to_owned(), role, port)).to_vec()));
        for (list, prefill, wrong) in [
            (vec![], vec!["p"], "none to generate"),
            (vec!["grpc://d"], vec!["p"], "over HTTP"),
            (vec!["d"], vec!["grpc://p"], "over HTTP"),
            (vec!["d"], vec!["p?bootstrap_port=x"], "8998"),
            (vec!["d"], vec!["p:1?x=1"], "more than host and port"),
            (vec!["p0=d"], vec!["p"], "two workers"),
        ] {
            let errors = fleet(&list, &prefill).unwrap_err();
            assert!(errors.len() == 1 && errors[0].contains(wrong), "{errors:?}");
        }
    }
}
