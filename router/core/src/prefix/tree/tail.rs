//! Tails. Most prompts end in text that no other prompt has: its blocks are kept as one list under the first of them, by the one worker
//! that was given them, and cost one place in the map and one in the order of use together.
//!
//! A tail is all that its worker holds below a block which nobody else holds and nothing else is below of. Once a path
//! parts from it, ends inside it or goes on below what is pinned, or another worker is given its first block, it is spread
//! out into nodes. So the blocks of any path that are in the map are its first ones, and a tail's are the next. A worker
//! whose events may name any block has none, since the blocks of a tail cannot be found by their hashes.

use roundhouse_types::BlockHash;

use super::order::Over;
use super::{Holding, NONE, PrefixTree};
use crate::prefix::blocks::Path;
use crate::worker::WorkerSlot;

/// A block of a tail.
#[derive(Clone, Copy)]
pub(super) struct TailBlock {
    hash: BlockHash,
    /// In the unit of the path's cut.
    size: u32,
}

/// A tail that a path leads into.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct TailHit {
    /// Of the block that it is below.
    pub(super) holding: u32,
    worker: WorkerSlot,
    /// Depth of its last block, whether the path goes so far or not.
    end: usize,
}

impl PrefixTree {
    /// The tail below the last block of `path` that is a node, and how many more blocks of the path are in it.
    pub(super) fn match_tail(
        &self,
        path: &[BlockHash],
        (depth, node): (usize, u32),
    ) -> Option<(TailHit, usize)> {
        let [(worker, holding)] = *self.nodes.holders(node) else { return None };
        let tail = self.tail(holding);
        let matched =
            tail.iter().zip(&path[depth..]).take_while(|(block, hash)| block.hash == **hash).count();
        (!tail.is_empty()).then(|| (TailHit { holding, worker, end: depth + tail.len() }, matched))
    }

    /// What is below a block as a list; empty where there is none.
    pub(super) fn tail(&self, holding: u32) -> &[TailBlock] {
        match self.holdings[holding].tail {
            NONE => &[],
            tail => &self.tails[tail],
        }
    }

    /// The same, as hashes and sizes.
    pub(super) fn tail_of(&self, holding: u32) -> impl Iterator<Item = (BlockHash, u32)> + '_ {
        self.tail(holding).iter().map(|block| (block.hash, block.size))
    }

    /// Blocks and size of a holding, its tail included.
    pub(super) fn weight(&self, holding: u32) -> (usize, u64) {
        let tail = self.tail(holding);
        (1 + tail.len(), size_of(tail) + u64::from(self.holdings[holding].size))
    }

    /// Gives a holding that has just been made the blocks of `path` from depth `depth` on as its tail.
    pub(super) fn begin_tail(&mut self, holding: u32, path: Path<'_>, depth: usize) {
        if depth < path.hashes.len() {
            let tail: Vec<TailBlock> = blocks_of(path, depth).collect();
            self.count(self.holdings[holding].worker, tail.len(), size_of(&tail));
            self.holdings[holding].tail = self.tails.place(tail);
        }
    }

    /// Whether `path`, of which `worker` holds `known` blocks, is this tail of the worker's to its end, and maybe goes on where nothing
    /// that is pinned ends.
    pub(super) fn continues(
        &self,
        tail: TailHit,
        worker: WorkerSlot,
        (known, whole): (usize, usize),
    ) -> bool {
        let ends_here = known == tail.end && tail.worker == worker;
        ends_here && (whole == known || self.holdings[tail.holding].pins == 0)
    }

    /// Adds what is left of a path that [`continues`](Self::continues) a tail, and makes the path the newest.
    pub(super) fn continue_tail(&mut self, tail: TailHit, path: Path<'_>) {
        let at = self.holdings[tail.holding].tail;
        self.tails[at].extend(blocks_of(path, tail.end));
        let new = &self.tails[at][self.tails[at].len() + tail.end - path.hashes.len()..];
        let (blocks, size) = (new.len(), size_of(new));
        self.count(tail.worker, blocks, size);
        self.touch(tail.holding);
    }

    /// Takes so much from the end of a holding's tail, or all of it. Returns how many blocks.
    pub(super) fn shorten(&mut self, holding: u32, over: Over) -> usize {
        let Holding { worker, tail, .. } = self.holdings[holding];
        if tail == NONE {
            return 0;
        }
        let (mut blocks, mut size) = (0, 0);
        for block in self.tails[tail].iter().rev() {
            if blocks >= over.blocks && size >= over.size {
                break;
            }
            (blocks, size) = (blocks + 1, size + u64::from(block.size));
        }
        let left = self.tails[tail].len() - blocks;
        self.tails[tail].truncate(left);
        self.discount(worker, blocks, size);
        if left == 0 {
            self.drop_tail(holding);
        }
        blocks
    }

    /// A holding has no tail any more; its blocks are not counted any more, or others' by now.
    pub(super) fn drop_tail(&mut self, holding: u32) {
        let tail = std::mem::replace(&mut self.holdings[holding].tail, NONE);
        if tail != NONE {
            self.tails[tail] = Vec::new();
            self.tails.free(tail);
        }
    }

    /// Makes nodes of the blocks of a holding's tail. Its own number is that of the last of them then, since that is what pins go by.
    pub(super) fn spread(&mut self, holding: u32) {
        let Holding { node, worker, used, size, tail, .. } = self.holdings[holding];
        if tail == NONE {
            return;
        }
        let below = std::mem::take(&mut self.tails[tail]);
        self.drop_tail(holding);
        let hashes: Vec<BlockHash> = below.iter().map(|block| block.hash).collect();
        let sizes = std::iter::once(size).chain(below.iter().map(|block| block.size));
        let above = self.nodes.spread(node, &hashes);
        for (node, size) in above.iter().copied().zip(sizes) {
            let new = Holding { children: 1, ..Holding::new((node, worker), used, size) };
            let new = self.holdings.place(new);
            self.nodes.add_holder(node, worker, new);
        }
        self.holdings[holding].size = below.last().map_or(size, |block| block.size);
    }
}

fn size_of(blocks: &[TailBlock]) -> u64 {
    blocks.iter().map(|block| u64::from(block.size)).sum()
}

/// The blocks of a path from depth `depth` on.
fn blocks_of(path: Path<'_>, depth: usize) -> impl Iterator<Item = TailBlock> + '_ {
    (depth..).zip(&path.hashes[depth..]).map(move |(at, hash)| TailBlock { hash: *hash, size: path.size(at) })
}
