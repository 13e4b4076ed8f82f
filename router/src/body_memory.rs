//! Bounds what all request bodies hold together. Each is bounded by itself as well, but thousands of them at once would be many times
//! the memory of a machine. A part is kept for short ones: a few long uploads that do not come to their end would else turn away
//! everybody.
//!
//! Used by the parser, piece by piece; a body's share is free again when its request has been answered, which of a stream may be its end, or given up.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::body_chunks::BodyChunks;

/// A body that is no longer may use what is kept for short ones: nearly all prompts.
const SHORT_BYTES: usize = 1 << 20;
/// So much of all is kept for them, as a divisor: some hundred of them by default, and no less than seven eighths for long ones.
const KEPT_DIVISOR: usize = 8;

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
    /// The same for a body that is not short.
    long_limit_bytes: usize,
    chunks: Arc<BodyChunks>,
}

/// What one body holds; given back when dropped.
#[derive(Debug)]
pub struct BodyShare {
    memory: Arc<BodyMemory>,
    bytes: usize,
    /// As much as the body said it would be.
    announced_bytes: usize,
}

impl BodyMemory {
    /// Room for `limit_bytes`, of which a part is kept for short bodies. One of `largest_bytes` has room if it is alone.
    #[must_use]
    pub fn new(limit_bytes: usize, largest_bytes: usize) -> Arc<Self> {
        let long_limit_bytes = (limit_bytes - limit_bytes / KEPT_DIVISOR).max(largest_bytes.min(limit_bytes));
        Arc::new(Self {
            held_bytes: AtomicUsize::new(0),
            limit_bytes,
            long_limit_bytes,
            chunks: Arc::default(),
        })
    }

    /// What is held now.
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        self.held_bytes.load(Ordering::Relaxed)
    }

    /// A body begins, of `announced_bytes` at least.
    #[must_use]
    pub fn share(self: &Arc<Self>, announced_bytes: u64) -> BodyShare {
        let announced_bytes = usize::try_from(announced_bytes).unwrap_or(usize::MAX);
        BodyShare { memory: Arc::clone(self), bytes: 0, announced_bytes }
    }
}

impl BodyShare {
    /// The body has grown by a piece.
    ///
    /// # Errors
    /// When that is more than there is room for; nothing has been taken then.
    pub fn grow(&mut self, bytes: usize) -> Result<(), BodyMemoryFull> {
        let BodyMemory { held_bytes, limit_bytes, long_limit_bytes, .. } = &*self.memory;
        let is_short = self.announced_bytes.max(self.bytes + bytes) <= SHORT_BYTES;
        let limit_bytes = if is_short { *limit_bytes } else { *long_limit_bytes };
        let before = held_bytes.fetch_add(bytes, Ordering::Relaxed);
        if before.saturating_add(bytes) > limit_bytes {
            held_bytes.fetch_sub(bytes, Ordering::Relaxed);
            return Err(BodyMemoryFull { limit_bytes });
        }
        self.bytes += bytes;
        Ok(())
    }

    /// Where the body is kept, once it is long.
    #[must_use]
    pub fn chunks(&self) -> &Arc<BodyChunks> {
        &self.memory.chunks
    }

    /// Whether it may be kept for longer than it is needed: half of the room stays for those that come.
    #[must_use]
    pub fn may_stay(&self) -> bool {
        self.memory.held_bytes() <= self.memory.limit_bytes / 2
    }

    /// Whether it may be kept while nobody waits for its answer: as long as a quarter of the room is taken, so that those that wait by the thousand do
    /// not fill the half up to which others [may stay](Self::may_stay).
    #[must_use]
    pub fn may_wait(&self) -> bool {
        self.memory.held_bytes() <= self.memory.limit_bytes / 4
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
        let memory = BodyMemory::new(100, 100);
        let (mut one, mut other) = (memory.share(0), memory.share(0));
        one.grow(60).unwrap();
        assert_eq!(other.grow(41), Err(BodyMemoryFull { limit_bytes: 100 }));
        assert!(!one.may_stay());
        other.grow(40).unwrap();
        assert_eq!(memory.held_bytes(), 100);
        one.give_back();
        assert!(one.may_stay());
        other.grow(60).unwrap();
        drop((one, other));
        assert_eq!(memory.held_bytes(), 0);
    }

    #[test]
    fn long_bodies_leave_room_for_short_ones() {
        let memory = BodyMemory::new(8 << 20, 4 << 20);
        let mut long = [memory.share(0), memory.share(4 << 20)];
        let full = Err(BodyMemoryFull { limit_bytes: 7 << 20 });
        for piece in 0..8 {
            let outcome = long[piece % 2].grow(1 << 20);
            assert_eq!(outcome, if piece < 7 { Ok(()) } else { full });
        }
        let mut third = memory.share(2 << 20);
        assert_eq!(third.grow(1), full, "it will be long");
        let mut short = memory.share(0);
        short.grow(1 << 20).unwrap();
        assert_eq!(short.grow(1), full, "it is not short any more");
        let alone = BodyMemory::new(8 << 20, 8 << 20).share(8 << 20).grow(8 << 20);
        assert_eq!(alone, Ok(()));
    }
}
