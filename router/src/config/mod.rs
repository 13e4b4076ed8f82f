//! Configuration: every knob is declared once, in [`Settings`]; the same declaration is the flag, the key of the YAML
//! file, the default and the line of `--help`.

mod check;
mod file;
mod files;
mod model_aliases;
mod model_timeouts;
mod options;
mod replicas;
mod sources;
mod units;
mod workers;

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use router_core::WorkerSpec;
use rustls::pki_types::CertificateDer;

pub use model_aliases::ModelAlias;
pub use model_timeouts::ModelTimeouts;
pub use units::{Share, TimeLimit};
use units::{
    parse_bytes, parse_duration, parse_duration_or_zero, parse_ratio, parse_share, parse_switch,
    parse_time_limit,
};
pub use workers::{is_worker_id, parse_prefill_worker, parse_worker};

use crate::disaggregation::PrefillProtocol;
use crate::discovery::kubernetes::api::{ApiAddress, CREDENTIALS};
use crate::discovery::source::SourceSpec;
use crate::keys::{Keys, WorkerKeys};
use crate::precedence::EnginePriority;
use crate::spans::collector::CollectorAddress;

/// All knobs of the router.
#[derive(Clone, Debug, clap::Args)]
pub struct Settings {
    /// Workers, separated by commas: http://, https://, h2c:// or (Roundhouse workers) grpc:// URLs, hosts (http, port 8000),
    /// host:port, or embedded:MODEL; `id=` in front names one. Or where to find them, as they come and go:
    /// k8s://[NAMESPACE/]SERVICE[:PORT], the pods of a Kubernetes Service by its EndpointSlices, or dns://NAME[:PORT], all addresses of a
    /// name; k8s+grpc:// and so on for what is not http. Behind what speaks HTTP `?dp=8` makes a worker of each of an engine's 8
    /// data-parallel ranks, told by X-data-parallel-rank, and with `&dp_by=routed_dp_rank` by that member of the body as well (SGLang).
    /// Without any, two embedded workers run the built-in model
    #[arg(long, help_heading = "Workers", value_delimiter = ',', value_name = "LIST")]
    pub workers: Vec<String>,

    /// Workers that compute prompts for --workers, which then generate from them; each as in --workers, over HTTP. SGLang's may say where their
    /// bootstrap server is: http://host:port?bootstrap_port=8998
    #[arg(long, help_heading = "Workers", value_delimiter = ',', value_name = "LIST")]
    pub prefill: Vec<String>,

    /// Routers beside this one, in front of the same workers: where they listen for it (--replica-listen), host:port each, dns://NAME:PORT or
    /// k8s://[NAMESPACE/]SERVICE:PORT; this one may be among them. They tell each other what they send where, so that each decides as one
    /// alone would. Wants the same --prefix-seed-file for all, and workers under the same addresses
    #[arg(long, help_heading = "Several routers", value_delimiter = ',', value_name = "LIST")]
    pub replicas: Vec<String>,

    /// Where this router listens for --replicas: what they say is no text, and sealed, but not encrypted. A name with several addresses is for dns://
    #[arg(long, help_heading = "Several routers", value_name = "ADDRESS")]
    pub replica_listen: Option<SocketAddr>,

    /// Where the Kubernetes API is, for k8s:// [default: where it is for the router's own pod]. Over http:// nothing secret is sent:
    /// http://127.0.0.1:8001 is where `kubectl proxy` has it
    #[arg(long, help_heading = "Workers", value_name = "URL")]
    pub kubernetes_api: Option<String>,

    /// Directory of `token`, `ca.crt` and `namespace` for the Kubernetes API; read again for each connection, since tokens run out
    #[arg(long, help_heading = "Workers", default_value = CREDENTIALS, value_name = "DIR")]
    pub kubernetes_credentials: PathBuf,

    /// How engines hand prompts over from --prefill to --workers: vllm (KV connectors such as NIXL; the router decides for each request
    /// whether that is worth it) or sglang (all of them are)
    #[arg(long, help_heading = "Workers", default_value = "vllm", value_name = "vllm|sglang")]
    pub prefill_protocol: PrefillProtocol,

    /// With --prefill and vLLM's engines: what a second counts that answers under way stand still, against a second that a first token is late.
    /// More of it has more prompts computed elsewhere, for answers that flow more evenly and begin later
    #[arg(long, help_heading = "Workers", default_value = "1", value_parser = parse_ratio, value_name = "TIMES")]
    pub split_decode_weight: f64,

    /// Who gets which request: prefix_aware, least_load, power_of_two, round_robin, random or consistent_hash; or, for
    /// comparison, what other routers do: sglang_cache_aware, sglang_cache_aware_old, kv_aware, dynamo, llm_d, llm_d_valve, aibrix,
    /// pstack_prefix, pstack_session or prefix_hash
    #[arg(long, help_heading = "Routing", default_value = "prefix_aware", value_name = "NAME")]
    pub policy: String,

    /// Whether requests wait in the router, in line, while the worker picked for them has enough to compute (on or off): until then they can
    /// still go elsewhere, and short prompts go before long ones that came with them. Only prefix_aware does; `off` where
    /// workers themselves order what waits, by priorities for instance
    #[arg(long, help_heading = "Routing", default_value = "on", value_parser = parse_switch, action = clap::ArgAction::Set, value_name = "SWITCH")]
    pub late_binding: bool,

    /// Address to serve clients on. Loopback, until an operator decides who may reach it
    #[arg(long, help_heading = "Listeners, keys and TLS", default_value = "127.0.0.1")]
    pub host: IpAddr,

    /// Port to serve clients on, the one SGLang's routers use
    #[arg(long, help_heading = "Listeners, keys and TLS", default_value_t = 30_000)]
    pub port: u16,

    /// Admin listener, ADDRESS:PORT or `off` [default: 127.0.0.1, the port after --port]
    #[arg(long, help_heading = "Listeners, keys and TLS", value_name = "ADDRESS")]
    pub admin_listen: Option<String>,

    /// File of keys, one a line, that operators must send as `Authorization: Bearer KEY`. Without, the admin listener is
    /// refused anywhere but on loopback
    #[arg(long, help_heading = "Listeners, keys and TLS", value_name = "FILE")]
    pub admin_key_file: Option<PathBuf>,

    /// A listener for /metrics alone, for scrapers that must not reach the admin listener
    #[arg(long, help_heading = "Listeners, keys and TLS", value_name = "ADDRESS")]
    pub metrics_listen: Option<SocketAddr>,

    /// Where gateways ask this router which worker a request of theirs is to go to, by Envoy's external processing (ext_proc), as endpoint pickers of
    /// Kubernetes' Gateway API Inference Extension are asked. With the TLS of --tls-cert, if there is one
    #[arg(long, help_heading = "Listeners, keys and TLS", value_name = "ADDRESS")]
    pub gateway_listen: Option<SocketAddr>,

    /// Further workers that a gateway is told of with each request, to go on to where it cannot use the first. Only for gateways that take a list, such as
    /// Envoy with the load balancer override_host, and retry; and that tell who has served (response_attributes: upstream.address)
    #[arg(long, help_heading = "Listeners, keys and TLS", default_value_t = 0, value_name = "COUNT")]
    pub gateway_fallbacks: usize,

    /// YAML file with these same keys; flags win over it
    #[arg(long, help_heading = "Process", value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Threads that serve clients [default: all cores]
    #[arg(long, help_heading = "Process")]
    pub threads: Option<usize>,

    /// Largest request body. 64 MiB holds a few pictures beside the longest prompt
    #[arg(long, help_heading = "Limits", default_value = "64MiB", value_parser = parse_bytes, value_name = "SIZE")]
    pub max_body_bytes: usize,

    /// Memory of all request bodies together; those beyond are answered 429. A body is held until its reply begins, and of a stream to its end while half of this is free, so this is
    /// some 5,000 prompts of 200 KB whose first token is awaited. An eighth is kept for bodies up to 1 MiB
    #[arg(long, help_heading = "Limits", default_value = "1GiB", value_parser = parse_bytes, value_name = "SIZE")]
    pub max_body_memory: usize,

    /// Requests in flight at once; more wait in the queue, if there is one, or are answered 429
    #[arg(long, help_heading = "Limits", default_value_t = 65_536)]
    pub max_in_flight: usize,

    /// Requests that may wait for a place among those in flight, first come first served. None unless told otherwise:
    /// clients with another router to go to should hear at once
    #[arg(long, help_heading = "Limits", default_value_t = 0)]
    pub max_queue: usize,

    /// Time that a request may wait in the queue before it is answered 429. Most clients give up soon after
    #[arg(long, help_heading = "Limits", default_value = "10s", value_parser = parse_duration, value_name = "TIME")]
    pub queue_timeout: Duration,

    /// Time for a client to send its request head, again for its body, and to take the next bytes of a reply
    #[arg(long, help_heading = "Limits", default_value = "60s", value_parser = parse_duration, value_name = "TIME")]
    pub client_timeout: Duration,

    /// Certificate chain for TLS on the listener, in PEM; wants --tls-key. Read again when the file changes
    #[arg(long, help_heading = "Listeners, keys and TLS", value_name = "FILE")]
    pub tls_cert: Option<PathBuf>,

    /// Private key of --tls-cert, in PEM
    #[arg(long, help_heading = "Listeners, keys and TLS", value_name = "FILE")]
    pub tls_key: Option<PathBuf>,

    /// Client connections at once; more are answered 503 and closed (with TLS only closed). Each may need a second file for its worker
    #[arg(long, help_heading = "Limits", default_value_t = 65_536)]
    pub max_connections: usize,

    /// Largest request head, and list of headers in HTTP/2. 64 KiB holds several long tokens and cookies
    #[arg(long, help_heading = "Limits", default_value = "64KiB", value_parser = parse_bytes, value_name = "SIZE")]
    pub max_header_bytes: usize,

    /// Streams at once on one HTTP/2 connection
    #[arg(long, help_heading = "Limits", default_value_t = 256)]
    pub max_http2_streams: u32,

    /// Time that a connection may be open without a request. Above the 60 s of most balancers, which should be first to close
    #[arg(long, help_heading = "Limits", default_value = "75s", value_parser = parse_duration, value_name = "TIME")]
    pub keep_alive_timeout: Duration,

    /// Time for a connection to a worker to be made. A worker that takes longer is as good as gone
    #[arg(long, help_heading = "Failures", default_value = "5s", value_parser = parse_duration, value_name = "TIME")]
    pub connect_timeout: Duration,

    /// PEM file with certificate authorities to trust for https:// workers, besides the system's
    #[arg(long, help_heading = "Workers", value_name = "FILE")]
    pub worker_ca: Option<PathBuf>,

    /// Time for the first byte of a reply, or off. Its expiry is a 504 and is not tried elsewhere, unless there was no connection yet.
    /// Off, since a long prompt takes long, and must not run twice
    #[arg(long, help_heading = "Failures", default_value = "off", value_parser = parse_time_limit, value_name = "TIME|off")]
    pub first_byte_timeout: TimeLimit,

    /// When a stream whose answer has not begun does so all the same, with a comment, and how often more of them follow; or off. Set it below the time
    /// after which whatever is before the router gives up on a silent connection. A failure after that is an event, and has no status
    #[arg(long, help_heading = "Failures", default_value = "off", value_parser = parse_time_limit, value_name = "TIME|off")]
    pub stream_keep_alive: TimeLimit,

    /// File of keys, one a line, of which clients must send one as `Authorization: Bearer KEY`; read again when it changes
    #[arg(long, help_heading = "Listeners, keys and TLS", value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,

    /// File with the key to show to all workers, or lines `ID=KEY`. A client's own goes first, unless --api-key-file is set
    #[arg(long, help_heading = "Workers", value_name = "FILE")]
    pub worker_api_key_file: Option<PathBuf>,

    /// Time that a reply may stand still between two pieces of it. Long, since an engine under load may retract
    #[arg(long, help_heading = "Failures", default_value = "300s", value_parser = parse_duration, value_name = "TIME")]
    pub idle_timeout: Duration,

    /// Time after which an engine counts as hanging that has requests, generates nothing for anybody, nor a token that it is asked for, and counts no tokens
    /// either, though its server may answer probes: it is out until it generates again, and what it has is tried elsewhere, if others are well. Four times what
    /// its longest prompt is expected to take comes on top. Or off
    #[arg(long, help_heading = "Failures", default_value = "30s", value_parser = parse_time_limit, value_name = "TIME|off")]
    pub stall_timeout: TimeLimit,

    /// Time for a request once its body is in, over all attempts and to the end of the reply
    #[arg(long, help_heading = "Failures", default_value = "1800s", value_parser = parse_duration, value_name = "TIME")]
    pub request_timeout: Duration,

    /// Time limits of single models, separated by commas: `MODEL first-byte=30s idle=60s total=10m`, each limit in place
    /// of the one for all models, and any of them left out
    #[arg(long, help_heading = "Failures", value_delimiter = ',', value_name = "LIST")]
    pub model_timeouts: Vec<String>,

    /// Attempts on other workers after the first one failed before its first byte, and after a stream that is gone on with broke off
    #[arg(long, help_heading = "Failures", default_value_t = 3)]
    pub max_retries: usize,

    /// Retries allowed for each request of the last 10 s, or off for any number. 10 a second and those who were in flight
    /// at a worker that died come on top. A fifth saves what can be saved, and adds little to a fleet that is failing
    #[arg(long, help_heading = "Failures", default_value = "20%", value_parser = parse_share, value_name = "SHARE|off")]
    pub retry_budget: Share,

    /// Whether a stream that breaks off is gone on with by another worker, what has been generated being part of the prompt there: on or off. Of chats
    /// only by engines that say of their models that they are vLLM's, SGLang's or Roundhouse's
    #[arg(long, help_heading = "Failures", default_value = "on", value_name = "on|off")]
    pub continue_streams: Switch,

    /// Path of the health probe. A worker that answers 404 or 405 there is well, since it has none
    #[arg(long, help_heading = "Failures", default_value = "/health", value_name = "PATH")]
    pub probe_path: String,

    /// Time between two health probes of a worker that is up
    #[arg(long, help_heading = "Failures", default_value = "2s", value_parser = parse_duration, value_name = "TIME")]
    pub probe_interval: Duration,

    /// Time for a probe to be answered; two that are not, one after the other, take a worker out
    #[arg(long, help_heading = "Failures", default_value = "5s", value_parser = parse_duration, value_name = "TIME")]
    pub probe_timeout: Duration,

    /// Time between two probes of a worker that is down, 500ms at most: it is to serve again soon after it listens again
    #[arg(long, help_heading = "Failures", default_value = "250ms", value_parser = parse_duration, value_name = "TIME")]
    pub probe_interval_down: Duration,

    /// Time in which a worker that was down gets back its share of requests, from a tenth to all of it, or off. Its
    /// caches are cold, and so may be its code
    #[arg(long, help_heading = "Failures", default_value = "10s", value_parser = parse_time_limit, value_name = "TIME|off")]
    pub slow_start: TimeLimit,

    /// Request header that names a session, for consistent_hash
    #[arg(long, help_heading = "Routing", default_value = "x-session-id", value_name = "NAME")]
    pub session_header: String,

    /// Request header with a priority from -10 to 10, 0 being usual: who has more goes first where requests wait in line, and who has less than 0 is
    /// in the background. It wins over the body's `service_tier`, of which `priority` is 1 and `flex` is -1; a key may have less (--api-key-file)
    #[arg(long, help_heading = "Routing", default_value = "x-request-priority", value_name = "NAME")]
    pub priority_header: String,

    /// Request header that names a tenant, where clients have no keys of their own: tenants go in turn where requests wait. With
    /// x-gateway-inference-fairness-id it is what gateways with an endpoint picker send
    #[arg(long, help_heading = "Routing", default_value = "x-tenant-id", value_name = "NAME")]
    pub tenant_header: String,

    /// How busy requests in the background may make the workers beside others: they wait in the router while those take that much time or more, or
    /// somebody waits for a first token everywhere. More is more tokens and slower answers for all; off: they are like others
    #[arg(long, help_heading = "Routing", default_value = "60%", value_parser = parse_share, value_name = "SHARE|off")]
    pub background_load: Share,

    /// Whether engines are told of priorities, in `priority` of the bodies of completions and chats, where what clients say is left out: off, lower-first
    /// (vLLM with --scheduling-policy priority, and our workers) or higher-first (SGLang with --enable-priority-scheduling). Engines that were not
    /// started so may refuse such requests
    #[arg(
        long,
        help_heading = "Routing",
        default_value = "off",
        value_name = "off|lower-first|higher-first"
    )]
    pub engine_priority: EnginePriority,

    /// Requests that may wait in the background, and no more than half of --max-in-flight; others are answered with 429, and so is each where bodies
    /// hold a quarter of --max-body-memory
    #[arg(long, help_heading = "Limits", default_value_t = 4_096)]
    pub max_background: usize,

    /// Names that clients may ask for in place of a model's, separated by commas: `NAME MODEL`, or `NAME MODEL=95 MODEL=5`, which share its
    /// conversations by these parts. A conversation stays with its model (by session, `user`, or what its user said first) while somebody who
    /// has it can be reached; a model with 0 parts gets what no other can. Replies have the model's own name
    #[arg(long, help_heading = "Routing", value_delimiter = ',', value_name = "LIST")]
    pub model_aliases: Vec<String>,

    /// Whether replies carry x-router-worker and x-router-hit-tokens: on or off
    #[arg(long, help_heading = "Routing", default_value = "on", value_name = "on|off")]
    pub route_headers: Switch,

    /// Memory for the prefix tree; 256 MiB remembers some 2 million blocks, over 100 million tokens of long prompts
    #[arg(long, help_heading = "Routing", default_value = "256MiB", value_parser = parse_bytes, value_name = "SIZE")]
    pub prefix_memory: usize,

    /// File of 16 random bytes or more that seed the hashes of prompts. Routers with the same one see what each other's prompts leave in the
    /// caches of Roundhouse workers; without one, each router draws its own seed, so that nobody can aim for collisions
    #[arg(long, help_heading = "Routing", value_name = "FILE")]
    pub prefix_seed_file: Option<PathBuf>,

    /// File in which this router leaves what it knows of the workers' caches when it is told to end, for the next one that is started with it: within
    /// ten minutes, and with the same --prefix-seed-file, if there is one. Hashes and their seed, no text; only its owner may read it
    #[arg(long, help_heading = "Routing", value_name = "FILE")]
    pub prefix_state_file: Option<PathBuf>,

    /// What workers keep in their hosts' memory of what their KV caches evict (SGLang's hicache-ratio, LMCache, vLLM's KV offloading), in times
    /// what the caches hold. Engines tell the router the size of their caches, and it takes prompts beyond that for forgotten
    #[arg(long, help_heading = "Workers", default_value = "0", value_parser = parse_ratio, value_name = "TIMES")]
    pub kv_host_ratio: f64,

    /// Whether to follow the cache events of engines that publish them (vLLM from 0.32 on, SGLang from 0.5.23 on with --page-size 8 or more, both with
    /// --kv-events-config): on or off. Requests to these get the header x-session-id, or at SGLang session_id in the body, if they have none, by which
    /// the engine's events say whose blocks are stored
    #[arg(long, help_heading = "Workers", default_value = "on", value_name = "on|off")]
    pub engine_events: Switch,

    /// How often to ask engines for their /metrics (and SGLang for /v1/loads), which say how many requests they have that did not come through this router,
    /// and for how many adapters they have places: at least 100ms, or off. One that is slow to answer is asked more rarely, and so is each where
    /// that would be more than a hundred a second
    #[arg(long, help_heading = "Workers", default_value = "5s", value_parser = parse_time_limit, value_name = "TIME|off")]
    pub engine_load: TimeLimit,

    /// Write what passes to this file as a trace for `bench simulate`: times, lengths and which blocks prompts share, no text; an older file
    /// is kept as FILE.old. Off unless given, since hashing all of every prompt costs the policies that read less of it
    #[arg(long, help_heading = "Routing", value_name = "FILE")]
    pub record: Option<PathBuf>,

    /// Collector to send OpenTelemetry traces of requests to, by OTLP over HTTP: http://host:4318, or https:// and a path if it is not /v1/traces. A caller's trace is
    /// gone on with, and engines are told of it. What the collector wants to be shown stands in OTEL_EXPORTER_OTLP_HEADERS
    #[arg(long, help_heading = "Process", value_name = "URL")]
    pub otlp_traces_endpoint: Option<String>,

    /// Of requests that are part of no caller's trace, how many have traces of their own
    #[arg(long, help_heading = "Process", default_value = "100%", value_parser = parse_share, value_name = "SHARE")]
    pub otlp_traces_share: Share,

    /// Time to go on accepting after SIGTERM while /readyz says 503, so that balancers notice
    #[arg(long, help_heading = "Process", default_value = "5s", value_parser = parse_duration_or_zero, value_name = "TIME")]
    pub drain_delay: Duration,

    /// Time for requests in flight to finish after SIGTERM and --drain-delay
    #[arg(long, help_heading = "Process", default_value = "30s", value_parser = parse_duration, value_name = "TIME")]
    pub grace_period: Duration,

    /// What the router is to log of itself: off, error, warn, info, debug or trace; or a filter such as router=debug,h2=info
    #[arg(long, help_heading = "Process", default_value = "info", value_name = "FILTER")]
    pub log_level: String,

    /// How to log: text or json
    #[arg(long, help_heading = "Process", default_value = "text", value_name = "text|json")]
    pub log_format: LogFormat,
}

/// A knob with two positions.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum Switch {
    /// Yes.
    On,
    /// No.
    Off,
}

/// The form of log lines.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One object a line.
    Json,
}

/// Everything that is wrong with a configuration.
#[derive(Debug, thiserror::Error)]
#[error("{}", .0.join("\n"))]
pub struct ConfigErrors(pub Vec<String>);

/// The command line.
#[derive(Debug, clap::Parser)]
#[command(
    name = "router",
    version,
    about = "A cache-aware router in front of LLM engines",
    max_term_width = 100
)]
pub struct Cli {
    /// Something else to do than to serve.
    #[command(subcommand)]
    pub command: Option<Command>,

    /// The knobs.
    #[command(flatten)]
    pub settings: Settings,
}

/// What the router can do besides serving.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Say what is wrong with a configuration file, without starting
    CheckConfig {
        /// The file
        file: PathBuf,
    },
}

/// A configuration that holds together.
#[derive(Clone, Debug)]
pub struct Config {
    /// The knobs as given.
    pub settings: Settings,
    /// The workers to begin with.
    pub workers: Vec<WorkerSpec>,
    /// Where others are found.
    pub sources: Vec<SourceSpec>,
    /// Where the routers beside this one are.
    pub replicas: Vec<String>,
    /// Where those are found that nobody has named.
    pub replica_sources: Vec<SourceSpec>,
    /// By which they know each other.
    pub replica_key: Option<[u8; 32]>,
    /// Where the Kubernetes API is, if that is said.
    pub kubernetes_api: Option<ApiAddress>,
    /// Where traces of requests go, if anywhere.
    pub otlp_traces: Option<CollectorAddress>,
    /// Where the admin listener goes, if anywhere.
    pub admin_listen: Option<SocketAddr>,
    /// Who must show which key.
    pub keys: Keys,
    /// What workers are shown.
    pub worker_keys: WorkerKeys,
    /// Who may sign workers' certificates, besides whom the system trusts.
    pub worker_authorities: Vec<CertificateDer<'static>>,
    /// The seed of prompts' hashes, if routers share one.
    pub prefix_seed: Option<u64>,
    /// Time limits of single models.
    pub model_timeouts: Vec<ModelTimeouts>,
    /// Names that stand for models.
    pub model_aliases: Vec<ModelAlias>,
}

impl Cli {
    /// Reads flags and, if one is named, the file.
    ///
    /// # Errors
    /// All that is wrong with them.
    pub fn configure(arguments: &[String], file: Option<&std::path::Path>) -> Result<Config, ConfigErrors> {
        let mut all = vec!["router".to_owned()];
        let mut errors = Vec::new();
        if let Some(path) = file {
            let given = |key: &str| {
                let same = |argument: &String| argument.split('=').next() == Some(key);
                arguments.iter().any(same)
            };
            let of_file = file::arguments_of(path, &mut errors);
            // Flags win over the file.
            all.extend(of_file.into_iter().filter(|argument| !argument.split('=').next().is_some_and(given)));
        }
        all.extend_from_slice(arguments);
        let config = match <Self as clap::Parser>::try_parse_from(all) {
            Ok(cli) => cli.settings.check(),
            Err(error) => Err(ConfigErrors(vec![file::reason(&error)])),
        };
        match config {
            Ok(config) if errors.is_empty() => Ok(config),
            Ok(_) => Err(ConfigErrors(errors)),
            Err(ConfigErrors(more)) => {
                errors.extend(more);
                Err(ConfigErrors(errors))
            }
        }
    }
}

#[cfg(test)]
mod tests;
