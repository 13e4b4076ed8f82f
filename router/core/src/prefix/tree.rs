//! The tree itself: nodes are blocks, keyed by the chained hash of their path, each with the workers that hold it.
//!
//! Invariant: what a worker holds is closed under prefixes, that is, who holds a block holds its parent. The search
//! for the longest match relies on it, and eviction keeps it: each worker's blocks are in order of use, a path is
//! refreshed from its end to its beginning, so that a child comes before its parent, and a block that still has
//! children is never taken.

use hashbrown::HashTable;
use roundhouse_types::BlockHash;
use smallvec::SmallVec;

use super::arena::Arena;
use crate::worker::WorkerSlot;

const NONE: u32 = u32::MAX;
/// A moment is as many insertions as a worker has blocks, divided by two to this power.
const MOMENT_BITS: u32 = 10;

/// Bounds of the tree, in blocks held by workers (a block that three workers hold counts three times).
#[derive(Clone, Copy, Debug)]
pub struct TreeLimits {
    /// For all workers together. One costs about [`BYTES_PER_HOLDING`] bytes.
    pub total_blocks: usize,
    /// For each worker.
    pub worker_blocks: usize,
}

/// Memory of one block held by one worker: its node, its place in the map and its holding.
pub const BYTES_PER_HOLDING: usize = 80;

impl TreeLimits {
    /// Limits that keep the tree within about `bytes` of memory, with no bound on a single worker.
    #[must_use]
    pub fn within_bytes(bytes: usize) -> Self {
        let total_blocks = (bytes / BYTES_PER_HOLDING).max(1);
        Self { total_blocks, worker_blocks: total_blocks }
    }
}

/// How deep each worker holds a prompt: `(worker, blocks)`, deepest first, workers that hold nothing left out.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PrefixHits(Vec<(WorkerSlot, usize)>);

impl PrefixHits {
    /// Blocks of the prompt that `worker` holds.
    #[must_use]
    pub fn blocks(&self, worker: WorkerSlot) -> usize {
        self.0.iter().find(|(slot, _)| *slot == worker).map_or(0, |(_, blocks)| *blocks)
    }

    /// All workers with a hit, deepest first.
    pub fn iter(&self) -> impl Iterator<Item = (WorkerSlot, usize)> + '_ {
        self.0.iter().copied()
    }
}

struct Node {
    hash: BlockHash,
    parent: u32,
    /// `(worker, holding)`, sorted by worker. Most blocks have one holder, which then needs no memory of its own.
    holders: SmallVec<[(WorkerSlot, u32); 1]>,
}

/// One block in one worker's cache, and its place in that worker's order of use.
#[derive(Clone, Copy)]
struct Holding {
    node: u32,
    worker: WorkerSlot,
    /// Children of the block that the worker holds too.
    children: u32,
    newer: u32,
    older: u32,
    /// The tree's clock when it was used last; wraps.
    used: u32,
}

#[derive(Clone, Copy)]
struct WorkerList {
    newest: u32,
    oldest: u32,
    blocks: usize,
}

const EMPTY_LIST: WorkerList = WorkerList { newest: NONE, oldest: NONE, blocks: 0 };

/// Which worker holds which prefixes, bounded, with leaf-first eviction in order of use.
pub struct PrefixTree {
    limits: TreeLimits,
    /// Numbers of nodes by their hash, which only the node itself keeps.
    map: HashTable<u32>,
    nodes: Arena<Node>,
    holdings: Arena<Holding>,
    workers: Vec<WorkerList>,
    clock: u32,
    held: usize,
}

impl PrefixTree {
    /// An empty tree.
    #[must_use]
    pub fn new(limits: TreeLimits) -> Self {
        Self {
            limits,
            map: HashTable::new(),
            nodes: Arena::default(),
            holdings: Arena::default(),
            workers: Vec::new(),
            clock: 0,
            held: 0,
        }
    }

    /// Blocks held, over all workers.
    #[must_use]
    pub fn held_blocks(&self) -> usize {
        self.held
    }

    /// Blocks held by `worker`.
    #[must_use]
    pub fn worker_blocks(&self, worker: WorkerSlot) -> usize {
        self.workers.get(worker.index()).map_or(0, |list| list.blocks)
    }

    /// How deep each worker holds `path`, the chained hashes of a prompt's blocks.
    #[must_use]
    pub fn hits(&self, path: &[BlockHash]) -> PrefixHits {
        let depth = path.partition_point(|hash| self.find(*hash).is_some());
        let mut found: Vec<(WorkerSlot, usize)> = Vec::new();
        let mut deep = depth;
        // Holders only grow fewer with depth, so two depths with equally many holders have the same ones, and what
        // lies between them is skipped.
        while deep > 0 {
            let mut known: Vec<_> = found.iter().map(|(worker, _)| *worker).collect();
            known.sort_unstable();
            let new = self.holders(path[deep - 1]).iter().map(|(worker, _)| *worker);
            found.extend(
                new.filter(|worker| known.binary_search(worker).is_err()).map(|worker| (worker, deep)),
            );
            deep = path[..deep - 1].partition_point(|hash| self.holders(*hash).len() > found.len());
        }
        PrefixHits(found)
    }

    fn holders(&self, hash: BlockHash) -> &[(WorkerSlot, u32)] {
        self.find(hash).map_or(&[], |node| &self.nodes[node].holders)
    }

    /// Says that `worker` holds all of `path` and has just used it. Returns how many blocks it held already.
    pub fn insert(&mut self, worker: WorkerSlot, path: &[BlockHash]) -> usize {
        let path = &path[..path.len().min(self.limits.worker_blocks)];
        self.clock = self.clock.wrapping_add(1);
        if self.workers.len() <= worker.index() {
            self.workers.resize(worker.index() + 1, EMPTY_LIST);
        }
        // What a worker holds is closed under prefixes, so the blocks it has are the first ones.
        let known = path.partition_point(|hash| self.held_by(*hash, worker).is_some());
        let deepest = known.checked_sub(1).and_then(|at| self.held_by(path[at], worker));
        let (mut parent, mut above) = deepest.unwrap_or((NONE, NONE));
        let mut new: SmallVec<[u32; 32]> = SmallVec::new();
        for hash in &path[known..] {
            parent = self.node(*hash, parent);
            above = self.add_holding(parent, worker, above);
            new.push(above);
        }
        for holding in new.into_iter().rev() {
            self.link_newest(holding);
        }
        if let Some((_, holding)) = deepest {
            self.touch_path(holding);
        }
        self.evict(worker);
        known
    }

    /// Takes back what an insertion of `path` added for `worker` beyond its first `keep` blocks, as far as nothing else
    /// has come to depend on it.
    pub fn take_back(&mut self, worker: WorkerSlot, path: &[BlockHash], keep: usize) {
        for hash in path.iter().skip(keep).rev() {
            let holders = self.holders(*hash);
            let Ok(at) = holders.binary_search_by_key(&worker, |(slot, _)| *slot) else { continue };
            let holding = holders[at].1;
            if self.holdings[holding].children > 0 {
                return;
            }
            self.remove(holding);
        }
    }

    /// Forgets all that `worker` holds, in time proportional to that.
    pub fn forget(&mut self, worker: WorkerSlot) {
        while let Some(list) = self.workers.get(worker.index())
            && list.oldest != NONE
        {
            self.remove(list.oldest);
        }
    }

    /// How many insertions there have been, wrapping.
    #[must_use]
    pub fn clock(&self) -> u32 {
        self.clock
    }

    /// Forgets what no insertion since `clock`, an earlier reading of [`PrefixTree::clock`], has used.
    pub fn forget_unused_since(&mut self, clock: u32) {
        let age = self.clock.wrapping_sub(clock);
        for index in 0..self.workers.len() {
            let oldest = |tree: &Self| {
                let oldest = tree.workers[index].oldest;
                (oldest != NONE).then(|| tree.holdings[oldest])
            };
            while let Some(Holding { worker, used, .. }) = oldest(self)
                && self.clock.wrapping_sub(used) >= age
            {
                self.evict_oldest(worker);
            }
        }
    }

    fn node(&mut self, hash: BlockHash, parent: u32) -> u32 {
        if let Some(node) = self.find(hash) {
            return node;
        }
        let node = self.nodes.place(Node { hash, parent, holders: SmallVec::new() });
        self.map.insert_unique(hash.0, node, |node| self.nodes[*node].hash.0);
        node
    }

    fn find(&self, hash: BlockHash) -> Option<u32> {
        // Block hashes are random already; hashing them again would be waste.
        self.map.find(hash.0, |node| self.nodes[*node].hash == hash).copied()
    }

    /// The node of `hash` and what `worker` holds of it.
    fn held_by(&self, hash: BlockHash, worker: WorkerSlot) -> Option<(u32, u32)> {
        let node = self.find(hash)?;
        let holders = &self.nodes[node].holders;
        let at = holders.binary_search_by_key(&worker, |(slot, _)| *slot).ok()?;
        Some((node, holders[at].1))
    }

    /// Makes `worker` a holder of `node`, below what it holds under the number `above`. Not yet in the order of use.
    fn add_holding(&mut self, node: u32, worker: WorkerSlot, above: u32) -> u32 {
        let new = Holding { node, worker, children: 0, newer: NONE, older: NONE, used: self.clock };
        let holding = self.holdings.place(new);
        let holders = &mut self.nodes[node].holders;
        let at = holders.partition_point(|(slot, _)| *slot < worker);
        holders.insert(at, (worker, holding));
        if above != NONE {
            self.holdings[above].children += 1;
        }
        self.held += 1;
        holding
    }

    /// Makes `holding` and all above it the newest of their worker, the root last. Stops at one that was used a moment ago,
    /// since what is above that was as well: a prompt that is asked for all the time is not moved each time. A moment is
    /// short beside the time that a block stays, and no time at all in a small tree, whose order of use is exact.
    fn touch_path(&mut self, mut holding: u32) {
        let worker = self.holdings[holding].worker;
        let moment = u32::try_from(self.workers[worker.index()].blocks >> MOMENT_BITS).unwrap_or(u32::MAX);
        while self.clock.wrapping_sub(self.holdings[holding].used) >= moment {
            self.touch(holding);
            let parent = self.nodes[self.holdings[holding].node].parent;
            if parent == NONE {
                break;
            }
            let holders = &self.nodes[parent].holders;
            let Ok(at) = holders.binary_search_by_key(&worker, |(slot, _)| *slot) else { break };
            holding = holders[at].1;
        }
    }

    fn touch(&mut self, holding: u32) {
        self.unlink(holding);
        self.link_newest(holding);
        self.holdings[holding].used = self.clock;
    }

    fn link_newest(&mut self, holding: u32) {
        let list = &mut self.workers[self.holdings[holding].worker.index()];
        let second = std::mem::replace(&mut list.newest, holding);
        list.blocks += 1;
        if second == NONE {
            list.oldest = holding;
        } else {
            self.holdings[second].newer = holding;
        }
        let entry = &mut self.holdings[holding];
        (entry.older, entry.newer) = (second, NONE);
    }

    fn unlink(&mut self, holding: u32) {
        let Holding { worker, newer, older, .. } = self.holdings[holding];
        let list = &mut self.workers[worker.index()];
        list.blocks -= 1;
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

    /// Evicts from `worker` down to its own bound, then from whoever has the oldest block down to the common one.
    fn evict(&mut self, worker: WorkerSlot) {
        while self.workers[worker.index()].blocks > self.limits.worker_blocks {
            self.evict_oldest(worker);
        }
        while self.held > self.limits.total_blocks {
            // A batch at a time, because finding the worker costs a look at all of them.
            const BATCH_BLOCKS: usize = 64;
            let age = |list: &&WorkerList| self.clock.wrapping_sub(self.holdings[list.oldest].used);
            let lists = self.workers.iter().filter(|list| list.oldest != NONE);
            let Some(list) = lists.max_by_key(age) else { return };
            let victim = self.holdings[list.oldest].worker;
            let batch = BATCH_BLOCKS.min(self.held - self.limits.total_blocks);
            for _ in 0..batch.min(self.workers[victim.index()].blocks) {
                self.evict_oldest(victim);
            }
        }
    }

    /// Evicts the leaf that `worker`, which must hold something, has not used for longest. A block with others below it has
    /// been used when they were, whatever the order says, and goes to the front.
    fn evict_oldest(&mut self, worker: WorkerSlot) {
        loop {
            let oldest = self.workers[worker.index()].oldest;
            if self.holdings[oldest].children == 0 {
                return self.remove(oldest);
            }
            self.touch(oldest);
        }
    }

    fn remove(&mut self, holding: u32) {
        self.unlink(holding);
        let Holding { node, worker, .. } = self.holdings[holding];
        self.holdings.free(holding);
        self.held -= 1;
        let Node { parent, hash, ref mut holders } = self.nodes[node];
        holders.retain(|(slot, _)| *slot != worker);
        if holders.is_empty() {
            *holders = SmallVec::new();
            if let Ok(entry) = self.map.find_entry(hash.0, |at| *at == node) {
                entry.remove();
            }
            self.nodes.free(node);
        }
        if parent != NONE {
            let above = &self.nodes[parent].holders;
            if let Ok(at) = above.binary_search_by_key(&worker, |(slot, _)| *slot) {
                self.holdings[above[at].1].children -= 1;
            }
        }
    }
}

#[cfg(test)]
mod tests;
