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
    /// How many blocks of its sequence come before it; `None` if it hangs on a block that nothing is known of.
    before: Option<usize>,
    covers: SmallVec<[BlockHash; 2]>,
}

/// The blocks of a sequence, as far as they are known: from some block on, or all of them.
struct Chain {
    /// How many come before the first of them.
    before: Option<usize>,
    blocks: Vec<BlockHash>,
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
        let mut before = match parent {
            Some(parent) => self.blocks.get(&parent).and_then(|block| block.before).map(|count| count + 1),
            None => Some(0),
        };
        for hash in &stored.hashes {
            let block = self.blocks.entry(*hash).or_default();
            block.parent = parent;
            block.before = before.or(block.before);
            (parent, before) = (Some(*hash), block.before.map(|count| count + 1));
        }
    }

    /// Of a chain that ends with `last`, `first` comes after so many tokens.
    pub(super) fn place(&mut self, first: BlockHash, last: BlockHash, tokens_before: usize) {
        let before = tokens_before / self.block_tokens.max(1);
        let Some(chain) = self.chain(last).filter(|chain| chain.before.is_none()) else { return };
        let Some(at) = chain.blocks.iter().position(|hash| *hash == first) else { return };
        for (index, hash) in chain.blocks.iter().enumerate() {
            if let (Some(block), Some(before)) = (self.blocks.get_mut(hash), (before + index).checked_sub(at))
            {
                block.before = Some(before);
            }
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
    /// of the path's blocks the worker held then, from the first on; what comes before all blocks that are known hangs nowhere.
    pub(super) fn cover(&mut self, path: &FollowedPath, last: BlockHash) -> usize {
        let block_tokens = self.block_tokens.max(1);
        let Some(chain) = self.chain(last) else { return 0 };
        let Some(before) = chain.before else { return path.hashes.len() };
        // Without those of the answer, but for the one that is partly of it.
        let of_prompt = path.tokens.div_ceil(block_tokens);
        for (index, byte_block) in path.hashes.iter().enumerate() {
            let at = (path.last_token(index) - 1) / block_tokens;
            let Some(known) = at.checked_sub(before) else { continue };
            let Some(hash) = chain.blocks.get(known).filter(|_| at < of_prompt) else { return index };
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

    /// The sequence that ends with `last`, as far back as its blocks are known. `None` if `last` is not.
    fn chain(&self, last: BlockHash) -> Option<Chain> {
        let mut blocks = Vec::new();
        let (mut at, mut before) = (Some(last), None);
        while let Some(hash) = at {
            let Some(block) = self.blocks.get(&hash) else { break };
            // A worker that names a block its own ancestor says nothing that could be followed.
            if blocks.len() > self.blocks.len() {
                return None;
            }
            blocks.push(hash);
            (at, before) = (block.parent, block.before);
        }
        blocks.reverse();
        (!blocks.is_empty()).then_some(Chain { before, blocks })
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
