//! Asks each worker whether it is well and what it serves; and one that has come up how much its cache holds.
//!
//! A worker that is down is asked again and again without waiting for earlier answers: a connection that is lost on the
//! way to a host that is just coming up would hold back all probes behind it for seconds.
//!
//! And it watches whether the worker generates: one that stands still is out until it goes on, though its process be well.

mod examination;
mod silence;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use bytes::{Bytes, BytesMut};
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use http::StatusCode;
use http::uri::PathAndQuery;
use http_body_util::BodyExt;
use router_core::{Arrival, Decider, Worker};
use serde_json::Value;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep_until, timeout};

use crate::cache_size;
use crate::config::Settings;
use crate::disaggregation::PrefillProtocol;
use crate::fleet::{Roster, Upstream};
use crate::kv_events::{EngineEvents, Follower, SGLANGS_EVENTS_PATH, ServerInfo, VLLMS_EVENTS_PATH};
use crate::stall::can_stand_in;
use crate::transport::{Transport, TransportError, WorkerRequest};
use examination::{Finding, examine, recovery};
use silence::{Reading, Silence, Step};

/// Probes that must fail, one after the other, to take out a worker that was up.
const FAILURES_TO_DOWN: usize = 2;
/// Models are asked for on the way up, and then with every so many-th probe.
const PROBES_PER_MODEL_LIST: usize = 5;
/// Most of a probe's answer that is read.
const MAX_ANSWER_BYTES: usize = 4 << 20;
/// Probes of one worker on their way at once. Each ends with its time limit; this bounds them whatever the knobs.
const MAX_RUNNING: usize = 32;
/// Of the files that may be open, one in so many is for probes beside another of the same worker. With a thousand workers that say nothing those
/// would be twenty thousand connections.
const FILES_PER_OVERLAP: usize = 16;
/// Enough for a rack of workers that say nothing, where files are not scarce.
const MOST_OVERLAPS: usize = 4_096;

/// How long a worker may take to say how much its cache holds. That is asked beside the probes: an engine that is slow to tell is well.
const CACHE_SIZE_LIMIT: Duration = Duration::from_secs(5);
/// So often it is asked, with models, while it has not told.
const MOST_CACHE_ASKS: usize = 3;
/// So often it is asked where it publishes its cache events, while it cannot be asked.
const MOST_EVENT_ASKS: usize = 5;

/// Room for probes that go out beside another of the same worker; of all workers together.
#[derive(Clone, Debug)]
pub struct Overlaps(Arc<Semaphore>);

impl Overlaps {
    /// As many as go with `files` that may be open.
    #[must_use]
    pub fn of(files: usize) -> Self {
        Self(Arc::new(Semaphore::new((files / FILES_PER_OVERLAP).min(MOST_OVERLAPS))))
    }

    /// Room for another probe of a worker that has so many `running`; the first needs none.
    fn room(&self, running: usize) -> Option<Room> {
        match running {
            0 => Some(Room { _permit: None }),
            MAX_RUNNING.. => None,
            _ => Some(Room { _permit: Some(Arc::clone(&self.0).try_acquire_owned().ok()?) }),
        }
    }
}

/// What a probe occupies.
struct Room {
    _permit: Option<OwnedSemaphorePermit>,
}

/// Probes one worker.
pub struct Prober {
    upstream: Arc<Upstream>,
    roster: Arc<ArcSwap<Roster>>,
    overlaps: Overlaps,
    decider: Arc<Decider>,
    /// Where the clock of workers' health begins.
    started: std::time::Instant,
    path: PathAndQuery,
    limit: Duration,
    interval: Duration,
    interval_down: Duration,
    slow_start: Option<Duration>,
    prefill_protocol: PrefillProtocol,
    /// How long one that stands still and cannot be asked is out until it is tried.
    trial_after: Duration,
    silence: Silence,
    /// The number of the last probe.
    last_probe: u32,
    /// Since the last that passed.
    failures: usize,
    /// Since the last that failed.
    passed: usize,
    /// How often the worker is yet to be asked how much its cache holds.
    cache_asks: usize,
    /// How often it is yet to be asked where it publishes its cache events.
    event_asks: usize,
    /// What is known of what the worker holds, since the last probe that passed.
    knowledge: Knowledge,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Knowledge {
    Kept,
    Forgotten,
}

/// A probe's end: what was so when it began, and what came of it.
type Probe = Pin<Box<dyn Future<Output = (Begun, Result<(), ProbeError>)> + Send>>;

type Examination = Pin<Box<dyn Future<Output = Finding> + Send>>;

/// What was so when a probe began.
#[derive(Clone, Copy)]
struct Begun {
    /// How often the worker had been down.
    downs: u32,
    /// The probe's number.
    number: u32,
}

impl Prober {
    /// A prober of `upstream`, one of the workers in `roster`. What it finds out goes to the worker's state; `decider` forgets a worker that is down.
    ///
    /// # Panics
    /// When the probe's path is none; [`Settings::check`] makes sure that it is.
    #[must_use]
    pub fn new(
        (upstream, roster, overlaps): (Arc<Upstream>, Arc<ArcSwap<Roster>>, Overlaps),
        decider: Arc<Decider>,
        settings: &Settings,
        started: std::time::Instant,
    ) -> Self {
        Self {
            last_probe: upstream.worker.begin_probe(),
            upstream,
            roster,
            overlaps,
            decider,
            started,
            path: settings.probe_path.parse().expect("checked with the configuration"),
            limit: settings.probe_timeout,
            interval: settings.probe_interval,
            interval_down: settings.probe_interval_down,
            slow_start: settings.slow_start.limit(),
            prefill_protocol: settings.prefill_protocol,
            trial_after: 2 * settings.stall_timeout.limit().unwrap_or_default(),
            silence: Silence::new(settings.stall_timeout.limit()),
            failures: 0,
            passed: 0,
            cache_asks: 0,
            event_asks: 0,
            knowledge: Knowledge::Kept,
        }
    }

    /// Probes until the task is aborted.
    pub async fn run(mut self) {
        let upstream = Arc::clone(&self.upstream);
        let (mut running, mut asking) = (FuturesUnordered::new(), FuturesUnordered::new());
        let mut looking = FuturesUnordered::new();
        // One at most.
        let mut examining = FuturesUnordered::<Examination>::new();
        let mut last = Instant::now();
        let mut next = last;
        loop {
            tokio::select! {
                () = sleep_until(next) => {
                    if let Some(examination) = self.look_for_silence() {
                        examining.push(examination);
                    } else if self.silence.is_well() {
                        examining.clear();
                    }
                    if let Some(room) = self.overlaps.room(running.len()) {
                        running.push(self.probe(room));
                    }
                    last = Instant::now();
                    next = last + self.pause();
                }
                Some((begun, outcome)) = running.next() => {
                    self.judge(begun, outcome);
                    // One question after the other: an engine has other things to do.
                    if looking.is_empty() && asking.is_empty() {
                        if self.asks_events() {
                            looking.push(timeout(CACHE_SIZE_LIMIT, engine_events(&upstream)));
                        } else if self.asks_cache_size() {
                            asking.push(timeout(CACHE_SIZE_LIMIT, cache_size(&upstream)));
                        }
                    }
                    next = next.min(last + self.pause());
                }
                Some(finding) = examining.next() => {
                    if self.silence.is_still() && finding == Finding::Unknown {
                        tracing::info!(worker = %upstream.worker.id(), "worker answers no question of one token; it is tried");
                    }
                    let step = self.silence.found(finding);
                    self.heed(step);
                }
                Some(told) = asking.next() => {
                    if let Ok(Some(tokens)) = told {
                        tracing::info!(worker = %upstream.worker.id(), tokens, "KV cache");
                        upstream.worker.reports.set_kv_capacity(Some(tokens));
                        self.cache_asks = 0;
                    }
                }
                Some(told) = looking.next() => {
                    // Who has not told is asked with the next probe that passes.
                    if let (Ok(Some(events)), Some(follower)) = (told, &upstream.follower) {
                        follower.offer(events);
                        self.event_asks = 0;
                    }
                    if asking.is_empty() && self.asks_cache_size() {
                        asking.push(timeout(CACHE_SIZE_LIMIT, cache_size(&upstream)));
                    }
                }
                // Somebody could not connect. That counts like a probe, and others look at once, but no more often than at a worker that
                // is down.
                () = upstream.probe_now.notified() => {
                    self.failures = self.failures.max(1);
                    next = next.min(last + self.interval_down);
                }
            }
        }
    }

    /// Looks whether the worker generates. Returns how it is to be examined, if it is from now on.
    fn look_for_silence(&mut self) -> Option<Examination> {
        let worker = &self.upstream.worker;
        let step = self.silence.look(Reading {
            now: Instant::now(),
            generates: worker.has_generated_since(self.last_probe),
            has_requests: worker.load.own() > 0,
            expected: worker.load.silence(),
        });
        self.heed(step);
        let protocol = self.prefill_protocol;
        let time = match step {
            Step::Examine(time) => time,
            Step::Judge(silence) if self.others_are_well() => {
                self.stands_still(silence);
                let (upstream, patience) = (Arc::clone(&self.upstream), self.trial_after);
                return Some(Box::pin(async move { recovery(&upstream, protocol, patience).await }));
            }
            Step::Judge(silence) => self.waits_for_it(silence)?,
            _ => return None,
        };
        let upstream = Arc::clone(&self.upstream);
        Some(Box::pin(async move { examine(&upstream, protocol, time).await }))
    }

    /// Nobody could stand in for it. Returns for how long it is examined again.
    fn waits_for_it(&mut self, silence: Duration) -> Option<Duration> {
        let (time, is_news) = self.silence.waits_for_it()?;
        if is_news {
            let worker = &self.upstream.worker;
            tracing::warn!(
                worker = %worker.id(), requests = worker.load.own(), silent_s = silence.as_secs(),
                "worker seems to hang, and is waited for: there is no other for its models, or all others are silent too"
            );
        }
        Some(time)
    }

    fn heed(&self, step: Step) {
        match step {
            Step::Recovered => self.upstream.stalls.over(),
            Step::TellAgain if self.others_are_well() => self.upstream.stalls.tell(),
            _ => {}
        }
    }

    /// It is out, and whoever waits for it learns of it.
    fn stands_still(&mut self, silence: Duration) {
        let worker = &self.upstream.worker;
        self.silence.stands_still();
        worker.mark_suspect();
        tracing::warn!(
            worker = %worker.id(), requests = worker.load.own(), silent_s = silence.as_secs(),
            "worker stands still; out until it generates again"
        );
        self.upstream.stalls.found(silence);
        self.upstream.stalls.tell();
    }

    /// Whether there is somebody else for the same requests, and what stops this one does not stop all: a fleet that is paused is waited for.
    fn others_are_well(&self) -> bool {
        let (worker, roster) = (&self.upstream.worker, self.roster.load());
        let models = worker.models();
        let shares_model = |other: &Worker| {
            let models = models.as_deref();
            models.is_none_or(|models| models.iter().any(|model| other.may_serve(Some(model))))
        };
        let others = || {
            let others = roster.snapshot.workers().iter();
            others.filter(|other| can_stand_in(other, worker, self.prefill_protocol) && shares_model(other))
        };
        let mut busy = others().filter(|other| other.load.own() > 0).peekable();
        match busy.peek() {
            Some(_) => busy.any(|other| other.has_generated()),
            None => others().next().is_some(),
        }
    }

    /// Whether the worker is to be asked now; one of ours that is followed tells by itself.
    fn asks_cache_size(&mut self) -> bool {
        let follower = self.upstream.follower.as_ref();
        let asks = follower.is_none_or(Follower::is_of_engine)
            && self.cache_asks > 0
            && self.upstream.worker.is_up()
            && self.passed % PROBES_PER_MODEL_LIST == 1;
        self.cache_asks -= usize::from(asks);
        asks
    }

    /// Whether the worker, which has just come up, is to be asked where it publishes its cache events.
    fn asks_events(&mut self) -> bool {
        let is_up = self.upstream.worker.is_up();
        let follower = self.upstream.follower.as_ref().filter(|_| is_up);
        let asks = self.event_asks > 0 && follower.is_some_and(Follower::is_of_engine);
        self.event_asks -= usize::from(asks);
        asks
    }

    fn pause(&self) -> Duration {
        let well = self.upstream.worker.is_up() && self.failures == 0;
        if well { self.interval } else { self.interval_down }
    }

    fn probe(&mut self, room: Room) -> Probe {
        let worker = &self.upstream.worker;
        self.last_probe = worker.begin_probe();
        let list_models = !worker.is_up() || self.passed.is_multiple_of(PROBES_PER_MODEL_LIST);
        let (upstream, path, limit) = (Arc::clone(&self.upstream), self.path.clone(), self.limit);
        let begun = Begun { downs: worker.downs(), number: self.last_probe };
        Box::pin(async move {
            let _room = room;
            let outcome = timeout(limit, probe(&upstream, path, list_models)).await;
            (begun, outcome.unwrap_or(Err(ProbeError::TooLate { limit })))
        })
    }

    fn judge(&mut self, begun: Begun, outcome: Result<(), ProbeError>) {
        let upstream = Arc::clone(&self.upstream);
        let worker = &upstream.worker;
        match outcome {
            // It began before somebody found the worker gone.
            Ok(()) if begun.downs != worker.downs() => {}
            // Its process is well, and its engine stands still.
            Ok(()) if self.silence.is_still() => {}
            Ok(()) => self.passed(),
            Err(ProbeError::Transport(error)) if error.is_routers_own() => {}
            // It has much to do, and does it.
            Err(reason) if reason.is_timeout() && worker.is_heard_since(begun.number) => self.failures = 0,
            Err(reason) => self.failed(&reason),
        }
        worker.judged();
    }

    fn passed(&mut self) {
        let worker = &self.upstream.worker;
        (self.failures, self.passed) = (0, self.passed + 1);
        self.knowledge = Knowledge::Kept;
        let arrival = worker.mark_up();
        if arrival == Some(Arrival::Back) {
            worker.health.come_back(self.started.elapsed(), self.slow_start);
        }
        if arrival.is_some() {
            (self.cache_asks, self.event_asks, self.passed) = (MOST_CACHE_ASKS, MOST_EVENT_ASKS, 1);
            tracing::info!(worker = %worker.id(), models = ?worker.models(), "worker is up");
        }
    }

    fn failed(&mut self, reason: &ProbeError) {
        let worker = &self.upstream.worker;
        (self.failures, self.passed) = (self.failures + 1, 0);
        if self.failures < FAILURES_TO_DOWN {
            return;
        }
        // That there is no connection is known better than what a probe did not say in time.
        let is_gone = matches!(reason, ProbeError::Transport(error) if error.takes_worker_out());
        let was_there = worker.is_up() || worker.is_suspect();
        if is_gone && was_there && worker.mark_down() || !is_gone && worker.mark_suspect() {
            tracing::warn!(worker = %worker.id(), %reason, "worker is down");
        } else if self.failures == FAILURES_TO_DOWN {
            // Once: what keeps a worker from coming up, such as a certificate that nobody trusts, is seen nowhere else.
            tracing::warn!(worker = %worker.id(), %reason, "worker is not up");
        }
        // What is slow or unwell, or cannot be found for a while, still has what it computed.
        let ends_caches = matches!(reason, ProbeError::Transport(error) if error.ends_caches());
        if ends_caches {
            self.silence.forget();
            self.upstream.stalls.over();
        }
        if ends_caches && self.knowledge == Knowledge::Kept {
            self.knowledge = Knowledge::Forgotten;
            self.decider.forget(worker);
        }
    }
}

/// Why a probe did not pass.
#[derive(Debug, thiserror::Error)]
enum ProbeError {
    #[error(transparent)]
    Transport(#[from] TransportError),
    #[error("answered {0}")]
    Status(StatusCode),
    #[error("no answer within {} s", limit.as_secs_f64())]
    TooLate { limit: Duration },
    #[error("answered more than {MAX_ANSWER_BYTES} bytes")]
    TooLong,
}

impl ProbeError {
    fn is_timeout(&self) -> bool {
        match self {
            Self::TooLate { .. } => true,
            Self::Transport(error) => error.is_timeout(),
            _ => false,
        }
    }
}

async fn probe(upstream: &Upstream, path: PathAndQuery, list_models: bool) -> Result<(), ProbeError> {
    let (status, _) = get(&*upstream.transport, path).await?;
    // An engine without such a path that answers at all is well.
    let has_none = matches!(status, StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED);
    if !status.is_success() && !has_none {
        return Err(ProbeError::Status(status));
    }
    if list_models {
        let (status, body) = get(&*upstream.transport, PathAndQuery::from_static("/v1/models")).await?;
        if let (true, Some(mut entries)) = (status.is_success(), entries_of(&body)) {
            let id = |entry: &Value| entry.get("id")?.as_str().map(str::to_owned);
            let is_adapter = |entry: &&Value| entry.get("parent").is_some_and(Value::is_string);
            // What `lora_path` calls them.
            let bare: Vec<_> = entries.iter_mut().filter_map(name_as_sglang_does).collect();
            upstream.worker.set_models(entries.iter().filter_map(id).chain(bare.iter().cloned()).collect());
            let adapters = entries.iter().filter(is_adapter).filter_map(id);
            upstream.worker.set_adapters(&adapters.chain(bare).collect::<Vec<_>>());
            if let Ok(mut known) = upstream.model_entries.write() {
                *known = entries.into();
            }
        }
    }
    Ok(())
}

/// SGLang lists its adapters by names that it takes for the model's own where they stand as `model`: there an adapter is `MODEL:NAME` (0.5.23,
/// `entrypoints/openai/serving_base.py`). Names an entry so, and returns its bare name, if it is such a one.
fn name_as_sglang_does(entry: &mut Value) -> Option<String> {
    if entry.get("owned_by")? != "sglang" {
        return None;
    }
    let (parent, bare) = (entry.get("parent")?.as_str()?, entry.get("id")?.as_str()?.to_owned());
    let name = format!("{parent}:{bare}");
    entry["id"] = name.into();
    Some(bare)
}

/// Where an engine publishes its cache events; `None` if it could not be asked, and within that, if it does not publish any.
async fn engine_events(upstream: &Upstream) -> Option<Option<EngineEvents>> {
    let has_none = [StatusCode::NOT_FOUND, StatusCode::METHOD_NOT_ALLOWED, StatusCode::NOT_IMPLEMENTED];
    let ask = |path| get(&*upstream.transport, PathAndQuery::from_static(path));
    let (status, body) = ask(VLLMS_EVENTS_PATH).await.ok()?;
    if status.is_success() {
        return Some(EngineEvents::read(&body, &upstream.worker.spec));
    }
    if !has_none.contains(&status) {
        return None;
    }
    let (status, body) = ask(SGLANGS_EVENTS_PATH).await.ok()?;
    if !status.is_success() {
        // Who has not this either, or does not tell the router, is not asked again and again.
        return status.is_client_error().then_some(None);
    }
    let worker = &upstream.worker;
    match ServerInfo::read(&body, &worker.spec) {
        ServerInfo::At(source) => return Some(Some(source)),
        ServerInfo::NoEvents => {}
        ServerInfo::SmallBlocks(tokens) => tracing::warn!(
            worker = %worker.id(), block_tokens = tokens,
            "its cache events are not followed: its blocks are too small (SGLang's --page-size 16 would do)"
        ),
        ServerInfo::KeepsSessions => tracing::warn!(
            worker = %worker.id(),
            "its cache events are not followed: with --enable-session-radix-cache it would keep what each request leaves in its cache"
        ),
    }
    Some(None)
}

/// `None` if the worker does not say.
async fn cache_size(upstream: &Upstream) -> Option<usize> {
    let rank = upstream.worker.spec.dp_rank;
    let part = rank.map_or(cache_size::Part::Whole, |rank| cache_size::Part::Rank(rank.number));
    let ask = |path| ask(&*upstream.transport, PathAndQuery::from_static(path));
    if let Some(metrics) = ask("/metrics").await
        && let Some(tokens) = cache_size::of_metrics(&String::from_utf8_lossy(&metrics), part)
    {
        return Some(tokens);
    }
    for path in ["/server_info", "/get_server_info"] {
        let told = ask(path).await.and_then(|info| cache_size::of_server_info(&info, part));
        if told.is_some() {
            return told;
        }
    }
    None
}

/// What is answered there; `None` if that is no success, or too long.
pub(crate) async fn ask(transport: &dyn Transport, path: PathAndQuery) -> Option<Bytes> {
    let (status, body) = get(transport, path).await.ok()?;
    status.is_success().then_some(body)
}

fn entries_of(body: &[u8]) -> Option<Vec<Value>> {
    let mut body: Value = serde_json::from_slice(body).ok()?;
    serde_json::from_value(body.get_mut("data")?.take()).ok()
}

async fn get(transport: &dyn Transport, path: PathAndQuery) -> Result<(StatusCode, Bytes), ProbeError> {
    let request = WorkerRequest::get(path);
    let (head, mut body) = transport.send(&request).await?.into_parts();
    let mut whole = BytesMut::new();
    while let Some(frame) = body.frame().await {
        if let Ok(data) = frame?.into_data() {
            whole.extend_from_slice(&data);
        }
        if whole.len() > MAX_ANSWER_BYTES {
            return Err(ProbeError::TooLong);
        }
    }
    Ok((head.status, whole.freeze()))
}

#[cfg(test)]
mod tests {
    use std::sync::RwLock;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use clap::Parser;
    use router_core::policy::by_name;
    use router_core::prefix::tree::TreeLimits;
    use router_core::{WorkerId, WorkerSlot, WorkerSpec};
    use serde_json::json;
    use tokio::sync::Notify;

    use super::*;
    use crate::config::Cli;
    use crate::transport::Answer;

    #[test]
    fn an_adapter_of_sglangs_is_named_as_it_takes_it() {
        let entry =
            |owner: &str, parent: Option<&str>| json!({"id": "a", "owned_by": owner, "parent": parent});
        let named = |mut entry: Value| {
            let bare = name_as_sglang_does(&mut entry);
            (entry["id"].as_str().unwrap().to_owned(), bare)
        };
        assert_eq!(named(entry("sglang", Some("base"))), ("base:a".to_owned(), Some("a".to_owned())));
        assert_eq!(named(entry("sglang", None)), ("a".to_owned(), None));
        assert_eq!(named(entry("vllm", Some("base"))), ("a".to_owned(), None));
    }

    /// Never answers, and counts who waits for it.
    #[derive(Default)]
    struct Silent(AtomicUsize);

    impl Transport for Silent {
        fn send<'a>(&'a self, _: &'a WorkerRequest) -> Answer<'a> {
            self.0.fetch_add(1, Ordering::Relaxed);
            Box::pin(std::future::pending())
        }
    }

    #[tokio::test]
    async fn workers_that_say_nothing_get_a_probe_each_and_a_bounded_number_beside() {
        let arguments = ["router", "--probe-interval-down=1ms", "--probe-timeout=600s"];
        let settings = Cli::parse_from(arguments).settings;
        let limits = TreeLimits { total_blocks: 1, worker_blocks: 1 };
        let decider = Arc::new(Decider::new(by_name("round_robin").unwrap(), limits, 1));
        let (overlaps, silent) = (Overlaps::of(4 * FILES_PER_OVERLAP), Arc::new(Silent::default()));
        let probers = [0, 1, 2].map(|number| {
            let spec = WorkerSpec::new(WorkerId::new(&format!("w{number}")), "http://w:1".to_owned());
            let upstream = Arc::new(Upstream {
                worker: Arc::new(Worker::new(spec, WorkerSlot(number))),
                transport: Arc::clone(&silent) as Arc<dyn Transport>,
                model_entries: RwLock::new(Arc::new([])),
                probe_now: Notify::new(),
                stalls: Arc::default(),
                follower: None,
            });
            let started = std::time::Instant::now();
            let prober = Prober::new(
                (upstream, Arc::default(), overlaps.clone()),
                Arc::clone(&decider),
                &settings,
                started,
            );
            tokio::spawn(prober.run())
        });
        let running = || silent.0.load(Ordering::Relaxed);
        while running() < 3 + 4 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        // There is no more room, however long they wait.
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert_eq!(running(), 3 + 4);
        probers.iter().for_each(tokio::task::JoinHandle::abort);
    }

    #[test]
    fn reads_model_lists_and_nothing_else() {
        assert_eq!(
            entries_of(br#"{"object": "list", "data": [{"id": "a"}, {"id": "b"}]}"#).unwrap().len(),
            2
        );
        for other in [&b"[]"[..], b"{}", b"{\"data\": 5}", b"", b"ok"] {
            assert!(entries_of(other).is_none());
        }
    }
}
