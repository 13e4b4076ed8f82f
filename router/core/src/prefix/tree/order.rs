//! Each worker's blocks in order of use, and eviction by it.

use super::{Holding, NONE, PrefixTree};
use crate::worker::WorkerSlot;

/// A moment is as many insertions as a worker has blocks, divided by two to this power.
const MOMENT_BITS: u32 = 10;

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

impl WorkerList {
    pub(super) fn count(&mut self, blocks: usize, size: u64) {
        self.blocks += blocks;
        self.size += size;
    }

    pub(super) fn discount(&mut self, blocks: usize, size: u64) {
        self.blocks -= blocks;
        self.size -= size;
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

    /// Makes `holding` and all above it the newest of their worker, the root last. Stops at one that was used a moment ago,
    /// since what is above that was as well: a prompt that is asked for all the time is not moved each time. A moment is
    /// short beside the time that a block stays, and no time at all in a small tree, whose order of use is exact.
    pub(super) fn touch_path(&mut self, mut holding: u32) {
        let worker = self.holdings[holding].worker;
        let moment = u32::try_from(self.workers[worker.index()].blocks >> MOMENT_BITS).unwrap_or(u32::MAX);
        while self.clock.wrapping_sub(self.holdings[holding].used) >= moment {
            self.touch(holding);
            let parent = self.nodes.parent(self.holdings[holding].node);
            if parent == NONE {
                break;
            }
            let Some(above) = self.nodes.holding(parent, worker) else { break };
            holding = above;
        }
    }

    pub(super) fn touch(&mut self, holding: u32) {
        self.unchain(holding);
        self.chain_newest(holding);
        self.holdings[holding].used = self.clock;
    }

    /// A holding counts for its worker from now on, as the newest.
    pub(super) fn link_newest(&mut self, holding: u32) {
        let (blocks, size) = self.weight(holding);
        let worker = self.holdings[holding].worker;
        self.workers[worker.index()].count(blocks, size);
        self.chain_newest(holding);
    }

    /// A holding does not count for its worker any more.
    pub(super) fn unlink(&mut self, holding: u32) {
        let (blocks, size) = self.weight(holding);
        let worker = self.holdings[holding].worker;
        self.workers[worker.index()].discount(blocks, size);
        self.unchain(holding);
    }

    /// Puts a holding whose blocks count already right after `older`.
    pub(super) fn link_after(&mut self, older: u32, holding: u32) {
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

    fn unchain(&mut self, holding: u32) {
        let Holding { worker, newer, older, .. } = self.holdings[holding];
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
    }

    /// Evicts from `worker` down to its own bounds, then from whoever has the oldest block down to the common one. What is
    /// pinned stays, bounds or not.
    pub(super) fn evict(&mut self, worker: WorkerSlot) {
        let is_over = |list: &WorkerList, most| list.blocks > most || list.size > list.capacity;
        while is_over(&self.workers[worker.index()], self.limits.worker_blocks) && self.evict_oldest(worker) {
        }
        let mut most_looks = self.workers.len();
        while self.held > self.limits.total_blocks && most_looks > 0 {
            let age = |list: &&WorkerList| self.clock.wrapping_sub(self.holdings[list.oldest].used);
            let lists = self.workers.iter().filter(|list| list.oldest != NONE);
            let Some(list) = lists.max_by_key(age) else { break };
            let victim = self.holdings[list.oldest].worker;
            let over = self.held - self.limits.total_blocks;
            let batch = over.max(BATCH_BLOCKS.min(self.limits.total_blocks / 256));
            let evicted = (0..batch).take_while(|_| self.evict_oldest(victim)).count();
            // All that it has is pinned, and counts as just used now: the next look finds another.
            most_looks -= usize::from(evicted == 0);
        }
        self.nodes.sweep();
    }

    /// Evicts the block that `worker` has not used for longest, of those that nothing ties. A block with others below it, or
    /// one that is pinned, is in use, whatever the order says, and goes to the front. Returns whether there was one. To be swept.
    pub(super) fn evict_oldest(&mut self, worker: WorkerSlot) -> bool {
        let mut to_look_at = self.workers[worker.index()].blocks;
        for _ in 0..MOST_LOOKS {
            if to_look_at == 0 {
                break;
            }
            let oldest = self.workers[worker.index()].oldest;
            if self.holdings[oldest].ties == 0 {
                if !self.shorten(oldest) {
                    self.remove(oldest);
                }
                return true;
            }
            self.touch(oldest);
            to_look_at -= self.weight(oldest).0;
        }
        false
    }
}
