//! The prefix radix tree: which worker holds which prefixes.
//!
//! [`blocks`] cuts a prompt into blocks and hashes them as a chain; [`tree`] remembers who holds each block; [`index`] is the
//! tree with what is in flight and what workers say of it; [`recomputed`] sees what is computed again and again, [`follow_ups`] how long
//! sessions are; [`feed`] turns a worker's own cache events into what the tree knows. None of them knows text, headers or URLs. The next on the path is the decider, which hands hits to the policy as
//! values.

mod arena;
pub mod blocks;
pub mod feed;
pub mod follow_ups;
pub mod index;
pub mod popularity;
pub mod recomputed;
pub mod tree;

pub use blocks::{Cut, Path, PromptBlocks, PromptHasher};
pub use index::PrefixIndex;
pub use tree::{PrefixHits, PrefixTree};
