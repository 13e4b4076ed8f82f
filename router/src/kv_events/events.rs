//! One worker's cache events → the decider's tree.
//!
//! A stream that breaks or has a gap is asked for again from where it broke; the worker replays what it has kept, or sends a
//! snapshot. Until that has come the worker's entries are stale: they are used, and nothing is concluded from what is missing. How the
//! events come is the stream's business: [`over_grpc`](super::over_grpc) of our own workers, [`over_zmq`](super::over_zmq) of engines.

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use roundhouse_wire::KvEventError;
use router_core::prefix::feed::{CacheChange, CacheFeed, FeedBatch, FeedError};
use router_core::{CacheTrust, Decider, Worker};
use tokio::time::MissedTickBehavior;

use super::{Hearing, Told, UNOFFERED_PAUSE, back_off, is_not_offered};
use crate::back_off::BackOff;
use crate::transport::TransportError;

/// How often ended requests are looked at.
const SETTLING_INTERVAL: Duration = Duration::from_millis(250);
/// For so long an operator has been told enough.
const WARNED_FOR: Duration = Duration::from_secs(300);
/// After this long without a stream what is known of the cache is no better than what was learned.
const STALE_LIMIT: Duration = Duration::from_secs(30);

/// What a stream says.
pub(super) enum Said {
    /// What happened next.
    Batch(FeedBatch),
    /// What happened before anybody listened: it says what is held, and nothing of what has been entered since.
    Past(FeedBatch),
    /// An engine's batches come from this number on.
    Joined(u64),
    /// An engine is another process now.
    Restarted,
}

/// One worker's events, as they come.
pub(super) trait EventStream: Send {
    /// Whether there is one, as far as is known.
    fn is_offered(&self) -> bool {
        true
    }

    /// Waits until there is one.
    fn offered(&mut self) -> impl Future<Output = ()> + Send {
        std::future::ready(())
    }

    /// Waits until the worker says again that there is one, as when it comes back.
    fn renewed(&mut self) -> impl Future<Output = ()> + Send {
        std::future::pending()
    }

    /// Whether there is more to be said than has been asked for.
    fn is_behind(&self) -> bool {
        false
    }

    /// It is of no use: there is none, until another process is there.
    fn decline(&mut self) {}

    /// Nothing is known any more of what has been said.
    fn begin_anew(&mut self) {}

    /// Opens it, or opens it again; `resume` says where to go on, if it is known.
    fn open(&mut self, resume: Option<(u64, u64)>) -> impl Future<Output = Result<(), StreamEnd>> + Send;

    /// What comes next. May be dropped half way: nothing is lost.
    fn next(&mut self) -> impl Future<Output = Result<Said, StreamEnd>> + Send;
}

/// Why a stream ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum StreamEnd {
    #[error(transparent)]
    Transport(#[from] TransportError),
    #[error(transparent)]
    Event(#[from] KvEventError),
    #[error(transparent)]
    Feed(#[from] FeedError),
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("the worker ended its stream of cache events")]
    Over,
    /// The next stream will be a better one.
    #[error("{0}")]
    Again(&'static str),
    #[error("the worker does not say whose blocks its cache events are of")]
    Mute,
}

/// Follows one worker's events.
pub(super) struct EventFollower<S> {
    worker: Arc<Worker>,
    events: S,
    decider: Arc<Decider>,
    started: Instant,
    feed: CacheFeed,
    /// Whether requests are to be told of.
    listens: Arc<AtomicBool>,
    /// When it was said last that there is none.
    warned: Option<Instant>,
    /// When the last stream was there.
    seen: Instant,
    back_off: BackOff,
}

impl<S: EventStream> EventFollower<S> {
    pub(super) fn new(
        worker: Arc<Worker>,
        (events, feed): (S, CacheFeed),
        listens: Arc<AtomicBool>,
        (decider, started): (Arc<Decider>, Instant),
    ) -> Self {
        let (seen, back_off) = (Instant::now(), back_off());
        Self { worker, events, decider, started, feed, listens, warned: None, seen, back_off }
    }

    /// Follows for ever.
    pub(super) async fn run(mut self, mut hearing: Hearing) {
        loop {
            if !self.events.is_offered() {
                self.give_up();
                self.events.offered().await;
            }
            let Err(end) = self.stream(&mut hearing).await;
            let wait = match &end {
                StreamEnd::Transport(error) if is_not_offered(error) => {
                    self.give_up();
                    UNOFFERED_PAUSE
                }
                StreamEnd::Mute => {
                    tracing::warn!(
                        worker = %self.worker.id(),
                        "its cache events do not say whose blocks they are of (session_id, vLLM from 0.32 on, SGLang from 0.5.23 on); they are not followed"
                    );
                    self.events.decline();
                    self.give_up();
                    Duration::ZERO
                }
                _ => self.back_off.pause(),
            };
            let is_told = self.warned.is_some_and(|at| at.elapsed() < WARNED_FOR);
            if matches!(end, StreamEnd::Io(_)) && !is_told {
                self.warned = Some(Instant::now());
                // What keeps an engine's events away, such as a port that is closed to the router, is seen nowhere else.
                tracing::warn!(worker = %self.worker.id(), reason = %end, "its cache events cannot be followed now");
            }
            tracing::debug!(worker = %self.worker.id(), reason = %end, "cache events are not followed now");
            if matches!(end, StreamEnd::Event(_) | StreamEnd::Feed(FeedError::NoSnapshot(_))) {
                self.feed.distrust();
                self.events.begin_anew();
            }
            self.pause(wait, &mut hearing).await;
        }
    }

    /// Hears of requests until it is time for another stream.
    async fn pause(&mut self, wait: Duration, hearing: &mut Hearing) {
        let over = tokio::time::sleep(wait);
        tokio::pin!(over);
        if self.worker.reports.trust() != CacheTrust::Learned {
            self.worker.reports.set_trust(CacheTrust::Stale);
        }
        loop {
            tokio::select! {
                () = &mut over => break,
                () = self.events.renewed() => break,
                told = hearing.next() => match told {
                    Some(told) => self.hear(told),
                    None => return over.await,
                },
            }
        }
        if self.seen.elapsed() > STALE_LIMIT {
            self.give_up();
        }
    }

    /// Nothing is known by events any more.
    fn give_up(&mut self) {
        self.listens.store(false, Ordering::Relaxed);
        self.worker.reports.set_trust(CacheTrust::Learned);
        self.feed.begin_anew();
        self.events.begin_anew();
    }

    async fn stream(&mut self, hearing: &mut Hearing) -> Result<Infallible, StreamEnd> {
        self.events.open(self.feed.resume()).await?;
        self.listens.store(true, Ordering::Relaxed);
        self.show_trust();
        let mut settling = tokio::time::interval(SETTLING_INTERVAL);
        settling.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // What is replayed comes first: requests that ended meanwhile are not judged before.
        let replayed_at = Instant::now() + 2 * SETTLING_INTERVAL;
        loop {
            tokio::select! {
                said = self.events.next() => {
                    // Whatever the events name was told of before it was sent.
                    while let Some(told) = hearing.try_next() {
                        self.hear(told);
                    }
                    self.take(said?)?;
                }
                Some(told) = hearing.next() => self.hear(told),
                _ = settling.tick() => {
                    let now = Instant::now();
                    if now > replayed_at && !self.events.is_behind() {
                        self.seen = now;
                        let changes = self.feed.settle(self.started.elapsed());
                        self.apply(&changes);
                        if self.feed.is_mute() {
                            return Err(StreamEnd::Mute);
                        }
                    }
                }
            }
        }
    }

    fn hear(&mut self, told: Told) {
        match told {
            Told::Dispatched(id, path) => self.feed.dispatched(id, path),
            Told::Ended(id, usage) => self.feed.ended(&id, usage, self.started.elapsed()),
        }
    }

    fn take(&mut self, said: Said) -> Result<(), StreamEnd> {
        // Whoever says nothing that could be read is no better off than before.
        if !matches!(said, Said::Joined(_)) {
            self.back_off.begin_anew();
        }
        let changes = match said {
            Said::Batch(batch) => self.feed.take(batch)?,
            Said::Past(batch) => {
                self.feed.take(batch)?;
                Vec::new()
            }
            Said::Joined(sequence) => {
                self.feed.join(sequence);
                Vec::new()
            }
            Said::Restarted => vec![self.feed.restarted()],
        };
        self.apply(&changes);
        self.show_trust();
        Ok(())
    }

    fn apply(&self, changes: &[CacheChange]) {
        for change in changes {
            match change {
                // In slices, between which others pick.
                CacheChange::Restarted => self.decider.forget(&self.worker),
                change => self.decider.apply(&self.worker, change),
            }
        }
    }

    fn show_trust(&self) {
        let trust = self.feed.trust();
        if trust != CacheTrust::Stale && self.worker.reports.trust() == CacheTrust::Stale {
            tracing::info!(worker = %self.worker.id(), trust = trust.label(), "cache events are followed");
        }
        self.worker.reports.set_trust(trust);
    }
}
