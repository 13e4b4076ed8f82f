//! Chained block hashes: the hash of a block covers everything before it.

use xxhash_rust::xxh3::xxh3_64_with_seed;

/// The hash of a block **and** of the whole path that leads to it, so that equal hashes mean equal prefixes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, serde::Serialize, serde::Deserialize)]
pub struct BlockHash(pub u64);

/// Hashed at a time: from 241 bytes on, XXH3 makes a secret of each new seed, which takes longer than the hashing.
const PART_BYTES: usize = 128;

/// Hashes one block after another, each hash seeded with the one before.
///
/// The root is a seed that separates key spaces: processes draw it at random, so that nobody outside can aim for
/// collisions, and model, LoRA and cache salt are mixed in with [`ChainHasher::salted`].
#[derive(Clone, Copy, Debug)]
pub struct ChainHasher {
    state: u64,
}

impl ChainHasher {
    /// Starts a chain at `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// The chain that begins here and is kept apart by `salt` (a model name, a LoRA id, a cache salt).
    #[must_use]
    pub fn salted(self, salt: &[u8]) -> Self {
        // The length goes in first, so that ("ab", "c") and ("a", "bc") differ.
        let state = xxh3_64_with_seed(&(salt.len() as u64).to_le_bytes(), self.state);
        Self { state: xxh3_64_with_seed(salt, state) }
    }

    /// Adds a block of bytes and returns the hash of the path up to and including it.
    pub fn push_bytes(&mut self, block: &[u8]) -> BlockHash {
        for part in block.chunks(PART_BYTES) {
            self.state = xxh3_64_with_seed(part, self.state);
        }
        BlockHash(self.state)
    }

    /// Adds a block of token ids and returns the hash of the path up to and including it.
    pub fn push_tokens(&mut self, block: &[u32]) -> BlockHash {
        let mut bytes = [0u8; PART_BYTES];
        for part in block.chunks(bytes.len() / 4) {
            for (to, token) in bytes.chunks_exact_mut(4).zip(part) {
                to.copy_from_slice(&token.to_le_bytes());
            }
            self.state = xxh3_64_with_seed(&bytes[..part.len() * 4], self.state);
        }
        BlockHash(self.state)
    }

    /// The hash of everything pushed so far.
    #[must_use]
    pub fn current(&self) -> BlockHash {
        BlockHash(self.state)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_blocks_under_different_parents_differ() {
        let mut left = ChainHasher::new(7);
        let mut right = ChainHasher::new(7);
        left.push_bytes(b"first");
        right.push_bytes(b"other");
        assert_ne!(left.push_bytes(b"same"), right.push_bytes(b"same"));
    }

    #[test]
    fn equal_paths_agree_and_seeds_separate() {
        let path = |seed| ChainHasher::new(seed).salted(b"model").push_tokens(&[1, 2, 3]);
        assert_eq!(path(1), path(1));
        assert_ne!(path(1), path(2));
    }

    #[test]
    fn salts_do_not_run_together() {
        let one = ChainHasher::new(0).salted(b"ab").salted(b"c").current();
        let two = ChainHasher::new(0).salted(b"a").salted(b"bc").current();
        assert_ne!(one, two);
    }

    #[test]
    fn every_token_of_a_long_block_counts() {
        let mut tokens = vec![5u32; 200];
        let before = ChainHasher::new(3).push_tokens(&tokens);
        tokens[199] = 6;
        assert_ne!(before, ChainHasher::new(3).push_tokens(&tokens));
    }
}
