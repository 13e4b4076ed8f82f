//! What router, worker and bench agree on: ids, chained block hashes, finish reasons and token usage.
//!
//! Depends on none of our crates and on nothing that does I/O. Next on the path: `router-core` keys its prefix
//! tree with [`BlockHash`], `worker-core` its prefix cache.

pub mod block_hash;
pub mod generation;

pub use block_hash::{BlockHash, ChainHasher};
pub use generation::{FinishReason, TokenId, Usage};
