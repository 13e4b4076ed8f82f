//! Cuts prompts into blocks: small ones first, so that short shared prompts are told apart, larger ones after, so that
//! long prompts stay cheap.

use roundhouse_types::{BlockHash, ChainHasher};

/// Blocks of the first [`SMALL_BLOCKS`] are this long.
const SMALL_BLOCK_BYTES: usize = 64;
/// How many blocks are small: the first 2 KiB.
const SMALL_BLOCKS: usize = 32;
/// All later blocks are this long.
const LARGE_BLOCK_BYTES: usize = 256;

/// Length of block number `index`.
#[must_use]
pub fn block_bytes(index: usize) -> usize {
    if index < SMALL_BLOCKS { SMALL_BLOCK_BYTES } else { LARGE_BLOCK_BYTES }
}

/// Where block number `count` begins: the bytes that `count` blocks cover.
#[must_use]
pub fn covered_bytes(count: usize) -> usize {
    let small = count.min(SMALL_BLOCKS);
    small * SMALL_BLOCK_BYTES + (count - small) * LARGE_BLOCK_BYTES
}

/// Hashes a prompt that comes in pieces into the chained hashes of its full blocks.
///
/// How the prompt is cut into pieces makes no difference to the hashes.
#[derive(Debug)]
pub struct PromptHasher {
    chain: ChainHasher,
    partial: [u8; LARGE_BLOCK_BYTES],
    partial_bytes: usize,
    blocks: Vec<BlockHash>,
    total_bytes: usize,
}

impl PromptHasher {
    /// Begins a prompt under `root`, which carries the process's seed, the model and whatever else must keep prompts
    /// apart.
    #[must_use]
    pub fn new(root: ChainHasher) -> Self {
        Self {
            chain: root,
            partial: [0; LARGE_BLOCK_BYTES],
            partial_bytes: 0,
            blocks: Vec::new(),
            total_bytes: 0,
        }
    }

    /// Adds the next piece of the prompt.
    pub fn push(&mut self, mut piece: &[u8]) {
        self.total_bytes += piece.len();
        while !piece.is_empty() {
            let block_bytes = block_bytes(self.blocks.len());
            if self.partial_bytes == 0 && piece.len() >= block_bytes {
                let (block, rest) = piece.split_at(block_bytes);
                self.blocks.push(self.chain.push_bytes(block));
                piece = rest;
                continue;
            }
            let (head, rest) = piece.split_at(piece.len().min(block_bytes - self.partial_bytes));
            self.partial[self.partial_bytes..self.partial_bytes + head.len()].copy_from_slice(head);
            self.partial_bytes += head.len();
            piece = rest;
            if self.partial_bytes == block_bytes {
                self.blocks.push(self.chain.push_bytes(&self.partial[..block_bytes]));
                self.partial_bytes = 0;
            }
        }
    }

    /// The hashes of the full blocks, and the length of the whole prompt.
    #[must_use]
    pub fn finish(self) -> (Vec<BlockHash>, usize) {
        (self.blocks, self.total_bytes)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn hash_pieces<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> (Vec<BlockHash>, usize) {
        let mut hasher = PromptHasher::new(ChainHasher::new(1));
        pieces.into_iter().for_each(|piece| hasher.push(piece));
        hasher.finish()
    }

    proptest! {
        #[test]
        fn pieces_make_no_difference(prompt in prop::collection::vec(any::<u8>(), 0..6_000), cut in 1usize..700) {
            prop_assert_eq!(hash_pieces([&prompt[..]]), hash_pieces(prompt.chunks(cut)));
        }

        #[test]
        fn covers_all_full_blocks(len in 0usize..9_000) {
            let prompt = vec![b'x'; len];
            let (blocks, bytes) = hash_pieces([&prompt[..]]);
            prop_assert_eq!(bytes, len);
            prop_assert!(covered_bytes(blocks.len()) <= len);
            prop_assert!(covered_bytes(blocks.len() + 1) > len);
        }
    }

    #[test]
    fn prompts_share_blocks_up_to_where_they_part() {
        let mut other = vec![b'a'; 4_096];
        let (first, _) = hash_pieces([&other[..]]);
        other[2_500] = b'b';
        let (second, _) = hash_pieces([&other[..]]);
        let shared = first.iter().zip(&second).take_while(|(one, two)| one == two).count();
        assert_eq!(shared, 33, "2,048 bytes in small blocks and one of 256 bytes");
        assert!(covered_bytes(shared) <= 2_500);
    }
}
