//! How much there is to do for workers that are alike: for whoever decides how many of them there are to be.

use std::sync::Arc;
use std::time::Duration;

use super::Decider;
use crate::fleet::FleetSnapshot;
use crate::models::PoolNumber;
use crate::worker::{Role, Worker};

/// What workers that serve the same model, and do the same, have to do.
#[derive(Clone, PartialEq, Debug)]
pub struct Demand {
    /// The first model that they name; none where they have named none yet.
    pub model: Option<Arc<str>>,
    /// What they do.
    pub role: Role,
    /// How many of them new requests can go to.
    pub usable: usize,
    /// How many of them the requests of the last ten seconds or so would keep busy, without pause and without those in the background; by the speeds that have been learned.
    pub workers: f64,
}

impl Decider {
    /// What there is to do `now`, for each kind of workers of the fleet.
    #[must_use]
    pub fn demand(&self, fleet: &FleetSnapshot, now: Duration) -> Vec<Demand> {
        let mut kinds: Vec<((PoolNumber, Role), Demand)> = Vec::new();
        for worker in fleet.workers() {
            let kind = (worker.pool(), worker.spec.role);
            let known = kinds.iter().position(|(known, _)| *known == kind).unwrap_or_else(|| {
                let model = first_model(worker);
                kinds.push((kind, Demand { model, role: kind.1, usable: 0, workers: 0.0 }));
                kinds.len() - 1
            });
            kinds[known].1.usable += usize::from(worker.is_usable());
        }
        let mut state = self.lock();
        for ((pool, role), demand) in &mut kinds {
            demand.workers = state.pools.spare(*pool, *role).others(now.as_secs_f64());
        }
        kinds.into_iter().map(|(_, demand)| demand).collect()
    }
}

fn first_model(worker: &Worker) -> Option<Arc<str>> {
    worker.models()?.first().map(|model| model.as_str().into())
}
