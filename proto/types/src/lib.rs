//! What router, worker and bench agree on: chained block hashes, cache events, load, finish reasons and token usage.
//!
//! Depends on none of our crates and on nothing that does I/O. Next on the path: `router-core` keys its prefix
//! tree with [`BlockHash`], `worker-core` its prefix cache.

pub mod block_hash;
pub mod generation;
pub mod kv_event;
pub mod load;

pub use block_hash::{BlockHash, ChainHasher};
pub use generation::{FinishReason, TokenId, Usage};
pub use kv_event::{EndedRequest, KvEvent, KvEventBatch, RoutedPrompt, StoredBlocks};
pub use load::{RouterPlace, WorkerLoad};
