//! What happened to the prefix cache, as values: who wants to know what this worker holds follows these.
//!
//! [`Scheduler::take_events`](crate::Scheduler::take_events) hands them out in order, once
//! [`Scheduler::record_events`](crate::Scheduler::record_events) has been called; before that nothing is recorded. Knows no wire format and no
//! sequence numbers: those belong to whoever publishes.

use std::ops::Range;

use roundhouse_types::{BlockHash, TokenId};

use crate::step::SequenceId;

/// A change of what can be found in the cache.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum KvEvent {
    /// Blocks of one sequence that can be found from now on, one behind another.
    Stored(StoredBlocks),
    /// Blocks that cannot be found any more, in the order in which they went: a child before its parent.
    Removed {
        /// Which.
        hashes: Vec<BlockHash>,
    },
    /// Nothing can be found any more.
    Cleared,
}

/// A run of consecutive blocks of one sequence.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StoredBlocks {
    /// Their hashes, each chained to the one before.
    pub hashes: Vec<BlockHash>,
    /// The block before the first of them; `None` when that one begins the sequence.
    pub parent: Option<BlockHash>,
    /// What is in them, `block_tokens` each.
    pub tokens: Vec<TokenId>,
    /// Positions of a block.
    pub block_tokens: usize,
    /// Whose step filled them. Later holders are not reported.
    pub sequence: SequenceId,
    /// Positions in that sequence, half open.
    pub positions: Range<usize>,
}
