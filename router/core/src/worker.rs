//! One worker: what was configured, and the state that the rest of the router shares.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, RwLock};
use std::time::Duration;

use roundhouse_types::WorkerLoad as ReportedWorkerLoad;

use crate::adapters::Adapter;
use crate::dp_rank::DpRank;
use crate::health::Health;
use crate::ledger::{LoadReading, WorkerLoad};
use crate::load_table::RowHandle;
use crate::models::{ModelNames, PoolNumber};
use crate::reports::{EngineLoad, Reports, bit};
use crate::retry_budget::Rescue;

/// The name of a worker, as operators and clients see it. Cheap to clone.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct WorkerId(Arc<str>);

impl WorkerId {
    /// A worker's name, as given.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self(name.into())
    }

    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for WorkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A worker's place in tables; free to be used again once the worker has left the fleet and the tree has forgotten it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct WorkerSlot(pub u32);

impl WorkerSlot {
    /// The slot as an index.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// What a worker does of the requests that come to the fleet.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Role {
    /// It generates: all of a request, or what follows the prompt that another has computed.
    #[default]
    Generate,
    /// It computes prompts, for those that generate.
    Prefill,
}

/// What an operator says of a worker. Two specs that are equal mean the same worker.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct WorkerSpec {
    /// Its name.
    pub id: WorkerId,
    /// Where it is: `http://host:port` or `embedded:MODEL`; only transports read it.
    pub address: String,
    /// What it does.
    pub role: Role,
    /// Where those that generate ask it for prompts it has computed, if its protocol has such a port; only dispatch reads it.
    pub bootstrap_port: Option<u16>,
    /// Which of the data-parallel ranks behind its address it is, if it is one of several.
    pub dp_rank: Option<DpRank>,
}

impl WorkerSpec {
    /// A worker that generates.
    #[must_use]
    pub fn new(id: WorkerId, address: String) -> Self {
        Self { id, address, role: Role::Generate, bootstrap_port: None, dp_rank: None }
    }
}

const UP: u8 = 1;
const DRAINING: u8 = 2;
const HAS_BEEN_UP: u8 = 4;
/// It was up, and is down by its probes alone; not together with [`UP`].
const SUSPECT: u8 = 8;
const LEFT: u8 = 16;
/// It computes prompts for others; for as long as it is there.
const PREFILL: u8 = 32;
/// Whoever runs it is taking it away, or has not put it to work. Apart from [`DRAINING`], so that neither undoes the other.
const WITHHELD: u8 = 64;
/// Whatever keeps new requests from a worker that may be well.
const OUT: u8 = DRAINING | WITHHELD | LEFT;

/// Whether new requests may go to a worker in this state: it is up and part of the fleet, and nobody is draining it.
pub(crate) fn is_usable(state: u8) -> bool {
    state & (UP | OUT) == UP
}

/// Whether a worker in this state is to get no new requests, however well it is.
pub(crate) fn is_draining(state: u8) -> bool {
    state & OUT != 0
}

/// Whether a worker in this state is down by its probes alone, and nobody is draining it: it may serve all the same.
pub(crate) fn is_suspect(state: u8) -> bool {
    state & (SUSPECT | OUT) == SUSPECT
}

/// Whether a worker in this state computes prompts for others, and nothing else.
pub(crate) fn is_prefill(state: u8) -> bool {
    state & PREFILL != 0
}

/// Whether a worker in this state is there.
pub(crate) fn is_up(state: u8) -> bool {
    state & UP != 0
}

/// How a worker came up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Arrival {
    /// For the first time since it was configured.
    First,
    /// After having been down: its caches may be cold.
    Back,
}

/// A worker of the fleet.
#[derive(Debug)]
pub struct Worker {
    /// What was configured.
    pub spec: WorkerSpec,
    /// Its place in tables.
    pub slot: WorkerSlot,
    /// What the router itself has in flight there.
    pub load: Arc<WorkerLoad>,
    /// What it says of itself.
    pub reports: Reports,
    /// How well it does.
    pub health: Arc<Health>,
    /// Retries for those who were there when it died.
    pub rescue: Rescue,
    /// Its row in the table that picks read, with its state: of [`UP`], [`DRAINING`], [`HAS_BEEN_UP`], [`SUSPECT`], [`LEFT`], [`PREFILL`] and
    /// [`WITHHELD`].
    row: RowHandle,
    /// Whether a probe has ended, however it did.
    is_judged: AtomicBool,
    /// How often it went down.
    downs: AtomicU32,
    /// Probes that have begun.
    probes: AtomicU32,
    /// The last of them since which a piece of a reply has come.
    heard: AtomicU32,
    /// The last of them since which a piece of what its engine generates has come.
    generated: AtomicU32,
    /// Endpoints, a bit each, of which it has ended a stream by the word for that.
    says_ends: AtomicU32,
    models: RwLock<Option<Arc<[String]>>>,
    names: Arc<ModelNames>,
}

impl Worker {
    /// A worker that no probe has seen yet, and that is therefore not usable.
    #[must_use]
    pub fn new(spec: WorkerSpec, slot: WorkerSlot) -> Self {
        Self::in_table(spec, slot, RowHandle::default(), Arc::default())
    }

    /// The same as part of a fleet, whose models are known by `names`.
    pub(crate) fn in_table(
        spec: WorkerSpec,
        slot: WorkerSlot,
        row: RowHandle,
        names: Arc<ModelNames>,
    ) -> Self {
        row.models.store(ModelNames::UNTOLD, Ordering::Relaxed);
        if spec.role == Role::Prefill {
            row.state.store(PREFILL, Ordering::Relaxed);
        }
        Self {
            spec,
            slot,
            load: Arc::new(WorkerLoad::at(row.clone())),
            reports: Reports::at(row.clone()),
            health: Arc::new(Health::at(row.clone())),
            rescue: Rescue::default(),
            row,
            is_judged: AtomicBool::new(false),
            downs: AtomicU32::new(0),
            // So that what has never been heard is not of late.
            probes: AtomicU32::new(2),
            heard: AtomicU32::new(0),
            generated: AtomicU32::new(0),
            says_ends: AtomicU32::new(0),
            models: RwLock::new(None),
            names,
        }
    }

    /// Where its row is.
    pub(crate) fn row_number(&self) -> u32 {
        self.row.number()
    }

    /// Which pool it belongs to.
    pub(crate) fn pool(&self) -> PoolNumber {
        self.row.pool()
    }

    /// It says what its load is `now`, by the clock of picks.
    pub fn hear_load(&self, load: &ReportedWorkerLoad, now: Duration) {
        self.load.lapse(now);
        let others = self.reports.set_load(load, (&self.load.read_sent(), self.load.sent()), now);
        // Tokens alone tell nothing: the router guesses those of its own prompts, and guesses short by the template.
        if others.requests > 0 && others.uncached_tokens > 0 {
            self.load.is_shared(now);
        }
    }

    /// What of this router's requests has been sent there, and not only waits in line for it: what an engine knows of.
    #[must_use]
    pub fn sent_there(&self) -> LoadReading {
        self.load.read_sent()
    }

    /// An engine that nobody here wrote says what its load is `now`, by the clock of picks. What this router had there when it was asked was `before`:
    /// of requests that began or ended meanwhile nobody knows whether it counted them, so that they count as this router's.
    pub fn hear_counts(&self, load: &EngineLoad, before: &LoadReading, now: Duration) {
        self.load.lapse(now);
        let own = self.load.read_sent();
        let own = LoadReading {
            requests: own.requests.max(before.requests),
            prefilling: own.prefilling.max(before.prefilling),
            ..own
        };
        // Intervals between first tokens teach speeds all the same: where others are at an engine all the time there would be none left.
        self.reports.set_counts(load, &own, now);
    }

    /// Its name.
    #[must_use]
    pub fn id(&self) -> &WorkerId {
        &self.spec.id
    }

    /// Whether new requests may go there: it is up, and nobody is draining it.
    #[must_use]
    pub fn is_usable(&self) -> bool {
        is_usable(self.row.state.load(Ordering::Relaxed))
    }

    /// Whether it is there: of the last probes one passed, and no attempt since then was refused a connection.
    #[must_use]
    pub fn is_up(&self) -> bool {
        is_up(self.row.state.load(Ordering::Relaxed))
    }

    /// Whether an operator, or whoever runs it, wants it to get no new requests.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        is_draining(self.row.state.load(Ordering::Relaxed))
    }

    /// A probe of it has ended.
    pub fn judged(&self) {
        self.is_judged.store(true, Ordering::Relaxed);
    }

    /// Whether it may turn out to be up in a moment: it is new, its first probe is under way, and nobody is draining it.
    #[must_use]
    pub fn is_awaited(&self) -> bool {
        !self.is_judged.load(Ordering::Relaxed) && !self.is_up() && !self.is_draining()
    }

    /// Says that it is up. `None` if that is no news.
    pub fn mark_up(&self) -> Option<Arrival> {
        let up = |state| Some(state & !SUSPECT | UP | HAS_BEEN_UP);
        let Ok(before) = self.row.state.fetch_update(Ordering::Relaxed, Ordering::Relaxed, up) else {
            return None;
        };
        match (before & UP, before & HAS_BEEN_UP) {
            (0, 0) => Some(Arrival::First),
            (0, _) => Some(Arrival::Back),
            _ => None,
        }
    }

    /// Says that it is down: there is no connection to it. Returns whether that is news.
    pub fn mark_down(&self) -> bool {
        self.downs.fetch_add(1, Ordering::Relaxed);
        self.row.state.fetch_and(!(UP | SUSPECT), Ordering::Relaxed) & (UP | SUSPECT) != 0
    }

    /// Says that its probes do not pass, although there is a way to it: it is down, unless most are like it. Returns whether that is
    /// news; of one that is down it is none.
    pub fn mark_suspect(&self) -> bool {
        let suspect = |state| is_up(state).then_some(state & !UP | SUSPECT);
        self.row.state.fetch_update(Ordering::Relaxed, Ordering::Relaxed, suspect).is_ok()
    }

    /// Whether it is down by its probes alone, and nobody is draining it.
    #[must_use]
    pub fn is_suspect(&self) -> bool {
        is_suspect(self.row.state.load(Ordering::Relaxed))
    }

    /// A probe of it begins. Returns its number.
    pub fn begin_probe(&self) -> u32 {
        self.probes.fetch_add(1, Ordering::Relaxed).wrapping_add(1)
    }

    /// A piece of some reply has come from it. A look costs less than a write that other cores must hear of, so there is one write for
    /// each probe.
    pub fn hear(&self) {
        self.mark(&self.heard);
    }

    /// A piece has come that its engine has generated, and not only its server said.
    pub fn generates(&self) {
        self.mark(&self.generated);
    }

    fn mark(&self, last: &AtomicU32) {
        let probe = self.probes.load(Ordering::Relaxed);
        if last.load(Ordering::Relaxed) != probe {
            last.store(probe, Ordering::Relaxed);
        }
    }

    /// Whether a piece of a reply has come since the probe of that number began.
    #[must_use]
    pub fn is_heard_since(&self, probe: u32) -> bool {
        is_since(&self.heard, probe)
    }

    /// Whether its engine has generated anything since the probe of that number began.
    #[must_use]
    pub fn has_generated_since(&self, probe: u32) -> bool {
        is_since(&self.generated, probe)
    }

    /// Whether a piece of a reply has come of late: since the last probe but one began.
    #[must_use]
    pub fn is_heard(&self) -> bool {
        self.is_heard_since(self.last_probe_but_one())
    }

    /// Whether its engine has generated anything of late.
    #[must_use]
    pub fn has_generated(&self) -> bool {
        self.has_generated_since(self.last_probe_but_one())
    }

    fn last_probe_but_one(&self) -> u32 {
        self.probes.load(Ordering::Relaxed).wrapping_sub(1)
    }

    /// It has said of a stream that it is over, of the endpoint of that number.
    pub fn hear_end(&self, endpoint: u32) {
        if !self.says_ends(endpoint) {
            self.says_ends.fetch_or(bit(endpoint), Ordering::Relaxed);
        }
    }

    /// Whether it says of that endpoint's streams when they are over, so that one that ends without is not whole.
    #[must_use]
    pub fn says_ends(&self, endpoint: u32) -> bool {
        self.says_ends.load(Ordering::Relaxed) & bit(endpoint) != 0
    }

    /// How often it was said to be down. What was asked before the last time says nothing of it now.
    #[must_use]
    pub fn downs(&self) -> u32 {
        self.downs.load(Ordering::Relaxed)
    }

    /// Gives it no new requests from now on; what it has goes on.
    pub fn drain(&self) {
        self.row.state.fetch_or(DRAINING, Ordering::Relaxed);
    }

    /// Gives it requests again.
    pub fn undrain(&self) {
        self.row.state.fetch_and(!DRAINING, Ordering::Relaxed);
    }

    /// Whoever runs it wants it to get no new requests; what it has goes on. An operator's [`Worker::undrain`] does not change that.
    pub fn withhold(&self) {
        self.row.state.fetch_or(WITHHELD, Ordering::Relaxed);
    }

    /// Whoever runs it has it get requests again, unless an operator is draining it.
    pub fn release(&self) {
        self.row.state.fetch_and(!WITHHELD, Ordering::Relaxed);
    }

    /// It is part of the fleet no more, for good: whoever still has it finds it unusable, and its slot is to be another's.
    pub(crate) fn leave(&self) {
        self.row.state.fetch_or(LEFT, Ordering::Relaxed);
    }

    /// Whether its slot may be another's by now.
    #[must_use]
    pub fn has_left(&self) -> bool {
        self.row.state.load(Ordering::Relaxed) & LEFT != 0
    }

    /// The models it said it serves; `None` while it has not said.
    #[must_use]
    pub fn models(&self) -> Option<Arc<[String]>> {
        self.models.read().ok()?.clone()
    }

    /// Remembers what models it says it serves.
    pub fn set_models(&self, models: Vec<String>) {
        if let Ok(mut known) = self.models.write()
            && known.as_deref() != Some(&models)
        {
            let before = known.take().unwrap_or_default();
            self.row.models.store(self.names.change(&before, &models), Ordering::Relaxed);
            self.row.pool.store(self.names.pool(&models).0, Ordering::Relaxed);
            *known = Some(models.into());
        }
    }

    /// Of the models it serves, it says, these are adapters of others.
    pub fn set_adapters(&self, adapters: &[String]) {
        self.names.tell_apart(&self.models().unwrap_or_default(), adapters);
    }

    /// The adapter that `model` is, if it is one.
    pub(crate) fn adapter(&self, model: Option<&str>) -> Option<Adapter> {
        self.names.adapter(model)
    }

    /// It has left the fleet: what it listed may be looked for at those who have listed nothing, if nobody else lists it.
    pub(crate) fn delist(&self) {
        if let Ok(mut known) = self.models.write()
            && let Some(models) = known.take()
        {
            self.names.change(&models, &[]);
        }
    }

    /// Whether it may serve `model`: yes if it lists the model, or has not listed any yet.
    #[must_use]
    pub fn may_serve(&self, model: Option<&str>) -> bool {
        let Some(model) = model else { return true };
        let Ok(models) = self.models.read() else { return true };
        models.as_deref().is_none_or(|known| known.iter().any(|name| name == model))
    }

    /// Whether it has said that it serves `model`.
    #[must_use]
    pub fn lists(&self, model: &str) -> bool {
        self.models().is_some_and(|known| known.iter().any(|name| name == model))
    }
}

fn is_since(last: &AtomicU32, probe: u32) -> bool {
    last.load(Ordering::Relaxed).wrapping_sub(probe) < u32::MAX / 2
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Its prober may have heard from it once more since it left.
        self.delist();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn serves_anything_until_it_lists_its_models() {
        let spec = WorkerSpec::new(WorkerId::new("a"), "http://a:8000".into());
        let worker = Worker::new(spec, WorkerSlot(0));
        assert!(worker.may_serve(Some("m")));
        worker.set_models(vec!["n".into()]);
        assert!(!worker.may_serve(Some("m")));
        assert!(worker.may_serve(Some("n")));
        assert!(worker.may_serve(None));
    }

    #[test]
    fn reports_changes_of_state_once() {
        let spec = WorkerSpec::new(WorkerId::new("a"), "http://a:8000".into());
        let worker = Worker::new(spec, WorkerSlot(0));
        assert!(!worker.is_usable());
        assert_eq!(worker.mark_up(), Some(Arrival::First));
        assert_eq!(worker.mark_up(), None);
        assert!(worker.mark_down());
        assert!(!worker.mark_down());
        assert_eq!(worker.downs(), 2);
        assert_eq!(worker.mark_up(), Some(Arrival::Back));
    }

    #[test]
    fn one_whose_probes_fail_is_suspect_until_it_is_up_or_gone() {
        let spec = WorkerSpec::new(WorkerId::new("a"), "http://a:8000".into());
        let worker = Worker::new(spec, WorkerSlot(0));
        assert!(!worker.mark_suspect() && !worker.is_suspect(), "it was never up");
        worker.mark_up();
        assert!(worker.mark_suspect() && !worker.mark_suspect());
        assert!(worker.is_suspect() && !worker.is_up() && !worker.is_usable());
        worker.drain();
        assert!(!worker.is_suspect());
        worker.undrain();
        assert_eq!(worker.mark_up(), Some(Arrival::Back));
        assert!(worker.is_usable() && !worker.is_suspect());
        worker.mark_suspect();
        assert!(worker.mark_down() && !worker.is_suspect());
        assert!(!worker.mark_suspect(), "it is gone already");
    }

    #[test]
    fn it_is_known_since_which_probe_a_worker_has_been_heard() {
        let spec = WorkerSpec::new(WorkerId::new("a"), "http://a:8000".into());
        let worker = Worker::new(spec, WorkerSlot(0));
        assert!(!worker.is_heard());
        let first = worker.begin_probe();
        assert!(!worker.is_heard_since(first) && !worker.is_heard());
        worker.hear();
        assert!(worker.is_heard_since(first) && worker.is_heard());
        let second = worker.begin_probe();
        assert!(worker.is_heard_since(first) && !worker.is_heard_since(second) && worker.is_heard());
        worker.begin_probe();
        assert!(!worker.is_heard());
        worker.hear();
        assert!(worker.is_heard_since(second) && !worker.has_generated_since(first));
        worker.generates();
        assert!(worker.has_generated_since(second) && worker.has_generated());
    }

    #[test]
    fn an_operator_and_whoever_runs_a_worker_drain_it_apart() {
        let worker = Worker::new(WorkerSpec::new(WorkerId::new("a"), "http://a:8000".into()), WorkerSlot(0));
        worker.mark_up();
        worker.withhold();
        assert!(worker.is_draining() && !worker.is_usable());
        worker.undrain();
        assert!(!worker.is_usable(), "an operator cannot undo it");
        worker.drain();
        worker.release();
        assert!(worker.is_draining(), "nor it what an operator wants");
        worker.undrain();
        assert!(worker.is_usable() && worker.mark_suspect() && worker.is_suspect());
        worker.withhold();
        assert!(!worker.is_suspect());
    }

    #[test]
    fn draining_outlives_probes() {
        let spec = WorkerSpec::new(WorkerId::new("a"), "http://a:8000".into());
        let worker = Worker::new(spec, WorkerSlot(0));
        worker.mark_up();
        worker.drain();
        worker.mark_down();
        worker.mark_up();
        assert!(worker.is_draining() && worker.is_up() && !worker.is_usable());
        worker.undrain();
        assert!(worker.is_usable());
    }
}
