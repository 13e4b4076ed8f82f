//! What no single knob can know of itself: from [`Settings`] to a [`Config`] that holds together, or all that is wrong.

use std::net::SocketAddr;
use std::time::Duration;

use router_core::{WorkerSpec, policy};

use super::files::Files;
use super::replicas::{NamedReplicas, parse_replicas};
use super::workers::{Named, parse_fleet};
use super::{Config, ConfigErrors, Settings, model_aliases, model_timeouts};
use crate::discovery::kubernetes::api::ApiAddress;
use crate::spans::collector::CollectorAddress;

/// A worker that is down is asked at least this often.
const LONGEST_PROBE_INTERVAL_DOWN: Duration = Duration::from_millis(500);

/// An answer takes an engine some milliseconds.
const SHORTEST_ENGINE_LOAD: Duration = Duration::from_millis(100);

/// Workers that a gateway is told of beside the one that is picked: more than that do not fail at once.
const MOST_FALLBACKS: usize = 16;

/// The words that `--log-level` may be.
const LOG_LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
/// What such a word is about.
const OUR_CRATES: [&str; 6] =
    ["router", "router_core", "roundhouse_types", "roundhouse_text", "worker", "worker_core"];

impl Settings {
    /// The filter that the log is to have. A word is about our own crates: libraries, which would tell of every frame and
    /// header, say no more than warnings.
    #[must_use]
    pub fn log_filter(&self) -> String {
        let level = self.log_level.as_str();
        if !LOG_LEVELS.contains(&level) {
            return self.log_level.clone();
        }
        let libraries = if matches!(level, "off" | "error") { level } else { "warn" };
        let ours = OUR_CRATES.map(|name| format!("{name}={level}"));
        format!("{libraries},{}", ours.join(","))
    }

    /// A filter would take any word for the name of a library.
    fn log_level_is_known(&self) -> bool {
        LOG_LEVELS.contains(&self.log_level.as_str())
            || (self.log_level.contains('=')
                && tracing_subscriber::EnvFilter::try_new(&self.log_level).is_ok())
    }

    /// Where clients are served.
    #[must_use]
    pub fn listen(&self) -> SocketAddr {
        SocketAddr::new(self.host, self.port)
    }

    /// Checks what no single knob can know of itself.
    ///
    /// # Errors
    /// All that is wrong, one line each.
    pub fn check(self) -> Result<Config, ConfigErrors> {
        let mut errors = Vec::new();
        if policy::by_name(&self.policy).is_none() {
            let known: Vec<_> = policy::policies().map(|(name, _)| name).collect();
            errors.push(format!("policy: no policy {:?}; there are {}", self.policy, known.join(", ")));
        }
        let named = parse_fleet(&self.workers, &self.prefill, &mut errors);
        if !self.prefill.is_empty() && !self.prefill_protocol.generates_alone() {
            errors.extend(
                named.only_as_vllm().map(|name| {
                    format!("prefill-protocol: {name} hands prompts over as vLLM does; write vllm")
                }),
            );
        }
        let Named { workers, sources } = named;
        let NamedReplicas { addresses: replicas, sources: replica_sources } =
            parse_replicas(&self, &mut errors);
        let kubernetes_api = self.kubernetes_api.as_deref().and_then(|text| {
            let parsed = ApiAddress::parse(text);
            parsed.map_err(|error| errors.push(format!("kubernetes-api: {error}"))).ok()
        });
        let otlp_traces = self.otlp_traces_endpoint.as_deref().and_then(|text| {
            let parsed = CollectorAddress::parse(text);
            parsed.map_err(|error| errors.push(format!("otlp-traces-endpoint: {error}"))).ok()
        });
        if self.otlp_traces_share.share().is_some_and(|share| share > 1.0) {
            errors.push("otlp-traces-share: must be from 0% to 100%".to_owned());
        }
        let model_timeouts = model_timeouts::parse_model_timeouts(&self.model_timeouts, &mut errors);
        let model_aliases = model_aliases::parse_model_aliases(&self.model_aliases, &mut errors);
        let admin_listen = self.check_listeners(&mut errors);
        let files = Files::open(&self, &mut errors);
        self.check_probes(&mut errors);
        self.check_gateways(&workers, &mut errors);
        for (name, value) in [("threads", self.threads), ("max-in-flight", Some(self.max_in_flight))] {
            if value == Some(0) {
                errors.push(format!("{name}: must be at least 1"));
            }
        }
        self.check_clients(&mut errors);
        for (name, header) in [
            ("session-header", &self.session_header),
            ("priority-header", &self.priority_header),
            ("tenant-header", &self.tenant_header),
        ] {
            if http::HeaderName::try_from(header).is_err() {
                errors.push(format!("{name}: {header:?} is no header name"));
            }
        }
        if self.background_load.share().is_some_and(|share| share <= 0.0 || share > 1.0) {
            errors.push("background-load: must be more than 0% and at most 100%, or off".to_owned());
        }
        if let Some(file) = &self.prefix_state_file {
            let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty());
            if folder.is_some_and(|folder| !folder.is_dir()) || file.is_dir() {
                errors.push(format!(
                    "prefix-state-file: {} is no file in a folder that is there",
                    file.display()
                ));
            }
        }
        if !self.log_level_is_known() {
            errors.push(format!(
                "log-level: {:?} is no filter; write {} or a filter such as router=debug",
                self.log_level,
                LOG_LEVELS.join(", ")
            ));
        }
        if errors.is_empty() {
            let Files { keys, worker_keys, worker_authorities, prefix_seed, replica_key } = files;
            let replica_key = replica_key.filter(|_| self.replica_listen.is_some());
            Ok(Config {
                settings: self,
                workers,
                sources,
                replicas,
                replica_sources,
                replica_key,
                kubernetes_api,
                otlp_traces,
                admin_listen,
                keys,
                worker_keys,
                worker_authorities,
                prefix_seed,
                model_timeouts,
                model_aliases,
            })
        } else {
            Err(ConfigErrors(errors))
        }
    }

    /// What gateways cannot be told to send to.
    fn check_gateways(&self, workers: &[WorkerSpec], errors: &mut Vec<String>) {
        if self.gateway_fallbacks > MOST_FALLBACKS {
            errors
                .push(format!("gateway-fallbacks: at most {MOST_FALLBACKS}, not {}", self.gateway_fallbacks));
        }
        let is_http = |worker: &&WorkerSpec| {
            !["grpc://", "embedded:"].iter().any(|scheme| worker.address.starts_with(scheme))
        };
        if self.gateway_listen.is_some()
            && let Some(worker) = workers.iter().find(|worker| !is_http(worker))
        {
            let (id, address) = (worker.id.as_str(), &worker.address);
            errors.push(format!(
                "gateway-listen: gateways send to workers that speak HTTP; {id} is {address} and would have to be http://HOST:PORT"
            ));
        }
    }

    fn check_probes(&self, errors: &mut Vec<String>) {
        if self.probe_interval_down > LONGEST_PROBE_INTERVAL_DOWN {
            let (given, most) = (self.probe_interval_down, LONGEST_PROBE_INTERVAL_DOWN);
            errors.push(format!("probe-interval-down: {given:?} is more than {most:?}"));
        }
        if self.engine_load.limit().is_some_and(|every| every < SHORTEST_ENGINE_LOAD) {
            errors.push(format!("engine-load: at least {SHORTEST_ENGINE_LOAD:?}, or off"));
        }
        let path = &self.probe_path;
        if !path.starts_with('/') || path.parse::<http::uri::PathAndQuery>().is_err() {
            errors.push(format!("probe-path: {path:?} is no path; write one such as /health"));
        }
    }

    fn check_clients(&self, errors: &mut Vec<String>) {
        match (&self.tls_cert, &self.tls_key) {
            (Some(_), None) => errors.push("tls-cert: needs tls-key beside it".to_owned()),
            (None, Some(_)) => errors.push("tls-key: needs tls-cert beside it".to_owned()),
            _ => {}
        }
        if !(1 << 10..=16 << 20).contains(&self.max_header_bytes) {
            errors.push("max-header-bytes: must be from 1KiB to 16MiB".to_owned());
        }
        if self.max_connections == 0 {
            errors.push("max-connections: must be at least 1".to_owned());
        }
        if self.max_http2_streams == 0 {
            errors.push("max-http2-streams: must be at least 1".to_owned());
        }
    }

    fn check_listeners(&self, errors: &mut Vec<String>) -> Option<SocketAddr> {
        let admin = match self.admin_listen.as_deref() {
            Some("off") => None,
            Some(address) => {
                let parsed = address.parse::<SocketAddr>().ok();
                if parsed.is_none() {
                    errors.push(format!("admin-listen: {address:?} is neither ADDRESS:PORT nor off"));
                }
                parsed
            }
            None => match self.port.checked_add(1) {
                Some(port) if self.port != 0 => Some(SocketAddr::from(([127, 0, 0, 1], port))),
                // Port 0 asks for any free port, and so does the listener beside it.
                _ if self.port == 0 => Some(SocketAddr::from(([127, 0, 0, 1], 0))),
                _ => {
                    errors.push(
                        "port: 65535 leaves no port for the admin listener; set admin-listen".to_owned(),
                    );
                    None
                }
            },
        };
        if let (Some(admin), None) = (admin.filter(|admin| !admin.ip().is_loopback()), &self.admin_key_file) {
            // It can remove workers.
            errors.push(format!("admin-listen: {admin} is not loopback; that wants an --admin-key-file"));
        }
        let named = [
            ("port", Some(self.listen())),
            ("admin-listen", admin),
            ("metrics-listen", self.metrics_listen),
            ("replica-listen", self.replica_listen),
            ("gateway-listen", self.gateway_listen),
        ];
        for (at, (name, address)) in named.iter().enumerate() {
            for (other_name, other) in &named[..at] {
                if let (Some(one), Some(two)) = (address, other)
                    && one == two
                    && one.port() != 0
                {
                    errors.push(format!("{name}: {one} is taken by {other_name}"));
                }
            }
        }
        admin
    }
}
