//! Cache events of engines that nobody here wrote, over ZeroMQ, as vLLM and SGLang publish them: numbered batches as they happen, and, where an operator has
//! switched that on, a replay of the last ones. There is no snapshot.
//!
//! Whose blocks are told of the engine says by the name that a request came with (`x-session-id`, or `session_id` in its body), so that no tokenizer is
//! needed to know it: see [`Follower`](super::Follower). A gap is asked for; whether an engine is still the same process shows by its last batch, which is asked for again with
//! every new connection.

mod batch;
mod copies;
mod socket;
mod source;

use std::collections::VecDeque;
use std::io;
use std::time::Duration;

use roundhouse_types::KvEventBatch;
use roundhouse_zmtp::wrong;
use router_core::prefix::feed::FeedBatch;
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use self::batch::Batch;
use self::copies::Copies;
use self::socket::Line;
pub use self::source::{NamedIn, PATH, SGLANGS_PATH, ServerInfo, Source};
use super::events::{EventStream, Said, StreamEnd};

/// How long an engine may take for the next batch of a replay.
const BATCH_LIMIT: Duration = Duration::from_secs(10);
/// How long for all of it: vLLM keeps 10,000 batches, of some hundred bytes to some ten thousand.
const REPLAY_LIMIT: Duration = Duration::from_secs(120);

/// A batch that has been taken in.
#[derive(Clone, Copy)]
struct Taken {
    number: u64,
    /// Of its bytes, which hold the time.
    digest: u64,
}

/// When something happened.
#[derive(Clone, Copy, PartialEq, Eq)]
enum When {
    /// Before anybody listened.
    Before,
    Since,
}

/// What came of a replay.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Replayed {
    One,
    All,
    /// The engine is another process than the one whose last batch was asked for.
    ByAnother,
}

/// A replay that goes on.
struct Replay {
    line: Line,
    /// When the next batch must have come.
    until: Instant,
    /// When all of it must.
    ends: Instant,
}

/// The stream of one engine.
pub(super) struct ZmqEvents {
    /// Where it publishes, as it said when it came up last.
    sources: watch::Receiver<Option<Source>>,
    line: Option<Line>,
    replay: Option<Replay>,
    /// When what is replayed has happened.
    when: When,
    copies: Copies,
    last: Option<Taken>,
    /// The number of the next; `None` before the first, whatever that is.
    due: Option<u64>,
    /// Batches below this number have come with the replay, and may come again.
    replayed: u64,
    /// This process has ever replayed anything.
    has_replayed: bool,
    /// The first of those that were missing when a replay was asked for last.
    asked_for: Option<u64>,
    /// Something could not be read.
    is_unreadable: bool,
    said: VecDeque<Said>,
    /// Following it was of no use, as long as it is the engine that it was.
    declined: bool,
}

impl ZmqEvents {
    pub(super) fn new(sources: watch::Receiver<Option<Source>>) -> Self {
        Self {
            sources,
            line: None,
            replay: None,
            when: When::Before,
            copies: Copies::default(),
            last: None,
            due: None,
            replayed: 0,
            has_replayed: false,
            asked_for: None,
            is_unreadable: false,
            said: VecDeque::new(),
            declined: false,
        }
    }

    /// What has been replayed next; `None` for the end of it.
    fn take_replayed(&mut self, came: Option<socket::Numbered>) -> Replayed {
        let is_first = self.replayed == 0;
        let Some((number, payload)) = came else {
            match self.last {
                // It has published, and has nothing to show for it.
                Some(_) if is_first && self.has_replayed => {
                    self.restarted();
                    return Replayed::ByAnother;
                }
                // Nothing has happened yet.
                None if is_first => self.joined(0),
                _ => {}
            }
            return Replayed::All;
        };
        self.has_replayed = true;
        let is_last = self.last.filter(|last| is_first && last.number == number);
        if is_last.is_some_and(|last| last.digest != digest(&payload)) {
            self.restarted();
            return Replayed::ByAnother;
        }
        self.replayed = number + 1;
        if self.last.is_none_or(|last| number > last.number) {
            self.take(self.when, number, &payload);
        }
        Replayed::One
    }

    /// A batch that comes next, or after a gap that cannot be filled.
    fn take(&mut self, when: When, number: u64, payload: &[u8]) {
        if self.due != Some(number) {
            self.joined(number);
        }
        self.last = Some(Taken { number, digest: digest(payload) });
        self.due = Some(number + 1);
        let Ok(Batch { timestamp, events }) = batch::read(payload) else {
            // Whatever it said is missed.
            self.joined(number + 1);
            self.is_unreadable = true;
            return;
        };
        let events = events.into_iter().filter_map(|event| self.copies.take(event)).collect();
        let batch = KvEventBatch { sequence: number, timestamp, events };
        let batch = FeedBatch { batch, snapshot: None, instance: None };
        self.said.push_back(match when {
            When::Before => Said::Past(batch),
            When::Since => Said::Batch(batch),
        });
    }

    fn joined(&mut self, number: u64) {
        self.copies = Copies::default();
        self.due = Some(number);
        self.said.push_back(Said::Joined(number));
    }

    fn restarted(&mut self) {
        (self.last, self.due, self.asked_for, self.has_replayed) = (None, None, None, false);
        self.said.push_back(Said::Restarted);
    }

    /// What is published now.
    fn hear(&mut self, number: u64, payload: &[u8]) -> Result<(), StreamEnd> {
        let replays = self.sources.borrow().as_ref().is_some_and(|source| source.replay.is_some());
        match self.due {
            _ if number < self.replayed => return Ok(()),
            Some(due) if number < due => {
                self.restarted();
                if replays {
                    return Err(StreamEnd::Again("the engine has begun anew"));
                }
            }
            Some(due) if number > due && replays && self.asked_for != Some(due) => {
                self.asked_for = Some(due);
                return Err(StreamEnd::Again("batches are missing"));
            }
            _ => {}
        }
        self.take(When::Since, number, payload);
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

    async fn renewed(&mut self) {
        if self.sources.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
        self.declined = false;
    }

    fn is_behind(&self) -> bool {
        self.replay.is_some() || !self.said.is_empty()
    }

    fn decline(&mut self) {
        (self.line, self.replay) = (None, None);
        self.declined = true;
    }

    fn begin_anew(&mut self) {
        (self.line, self.replay) = (None, None);
        (self.last, self.due, self.asked_for, self.has_replayed) = (None, None, None, false);
        self.said.clear();
    }

    async fn open(&mut self, _: Option<(u64, u64)>) -> Result<(), StreamEnd> {
        (self.line, self.replay, self.replayed) = (None, None, 0);
        let source = self.sources.borrow_and_update().clone().ok_or(StreamEnd::Over)?;
        self.declined = false;
        // First of all, so that nothing is missed between what is replayed and what is heard.
        let line = Line::subscribe(&source.publish, &source.topic).await?;
        if let Some(place) = &source.replay {
            let line = Line::ask(place, self.last.map_or(0, |last| last.number)).await?;
            let now = Instant::now();
            self.replay = Some(Replay { line, until: now + BATCH_LIMIT, ends: now + REPLAY_LIMIT });
            self.when = if self.last.is_none() { When::Before } else { When::Since };
        }
        self.line = Some(line);
        Ok(())
    }

    async fn next(&mut self) -> Result<Said, StreamEnd> {
        loop {
            // Others have their turn between batches, of which a replay may have thousands.
            tokio::task::consume_budget().await;
            if let Some(said) = self.said.pop_front() {
                return Ok(said);
            }
            if std::mem::take(&mut self.is_unreadable) {
                return Err(wrong("published a batch that cannot be read").into());
            }
            if let Some(replay) = &mut self.replay {
                let late = || io::Error::new(io::ErrorKind::TimedOut, "a replay does not go on");
                let limit = replay.until.min(replay.ends);
                let came = timeout_at(limit, replay.line.replayed()).await.map_err(|_| late())??;
                replay.until = Instant::now() + BATCH_LIMIT;
                match self.take_replayed(came) {
                    Replayed::One => {}
                    Replayed::All => self.replay = None,
                    Replayed::ByAnother => return Err(StreamEnd::Again("the engine is another process")),
                }
                continue;
            }
            let line = self.line.as_mut().ok_or(StreamEnd::Over)?;
            let (number, payload) = line.next().await?;
            self.hear(number, &payload)?;
        }
    }
}

fn digest(payload: &[u8]) -> u64 {
    xxhash_rust::xxh3::xxh3_64(payload)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A batch of an engine whose clock says that time.
    fn batch(number: u64, time: f64) -> socket::Numbered {
        (number, rmp_serde::to_vec(&(time, [("AllBlocksCleared",)], 0)).unwrap())
    }

    fn following(source: &str) -> (ZmqEvents, watch::Sender<Option<Source>>) {
        let worker = router_core::WorkerSpec::new(router_core::WorkerId::new("w"), "http://w:1".to_owned());
        let (sender, sources) = watch::channel(Source::read(source.as_bytes(), &worker));
        (ZmqEvents::new(sources), sender)
    }

    const REPLAYS: &str = r#"{"0": {"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:1", "replay_endpoint": "tcp://*:2"}}"#;
    const REPLAYS_NOT: &str =
        r#"{"0": {"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:1"}}"#;

    /// What has been said, in short.
    fn said(events: &mut ZmqEvents) -> Vec<String> {
        let short = |said| match said {
            Said::Batch(batch) => batch.batch.sequence.to_string(),
            Said::Past(batch) => format!("past {}", batch.batch.sequence),
            Said::Joined(number) => format!("from {number}"),
            Said::Restarted => "restarted".to_owned(),
        };
        events.said.drain(..).map(short).collect()
    }

    /// The engine replays these, after a new connection.
    fn replay(events: &mut ZmqEvents, batches: &[socket::Numbered]) -> Replayed {
        events.replayed = 0;
        events.when = if events.last.is_none() { When::Before } else { When::Since };
        for batch in batches.iter().cloned().map(Some).chain([None]) {
            match events.take_replayed(batch) {
                Replayed::One => {}
                end => return end,
            }
        }
        unreachable!("the end was told")
    }

    #[test]
    fn what_is_replayed_is_not_heard_twice() {
        let (mut events, _sender) = following(REPLAYS);
        let replayed: Vec<_> = (0..3).map(|number| batch(number, 1.0)).collect();
        replay(&mut events, &replayed);
        assert_eq!(said(&mut events), ["from 0", "past 0", "past 1", "past 2"]);
        for number in 1..4 {
            let (number, payload) = batch(number, 1.0);
            events.hear(number, &payload).unwrap();
        }
        assert_eq!(said(&mut events), ["3"]);
        // With the next connection it is asked for again.
        let again = [batch(3, 1.0), batch(4, 1.0)];
        replay(&mut events, &again);
        assert_eq!(said(&mut events), ["4"]);
    }

    #[test]
    fn an_engine_without_events_yet_begins_with_the_first() {
        let (mut events, _sender) = following(REPLAYS);
        replay(&mut events, &[]);
        let (number, payload) = batch(0, 1.0);
        events.hear(number, &payload).unwrap();
        assert_eq!(said(&mut events), ["from 0", "0"]);
    }

    #[test]
    fn a_gap_is_asked_for_once() {
        let (mut events, _sender) = following(REPLAYS);
        replay(&mut events, &[batch(0, 1.0)]);
        let (number, payload) = batch(5, 1.0);
        assert!(events.hear(number, &payload).is_err(), "the follower opens the stream again");
        // The engine has not kept all of it.
        replay(&mut events, &[batch(3, 1.0), batch(4, 1.0)]);
        events.hear(number, &payload).unwrap();
        assert_eq!(said(&mut events), ["from 0", "past 0", "from 3", "3", "4", "5"]);
        let (number, payload) = batch(9, 1.0);
        assert!(events.hear(number, &payload).is_err());
        events.hear(number, &payload).unwrap();
        assert_eq!(said(&mut events), ["from 9", "9"], "it is still there");
        let (mut deaf, _sender) = following(REPLAYS_NOT);
        for number in [7, 9] {
            let (number, payload) = batch(number, 1.0);
            deaf.hear(number, &payload).unwrap();
        }
        assert_eq!(said(&mut deaf), ["from 7", "7", "from 9", "9"]);
    }

    #[test]
    fn another_process_shows_by_its_last_batch_or_by_its_numbers() {
        for (came, is_another) in [
            (vec![batch(1, 1.0)], false),
            // It has published at another time, or less.
            (vec![batch(1, 2.0), batch(2, 2.0)], true),
            (vec![], true),
            // It has not kept the last one.
            (vec![batch(9, 1.0)], false),
        ] {
            let (mut events, _sender) = following(REPLAYS);
            assert_eq!(replay(&mut events, &[batch(0, 1.0), batch(1, 1.0)]), Replayed::All);
            let came = replay(&mut events, &came);
            assert_eq!(came == Replayed::ByAnother, is_another);
        }
        let (mut events, _sender) = following(REPLAYS);
        replay(&mut events, &[batch(0, 1.0), batch(1, 1.0)]);
        let (number, payload) = batch(0, 2.0);
        events.replayed = 0;
        assert!(events.hear(number, &payload).is_err());
        let (mut deaf, _sender) = following(REPLAYS_NOT);
        for number in [7, 0] {
            let (number, payload) = batch(number, 1.0);
            deaf.hear(number, &payload).unwrap();
        }
        assert_eq!(said(&mut deaf), ["from 7", "7", "restarted", "from 0", "0"]);
    }

    #[test]
    fn what_cannot_be_read_is_a_gap() {
        let (mut events, _sender) = following(REPLAYS_NOT);
        for (number, payload) in [batch(0, 1.0), (1, b"?".to_vec()), batch(2, 1.0)] {
            events.hear(number, &payload).unwrap();
        }
        assert_eq!(said(&mut events), ["from 0", "0", "from 2", "2"]);
    }

    #[test]
    fn what_was_of_no_use_is_followed_again_when_it_comes_back() {
        let (mut events, sender) = following(REPLAYS);
        assert!(events.is_offered());
        events.sources.mark_unchanged();
        events.decline();
        assert!(!events.is_offered());
        let same = sender.borrow().clone();
        sender.send_replace(same);
        assert!(events.is_offered());
    }
}
