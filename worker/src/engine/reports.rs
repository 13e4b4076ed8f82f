//! What the engine's thread tells the outside after each step: counters, load, and what happened to the cache.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use roundhouse_types::{KvEvent, StoredBlocks, WorkerLoad};
use worker_core::kv_event;
use worker_core::scheduler::SchedulerStats;
use worker_core::step::{Batch, SequenceId};

use super::{Client, Shared};
use crate::kv_events::KvLog;

/// Names a request, as its client did.
pub type RequestId = Option<Arc<str>>;

/// How much of what was measured before still counts after another step: the last 20 or so decide.
const KEPT_SHARE: f64 = 0.95;

/// How fast steps are.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pace {
    /// Of steps that computed prompts, whatever else they did.
    prefill: Rate,
    /// Of steps that did nothing but decode.
    decode: Rate,
}

#[derive(Clone, Copy, Debug, Default)]
struct Rate {
    tokens: f64,
    seconds: f64,
}

impl Rate {
    fn add(&mut self, tokens: usize, took: Duration) {
        self.tokens = self.tokens * KEPT_SHARE + tokens as f64;
        self.seconds = self.seconds * KEPT_SHARE + took.as_secs_f64();
    }

    fn per_second(&self) -> Option<f64> {
        (self.tokens > 0.0 && self.seconds > 0.0).then(|| self.tokens / self.seconds)
    }
}

impl Pace {
    /// Takes in a step.
    pub(super) fn stepped(&mut self, batch: &Batch, took: Duration) {
        // A sequence that decodes computes the token drawn last and draws another.
        let decodes =
            batch.sequences.iter().filter(|step| step.tokens.len() == 1 && step.sample.is_some()).count();
        let prompt_tokens = batch.tokens() - decodes;
        if prompt_tokens > 0 {
            self.prefill.add(prompt_tokens, took);
        } else {
            self.decode.add(decodes, took);
        }
    }

    fn load(&self, stats: &SchedulerStats, block_tokens: usize) -> WorkerLoad {
        WorkerLoad {
            running_requests: stats.running,
            waiting_requests: stats.waiting,
            waiting_uncached_tokens: stats.uncomputed_tokens,
            kv_used_tokens: stats.held_blocks * block_tokens,
            kv_free_tokens: (stats.total_blocks - stats.held_blocks) * block_tokens,
            prefill_tokens_per_second: self.prefill.per_second(),
            decode_tokens_per_second: self.decode.per_second(),
            retractions: stats.retractions,
        }
    }
}

impl Shared {
    /// Makes the counters and the load known.
    pub(super) fn publish(&self, stats: SchedulerStats, pace: &Pace, block_tokens: usize) {
        *self.stats.lock().unwrap_or_else(PoisonError::into_inner) = stats;
        let load = pace.load(&stats, block_tokens);
        self.load.send_if_modified(|known| std::mem::replace(known, load) != load);
    }
}

/// Publishes what happened to the cache, with the ids of the requests of `clients`.
pub(super) fn publish_events(
    log: &KvLog,
    events: Vec<kv_event::KvEvent>,
    clients: &HashMap<SequenceId, Client>,
) {
    let told = |event| match event {
        kv_event::KvEvent::Removed { hashes } => KvEvent::Removed { hashes },
        kv_event::KvEvent::Cleared => KvEvent::Cleared,
        kv_event::KvEvent::Stored(stored) => KvEvent::Stored(StoredBlocks {
            hashes: stored.hashes,
            parent: stored.parent,
            tokens: stored.tokens,
            block_tokens: stored.block_tokens,
            request_id: clients.get(&stored.sequence).and_then(|client| client.caller.request_id.clone()),
            first_position: stored.positions.start,
        }),
    };
    log.publish(events.into_iter().map(told).collect());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_forgets_what_was_long_ago() {
        let mut rate = Rate::default();
        assert_eq!(rate.per_second(), None);
        rate.add(1_000, Duration::from_secs(1));
        assert_eq!(rate.per_second(), Some(1_000.0));
        for _ in 0..500 {
            rate.add(10, Duration::from_secs(1));
        }
        assert!((rate.per_second().unwrap() - 10.0).abs() < 1e-6);
    }
}
