//! The set of workers: reconciled with what is desired, read through immutable snapshots.

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use pingora_ketama::{Bucket, Continuum, DEFAULT_POINT_MULTIPLE};
use xxhash_rust::xxh3::xxh3_128;

use crate::adapters::Adapter;
use crate::load_table::{self, LoadTable};
use crate::models::{ModelNames, Serving};
use crate::worker::{Role, Worker, WorkerId, WorkerSlot, WorkerSpec};

/// The workers at one moment. Never changes; workers' own counters inside it do.
#[derive(Default)]
pub struct FleetSnapshot {
    workers: Vec<Arc<Worker>>,
    ring: OnceLock<Ring>,
    table: LoadTable,
    names: Arc<ModelNames>,
    seats: Vec<Seat>,
    /// Of each slot, the place of its worker; `u32::MAX` where it has none.
    places: Vec<u32>,
    /// Whether some only compute prompts.
    has_prefill: bool,
}

/// Where the worker at a place of the fleet is found.
#[derive(Clone, Copy)]
struct Seat {
    row: u32,
    slot: WorkerSlot,
    by_address: u32,
}

/// A worker of the fleet, as a pick looks at it.
#[derive(Clone, Copy)]
pub(crate) struct Member<'a> {
    /// What a pick reads of it.
    pub(crate) load: &'a load_table::Row,
    /// Its slot.
    pub(crate) slot: WorkerSlot,
    /// Its place in the fleet.
    pub(crate) place: u32,
    /// Its place in the order of addresses, which is the same for every router with the same workers.
    pub(crate) by_address: u32,
}

/// What a reconciliation changed.
#[derive(Debug, Default)]
pub struct FleetDiff {
    /// Workers that are new.
    pub added: Vec<Arc<Worker>>,
    /// Workers that have left; the tree must forget their slots.
    pub removed: Vec<Arc<Worker>>,
}

/// Keeps slots and makes snapshots. One owner changes it; readers hold snapshots.
#[derive(Default)]
pub struct Fleet {
    current: Arc<FleetSnapshot>,
    table: LoadTable,
    names: Arc<ModelNames>,
    free_slots: Vec<WorkerSlot>,
    slots: u32,
}

impl Fleet {
    /// The present snapshot.
    #[must_use]
    pub fn snapshot(&self) -> Arc<FleetSnapshot> {
        Arc::clone(&self.current)
    }

    /// Makes the fleet what is `desired`, in that order. A worker whose spec is unchanged keeps its state; one whose
    /// address changed under the same id is removed and added, since its cache is another.
    ///
    /// Slots of removed workers are handed out again by later calls: [retire](crate::Decider::retire) them before the next one.
    pub fn reconcile(&mut self, desired: &[WorkerSpec]) -> FleetDiff {
        let mut diff = FleetDiff::default();
        let wanted: HashSet<_> = desired.iter().collect();
        let current = Arc::clone(&self.current);
        let known: HashMap<_, _> = current.workers.iter().map(|worker| (&worker.spec, worker)).collect();
        diff.removed
            .extend(current.workers.iter().filter(|worker| !wanted.contains(&worker.spec)).map(Arc::clone));
        let mut workers = Vec::with_capacity(desired.len());
        for spec in desired {
            if let Some(kept) = known.get(spec) {
                workers.push(Arc::clone(kept));
            } else {
                let (slot, row) = (self.take_slot(), self.table.take());
                let worker = Arc::new(Worker::in_table(spec.clone(), slot, row, Arc::clone(&self.names)));
                diff.added.push(Arc::clone(&worker));
                workers.push(worker);
            }
        }
        diff.removed.iter().for_each(|worker| worker.delist());
        self.free_slots.extend(diff.removed.iter().map(|worker| worker.slot));
        self.current = Arc::new(self.snapshot_of(workers));
        diff
    }

    fn snapshot_of(&self, workers: Vec<Arc<Worker>>) -> FleetSnapshot {
        let mut places = vec![u32::MAX; self.slots as usize];
        for (place, worker) in (0..).zip(&workers) {
            places[worker.slot.index()] = place;
        }
        let mut sorted: Vec<_> = workers.iter().zip(0..).collect();
        sorted.sort_unstable_by_key(|(worker, _): &(_, u32)| {
            (worker.spec.address.as_str(), worker.spec.dp_rank)
        });
        let seat = |worker: &Arc<Worker>| Seat { row: worker.row_number(), slot: worker.slot, by_address: 0 };
        let mut seats: Vec<_> = workers.iter().map(seat).collect();
        for (by_address, (_, place)) in (0..).zip(sorted) {
            seats[place as usize].by_address = by_address;
        }
        FleetSnapshot {
            has_prefill: workers.iter().any(|worker| worker.spec.role == Role::Prefill),
            seats,
            workers,
            ring: OnceLock::new(),
            table: self.table.clone(),
            names: Arc::clone(&self.names),
            places,
        }
    }

    fn take_slot(&mut self) -> WorkerSlot {
        self.free_slots.pop().unwrap_or_else(|| {
            self.slots += 1;
            WorkerSlot(self.slots - 1)
        })
    }
}

impl FleetSnapshot {
    /// The workers, in the order they were configured.
    #[must_use]
    pub fn workers(&self) -> &[Arc<Worker>] {
        &self.workers
    }

    /// Whether there are workers that compute prompts for others.
    #[must_use]
    pub fn has_prefill(&self) -> bool {
        self.has_prefill
    }

    /// The rows of the workers at these places.
    pub(crate) fn rows(&self, places: Range<u32>) -> impl Iterator<Item = Member<'_>> {
        let seats = &self.seats[places.start as usize..places.end as usize];
        let of = |(place, Seat { row, slot, by_address }): (u32, &Seat)| Member {
            load: self.table.row(*row),
            slot: *slot,
            place,
            by_address: *by_address,
        };
        places.zip(seats).map(of)
    }

    /// How many workers there are.
    pub(crate) fn count(&self) -> u32 {
        u32::try_from(self.workers.len()).unwrap_or(u32::MAX)
    }

    /// The worker that has a row.
    pub(crate) fn worker(&self, row: Member<'_>) -> &Arc<Worker> {
        &self.workers[row.place as usize]
    }

    /// Where among the workers that of a slot is.
    pub(crate) fn place(&self, slot: WorkerSlot) -> Option<u32> {
        self.places.get(slot.index()).copied().filter(|place| *place != u32::MAX)
    }

    /// The adapter that `model` is, if it is one.
    pub(crate) fn adapter(&self, model: Option<&str>) -> Option<Adapter> {
        self.names.adapter(model)
    }

    /// Who may serve a model.
    pub(crate) fn serving<'a>(&self, model: Option<&'a str>) -> Serving<'a> {
        self.names.serving(model)
    }

    /// Whether some worker lists a model, usable or not.
    #[must_use]
    pub fn lists(&self, model: &str) -> bool {
        !matches!(self.names.serving(Some(model)), Serving::Untold(_))
    }

    /// What a request has to name one of, sorted; `None` if all workers that have listed models take a request without one for the same,
    /// which is the first that each lists.
    #[must_use]
    pub fn models_to_choose_from(&self) -> Option<Vec<String>> {
        self.names.is_ambiguous().then(|| self.known_models())
    }

    /// All models that workers list, sorted.
    pub(crate) fn known_models(&self) -> Vec<String> {
        let lists = self.workers.iter().filter_map(|worker| worker.models());
        let mut known: Vec<String> = lists.flat_map(|models| models.to_vec()).collect();
        known.sort_unstable();
        known.dedup();
        known
    }

    /// The worker of that name.
    #[must_use]
    pub fn find(&self, id: &str) -> Option<&Arc<Worker>> {
        self.workers.iter().find(|worker| worker.id().as_str() == id)
    }

    /// The other data-parallel ranks behind the address of `worker`; nobody if it is no rank.
    pub fn others_at_endpoint(&self, worker: &Worker) -> impl Iterator<Item = &Arc<Worker>> {
        // Looked for among all of them, but of a rank only.
        let workers = if worker.spec.dp_rank.is_some() { &self.workers[..] } else { &[] };
        let is_other =
            |other: &&Arc<Worker>| other.slot != worker.slot && other.spec.shares_endpoint(&worker.spec);
        workers.iter().filter(is_other)
    }

    /// The consistent-hash ring over all workers; made on first use.
    #[must_use]
    pub fn ring(&self) -> &Ring {
        self.ring.get_or_init(|| Ring::new(&self.workers))
    }
}

/// A consistent-hash ring: a worker that joins or leaves moves only its own share of keys.
pub struct Ring {
    continuum: Continuum,
    /// Sorted by address.
    slots: Vec<(SocketAddr, WorkerSlot)>,
}

impl Ring {
    fn new(workers: &[Arc<Worker>]) -> Self {
        let mut slots: Vec<_> =
            workers.iter().map(|worker| (ring_address(worker.id()), worker.slot)).collect();
        slots.sort_unstable();
        let buckets: Vec<_> = slots.iter().map(|(address, _)| Bucket::new(*address, 1)).collect();
        Self { continuum: Continuum::new(&buckets), slots }
    }

    /// Every worker once, beginning with the one that `key` belongs to; then in ring order.
    pub fn walk(&self, key: u64) -> impl Iterator<Item = WorkerSlot> + '_ {
        let mut seen = vec![false; self.slots.len()];
        let circle_points = self.slots.len() * DEFAULT_POINT_MULTIPLE as usize;
        self.continuum.node_iter(&key.to_le_bytes()).take(circle_points).filter_map(move |address| {
            let at = self.slots.binary_search_by(|(known, _)| known.cmp(address)).ok()?;
            (!std::mem::replace(&mut seen[at], true)).then(|| self.slots[at].1)
        })
    }
}

/// The ring keys by socket address; a worker's is made from its id, so that it keeps its share when it moves host.
fn ring_address(id: &WorkerId) -> SocketAddr {
    let bits = xxh3_128(id.as_str().as_bytes());
    SocketAddr::new(IpAddr::V6(Ipv6Addr::from_bits(bits)), 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(id: &str) -> WorkerSpec {
        WorkerSpec::new(WorkerId::new(id), format!("http://{id}:8000"))
    }

    #[test]
    fn unchanged_workers_keep_their_state_and_slot() {
        let mut fleet = Fleet::default();
        fleet.reconcile(&[spec("a"), spec("b")]);
        fleet.snapshot().find("b").unwrap().mark_up();
        let diff = fleet.reconcile(&[spec("b"), spec("c")]);
        assert_eq!(diff.removed[0].id().as_str(), "a");
        assert_eq!(diff.added[0].id().as_str(), "c");
        let kept = fleet.snapshot().find("b").cloned().unwrap();
        assert!(kept.is_usable());
        assert_eq!(kept.slot, WorkerSlot(1));
    }

    #[test]
    fn the_order_of_addresses_is_the_same_however_workers_are_configured() {
        let mut fleet = Fleet::default();
        fleet.reconcile(&["c", "a", "d", "b"].map(spec));
        let by_address: Vec<_> = fleet.snapshot().rows(0..4).map(|member| member.by_address).collect();
        assert_eq!(by_address, [2, 0, 3, 1]);
    }

    #[test]
    fn freed_slots_are_used_again() {
        let mut fleet = Fleet::default();
        fleet.reconcile(&[spec("a"), spec("b")]);
        fleet.reconcile(&[spec("b")]);
        let diff = fleet.reconcile(&[spec("b"), spec("c")]);
        assert_eq!(diff.added[0].slot, WorkerSlot(0));
    }

    #[test]
    fn a_changed_address_is_another_worker() {
        let mut fleet = Fleet::default();
        fleet.reconcile(&[spec("a")]);
        let diff = fleet.reconcile(&[WorkerSpec::new(WorkerId::new("a"), "http://other:8000".into())]);
        assert_eq!((diff.added.len(), diff.removed.len()), (1, 1));
    }

    #[test]
    fn ring_moves_only_the_share_of_a_worker_that_leaves() {
        let names: Vec<String> = (0..8).map(|n| format!("worker-{n}")).collect();
        let specs: Vec<_> = names.iter().map(|name| spec(name)).collect();
        let mut fleet = Fleet::default();
        fleet.reconcile(&specs);
        let before = fleet.snapshot();
        fleet.reconcile(&specs[..7]);
        let after = fleet.snapshot();
        let gone = before.find("worker-7").unwrap().slot;
        for key in 0..2_000u64 {
            let first = |snapshot: &FleetSnapshot| snapshot.ring().walk(key).next().unwrap();
            if first(&before) != gone {
                assert_eq!(first(&before), first(&after));
            }
        }
        assert_eq!(before.ring().walk(5).count(), 8);
    }
}
