//! Which block holds what a hash names, and the other way round.
//!
//! A table of chains through the blocks themselves: every block has a link, every chain a head. Nothing is ever moved or made larger, so no
//! operation stops the engine for the others, and half a million blocks take 2 MiB of heads. Block hashes are seeded at random and need no
//! hashing of their own. Next: [`block_pool`](crate::block_pool).

use roundhouse_types::BlockHash;

use crate::step::BlockId;

/// The end of a chain.
const END: u32 = u32::MAX;
/// The link of a block that is in no chain.
const UNLINKED: u32 = u32::MAX - 1;

#[derive(Clone, Copy, Debug)]
struct Entry {
    hash: BlockHash,
    next: u32,
}

/// Blocks by hash. Every operation is O(1).
#[derive(Debug)]
pub(crate) struct BlockIndex {
    /// A power of two of them, at least as many as there are blocks.
    heads: Vec<u32>,
    entries: Vec<Entry>,
    linked: usize,
}

impl BlockIndex {
    /// Of `blocks` blocks, none of which holds anything.
    pub(crate) fn new(blocks: usize) -> Self {
        let blank = Entry { hash: BlockHash(0), next: UNLINKED };
        let heads = vec![END; blocks.next_power_of_two()];
        Self { heads, entries: vec![blank; blocks], linked: 0 }
    }

    /// Blocks that can be found.
    pub(crate) fn len(&self) -> usize {
        self.linked
    }

    /// The block that holds what `hash` names.
    pub(crate) fn get(&self, hash: BlockHash) -> Option<BlockId> {
        let mut index = self.heads[self.chain(hash)];
        while index != END {
            let entry = &self.entries[index as usize];
            if entry.hash == hash {
                return Some(BlockId(index));
            }
            index = entry.next;
        }
        None
    }

    /// What `block` holds, if it can be found.
    pub(crate) fn hash_of(&self, block: BlockId) -> Option<BlockHash> {
        let entry = &self.entries[block.0 as usize];
        (entry.next != UNLINKED).then_some(entry.hash)
    }

    /// Makes `block`, which cannot be found, the one that holds what `hash` names, which no block does.
    pub(crate) fn insert(&mut self, block: BlockId, hash: BlockHash) {
        debug_assert!(self.get(hash).is_none() && self.hash_of(block).is_none(), "one block, one hash");
        let chain = self.chain(hash);
        self.entries[block.0 as usize] = Entry { hash, next: self.heads[chain] };
        self.heads[chain] = block.0;
        self.linked += 1;
    }

    /// Makes `block` one that cannot be found. Returns what it held.
    pub(crate) fn remove(&mut self, block: BlockId) -> Option<BlockHash> {
        let hash = self.hash_of(block)?;
        let next = std::mem::replace(&mut self.entries[block.0 as usize].next, UNLINKED);
        let chain = self.chain(hash);
        if self.heads[chain] == block.0 {
            self.heads[chain] = next;
        } else {
            let mut before = self.heads[chain] as usize;
            while self.entries[before].next != block.0 {
                before = self.entries[before].next as usize;
            }
            self.entries[before].next = next;
        }
        self.linked -= 1;
        Some(hash)
    }

    fn chain(&self, hash: BlockHash) -> usize {
        hash.0 as usize & (self.heads.len() - 1)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The model: a map. Few chains, so that they grow long.
        #[test]
        fn finds_what_a_map_finds(operations in prop::collection::vec((any::<bool>(), 0u32..8, 0u64..40), 0..100)) {
            let mut index = BlockIndex::new(8);
            let mut model: HashMap<u64, u32> = HashMap::new();
            for (insert, block, hash) in operations {
                if insert && index.hash_of(BlockId(block)).is_none() && !model.contains_key(&hash) {
                    index.insert(BlockId(block), BlockHash(hash));
                    model.insert(hash, block);
                } else if !insert {
                    let held = model.iter().find(|(_, held)| **held == block).map(|(hash, _)| *hash);
                    prop_assert_eq!(index.remove(BlockId(block)), held.map(BlockHash));
                    model.retain(|_, held| *held != block);
                }
                prop_assert_eq!(index.len(), model.len());
                for hash in 0..40 {
                    prop_assert_eq!(index.get(BlockHash(hash)), model.get(&hash).copied().map(BlockId));
                }
            }
        }
    }
}
