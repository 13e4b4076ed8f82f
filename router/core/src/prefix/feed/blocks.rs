//! Blocks of tokens in one worker's cache, and the blocks of bytes that hang on them.

use std::collections::HashMap;

use roundhouse_types::{BlockHash, StoredBlocks};
use smallvec::SmallVec;

use super::FollowedPath;

/// Byte blocks that hang on one token block: as many as a token block of 4,096 tokens has small ones, twice.
const MAX_COVERED: usize = 512;

#[derive(Default)]
struct TokenBlock {
    parent: Option<BlockHash>,
    covers: SmallVec<[BlockHash; 2]>,
}

/// All token blocks that the worker holds; as many as its cache has, at most.
#[derive(Default)]
pub(super) struct TokenBlocks {
    blocks: HashMap<BlockHash, TokenBlock>,
    /// On how many of them each byte block hangs. Requests with other bytes a token put it elsewhere by a block or two.
    covered: HashMap<BlockHash, u32>,
    block_tokens: usize,
}

impl TokenBlocks {
    pub(super) fn len(&self) -> usize {
        self.blocks.len()
    }

    /// The worker holds these now.
    pub(super) fn store(&mut self, stored: &StoredBlocks) {
        self.block_tokens = stored.block_tokens;
        let mut parent = stored.parent;
        for hash in &stored.hashes {
            self.blocks.entry(*hash).or_default().parent = parent;
            parent = Some(*hash);
        }
    }

    /// The worker does not hold these any more. Returns the byte blocks that go with them, those that came last first.
    pub(super) fn remove(&mut self, hashes: &[BlockHash]) -> Vec<BlockHash> {
        let mut gone = Vec::new();
        for hash in hashes {
            let Some(block) = self.blocks.remove(hash) else { continue };
            for byte_block in block.covers.into_iter().rev() {
                if self.release(byte_block) {
                    gone.push(byte_block);
                }
            }
        }
        gone
    }

    /// Takes over from `before` what hangs on blocks that are still here. Returns the byte blocks of the others.
    pub(super) fn succeed(&mut self, before: Self) -> Vec<BlockHash> {
        let mut orphans = Vec::new();
        for (hash, block) in before.blocks {
            match self.blocks.get_mut(&hash) {
                Some(now) => {
                    for byte_block in &block.covers {
                        *self.covered.entry(*byte_block).or_default() += 1;
                    }
                    now.covers = block.covers;
                }
                None => orphans.extend(block.covers),
            }
        }
        orphans.retain(|byte_block| !self.covered.contains_key(byte_block));
        orphans
    }

    /// Hangs the path's blocks on the token blocks up to `last`, which a request with that path has filled. Returns how many
    /// of the path's blocks hang somewhere now, from the first on.
    pub(super) fn cover(&mut self, path: &FollowedPath, last: BlockHash) -> usize {
        let chain = self.chain(last, path.tokens);
        for (index, byte_block) in path.hashes.iter().enumerate() {
            let at = (path.last_token(index) - 1) / self.block_tokens.max(1);
            let Some(hash) = chain.get(at) else { return index };
            let Some(block) = self.blocks.get_mut(hash) else { return index };
            if !block.covers.contains(byte_block) && block.covers.len() < MAX_COVERED {
                block.covers.push(*byte_block);
                *self.covered.entry(*byte_block).or_default() += 1;
            }
        }
        path.hashes.len()
    }

    /// Blocks of the path that hang on a token block, from the first on.
    pub(super) fn covered(&self, path: &[BlockHash]) -> usize {
        path.iter().take_while(|byte_block| self.covered.contains_key(byte_block)).count()
    }

    /// The blocks of the first `tokens` tokens of the sequence that `last` is of, the first one first; none if one is missing.
    fn chain(&self, last: BlockHash, tokens: usize) -> Vec<BlockHash> {
        let block_tokens = self.block_tokens.max(1);
        let mut chain = Vec::new();
        let mut at = Some(last);
        while let Some(hash) = at {
            // A worker that names a block its own ancestor says nothing that could be followed.
            let is_sane = chain.len() <= self.blocks.len();
            let Some(block) = self.blocks.get(&hash).filter(|_| is_sane) else { return Vec::new() };
            chain.push(hash);
            at = block.parent;
        }
        chain.reverse();
        // Without those of the answer, but for the one that is partly of it.
        chain.truncate(tokens.div_ceil(block_tokens));
        chain
    }

    /// One token block fewer has it. Returns whether that was the last.
    fn release(&mut self, byte_block: BlockHash) -> bool {
        let Some(count) = self.covered.get_mut(&byte_block) else { return false };
        *count -= 1;
        if *count == 0 {
            self.covered.remove(&byte_block);
            return true;
        }
        false
    }
}
