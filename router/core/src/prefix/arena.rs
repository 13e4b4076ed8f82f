//! Entries by number, in chunks: they never move, growing costs no copy, and at most a chunk is empty at the end.

use std::ops::{Index, IndexMut};

/// Entries a chunk; a power of two, so that an index is a shift and a mask.
const CHUNK: usize = 1 << CHUNK_BITS;
const CHUNK_BITS: u32 = 12;

/// Values under numbers that are given out again once free.
pub(super) struct Arena<T> {
    chunks: Vec<Vec<T>>,
    free: Vec<u32>,
}

impl<T> Default for Arena<T> {
    fn default() -> Self {
        Self { chunks: Vec::new(), free: Vec::new() }
    }
}

impl<T> Arena<T> {
    /// Keeps `new` and says under which number.
    pub(super) fn place(&mut self, new: T) -> u32 {
        if let Some(at) = self.free.pop() {
            self[at] = new;
            return at;
        }
        if self.chunks.last().is_none_or(|chunk| chunk.len() == CHUNK) {
            self.chunks.push(Vec::with_capacity(CHUNK));
        }
        let last = self.chunks.len() - 1;
        let chunk = &mut self.chunks[last];
        chunk.push(new);
        let at = (last << CHUNK_BITS) + chunk.len() - 1;
        // 4 billion entries would be hundreds of gigabytes: the tree's limits end it long before.
        u32::try_from(at).expect("the limits keep the tree far below 2^32 entries")
    }

    /// Gives `at` out again later. What is there stays until then.
    pub(super) fn free(&mut self, at: u32) {
        self.free.push(at);
    }

    /// Everything that is not free, with its number.
    #[cfg(test)]
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        let numbered = (0u32..).zip(self.chunks.iter().flatten());
        numbered.filter(|(at, _)| !self.free.contains(at))
    }
}

impl<T> Index<u32> for Arena<T> {
    type Output = T;

    fn index(&self, at: u32) -> &T {
        &self.chunks[(at >> CHUNK_BITS) as usize][at as usize & (CHUNK - 1)]
    }
}

impl<T> IndexMut<u32> for Arena<T> {
    fn index_mut(&mut self, at: u32) -> &mut T {
        &mut self.chunks[(at >> CHUNK_BITS) as usize][at as usize & (CHUNK - 1)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_hold_their_values_over_many_chunks_and_are_used_again() {
        let mut arena = Arena::default();
        let numbers: Vec<u32> = (0..3 * CHUNK + 5).map(|value| arena.place(value)).collect();
        assert!(numbers.iter().enumerate().all(|(value, at)| arena[*at] == value));
        arena.free(numbers[CHUNK]);
        assert_eq!(arena.iter().count(), numbers.len() - 1);
        assert_eq!(arena.place(7), numbers[CHUNK]);
        assert_eq!(arena[numbers[CHUNK]], 7);
    }
}
