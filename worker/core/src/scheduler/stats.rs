//! What is read of a scheduler: for load reports and metrics.

/// Counters. Reading them costs the same however much there is to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SchedulerStats {
    /// Sequences that take part in steps.
    pub running: usize,
    /// Sequences that wait.
    pub waiting: usize,
    /// Tokens of waiting sequences, less what the cache held of each when it came, and of running ones, that have not been computed.
    pub uncomputed_tokens: usize,
    /// Blocks that sequences hold.
    pub held_blocks: usize,
    /// Blocks whose contents can be found.
    pub cached_blocks: usize,
    /// All blocks.
    pub total_blocks: usize,
    /// Tokens that steps computed, of prompts and of what was generated, since the start.
    pub computed_tokens: u64,
    /// Prompt tokens that were looked up in the cache, since the start.
    pub cache_queried_tokens: u64,
    /// Those of them that were found.
    pub cache_hit_tokens: u64,
    /// Sequences that lost their blocks and started over.
    pub retractions: u64,
    /// Tokens whose KV they lost with them.
    pub retracted_tokens: u64,
    /// Those of them that had to be computed again, since the cache did not have them any more. What retraction costs.
    pub recomputed_tokens: u64,
}
