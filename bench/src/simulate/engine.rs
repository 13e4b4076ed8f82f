//! A simulated worker: takes requests in, says when something happens next, and what.
//!
//! Two kinds. [`scheduled`] runs the worker's own scheduler and block pool, with step times from the timing model; [`plain`] is the
//! simplest server there can be, whose figures are known (`design/bench.md`). Neither knows policies. Next: [`run`](super::run).

pub mod plain;
pub mod scheduled;

use roundhouse_types::{BlockHash, WorkerLoad};

use super::workload::{Partial, Workload};

/// What an engine is asked for of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Part {
    /// All of it.
    #[default]
    Whole,
    /// Its prompt, and one token, which nobody sees.
    Prompt,
    /// All tokens of the answer, from a prompt whose KV another engine has.
    Answer,
}

/// What an engine tells of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Notice {
    /// Its first token.
    FirstToken {
        /// Which request.
        request: u32,
        /// Tokens of its prompt that were in the cache.
        cached_tokens: u32,
    },
    /// Its last token, which may be the first as well.
    Done {
        /// Which request.
        request: u32,
    },
}

/// What would become of a request, in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Foreseen {
    /// Until its own prompt is computed: others' service, and waiting for memory.
    pub wait_s: f64,
    /// To compute its prompt.
    pub own_s: f64,
}

/// A simulated worker.
pub trait Engine {
    /// Which blocks of a prompt it keeps.
    const PARTIAL: Partial;

    /// Takes in `part` of request `number` at `now_ns`.
    fn submit(&mut self, workload: &Workload, number: u32, part: Part, now_ns: u64);

    /// When something happens next, if nothing more comes in.
    fn next_ns(&self) -> Option<u64>;

    /// Does what happens at `next_ns`.
    fn advance(&mut self, workload: &Workload, notices: &mut Vec<Notice>);

    /// Blocks of `path`, hashed by [`Engine::cache_path`], that its cache holds.
    fn cached_blocks(&self, path: &[BlockHash]) -> usize;

    /// A request's blocks under the hashes of this engine's cache.
    fn cache_path(workload: &Workload, number: u32, path: &mut Vec<BlockHash>);

    /// What request `number` would find, were it sent there at `now_ns` and nothing after it.
    fn foresee(&self, workload: &Workload, number: u32, now_ns: u64) -> Foreseen;

    /// How long it would take from `now_ns` on to compute a prompt of which so much is cached, if it did nothing else; in seconds.
    fn alone_s(&self, prompt_tokens: u32, cached_tokens: u32, now_ns: u64) -> f64;

    /// What it would say of itself now.
    fn reported(&self) -> WorkerLoad;

    /// Tokens that it had to compute of a prompt, on average.
    fn mean_uncached_tokens(&self) -> f64;

    /// It has died: what it was asked for is lost, and its cache.
    fn restart(&mut self);

    /// Sequences that lost their blocks, since it began.
    fn retractions(&self) -> u64;
}
