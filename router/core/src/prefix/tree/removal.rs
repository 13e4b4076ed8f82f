//! What is taken from a worker before its time: because it said so, or because it is not the worker it was.

use roundhouse_types::BlockHash;

use super::order::Over;
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
            if self.holdings[holding].is_tied() {
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
            let Holding { node, children: count, .. } = self.holdings[holding];
            let children = self.nodes.children(node).filter_map(|child| self.nodes.holding(child, worker));
            // The rest of many children, which are others', is not looked at.
            below.extend(children.take(count as usize));
            at += 1;
        }
        for holding in below.into_iter().rev() {
            if !self.holdings[holding].is_tied() {
                self.remove(holding);
            }
        }
        self.nodes.sweep();
    }

    /// `worker` holds nothing any more but what requests that run there are pinned to.
    pub fn clear(&mut self, worker: WorkerSlot) {
        self.remove_where(worker, |holding| !holding.is_tied());
    }

    /// Forgets all that `worker` holds, pinned or not, in time proportional to that.
    pub fn forget(&mut self, worker: WorkerSlot) {
        let list = self.list(worker);
        // From now on the pins tie nothing.
        list.forgotten = list.forgotten.wrapping_add(1);
        self.remove_where(worker, |holding| holding.children == 0);
    }

    /// Removes what may go, from the ends of paths to their beginnings.
    fn remove_where(&mut self, worker: WorkerSlot, may_go: impl Fn(&Holding) -> bool) {
        // The ends of all paths are in the order of use.
        let ends: Vec<u32> = self.in_order(worker).filter(|end| may_go(&self.holdings[*end])).collect();
        for end in ends {
            let mut next = Some(end);
            while let Some(holding) = next.filter(|holding| may_go(&self.holdings[*holding])) {
                let parent = self.nodes.parent(self.holdings[holding].node);
                self.remove(holding);
                next = (parent != NONE).then(|| self.nodes.holding(parent, worker)).flatten();
            }
        }
        self.nodes.sweep();
    }

    /// Forgets the `most` blocks that `worker` has not used for longest, but nothing that is pinned. Returns how many there were.
    pub fn forget_oldest(&mut self, worker: WorkerSlot, most: usize) -> usize {
        if self.worker_blocks(worker) == 0 {
            return 0;
        }
        let forgotten = self.evict_up_to(worker, most);
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
            && let Some(oldest) = self.oldest_end(worker)
            && self.clock.wrapping_sub(self.holdings[oldest].used) >= age
        {
            match self.evict_oldest(worker, Over { blocks: most - forgotten, size: 0 }) {
                0 => break,
                blocks => forgotten += blocks,
            }
        }
        self.nodes.sweep();
        forgotten
    }

    /// What is in the order of use, the oldest first.
    fn in_order(&self, worker: WorkerSlot) -> impl Iterator<Item = u32> + '_ {
        let some = |holding: u32| (holding != NONE).then_some(holding);
        let first = self.workers.get(worker.index()).and_then(|list| some(list.oldest));
        std::iter::successors(first, move |holding| some(self.holdings[*holding].newer))
    }

    /// Takes the end of a path from its worker. To be swept.
    pub(super) fn remove(&mut self, holding: u32) {
        let Holding { node, worker, .. } = self.holdings[holding];
        let (blocks, size) = self.weight(holding);
        self.discount(worker, blocks, size);
        let parent = self.nodes.parent(node);
        if parent != NONE
            && let Some(above) = self.nodes.holding(parent, worker)
        {
            self.holdings[above].children -= 1;
            self.inherit_place(above, holding);
        }
        self.unchain(holding);
        self.drop_tail(holding);
        self.holdings.free(holding);
        self.nodes.remove_holder(node, worker);
    }
}
