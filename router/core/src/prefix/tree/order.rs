//! Each worker's order of use, and eviction by it.
//!
//! In the order are the ends of paths: all blocks that nothing is below of, and some of the others, at which a path ended once. Whatever is
//! above a block was used last when that was, or later; so it needs no place of its own until nothing is below it any more, and then takes
//! over that of the last one that was. A block of the others that is met as the oldest loses its place.

use smallvec::SmallVec;

use super::{Holding, NONE, PrefixTree};
use crate::worker::WorkerSlot;

/// In place of a neighbour in the order: it is not in the order.
const NO_PLACE: u32 = u32::MAX - 1;

/// Evicted at a time from a large tree, because finding the worker costs a look at all of them.
const BATCH_BLOCKS: usize = 64;

/// Blocks in use that are passed over in search of one to evict. Where requests in flight hold more than a worker's bounds the next
/// insertion goes on from there; a search to the end would cost each of them a walk over all that the worker holds.
const MOST_LOOKS: usize = 64;

/// What a worker tells of its cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct WorkerTells {
    /// What it has room for, in the unit of its paths' cuts; `None` if that is unknown.
    pub capacity: Option<u64>,
    /// Whether it tells which blocks go, so that each must be found by its hash.
    pub blocks: bool,
}

/// How much is to go: as many blocks, and as much of their size.
#[derive(Clone, Copy)]
pub(super) struct Over {
    pub(super) blocks: usize,
    pub(super) size: u64,
}

/// What one worker holds.
#[derive(Clone, Copy)]
pub(super) struct WorkerList {
    pub(super) newest: u32,
    pub(super) oldest: u32,
    pub(super) blocks: usize,
    /// Of all its blocks.
    size: u64,
    /// What its cache has room for, if that is known.
    capacity: u64,
    /// Whether it may name any block that it holds.
    pub(super) names_blocks: bool,
    /// How often it was forgotten.
    pub(super) forgotten: u32,
}

const EMPTY_LIST: WorkerList = WorkerList {
    newest: NONE,
    oldest: NONE,
    blocks: 0,
    size: 0,
    capacity: u64::MAX,
    names_blocks: false,
    forgotten: 0,
};

impl Holding {
    /// Nothing is below it, and it is not in the order of use.
    pub(super) fn new((node, worker): (u32, WorkerSlot), used: u32, size: u32) -> Self {
        Self { node, worker, children: 0, pins: 0, newer: NO_PLACE, older: NO_PLACE, used, size, tail: NONE }
    }

    /// Whether something keeps it from being taken.
    pub(super) fn is_tied(&self) -> bool {
        self.children > 0 || self.pins > 0
    }

    pub(super) fn has_place(&self) -> bool {
        self.older != NO_PLACE
    }
}

impl PrefixTree {
    /// What is known of `worker` counts from its next insertion on: its capacity bounds what it holds.
    pub fn set_tells(&mut self, worker: WorkerSlot, tells: WorkerTells) {
        let list = self.list(worker);
        list.capacity = tells.capacity.unwrap_or(u64::MAX);
        list.names_blocks = tells.blocks;
    }

    /// What `worker` holds, in the unit of its paths' cuts.
    #[must_use]
    pub fn worker_size(&self, worker: WorkerSlot) -> u64 {
        self.workers.get(worker.index()).map_or(0, |list| list.size)
    }

    /// A worker's list; there is one from now on.
    pub(super) fn list(&mut self, worker: WorkerSlot) -> &mut WorkerList {
        if self.workers.len() <= worker.index() {
            self.workers.resize(worker.index() + 1, EMPTY_LIST);
        }
        &mut self.workers[worker.index()]
    }

    /// So much more is held by `worker`.
    pub(super) fn count(&mut self, worker: WorkerSlot, blocks: usize, size: u64) {
        self.held += blocks;
        let list = self.list(worker);
        list.blocks += blocks;
        list.size += size;
    }

    /// So much less.
    pub(super) fn discount(&mut self, worker: WorkerSlot, blocks: usize, size: u64) {
        self.held -= blocks;
        let list = self.list(worker);
        list.blocks -= blocks;
        list.size -= size;
    }

    /// A path that ends with `holding` has been used just now.
    pub(super) fn touch(&mut self, holding: u32) {
        self.unchain(holding);
        self.chain_newest(holding);
        self.holdings[holding].used = self.clock;
    }

    /// `end`, the end of a path, was below `above` and is about to go: the block above was used when it was, or later.
    pub(super) fn inherit_place(&mut self, above: u32, end: u32) {
        let age = |holding: u32| self.clock.wrapping_sub(self.holdings[holding].used);
        let Holding { children, .. } = self.holdings[above];
        let was_used_since = age(above) < age(end);
        if was_used_since && (children > 0 || self.holdings[above].has_place()) {
            return;
        }
        self.unchain(above);
        self.chain_after(end, above);
        self.holdings[above].used = self.holdings[end].used;
    }

    /// Puts what has no place right after `older`.
    fn chain_after(&mut self, older: u32, holding: u32) {
        let Holding { worker, newer, .. } = self.holdings[older];
        self.holdings[older].newer = holding;
        if newer == NONE {
            self.workers[worker.index()].newest = holding;
        } else {
            self.holdings[newer].older = holding;
        }
        let entry = &mut self.holdings[holding];
        (entry.older, entry.newer) = (older, newer);
    }

    fn chain_newest(&mut self, holding: u32) {
        let worker = self.holdings[holding].worker;
        let list = &mut self.workers[worker.index()];
        let second = std::mem::replace(&mut list.newest, holding);
        if second == NONE {
            list.oldest = holding;
        } else {
            self.holdings[second].newer = holding;
        }
        let entry = &mut self.holdings[holding];
        (entry.older, entry.newer) = (second, NONE);
    }

    /// Takes `holding` out of the order, if it is in it.
    pub(super) fn unchain(&mut self, holding: u32) {
        let Holding { worker, newer, older, .. } = self.holdings[holding];
        if older == NO_PLACE {
            return;
        }
        let list = &mut self.workers[worker.index()];
        if newer == NONE {
            list.newest = older;
        } else {
            self.holdings[newer].older = older;
        }
        if older == NONE {
            list.oldest = newer;
        } else {
            self.holdings[older].newer = newer;
        }
        let entry = &mut self.holdings[holding];
        (entry.older, entry.newer) = (NO_PLACE, NO_PLACE);
    }

    /// The path of `worker` that was used longest ago, by its end.
    pub(super) fn oldest_end(&mut self, worker: WorkerSlot) -> Option<u32> {
        loop {
            let oldest = self.workers.get(worker.index())?.oldest;
            if oldest == NONE {
                return None;
            }
            if self.holdings[oldest].children == 0 {
                return Some(oldest);
            }
            self.unchain(oldest);
        }
    }

    /// Evicts from `worker` down to its own bounds, then from whoever has the oldest block down to the common one. What is
    /// pinned stays, bounds or not.
    pub(super) fn evict(&mut self, worker: WorkerSlot) {
        while let Some(over) = self.over(worker)
            && self.evict_oldest(worker, over) > 0
        {}
        let mut most_looks = self.workers.len();
        while self.held > self.limits.total_blocks && most_looks > 0 {
            let slots =
                (0..self.workers.len()).map(|index| WorkerSlot(u32::try_from(index).unwrap_or(u32::MAX)));
            let ends: SmallVec<[u32; 32]> = slots.filter_map(|worker| self.oldest_end(worker)).collect();
            let age = |end: &&u32| self.clock.wrapping_sub(self.holdings[**end].used);
            let Some(oldest) = ends.iter().max_by_key(age) else { break };
            let victim = self.holdings[*oldest].worker;
            let over = self.held - self.limits.total_blocks;
            let batch = over.max(BATCH_BLOCKS.min(self.limits.total_blocks / 256));
            // All that it has may be pinned, and counts as just used now: the next look finds another.
            most_looks -= usize::from(self.evict_up_to(victim, batch) == 0);
        }
        self.nodes.sweep();
    }

    /// By how much `worker` is over its bounds.
    fn over(&self, worker: WorkerSlot) -> Option<Over> {
        let list = self.workers.get(worker.index())?;
        let blocks = list.blocks.saturating_sub(self.limits.worker_blocks);
        let size = list.size.saturating_sub(list.capacity);
        (blocks > 0 || size > 0).then_some(Over { blocks, size })
    }

    /// Evicts the `most` blocks that `worker` has not used for longest, or as many as nothing ties. Returns how many. To be swept.
    pub(super) fn evict_up_to(&mut self, worker: WorkerSlot, most: usize) -> usize {
        let mut evicted = 0;
        while evicted < most {
            match self.evict_oldest(worker, Over { blocks: most - evicted, size: 0 }) {
                0 => break,
                blocks => evicted += blocks,
            }
        }
        evicted
    }

    /// Evicts what `worker` has not used for longest, of what nothing ties: the end of one path, as far as it is a tail and there is that much to evict, or a
    /// block. A path that is pinned is in use, whatever the order says, and goes to the front. Returns how many blocks. To be swept.
    pub(super) fn evict_oldest(&mut self, worker: WorkerSlot, over: Over) -> usize {
        let mut passed_over = NONE;
        for _ in 0..MOST_LOOKS {
            let Some(oldest) = self.oldest_end(worker).filter(|oldest| *oldest != passed_over) else { break };
            if self.holdings[oldest].pins == 0 {
                let of_tail = self.shorten(oldest, over);
                if of_tail == 0 {
                    self.remove(oldest);
                }
                return of_tail.max(1);
            }
            self.touch(oldest);
            if passed_over == NONE {
                passed_over = oldest;
            }
        }
        0
    }
}
