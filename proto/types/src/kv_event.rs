//! What happens to a worker's prefix cache, as it is told to others.

use std::sync::Arc;

use crate::{BlockHash, TokenId};

/// A change of what can be found in a worker's cache.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum KvEvent {
    /// Blocks of one sequence that can be found from now on, one behind another.
    Stored(StoredBlocks),
    /// Blocks that cannot be found any more, children before their parents.
    Removed {
        /// Which.
        hashes: Vec<BlockHash>,
    },
    /// Nothing can be found any more.
    Cleared,
}

/// A run of consecutive blocks. Holds `block_tokens` tokens for each hash.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StoredBlocks {
    /// Their hashes, each chained to the one before, at least one.
    pub hashes: Vec<BlockHash>,
    /// The block before the first of them; `None` when that one begins a sequence.
    pub parent: Option<BlockHash>,
    /// What is in them.
    pub tokens: Vec<TokenId>,
    /// Positions of a block.
    pub block_tokens: usize,
    /// Id of the request whose step filled them, if it had one.
    pub request_id: Option<Arc<str>>,
    /// Position of the first token in that request's sequence.
    pub first_position: usize,
}

/// What happened in one step of a worker's engine.
#[derive(Clone, PartialEq, Debug)]
pub struct KvEventBatch {
    /// Counts the batches of a process, from 0.
    pub sequence: u64,
    /// Seconds since 1970.
    pub timestamp: f64,
    /// In the order in which they happened.
    pub events: Vec<KvEvent>,
}
