//! What a worker is started with: the model and the bounds it works within.
//!
//! Knows no flags: `main.rs` turns those into this. Next: [`Worker::start`](crate::Worker::start).

use worker_core::timing::EnginePreset;
use worker_kernels::cuda::PrefillKernel;

use crate::error::WorkerError;
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
    /// Whether a GPU's kernels overlap. For `cuda` and `auto` only.
    pub kernel_overlap: KernelOverlap,
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
    /// Sequences that are computed side by side; `None` takes what is usual for what computes ([`StepSize`]).
    pub max_running: Option<usize>,
    /// Tokens of one step, prompt chunks and decodes together: bounds the pause that a long prompt causes others. `None` as above.
    pub max_tokens_per_step: Option<usize>,
    /// Requests that may wait beside the running ones; one more is answered 429.
    pub max_waiting: usize,
    /// Whether others can follow what happens to the prefix cache.
    pub kv_events: KvEventRecording,
    /// Whether KV goes to other workers and comes from them.
    pub kv_transfer: KvTransfer,
}

/// Whether a GPU's kernels start while the one before still runs.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum KernelOverlap {
    /// Where the GPU can.
    #[default]
    On,
    /// One after the other.
    Off,
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

/// What a step computes at most.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StepSize {
    /// Sequences.
    pub max_running: usize,
    /// Tokens of all of them.
    pub max_tokens: usize,
}

impl StepSize {
    /// Usual on a CPU, where a chunk of a prompt takes a second.
    pub const CPU: Self = Self { max_running: 64, max_tokens: 512 };
    /// Usual on a GPU: weights are read once for many more rows, and each step of a prompt costs a millisecond or two besides. (Of 512
    /// tokens, 64 prompts and answers took 1.2 times as long as of 8,192; bench/results/2026-11-26-h200-decode.md.)
    pub const GPU: Self = Self { max_running: 256, max_tokens: 2048 };

    /// What the configuration says, and the rest from `self`, as far as it goes with what is said.
    ///
    /// # Errors
    /// [`WorkerError::Config`] when a step is to have fewer tokens than sequences.
    pub(crate) fn or_as_told(self, config: &WorkerConfig) -> Result<Self, WorkerError> {
        let told = (config.max_running, config.max_tokens_per_step);
        let max_running = told.0.unwrap_or(self.max_running.min(told.1.unwrap_or(usize::MAX)));
        let max_tokens = told.1.unwrap_or(self.max_tokens.max(max_running));
        if max_tokens < max_running {
            return Err(WorkerError::Config(format!(
                "max-tokens-per-step {max_tokens} must be at least max-running, {max_running}: each running sequence computes \
                 a token a step, and those beyond would starve"
            )));
        }
        Ok(Self { max_running, max_tokens })
    }
}

impl WorkerConfig {
    /// Requests waiting beside the running ones unless told otherwise.
    pub const MAX_WAITING: usize = 1024;

    /// Requests waiting at a simulated engine unless told otherwise: the recorded ones were sent 10,000 at once, and queued them.
    pub const SIMULATED_MAX_WAITING: usize = 16_384;

    /// The defaults for a simulated engine, which has the tokenizer and chat template of `model`.
    #[must_use]
    pub fn timing(preset: &'static EnginePreset, model: ModelSource) -> Self {
        Self {
            backend: BackendChoice::Timing(preset),
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
            kernel_overlap: KernelOverlap::default(),
            time_scale: 1.0,
            served_model_name: None,
            threads: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            kv: KvBudget::Auto,
            memory_sharers: 1,
            context_tokens: None,
            max_running: None,
            max_tokens_per_step: None,
            max_waiting: Self::MAX_WAITING,
            kv_events: KvEventRecording::Off,
            kv_transfer: KvTransfer::Off,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_as_large_as_told_and_else_as_is_usual() {
        let config = |max_running, max_tokens_per_step| WorkerConfig {
            max_running,
            max_tokens_per_step,
            ..WorkerConfig::new(ModelSource::Builtin)
        };
        assert_eq!(StepSize::GPU.or_as_told(&config(None, None)).unwrap(), StepSize::GPU);
        let told = StepSize { max_running: 3, max_tokens: 40 };
        assert_eq!(StepSize::CPU.or_as_told(&config(Some(3), Some(40))).unwrap(), told);
        let few = StepSize { max_running: 100, max_tokens: 100 };
        assert_eq!(StepSize::GPU.or_as_told(&config(None, Some(100))).unwrap(), few);
        let many = StepSize { max_running: 4_000, max_tokens: 4_000 };
        assert_eq!(StepSize::GPU.or_as_told(&config(Some(4_000), None)).unwrap(), many);
        let error = StepSize::GPU.or_as_told(&config(Some(256), Some(255))).unwrap_err().to_string();
        assert!(error.contains("max-tokens-per-step 255") && error.contains("max-running, 256"), "{error}");
    }
}
