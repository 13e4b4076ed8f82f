//! The KV blocks: who holds each, what it holds, and which goes first when a new one is needed.
//!
//! A block is *held* while sequences refer to it. Released, it keeps its contents and waits in a queue, so that a later
//! prompt with the same prefix finds it; the head of the queue is what is taken next. A sequence releases its last
//! block first, so whoever waits longest is always a leaf.
//!
//! Invariant: the parent of a block that can be found can be found too. A full block whose contents are in the
//! pool already is therefore replaced by that one ([`BlockPool::enter`]), and never kept twice.

use std::collections::HashMap;

use roundhouse_types::BlockHash;

use crate::step::BlockId;

const NONE: u32 = u32::MAX;

/// One block's record.
#[derive(Clone, Copy, Debug)]
struct Record {
    references: u32,
    /// Set once the block is full and can be found.
    hash: Option<BlockHash>,
    /// Neighbours in the queue, while nobody holds it.
    before: u32,
    after: u32,
}

/// All blocks of a worker. Every operation on one block is O(1).
#[derive(Debug)]
pub struct BlockPool {
    records: Vec<Record>,
    by_hash: HashMap<BlockHash, BlockId>,
    /// Taken next.
    head: u32,
    /// Released last.
    tail: u32,
    waiting: usize,
}

impl BlockPool {
    /// A pool of `blocks` empty blocks.
    #[must_use]
    pub fn new(blocks: usize) -> Self {
        let blank = Record { references: 0, hash: None, before: NONE, after: NONE };
        let mut pool = Self {
            records: vec![blank; blocks],
            by_hash: HashMap::new(),
            head: NONE,
            tail: NONE,
            waiting: 0,
        };
        for index in 0..u32::try_from(blocks).unwrap_or(NONE) {
            pool.enqueue(index);
        }
        pool
    }

    /// All blocks.
    #[must_use]
    pub fn total_blocks(&self) -> usize {
        self.records.len()
    }

    /// Blocks that nobody holds: empty, or with contents that may be found again.
    #[must_use]
    pub fn free_blocks(&self) -> usize {
        self.waiting
    }

    /// Blocks whose contents can be found.
    #[must_use]
    pub fn cached_blocks(&self) -> usize {
        self.by_hash.len()
    }

    /// Takes a block to write to; what it held is forgotten. `None` when all are held.
    pub fn allocate(&mut self) -> Option<BlockId> {
        let index = self.head;
        if index == NONE {
            return None;
        }
        self.dequeue(index);
        let record = &mut self.records[index as usize];
        record.references = 1;
        if let Some(hash) = record.hash.take() {
            self.by_hash.remove(&hash);
        }
        Some(BlockId(index))
    }

    /// Finds and holds the longest run of blocks that begins `path`, at most `limit` of them.
    pub fn take_prefix(&mut self, path: &[BlockHash], limit: usize) -> Vec<BlockId> {
        let known = path.iter().take(limit).map_while(|hash| self.by_hash.get(hash).copied());
        let found: Vec<BlockId> = known.collect();
        for block in &found {
            self.hold(*block);
        }
        found
    }

    /// How many blocks of `path` could be found now, at most `limit`.
    #[must_use]
    pub fn match_prefix(&self, path: &[BlockHash], limit: usize) -> usize {
        path.iter().take(limit).take_while(|hash| self.by_hash.contains_key(hash)).count()
    }

    /// Of the first `count` blocks of `path`, all of which can be found, how many nobody holds.
    #[must_use]
    pub fn waiting_among(&self, path: &[BlockHash], count: usize) -> usize {
        let blocks = path.iter().take(count).filter_map(|hash| self.by_hash.get(hash));
        blocks.filter(|block| self.records[block.0 as usize].references == 0).count()
    }

    /// Says that `block`, which the caller holds, is full and holds what `hash` names. Returns the block to go on with: the
    /// same one, or the one that held these contents already, held in its place.
    pub fn enter(&mut self, block: BlockId, hash: BlockHash) -> BlockId {
        match self.by_hash.get(&hash).copied() {
            Some(known) if known == block => block,
            Some(known) => {
                self.hold(known);
                self.release(block);
                known
            }
            None => {
                self.records[block.0 as usize].hash = Some(hash);
                self.by_hash.insert(hash, block);
                block
            }
        }
    }

    /// Exchanges `block`, which the caller holds and has written nothing to, for the block that holds what `hash` names, if
    /// there is one.
    pub fn exchange(&mut self, block: BlockId, hash: BlockHash) -> Option<BlockId> {
        let known = self.by_hash.get(&hash).copied().filter(|known| *known != block)?;
        self.hold(known);
        self.release(block);
        Some(known)
    }

    /// Lets go of `blocks`, in order of position; the last one goes to the queue first.
    pub fn release_all(&mut self, blocks: &[BlockId]) {
        for block in blocks.iter().rev() {
            self.release(*block);
        }
    }

    /// Forgets the contents of all blocks that nobody holds. Returns how many there were.
    pub fn flush(&mut self) -> usize {
        let before = self.by_hash.len();
        let records = &mut self.records;
        self.by_hash.retain(|_, block| {
            let record = &mut records[block.0 as usize];
            if record.references == 0 {
                record.hash = None;
            }
            record.references > 0
        });
        before - self.by_hash.len()
    }

    fn hold(&mut self, block: BlockId) {
        if self.records[block.0 as usize].references == 0 {
            self.dequeue(block.0);
        }
        self.records[block.0 as usize].references += 1;
    }

    fn release(&mut self, block: BlockId) {
        let record = &mut self.records[block.0 as usize];
        debug_assert!(record.references > 0, "a block is released by whoever holds it");
        record.references -= 1;
        if record.references > 0 {
            return;
        }
        if record.hash.is_some() {
            self.enqueue(block.0);
        } else {
            // Nothing to be found in it: it goes first.
            self.enqueue_first(block.0);
        }
    }

    fn enqueue(&mut self, index: u32) {
        let tail = self.tail;
        (self.records[index as usize].before, self.records[index as usize].after) = (tail, NONE);
        self.link(tail, index);
        self.tail = index;
        self.waiting += 1;
    }

    fn enqueue_first(&mut self, index: u32) {
        let head = self.head;
        (self.records[index as usize].before, self.records[index as usize].after) = (NONE, head);
        if head == NONE {
            self.tail = index;
        } else {
            self.records[head as usize].before = index;
        }
        self.head = index;
        self.waiting += 1;
    }

    /// Makes `index` come after `before`, or first.
    fn link(&mut self, before: u32, index: u32) {
        if before == NONE {
            self.head = index;
        } else {
            self.records[before as usize].after = index;
        }
    }

    fn dequeue(&mut self, index: u32) {
        let Record { before, after, .. } = self.records[index as usize];
        self.link(before, after);
        if after == NONE {
            self.tail = before;
        } else {
            self.records[after as usize].before = before;
        }
        self.waiting -= 1;
    }

    /// Panics if the records contradict each other. For tests.
    ///
    /// # Panics
    /// When an invariant is broken.
    pub fn check_invariants(&self) {
        let (mut index, mut before, mut count) = (self.head, NONE, 0);
        while index != NONE {
            let record = &self.records[index as usize];
            assert_eq!((record.references, record.before), (0, before));
            (before, index, count) = (index, record.after, count + 1);
        }
        assert_eq!((self.tail, self.waiting), (before, count));
        let held = self.records.iter().filter(|record| record.references > 0).count();
        assert_eq!(held + self.waiting, self.records.len());
        let named = self.records.iter().filter(|record| record.hash.is_some()).count();
        assert_eq!(named, self.by_hash.len());
        for (hash, block) in &self.by_hash {
            assert_eq!(self.records[block.0 as usize].hash, Some(*hash));
        }
    }

    /// How many sequences hold `block`.
    #[must_use]
    pub fn references(&self, block: BlockId) -> u32 {
        self.records[block.0 as usize].references
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn hashes(names: &[u64]) -> Vec<BlockHash> {
        names.iter().map(|name| BlockHash(*name)).collect()
    }

    /// Holds, fills and enters a path of blocks.
    fn run(pool: &mut BlockPool, path: &[BlockHash]) -> Vec<BlockId> {
        let mut table = pool.take_prefix(path, path.len());
        for hash in &path[table.len()..] {
            let block = pool.allocate().unwrap();
            table.push(pool.enter(block, *hash));
        }
        table
    }

    #[test]
    fn evicts_leaf_before_parent_and_the_longest_unused_first() {
        let mut pool = BlockPool::new(4);
        let old = run(&mut pool, &hashes(&[1, 2]));
        let new = run(&mut pool, &hashes(&[3, 4]));
        pool.release_all(&old);
        pool.release_all(&new);
        for gone in [2, 1, 4, 3] {
            assert_eq!(pool.match_prefix(&hashes(&[gone]), 1), 1);
            pool.allocate().unwrap();
            assert_eq!(pool.match_prefix(&hashes(&[gone]), 1), 0);
        }
        assert_eq!(pool.allocate(), None);
    }

    #[test]
    fn equal_contents_are_kept_once() {
        let mut pool = BlockPool::new(4);
        let (one, two) = (pool.allocate().unwrap(), pool.allocate().unwrap());
        assert_eq!(pool.enter(one, BlockHash(7)), one);
        assert_eq!(pool.enter(two, BlockHash(7)), one);
        assert_eq!((pool.references(one), pool.free_blocks()), (2, 3));
        pool.check_invariants();
    }

    #[test]
    fn blocks_without_contents_are_taken_before_cached_ones() {
        let mut pool = BlockPool::new(2);
        let cached = run(&mut pool, &hashes(&[1]));
        let partial = pool.allocate().unwrap();
        pool.release_all(&cached);
        pool.release_all(&[partial]);
        assert_eq!(pool.allocate(), Some(partial));
        assert_eq!(pool.cached_blocks(), 1);
    }

    #[test]
    fn flushing_forgets_what_nobody_holds() {
        let mut pool = BlockPool::new(4);
        let held = run(&mut pool, &hashes(&[1]));
        let released = run(&mut pool, &hashes(&[2, 3]));
        pool.release_all(&released);
        assert_eq!(pool.flush(), 2);
        assert_eq!(pool.match_prefix(&hashes(&[1]), 1), 1);
        assert_eq!(pool.match_prefix(&hashes(&[2]), 1), 0);
        pool.release_all(&held);
        pool.check_invariants();
    }

    /// A path of at most five blocks over a small alphabet; its hashes name the whole path.
    fn path(steps: &[u8]) -> Vec<BlockHash> {
        steps
            .iter()
            .scan(7u64, |state, step| {
                *state = *state * 31 + u64::from(*step) + 1;
                Some(BlockHash(*state))
            })
            .collect()
    }

    proptest! {
        #[test]
        fn never_loses_or_doubles_a_block(
            operations in prop::collection::vec((any::<bool>(), prop::collection::vec(0u8..3, 1..5), any::<prop::sample::Index>()), 0..80),
            blocks in 5usize..12,
        ) {
            let mut pool = BlockPool::new(blocks);
            let mut tables: Vec<(Vec<BlockHash>, Vec<BlockId>)> = Vec::new();
            for (begin, steps, which) in operations {
                let path = path(&steps);
                let needed = path.len() - pool.match_prefix(&path, path.len());
                let spare = pool.free_blocks() - pool.waiting_among(&path, path.len() - needed);
                if begin && needed <= spare {
                    let found = pool.match_prefix(&path, path.len());
                    let table = run(&mut pool, &path);
                    prop_assert_eq!(table.len(), path.len());
                    prop_assert!(found <= path.len());
                    tables.push((path, table));
                } else if !tables.is_empty() {
                    let (_, table) = tables.swap_remove(which.index(tables.len()));
                    pool.release_all(&table);
                }
                pool.check_invariants();
                // The model: every table's path is found whole, in that table's own blocks.
                for (path, table) in &tables {
                    prop_assert_eq!(pool.match_prefix(path, path.len()), path.len());
                    prop_assert!(table.iter().zip(path).all(|(block, hash)| pool.by_hash[hash] == *block));
                }
                let held: std::collections::HashSet<_> = tables.iter().flat_map(|(_, table)| table).collect();
                prop_assert_eq!(held.len() + pool.free_blocks(), blocks);
            }
        }
    }
}
