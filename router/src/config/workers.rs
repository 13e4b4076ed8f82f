//! What an operator writes for a worker, and what it means.

use http::Uri;
use router_core::{Role, WorkerId, WorkerSpec};

use super::options::Options;
use super::sources::{names_source, parse_source};
use crate::desired::is_same_engine;
use crate::discovery::source::SourceSpec;

/// Where engines listen unless told otherwise.
const DEFAULT_PORT: u16 = 8_000;
/// Where our own worker listens unless told otherwise; nobody else speaks this gRPC.
const WORKER_PORT: u16 = 8_001;
/// Schemes and the ports they mean: a URL without one means its scheme's own, a bare host an engine's.
const SCHEMES: [(&str, u16); 5] =
    [("", DEFAULT_PORT), ("http", 80), ("https", 443), ("h2c", 80), ("grpc", WORKER_PORT)];
/// What runs when no worker is named.
const DEFAULT_WORKERS: [&str; 2] = ["embedded:builtin", "embedded:builtin"];

/// The workers that are named, and the sources of others.
#[derive(Default)]
pub(super) struct Named {
    pub(super) workers: Vec<WorkerSpec>,
    pub(super) sources: Vec<SourceSpec>,
}

/// Reads all workers and sources, of those that generate and of those that compute prompts for them; what is wrong goes to `errors`.
pub(super) fn parse_fleet(list: &[String], prefill: &[String], errors: &mut Vec<String>) -> Named {
    let defaults = DEFAULT_WORKERS.map(str::to_owned);
    let list = if list.is_empty() && prefill.is_empty() { &defaults[..] } else { list };
    if list.is_empty() {
        errors.push("workers: there are none to generate from what the prefill workers compute".to_owned());
    }
    let mut named = Named::default();
    for (key, role, list) in [("workers", Role::Generate, list), ("prefill", Role::Prefill, prefill)] {
        for (index, text) in list.iter().enumerate() {
            let added = named.add(text, (role, index));
            errors.extend(added.err().map(|error| format!("{key}: {error}")));
        }
    }
    if !prefill.is_empty() {
        // Those that compute prompts have been looked at one by one.
        errors
            .extend(named.cannot_hand_over().map(|address| format!("workers: {address} {CANNOT_HAND_OVER}")));
    }
    named
}

impl Named {
    /// Adds the `index`-th of those with a role.
    fn add(&mut self, text: &str, (role, index): (Role, usize)) -> Result<(), String> {
        if names_source(text) {
            let source = parse_source(text, role)?;
            if self.sources.iter().any(|other| other.name == source.name) {
                return Err(format!("{} is named twice", source.name));
            }
            self.sources.push(source);
            return Ok(());
        }
        let specs = match role {
            Role::Generate => parse_worker(text, &format!("w{index}"))?,
            Role::Prefill => parse_prefill_worker(text, &format!("p{index}"))?,
        };
        if let Some(twice) = specs.iter().find(|spec| self.workers.iter().any(|other| other.id == spec.id)) {
            return Err(format!("two workers are named {}", twice.id));
        }
        let others = |spec: &WorkerSpec| self.workers.iter().find(|other| is_same_engine(spec, other));
        if let Some((spec, other)) = specs.iter().find_map(|spec| Some((spec, others(spec)?))) {
            return Err(format!("{} and {} are both at {}; name it once", other.id, spec.id, spec.address));
        }
        self.workers.extend(specs);
        Ok(())
    }

    /// Those who cannot go on from what another worker has computed.
    fn cannot_hand_over(&self) -> impl Iterator<Item = &str> {
        self.workers.iter().filter(|spec| !hands_over(spec)).map(|spec| &*spec.address)
    }

    /// Those who do it in vLLM's way only: our own.
    pub(super) fn only_as_vllm(&self) -> impl Iterator<Item = &str> {
        let workers = self.workers.iter().map(|spec| &*spec.address).filter(|at| at.starts_with("grpc:"));
        let sources = self.sources.iter().filter(|source| source.workers.scheme == "grpc");
        workers.chain(sources.map(|source| &*source.name))
    }
}

/// Reads a worker that computes prompts: as [`parse_worker`], and `bootstrap_port=PORT` may be among what follows.
///
/// # Errors
/// What is wrong, and what would be right.
pub fn parse_prefill_worker(text: &str, default_id: &str) -> Result<Vec<WorkerSpec>, String> {
    let (text, options) = Options::split(text, Role::Prefill)?;
    let spec = parse_endpoint(text, default_id, options)?;
    if !hands_over(&spec) {
        return Err(format!("{:?} {CANNOT_HAND_OVER}", spec.address));
    }
    Ok(options.workers(WorkerSpec { role: Role::Prefill, ..spec }))
}

const CANNOT_HAND_OVER: &str =
    "cannot hand prompts over, since nobody reaches it; start `worker --kv-transfer on` beside the router";

/// Whether other workers can reach it.
fn hands_over(spec: &WorkerSpec) -> bool {
    !spec.address.starts_with("embedded:")
}

/// Reads one worker: `[ID=]SCHEME://host[:port]` with `http`, `https`, `h2c` (HTTP/2 in plain text) or `grpc` (a Roundhouse
/// worker, in plain text), `[ID=]host[:port]` or `[ID=]embedded:MODEL`. Behind what speaks HTTP `?dp=RANKS` may follow, and `&dp_by=…`: then
/// each data-parallel rank there is a worker.
///
/// # Errors
/// What is wrong, and what would be right.
pub fn parse_worker(text: &str, default_id: &str) -> Result<Vec<WorkerSpec>, String> {
    let (text, options) = Options::split(text, Role::Generate)?;
    Ok(options.workers(parse_endpoint(text, default_id, options)?))
}

/// Reads what stands in front of the options.
fn parse_endpoint(text: &str, default_id: &str, options: Options) -> Result<WorkerSpec, String> {
    let (id, address) = split_id(text);
    let id = id.unwrap_or(default_id);
    if !is_worker_id(id) {
        return Err(format!("{id:?} is no id; take up to 64 letters, digits, '-', '_' and '.'"));
    }
    let address = normalise(address)?;
    options.check_scheme(address.split(':').next().unwrap_or_default(), text)?;
    Ok(WorkerSpec::new(WorkerId::new(id), address))
}

/// Takes `ID=` off, if it is there.
pub(super) fn split_id(text: &str) -> (Option<&str>, &str) {
    let text = text.trim();
    match text.split_once('=') {
        Some((id, address)) if !id.contains(['/', ':']) => (Some(id.trim()), address.trim()),
        _ => (None, text),
    }
}

/// Whether a worker can have this name.
#[must_use]
pub fn is_worker_id(id: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    !id.is_empty() && id.len() <= 64 && id.chars().all(is_plain)
}

/// The port that a scheme means.
pub(super) fn usual_port(scheme: &str) -> u16 {
    SCHEMES.iter().find(|(known, _)| *known == scheme).map_or(DEFAULT_PORT, |(_, port)| *port)
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
        parse_worker(text, "w0").map(|specs| specs[0].address.clone())
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
        let specs = parse_worker("gpu-0=10.0.0.1:8000", "w0").unwrap();
        assert_eq!((specs[0].id.as_str(), specs[0].address.as_str()), ("gpu-0", "http://10.0.0.1:8000"));
        assert_eq!(parse_worker("a:1", "w7").unwrap()[0].id.as_str(), "w7");
        assert!(parse_worker("a b=host", "w0").is_err());
        assert!(parse_worker("=host", "w0").is_err());
    }

    #[test]
    fn errors_name_the_valid_forms() {
        for bad in ["", "http://", "ftp://a", "grpcs://a:1", "a:0", "a:99999", "a:", "a/b", "u@a"] {
            let error = address(bad).unwrap_err();
            assert!(error.contains("embedded:MODEL"), "{bad}: {error}");
        }
        assert!(address("embedded:").is_err());
        assert!(address("http://a?b").unwrap_err().contains("dp=RANKS"));
    }

    #[test]
    fn each_data_parallel_rank_is_a_worker() {
        for (text, id) in
            [("w1:9?dp=2", "w0"), ("a=w1:9?dp=2", "a"), ("a=http://w1:9/?dp=2&dp_by=header", "a")]
        {
            let told: Vec<_> = parse_worker(text, "w0")
                .unwrap()
                .into_iter()
                .map(|spec| (spec.id.to_string(), spec.address, spec.dp_rank.unwrap().number))
                .collect();
            let address = || "http://w1:9".to_owned();
            assert_eq!(told, [(format!("{id}-dp0"), address(), 0), (format!("{id}-dp1"), address(), 1)]);
        }
        for text in ["grpc://a?dp=2", "embedded:builtin?dp=2"] {
            let error = parse_worker(text, "w0").unwrap_err();
            assert!(error.contains("engines over HTTP"), "{error}");
        }
    }

    #[test]
    fn every_error_of_a_list_is_reported() {
        let list = ["a", "ftp://b", "x=c", "x=d"].map(str::to_owned);
        let mut errors = Vec::new();
        let workers = parse_fleet(&list, &[], &mut errors).workers;
        assert_eq!(workers.len(), 2);
        assert_eq!(errors.len(), 2, "{errors:?}");
    }

    type Told = (String, Role, Option<u16>);

    fn fleet(list: &[&str], prefill: &[&str]) -> Result<Vec<Told>, Vec<String>> {
        let owned = |list: &[&str]| list.iter().map(|&text| text.to_owned()).collect::<Vec<_>>();
        let mut errors = Vec::new();
        let workers = parse_fleet(&owned(list), &owned(prefill), &mut errors).workers;
        let told =
            |spec: WorkerSpec| (format!("{}={}", spec.id, spec.address), spec.role, spec.bootstrap_port);
        if errors.is_empty() { Ok(workers.into_iter().map(told).collect()) } else { Err(errors) }
    }

    #[test]
    fn workers_and_sources_of_workers_stand_side_by_side() {
        let list = ["a", "k8s://ml/d", "dns://e"].map(str::to_owned);
        let mut errors = Vec::new();
        let named = parse_fleet(&list, &["k8s://p?bootstrap_port=7".to_owned()], &mut errors);
        assert_eq!((named.workers.len(), errors.len()), (1, 0), "{errors:?}");
        let sources: Vec<_> =
            named.sources.iter().map(|source| (&*source.name, source.workers.role)).collect();
        let expected =
            [("k8s://ml/d", Role::Generate), ("dns://e", Role::Generate), ("k8s://p", Role::Prefill)];
        assert_eq!(sources, expected);
        // A source is enough: no embedded workers are added.
        let named = parse_fleet(&["k8s://d".to_owned()], &[], &mut errors);
        assert!(named.workers.is_empty() && errors.is_empty());
    }

    #[test]
    fn our_own_workers_hand_prompts_over_in_one_way() {
        let list = ["grpc://d", "http://e", "k8s+grpc://d"].map(str::to_owned);
        let mut errors = Vec::new();
        let named = parse_fleet(&list, &["grpc://p".to_owned()], &mut errors);
        assert!(errors.is_empty(), "{errors:?}");
        let only: Vec<&str> = named.only_as_vllm().collect();
        assert_eq!(only, ["grpc://d:8001", "grpc://p:8001", "k8s+grpc://d"]);
    }

    #[test]
    fn prefill_workers_stand_beside_those_that_generate() {
        let told =
            fleet(&["d"], &["p", "a=http://p2:9?bootstrap_port=7000", "p3:9?bootstrap_port=7000&dp=2"]);
        let expected = [
            ("w0=http://d:8000", Role::Generate, None),
            ("p0=http://p:8000", Role::Prefill, None),
            ("a=http://p2:9", Role::Prefill, Some(7_000)),
            ("p2-dp0=http://p3:9", Role::Prefill, Some(7_000)),
            ("p2-dp1=http://p3:9", Role::Prefill, Some(7_000)),
        ];
        assert!(fleet(&["d"], &["d"]).is_ok(), "an engine may do both");
        assert_eq!(told, Ok(expected.map(|(name, role, port)| (name.to_owned(), role, port)).to_vec()));
        for (list, prefill, wrong) in [
            (vec![], vec!["p"], "none to generate"),
            (vec!["embedded:builtin"], vec!["p"], "worker --kv-transfer on"),
            (vec!["d"], vec!["embedded:builtin"], "worker --kv-transfer on"),
            (vec!["d"], vec!["p?bootstrap_port=x"], "8998"),
            (vec!["d"], vec!["p:1?x=1"], "more than host and port"),
            (vec!["p0=d"], vec!["p"], "two workers"),
            (vec!["d?dp=2", "w0-dp1=e"], vec!["p"], "two workers"),
            (vec!["d"], vec!["grpc://p?dp=2"], "over HTTP"),
            (vec!["k8s://d"], vec!["k8s://d"], "twice"),
            (vec!["d", "a=http://d:8000/"], vec!["p"], "w0 and a are both at http://d:8000"),
            (vec!["d", "d?dp=2"], vec!["p"], "both at"),
            (vec!["d?dp=2", "x=d?dp=3"], vec!["p"], "both at"),
        ] {
            let errors = fleet(&list, &prefill).unwrap_err();
            assert!(errors.len() == 1 && errors[0].contains(wrong), "{errors:?}");
        }
    }
}
