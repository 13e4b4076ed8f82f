//! How much a worker has to do, as it tells others.

/// A router's place among all that follow a worker's load. All workers that are followed by the same routers tell each of them the same.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RouterPlace {
    /// Counted from 0.
    pub rank: u32,
    /// How many there are; more than `rank`.
    pub count: u32,
}

impl RouterPlace {
    /// The only router there is.
    pub const ALONE: Self = Self { rank: 0, count: 1 };
}

impl Default for RouterPlace {
    fn default() -> Self {
        Self::ALONE
    }
}

/// A worker's load at one moment.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct WorkerLoad {
    /// Requests that take part in steps.
    pub running_requests: usize,
    /// Requests that wait.
    pub waiting_requests: usize,
    /// Tokens still to be computed before the last of them has its first token; of a waiting prompt, those that were not cached when it
    /// came.
    pub waiting_uncached_tokens: usize,
    /// KV that requests hold, in tokens.
    pub kv_used_tokens: usize,
    /// KV that nobody holds, cached blocks included, in tokens.
    pub kv_free_tokens: usize,
    /// Prompt tokens a second, measured over the last steps that computed some.
    pub prefill_tokens_per_second: Option<f64>,
    /// Generated tokens a second of all sequences together, measured over the last steps that did nothing else.
    pub decode_tokens_per_second: Option<f64>,
    /// Sequences that lost their blocks and started over, since the start.
    pub retractions: u64,
}
