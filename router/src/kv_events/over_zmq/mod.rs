//! Cache events of engines that nobody here wrote, over ZeroMQ, as vLLM publishes them: numbered batches as they happen, and, where an operator has
//! switched that on, a replay of the last ones. There is no snapshot.
//!
//! Whose blocks are told of the engine says by the name that a request came with (`x-session-id`), so that no tokenizer is needed to know it: see
//! [`Follower`](super::Follower). A gap is asked for; whether an engine is still the same process shows by its last batch, which is asked for again with
//! every new connection.

mod batch;
mod copies;
mod socket;
mod source;

use std::collections::VecDeque;
use std::io;

use roundhouse_types::KvEventBatch;
use router_core::prefix::feed::FeedBatch;
use tokio::sync::watch;

use self::batch::Batch;
use self::copies::Copies;
use self::socket::Line;
pub use self::source::{PATH, Source};
use super::events::{EventStream, Said, StreamEnd};

/// A batch that has been taken in.
#[derive(Clone, Copy)]
struct Taken {
    number: u64,
    /// Of its bytes, which hold the time.
    digest: u64,
}

/// The stream of one engine.
pub(super) struct ZmqEvents {
    /// Where it publishes, as it said when it came up last.
    sources: watch::Receiver<Option<Source>>,
    line: Option<Line>,
    copies: Copies,
    last: Option<Taken>,
    /// Batches below this number have come with the replay, and may come again.
    replayed: u64,
    /// A gap was asked for, and is still there.
    gap_remains: bool,
    said: VecDeque<Said>,
    /// Following it was of no use, as long as it is the engine that it was.
    declined: bool,
}

impl ZmqEvents {
    pub(super) fn new(sources: watch::Receiver<Option<Source>>) -> Self {
        Self {
            sources,
            line: None,
            copies: Copies::default(),
            last: None,
            replayed: 0,
            gap_remains: false,
            said: VecDeque::new(),
            declined: false,
        }
    }

    /// Whether the engine is not the process any more whose last batch was asked for, and it has replayed these.
    fn is_another(&self, replayed: &[socket::Numbered]) -> bool {
        self.last.is_some_and(|last| match replayed.first() {
            Some((number, payload)) => *number == last.number && digest(payload) != last.digest,
            None => true,
        })
    }

    /// All that the engine still has, from the last batch on that was taken.
    fn take_replay(&mut self, batches: &[socket::Numbered]) {
        match batches.last() {
            Some((number, _)) => self.replayed = number + 1,
            // Nothing has happened yet.
            None => self.joined(0),
        }
        for (number, payload) in batches {
            if self.last.is_none_or(|last| *number > last.number) {
                self.take(*number, payload);
            }
        }
    }

    /// A batch that comes next, or after a gap that cannot be filled.
    fn take(&mut self, number: u64, payload: &[u8]) {
        if self.due() != Some(number) {
            self.joined(number);
        }
        self.last = Some(Taken { number, digest: digest(payload) });
        let Ok(Batch { timestamp, events }) = batch::read(payload) else {
            // Whatever it said is missed.
            self.joined(number + 1);
            return;
        };
        let events = events.into_iter().filter_map(|event| self.copies.take(event)).collect();
        let batch = KvEventBatch { sequence: number, timestamp, events };
        self.said.push_back(Said::Batch(FeedBatch { batch, snapshot: None, instance: None }));
    }

    /// The number that is due; `None` before the first batch.
    fn due(&self) -> Option<u64> {
        self.last.map(|last| last.number + 1)
    }

    fn joined(&mut self, number: u64) {
        self.copies = Copies::default();
        self.said.push_back(Said::Joined(number));
    }

    fn restarted(&mut self) {
        self.last = None;
        self.said.push_back(Said::Restarted);
    }

    /// What is published now.
    fn hear(&mut self, number: u64, payload: &[u8]) -> Result<(), StreamEnd> {
        let replays = self.sources.borrow().as_ref().is_some_and(|source| source.replay.is_some());
        match self.due() {
            _ if number < self.replayed => return Ok(()),
            Some(due) if number < due => {
                self.restarted();
                if replays {
                    return Err(again("the engine has begun anew"));
                }
            }
            Some(due) if number > due && replays && !self.gap_remains => {
                self.gap_remains = true;
                return Err(again("batches are missing"));
            }
            _ => {}
        }
        self.gap_remains = false;
        self.take(number, payload);
        Ok(())
    }
}

impl EventStream for ZmqEvents {
    fn is_offered(&self) -> bool {
        let is_new = !self.declined || self.sources.has_changed().unwrap_or(false);
        is_new && self.sources.borrow().is_some()
    }

    async fn offered(&mut self) {
        // The sender lives as long as the worker.
        while !self.is_offered() && self.sources.changed().await.is_ok() {
            self.declined = false;
        }
        self.declined = false;
    }

    fn decline(&mut self) {
        self.line = None;
        self.declined = true;
    }

    fn begin_anew(&mut self) {
        (self.line, self.last) = (None, None);
        self.said.clear();
    }

    async fn open(&mut self, _: Option<(u64, u64)>) -> Result<(), StreamEnd> {
        self.line = None;
        let source = self.sources.borrow_and_update().clone().ok_or(StreamEnd::Over)?;
        // First of all, so that nothing is missed between what is replayed and what is heard.
        let line = Line::subscribe(&source.publish, &source.topic).await?;
        self.replayed = 0;
        if let Some(place) = &source.replay {
            let start = self.last.map_or(0, |last| last.number);
            let mut batches = Line::replay(place, start).await?;
            if self.is_another(&batches) {
                self.restarted();
                batches = Line::replay(place, 0).await?;
            }
            self.take_replay(&batches);
        }
        self.line = Some(line);
        Ok(())
    }

    async fn next(&mut self) -> Result<Said, StreamEnd> {
        loop {
            if let Some(said) = self.said.pop_front() {
                return Ok(said);
            }
            let line = self.line.as_mut().ok_or(StreamEnd::Over)?;
            let (number, payload) = line.next().await?;
            self.hear(number, &payload)?;
        }
    }
}

fn again(why: &str) -> StreamEnd {
    StreamEnd::Io(io::Error::other(why.to_owned()))
}

fn digest(payload: &[u8]) -> u64 {
    xxhash_rust::xxh3::xxh3_64(payload)
}
