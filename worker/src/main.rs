//! The worker's command line.

use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::Parser;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;
use worker::kv_events::zmq::{Endpoint, Publisher, ZmqConfig};
use worker::model::ModelSource;
use worker::transfer::Reach;
use worker::{
    BackendChoice, KernelOverlap, KvBudget, KvEventRecording, KvTransfer, PrefillKernel, Worker,
    WorkerConfig, file_limit, serve,
};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// An engine that serves one model over OpenAI HTTP.
#[derive(Debug, clap::Parser)]
#[command(name = "worker", version, max_term_width = 100)]
struct Cli {
    /// The model: a Hugging Face directory or a GGUF file (Llama, Qwen2 or Qwen3), or `builtin`. Of it a timing
    /// backend takes only tokenizer and chat template
    #[arg(long, default_value = "builtin", value_name = "DIR|FILE.gguf|builtin")]
    model: ModelSource,

    /// What computes: `cpu`; `cuda`, the first NVIDIA GPU (compute capability 8.0, driver 580 or later; bf16; heads of 64,
    /// 128 or 256 numbers); `auto`, the GPU if there is one that can be used with kernels for the model's heads, otherwise
    /// the CPU (a model that is too large for the GPU is an error); or `timing:PRESET`, which SIMULATES a
    /// recorded engine: HTTP, scheduler, KV blocks and prefix cache are real, steps take as long as that engine's, and the
    /// text is random words. Its clock takes real-time priority where that is permitted (CAP_SYS_NICE), so that steps end
    /// on time on a busy machine, and then, without a CPU quota, stays on one core that it keeps from halting while steps
    /// are due, so that they do on an idle one: a thread spins there when nobody else wants the core. Presets: qwen3-8b,
    /// qwen3-32b, qwen3-30b-a3b, qwen3-235b-a22b (SGLang), vllm-chunked
    #[arg(long, default_value = "auto", value_name = "auto|cuda|cpu|timing:PRESET")]
    backend: BackendChoice,

    /// Which kernel computes prompts' attention on a GPU: `wgmma`, for compute capability 9.0, or `mma-sync`, slower there, for
    /// all; `auto` takes the faster of those that the GPU has
    #[arg(long, default_value = "auto", value_name = "auto|mma-sync|wgmma")]
    prefill_kernel: PrefillChoice,

    /// Whether a GPU's kernels start while the one before still runs, where it can (compute capability 9.0, 10.x and 12.x). `off` makes
    /// decoding slower; it tells whether a fault comes from there
    #[arg(long, default_value = "on")]
    kernel_overlap: OnOff,

    /// Simulated steps take so many times as long as recorded; 1 is real time
    #[arg(long, default_value_t = 1.0, value_name = "X")]
    time_scale: f64,

    /// Address to serve on. Loopback, until an operator decides who may reach it
    #[arg(long, default_value = "127.0.0.1")]
    host: IpAddr,

    /// Port to serve on; 0 takes any free one
    #[arg(long, default_value_t = 8_001)]
    port: u16,

    /// The id that clients name [default: builtin, or the name of directory or file; simulated-PRESET for a timing
    /// backend]
    #[arg(long, value_name = "NAME")]
    served_model_name: Option<String>,

    /// Threads that compute [default: all cores]
    #[arg(long)]
    threads: Option<usize>,

    /// Memory for KV, as in 512MiB; no more than is available (MemAvailable, or less in a control group) [default: a
    /// quarter of that, from one full context to as many as --max-running]
    #[arg(long, value_parser = parse_bytes, value_name = "SIZE", conflicts_with = "kv_blocks")]
    kv_memory: Option<u64>,

    /// Blocks of KV, 16 tokens each [default for a timing backend: the preset's]
    #[arg(long, value_name = "N")]
    kv_blocks: Option<usize>,

    /// Longest prompt and answer together, in tokens [default: the model's; the preset's for a timing backend]
    #[arg(long, value_name = "TOKENS")]
    context_length: Option<usize>,

    /// Sequences computed side by side [default: 64, on a GPU 256, or as many as a step is told to have tokens, if that is less; the
    /// preset's for a timing backend]
    #[arg(long, value_name = "N")]
    max_running: Option<usize>,

    /// Tokens of one step; bounds the pause that a long prompt causes others [default: 512, on a GPU 2048, or as many as are
    /// told to run, if that is more; the preset's for a timing backend]
    #[arg(long, value_name = "TOKENS")]
    max_tokens_per_step: Option<usize>,

    /// Requests that may wait; one more is answered 429 [default: 1024; 16384 for a timing backend]
    #[arg(long, value_name = "N")]
    max_waiting: Option<usize>,

    /// Whether prefix cache events are kept for routers that follow them, over gRPC or ZeroMQ. Costs some hundred
    /// bytes for each block in the cache, and the events of 10,000 steps
    #[arg(long, default_value = "on", value_name = "on|off")]
    kv_events: OnOff,

    /// Publishes cache events over ZeroMQ there, as vLLM does; binds, whatever the host. vLLM's own is
    /// tcp://*:5557 [default: not published]
    #[arg(long, value_name = "tcp://HOST:PORT")]
    kv_events_endpoint: Option<Endpoint>,

    /// Replays cache events over ZeroMQ there, for subscribers that missed some. vLLM's own is tcp://*:5558 [default:
    /// no replay]
    #[arg(long, value_name = "tcp://HOST:PORT", requires = "kv_events_endpoint")]
    kv_events_replay_endpoint: Option<Endpoint>,

    /// Topic of cache events over ZeroMQ; empty unless told otherwise, as vLLM's
    #[arg(long, default_value = "", value_name = "TOPIC", requires = "kv_events_endpoint")]
    kv_events_topic: String,

    /// Whether prompts are handed over: one that asks for it (vLLM's kv_transfer_params with do_remote_decode, as a router with --prefill sends it) is
    /// computed here, and its KV kept for 30 seconds for the worker that generates; one that says where its KV is, fetches it. Whoever can
    /// reach this port can have it connect to any other, so leave it off where strangers do
    #[arg(long, default_value = "off", value_name = "on|off")]
    kv_transfer: OnOff,

    /// Where the workers that fetch reach this one [default: where the prompt's request came to]
    #[arg(long, value_name = "HOST[:PORT]", value_parser = parse_reach)]
    kv_transfer_host: Option<Reach>,

    /// Memory for KV that waits to be fetched, or for blocks when it has been; beyond it prompts are computed where they are generated from
    /// [default: an eighth of what is available, at most 4GiB]
    #[arg(long, value_parser = parse_bytes, value_name = "SIZE")]
    kv_transfer_memory: Option<u64>,

    /// Seconds for streams to finish after SIGTERM
    #[arg(long, default_value_t = 30, value_name = "SECONDS")]
    grace_period: u64,
}

/// Names of the kernels for prompts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum PrefillChoice {
    Auto,
    MmaSync,
    Wgmma,
}

/// The value of a switch.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum OnOff {
    On,
    Off,
}

fn main() -> ExitCode {
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_max_level(tracing::Level::INFO).init();
    match run(Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("worker: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> anyhow::Result<()> {
    let address = SocketAddr::new(cli.host, cli.port);
    let grace = Duration::from_secs(cli.grace_period);
    let zmq = zmq(&cli)?;
    file_limit::raise();
    let worker = Worker::start(configuration(cli))?;
    if worker.is_simulated() {
        tracing::warn!(what = worker.describe(), "compute is simulated");
    }
    // Blocking threads tokenize: more of them than cores would only take turns, and the engine's thread with them.
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let runtime =
        tokio::runtime::Builder::new_current_thread().max_blocking_threads(cores).enable_all().build()?;
    let outcome = runtime.block_on(async {
        let publisher = publisher(&worker, zmq).await?;
        let listener =
            TcpListener::bind(address).await.with_context(|| format!("cannot listen on {address}"))?;
        println!(
            "Roundhouse worker {} on http://{}: {}",
            env!("CARGO_PKG_VERSION"),
            listener.local_addr()?,
            worker.describe()
        );
        let (mut terminate, mut interrupt) =
            (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        let stop = async move {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
        };
        let mut tasks = JoinSet::new();
        if let Some(publisher) = publisher {
            let (publish, replay) = publisher.addresses()?;
            tracing::info!(%publish, ?replay, "cache events over ZeroMQ");
            tasks.spawn(publisher.run());
        }
        serve::serve(&worker, listener, grace, stop).await;
        Ok(())
    });
    worker.shutdown();
    outcome
}

fn zmq(cli: &Cli) -> anyhow::Result<Option<ZmqConfig>> {
    let Some(publish) = cli.kv_events_endpoint.clone() else { return Ok(None) };
    anyhow::ensure!(cli.kv_events == OnOff::On, "kv-events-endpoint needs kv-events, which is off");
    let (replay, topic) = (cli.kv_events_replay_endpoint.clone(), cli.kv_events_topic.clone());
    Ok(Some(ZmqConfig { publish, replay, topic }))
}

async fn publisher(worker: &Worker, config: Option<ZmqConfig>) -> anyhow::Result<Option<Publisher>> {
    match (worker.kv_log(), config) {
        (Some(log), Some(config)) => Ok(Some(Publisher::bind(log, &config).await?)),
        _ => Ok(None),
    }
}

fn configuration(cli: Cli) -> WorkerConfig {
    let mut config = match cli.backend {
        BackendChoice::Timing(preset) => WorkerConfig::timing(preset, cli.model),
        backend => WorkerConfig { backend, ..WorkerConfig::new(cli.model) },
    };
    config.prefill_kernel = match cli.prefill_kernel {
        PrefillChoice::Auto => PrefillKernel::Auto,
        PrefillChoice::MmaSync => PrefillKernel::MmaSync,
        PrefillChoice::Wgmma => PrefillKernel::Wgmma,
    };
    config.kernel_overlap = match cli.kernel_overlap {
        OnOff::On => KernelOverlap::On,
        OnOff::Off => KernelOverlap::Off,
    };
    config.time_scale = cli.time_scale;
    config.kv_events = match cli.kv_events {
        OnOff::On => KvEventRecording::On,
        OnOff::Off => KvEventRecording::Off,
    };
    config.kv_transfer = match cli.kv_transfer {
        OnOff::On => KvTransfer::On { reach: cli.kv_transfer_host, memory_bytes: cli.kv_transfer_memory },
        OnOff::Off => KvTransfer::Off,
    };
    config.served_model_name = cli.served_model_name;
    config.threads = cli.threads.unwrap_or(config.threads);
    config.kv = match (cli.kv_blocks, cli.kv_memory) {
        (Some(blocks), _) => KvBudget::Blocks(blocks),
        (None, Some(bytes)) => KvBudget::Bytes(bytes),
        (None, None) => KvBudget::Auto,
    };
    config.context_tokens = cli.context_length;
    config.max_running = cli.max_running;
    config.max_tokens_per_step = cli.max_tokens_per_step;
    config.max_waiting = cli.max_waiting.unwrap_or(config.max_waiting);
    config
}

/// `10.0.0.5`, `worker-3:8001`, `::1` or `[::1]:8001`.
fn parse_reach(text: &str) -> Result<Reach, String> {
    let whole = |host: &str| Reach { host: host.to_owned(), port: None };
    if text.parse::<IpAddr>().is_ok() {
        return Ok(whole(text));
    }
    let reach = match text.rsplit_once(':') {
        None => whole(text),
        Some((host, port)) => {
            let port = port.parse().map_err(|_| format!("{port:?} is no port"))?;
            let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
            Reach { port: Some(port), ..whole(host) }
        }
    };
    if reach.host.is_empty() { Err("it has no host".to_owned()) } else { Ok(reach) }
}

/// `512MiB`, `2GiB`, or plain bytes.
fn parse_bytes(text: &str) -> Result<u64, String> {
    const UNITS: [(&str, u64); 3] = [("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30)];
    let split = UNITS.iter().find_map(|(unit, factor)| Some((text.strip_suffix(unit)?, *factor)));
    let (number, factor) = split.unwrap_or((text, 1));
    let bytes = number.trim().parse::<u64>().ok().and_then(|number| number.checked_mul(factor));
    bytes.ok_or_else(|| format!("{text:?} is no size; write 512MiB or 2GiB"))
}
