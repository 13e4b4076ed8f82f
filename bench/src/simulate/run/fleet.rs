//! A router of a simulation: the real decider with a fleet of its own, so that replicas share nothing.

use std::sync::Arc;

use roundhouse_types::RouterPlace;
use router_core::policy::{IndexBound, by_name};
use router_core::prefix::tree::TreeLimits;
use router_core::{Decider, Fleet, FleetSnapshot, Policy, Role, WorkerId, WorkerSpec};

use super::BLOCK_TOKENS;
use crate::simulate::args::Apart;

/// One router.
pub(super) struct Router {
    /// It decides.
    pub(super) decider: Decider,
    /// Its workers, with its own ledger; slot n is engine n.
    pub(super) fleet: Arc<FleetSnapshot>,
}

impl Router {
    /// One with so many `workers`, of which the first do nothing but compute prompts, if `apart` says so; each has so many `blocks`, if that is known.
    pub(super) fn new(
        policy: Box<dyn Policy>,
        (workers, apart): (usize, Apart),
        blocks: Option<usize>,
        (background_load, seed): (Option<f64>, u64),
    ) -> Self {
        let worker_blocks = match policy.index_use().bound {
            IndexBound::WorkerCapacity => blocks.unwrap_or(usize::MAX),
            IndexBound::Tokens(tokens) => tokens.div_ceil(BLOCK_TOKENS),
            IndexBound::None => usize::MAX,
        };
        let limits = TreeLimits { total_blocks: worker_blocks.saturating_mul(workers), worker_blocks };
        let spec = |number: usize| {
            let id = WorkerId::new(&format!("worker-{number}"));
            let role = if number < apart.prefill_workers { Role::Prefill } else { Role::Generate };
            WorkerSpec { role, ..WorkerSpec::new(id, format!("simulated:{number}")) }
        };
        let mut fleet = Fleet::default();
        fleet.reconcile(&(0..workers).map(spec).collect::<Vec<_>>());
        let fleet = fleet.snapshot();
        for worker in fleet.workers() {
            worker.mark_up();
        }
        let decider = Decider::new(policy, limits, seed)
            .with_decode_weight(apart.decode_weight)
            .with_background_load(background_load);
        Self { decider, fleet }
    }

    /// What strangers use: the first half of the workers in turn.
    pub(super) fn of_strangers(workers: usize, seed: u64) -> Self {
        let in_turn = by_name("round_robin").expect("the router has it");
        let router = Self::new(in_turn, (workers, Apart::NOBODY), None, (None, seed));
        for worker in &router.fleet.workers()[workers.div_ceil(2)..] {
            worker.mark_down();
        }
        router
    }

    /// Others tell this one what they do. What they tell says nothing of the size of a worker's cache, which is known beforehand.
    pub(super) fn is_told(&self, place: RouterPlace, blocks: Option<usize>) {
        self.decider.is_told(place);
        for worker in self.fleet.workers() {
            worker.reports.set_kv_capacity(blocks.map(|blocks| blocks * BLOCK_TOKENS));
        }
    }

    /// Every worker has said what adapters it has, and for how many of them it has places.
    pub(super) fn knows_adapters(&self, names: &[String], places: u32) {
        for worker in self.fleet.workers() {
            worker.set_models([&["model".to_owned()], names].concat());
            worker.set_adapters(names);
            worker.load.set_adapter_places(places as usize);
        }
    }

    /// A worker has died: nothing goes there, and its cache is gone.
    pub(super) fn loses(&self, worker: u32) {
        let worker = &self.fleet.workers()[worker as usize];
        worker.mark_down();
        self.decider.forget(worker);
    }

    /// It takes requests again.
    pub(super) fn comes_back(&self, worker: u32) {
        self.fleet.workers()[worker as usize].mark_up();
    }
}
