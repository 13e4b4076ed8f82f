//! One worker's cache events → what the prefix tree is to learn of that worker.
//!
//! The worker tells of blocks of tokens, the tree knows blocks of bytes, and no tokenizer stands between: events carry the id of
//! the request that filled a block and the positions of its tokens, and the request's own path says which bytes these are. So
//! each byte block hangs on the token block that its last byte falls into, and goes when that goes. Positions are turned into
//! bytes by the request's own bytes a token, counted by the worker at its end; until then its path is pinned anyway.
//!
//! A request's path is settled a moment after its end: what of it no event has told of is taken back from the tree, unless the
//! worker found it cached. Knows no streams, no clock and no tree: readings come in, changes go out. Fed by the router's
//! `kv_events`; next: [`Decider::apply`](crate::Decider::apply).
//!
//! Our own worker begins with a snapshot. Engines that nobody here wrote tell from some batch on ([`CacheFeed::join`]), and of what was
//! there before nothing. A block that hangs on one of those has its place in a sequence once a request says how much it found cached; what is
//! above it in the tree stays as it was entered. Nor is it known which blocks a prompt is in that was found cached as a whole, if no request of this
//! router has filled them. So of engines the tree does not rely on events alone ([`CacheTrust::Followed`]).

mod blocks;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use roundhouse_types::{BlockHash, EndedRequest, KvEvent, KvEventBatch, RoutedPrompt};

use self::blocks::TokenBlocks;
use super::blocks::{Cut, Opening, Stretch};
use crate::reports::CacheTrust;

/// How long after a request's end its last events may still come: they are on their way on another stream.
const SETTLING_TIME: Duration = Duration::from_secs(1);
/// Requests whose paths are kept. More than a worker runs and queues; those beyond stay as they were entered.
const MAX_REQUESTS: usize = 65_536;

/// Of these, those that other routers sent. The oldest goes first: a router may vanish, and never say that its requests are over.
const MAX_OTHERS: usize = 16_384;

/// An engine that has named none of so many requests names none.
const MOST_UNNAMED: usize = 64;

/// No prompt is longer; what others say is multiplied by each other.
pub const MOST_SIZE: usize = 1 << 30;

/// What the tree is to learn of a worker.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CacheChange {
    /// Another router has sent it a prompt of these blocks.
    Routed {
        /// All of them.
        path: Arc<[BlockHash]>,
        /// How they were cut.
        cut: Cut,
    },
    /// It does not hold these blocks any more.
    Gone(Vec<BlockHash>),
    /// Of a path that was entered for it, it holds the first `held` blocks.
    Settled {
        /// All of it.
        path: Arc<[BlockHash]>,
        /// How much.
        held: usize,
    },
    /// It holds nothing any more but what runs.
    Cleared,
    /// It is another process now.
    Restarted,
}

/// Part of a worker's event stream, as it came.
#[derive(Clone, PartialEq, Debug)]
pub struct FeedBatch {
    /// What happened.
    pub batch: KvEventBatch,
    /// Of a snapshot: which part.
    pub snapshot: Option<SnapshotPart>,
    /// The process that speaks, where it says so.
    pub instance: Option<u64>,
}

/// Which part of a snapshot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SnapshotPart {
    /// Forget what was known.
    pub first: bool,
    /// That was all.
    pub last: bool,
}

/// What makes a stream useless: another one must be asked for, from [`CacheFeed::resume`] on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum FeedError {
    /// Batches are missing.
    #[error("batch {came} came after batch {before}")]
    Gap {
        /// The last one taken.
        before: u64,
        /// The one that came.
        came: u64,
    },
    /// The stream begins in the middle.
    #[error("batch {0} came before any snapshot")]
    NoSnapshot(u64),
}

/// A request's prompt, as the tree knows it.
#[derive(Clone, Debug)]
pub struct FollowedPath {
    /// Its blocks.
    pub hashes: Arc<[BlockHash]>,
    /// How they were cut.
    pub cut: Cut,
    /// Length of the prompt, in the unit of the cut.
    pub size: usize,
    /// The same in tokens, as far as is known.
    pub tokens: usize,
}

impl FollowedPath {
    /// Which token the last of block number `index` falls into, counted from 1.
    fn last_token(&self, index: usize) -> usize {
        let end = self.cut.covered(index + 1);
        (end * self.tokens).div_ceil(self.size.max(1)).max(1)
    }
}

/// What a reply said of its prompt.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PromptUsage {
    /// Its length.
    pub prompt_tokens: usize,
    /// What of it was cached, if that is known.
    pub cached_tokens: Option<usize>,
}

/// Who listens: what other routers tell makes sense to those who hash as they do.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Listener {
    /// The router's number.
    pub router: u64,
    /// Equal where hashes mean the same. `None` if this router's seed is its own.
    pub seed_digest: Option<u64>,
}

/// The blocks that were told of as filled by a request.
#[derive(Clone, Copy)]
struct Filled {
    first: BlockHash,
    last: BlockHash,
}

struct Request {
    path: FollowedPath,
    filled: Option<Filled>,
    /// Requests of that id that run.
    running: usize,
    /// There were several at once, or batches are lost since: whose blocks have been told of nobody knows.
    is_doubtful: bool,
    /// Set at its end.
    usage: Option<PromptUsage>,
    /// The other router that sent it; two may use one id, and what the one says is not of the other's.
    sender: Option<u64>,
}

/// How much of what a worker does its events tell.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Teller {
    /// All there is, from a snapshot on.
    #[default]
    Snapshots,
    /// What happens from some batch on; and a request that none of it names may have been told of under another name.
    Happenings,
}

/// What is known of one worker's cache from its events.
#[derive(Default)]
pub struct CacheFeed {
    listener: Listener,
    teller: Teller,
    /// Of an engine: it has named a request that was followed.
    names: bool,
    /// It has named somebody, whoever that is.
    names_others: bool,
    /// Requests that were answered before it had named any.
    unnamed: usize,
    /// The process that speaks.
    instance: Option<u64>,
    /// Number of the next batch; `None` before the first snapshot is whole.
    next: Option<u64>,
    blocks: TokenBlocks,
    /// A snapshot of which parts are still to come.
    coming: Option<TokenBlocks>,
    requests: HashMap<Arc<str>, Request>,
    /// Ended requests and when they settle, the first first.
    ending: VecDeque<(Duration, Arc<str>)>,
    /// Ended requests whose id another one has now; they settle at once.
    succeeded: Vec<Request>,
    /// Of the requests, those that other routers sent, and which, the oldest first.
    others: VecDeque<(Arc<str>, u64)>,
    /// Those of them that are over, and when that was is not known yet.
    ended_elsewhere: Vec<(Arc<str>, Option<PromptUsage>)>,
}

impl CacheFeed {
    /// One that nothing is known by yet.
    #[must_use]
    pub fn new(listener: Listener) -> Self {
        Self { listener, ..Self::default() }
    }

    /// One of an engine whose events begin with some batch.
    #[must_use]
    pub fn of_engine() -> Self {
        Self { teller: Teller::Happenings, ..Self::default() }
    }

    /// An engine's batches come from this number on; those before it are lost. Of what the worker holds, what they said is not known any more.
    pub fn join(&mut self, sequence: u64) {
        self.next = Some(sequence);
        self.blocks = TokenBlocks::default();
        self.requests.values_mut().for_each(|request| request.is_doubtful = true);
        self.succeeded.clear();
    }

    /// Forgets all that is known, of the worker and of requests.
    pub fn begin_anew(&mut self) {
        *self = Self { listener: self.listener, teller: self.teller, ..Self::default() };
    }

    /// An engine is another process now.
    #[must_use]
    pub fn restarted(&mut self) -> CacheChange {
        self.begin_anew();
        CacheChange::Restarted
    }

    /// Where to go on: number of the next batch, and the process that it is of. `None`: a snapshot is needed.
    #[must_use]
    pub fn resume(&self) -> Option<(u64, u64)> {
        self.next.zip(self.instance)
    }

    /// The stream has said something that makes no sense: a snapshot is needed. What was known is kept to compare with.
    pub fn distrust(&mut self) {
        (self.next, self.coming) = (None, None);
    }

    /// How far what is known of the worker can be trusted, while its events come.
    #[must_use]
    pub fn trust(&self) -> CacheTrust {
        match self.teller {
            Teller::Snapshots if self.is_followed() => CacheTrust::Exact,
            Teller::Happenings if self.is_followed() && self.names => CacheTrust::Followed,
            _ => CacheTrust::Stale,
        }
    }

    /// Whether nothing will come of following this engine: it has told of blocks, and of none whose it was.
    #[must_use]
    pub fn is_mute(&self) -> bool {
        !self.names && !self.names_others && self.unnamed >= MOST_UNNAMED && self.blocks.len() > 0
    }

    /// Whether everything that the worker says is taken in.
    fn is_followed(&self) -> bool {
        self.next.is_some() && self.coming.is_none()
    }

    /// Token blocks that it knows the worker to hold.
    #[must_use]
    pub fn token_blocks(&self) -> usize {
        self.blocks.len()
    }

    /// The request of that id goes to the worker. To be told before it is sent.
    pub fn dispatched(&mut self, id: Arc<str>, path: FollowedPath) {
        self.follow(id, path, None);
    }

    fn follow(&mut self, id: Arc<str>, path: FollowedPath, sender: Option<u64>) {
        let before = self.requests.remove(&id);
        let others = before.as_ref().map_or(0, |before| before.running);
        if self.teller == Teller::Happenings {
            // Turns of a session may follow each other, by whose name the engine calls them.
            let ended = before.filter(|before| before.usage.is_some() && self.succeeded.len() < MAX_OTHERS);
            self.succeeded.extend(ended);
        }
        if self.requests.len() < MAX_REQUESTS {
            let running = others + 1;
            let new = Request { path, filled: None, running, is_doubtful: others > 0, usage: None, sender };
            self.requests.insert(id, new);
        }
    }

    /// The request of that id is over, at the worker's end or the client's; what the reply said of its prompt, if it did.
    pub fn ended(&mut self, id: &str, usage: Option<PromptUsage>, now: Duration) {
        let Some((id, request)) = self.requests.get_key_value(id) else { return };
        self.unnamed += usize::from(usage.is_some() && !self.names);
        let usage = usage.unwrap_or(PromptUsage { prompt_tokens: request.path.tokens, cached_tokens: None });
        let id = Arc::clone(id);
        if let Some(request) = self.requests.get_mut(&id) {
            request.running = request.running.saturating_sub(1);
            // The last of those with one name is over; our own worker's events name requests, not sessions.
            if request.running > 0 && self.teller == Teller::Happenings {
                return;
            }
            request.usage = Some(usage);
        }
        self.ending.push_back((now + SETTLING_TIME, id));
    }

    /// Takes in the next part of the stream.
    ///
    /// # Errors
    /// When it does not continue what is known; nothing of it has been taken in then.
    pub fn take(&mut self, batch: FeedBatch) -> Result<Vec<CacheChange>, FeedError> {
        let FeedBatch { batch, snapshot, instance } = batch;
        let sequence = batch.sequence;
        let mut changes = Vec::new();
        if let (Some(known), Some(speaks)) = (self.instance, instance)
            && known != speaks
        {
            changes.push(CacheChange::Restarted);
            *self = Self { instance: Some(speaks), ..Self::new(self.listener) };
        }
        self.instance = self.instance.or(instance);
        match snapshot {
            Some(part) => self.take_snapshot(part, batch, &mut changes),
            None => {
                let next = self.next.ok_or(FeedError::NoSnapshot(sequence))?;
                if sequence != next {
                    return Err(FeedError::Gap { before: next.wrapping_sub(1), came: sequence });
                }
                self.next = Some(sequence + 1);
                for event in batch.events {
                    self.happen(event, &mut changes);
                }
            }
        }
        Ok(changes)
    }

    /// Settles the requests whose time has come.
    #[must_use]
    pub fn settle(&mut self, now: Duration) -> Vec<CacheChange> {
        let mut changes = Vec::new();
        for (id, usage) in std::mem::take(&mut self.ended_elsewhere) {
            self.ended(&id, usage, now);
        }
        for request in std::mem::take(&mut self.succeeded) {
            changes.extend(self.settled(request));
        }
        while self.ending.front().is_some_and(|(at, _)| *at <= now) {
            let Some((_, id)) = self.ending.pop_front() else { break };
            // Of two requests with one id, the one that ended is not the one that is known any more.
            if self.requests.get(&id).is_none_or(|request| request.usage.is_none()) {
                continue;
            }
            let Some(request) = self.requests.remove(&id) else { continue };
            changes.extend(self.settled(request));
        }
        changes
    }

    fn settled(&mut self, request: Request) -> Option<CacheChange> {
        let Request { mut path, filled, usage, is_doubtful, .. } = request;
        if self.teller == Teller::Happenings && (is_doubtful || filled.is_none()) {
            return None;
        }
        let PromptUsage { prompt_tokens, cached_tokens } = usage.unwrap_or_default();
        if prompt_tokens > 0 {
            path.tokens = prompt_tokens;
        }
        if let (Some(Filled { first, last }), Some(cached)) = (filled, cached_tokens) {
            self.blocks.place(first, last, cached);
        }
        let told = filled.map_or(0, |filled| self.blocks.cover(&path, filled.last));
        let held = told.max(self.blocks.covered(&path.hashes));
        let is_cached = |index: &usize| path.last_token(*index) <= cached_tokens.unwrap_or(0);
        let cached = (0..path.hashes.len()).take_while(is_cached).count();
        self.is_followed().then(|| CacheChange::Settled { path: path.hashes, held: held.max(cached) })
    }

    fn take_snapshot(&mut self, part: SnapshotPart, batch: KvEventBatch, changes: &mut Vec<CacheChange>) {
        if part.first {
            self.coming = Some(TokenBlocks::default());
            self.next = None;
        }
        let Some(coming) = &mut self.coming else { return };
        for event in batch.events {
            if let KvEvent::Stored(stored) = event {
                coming.store(&stored);
            }
        }
        if part.last {
            let mut coming = self.coming.take().unwrap_or_default();
            let gone = coming.succeed(std::mem::take(&mut self.blocks));
            self.blocks = coming;
            self.next = Some(batch.sequence);
            if !gone.is_empty() {
                changes.push(CacheChange::Gone(gone));
            }
        }
    }

    fn happen(&mut self, event: KvEvent, changes: &mut Vec<CacheChange>) {
        match event {
            KvEvent::Stored(stored) => {
                self.blocks.store(&stored);
                self.names_others |= stored.request_id.is_some();
                let request = stored.request_id.as_deref().and_then(|id| self.requests.get_mut(id));
                if let (Some(request), [.., last]) = (request, &stored.hashes[..]) {
                    let first = request.filled.map_or(stored.hashes[0], |filled| filled.first);
                    request.filled = Some(Filled { first, last: *last });
                    self.names = true;
                }
            }
            KvEvent::Removed { hashes } => {
                let gone = self.blocks.remove(&hashes);
                if !gone.is_empty() {
                    changes.push(CacheChange::Gone(gone));
                }
            }
            KvEvent::Cleared => {
                self.blocks = TokenBlocks::default();
                changes.push(CacheChange::Cleared);
            }
            KvEvent::Routed(prompt) => changes.extend(self.routed_elsewhere(prompt)),
            KvEvent::Ended(EndedRequest { request_id, router, prompt_tokens, cached_tokens }) => {
                if self.is_of(&request_id, router) {
                    let usage = PromptUsage { prompt_tokens, cached_tokens };
                    self.ended_elsewhere.push((request_id, (prompt_tokens > 0).then_some(usage)));
                }
            }
        }
    }

    /// Another router's request is followed like an own one, if its hashes mean something here.
    fn routed_elsewhere(&mut self, prompt: RoutedPrompt) -> Option<CacheChange> {
        let RoutedPrompt { request_id, router, seed_digest, hashes, .. } = prompt;
        let is_own = router == self.listener.router || self.requests.contains_key(&request_id);
        if is_own || self.listener.seed_digest != Some(seed_digest) {
            return None;
        }
        if self.others.len() >= MAX_OTHERS
            && let Some((oldest, sender)) = self.others.pop_front()
            && self.is_of(&oldest, sender)
        {
            self.requests.remove(&oldest);
        }
        self.others.push_back((Arc::clone(&request_id), router));
        let path = FollowedPath {
            hashes: hashes.into(),
            cut: Cut::Bytes(Opening {
                tools: Stretch { blocks: prompt.tools_blocks, bytes: prompt.tools_bytes.min(MOST_SIZE) },
                system: Stretch { blocks: prompt.system_blocks, bytes: prompt.system_bytes.min(MOST_SIZE) },
            }),
            size: prompt.prompt_bytes.min(MOST_SIZE),
            tokens: prompt.prompt_tokens.min(MOST_SIZE),
        };
        let change = CacheChange::Routed { path: Arc::clone(&path.hashes), cut: path.cut };
        self.follow(request_id, path, Some(router));
        Some(change)
    }

    /// Whether the request of that id is known as another router's, of that number.
    fn is_of(&self, id: &str, router: u64) -> bool {
        self.requests.get(id).is_some_and(|request| request.sender == Some(router))
    }
}

#[cfg(test)]
mod tests;
