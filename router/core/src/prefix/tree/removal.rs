//! What is taken from a worker before its time: because it said so, or because it is not the worker it was.

use roundhouse_types::BlockHash;

use super::{Holding, NONE, PrefixTree};
use crate::worker::WorkerSlot;

impl PrefixTree {
    /// Takes back what an insertion of `path` added for `worker` beyond its first `keep` blocks, as far as nothing else
    /// has come to depend on it.
    pub fn take_back(&mut self, worker: WorkerSlot, path: &[BlockHash], keep: usize) {
        if let Some(tail) = self.hits(path).tail {
            self.spread(tail.holding);
        }
        for hash in path.iter().skip(keep).rev() {
            let Some((_, holding)) = self.nodes.held_by(*hash, worker) else { continue };
            if self.holdings[holding].ties > 0 {
                break;
            }
            self.remove(holding);
        }
        self.nodes.sweep();
    }

    /// `worker`, which [names blocks](super::WorkerTells::blocks), does not hold that of `hash` any more, and so nothing below it. What requests that run there are pinned
    /// to stays: they will compute it if they have not.
    pub fn withdraw(&mut self, worker: WorkerSlot, hash: BlockHash) {
        let Some((_, root)) = self.nodes.held_by(hash, worker) else { return };
        let mut below = vec![root];
        let mut at = 0;
        while let Some(holding) = below.get(at).copied() {
            let Holding { node, ties, .. } = self.holdings[holding];
            let children = self.nodes.children(node).filter_map(|child| self.nodes.holding(child, worker));
            // No more than there are ties, so that the rest of many children is not looked at.
            below.extend(children.take(ties as usize));
            at += 1;
        }
        for holding in below.into_iter().rev() {
            if self.holdings[holding].ties == 0 {
                self.remove(holding);
            }
        }
        self.nodes.sweep();
    }

    /// `worker` holds nothing any more but what requests that run there are pinned to.
    pub fn clear(&mut self, worker: WorkerSlot) {
        let leaves: Vec<u32> =
            self.holdings_of(worker).filter(|holding| self.holdings[*holding].ties == 0).collect();
        for leaf in leaves {
            let mut next = Some(leaf);
            while let Some(holding) = next.filter(|holding| self.holdings[*holding].ties == 0) {
                let parent = self.nodes.parent(self.holdings[holding].node);
                self.remove(holding);
                next = (parent != NONE).then(|| self.nodes.holding(parent, worker)).flatten();
            }
        }
        self.nodes.sweep();
    }

    /// Forgets all that `worker` holds, pinned or not, in time proportional to that.
    pub fn forget(&mut self, worker: WorkerSlot) {
        let list = self.list(worker);
        list.forgotten = list.forgotten.wrapping_add(1);
        let all: Vec<u32> = self.holdings_of(worker).collect();
        // From now on the pins tie nothing.
        for holding in &all {
            self.holdings[*holding].ties = 0;
        }
        for holding in all {
            let parent = self.nodes.parent(self.holdings[holding].node);
            if parent != NONE
                && let Some(above) = self.nodes.holding(parent, worker)
            {
                self.holdings[above].ties += 1;
            }
        }
        self.clear(worker);
    }

    /// Forgets the `most` blocks that `worker` has not used for longest, but nothing that is pinned. Returns how many there were.
    pub fn forget_oldest(&mut self, worker: WorkerSlot, most: usize) -> usize {
        if self.worker_blocks(worker) == 0 {
            return 0;
        }
        let forgotten = (0..most).take_while(|_| self.evict_oldest(worker)).count();
        self.nodes.sweep();
        forgotten
    }

    /// Forgets what no insertion since `clock`, an earlier reading of [`PrefixTree::clock`], has used.
    pub fn forget_unused_since(&mut self, clock: u32) {
        for index in 0..self.workers.len() {
            let most = self.workers[index].blocks;
            self.forget_older(WorkerSlot(u32::try_from(index).unwrap_or(u32::MAX)), clock, most);
        }
    }

    /// Forgets at most `most` blocks of `worker`, of those that no insertion since `clock` has used. Returns how many.
    pub fn forget_older(&mut self, worker: WorkerSlot, clock: u32, most: usize) -> usize {
        let age = self.clock.wrapping_sub(clock);
        let mut forgotten = 0;
        while forgotten < most
            && let Some(list) = self.workers.get(worker.index())
            && list.oldest != NONE
            && self.clock.wrapping_sub(self.holdings[list.oldest].used) >= age
            && self.evict_oldest(worker)
        {
            forgotten += 1;
        }
        self.nodes.sweep();
        forgotten
    }

    fn holdings_of(&self, worker: WorkerSlot) -> impl Iterator<Item = u32> + '_ {
        let some = |holding: u32| (holding != NONE).then_some(holding);
        let first = self.workers.get(worker.index()).and_then(|list| some(list.oldest));
        std::iter::successors(first, move |holding| some(self.holdings[*holding].newer))
    }

    /// To be swept.
    pub(super) fn remove(&mut self, holding: u32) {
        self.unlink(holding);
        self.held -= self.weight(holding).0;
        self.drop_tail(holding);
        let Holding { node, worker, .. } = self.holdings[holding];
        self.holdings.free(holding);
        let parent = self.nodes.parent(node);
        self.nodes.remove_holder(node, worker);
        if parent != NONE
            && let Some(above) = self.nodes.holding(parent, worker)
        {
            self.holdings[above].ties -= 1;
        }
    }
}
