//! How much of this host's memory KV may take on its way.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;

/// Memory for KV that waits to be fetched, and for what has been fetched and waits for blocks.
#[derive(Debug)]
pub struct Room {
    limit_bytes: usize,
    used_bytes: AtomicUsize,
}

/// A part of it, given back when dropped.
#[derive(Debug)]
pub(crate) struct Place {
    room: Arc<Room>,
    bytes: usize,
}

impl Room {
    /// For so many bytes.
    #[must_use]
    pub fn new(limit_bytes: usize) -> Arc<Self> {
        Arc::new(Self { limit_bytes, used_bytes: AtomicUsize::new(0) })
    }

    /// Bytes that are taken.
    #[must_use]
    pub fn used_bytes(&self) -> usize {
        self.used_bytes.load(Ordering::Relaxed)
    }

    /// So many of them, if they are free.
    pub(crate) fn take(self: &Arc<Self>, bytes: usize) -> Option<Place> {
        let limit = self.limit_bytes;
        let more = |used: usize| used.checked_add(bytes).filter(|used| *used <= limit);
        self.used_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok()?;
        Some(Place { room: Arc::clone(self), bytes })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.room.used_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Bytes and the place they take, which is free once the last reference to them is gone.
struct Held {
    bytes: Vec<u8>,
    _place: Place,
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Place {
    /// Puts bytes there.
    pub(crate) fn hold(self, bytes: Vec<u8>) -> Bytes {
        Bytes::from_owner(Held { bytes, _place: self })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_given_back_with_the_last_reference_to_what_it_holds() {
        let room = Room::new(10);
        let held = room.take(6).unwrap().hold(vec![1; 6]);
        assert!(room.take(5).is_none() && room.take(usize::MAX).is_none());
        let part = held.slice(2..);
        drop(held);
        assert_eq!((room.used_bytes(), part.len()), (6, 4));
        drop(part);
        assert_eq!(room.used_bytes(), 0);
        assert!(room.take(10).is_some());
    }
}
