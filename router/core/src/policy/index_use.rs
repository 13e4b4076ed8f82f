//! What a policy's own product knows of caches and loads, so that simulation gives it no more and no less.

use std::time::Duration;

/// How a policy comes to know who holds which prefixes, and how old what it is told of loads is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct IndexUse {
    /// Where hits come from.
    pub source: IndexSource,
    /// What its index holds of each worker.
    pub bound: IndexBound,
    /// How long it keeps an entry that is not used; `None` for ever.
    pub lifetime: Option<Duration>,
    /// How much of a prompt it indexes; `None` for all of it.
    pub first_tokens: Option<usize>,
    /// How often it asks workers for their load; `None` if it goes by its own ledger.
    pub reports_every: Option<Duration>,
}

/// Where hits come from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum IndexSource {
    /// Its own routes: what was sent to a worker is held there.
    #[default]
    Learned,
    /// The workers' KV events: what they really hold.
    Reported,
    /// The same, and what requests in flight are about to leave there.
    ReportedAndInFlight,
}

/// How much an index holds of each worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum IndexBound {
    /// As much as the worker's own cache, where that is known.
    #[default]
    WorkerCapacity,
    /// So many tokens.
    Tokens(usize),
    /// All there ever was.
    None,
}
