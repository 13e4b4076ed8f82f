//! The KV blocks: who holds each, what it holds, and which goes first when a new one is needed.
//!
//! A block is *held* while sequences refer to it. Released, it keeps its contents and waits in a queue, so that a later
//! prompt with the same prefix finds it; the head of the queue is what is taken next. A sequence releases its last
//! block first, so whoever waits longest is always a leaf.
//!
//! Invariant: the parent of a block that can be found can be found too. A full block whose contents are in the
//! pool already is therefore replaced by that one ([`BlockPool::enter`]), and never kept twice.

use roundhouse_types::BlockHash;

use crate::block_index::BlockIndex;
use crate::step::BlockId;

const NONE: u32 = u32::MAX;

/// One block's record.
#[derive(Clone, Copy, Debug)]
struct Record {
    references: u32,
    /// Neighbours in the queue, while nobody holds it.
    before: u32,
    after: u32,
}

/// What of a prompt is in the pool.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Found {
    /// The blocks it begins with, in order.
    pub blocks: Vec<BlockId>,
    /// How many of them nobody holds: whoever takes them leaves so many fewer free.
    pub unheld: usize,
}

/// All blocks of a worker. Every operation on one block is O(1).
#[derive(Clone, Debug)]
pub struct BlockPool {
    records: Vec<Record>,
    /// What full blocks hold.
    index: BlockIndex,
    /// Taken next.
    head: u32,
    /// Released last.
    tail: u32,
    waiting: usize,
    /// What has been forgotten and nobody has asked about yet; `None` while nobody wants to know.
    forgotten: Option<Vec<BlockHash>>,
}

impl BlockPool {
    /// A pool of `blocks` empty blocks.
    #[must_use]
    pub fn new(blocks: usize) -> Self {
        let blank = Record { references: 0, before: NONE, after: NONE };
        let mut pool = Self {
            records: vec![blank; blocks],
            index: BlockIndex::new(blocks),
            head: NONE,
            tail: NONE,
            waiting: 0,
            forgotten: None,
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
        self.index.len()
    }

    /// Takes a block to write to; what it held is forgotten. `None` when all are held.
    pub fn allocate(&mut self) -> Option<BlockId> {
        let index = self.head;
        if index == NONE {
            return None;
        }
        self.dequeue(index);
        self.records[index as usize].references = 1;
        self.forget(BlockId(index));
        Some(BlockId(index))
    }

    /// Finds the longest run of blocks that begins `path`, at most `limit` of them. Holds none.
    #[must_use]
    pub fn find(&self, path: &[BlockHash], limit: usize) -> Found {
        let known = path.iter().take(limit).map_while(|hash| self.index.get(*hash));
        let blocks: Vec<BlockId> = known.collect();
        let unheld = blocks.iter().filter(|block| self.references(**block) == 0).count();
        Found { blocks, unheld }
    }

    /// Holds `blocks`, as [`find`](Self::find) gave them and with nothing done to the pool since.
    pub fn hold_all(&mut self, blocks: &[BlockId]) {
        for block in blocks {
            self.hold(*block);
        }
    }

    /// Whether a block with these contents can be found.
    #[must_use]
    pub fn knows(&self, hash: BlockHash) -> bool {
        self.index.get(hash).is_some()
    }

    /// From now on keeps what it forgets for [`take_forgotten`](Self::take_forgotten).
    pub fn record_forgotten(&mut self) {
        self.forgotten.get_or_insert_default();
    }

    /// What has been forgotten since the last call, in order; nothing unless it is recorded.
    pub fn take_forgotten(&mut self) -> Vec<BlockHash> {
        self.forgotten.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// How many blocks of `path` could be found now, at most `limit`.
    #[must_use]
    pub fn match_prefix(&self, path: &[BlockHash], limit: usize) -> usize {
        path.iter().take(limit).take_while(|hash| self.knows(**hash)).count()
    }

    /// Says that `block`, which the caller holds, is full and holds what `hash` names. Returns the block to go on with: the
    /// same one, or the one that held these contents already, held in its place.
    pub fn enter(&mut self, block: BlockId, hash: BlockHash) -> BlockId {
        match self.index.get(hash) {
            Some(known) if known == block => block,
            Some(known) => {
                self.hold(known);
                self.release(block);
                known
            }
            None => {
                self.index.insert(block, hash);
                block
            }
        }
    }

    /// Exchanges `block`, which the caller holds and has written nothing to, for the block that holds what `hash` names, if
    /// there is one.
    pub fn exchange(&mut self, block: BlockId, hash: BlockHash) -> Option<BlockId> {
        let known = self.index.get(hash).filter(|known| *known != block)?;
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

    /// Forgets the contents of all blocks that nobody holds, children before their parents. Returns how many there were.
    pub fn flush(&mut self) -> usize {
        let before = self.index.len();
        let mut index = self.head;
        while index != NONE {
            self.forget(BlockId(index));
            index = self.records[index as usize].after;
        }
        before - self.index.len()
    }

    fn forget(&mut self, block: BlockId) {
        if let (Some(hash), Some(forgotten)) = (self.index.remove(block), &mut self.forgotten) {
            forgotten.push(hash);
        }
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
        if self.index.hash_of(block).is_some() {
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
        let blocks = || (0..).take(self.records.len()).map(BlockId);
        let named: Vec<_> = blocks().filter_map(|block| Some((block, self.index.hash_of(block)?))).collect();
        assert_eq!(named.len(), self.index.len());
        assert!(
            named.iter().all(|(block, hash)| self.index.get(*hash) == Some(*block)),
            "a hash has one block"
        );
    }

    /// How many sequences hold `block`.
    #[must_use]
    pub fn references(&self, block: BlockId) -> u32 {
        self.records[block.0 as usize].references
    }
}

#[cfg(test)]
mod tests;
