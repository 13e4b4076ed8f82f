//! All that a policy may see of a request.

use std::time::Duration;

use roundhouse_types::BlockHash;

use crate::precedence::Precedence;
use crate::prefix::blocks::{Cut, MAX_BLOCKS, Opening, Path};
use crate::worker::Role;

/// Blocks that say where a request belongs when it names no session: the first KiB.
const FIRST_BLOCKS: usize = 16;
/// The same in tokens.
const FIRST_TOKENS: usize = 256;

/// How much of prompts a policy reads, so that no more is hashed than that.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PromptUse {
    /// Their length alone.
    None,
    /// The first KiB, by [`RequestView::affinity`].
    FirstKib,
    /// All of them: hits are looked up in the prefix tree, and routes entered there.
    Whole,
}

impl PromptUse {
    /// Blocks of a prompt that are hashed, at most.
    #[must_use]
    pub fn max_blocks(self) -> usize {
        match self {
            Self::None => 0,
            Self::FirstKib => FIRST_BLOCKS,
            Self::Whole => MAX_BLOCKS,
        }
    }
}

/// How a request wants its answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Answer {
    /// As a stream: its first token will be seen.
    #[default]
    Streamed,
    /// In one piece, with the last token.
    Whole,
    /// In one piece, and no text is generated for it: embeddings, say.
    Nothing,
}

/// Which part of a request is looked for a worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Leg {
    /// All of it.
    #[default]
    Whole,
    /// Its prompt, computed by a worker that does nothing else.
    Prefill,
    /// What follows, where the prompt's KV comes from another worker.
    Decode,
}

impl Leg {
    /// What a worker must do for it.
    #[must_use]
    pub fn role(self) -> Role {
        match self {
            Self::Whole | Self::Decode => Role::Generate,
            Self::Prefill => Role::Prefill,
        }
    }
}

/// What was read of a request before it is routed; borrowed from the body's parse.
#[derive(Clone, Copy, Debug, Default)]
pub struct RequestView<'a> {
    /// The model asked for, if the body named one.
    pub model: Option<&'a str>,
    /// Hash of the session header, or else of the body's `user`.
    pub session: Option<u64>,
    /// Chained hashes of the prompt's full blocks, first block first.
    pub blocks: &'a [BlockHash],
    /// Which of the blocks are of tools and instructions.
    pub opening: Opening,
    /// Tokens a block, where blocks are cut from token ids; `None` where they are cut from bytes.
    pub block_tokens: Option<usize>,
    /// Length of the prompt in template order.
    pub prompt_bytes: usize,
    /// Estimated length of the prompt: bytes by the learned bytes a token of its model.
    pub prompt_tokens: usize,
    /// Whether its first token will be seen.
    pub answer: Answer,
    /// When it came, on the clock of picks, if it may wait in line until its worker has room.
    pub may_wait_since: Option<Duration>,
    /// Which part of it a worker is looked for.
    pub leg: Leg,
    /// How important it is, and whose.
    pub precedence: Precedence,
}

impl<'a> RequestView<'a> {
    /// The prompt as the prefix tree knows it.
    #[must_use]
    pub fn path(&self) -> Path<'a> {
        Path::new(self.blocks, self.cut())
    }

    fn cut(&self) -> Cut {
        self.block_tokens.map_or(Cut::Bytes(self.opening), Cut::Tokens)
    }

    /// What `tokens` are in the unit of the path's sizes: bytes, at the most that this prompt can have for each of its tokens, whose
    /// number is rounded up, or tokens where it was cut from these.
    #[must_use]
    pub fn size_of(&self, tokens: usize) -> u64 {
        let tokens = tokens as u64;
        let bytes = |bytes: u64| {
            bytes.saturating_mul(tokens).checked_div(self.prompt_tokens.saturating_sub(1) as u64)
        };
        match self.block_tokens {
            Some(_) => tokens,
            None => bytes(self.prompt_bytes as u64).unwrap_or(u64::MAX),
        }
    }

    /// What keeps equal prefixes together when there is no session: the hash of the prompt's first KiB, or what there
    /// is of it.
    #[must_use]
    pub fn affinity(&self) -> Option<u64> {
        self.session.or_else(|| self.beginning())
    }

    /// The hash of the prompt's first KiB or 256 tokens, or what there is of it.
    #[must_use]
    pub fn beginning(&self) -> Option<u64> {
        let count = self.block_tokens.map_or(FIRST_BLOCKS, |tokens| FIRST_TOKENS.div_ceil(tokens.max(1)));
        self.blocks.iter().take(count).next_back().map(|block| block.0)
    }

    /// The blocks of the prompt beyond the first `known`.
    #[must_use]
    pub fn blocks_after(&self, known: usize) -> &'a [BlockHash] {
        self.blocks.get(known..).unwrap_or_default()
    }

    /// Estimated tokens in the first `blocks` blocks of the prompt.
    #[must_use]
    pub fn covered_tokens(&self, blocks: usize) -> usize {
        let covered = self.cut().covered(blocks);
        if self.block_tokens.is_some() {
            return covered.min(self.prompt_tokens);
        }
        let tokens = (covered * self.prompt_tokens).checked_div(self.prompt_bytes);
        tokens.unwrap_or(0).min(self.prompt_tokens)
    }
}
