//! One worker's cache events → the decider's tree.
//!
//! A stream that breaks or has a gap is asked for again from where it broke; the worker replays what it has kept, or sends a
//! snapshot. Until that has come the worker's entries are stale: they are used, and nothing is concluded from what is missing.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use roundhouse_types::KvEventBatch;
use roundhouse_wire::{INFO_PATH, KV_EVENTS_PATH, KvEventError, v1};
use router_core::prefix::feed::{CacheChange, CacheFeed, FeedBatch, FeedError, Listener, SnapshotPart};
use router_core::{CacheTrust, Decider, Worker};
use tokio::time::MissedTickBehavior;

use super::{Hearing, Told, UNOFFERED_PAUSE, back_off, is_not_offered};
use crate::back_off::BackOff;
use crate::transport::{GrpcTransport, TransportError};

/// How often ended requests are looked at.
const SETTLING_INTERVAL: Duration = Duration::from_millis(250);
/// After this long without a stream what is known of the cache is no better than what was learned.
const STALE_LIMIT: Duration = Duration::from_secs(30);

/// Why a stream ended.
#[derive(Debug, thiserror::Error)]
enum StreamEnd {
    #[error(transparent)]
    Transport(#[from] TransportError),
    #[error(transparent)]
    Event(#[from] KvEventError),
    #[error(transparent)]
    Feed(#[from] FeedError),
    #[error("the worker ended its stream of cache events")]
    Over,
}

/// Follows one worker's events.
pub(super) struct EventFollower {
    worker: Arc<Worker>,
    listener: Listener,
    grpc: Arc<GrpcTransport>,
    decider: Arc<Decider>,
    started: Instant,
    feed: CacheFeed,
    /// When the last stream was there.
    seen: Instant,
    back_off: BackOff,
}

impl EventFollower {
    pub(super) fn new(
        (worker, listener): (Arc<Worker>, Listener),
        grpc: Arc<GrpcTransport>,
        decider: Arc<Decider>,
        started: Instant,
    ) -> Self {
        let (feed, back_off) = (CacheFeed::new(listener), back_off());
        Self { worker, listener, grpc, decider, started, feed, seen: Instant::now(), back_off }
    }

    /// Follows for ever.
    pub(super) async fn run(mut self, mut hearing: Hearing) {
        loop {
            let Err(end) = self.stream(&mut hearing).await;
            let wait = match &end {
                StreamEnd::Transport(error) if is_not_offered(error) => {
                    self.give_up();
                    UNOFFERED_PAUSE
                }
                _ => self.back_off.pause(),
            };
            tracing::debug!(worker = %self.worker.id(), reason = %end, "cache events are not followed now");
            if matches!(end, StreamEnd::Event(_) | StreamEnd::Feed(FeedError::NoSnapshot(_))) {
                self.feed.distrust();
            }
            self.pause(wait, &mut hearing).await;
        }
    }

    /// Hears of requests until it is time for another stream.
    async fn pause(&mut self, wait: Duration, hearing: &mut Hearing) {
        let over = tokio::time::sleep(wait);
        tokio::pin!(over);
        if self.worker.reports.trust() == CacheTrust::Exact {
            self.worker.reports.set_trust(CacheTrust::Stale);
        }
        loop {
            tokio::select! {
                () = &mut over => break,
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
        self.worker.reports.set_trust(CacheTrust::Learned);
        self.feed = CacheFeed::new(self.listener);
    }

    async fn stream(&mut self, hearing: &mut Hearing) -> Result<Infallible, StreamEnd> {
        let info = self.grpc.call::<v1::InfoReply>(INFO_PATH, &v1::InfoRequest {}).await?.next().await?;
        let info = info.ok_or(StreamEnd::Over)?;
        let capacity = info.kv_blocks.saturating_mul(info.block_tokens.into());
        let capacity = usize::try_from(capacity).unwrap_or(usize::MAX);
        self.worker.reports.set_kv_capacity(Some(capacity).filter(|tokens| *tokens > 0));
        let (from_sequence, instance) = self.feed.resume().unzip();
        let request = v1::KvEventsRequest { from_sequence, instance };
        let mut batches = self.grpc.call::<v1::KvEventBatch>(KV_EVENTS_PATH, &request).await?;
        self.show_trust();
        let mut settling = tokio::time::interval(SETTLING_INTERVAL);
        settling.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // What is replayed comes first: requests that ended meanwhile are not judged before.
        let replayed_at = Instant::now() + 2 * SETTLING_INTERVAL;
        loop {
            tokio::select! {
                batch = batches.next() => {
                    // Whatever the events name was told of before it was sent.
                    while let Some(told) = hearing.try_next() {
                        self.hear(told);
                    }
                    self.take(batch?.ok_or(StreamEnd::Over)?)?;
                }
                Some(told) = hearing.next() => self.hear(told),
                _ = settling.tick() => {
                    self.seen = Instant::now();
                    if self.seen > replayed_at {
                        let changes = self.feed.settle(self.started.elapsed());
                        self.apply(&changes);
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

    fn take(&mut self, batch: v1::KvEventBatch) -> Result<(), StreamEnd> {
        let part = |snapshot: v1::Snapshot| SnapshotPart { first: snapshot.first, last: snapshot.last };
        let (snapshot, instance) = (batch.snapshot.map(part), batch.instance);
        let batch = FeedBatch { batch: KvEventBatch::try_from(batch)?, snapshot, instance };
        let changes = self.feed.take(batch)?;
        self.back_off.begin_anew();
        self.apply(&changes);
        self.show_trust();
        Ok(())
    }

    fn apply(&self, changes: &[CacheChange]) {
        for change in changes {
            self.decider.apply(&self.worker, change);
        }
    }

    fn show_trust(&self) {
        let trust = if self.feed.is_exact() { CacheTrust::Exact } else { CacheTrust::Stale };
        self.worker.reports.set_trust(trust);
    }
}
