//! What a worker is started with: the model and the bounds it works within.
//!
//! Knows no flags: `main.rs` turns those into this. Next: [`Worker::start`](crate::Worker::start).

use crate::model::ModelSource;

/// How a worker is started; [`WorkerConfig::new`] has the defaults.
#[derive(Clone, Debug)]
pub struct WorkerConfig {
    /// The model to serve.
    pub model: ModelSource,
    /// The id that clients name; `None` takes the model's own.
    pub served_model_name: Option<String>,
    /// Threads that compute.
    pub threads: usize,
    /// How much KV the worker keeps.
    pub kv: KvBudget,
    /// Longest prompt and answer together, in tokens; `None` takes the model's.
    pub context_tokens: Option<usize>,
    /// Sequences that are computed side by side.
    pub max_running: usize,
    /// Tokens of one step, prompt chunks and decodes together: bounds the pause that a long prompt causes others.
    pub max_tokens_per_step: usize,
    /// Requests that may wait beside the running ones; one more is answered 429.
    pub max_waiting: usize,
}

/// The size of the KV pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KvBudget {
    /// Four full contexts, within 1 GiB, and at least one full context.
    Auto,
    /// As many blocks as fit.
    Bytes(u64),
    /// Exactly so many blocks.
    Blocks(usize),
}

impl WorkerConfig {
    /// Sequences running side by side unless told otherwise.
    pub const MAX_RUNNING: usize = 64;
    /// Tokens of a step unless told otherwise.
    pub const MAX_TOKENS_PER_STEP: usize = 512;
    /// Requests waiting beside the running ones unless told otherwise.
    pub const MAX_WAITING: usize = 1024;

    /// The defaults for `model`: all cores, and the constants above.
    #[must_use]
    pub fn new(model: ModelSource) -> Self {
        Self {
            model,
            served_model_name: None,
            threads: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            kv: KvBudget::Auto,
            context_tokens: None,
            max_running: Self::MAX_RUNNING,
            max_tokens_per_step: Self::MAX_TOKENS_PER_STEP,
            max_waiting: Self::MAX_WAITING,
        }
    }
}
