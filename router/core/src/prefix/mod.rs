//! The prefix radix tree: which worker holds which prefixes.
//!
//! [`blocks`] cuts a prompt into blocks and hashes them as a chain; [`tree`] remembers who holds each block. Neither
//! knows text, headers or URLs. The next on the path is the decider, which hands hits to the policy as values.

mod arena;
pub mod blocks;
pub mod tree;

pub use blocks::{PromptBlocks, PromptHasher};
pub use tree::{PrefixHits, PrefixTree};
