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
    /// A router sends the worker a request.
    Routed(RoutedPrompt),
    /// That request is over.
    Ended(EndedRequest),
}

/// A prompt as the router knows it that sent it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RoutedPrompt {
    /// The request's id, as it is sent.
    pub request_id: Arc<str>,
    /// The router's number.
    pub router: u64,
    /// Equal where hashes mean the same.
    pub seed_digest: u64,
    /// Hashes of its blocks of bytes, each chained to the one before.
    pub hashes: Vec<BlockHash>,
    /// How many of these are of the tools, which come first.
    pub tools_blocks: usize,
    /// Length of the tools.
    pub tools_bytes: usize,
    /// How many are of the instructions, which come next.
    pub system_blocks: usize,
    /// Length of the instructions.
    pub system_bytes: usize,
    /// Length of all of it.
    pub prompt_bytes: usize,
    /// The same in tokens, as far as is known.
    pub prompt_tokens: usize,
}

/// The end of a request, as the router knows it that sent it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EndedRequest {
    /// Its id.
    pub request_id: Arc<str>,
    /// The router's number.
    pub router: u64,
    /// Length of the prompt, as the reply said; 0 if it did not.
    pub prompt_tokens: usize,
    /// What of it was cached, if that is known.
    pub cached_tokens: Option<usize>,
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
