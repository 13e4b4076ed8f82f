//! What a tree knows, taken out of it and put into another one: a router that is replaced leaves it to its successor.
//!
//! Blocks by number, each after its parent and once, whoever holds it; and for each worker the ends of its paths in the order of their use, so
//! that what is put back goes in the order in which it would have gone.

use std::collections::HashMap;

use roundhouse_types::BlockHash;

use super::{NONE, PrefixTree};
use crate::prefix::blocks::Path;
use crate::worker::WorkerSlot;

/// A block that somebody holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KeptBlock {
    /// Chained to those before it.
    pub hash: BlockHash,
    /// Number of the one before it; `None` for the first of a prompt.
    pub parent: Option<u32>,
    /// In the unit of its path's cut.
    pub size: u32,
}

/// Blocks that have been taken out, by number.
#[derive(Default, Debug)]
pub struct KeptBlocks {
    blocks: Vec<KeptBlock>,
    numbers: HashMap<BlockHash, u32>,
}

/// A block comes before the one that it follows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("block {0} comes before its parent")]
pub struct OutOfOrder(usize);

impl KeptBlocks {
    /// Those of a list.
    ///
    /// # Errors
    /// When one comes before its parent.
    pub fn of(blocks: Vec<KeptBlock>) -> Result<Self, OutOfOrder> {
        let is_early = |(at, block): (usize, &KeptBlock)| {
            let parent = block.parent.map(|parent| parent as usize);
            parent.filter(|parent| *parent >= at).map(|_| OutOfOrder(at))
        };
        match blocks.iter().enumerate().find_map(is_early) {
            Some(error) => Err(error),
            // To be put into a tree, and never added to.
            None => Ok(Self { blocks, numbers: HashMap::new() }),
        }
    }

    /// All of them, each after its parent.
    #[must_use]
    pub fn blocks(&self) -> &[KeptBlock] {
        &self.blocks
    }

    fn number(&mut self, block: KeptBlock) -> u32 {
        let Self { blocks, numbers } = self;
        *numbers.entry(block.hash).or_insert_with(|| {
            blocks.push(block);
            u32::try_from(blocks.len() - 1).expect("a tree has fewer blocks")
        })
    }

    /// The path that ends with the block of that number, first block first; none if there is no such block.
    fn path(&self, end: u32) -> (Vec<BlockHash>, Vec<u32>) {
        let (mut hashes, mut sizes, mut at) = (Vec::new(), Vec::new(), Some(end));
        while let Some(block) = at.and_then(|number| self.blocks.get(number as usize)) {
            hashes.push(block.hash);
            sizes.push(block.size);
            at = block.parent;
        }
        hashes.reverse();
        sizes.reverse();
        (hashes, sizes)
    }
}

impl PrefixTree {
    /// Adds to `kept` what `worker` holds. Returns the ends of its paths, the one that was used longest ago first.
    #[must_use]
    pub fn keep(&self, worker: WorkerSlot, kept: &mut KeptBlocks) -> Vec<u32> {
        let mut ends = Vec::new();
        let mut at = self.workers.get(worker.index()).map_or(NONE, |list| list.oldest);
        while at != NONE {
            let mut above = Vec::new();
            let mut node = self.holdings[at].node;
            while node != NONE {
                above.push(node);
                node = self.nodes.parent(node);
            }
            let mut parent = None;
            for node in above.into_iter().rev() {
                let Some(holding) = self.nodes.holding(node, worker) else { break };
                let (hash, size) = (self.nodes.hash(node), self.holdings[holding].size);
                parent = Some(kept.number(KeptBlock { hash, parent, size }));
            }
            for (hash, size) in self.tail_of(at) {
                parent = Some(kept.number(KeptBlock { hash, parent, size }));
            }
            ends.extend(parent);
            at = self.holdings[at].newer;
        }
        ends
    }

    /// Enters the path of `kept` that ends with that number as the newest of `worker`.
    pub fn put_back(&mut self, worker: WorkerSlot, kept: &KeptBlocks, end: u32) {
        let (hashes, sizes) = kept.path(end);
        let hits = self.hits(&hashes);
        self.insert(worker, Path::kept(&hashes, &sizes), &hits);
    }
}
