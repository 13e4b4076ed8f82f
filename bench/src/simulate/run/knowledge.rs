//! What a policy is told beside its router's own ledger and tree: caches as they are, loads as they were a moment ago.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::Duration;

use roundhouse_types::{BlockHash, RouterPlace, WorkerLoad};
use router_core::policy::{Candidate, IndexSource, IndexUse};
use router_core::speed::PrefillSpeed;
use router_core::{EngineLoad, RequestView};

use super::fleet::Router;
use super::{BLOCK_TOKENS, Contender, Engine, Workload};
use crate::simulate::args::Routers;
use crate::simulate::contender::{ASKING, Family};
use crate::simulate::engine::Foreseen;

/// Entries that are too old go this many times in their lifetime.
const EXPIRIES: u32 = 20;

/// What there is to tell.
pub(super) struct Knowledge {
    index_use: IndexUse,
    knows_future: bool,
    is_ours: bool,
    /// Whether it goes by what of a prompt is in use already.
    counts_shared: bool,
    /// Whether workers are asked for counts, as engines that nobody here wrote are, and tell no load of themselves.
    is_asking: bool,
    kv_capacity_tokens: usize,
    /// Blocks that each worker's cache holds of the request at hand.
    cached: Vec<usize>,
    /// What the request at hand would find at each worker; for those who know the future.
    foreseen: Vec<Option<Foreseen>>,
    /// Of each router and worker: blocks of requests without a first token, and how many of those have them.
    in_flight: Vec<Vec<HashMap<BlockHash, u32>>>,
    /// Readings of the routers' tree clocks, one list a time, the oldest first.
    clocks: VecDeque<Vec<u32>>,
    cache_path: Vec<BlockHash>,
    /// For ours, where caches are reported: blocks of all prompts so far. A router knows by whose prompt a worker's block was filled, so it knows
    /// nothing of replies before they are part of one.
    prompted: HashSet<BlockHash>,
}

impl Knowledge {
    pub(super) fn new(contender: &Contender, routers: Routers, workers: usize, blocks: usize) -> Self {
        let mut index_use = contender.policy().index_use();
        if let Some(every_ms) = routers.reports_every_ms {
            index_use.reports_every = index_use.reports_every.map(|_| Duration::from_millis(every_ms));
        }
        let knows_future = contender.family == Family::Oracle;
        let is_ours = knows_future || contender.family == Family::Ours;
        Self {
            index_use,
            kv_capacity_tokens: blocks * BLOCK_TOKENS,
            cached: vec![0; workers],
            foreseen: vec![None; workers],
            knows_future,
            is_ours,
            counts_shared: contender.policy().counts_shared(),
            is_asking: contender.name == ASKING,
            in_flight: vec![vec![HashMap::new(); workers]; routers.count.max(1) + 1],
            clocks: VecDeque::new(),
            cache_path: Vec::new(),
            prompted: HashSet::new(),
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
    pub(super) fn report<E: Engine>(&self, engines: &[E], routers: &[Router], now_ns: u64) {
        let count = u32::try_from(routers.len()).unwrap_or(u32::MAX);
        for (slot, engine) in engines.iter().enumerate() {
            let load = engine.reported();
            for (rank, router) in (0..count).zip(routers) {
                let (worker, now) = (&router.fleet.workers()[slot], Duration::from_nanos(now_ns));
                if self.is_asking {
                    worker.hear_counts(&counts(&load, engine), &worker.sent_there(), now);
                } else {
                    worker.reports.set_place(RouterPlace { rank, count });
                    worker.hear_load(&load, now);
                }
            }
        }
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

    /// What the router's tree sees of a prompt's path. Where hits come from the workers a tree would tell nothing; but ours learns from paths how
    /// long sessions are, and what is computed again, and who counts what is in use knows it by them.
    pub(super) fn indexed<'p>(&self, path: &'p [BlockHash]) -> &'p [BlockHash] {
        match self.index_use.source {
            IndexSource::Reported | IndexSource::ReportedAndInFlight
                if self.is_ours || self.counts_shared =>
            {
                path
            }
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
        (number, router): (u32, usize),
        engines: &[E],
        now_ns: u64,
    ) {
        if self.index_use.source == IndexSource::Learned {
            return;
        }
        E::cache_path(workload, number, &mut self.cache_path);
        let knows_bytes_only = self.is_ours && !self.knows_future;
        let prompted = |hash: &&BlockHash| self.prompted.contains(*hash);
        let known =
            if knows_bytes_only { self.cache_path.iter().take_while(prompted).count() } else { usize::MAX };
        for (cached, engine) in self.cached.iter_mut().zip(engines) {
            *cached = engine.cached_blocks(&self.cache_path).min(known);
        }
        if knows_bytes_only {
            self.prompted.extend(&self.cache_path);
        }
        if self.minds_flight() {
            let mut path = std::mem::take(&mut self.cache_path);
            workload.path(&workload.requests[number as usize], E::PARTIAL, &mut path);
            for (cached, in_flight) in self.cached.iter_mut().zip(&self.in_flight[router]) {
                while path.get(*cached).is_some_and(|hash| in_flight.contains_key(hash)) {
                    *cached += 1;
                }
            }
            self.cache_path = path;
        }
        if self.knows_future {
            for (foreseen, engine) in self.foreseen.iter_mut().zip(engines) {
                *foreseen = Some(engine.foresee(workload, number, now_ns));
            }
        }
    }

    /// The most tokens of request `number` that one of `engines` holds.
    pub(super) fn held_tokens<E: Engine>(workload: &Workload, number: u32, engines: &[E]) -> u32 {
        let mut path = Vec::new();
        E::cache_path(workload, number, &mut path);
        let blocks = engines.iter().map(|engine| engine.cached_blocks(&path)).max().unwrap_or(0);
        u32::try_from(blocks * BLOCK_TOKENS).unwrap_or(u32::MAX)
    }

    /// Adds what is known to the candidates.
    pub(super) fn tell(&self, view: &RequestView<'_>, candidates: &mut [Candidate], speed: &PrefillSpeed) {
        for candidate in candidates {
            let worker = candidate.slot.index();
            candidate.kv_capacity_tokens = u32::try_from(self.kv_capacity_tokens).unwrap_or(u32::MAX);
            if self.index_use.source != IndexSource::Learned {
                candidate.hit(view, self.cached[worker], speed);
            }
            if let Some(Foreseen { wait_s, own_s }) = self.foreseen[worker] {
                (candidate.queued_s, candidate.own_s) = (wait_s, own_s);
                // Waiting for memory is in there.
                candidate.kv_capacity_tokens = 0;
            }
        }
    }

    /// A request has gone to a worker.
    pub(super) fn dispatched(&mut self, router: usize, worker: u32, path: &[BlockHash]) {
        if self.minds_flight() {
            for hash in path {
                *self.in_flight[router][worker as usize].entry(*hash).or_insert(0) += 1;
            }
        }
    }

    /// A worker has died, and with it all that was on its way there.
    pub(super) fn forget(&mut self, worker: u32) {
        self.in_flight.iter_mut().for_each(|of_router| of_router[worker as usize].clear());
    }

    /// Its first token has come: its blocks are in the cache.
    pub(super) fn arrived_at(&mut self, router: usize, worker: u32, path: &[BlockHash]) {
        let in_flight = &mut self.in_flight[router][worker as usize];
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

/// What an engine's metrics would say.
fn counts<E: Engine>(load: &WorkerLoad, engine: &E) -> EngineLoad {
    EngineLoad {
        running: load.running_requests,
        waiting: load.waiting_requests,
        kv_used_tokens: load.kv_used_tokens,
        kv_free_tokens: load.kv_free_tokens,
        uncached_tokens: engine.mean_uncached_tokens(),
    }
}
