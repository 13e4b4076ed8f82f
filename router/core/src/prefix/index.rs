//! The tree with what is in flight at each worker, and what replies say of its predictions.
//!
//! An entry is made when a request is picked, before its worker has computed anything. Until the request is over its path is
//! pinned; until its first token nothing follows from the worker's not having had it. Knows no clock and no policies. Next:
//! the decider, which calls it under its lock.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use roundhouse_types::BlockHash;

use super::blocks::Path;
use super::tree::{Inserted, KeptBlocks, Pin, PrefixHits, PrefixTree, TreeLimits, WorkerTells};
use crate::sync::{Mutex, PoisonError};
use crate::worker::WorkerSlot;

/// The prefix tree as a router uses it.
pub struct PrefixIndex {
    tree: PrefixTree,
    notices: Arc<Notices>,
    /// Room for the notices that are taken in, kept.
    taken: Vec<Notice>,
    workers: Vec<Notes>,
}

/// What is known of one worker besides what it holds.
#[derive(Default)]
struct Notes {
    /// The tree's clock at picks whose first token has not come, the oldest first.
    unsettled: VecDeque<u32>,
    accuracy: Accuracy,
}

/// What requests in flight have to say; taken in before the next change, so that dropping one never waits for a pick.
#[derive(Default)]
struct Notices(Mutex<Vec<Notice>>);

enum Notice {
    /// The first token of what was picked then has come, or never will.
    Settled { worker: WorkerSlot, clock: u32 },
    /// A request is over.
    Over(Pin),
}

impl Notices {
    fn add(&self, notice: Notice) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(notice);
    }
}

/// The path of one request in flight, pinned at its worker until dropped.
pub struct InFlight {
    pin: Option<Pin>,
    worker: WorkerSlot,
    /// `None` once settled.
    unsettled: Option<u32>,
    notices: Arc<Notices>,
}

impl InFlight {
    /// The first token has come: the worker has computed the path.
    pub fn settle(&mut self) {
        if let Some(clock) = self.unsettled.take() {
            self.notices.add(Notice::Settled { worker: self.worker, clock });
        }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.settle();
        if let Some(pin) = self.pin.take() {
            self.notices.add(Notice::Over(pin));
        }
    }
}

impl fmt::Debug for InFlight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InFlight").field("worker", &self.worker).finish_non_exhaustive()
    }
}

/// What a prediction was built upon.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Basis {
    /// Blocks of the prompt that the worker was taken to hold.
    pub known_blocks: usize,
    /// The tree's clock when the last of them had been used last. `None` if there are none, or if that use may not have been
    /// computed yet.
    used: Option<u32>,
}

/// Tokens that a worker was expected to find in its cache, and what it found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Comparison {
    /// Expected.
    pub predicted_tokens: usize,
    /// Found, as it said.
    pub cached_tokens: usize,
}

impl Comparison {
    /// Differences below are the size of the worker's own blocks, and the template's tokens, which the router cannot see.
    const LEAST_TOKENS: usize = 64;

    /// Whether far less was there than expected.
    fn is_miss(self) -> bool {
        let Self { predicted_tokens, cached_tokens } = self;
        cached_tokens + Self::LEAST_TOKENS.max(predicted_tokens / 4) < predicted_tokens
    }
}

/// How much of what a worker was expected to have it turned out to have.
struct Accuracy {
    share: f64,
}

impl Default for Accuracy {
    fn default() -> Self {
        Self { share: 1.0 }
    }
}

impl Accuracy {
    /// Weight of a comparison: after some 45 complete misses in a row a worker is taken to cache nothing.
    const WEIGHT: f64 = 0.05;
    /// Below, it does not cache, or evicts at once.
    const LEAST_SHARE: f64 = 0.1;

    fn see(&mut self, comparison: Comparison) {
        let Comparison { predicted_tokens, cached_tokens } = comparison;
        let tells = predicted_tokens.max(cached_tokens) >= Comparison::LEAST_TOKENS;
        if tells {
            let share = (cached_tokens as f64 / predicted_tokens.max(1) as f64).min(1.0);
            self.share += Self::WEIGHT * (share - self.share);
        }
    }

    fn caches(&self) -> bool {
        self.share >= Self::LEAST_SHARE
    }
}

impl PrefixIndex {
    /// An empty one.
    #[must_use]
    pub fn new(limits: TreeLimits) -> Self {
        Self {
            tree: PrefixTree::new(limits),
            notices: Arc::default(),
            taken: Vec::new(),
            workers: Vec::new(),
        }
    }

    /// The tree, to be read.
    #[must_use]
    pub fn tree(&self) -> &PrefixTree {
        &self.tree
    }

    /// How deep each worker holds `path`.
    #[must_use]
    pub fn hits(&self, path: &[BlockHash]) -> PrefixHits {
        self.tree.hits(path)
    }

    /// Takes in what requests in flight have had to say; before [`PrefixIndex::hits`], since paths that ended may be evicted.
    pub fn catch_up(&mut self) {
        self.take_notices();
    }

    /// A request goes to `worker`; `hits` are those of its path, of this moment.
    pub fn enter(
        &mut self,
        worker: WorkerSlot,
        (path, hits): (Path<'_>, &PrefixHits),
        tells: WorkerTells,
    ) -> (Basis, Option<InFlight>) {
        if !self.notes(worker).accuracy.caches() {
            return (Basis::default(), None);
        }
        self.tree.set_tells(worker, tells);
        let (Inserted { known, used }, pin) = self.tree.insert_pinned(worker, path, hits);
        let clock = self.tree.clock();
        let notices = Arc::clone(&self.notices);
        let unsettled = &mut self.notes(worker).unsettled;
        let is_older = |used: &u32| {
            unsettled.front().is_none_or(|first| clock.wrapping_sub(*used) > clock.wrapping_sub(*first))
        };
        let basis = Basis { known_blocks: known, used: used.filter(is_older) };
        let in_flight = pin.map(|pin| {
            unsettled.push_back(clock);
            InFlight { pin: Some(pin), worker, unsettled: Some(clock), notices }
        });
        (basis, in_flight)
    }

    /// A request has failed before its first token: `worker` does not hold what was entered for it beyond its first `keep`
    /// blocks, as far as nothing else was built upon that.
    pub fn take_back(
        &mut self,
        in_flight: Option<InFlight>,
        worker: WorkerSlot,
        path: &[BlockHash],
        keep: usize,
    ) {
        drop(in_flight);
        self.take_notices();
        self.tree.take_back(worker, path, keep);
    }

    /// A worker has said how much of a prompt it found in its cache. If that is far less than expected, it has evicted what
    /// was expected there, and so whatever it had used even longer ago; at most half of what it holds, since one reply may be
    /// an exception. The prompt's own path stays: by now the worker has computed it. One that never has what is expected
    /// caches nothing, and gets no entries until it reports a hit. Returns how many blocks were forgotten.
    pub fn compare(&mut self, worker: WorkerSlot, basis: Basis, comparison: Comparison) -> usize {
        self.take_notices();
        let notes = self.notes(worker);
        if basis.known_blocks > 0 && basis.used.is_none() {
            return 0;
        }
        notes.accuracy.see(comparison);
        if !notes.accuracy.caches() {
            let held = self.tree.worker_blocks(worker);
            self.tree.forget(worker);
            return held;
        }
        let Some(used) = basis.used.filter(|_| comparison.is_miss()) else { return 0 };
        let most = self.tree.worker_blocks(worker).div_ceil(2);
        self.tree.forget_older(worker, used, most)
    }

    /// `worker` says that it does not hold these blocks any more.
    pub fn withdraw(&mut self, worker: WorkerSlot, blocks: &[BlockHash]) {
        self.take_notices();
        for block in blocks {
            self.tree.withdraw(worker, *block);
        }
    }

    /// `worker` says that it holds nothing any more.
    pub fn clear(&mut self, worker: WorkerSlot) {
        self.take_notices();
        self.tree.clear(worker);
    }

    /// `worker` has left or restarted: nothing is known of it any more.
    pub fn forget(&mut self, worker: WorkerSlot) {
        self.take_notices();
        self.tree.forget(worker);
        self.notes(worker).accuracy = Accuracy::default();
    }

    /// Adds to `kept` what `worker` is taken to hold. Returns the ends of its paths, the one that was used longest ago first.
    #[must_use]
    pub fn keep(&self, worker: WorkerSlot, kept: &mut KeptBlocks) -> Vec<u32> {
        self.tree.keep(worker, kept)
    }

    /// Enters paths of `kept` as held by `worker`, the first as the oldest.
    pub fn put_back(&mut self, worker: WorkerSlot, kept: &KeptBlocks, ends: &[u32]) {
        self.take_notices();
        for end in ends {
            self.tree.put_back(worker, kept, *end);
        }
    }

    /// Forgets the `most` blocks that `worker` has not used for longest, but nothing that is pinned. Returns how many there were.
    pub fn forget_oldest(&mut self, worker: WorkerSlot, most: usize) -> usize {
        self.take_notices();
        self.tree.forget_oldest(worker, most)
    }

    /// Forgets what no entry since `clock`, an earlier reading of the tree's, has used.
    pub fn forget_unused_since(&mut self, clock: u32) {
        self.take_notices();
        self.tree.forget_unused_since(clock);
    }

    fn notes(&mut self, worker: WorkerSlot) -> &mut Notes {
        if self.workers.len() <= worker.index() {
            self.workers.resize_with(worker.index() + 1, Notes::default);
        }
        &mut self.workers[worker.index()]
    }

    fn take_notices(&mut self) {
        {
            let mut notices = self.notices.0.lock().unwrap_or_else(PoisonError::into_inner);
            if notices.is_empty() {
                return;
            }
            std::mem::swap(&mut *notices, &mut self.taken);
        }
        let mut taken = std::mem::take(&mut self.taken);
        for notice in taken.drain(..) {
            match notice {
                Notice::Over(pin) => self.tree.unpin(pin),
                Notice::Settled { worker, clock } => {
                    let unsettled = &mut self.notes(worker).unsettled;
                    if let Some(at) = unsettled.iter().position(|known| *known == clock) {
                        unsettled.remove(at);
                    }
                }
            }
        }
        self.taken = taken;
    }
}

#[cfg(test)]
mod tests;
