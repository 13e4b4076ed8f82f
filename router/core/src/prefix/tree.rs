//! The tree itself: nodes are blocks, keyed by the chained hash of their path, each with the workers that hold it.
//!
//! Invariant: what a worker holds is closed under prefixes, that is, who holds a block holds its parent. The search
//! for the longest match relies on it, and eviction keeps it: a block that still has children, or is pinned for a request that
//! runs there, is never taken. Of a path only the end is in its worker's order of use, since what is above it was used whenever
//! it was: so a prompt that comes again costs one move, however long it is. `nodes` has the blocks, `tail` those that need no node of
//! their own yet, `order` the order of use and eviction, `removal` what is taken from a worker for other reasons.

mod kept;
mod nodes;
mod order;
mod removal;
mod tail;

use std::ops::Range;

use roundhouse_types::BlockHash;
use smallvec::SmallVec;

pub use self::kept::{KeptBlock, KeptBlocks, OutOfOrder};
use self::nodes::Nodes;
use self::order::WorkerList;
pub use self::order::WorkerTells;
use self::tail::{TailBlock, TailHit};
use super::arena::Arena;
use super::blocks::Path;
use crate::worker::WorkerSlot;

const NONE: u32 = u32::MAX;

/// Blocks of a path that are gone along one by one.
const NEAR_BLOCKS: usize = 32;

/// Bounds of the tree, in blocks held by workers (a block that three workers hold counts three times).
#[derive(Clone, Copy, Debug)]
pub struct TreeLimits {
    /// For all workers together. One costs about [`BYTES_PER_HOLDING`] bytes.
    pub total_blocks: usize,
    /// For each worker.
    pub worker_blocks: usize,
}

/// Memory of one block held by one worker: its node, its place in the map and its holding. In a tail it is 16 bytes.
pub const BYTES_PER_HOLDING: usize = 92;

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
pub struct PrefixHits {
    depths: SmallVec<[(WorkerSlot, usize); 8]>,
    /// How many blocks of the path are nodes, and which is the last of them.
    reached: (usize, u32),
    /// Where the path leads into a tail.
    tail: Option<TailHit>,
}

impl PrefixHits {
    /// Blocks of the prompt that `worker` holds.
    #[must_use]
    pub fn blocks(&self, worker: WorkerSlot) -> usize {
        self.depths.iter().find(|(slot, _)| *slot == worker).map_or(0, |(_, blocks)| *blocks)
    }

    /// Blocks of the prompt that anybody holds.
    #[must_use]
    pub fn deepest(&self) -> usize {
        self.depths.first().map_or(0, |(_, blocks)| *blocks)
    }

    /// All workers with a hit, deepest first.
    pub fn iter(&self) -> impl Iterator<Item = (WorkerSlot, usize)> + '_ {
        self.depths.iter().copied()
    }
}

/// One block in one worker's cache.
#[derive(Clone, Copy)]
struct Holding {
    node: u32,
    worker: WorkerSlot,
    /// Children of the block that the worker holds too.
    children: u32,
    /// Requests in flight whose prompts end here.
    pins: u32,
    /// Place in the worker's order of use: [`order`].
    newer: u32,
    older: u32,
    /// The tree's clock when a path that ends here was used last, or one that parted from what the worker held here; wraps.
    used: u32,
    /// In the unit of the path's cut; without the tail.
    size: u32,
    /// What its worker holds below it as one list; `NONE` for nothing.
    tail: u32,
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
    tails: Arena<Vec<TailBlock>>,
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
            tails: Arena::default(),
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
        let Some((first, reached)) = self.reach(path) else { return PrefixHits::default() };
        let (mut deep, mut node) = reached;
        let most = self.nodes.holders(first).len();
        let mut found: SmallVec<[(WorkerSlot, usize); 8]> = SmallVec::new();
        let mut known: SmallVec<[WorkerSlot; 32]> = SmallVec::new();
        // Holders only grow fewer with depth, so two depths with equally many holders have the same ones, and what
        // lies between them is skipped.
        loop {
            known.clear();
            known.extend(found.iter().map(|(worker, _)| *worker));
            known.sort_unstable();
            let new = self.nodes.holders(node).iter().map(|(worker, _)| *worker);
            found.extend(
                new.filter(|worker| known.binary_search(worker).is_err()).map(|worker| (worker, deep)),
            );
            if found.len() == most {
                break;
            }
            let has_more = |hash: &BlockHash| self.nodes.holders_of(*hash).len() > found.len();
            deep = path[..deep - 1].partition_point(has_more);
            let Some(next) = deep.checked_sub(1).and_then(|at| self.nodes.find(path[at])) else { break };
            node = next;
        }
        let tail = self.match_tail(path, reached);
        if let (Some((_, matched)), Some((_, depth))) = (tail, found.first_mut()) {
            // Who has a tail is the only one that holds what it is below.
            *depth += matched;
        }
        PrefixHits { depths: found, reached, tail: tail.map(|(tail, _)| tail) }
    }

    /// The first block of `path` that is a node, and how many are, with the last: they are its first ones.
    fn reach(&self, path: &[BlockHash]) -> Option<(u32, (usize, u32))> {
        let first = self.nodes.find(*path.first()?)?;
        let (near, far) = path.split_at(path.len().min(NEAR_BLOCKS));
        let (mut depth, mut last) = (1, first);
        for hash in &near[1..] {
            let Some(next) = self.nodes.find_below(last, *hash) else { return Some((first, (depth, last))) };
            (depth, last) = (depth + 1, next);
        }
        let more = far.partition_point(|hash| self.nodes.find(*hash).is_some());
        if more > 0 {
            (depth, last) = (depth + more, self.nodes.find(far[more - 1])?);
        }
        Some((first, (depth, last)))
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
            self.holdings[holding].pins += 1;
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
            self.holdings[holding].pins -= 1;
            self.evict(worker);
        }
    }

    /// Enters a path as the newest of `worker`, and says under which number its last block is held.
    fn enter(&mut self, worker: WorkerSlot, path: Path<'_>, hits: &PrefixHits) -> (Inserted, Option<u32>) {
        let path = path.first(self.limits.worker_blocks);
        let hashes = path.hashes;
        self.clock = self.clock.wrapping_add(1);
        let names_blocks = self.list(worker).names_blocks;
        let known = hits.blocks(worker).min(hashes.len());
        if let Some(tail) = hits.tail {
            if !names_blocks && self.continues(tail, worker, (known, hashes.len())) {
                let used = Some(self.holdings[tail.holding].used);
                self.continue_tail(tail, path);
                return (Inserted { known, used }, Some(tail.holding));
            }
            self.spread(tail.holding);
        }
        // What a worker holds is closed under prefixes, so the blocks it has are the first ones.
        let holds = |hash: &BlockHash| self.nodes.held_by(*hash, worker).is_some();
        debug_assert_eq!(known, hashes.partition_point(holds));
        let deepest = known.checked_sub(1).and_then(|at| match hits.reached {
            // Where a tail was, they are others by now.
            (depth, node) if depth == known && hits.tail.is_none() => {
                Some((node, self.nodes.holding(node, worker)?))
            }
            _ => self.nodes.held_by(hashes[at], worker),
        });
        let used = deepest.map(|(_, holding)| self.holdings[holding].used);
        let last = self.add_below(deepest, (worker, path), known..hits.deepest());
        if let Some((_, holding)) = deepest {
            self.holdings[holding].used = self.clock;
        }
        if let Some(last) = last {
            self.touch(last);
        }
        (Inserted { known, used }, last)
    }

    /// Adds what a worker does not hold of a path below `deepest`, the node and the holding that it does. Others hold the blocks of the
    /// range `others`; beyond, nobody holds anything. Says under which number the last block is held.
    fn add_below(
        &mut self,
        deepest: Option<(u32, u32)>,
        (worker, path): (WorkerSlot, Path<'_>),
        others: Range<usize>,
    ) -> Option<u32> {
        let (mut parent, mut above) = deepest.unwrap_or((NONE, NONE));
        let names_blocks = self.list(worker).names_blocks;
        for (at, hash) in path.hashes.iter().enumerate().skip(others.start) {
            // Beyond what anybody holds there is nothing to be found, and a look at it would be a wait for memory.
            let is_new = at >= others.end;
            let found = match parent {
                _ if is_new => None,
                NONE => self.nodes.find(*hash),
                parent => self.nodes.find_below(parent, *hash),
            };
            parent = found.unwrap_or_else(|| self.nodes.make(*hash, parent));
            above = self.add_holding((parent, worker), above, path.size(at));
            if is_new && !names_blocks {
                self.begin_tail(above, path, at + 1);
                break;
            }
        }
        self.nodes.index_made();
        (above != NONE).then_some(above)
    }

    /// Makes a worker a holder of a node, below what it holds under the number `above`. Not in the order of use.
    fn add_holding(&mut self, (node, worker): (u32, WorkerSlot), above: u32, size: u32) -> u32 {
        let holding = self.holdings.place(Holding::new((node, worker), self.clock, size));
        self.nodes.add_holder(node, worker, holding);
        if above != NONE {
            self.holdings[above].children += 1;
        }
        self.count(worker, 1, u64::from(size));
        holding
    }
}

#[cfg(test)]
mod tests;
