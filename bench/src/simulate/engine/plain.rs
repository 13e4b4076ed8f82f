//! The plain engine: one serial prefill server, first come first served, and decoding at a fixed pace beside it.
//!
//! As defined at the end of `design/bench.md`: no interference, an unlimited batch, an LRU of blocks in which a request refreshes its
//! last block first, at least one token to compute, outputs not cached. It is there so that the simulator can be checked.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use roundhouse_types::{BlockHash, WorkerLoad};
use worker_core::BlockPool;

use super::{Engine, Foreseen, Notice, Part};
use crate::simulate::workload::{BLOCK_TOKENS, Partial, Workload, nanoseconds};

/// Time of one token.
const DECODE_NS: u64 = 30_000_000;

/// One serial server.
#[derive(Debug)]
pub struct PlainEngine {
    prefill_token_s: f64,
    pool: BlockPool,
    /// The first is being served.
    queue: VecDeque<Service>,
    /// When all that is in the queue will have been served.
    free_ns: u64,
    /// `(end, request)` of those that decode.
    decoding: BinaryHeap<Reverse<(u64, u32)>>,
    path: Vec<BlockHash>,
}

#[derive(Debug, Clone, Copy)]
struct Service {
    request: u32,
    cached_tokens: u32,
    ends_ns: u64,
}

impl PlainEngine {
    /// A server of `tokens_per_s` with an empty cache of `blocks`.
    #[must_use]
    pub fn new(tokens_per_s: f64, blocks: usize) -> Self {
        Self {
            prefill_token_s: 1.0 / tokens_per_s,
            pool: BlockPool::new(blocks),
            queue: VecDeque::new(),
            free_ns: 0,
            decoding: BinaryHeap::new(),
            path: Vec::new(),
        }
    }

    /// Looks the prompt up and enters it. That this is done when it comes, and not when it is served, changes nothing for those
    /// who are served, since they are served in the order they come; it is what makes the cache known exactly.
    fn look_up(&mut self, workload: &Workload, number: u32) -> usize {
        Self::cache_path(workload, number, &mut self.path);
        let path = &self.path[..self.path.len().min(self.pool.total_blocks())];
        let mut table = self.pool.find(path, path.len()).blocks;
        self.pool.hold_all(&table);
        let hit_tokens = table.len() * BLOCK_TOKENS;
        for hash in &path[table.len()..] {
            let Some(block) = self.pool.allocate() else { break };
            table.push(self.pool.enter(block, *hash));
        }
        self.pool.release_all(&table);
        hit_tokens.min(workload.requests[number as usize].input_tokens as usize - 1)
    }
}

impl Engine for PlainEngine {
    const PARTIAL: Partial = Partial::Counted;

    /// Always all of it.
    fn submit(&mut self, workload: &Workload, number: u32, _: Part, now_ns: u64) {
        let cached = self.look_up(workload, number);
        let new = workload.requests[number as usize].input_tokens as usize - cached;
        self.free_ns = self.free_ns.max(now_ns) + nanoseconds(new as f64 * self.prefill_token_s);
        let cached_tokens = u32::try_from(cached).unwrap_or(u32::MAX);
        self.queue.push_back(Service { request: number, cached_tokens, ends_ns: self.free_ns });
    }

    fn next_ns(&self) -> Option<u64> {
        let decoded = self.decoding.peek().map(|Reverse((ends_ns, _))| *ends_ns);
        let served = self.queue.front().map(|service| service.ends_ns);
        decoded.into_iter().chain(served).min()
    }

    fn advance(&mut self, workload: &Workload, notices: &mut Vec<Notice>) {
        let now_ns = self.next_ns().unwrap_or(0);
        while let Some(Service { request, cached_tokens, ends_ns }) = self.queue.front().copied()
            && ends_ns == now_ns
        {
            self.queue.pop_front();
            notices.push(Notice::FirstToken { request, cached_tokens });
            let more = u64::from(workload.requests[request as usize].output_tokens - 1);
            self.decoding.push(Reverse((now_ns + more * DECODE_NS, request)));
        }
        while let Some(Reverse((ends_ns, request))) = self.decoding.peek().copied()
            && ends_ns == now_ns
        {
            self.decoding.pop();
            notices.push(Notice::Done { request });
        }
    }

    fn cached_blocks(&self, path: &[BlockHash]) -> usize {
        self.pool.match_prefix(path, path.len())
    }

    fn cache_path(workload: &Workload, number: u32, path: &mut Vec<BlockHash>) {
        workload.path(&workload.requests[number as usize], Self::PARTIAL, path);
    }

    fn foresee(&self, workload: &Workload, number: u32, now_ns: u64) -> Foreseen {
        let mut path = Vec::new();
        Self::cache_path(workload, number, &mut path);
        let cached_tokens = self.cached_blocks(&path) * BLOCK_TOKENS;
        let prompt_tokens = workload.requests[number as usize].input_tokens;
        Foreseen {
            wait_s: self.free_ns.saturating_sub(now_ns) as f64 / 1e9,
            own_s: self.alone_s(prompt_tokens, u32::try_from(cached_tokens).unwrap_or(u32::MAX), now_ns),
        }
    }

    fn alone_s(&self, prompt_tokens: u32, cached_tokens: u32, _now_ns: u64) -> f64 {
        f64::from(prompt_tokens.saturating_sub(cached_tokens).max(1)) * self.prefill_token_s
    }

    fn reported(&self) -> WorkerLoad {
        WorkerLoad {
            running_requests: self.decoding.len(),
            waiting_requests: self.queue.len().saturating_sub(1),
            ..WorkerLoad::default()
        }
    }

    fn mean_uncached_tokens(&self) -> f64 {
        0.0
    }

    fn restart(&mut self) {
        let blocks = self.pool.total_blocks();
        *self = Self::new(1.0 / self.prefill_token_s, blocks);
    }

    fn retractions(&self) -> u64 {
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulate::workload::Draft;

    #[test]
    fn serves_in_turn_and_finds_what_was_served() {
        let mut workload = Workload::named("w");
        let draft = Draft { input_tokens: 1_000, output_tokens: 11, ..Draft::default() };
        for _ in 0..2 {
            workload.push(draft, [1, 2]);
        }
        let mut engine = PlainEngine::new(1_000.0, 10);
        engine.submit(&workload, 0, Part::Whole, 0);
        engine.submit(&workload, 1, Part::Whole, 0);
        let mut told = Vec::new();
        while let Some(at_ns) = engine.next_ns() {
            let mut notices = Vec::new();
            engine.advance(&workload, &mut notices);
            told.extend(notices.into_iter().map(|notice| (at_ns / 1_000_000, notice)));
        }
        let first = |request, cached_tokens| Notice::FirstToken { request, cached_tokens };
        let expected = [
            (1_000, first(0, 0)),
            (1_001, first(1, 999)),
            (1_300, Notice::Done { request: 0 }),
            (1_301, Notice::Done { request: 1 }),
        ];
        assert_eq!(told, expected);
    }
}
