//! What another router does → this one's ledger and tree.
//!
//! Everything that one has told of goes with its connection: a router that has died has no requests in flight any more, and one that comes back tells
//! anew of those that it has.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use roundhouse_types::BlockHash;
use roundhouse_wire::replica as wire;
use router_core::prefix::blocks::{Opening, Stretch};
use router_core::prefix::feed::MOST_SIZE;
use router_core::request::Answer;
use router_core::telling::Found;
use router_core::{Booked, FleetSnapshot, Leg, Precedence, Priority, RequestView, Worker};
use tokio::io::BufReader;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::yield_now;
use tokio::time::{sleep, timeout};

use super::handshake::{self, Begun, ReplicaError, Side, begin};
use super::numbers::ByNumber;
use super::{MOST_HASHES, Replicas, key_of};
use crate::app::App;
use crate::liveness;

/// Connections at once; there are not that many routers.
const MOST_CONNECTIONS: usize = 1_024;
/// Of a prompt: more than any engine takes, and so few that those of many requests together can be counted.
const MOST_TOKENS: usize = 1 << 22;
/// Requests of one router that are booked at once.
const MOST_REQUESTS: usize = 1 << 18;
/// A router that says nothing for so long is gone: it would say at least that.
const SILENCE: Duration = Duration::from_secs(5);
/// What is read from a connection at once.
const READ_BYTES: usize = 64 << 10;
/// So many words are booked before others get their turn: some 200 µs.
const WORDS_AT_ONCE: usize = 64;
/// How much the time between two words may differ from what the other router says of it, and by what part of that: what is heard much later than said says
/// nothing of a worker's speed.
const LATE_BY: Duration = Duration::from_millis(20);
const LATE_PART: u32 = 8;
/// After a connection could not be accepted, as when there are too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Hears all who connect, for ever.
pub(super) async fn accept(app: Arc<App>, replicas: Arc<Replicas>, listener: TcpListener) {
    let places = Arc::new(Semaphore::new(MOST_CONNECTIONS));
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        let (stream, from) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                if app.failure_logs.allow(&"replicas") {
                    tracing::warn!(%error, "cannot accept another router");
                }
                sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let (app, replicas) = (Arc::clone(&app), Arc::clone(&replicas));
        tokio::spawn(async move {
            let Err(error) = hear(&app, &replicas, stream, from.to_string()).await;
            match error {
                // Who only looks whether somebody listens, as probes do, and one that hears this one by another way.
                ReplicaError::Itself | ReplicaError::Ended => {}
                error if app.failure_logs.allow(&"replicas") => {
                    tracing::warn!(%from, %error, "another router is not heard");
                }
                _ => {}
            }
            drop(place);
        });
    }
}

/// Hears one router until that ends.
async fn hear(
    app: &App,
    replicas: &Replicas,
    mut stream: TcpStream,
    from: String,
) -> Result<std::convert::Infallible, ReplicaError> {
    liveness::configure(&stream, SILENCE);
    let beginning = begin(&mut stream, &replicas.identity, Side::Accepts, |_| Ok(()));
    let Begun { router, mut seals, .. } =
        timeout(handshake::LIMIT, beginning).await.map_err(|_| ReplicaError::Late("its proof"))??;
    tracing::info!(from, router = format!("{router:016x}"), "another router tells of its requests");
    let (heard, mut is_over) = replicas.joins(&app.decider, router, from);
    let mut book = Book {
        app,
        seed: replicas.seed,
        workers: Workers::default(),
        requests: ByNumber::default(),
        count: &heard.requests,
    };
    let mut stream = BufReader::with_capacity(READ_BYTES, stream);
    let ended = loop {
        let words = tokio::select! {
            // Dropped with its entry: it has come back.
            _ = &mut is_over => break ReplicaError::Ended,
            words = timeout(SILENCE, seals.read(&mut stream)) => words,
        };
        match words {
            Ok(Ok(Some(words))) => book.take_all(words).await,
            Ok(Ok(None)) => break ReplicaError::Ended,
            Ok(Err(error)) => break error,
            Err(_) => break ReplicaError::Late("its word"),
        }
    };
    if matches!(ended, ReplicaError::Ended) {
        tracing::info!(router = format!("{router:016x}"), "another router has gone");
    }
    Err(ended)
}

/// A size as it was told, at most what can be reckoned with.
fn size(told: u64) -> usize {
    usize::try_from(told).unwrap_or(MOST_SIZE).min(MOST_SIZE)
}

/// What is booked of one router.
struct Book<'a> {
    app: &'a App,
    seed: u64,
    workers: Workers,
    requests: ByNumber<Request>,
    count: &'a AtomicUsize,
}

/// One of them, and what was read of it elsewhere.
struct Request {
    booked: Booked,
    read: Read,
    /// When its being sent was heard.
    sent: Duration,
}

struct Read {
    model: String,
    blocks: Vec<BlockHash>,
    opening: Opening,
    prompt_bytes: usize,
    prompt_tokens: usize,
    answer: Answer,
    leg: Leg,
    precedence: Precedence,
}

impl Read {
    fn view(&self, may_wait_since: Option<Duration>) -> RequestView<'_> {
        RequestView {
            model: Some(self.model.as_str()).filter(|model| !model.is_empty()),
            session: None,
            blocks: &self.blocks,
            opening: self.opening,
            block_tokens: None,
            prompt_bytes: self.prompt_bytes,
            prompt_tokens: self.prompt_tokens,
            answer: self.answer,
            may_wait_since,
            leg: self.leg,
            precedence: self.precedence,
        }
    }
}

impl From<wire::Sent> for Read {
    fn from(sent: wire::Sent) -> Self {
        let leg = match sent.leg() {
            wire::Leg::Whole => Leg::Whole,
            wire::Leg::Prefill => Leg::Prefill,
            wire::Leg::Decode => Leg::Decode,
        };
        #[expect(clippy::cast_possible_truncation, reason = "it has been clamped")]
        let priority = Priority(sent.priority.clamp(i8::MIN.into(), i8::MAX.into()) as i8);
        Self {
            model: sent.model,
            blocks: sent.hashes.into_iter().take(MOST_HASHES).map(BlockHash).collect(),
            opening: Opening {
                tools: Stretch { blocks: sent.tools_blocks as usize, bytes: size(sent.tools_bytes) },
                system: Stretch { blocks: sent.system_blocks as usize, bytes: size(sent.system_bytes) },
            },
            prompt_bytes: size(sent.prompt_bytes),
            prompt_tokens: size(sent.prompt_tokens).min(MOST_TOKENS),
            answer: match (sent.generates_nothing, sent.whole_answer) {
                (true, _) => Answer::Nothing,
                (false, true) => Answer::Whole,
                (false, false) => Answer::Streamed,
            },
            leg,
            precedence: Precedence { priority, tenant: sent.tenant },
        }
    }
}

impl Book<'_> {
    async fn take_all(&mut self, wire::Words { words, are_known }: wire::Words) {
        let now = self.app.now();
        for (number, word) in (1..).zip(words) {
            self.take(word, are_known, now);
            if number % WORDS_AT_ONCE == 0 {
                yield_now().await;
            }
        }
        self.count.store(self.requests.len(), Ordering::Relaxed);
    }

    fn take(&mut self, wire::Word { request, word }: wire::Word, is_known: bool, now: Duration) {
        use wire::word::Word;
        match word {
            Some(Word::Sent(sent)) => {
                if self.requests.len() < MOST_REQUESTS
                    && let Some(entered) = self.enter(sent, is_known, now)
                {
                    self.requests.insert(request, entered);
                }
            }
            Some(Word::Goes(_)) => {
                if let Some(Request { booked, read, sent }) = self.requests.get_mut(&request) {
                    *sent = now;
                    self.app.decider.goes_elsewhere(booked, &read.view(None), now);
                }
            }
            Some(Word::Begun(begun)) => self.begin(request, begun, now),
            Some(Word::Failed(_)) => {
                if let Some(Request { booked: Booked { worker, lease, basis, .. }, read, .. }) =
                    self.requests.get_mut(&request)
                {
                    self.app.decider.take_back(lease, worker, &read.blocks, *basis);
                }
            }
            Some(Word::Found(found)) => self.compare(request, found),
            Some(Word::Over(_)) => drop(self.requests.remove(&request)),
            None => {}
        }
    }

    /// Books a request; `None` if its worker is none of this router's.
    fn enter(&mut self, sent: wire::Sent, is_known: bool, now: Duration) -> Option<Request> {
        let worker = self.workers.find(self.app, sent.worker, self.seed)?;
        let is_known = is_known || sent.is_anew;
        let waited = sent.waited_us.map(Duration::from_micros);
        let read = Read::from(sent);
        let view = read.view(waited.map(|waited| now.saturating_sub(waited)));
        let decider = &self.app.decider;
        let booked = if is_known {
            decider.book_again(&worker, &view, now)
        } else {
            decider.book(&worker, &view, now)
        };
        Some(Request { booked: booked?, read, sent: now })
    }

    fn begin(&mut self, request: u64, begun: wire::Begun, now: Duration) {
        let Some(Request { booked: Booked { lease, .. }, sent, .. }) = self.requests.get_mut(&request) else {
            return;
        };
        let decider = &self.app.decider;
        let took = now.saturating_sub(*sent);
        match begun.with() {
            _ if begun.took_us.is_some_and(|took_us| is_late(took, took_us)) => {
                lease.first_token();
            }
            wire::Beginning::FirstToken => decider.first_token(lease, now),
            wire::Beginning::WholeAnswer => decider.whole_answer(lease, now),
            wire::Beginning::Other => lease.first_token(),
        }
    }

    fn compare(&mut self, request: u64, wire::Found { prompt_tokens, cached_tokens }: wire::Found) {
        let Some(Request { booked, read, .. }) = self.requests.get(&request) else { return };
        let found = Found { prompt_tokens: size(prompt_tokens), cached_tokens: size(cached_tokens) };
        let comparison = found.beside(booked.hit_tokens, read.prompt_tokens);
        let corrected = self.app.decider.compare(&booked.worker, booked.basis, comparison);
        self.app.metrics.corrected_blocks.inc_by(corrected as u64);
    }
}

/// Whether what took so long here, by when it was heard, took another time where it was said.
fn is_late(took: Duration, took_us: u64) -> bool {
    let there = Duration::from_micros(took_us);
    took.abs_diff(there) > LATE_BY.saturating_add(there / LATE_PART)
}

/// This router's workers, by what routers call them.
#[derive(Default)]
struct Workers {
    of: Option<Arc<FleetSnapshot>>,
    by_key: HashMap<u64, Arc<Worker>>,
}

impl Workers {
    fn find(&mut self, app: &App, key: u64, seed: u64) -> Option<Arc<Worker>> {
        let roster = app.fleet.roster();
        if !self.of.as_ref().is_some_and(|of| Arc::ptr_eq(of, &roster.snapshot)) {
            let workers = roster.snapshot.workers().iter();
            self.by_key = workers.map(|worker| (key_of(&worker.spec, seed), Arc::clone(worker))).collect();
            self.of = Some(Arc::clone(&roster.snapshot));
        }
        self.by_key.get(&key).cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_heard_about_as_long_after_as_it_was_is_not_late() {
        for (heard_ms, said_ms, expected) in [
            (0, 0, false),
            (15, 0, false),
            (30, 0, true),
            (0, 30, true),
            (900, 1_000, false),
            (0, 10_000, true),
        ] {
            let heard = Duration::from_millis(heard_ms);
            assert_eq!(is_late(heard, said_ms * 1_000), expected, "{heard_ms} and {said_ms} ms");
        }
        assert!(is_late(Duration::ZERO, u64::MAX) && is_late(Duration::MAX, 0));
    }

    #[test]
    fn a_request_waits_by_the_same_here_as_where_it_came() {
        let heard = |priority, tenant| {
            let read = Read::from(wire::Sent { priority, tenant, ..wire::Sent::default() });
            read.view(None).precedence
        };
        assert_eq!(heard(0, None), Precedence::default());
        assert_eq!(heard(-3, Some(7)), Precedence { priority: Priority(-3), tenant: Some(7) });
        assert_eq!(heard(i32::MAX, None).priority, Priority(i8::MAX));
    }
}
