//! Routers in front of the same workers that tell each other what they send where, so that each decides as one router would that sees all of it.
//!
//! Each is connected to every other one and tells it of its requests: to which worker one goes, or is in line for it, with which blocks, when its first
//! token has come, that it is over. The others book it in their own ledger and tree ([`Decider::book`](router_core::Decider::book)). Workers have no part in it, so
//! they may be engines that nobody here wrote. Late or lost, a word costs a prediction: no request waits for an answer of another router.
//!
//! A request's lease says by itself what becomes of it ([`telling`](router_core::telling)); [`telling`] passes that on, [`hearing`] books what comes from
//! others, [`handshake`] is how a connection begins, and [`seal`] what shows that its words are the other's.

mod handshake;
mod hearing;
pub mod metrics;
mod numbers;
mod seal;
mod telling;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use roundhouse_types::RouterPlace;
use roundhouse_wire::replica as wire;
use router_core::request::Answer;
use router_core::telling::{Listener, Told, Word};
use router_core::{Decider, Lease, Leg, RequestView, Worker, WorkerSpec};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::{Notify, oneshot};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use self::handshake::Identity;
pub use self::handshake::ReplicaError;
use self::telling::Ways;
use crate::app::App;
use crate::config::Config;
use crate::discovery;
use crate::discovery::state::SourceState;

/// Blocks of a prompt that others are told of: some 8 MB of it.
const MOST_HASHES: usize = 4_096;

/// What is to be told of a request.
enum Said {
    /// It has been sent; as others are told.
    Sent(Bytes),
    /// What became of it.
    Word(Word),
}

/// Another router that tells this one what it does.
struct Other {
    /// Where it connects from.
    from: String,
    since: Instant,
    /// Its requests that are booked here.
    requests: Arc<AtomicUsize>,
    /// Dropped, its connection is to end.
    _stays: oneshot::Sender<()>,
}

/// All that this router has to do with others.
pub struct Replicas {
    identity: Identity,
    /// Of the hashes of workers' addresses.
    seed: u64,
    requests: AtomicU64,
    /// What others have not been told yet.
    outbox: Mutex<Vec<(u64, Said)>>,
    has_news: Notify,
    /// Where others are told.
    ways: Mutex<Ways>,
    /// Those that are told, by their numbers.
    met: Mutex<BTreeSet<u64>>,
    /// Those that tell this one, by their numbers.
    others: Mutex<BTreeMap<u64, Other>>,
    /// Where others are found that nobody has named.
    pub sources: Vec<Arc<SourceState>>,
}

impl std::fmt::Debug for Replicas {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Replicas").field("router", &self.identity.router).finish_non_exhaustive()
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing that holds one can panic half-way through a change.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Replicas {
    /// A router of that number beside those that `config` names; `None` if it names none.
    #[must_use]
    pub fn of(
        config: &Config,
        router: u64,
        failures: impl Fn(&str) -> prometheus::IntCounter,
    ) -> Option<Arc<Self>> {
        let (key, seed) = config.replica_key.zip(config.prefix_seed)?;
        let sources = config
            .replica_sources
            .iter()
            .map(|source| Arc::new(SourceState::new(Arc::clone(&source.name), failures(&source.name))));
        Some(Arc::new(Self {
            identity: Identity::new(router, &key),
            seed,
            requests: AtomicU64::new(0),
            outbox: Mutex::default(),
            has_news: Notify::new(),
            ways: Mutex::default(),
            met: Mutex::default(),
            others: Mutex::default(),
            sources: sources.collect(),
        }))
    }

    /// Others are told that a request goes to `worker`, or gets into line for it, `now`, and what becomes of its `lease`; or goes there anew, if it was in
    /// line before. Of a worker that is in this process others know nothing.
    pub fn picked(
        self: &Arc<Self>,
        worker: &Worker,
        lease: &mut Lease,
        view: &RequestView<'_>,
        (now, is_anew): (Duration, bool),
    ) {
        if worker.spec.address.starts_with("embedded:") {
            return;
        }
        let request = self.requests.fetch_add(1, Ordering::Relaxed);
        let waited = view.may_wait_since.filter(|_| lease.waits()).map(|since| now.saturating_sub(since));
        let waited_us = waited.map(|waited| u64::try_from(waited.as_micros()).unwrap_or(u64::MAX));
        let sent = wire::Sent { waited_us, is_anew, ..self.sent(worker, view) };
        let sent = telling::encoded(request, wire::word::Word::Sent(sent));
        self.say(request, Said::Sent(sent));
        lease.tell(Told::new(request, Arc::clone(self) as Arc<dyn Listener>));
    }

    fn sent(&self, worker: &Worker, view: &RequestView<'_>) -> wire::Sent {
        let blocks = view.blocks.iter().take(MOST_HASHES);
        let leg = match view.leg {
            Leg::Whole => wire::Leg::Whole,
            Leg::Prefill => wire::Leg::Prefill,
            Leg::Decode => wire::Leg::Decode,
        };
        let count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        wire::Sent {
            worker: key_of(&worker.spec, self.seed),
            leg: leg.into(),
            whole_answer: view.answer != Answer::Streamed,
            generates_nothing: view.answer == Answer::Nothing,
            model: view.model.unwrap_or_default().to_owned(),
            hashes: blocks.map(|block| block.0).collect(),
            tools_blocks: count(view.opening.tools.blocks),
            tools_bytes: view.opening.tools.bytes as u64,
            system_blocks: count(view.opening.system.blocks),
            system_bytes: view.opening.system.bytes as u64,
            prompt_bytes: view.prompt_bytes as u64,
            prompt_tokens: view.prompt_tokens as u64,
            waited_us: None,
            is_anew: false,
            priority: view.precedence.priority.0.into(),
            tenant: view.precedence.tenant,
        }
    }

    fn say(&self, request: u64, said: Said) {
        let mut outbox = locked(&self.outbox);
        let is_first = outbox.is_empty();
        outbox.push((request, said));
        drop(outbox);
        // Whoever passes it on is awake already if it is not.
        if is_first {
            self.has_news.notify_one();
        }
    }

    /// Another router tells this one what it does, from now on, until what is returned is dropped; one of the same number does no more. Ends when the
    /// other thing that is returned resolves.
    fn joins<'a>(
        &'a self,
        decider: &'a Decider,
        router: u64,
        from: String,
    ) -> (Heard<'a>, oneshot::Receiver<()>) {
        let (_stays, is_over) = oneshot::channel();
        let requests = Arc::new(AtomicUsize::new(0));
        let other = Other { from, since: Instant::now(), requests: Arc::clone(&requests), _stays };
        let mut others = locked(&self.others);
        others.insert(router, other);
        self.take_places(decider, &others);
        (Heard { replicas: self, decider, router, requests }, is_over)
    }

    fn take_places(&self, decider: &Decider, others: &BTreeMap<u64, Other>) {
        decider.is_told(self.place_among(others));
    }

    fn place_among(&self, others: &BTreeMap<u64, Other>) -> RouterPlace {
        let count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        let before = others.range(..self.identity.router).count();
        RouterPlace { rank: count(before), count: count(others.len() + 1) }
    }

    /// One that is to be told what this one does, by one way alone: it would take each for the other's end.
    ///
    /// # Errors
    /// When it is told already.
    fn meet(self: &Arc<Self>, router: u64) -> Result<Met, ReplicaError> {
        let is_new = locked(&self.met).insert(router);
        is_new.then(|| Met { replicas: Arc::clone(self), router }).ok_or(ReplicaError::Twice)
    }

    /// Routers that tell this one what they do.
    #[must_use]
    pub fn heard(&self) -> usize {
        locked(&self.others).len()
    }

    /// Routers that are told what this one does.
    #[must_use]
    pub fn told(&self) -> usize {
        locked(&self.ways).connected()
    }

    /// For operators.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let others = locked(&self.others);
        let place = self.place_among(&others);
        let tells = |(router, other): (&u64, &Other)| {
            json!({
                "router": format!("{router:016x}"),
                "from": other.from,
                "requests_in_flight": other.requests.load(Ordering::Relaxed),
                "seconds": other.since.elapsed().as_secs(),
            })
        };
        json!({
            "router": format!("{:016x}", self.identity.router),
            "router_rank": place.rank,
            "routers": place.count,
            "heard": others.iter().map(tells).collect::<Vec<_>>(),
            "told": locked(&self.ways).to_json(),
            "sources": self.sources.iter().map(|source| source.told()).collect::<Vec<_>>(),
        })
    }
}

/// Another router that tells this one what it does.
struct Heard<'a> {
    replicas: &'a Replicas,
    decider: &'a Decider,
    router: u64,
    /// Its requests that are booked here.
    requests: Arc<AtomicUsize>,
}

impl Drop for Heard<'_> {
    fn drop(&mut self) {
        let mut others = locked(&self.replicas.others);
        // Unless it has come back with another connection.
        if others.get(&self.router).is_some_and(|other| Arc::ptr_eq(&other.requests, &self.requests)) {
            others.remove(&self.router);
            self.replicas.take_places(self.decider, &others);
        }
    }
}

/// A router that is told what this one does, until dropped.
struct Met {
    replicas: Arc<Replicas>,
    router: u64,
}

impl Drop for Met {
    fn drop(&mut self) {
        locked(&self.replicas.met).remove(&self.router);
    }
}

impl Listener for Replicas {
    fn hear(&self, request: u64, word: Word) {
        self.say(request, Said::Word(word));
    }
}

/// What routers call a worker among each other, whatever names operators have given it: by its address, and of data-parallel ranks, which share
/// one, by its rank.
fn key_of(spec: &WorkerSpec, seed: u64) -> u64 {
    let of_address = xxh3_64_with_seed(spec.address.as_bytes(), seed);
    spec.dp_rank.map_or(of_address, |rank| xxh3_64_with_seed(&rank.number.to_le_bytes(), of_address))
}

/// Hears others on `listener`, and tells those that `config` names, for as long as the runtime lives. Must be called within a tokio runtime.
///
/// # Errors
/// When it is not known where the Kubernetes API is, or which namespace is meant.
pub fn start(app: &Arc<App>, config: &Config, listener: TcpListener) -> Result<(), String> {
    let Some(replicas) = &app.replicas else { return Ok(()) };
    tokio::spawn(hearing::accept(Arc::clone(app), Arc::clone(replicas), listener));
    let joining = telling::start(Arc::clone(replicas));
    for address in &config.replicas {
        locked(&replicas.ways).begin(replicas, address, &joining);
    }
    for (source, state) in config.replica_sources.iter().zip(&replicas.sources) {
        let (replicas, joining, name) = (Arc::clone(replicas), joining.clone(), Arc::clone(&source.name));
        discovery::begin(config, source, Arc::clone(state), move |found| {
            let addresses = found.iter().map(|found| telling::address_of(&found.spec.address));
            locked(&replicas.ways).are(&replicas, &name, &addresses.collect(), &joining);
            std::future::ready(Ok(()))
        })?;
    }
    Ok(())
}
