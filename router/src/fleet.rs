//! The fleet with its transports: what is desired comes in, a roster that each request reads comes out.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Instant;

use arc_swap::{ArcSwap, Guard};
use router_core::prefix::feed::Listener;
use router_core::{Decider, Fleet, FleetSnapshot, Worker, WorkerId, WorkerSpec};
use serde_json::Value;
use tokio::sync::Notify;
use tokio::task::AbortHandle;

use crate::config::{Settings, Switch};
use crate::desired::{Desired, Found, NewRequests, Wanted};
use crate::file_limit;
use crate::kv_events::Follower;
use crate::legacy::Legacy;
use crate::probes::{Overlaps, Prober};
use crate::stall::Stalls;
use crate::transport::{AddressError, Connector, Transport, TransportError};

/// A worker and the way to it.
pub struct Upstream {
    /// The worker.
    pub worker: Arc<Worker>,
    /// The way to it.
    pub transport: Arc<dyn Transport>,
    /// Entries of its `/v1/models`, as it gave them.
    pub model_entries: RwLock<Arc<[Value]>>,
    /// Wakes its prober before its time.
    pub probe_now: Notify,
    /// Tells those who wait for it that it stands still.
    pub stalls: Arc<Stalls>,
    /// Who follows what it says of itself, if it may.
    pub follower: Option<Follower>,
}

impl Upstream {
    /// What it says of its models.
    #[must_use]
    pub fn entries(&self) -> Arc<[Value]> {
        Arc::clone(&self.model_entries.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether it says of its models that they are one of these owners'.
    #[must_use]
    pub fn is_of(&self, owners: &[&str]) -> bool {
        self.owner(|owner| owners.contains(&owner).then_some(())).is_some()
    }

    /// What `of` makes of an owner of its models, if it makes anything of one.
    pub fn owner<T>(&self, of: impl Fn(&str) -> Option<T>) -> Option<T> {
        self.entries().iter().find_map(|entry| of(entry.get("owned_by")?.as_str()?))
    }
}

/// All workers at one moment, with the ways to them.
#[derive(Default)]
pub struct Roster {
    /// What policies see.
    pub snapshot: Arc<FleetSnapshot>,
    /// By slot.
    upstreams: Vec<Option<Arc<Upstream>>>,
    /// Which source has found a worker that nobody has named.
    sources: HashMap<WorkerId, Arc<str>>,
}

impl Roster {
    /// The way to `worker`; `None` if it has left.
    #[must_use]
    pub fn upstream(&self, worker: &Arc<Worker>) -> Option<Arc<Upstream>> {
        let upstream = self.upstreams.get(worker.slot.index())?.as_ref()?;
        Arc::ptr_eq(&upstream.worker, worker).then(|| Arc::clone(upstream))
    }

    /// The source that has found the worker of that name, if one has.
    #[must_use]
    pub fn source(&self, id: &WorkerId) -> Option<&str> {
        self.sources.get(id).map(|source| &**source)
    }

    /// All workers, in fleet order.
    pub fn upstreams(&self) -> impl Iterator<Item = &Arc<Upstream>> {
        self.snapshot.workers().iter().filter_map(|worker| self.upstreams.get(worker.slot.index())?.as_ref())
    }
}

/// Why a worker could not be added.
#[derive(Debug, thiserror::Error)]
pub enum FleetError {
    /// Its address is none.
    #[error("worker {id}: {source}")]
    Address {
        /// Its name.
        id: String,
        /// What is wrong.
        source: AddressError,
    },
    /// The embedded worker did not start.
    #[cfg(feature = "embedded")]
    #[error("worker {id}: {source}")]
    Embedded {
        /// Its name.
        id: String,
        /// Why.
        #[source]
        source: worker::WorkerError,
    },
    /// This program has no embedded workers.
    #[error("worker {id}: this router was built without embedded workers")]
    NoEmbedded {
        /// Its name.
        id: String,
    },
}

/// Owns the fleet.
pub struct FleetService {
    settings: Settings,
    connector: Connector,
    /// Where the clock of workers' health begins.
    started: Instant,
    /// By which workers tell routers apart, and these each other.
    listener: Listener,
    /// What the router before this one knew.
    legacy: Option<Legacy>,
    /// For probes of all workers.
    overlaps: Overlaps,
    roster: Arc<ArcSwap<Roster>>,
    /// Changes come one after the other.
    change: Mutex<Change>,
}

#[derive(Default)]
struct Change {
    desired: Desired,
    fleet: Fleet,
    /// The tasks of each worker.
    tasks: HashMap<WorkerId, Vec<AbortHandle>>,
}

impl FleetService {
    /// A fleet without workers, whose health goes by the time since `started`.
    #[must_use]
    pub fn new(
        settings: &Settings,
        connector: Connector,
        (listener, legacy): (Listener, Option<Legacy>),
        started: Instant,
    ) -> Self {
        Self {
            settings: settings.clone(),
            connector,
            started,
            listener,
            legacy,
            overlaps: Overlaps::of(file_limit::most()),
            roster: Arc::default(),
            change: Mutex::default(),
        }
    }

    /// The workers as they are now; read without a lock.
    #[must_use]
    pub fn roster(&self) -> Guard<Arc<Roster>> {
        self.roster.load()
    }

    /// Makes the fleet what is `named`, and what sources have found: starts or connects what is new, forgets what has left. Loads models of
    /// embedded workers, so it may block for a while. Must be called within a tokio runtime, which then runs the probers.
    ///
    /// # Errors
    /// When a new worker cannot be reached in principle; then nothing has changed.
    pub fn set(&self, named: &[WorkerSpec], decider: &Arc<Decider>) -> Result<(), FleetError> {
        self.set_over(named, decider, |spec| self.transport(spec, named))
    }

    /// The same with ways to new workers of the caller's choice.
    ///
    /// # Errors
    /// When `way` makes none; then nothing has changed.
    pub fn set_over(
        &self,
        named: &[WorkerSpec],
        decider: &Arc<Decider>,
        way: impl Fn(&WorkerSpec) -> Result<Arc<dyn Transport>, FleetError>,
    ) -> Result<(), FleetError> {
        let mut change = self.change.lock().unwrap_or_else(PoisonError::into_inner);
        let mut desired = change.desired.clone();
        desired.named = named.to_vec();
        self.reconcile(&mut change, desired, decider, way)
    }

    /// Makes the fleet what is named, and what `source` has `found` now in place of what it had found before. Otherwise as
    /// [`FleetService::set`].
    ///
    /// # Errors
    /// When a new worker cannot be reached in principle; then nothing has changed.
    pub fn publish(
        &self,
        source: &Arc<str>,
        found: Vec<Found>,
        decider: &Arc<Decider>,
    ) -> Result<(), FleetError> {
        let mut change = self.change.lock().unwrap_or_else(PoisonError::into_inner);
        let mut desired = change.desired.clone();
        let workers = found.len();
        if !desired.publish(source, found) {
            return Ok(());
        }
        self.reconcile(&mut change, desired, decider, |spec| self.transport(spec, &[]))?;
        tracing::info!(source = &**source, workers, "workers found");
        let left_out = change.desired.left_out(source);
        if let Some(first) = left_out.first() {
            tracing::warn!(
                source = &**source, workers = left_out.len(), first = %first.id,
                "left out: other workers have these names; NAME= in front of a source makes its workers' names differ"
            );
        }
        Ok(())
    }

    /// Edits what is desired, and makes the fleet that; of edits at once, each sees those before it. Otherwise as
    /// [`FleetService::set`].
    ///
    /// # Errors
    /// Those of `edit`, and of [`FleetService::set`]; then nothing has changed.
    pub fn update<T, E: From<FleetError>>(
        &self,
        decider: &Arc<Decider>,
        edit: impl FnOnce(&mut Desired) -> Result<T, E>,
    ) -> Result<T, E> {
        let mut change = self.change.lock().unwrap_or_else(PoisonError::into_inner);
        let mut desired = change.desired.clone();
        let edited = edit(&mut desired)?;
        let named = desired.named.clone();
        self.reconcile(&mut change, desired, decider, |spec| self.transport(spec, &named))?;
        Ok(edited)
    }

    fn reconcile(
        &self,
        change: &mut Change,
        desired: Desired,
        decider: &Arc<Decider>,
        way: impl Fn(&WorkerSpec) -> Result<Arc<dyn Transport>, FleetError>,
    ) -> Result<(), FleetError> {
        let (roster, whole) = (self.roster.load_full(), desired.whole());
        let workers = roster.snapshot.workers().iter();
        let known: HashMap<_, _> = workers.map(|worker| (worker.id(), &worker.spec)).collect();
        let specs: Vec<_> = whole.iter().map(|wanted| wanted.worker.spec.clone()).collect();
        let mut transports = HashMap::new();
        for spec in specs.iter().filter(|spec| known.get(&spec.id) != Some(spec)) {
            transports.insert(spec.id.clone(), way(spec)?);
        }
        let diff = change.fleet.reconcile(&specs);
        let snapshot = change.fleet.snapshot();
        change.desired = desired;
        let mut upstreams = roster.upstreams.clone();
        for worker in &diff.removed {
            if let Some(upstream) = roster.upstream(worker).filter(|upstream| upstream.stalls.is_now()) {
                // Nobody else will, from now on.
                upstream.stalls.tell();
            }
            upstreams[worker.slot.index()] = None;
            for task in change.tasks.remove(worker.id()).unwrap_or_default() {
                task.abort();
            }
        }
        for worker in diff.added {
            let Some(transport) = transports.remove(worker.id()) else { continue };
            if let Some(legacy) = &self.legacy {
                legacy.give(&worker, decider);
            }
            let mut tasks = Vec::new();
            let follower = self.follower(&worker, decider, &mut tasks);
            let upstream = Arc::new(Upstream {
                worker: Arc::clone(&worker),
                transport,
                model_entries: RwLock::new(Arc::new([])),
                probe_now: Notify::new(),
                stalls: Arc::default(),
                follower,
            });
            upstreams.resize(upstreams.len().max(worker.slot.index() + 1), None);
            upstreams[worker.slot.index()] = Some(Arc::clone(&upstream));
            let probed = (upstream, Arc::clone(&self.roster), self.overlaps.clone());
            let prober = Prober::new(probed, Arc::clone(decider), &self.settings, self.started);
            tasks.push(tokio::spawn(prober.run()).abort_handle());
            change.tasks.insert(worker.id().clone(), tasks);
        }
        // Before anybody finds them who are new.
        withhold(&snapshot, &whole);
        let named = |wanted: Wanted| Some((wanted.worker.spec.id, wanted.source?));
        let sources = whole.into_iter().filter_map(named).collect();
        self.roster.store(Arc::new(Roster { snapshot, upstreams, sources }));
        // Once nobody finds them any more: else requests would find nobody while this lasts.
        diff.removed.iter().for_each(|worker| decider.retire(worker));
        Ok(())
    }

    /// Who follows what `worker` says of its cache, and the tasks of that; `None` for one that says nothing.
    fn follower(
        &self,
        worker: &Arc<Worker>,
        decider: &Arc<Decider>,
        tasks: &mut Vec<AbortHandle>,
    ) -> Option<Follower> {
        let decider = (Arc::clone(decider), self.started);
        match self.connector.grpc(&worker.spec).ok()? {
            Some(grpc) => {
                let (follower, following) =
                    Follower::of_ours(Arc::clone(worker), (grpc, self.listener), decider);
                tasks.push(tokio::spawn(following).abort_handle());
                Some(follower)
            }
            None if self.settings.engine_events == Switch::On && decider.0.reads_prefixes() => {
                let (follower, following) = Follower::of_engine(Arc::clone(worker), decider);
                tasks.push(tokio::spawn(following).abort_handle());
                Some(follower)
            }
            None => None,
        }
    }

    /// A connection to `worker` could not be made, and so none to other ranks of its endpoint. If that says that it is not there, or is late where probes fail as well, it is out
    /// until a probe passes; otherwise a probe looks at once.
    pub fn report_unreachable(&self, worker: &Arc<Worker>, error: &TransportError, decider: &Decider) {
        let roster = self.roster();
        let is_gone = error.takes_worker_out() || error.is_timeout() && worker.is_suspect();
        self.found_unreachable(worker, (is_gone, error), decider);
        for rank in roster.snapshot.others_at_endpoint(worker) {
            self.found_unreachable(rank, (is_gone, error), decider);
        }
    }

    fn found_unreachable(
        &self,
        worker: &Arc<Worker>,
        (is_gone, error): (bool, &TransportError),
        decider: &Decider,
    ) {
        if is_gone && worker.mark_down() {
            tracing::warn!(worker = %worker.id(), "worker is unreachable; taken out until a probe passes");
            if error.ends_caches() {
                decider.forget(worker);
            }
        }
        if let Some(upstream) = self.roster().upstream(worker) {
            upstream.probe_now.notify_one();
        }
    }

    fn transport(&self, spec: &WorkerSpec, desired: &[WorkerSpec]) -> Result<Arc<dyn Transport>, FleetError> {
        let embedded = |spec: &WorkerSpec| spec.address.starts_with("embedded:");
        if embedded(spec) {
            return start_embedded(spec, desired.iter().filter(|spec| embedded(spec)).count());
        }
        let address = |source| FleetError::Address { id: spec.id.to_string(), source };
        self.connector.way(spec).map_err(address)
    }
}

/// Says to the workers of `snapshot`, which are those of `whole` in its order, whether they are to get new requests.
fn withhold(snapshot: &FleetSnapshot, whole: &[Wanted]) {
    for (worker, wanted) in snapshot.workers().iter().zip(whole) {
        match wanted.worker.new_requests {
            NewRequests::Taken => worker.release(),
            NewRequests::Withheld => worker.withhold(),
        }
    }
}

/// Starts a worker with its share of the cores and of the memory.
#[cfg(feature = "embedded")]
fn start_embedded(spec: &WorkerSpec, siblings: usize) -> Result<Arc<dyn Transport>, FleetError> {
    let model = spec.address.trim_start_matches("embedded:");
    let Ok(source) = model.parse::<worker::ModelSource>();
    let mut config = worker::WorkerConfig::new(source);
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    config.threads = (cores / siblings.max(1)).max(1);
    config.memory_sharers = siblings.max(1);
    let started = worker::Worker::start(config)
        .map_err(|source| FleetError::Embedded { id: spec.id.to_string(), source })?;
    Ok(Arc::new(crate::transport::EmbeddedTransport::new(started)))
}

#[cfg(not(feature = "embedded"))]
fn start_embedded(spec: &WorkerSpec, _siblings: usize) -> Result<Arc<dyn Transport>, FleetError> {
    Err(FleetError::NoEmbedded { id: spec.id.to_string() })
}

#[cfg(test)]
mod tests {
    use roundhouse_types::BlockHash;
    use router_core::policy::by_name;
    use router_core::prefix::tree::TreeLimits;
    use router_core::{Among, RequestView};

    use super::*;
    use crate::config::Cli;
    use crate::keys::WorkerKeys;

    fn fleet_of(workers: &str) -> (FleetService, Arc<Decider>) {
        let config = Cli::configure(&[workers.to_owned()], None).unwrap();
        let connector = Connector::new(config.settings.connect_timeout, Vec::new(), WorkerKeys::default());
        let fleet =
            FleetService::new(&config.settings, connector, (Listener::default(), None), Instant::now());
        let policy = by_name("prefix_aware").unwrap();
        let decider = Arc::new(Decider::new(policy, TreeLimits::within_bytes(1 << 20), 1));
        fleet.set(&config.workers, &decider).unwrap();
        (fleet, decider)
    }

    /// Whether a worker that holds a prompt may still be picked, and what the tree still knows, once a connection has failed so.
    /// No prober gets its turn meanwhile.
    fn after(error: &TransportError) -> (bool, usize) {
        after_with(error, |_| {})
    }

    fn after_with(error: &TransportError, prepare: fn(&Worker)) -> (bool, usize) {
        let (fleet, decider) = fleet_of("--workers=127.0.0.1:9");
        let snapshot = Arc::clone(&fleet.roster().snapshot);
        let worker = &snapshot.workers()[0];
        worker.mark_up();
        let blocks = [BlockHash(1), BlockHash(2)];
        let request =
            RequestView { blocks: &blocks, prompt_bytes: 128, prompt_tokens: 32, ..RequestView::default() };
        drop(decider.decide(&snapshot, &request, Among::Untried(&[]), std::time::Duration::ZERO).unwrap());
        assert_eq!(decider.tree_blocks(), 2);
        prepare(worker);
        fleet.report_unreachable(worker, error, &decider);
        (worker.is_up() || worker.is_suspect(), decider.tree_blocks())
    }

    #[tokio::test]
    async fn whoever_refuses_takes_all_ranks_of_its_address_out_and_nobody_else() {
        let (fleet, decider) = fleet_of("--workers=a=127.0.0.1:9?dp=3,b=127.0.0.1:8?dp=1,c=127.0.0.1:7");
        let snapshot = Arc::clone(&fleet.roster().snapshot);
        let up =
            || snapshot.workers().iter().filter(|worker| worker.is_up()).map(|worker| worker.id().as_str());
        for worker in snapshot.workers() {
            worker.mark_up();
        }
        let late = TransportError::ConnectTimeout { limit: std::time::Duration::from_secs(5) };
        fleet.report_unreachable(&snapshot.workers()[1], &late, &decider);
        assert_eq!(up().count(), 5, "one packet may have been lost");
        let refused = TransportError::Connect {
            address: "127.0.0.1:9".into(),
            source: std::io::Error::from_raw_os_error(111),
        };
        fleet.report_unreachable(&snapshot.workers()[1], &refused, &decider);
        assert_eq!(up().collect::<Vec<_>>(), ["b-dp0", "c"]);
    }

    #[tokio::test]
    async fn only_who_refuses_connections_is_forgotten() {
        let system_says = |code| TransportError::Connect {
            address: "127.0.0.1:9".into(),
            source: std::io::Error::from_raw_os_error(code),
        };
        assert_eq!(after(&system_says(111)), (false, 0), "refused");
        assert_eq!(after(&system_says(113)), (false, 2), "no route");
        let limit = std::time::Duration::from_secs(5);
        let late = TransportError::ConnectTimeout { limit };
        assert_eq!(after(&late), (true, 2));
        let fails_its_probes = |worker: &Worker| assert!(worker.mark_suspect());
        assert_eq!(after_with(&late, fails_its_probes), (false, 2), "two say so");
        let source = std::io::Error::other("the name server is busy");
        assert_eq!(after(&TransportError::Resolve { host: "a".into(), source }), (true, 2));
    }
}
