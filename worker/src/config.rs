//! What a worker is started with: the model and the bounds it works within.
//!
//! Knows no flags: `main.rs` turns those into this. Next: [`Worker::start`](crate::Worker::start).

use worker_core::timing::EnginePreset;
use worker_kernels::cuda::PrefillKernel;

use crate::model::ModelSource;
use crate::simulation::BackendChoice;
use crate::transfer::Reach;

/// How a worker is started; [`WorkerConfig::new`] has the defaults.
#[derive(Clone, Debug)]
pub struct WorkerConfig {
    /// The model to serve; a timing backend takes only its tokenizer and chat template.
    pub model: ModelSource,
    /// What computes. On the CPU unless told otherwise: several workers in one process, as a router embeds them, would each take most of a GPU's
    /// memory. The program takes a GPU where there is one.
    pub backend: BackendChoice,
    /// Which kernel computes prompts on a GPU. For `cuda` and `auto` only.
    pub prefill_kernel: PrefillKernel,
    /// Simulated steps take so many times as long as recorded. For timing backends only.
    pub time_scale: f64,
    /// The id that clients name; `None` takes the model's own.
    pub served_model_name: Option<String>,
    /// Threads that compute.
    pub threads: usize,
    /// How much KV the worker keeps.
    pub kv: KvBudget,
    /// Workers that share this machine's memory and know of each other, this one included: those embedded in one router.
    pub memory_sharers: usize,
    /// Longest prompt and answer together, in tokens; `None` takes the model's.
    pub context_tokens: Option<usize>,
    /// Sequences that are computed side by side.
    pub max_running: usize,
    /// Tokens of one step, prompt chunks and decodes together: bounds the pause that a long prompt causes others.
    pub max_tokens_per_step: usize,
    /// Requests that may wait beside the running ones; one more is answered 429.
    pub max_waiting: usize,
    /// Whether others can follow what happens to the prefix cache.
    pub kv_events: KvEventRecording,
    /// Whether KV goes to other workers and comes from them.
    pub kv_transfer: KvTransfer,
}

/// Whether a worker hands prompts over to others, and takes theirs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum KvTransfer {
    /// It computes its own.
    Off,
    /// It does.
    On {
        /// Where others reach it; `None` is where the request came to.
        reach: Option<Reach>,
        /// Bytes that KV may take on its way; `None` is an eighth of the memory that is available at the start, at most 4 GiB.
        memory_bytes: Option<u64>,
    },
}

/// Whether cache events are kept for followers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KvEventRecording {
    /// They are not, and cost nothing.
    Off,
    /// They are: some hundred bytes for each block in the cache, and the last 10,000 steps' events.
    On,
}

/// The size of the KV pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KvBudget {
    /// A quarter of the memory that is available when the model is loaded, divided by those who share it; at least one full
    /// context, and at most one for each sequence that can run. What the preset says for timing backends.
    Auto,
    /// As many blocks as fit; refused when that is more than is available.
    Bytes(u64),
    /// Exactly so many blocks; refused when they take more than is available.
    Blocks(usize),
}

impl WorkerConfig {
    /// Sequences running side by side unless told otherwise.
    pub const MAX_RUNNING: usize = 64;
    /// Tokens of a step unless told otherwise.
    pub const MAX_TOKENS_PER_STEP: usize = 512;
    /// Requests waiting beside the running ones unless told otherwise.
    pub const MAX_WAITING: usize = 1024;

    /// Requests waiting at a simulated engine unless told otherwise: the recorded ones were sent 10,000 at once, and queued them.
    pub const SIMULATED_MAX_WAITING: usize = 16_384;

    /// The defaults for a simulated engine, which has the tokenizer and chat template of `model`.
    #[must_use]
    pub fn timing(preset: &'static EnginePreset, model: ModelSource) -> Self {
        Self {
            backend: BackendChoice::Timing(preset),
            max_running: preset.max_running,
            max_tokens_per_step: preset.max_tokens_per_step,
            max_waiting: Self::SIMULATED_MAX_WAITING,
            ..Self::new(model)
        }
    }

    /// The defaults for `model`: all cores, and the constants above.
    #[must_use]
    pub fn new(model: ModelSource) -> Self {
        Self {
            model,
            backend: BackendChoice::Cpu,
            prefill_kernel: PrefillKernel::default(),
            time_scale: 1.0,
            served_model_name: None,
            threads: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            kv: KvBudget::Auto,
            memory_sharers: 1,
            context_tokens: None,
            max_running: Self::MAX_RUNNING,
            max_tokens_per_step: Self::MAX_TOKENS_PER_STEP,
            max_waiting: Self::MAX_WAITING,
            kv_events: KvEventRecording::Off,
            kv_transfer: KvTransfer::Off,
        }
    }
}
