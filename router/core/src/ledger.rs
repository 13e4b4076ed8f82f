//! What the router itself knows to be in flight at each worker.
//!
//! Policies hold no counts: they are given these. A [`Lease`] is made under the decider's lock, together with the pick,
//! so that a burst of equal requests does not all see the same empty worker; dropping it gives everything back.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Counters of one worker. Only leases change them.
#[derive(Debug, Default)]
pub struct WorkerLoad {
    requests: AtomicUsize,
    prefilling: AtomicUsize,
    prefill_tokens: AtomicUsize,
    context_tokens: AtomicUsize,
    last_pick: AtomicU64,
}

/// A reading of [`WorkerLoad`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LoadReading {
    /// Requests in flight.
    pub requests: usize,
    /// Those of them without a first token.
    pub prefilling: usize,
    /// Uncached prompt tokens of requests without a first token.
    pub prefill_tokens: usize,
    /// Prompt tokens of all requests in flight: a lower bound of the KV they hold.
    pub context_tokens: usize,
    /// Number of the pick that chose this worker last; 0 for never.
    pub last_pick: u64,
}

/// What a worker said of itself, in metrics or a load report; as old as the last one.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct ReportedLoad {
    /// Requests it works on.
    pub running: usize,
    /// Requests that wait in it.
    pub waiting: usize,
    /// Share of its KV cache that sequences hold, from 0 to 1.
    pub kv_usage: f64,
}

impl LoadReading {
    /// Requests that have their first token and are decoding.
    #[must_use]
    pub fn decoding(&self) -> usize {
        self.requests.saturating_sub(self.prefilling)
    }
}

impl WorkerLoad {
    /// Reads all counters; each is exact, the set of them may straddle a change.
    #[must_use]
    pub fn read(&self) -> LoadReading {
        LoadReading {
            requests: self.requests.load(Ordering::Relaxed),
            prefilling: self.prefilling.load(Ordering::Relaxed),
            prefill_tokens: self.prefill_tokens.load(Ordering::Relaxed),
            context_tokens: self.context_tokens.load(Ordering::Relaxed),
            last_pick: self.last_pick.load(Ordering::Relaxed),
        }
    }
}

/// What one dispatched request occupies at its worker. Drop is release.
#[derive(Debug)]
pub struct Lease {
    load: Arc<WorkerLoad>,
    context_tokens: usize,
    /// `None` once the first token has come.
    prefill_tokens: Option<usize>,
}

impl Lease {
    /// Books a request of `context_tokens`, `prefill_tokens` of which the worker must compute, as pick number `pick`.
    #[must_use]
    pub fn reserve(load: &Arc<WorkerLoad>, context_tokens: usize, prefill_tokens: usize, pick: u64) -> Self {
        load.requests.fetch_add(1, Ordering::Relaxed);
        load.prefilling.fetch_add(1, Ordering::Relaxed);
        load.prefill_tokens.fetch_add(prefill_tokens, Ordering::Relaxed);
        load.context_tokens.fetch_add(context_tokens, Ordering::Relaxed);
        load.last_pick.store(pick, Ordering::Relaxed);
        Self { load: Arc::clone(load), context_tokens, prefill_tokens: Some(prefill_tokens) }
    }

    /// The first token has come: the prefill is no longer owed.
    pub fn first_token(&mut self) {
        if let Some(tokens) = self.prefill_tokens.take() {
            self.load.prefilling.fetch_sub(1, Ordering::Relaxed);
            self.load.prefill_tokens.fetch_sub(tokens, Ordering::Relaxed);
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.first_token();
        self.load.requests.fetch_sub(1, Ordering::Relaxed);
        self.load.context_tokens.fetch_sub(self.context_tokens, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_token_releases_the_prefill_and_drop_the_rest() {
        let load = Arc::new(WorkerLoad::default());
        let mut lease = Lease::reserve(&load, 100, 40, 1);
        let _other = Lease::reserve(&load, 10, 10, 2);
        assert_eq!(load.read().prefill_tokens, 50);
        lease.first_token();
        lease.first_token();
        let reading = load.read();
        assert_eq!((reading.prefill_tokens, reading.requests, reading.decoding()), (10, 2, 1));
        drop(lease);
        let reading = load.read();
        assert_eq!((reading.requests, reading.context_tokens, reading.prefilling), (1, 10, 1));
    }

    #[test]
    fn a_lease_dropped_early_gives_everything_back() {
        let load = Arc::new(WorkerLoad::default());
        drop(Lease::reserve(&load, 100, 40, 7));
        assert_eq!(load.read(), LoadReading { last_pick: 7, ..LoadReading::default() });
    }
}
