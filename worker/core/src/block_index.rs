//! Which block holds what a hash names, and the other way round.
//!
//! A table of buckets, each a line of the processor's cache: whatever is looked up, entered or removed touches one line
//! that is not there yet, or two. (Half a million blocks do not fit into the fast part of the cache; a chain through the
//! blocks, as it was here before, cost a line for each link, one after the other.) A bucket that is full passes its
//! entries on to the next and counts them, so that a search knows where to stop and nothing is ever moved or made larger:
//! no operation stops the engine for the others. Block hashes are seeded at random and need no hashing of their own.
//! Next: [`block_pool`](crate::block_pool).

use roundhouse_types::BlockHash;

use crate::step::BlockId;

/// Entries of a bucket: what a line of 64 bytes has room for, beside the count.
const SLOTS: usize = 7;
/// Blocks for each bucket. One bucket of 25 is fuller than it can be then, and passes entries on.
const BLOCKS_A_BUCKET: usize = 4;
/// A slot that is free, and the bucket of a block that is in none.
const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct Bucket {
    /// Parts of the hashes: who has another one is not looked at.
    tags: [u32; SLOTS],
    blocks: [u32; SLOTS],
    /// Entries that would be here or before, had there been room, and are further on.
    passed_on: u32,
}

impl Bucket {
    const EMPTY: Self = Self { tags: [0; SLOTS], blocks: [NONE; SLOTS], passed_on: 0 };

    /// Blocks whose hashes may be the one with `tag`.
    fn candidates(&self, tag: u32) -> impl Iterator<Item = u32> {
        let free = places(&self.blocks, NONE);
        let same = places(&self.tags, tag) & !free;
        let blocks = self.blocks;
        std::iter::successors(Some(same), |same| Some(same & same.wrapping_sub(1)))
            .take_while(|same| *same != 0)
            .map(move |same| blocks[same.trailing_zeros() as usize])
    }

    fn slot_of(&self, block: u32) -> Option<usize> {
        let found = places(&self.blocks, block);
        (found != 0).then_some(found.trailing_zeros() as usize)
    }
}

/// A bit for each slot that has `wanted`. All of them at once: a branch for each would have to wait for the line, and the
/// next line's loading with it.
fn places(slots: &[u32; SLOTS], wanted: u32) -> u32 {
    slots.iter().enumerate().fold(0, |found, (slot, other)| found | (u32::from(*other == wanted) << slot))
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    hash: BlockHash,
    /// Where it is.
    bucket: u32,
}

/// Blocks by hash. Every operation is O(1).
#[derive(Clone, Debug)]
pub(crate) struct BlockIndex {
    buckets: Box<[Bucket]>,
    entries: Box<[Entry]>,
    linked: usize,
}

impl BlockIndex {
    /// Of `blocks` blocks, none of which holds anything.
    pub(crate) fn new(blocks: usize) -> Self {
        let blank = Entry { hash: BlockHash(0), bucket: NONE };
        let buckets = vec![Bucket::EMPTY; blocks / BLOCKS_A_BUCKET + 1];
        Self { buckets: buckets.into(), entries: vec![blank; blocks].into(), linked: 0 }
    }

    /// Blocks that can be found.
    pub(crate) fn len(&self) -> usize {
        self.linked
    }

    /// The block that holds what `hash` names.
    #[inline]
    pub(crate) fn get(&self, hash: BlockHash) -> Option<BlockId> {
        let mut at = self.home(hash);
        loop {
            let bucket = &self.buckets[at];
            let found = bucket.candidates(tag(hash)).find(|block| self.entries[*block as usize].hash == hash);
            if found.is_some() || bucket.passed_on == 0 {
                return found.map(BlockId);
            }
            at = self.after(at);
        }
    }

    /// What `block` holds, if it can be found.
    #[inline]
    pub(crate) fn hash_of(&self, block: BlockId) -> Option<BlockHash> {
        let entry = &self.entries[block.0 as usize];
        (entry.bucket != NONE).then_some(entry.hash)
    }

    /// Makes `block`, which cannot be found, the one that holds what `hash` names, which no block does.
    #[inline]
    pub(crate) fn insert(&mut self, block: BlockId, hash: BlockHash) {
        debug_assert!(self.get(hash).is_none() && self.hash_of(block).is_none(), "one block, one hash");
        let mut at = self.home(hash);
        // There are more slots than blocks, so one is free.
        let slot = loop {
            match self.buckets[at].slot_of(NONE) {
                Some(slot) => break slot,
                None => self.buckets[at].passed_on += 1,
            }
            at = self.after(at);
        };
        let bucket = &mut self.buckets[at];
        (bucket.tags[slot], bucket.blocks[slot]) = (tag(hash), block.0);
        self.entries[block.0 as usize] = Entry { hash, bucket: number(at) };
        self.linked += 1;
    }

    /// Makes `block` one that cannot be found. Returns what it held.
    #[inline]
    pub(crate) fn remove(&mut self, block: BlockId) -> Option<BlockHash> {
        let hash = self.hash_of(block)?;
        let found = std::mem::replace(&mut self.entries[block.0 as usize].bucket, NONE) as usize;
        let mut at = self.home(hash);
        while at != found {
            self.buckets[at].passed_on -= 1;
            at = self.after(at);
        }
        let bucket = &mut self.buckets[found];
        let slot = bucket.slot_of(block.0).expect("an entry is where it was put");
        bucket.blocks[slot] = NONE;
        self.linked -= 1;
        Some(hash)
    }

    /// The bucket to look into first: the hash's upper half, as a share of all.
    fn home(&self, hash: BlockHash) -> usize {
        (((hash.0 >> 32) * self.buckets.len() as u64) >> 32) as usize
    }

    fn after(&self, bucket: usize) -> usize {
        if bucket + 1 == self.buckets.len() { 0 } else { bucket + 1 }
    }
}

/// The hash's lower half: the upper one says where it is.
fn tag(hash: BlockHash) -> u32 {
    hash.0 as u32
}

/// A bucket's number: there are fewer than blocks, whose ids are u32.
fn number(bucket: usize) -> u32 {
    bucket as u32
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The model: a map. Few places to begin at, so that buckets are full and pass on, and few tags.
        #[test]
        fn finds_what_a_map_finds(operations in prop::collection::vec((any::<bool>(), 0u32..40, 0u64..60), 0..300)) {
            let name = |number: u64| BlockHash(((number % 4) << 62) | ((number / 4 % 3) << 40) | (number / 12));
            let mut index = BlockIndex::new(40);
            let mut model: HashMap<u64, u32> = HashMap::new();
            for (insert, block, hash) in operations {
                if insert && index.hash_of(BlockId(block)).is_none() && !model.contains_key(&hash) {
                    index.insert(BlockId(block), name(hash));
                    model.insert(hash, block);
                } else if !insert {
                    let held = model.iter().find(|(_, held)| **held == block).map(|(hash, _)| *hash);
                    prop_assert_eq!(index.remove(BlockId(block)), held.map(name));
                    model.retain(|_, held| *held != block);
                }
                prop_assert_eq!(index.len(), model.len());
                for hash in 0..60 {
                    prop_assert_eq!(index.get(name(hash)), model.get(&hash).copied().map(BlockId));
                }
                let passed_on: u32 = index.buckets.iter().map(|bucket| bucket.passed_on).sum();
                prop_assert!(!model.is_empty() || passed_on == 0);
            }
        }
    }
}
