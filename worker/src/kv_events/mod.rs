//! What happens to the prefix cache, numbered and kept for a while, so that others can follow it.
//!
//! The engine's thread publishes; followers read at their own pace from one bounded buffer, so a slow one costs nothing and
//! nobody waits for it. Whoever is behind the buffer, or new, gets a snapshot of what the cache holds. Knows no wire
//! format. Next: [`grpc`](crate::grpc) and [`zmq`] tell it to others.

mod held;
pub mod zmq;

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use roundhouse_types::{KvEvent, KvEventBatch, StoredBlocks};
use tokio::sync::watch;

use self::held::HeldBlocks;

/// Batches that are kept, as many as vLLM keeps: at a hundred steps a second more than a minute and a half.
pub const KEPT_BATCHES: usize = 10_000;
/// Batches that a follower gets at a time.
const MAX_AT_ONCE: usize = 256;

/// All that has happened to one worker's cache.
#[derive(Debug)]
pub struct KvLog {
    /// Tells this process from those before it at the same address.
    instance: u64,
    log: Mutex<Log>,
    /// The sequence number of the next batch.
    next: watch::Sender<u64>,
    published: OnceLock<Published>,
}

/// Where it can be followed over ZeroMQ.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Published {
    /// The PUB socket.
    pub publish: SocketAddr,
    /// The ROUTER socket, if there is one.
    pub replay: Option<SocketAddr>,
    /// First frame of every batch.
    pub topic: String,
}

#[derive(Debug, Default)]
struct Log {
    /// The last ones, without a gap.
    batches: VecDeque<Arc<KvEventBatch>>,
    next_sequence: u64,
    held: HeldBlocks,
}

/// What is known from a sequence number on.
#[derive(Clone, PartialEq, Debug)]
pub enum Since {
    /// All of it, or the first part: none if nothing has happened since.
    Kept(Vec<Arc<KvEventBatch>>),
    /// The number is not among those that are kept; the oldest that is, or the next to come.
    Gone {
        /// Where one can go on, with a gap.
        oldest: u64,
    },
}

/// What the cache holds at one moment.
#[derive(Clone, PartialEq, Debug)]
pub struct KvSnapshot {
    /// The batch that comes after it.
    pub next_sequence: u64,
    /// Seconds since 1970.
    pub timestamp: f64,
    /// Parents before children.
    pub blocks: Vec<StoredBlocks>,
}

impl KvLog {
    /// An empty log of the process `instance`.
    #[must_use]
    pub fn new(instance: u64) -> Self {
        Self { instance, log: Mutex::default(), next: watch::Sender::new(0), published: OnceLock::new() }
    }

    /// Tells this process from others.
    #[must_use]
    pub fn instance(&self) -> u64 {
        self.instance
    }

    /// Where it is published, once that is known.
    #[must_use]
    pub fn published(&self) -> Option<&Published> {
        self.published.get()
    }

    /// It is published there; the first to say so counts.
    pub fn set_published(&self, published: Published) {
        let _ = self.published.set(published);
    }

    /// Adds what happened in one step; nothing if nothing did.
    pub fn publish(&self, events: Vec<KvEvent>) {
        if events.is_empty() {
            return;
        }
        let mut log = self.lock();
        events.iter().for_each(|event| log.held.apply(event));
        let sequence = log.next_sequence;
        log.next_sequence += 1;
        if log.batches.len() >= KEPT_BATCHES {
            log.batches.pop_front();
        }
        log.batches.push_back(Arc::new(KvEventBatch { sequence, timestamp: now(), events }));
        drop(log);
        self.next.send_replace(sequence + 1);
    }

    /// The sequence number of the next batch, to be awaited.
    #[must_use]
    pub fn next_sequence(&self) -> watch::Receiver<u64> {
        self.next.subscribe()
    }

    /// What has happened from batch `sequence` on.
    #[must_use]
    pub fn since(&self, sequence: u64) -> Since {
        let log = self.lock();
        let oldest = log.next_sequence - log.batches.len() as u64;
        if sequence < oldest || sequence > log.next_sequence {
            return Since::Gone { oldest };
        }
        let skipped = usize::try_from(sequence - oldest).expect("no more than are kept");
        Since::Kept(log.batches.iter().skip(skipped).take(MAX_AT_ONCE).cloned().collect())
    }

    /// What the cache holds now.
    #[must_use]
    pub fn snapshot(&self) -> KvSnapshot {
        let log = self.lock();
        let (next_sequence, held) = (log.next_sequence, log.held.clone());
        // The engine waits for this lock; putting runs together takes longer than copying.
        drop(log);
        KvSnapshot { next_sequence, timestamp: now(), blocks: held.into_runs() }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

#[cfg(test)]
mod tests {
    use roundhouse_types::BlockHash;

    use super::*;

    fn removed(hash: u64) -> Vec<KvEvent> {
        vec![KvEvent::Removed { hashes: vec![BlockHash(hash)] }]
    }

    fn sequences(since: Since) -> Vec<u64> {
        match since {
            Since::Kept(batches) => batches.iter().map(|batch| batch.sequence).collect(),
            Since::Gone { .. } => panic!("{since:?}"),
        }
    }

    #[test]
    fn batches_are_numbered_from_zero_and_steps_without_events_are_none() {
        let log = KvLog::new(1);
        log.publish(removed(1));
        log.publish(Vec::new());
        log.publish(removed(2));
        assert_eq!(sequences(log.since(0)), [0, 1]);
        assert_eq!(sequences(log.since(1)), [1]);
        assert_eq!(sequences(log.since(2)), [0; 0]);
        assert_eq!(*log.next_sequence().borrow(), 2);
    }

    #[test]
    fn numbers_that_are_not_kept_are_gone() {
        let log = KvLog::new(1);
        assert_eq!(log.since(1), Since::Gone { oldest: 0 });
        for hash in 0..KEPT_BATCHES as u64 + 5 {
            log.publish(removed(hash));
        }
        assert_eq!(log.since(4), Since::Gone { oldest: 5 });
        assert_eq!(sequences(log.since(5)).len(), MAX_AT_ONCE);
        assert_eq!(sequences(log.since(KEPT_BATCHES as u64 + 4)), [KEPT_BATCHES as u64 + 4]);
        assert_eq!(log.since(KEPT_BATCHES as u64 + 6), Since::Gone { oldest: 5 });
    }

    #[tokio::test]
    async fn followers_are_woken() {
        let log = Arc::new(KvLog::new(1));
        let mut next = log.next_sequence();
        let publishing = Arc::clone(&log);
        let thread = std::thread::spawn(move || publishing.publish(removed(1)));
        assert_eq!(*next.wait_for(|next| *next == 1).await.unwrap(), 1);
        thread.join().unwrap();
    }
}
