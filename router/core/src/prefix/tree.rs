//! The tree itself: nodes are blocks, keyed by the chained hash of their path, each with the workers that hold it.
//!
//! Invariant: what a worker holds is closed under prefixes, that is, who holds a block holds its parent. The search
//! for the longest match relies on it, and eviction keeps it: each worker's blocks are in order of use, a path is
//! refreshed from its end to its beginning, so that a child comes before its parent, and a block that still has
//! children, or is pinned for a request that runs there, is never taken. `nodes` has the blocks, `order` the order of use and
//! eviction, `removal` what is taken from a worker for other reasons.

mod nodes;
mod order;
mod removal;

use roundhouse_types::BlockHash;
use smallvec::SmallVec;

use self::nodes::Nodes;
use self::order::WorkerList;
use super::arena::Arena;
use super::blocks::Path;
use crate::worker::WorkerSlot;

const NONE: u32 = u32::MAX;

/// Bounds of the tree, in blocks held by workers (a block that three workers hold counts three times).
#[derive(Clone, Copy, Debug)]
pub struct TreeLimits {
    /// For all workers together. One costs about [`BYTES_PER_HOLDING`] bytes.
    pub total_blocks: usize,
    /// For each worker.
    pub worker_blocks: usize,
}

/// Memory of one block held by one worker: its node, its place in the map and its holding.
pub const BYTES_PER_HOLDING: usize = 72;

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

    /// Blocks of the prompt that anybody holds.
    #[must_use]
    pub fn deepest(&self) -> usize {
        self.0.first().map_or(0, |(_, blocks)| *blocks)
    }

    /// All workers with a hit, deepest first.
    pub fn iter(&self) -> impl Iterator<Item = (WorkerSlot, usize)> + '_ {
        self.0.iter().copied()
    }
}

/// One block in one worker's cache, and its place in that worker's order of use.
#[derive(Clone, Copy)]
struct Holding {
    node: u32,
    worker: WorkerSlot,
    /// What keeps it from being taken: children of the block that the worker holds too, and pins.
    ties: u32,
    newer: u32,
    older: u32,
    /// The tree's clock when it was used last; wraps.
    used: u32,
    /// In the unit of the path's cut.
    size: u32,
}

/// What an insertion found.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Inserted {
    /// Blocks of the path that the worker held already.
    pub known: usize,
    /// The tree's clock when the last of these had been used last.
    pub used: Option<u32>,
}

/// Keeps a path from being evicted for its worker, until it is given back to [`PrefixTree::unpin`].
#[derive(Debug)]
#[must_use = "a pin that is lost keeps its path for ever"]
pub struct Pin {
    holding: u32,
    worker: WorkerSlot,
    /// How often the worker had been forgotten.
    forgotten: u32,
}

/// Which worker holds which prefixes, bounded, with leaf-first eviction in order of use.
pub struct PrefixTree {
    limits: TreeLimits,
    nodes: Nodes,
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
            nodes: Nodes::default(),
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

    /// How many insertions there have been, wrapping.
    #[must_use]
    pub fn clock(&self) -> u32 {
        self.clock
    }

    /// How deep each worker holds `path`, the chained hashes of a prompt's blocks.
    #[must_use]
    pub fn hits(&self, path: &[BlockHash]) -> PrefixHits {
        let depth = path.partition_point(|hash| self.nodes.find(*hash).is_some());
        let mut found: Vec<(WorkerSlot, usize)> = Vec::new();
        let mut deep = depth;
        // Holders only grow fewer with depth, so two depths with equally many holders have the same ones, and what
        // lies between them is skipped.
        while deep > 0 {
            let mut known: SmallVec<[WorkerSlot; 32]> = found.iter().map(|(worker, _)| *worker).collect();
            known.sort_unstable();
            let new = self.nodes.holders_of(path[deep - 1]).iter().map(|(worker, _)| *worker);
            found.extend(
                new.filter(|worker| known.binary_search(worker).is_err()).map(|worker| (worker, deep)),
            );
            deep = path[..deep - 1].partition_point(|hash| self.nodes.holders_of(*hash).len() > found.len());
        }
        PrefixHits(found)
    }

    /// Says that `worker` holds all of `path` and has just used it. `hits` are those of this path, of this moment.
    pub fn insert(&mut self, worker: WorkerSlot, path: Path<'_>, hits: &PrefixHits) -> Inserted {
        let (inserted, _) = self.enter(worker, path, hits);
        self.evict(worker);
        inserted
    }

    /// The same, and a pin for the path, if it has a block.
    pub fn insert_pinned(
        &mut self,
        worker: WorkerSlot,
        path: Path<'_>,
        hits: &PrefixHits,
    ) -> (Inserted, Option<Pin>) {
        let (inserted, deepest) = self.enter(worker, path, hits);
        let pin = deepest.map(|holding| {
            // What is above it is kept by what is below.
            self.holdings[holding].ties += 1;
            Pin { holding, worker, forgotten: self.workers[worker.index()].forgotten }
        });
        self.evict(worker);
        (inserted, pin)
    }

    /// The request that a path was pinned for does not run any more.
    #[expect(clippy::needless_pass_by_value, reason = "a pin is given back, and is none after that")]
    pub fn unpin(&mut self, pin: Pin) {
        let Pin { holding, worker, forgotten } = pin;
        // Else the holding is gone, and its number maybe another's.
        if self.workers[worker.index()].forgotten == forgotten {
            self.holdings[holding].ties -= 1;
            self.evict(worker);
        }
    }

    /// Enters a path as the newest of `worker`, and says under which number its last block is held.
    fn enter(&mut self, worker: WorkerSlot, path: Path<'_>, hits: &PrefixHits) -> (Inserted, Option<u32>) {
        let hashes = &path.hashes[..path.hashes.len().min(self.limits.worker_blocks)];
        self.clock = self.clock.wrapping_add(1);
        self.list(worker);
        // What a worker holds is closed under prefixes, so the blocks it has are the first ones.
        let holds = |hash: &BlockHash| self.nodes.held_by(*hash, worker).is_some();
        debug_assert_eq!(hits.blocks(worker), path.hashes.partition_point(holds));
        let known = hits.blocks(worker).min(hashes.len());
        let deepest = known.checked_sub(1).and_then(|at| self.nodes.held_by(hashes[at], worker));
        let used = deepest.map(|(_, holding)| self.holdings[holding].used);
        let (mut parent, mut above) = deepest.unwrap_or((NONE, NONE));
        let mut new: SmallVec<[u32; 32]> = SmallVec::new();
        for (at, hash) in hashes.iter().enumerate().skip(known) {
            // Beyond what anybody holds there is nothing to be found, and a look at it would be a wait for memory.
            let is_new = at >= hits.deepest();
            let found = if is_new { None } else { self.nodes.find(*hash) };
            parent = found.unwrap_or_else(|| self.nodes.make(*hash, parent));
            above = self.add_holding((parent, worker), above, path.cut.size(at));
            new.push(above);
        }
        self.nodes.index_made();
        for holding in new.into_iter().rev() {
            self.link_newest(holding);
        }
        if let Some((_, holding)) = deepest {
            self.touch_path(holding);
        }
        (Inserted { known, used }, (above != NONE).then_some(above))
    }

    /// Makes a worker a holder of a node, below what it holds under the number `above`. Not yet in the order of use.
    fn add_holding(&mut self, (node, worker): (u32, WorkerSlot), above: u32, size: u32) -> u32 {
        let new = Holding { node, worker, ties: 0, newer: NONE, older: NONE, used: self.clock, size };
        let holding = self.holdings.place(new);
        self.nodes.add_holder(node, worker, holding);
        if above != NONE {
            self.holdings[above].ties += 1;
        }
        self.held += 1;
        holding
    }
}

#[cfg(test)]
mod tests;
