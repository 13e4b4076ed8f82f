//! What a policy is told beside its router's own ledger and tree: caches as they are, loads as they were a moment ago.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use roundhouse_types::BlockHash;
use router_core::RequestView;
use router_core::ledger::ReportedLoad;
use router_core::policy::{Candidate, IndexSource, IndexUse};
use router_core::speed::PrefillSpeed;

use super::fleet::Router;
use super::{BLOCK_TOKENS, Engine, Workload};

/// Entries that are too old go this many times in their lifetime.
const EXPIRIES: u32 = 20;

/// What there is to tell.
pub(super) struct Knowledge {
    index_use: IndexUse,
    kv_capacity_tokens: usize,
    reports: Vec<ReportedLoad>,
    /// Blocks that each worker's cache holds of the request at hand.
    cached: Vec<usize>,
    /// Seconds that each worker owes, and that the request at hand would take there, where that can be told.
    queues: Vec<Option<(f64, f64)>>,
    /// Of each worker: blocks of requests without a first token, and how many of those have them.
    in_flight: Vec<HashMap<BlockHash, u32>>,
    /// Readings of the routers' tree clocks, one list a time, the oldest first.
    clocks: VecDeque<Vec<u32>>,
    cache_path: Vec<BlockHash>,
}

impl Knowledge {
    pub(super) fn new(index_use: IndexUse, workers: usize, blocks: usize) -> Self {
        Self {
            index_use,
            kv_capacity_tokens: blocks * BLOCK_TOKENS,
            reports: vec![ReportedLoad::default(); workers],
            cached: vec![0; workers],
            queues: vec![None; workers],
            in_flight: vec![HashMap::new(); workers],
            clocks: VecDeque::new(),
            cache_path: Vec::new(),
        }
    }

    pub(super) fn reports_every(&self) -> Option<Duration> {
        self.index_use.reports_every
    }

    pub(super) fn expires_every(&self) -> Option<Duration> {
        self.index_use.lifetime.map(|lifetime| lifetime / EXPIRIES)
    }

    pub(super) fn minds_flight(&self) -> bool {
        self.index_use.source == IndexSource::ReportedAndInFlight
    }

    /// Workers say how they are.
    pub(super) fn report<E: Engine>(&mut self, engines: &[E]) {
        self.reports.clear();
        self.reports.extend(engines.iter().map(Engine::reported));
    }

    /// Indexes forget what is older than its lifetime.
    pub(super) fn expire(&mut self, routers: &[Router]) {
        self.clocks.push_back(routers.iter().map(|router| router.decider.tree_clock()).collect());
        if self.clocks.len() > EXPIRIES as usize {
            let clocks = self.clocks.pop_front().unwrap_or_default();
            for (router, clock) in routers.iter().zip(clocks) {
                router.decider.forget_unused_since(clock);
            }
        }
    }

    /// What the router's tree sees of a prompt's path: nothing where hits come from the workers.
    pub(super) fn indexed<'p>(&self, path: &'p [BlockHash]) -> &'p [BlockHash] {
        match self.index_use.source {
            IndexSource::Reported | IndexSource::ReportedAndInFlight => &[],
            IndexSource::Learned => {
                let first = self.index_use.first_tokens.map_or(usize::MAX, |tokens| tokens / BLOCK_TOKENS);
                &path[..path.len().min(first)]
            }
        }
    }

    /// Looks a request up in the caches, if that is where hits come from.
    pub(super) fn look_up<E: Engine>(
        &mut self,
        workload: &Workload,
        number: u32,
        engines: &[E],
        now_ns: u64,
    ) {
        if self.index_use.source == IndexSource::Learned {
            return;
        }
        E::cache_path(workload, number, &mut self.cache_path);
        for (cached, engine) in self.cached.iter_mut().zip(engines) {
            *cached = engine.cached_blocks(&self.cache_path);
        }
        if self.minds_flight() {
            let mut path = std::mem::take(&mut self.cache_path);
            workload.path(&workload.requests[number as usize], E::PARTIAL, &mut path);
            for (cached, in_flight) in self.cached.iter_mut().zip(&self.in_flight) {
                while path.get(*cached).is_some_and(|hash| in_flight.contains_key(hash)) {
                    *cached += 1;
                }
            }
            self.cache_path = path;
        }
        let prompt_tokens = workload.requests[number as usize].input_tokens as usize;
        for ((queue, engine), cached) in self.queues.iter_mut().zip(engines).zip(&self.cached) {
            let new_tokens = prompt_tokens.saturating_sub(cached * BLOCK_TOKENS).max(1);
            *queue = engine.queue_s(new_tokens, now_ns);
        }
    }

    /// Adds what is known to the candidates.
    pub(super) fn tell(&self, view: &RequestView<'_>, candidates: &mut [Candidate], speed: &PrefillSpeed) {
        for candidate in candidates {
            let worker = candidate.slot.index();
            candidate.kv_capacity_tokens = Some(self.kv_capacity_tokens);
            if self.index_use.reports_every.is_some() {
                candidate.reported = Some(self.reports[worker]);
            }
            if self.index_use.source != IndexSource::Learned {
                candidate.hit_blocks = self.cached[worker];
                candidate.hit_tokens = view.covered_tokens(self.cached[worker]);
                candidate.own_s = candidate.load.queue.ratio * speed.seconds(candidate.prefill(view));
            }
            if let Some((queued_s, own_s)) = self.queues[worker] {
                (candidate.queued_s, candidate.own_s) = (queued_s, own_s);
            }
        }
    }

    /// A request has gone to a worker.
    pub(super) fn dispatched(&mut self, worker: u32, path: &[BlockHash]) {
        if self.minds_flight() {
            for hash in path {
                *self.in_flight[worker as usize].entry(*hash).or_insert(0) += 1;
            }
        }
    }

    /// Its first token has come: its blocks are in the cache.
    pub(super) fn arrived_at(&mut self, worker: u32, path: &[BlockHash]) {
        let in_flight = &mut self.in_flight[worker as usize];
        for hash in path {
            if let Some(count) = in_flight.get_mut(hash) {
                *count -= 1;
                if *count == 0 {
                    in_flight.remove(hash);
                }
            }
        }
    }
}
