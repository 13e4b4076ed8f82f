//! Memory of long bodies, apart from the allocator's.
//!
//! An allocator gives what a body of 50 MB held back to the system in one go, on the thread that happens to free something next: a hundred calls
//! of a turn, some milliseconds. Chunks are mapped one by one, used again, and given back by a thread that serves nobody. Used by
//! [`PayloadBuilder`](crate::payload::PayloadBuilder).

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use memmap2::{MmapMut, MmapOptions};

use crate::turns::LONG_BODY_TURN_BYTES;

/// Size of a chunk.
pub const CHUNK_BYTES: usize = LONG_BODY_TURN_BYTES;
/// Unused chunks that are kept for good.
const KEPT: usize = 128;
/// How long others are kept: bodies that follow each other use the same.
const KEPT_FOR: Duration = Duration::from_secs(1);

/// Chunks that are not in use.
#[derive(Debug, Default)]
pub struct BodyChunks {
    unused: Mutex<Unused>,
}

#[derive(Debug, Default)]
struct Unused {
    chunks: Vec<MmapMut>,
    /// A thread gives them back, or is about to.
    shrinks: bool,
}

impl BodyChunks {
    /// An empty chunk, to be filled.
    ///
    /// # Errors
    /// When the system has no memory left.
    pub fn take(self: &Arc<Self>) -> io::Result<Chunk> {
        let unused = self.lock().chunks.pop();
        let memory = match unused {
            Some(memory) => memory,
            None => MmapOptions::new().len(CHUNK_BYTES).populate().map_anon()?,
        };
        Ok(Chunk { memory: Some(memory), len: 0, home: Arc::clone(self) })
    }

    fn put_back(self: &Arc<Self>, memory: MmapMut) {
        let mut unused = self.lock();
        unused.chunks.push(memory);
        if unused.chunks.len() <= KEPT || unused.shrinks {
            return;
        }
        unused.shrinks = true;
        drop(unused);
        let of = Arc::downgrade(self);
        let shrink = move || {
            std::thread::sleep(KEPT_FOR);
            while of.upgrade().is_some_and(|chunks| chunks.shrink_by_one()) {}
        };
        if std::thread::Builder::new().name("body-chunks".to_owned()).spawn(shrink).is_err() {
            // The next body that ends tries again.
            self.lock().shrinks = false;
        }
    }

    /// Gives one back to the system; `false` once there are few.
    fn shrink_by_one(&self) -> bool {
        let mut unused = self.lock();
        unused.shrinks = unused.chunks.len() > KEPT;
        let one = if unused.shrinks { unused.chunks.pop() } else { None };
        drop(unused);
        one.is_some()
    }

    fn lock(&self) -> MutexGuard<'_, Unused> {
        // Nothing that holds it can panic half-way through a change.
        self.unused.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Part of a body.
#[derive(Debug)]
pub struct Chunk {
    /// There until it is dropped.
    memory: Option<MmapMut>,
    len: usize,
    home: Arc<BodyChunks>,
}

impl Chunk {
    /// Copies what there is room for from the beginning of `bytes`, and returns how much that is.
    pub fn fill(&mut self, bytes: &[u8]) -> usize {
        let Some(memory) = &mut self.memory else { return 0 };
        let count = bytes.len().min(memory.len() - self.len);
        memory[self.len..self.len + count].copy_from_slice(&bytes[..count]);
        self.len += count;
        count
    }

    /// Whether there is no room left.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.len == CHUNK_BYTES
    }

    /// What was copied.
    #[must_use]
    pub fn freeze(self) -> Bytes {
        Bytes::from_owner(self)
    }
}

impl AsRef<[u8]> for Chunk {
    fn as_ref(&self) -> &[u8] {
        self.memory.as_ref().map_or(&[], |memory| &memory[..self.len])
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            self.home.put_back(memory);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(chunks: &Arc<BodyChunks>, count: usize) -> Vec<Bytes> {
        let fill = |number: usize| {
            let mut chunk = chunks.take().unwrap();
            assert_eq!(chunk.fill(&[number as u8; CHUNK_BYTES - 1]), CHUNK_BYTES - 1);
            assert_eq!((chunk.fill(b"xy"), chunk.fill(b"y")), (1, 0));
            chunk.freeze()
        };
        (0..count).map(fill).collect()
    }

    fn unused(chunks: &BodyChunks) -> usize {
        chunks.lock().chunks.len()
    }

    #[test]
    fn chunks_are_used_again_and_hold_only_what_was_put_into_them() {
        let chunks = Arc::new(BodyChunks::default());
        let first = filled(&chunks, 3);
        assert!(first[2][..CHUNK_BYTES - 1].iter().all(|byte| *byte == 2) && first[2].ends_with(b"x"));
        let part = first[1].slice(10..20);
        drop(first);
        assert_eq!((unused(&chunks), &part[..]), (2, &[1; 10][..]), "part of one is still in use");
        let mut again = chunks.take().unwrap();
        assert_eq!((unused(&chunks), again.as_ref().len()), (1, 0));
        again.fill(b"new");
        assert_eq!(&again.freeze()[..], b"new");
        drop(part);
        assert_eq!(unused(&chunks), 3);
    }

    #[test]
    fn all_but_a_few_go_back_to_the_system() {
        let chunks = Arc::new(BodyChunks::default());
        drop(filled(&chunks, KEPT + 20));
        assert_eq!(unused(&chunks), KEPT + 20, "not at once");
        let patience = std::time::Instant::now() + Duration::from_secs(60);
        while unused(&chunks) > KEPT {
            assert!(std::time::Instant::now() < patience, "nobody gives them back");
            std::thread::sleep(Duration::from_millis(10));
        }
        drop(filled(&chunks, KEPT + 1));
        assert!(chunks.lock().shrinks, "and the next time as well");
    }
}
