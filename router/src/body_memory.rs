//! Bounds what all request bodies hold together. Each is bounded by itself as well, but thousands of them at once would be many times
//! the memory of a machine.
//!
//! Used by the parser, piece by piece; a body's share is free again when its request has been answered, or given up.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::body_chunks::BodyChunks;

/// There is no room for another piece.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "the bodies of all requests in flight have reached their limit of {limit_bytes} bytes together (--max-body-memory)"
)]
pub struct BodyMemoryFull {
    /// The limit.
    pub limit_bytes: usize,
}

/// What all bodies hold.
#[derive(Debug)]
pub struct BodyMemory {
    held_bytes: AtomicUsize,
    limit_bytes: usize,
    chunks: Arc<BodyChunks>,
}

/// What one body holds; given back when dropped.
#[derive(Debug)]
pub struct BodyShare {
    memory: Arc<BodyMemory>,
    bytes: usize,
}

impl BodyMemory {
    /// Room for `limit_bytes`.
    #[must_use]
    pub fn new(limit_bytes: usize) -> Arc<Self> {
        Arc::new(Self { held_bytes: AtomicUsize::new(0), limit_bytes, chunks: Arc::default() })
    }

    /// What is held now.
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        self.held_bytes.load(Ordering::Relaxed)
    }

    /// A body begins.
    #[must_use]
    pub fn share(self: &Arc<Self>) -> BodyShare {
        BodyShare { memory: Arc::clone(self), bytes: 0 }
    }
}

impl BodyShare {
    /// The body has grown by a piece.
    ///
    /// # Errors
    /// When that is more than there is room for; nothing has been taken then.
    pub fn grow(&mut self, bytes: usize) -> Result<(), BodyMemoryFull> {
        let BodyMemory { held_bytes, limit_bytes, .. } = &*self.memory;
        let before = held_bytes.fetch_add(bytes, Ordering::Relaxed);
        if before.saturating_add(bytes) > *limit_bytes {
            held_bytes.fetch_sub(bytes, Ordering::Relaxed);
            return Err(BodyMemoryFull { limit_bytes: *limit_bytes });
        }
        self.bytes += bytes;
        Ok(())
    }

    /// Where the body is kept, once it is long.
    #[must_use]
    pub fn chunks(&self) -> &Arc<BodyChunks> {
        &self.memory.chunks
    }

    /// The body has been thrown away.
    pub fn give_back(&mut self) {
        self.memory.held_bytes.fetch_sub(std::mem::take(&mut self.bytes), Ordering::Relaxed);
    }
}

impl Drop for BodyShare {
    fn drop(&mut self) {
        self.give_back();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_share_what_there_is_and_give_it_back() {
        let memory = BodyMemory::new(100);
        let (mut one, mut other) = (memory.share(), memory.share());
        one.grow(60).unwrap();
        assert_eq!(other.grow(41), Err(BodyMemoryFull { limit_bytes: 100 }));
        other.grow(40).unwrap();
        assert_eq!(memory.held_bytes(), 100);
        one.give_back();
        other.grow(60).unwrap();
        drop((one, other));
        assert_eq!(memory.held_bytes(), 0);
    }
}
