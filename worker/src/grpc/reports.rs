//! `Load` and `KvEvents`: streams that go on until their reader closes them or the worker drains.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{Stream, stream};
use roundhouse_types::{KvEvent, WorkerLoad};
use roundhouse_wire::v1;
use tokio::sync::watch;
use tokio::time::Instant;
use tonic::Status;

use super::followers::Follower;
use crate::kv_events::{KvLog, KvSnapshot, Since};

/// Between two reports of an idle worker.
pub(super) const LOAD_INTERVAL: Duration = Duration::from_secs(1);
/// Between two reports of a busy one: its load changes with every step, and nobody decides on less than this.
const LEAST_LOAD_INTERVAL: Duration = Duration::from_millis(10);
/// Blocks in one part of a snapshot, or a few more.
const PART_BLOCKS: usize = 1_024;

/// The load now, on each change, and at least once every `interval`; ends with the engine. A router is told its place as well.
pub(super) fn load(
    load: watch::Receiver<WorkerLoad>,
    interval: Duration,
    follower: Option<Follower>,
) -> impl Stream<Item = Result<v1::LoadReport, Status>> {
    stream::unfold(Told { load, follower, last: None }, move |mut told| async move {
        let report = told.next(interval).await?;
        Some((Ok(report), told))
    })
}

struct Told {
    load: watch::Receiver<WorkerLoad>,
    follower: Option<Follower>,
    /// When the last report was made.
    last: Option<Instant>,
}

impl Told {
    /// `None` once the engine has ended.
    async fn next(&mut self, interval: Duration) -> Option<v1::LoadReport> {
        if let Some(last) = self.last {
            tokio::time::sleep_until(last + LEAST_LOAD_INTERVAL.min(interval)).await;
            let changed = tokio::time::timeout_at(last + interval, self.load.changed()).await;
            changed.unwrap_or(Ok(())).ok()?;
        }
        self.last = Some(Instant::now());
        let place = self.follower.as_mut().map(|follower| follower.place().into());
        Some(v1::LoadReport { place, ..(*self.load.borrow_and_update()).into() })
    }
}

/// What happens from batch `from` on; a snapshot first if there is no such number, or it is not kept, and again whenever the
/// reader has fallen behind what is.
pub(super) fn kv_events(
    log: Arc<KvLog>,
    from: Option<u64>,
) -> impl Stream<Item = Result<v1::KvEventBatch, Status>> {
    let next = log.next_sequence();
    let following = Following { log, next, cursor: from, ready: VecDeque::new(), begun: false };
    stream::unfold(following, |mut following| async move {
        let batch = following.batch().await?;
        Some((Ok(batch), following))
    })
}

struct Following {
    log: Arc<KvLog>,
    next: watch::Receiver<u64>,
    /// The batch wanted next; `None` if a snapshot is.
    cursor: Option<u64>,
    ready: VecDeque<v1::KvEventBatch>,
    begun: bool,
}

impl Following {
    async fn batch(&mut self) -> Option<v1::KvEventBatch> {
        loop {
            if let Some(mut batch) = self.ready.pop_front() {
                if !std::mem::replace(&mut self.begun, true) {
                    batch.instance = Some(self.log.instance());
                }
                return Some(batch);
            }
            let Some(cursor) = self.cursor else {
                let snapshot = self.log.snapshot();
                self.cursor = Some(snapshot.next_sequence);
                self.ready = parts(snapshot, self.log.instance());
                continue;
            };
            match self.log.since(cursor) {
                Since::Gone { .. } => self.cursor = None,
                Since::Kept(batches) if batches.is_empty() => {
                    self.next.wait_for(|next| *next > cursor).await.ok()?;
                }
                Since::Kept(batches) => {
                    self.cursor = Some(cursor + batches.len() as u64);
                    self.ready.extend(batches.iter().map(|batch| v1::KvEventBatch::from(&**batch)));
                }
            }
        }
    }
}

/// At least one part, also of nothing: the reader is to forget what it knew.
fn parts(snapshot: KvSnapshot, instance: u64) -> VecDeque<v1::KvEventBatch> {
    let mut parts = VecDeque::from([Vec::new()]);
    let mut blocks = 0;
    for run in snapshot.blocks {
        if blocks >= PART_BLOCKS {
            parts.push_back(Vec::new());
            blocks = 0;
        }
        blocks += run.hashes.len();
        let part = parts.back_mut().expect("there is one from the start");
        part.push(v1::KvEvent::from(&KvEvent::Stored(run)));
    }
    let last = parts.len() - 1;
    let part = |(at, events)| v1::KvEventBatch {
        sequence: snapshot.next_sequence,
        timestamp: snapshot.timestamp,
        events,
        snapshot: Some(v1::Snapshot { first: at == 0, last: at == last }),
        instance: Some(instance),
    };
    parts.into_iter().enumerate().map(part).collect()
}
