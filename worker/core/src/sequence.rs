//! One generation inside a worker.

use std::sync::Arc;

use roundhouse_types::{BlockHash, ChainHasher, FinishReason, TokenId};

use crate::block_table::BlockTable;
use crate::sampling::{History, SamplingParams};
use crate::step::SequenceId;

/// What a request asks of the scheduler.
#[derive(Clone, Debug)]
pub struct Submission {
    /// The prompt, at least one token.
    pub prompt: Vec<TokenId>,
    /// How tokens are drawn.
    pub params: Arc<SamplingParams>,
    /// Tokens to generate at most, at least one.
    pub max_tokens: usize,
    /// Tokens that end the generation; they count as generated and carry no text.
    pub end_tokens: Arc<[TokenId]>,
    /// Who goes first: higher before lower, 0 unless asked for. Decides who waits, and who is retracted last.
    pub priority: i64,
    /// Which adapter of the model computes it, if one does.
    pub adapter: Option<u32>,
}

/// A sequence: its tokens, and how far their KV is computed.
#[derive(Clone, Debug)]
pub(crate) struct Sequence {
    pub(crate) id: SequenceId,
    pub(crate) params: Arc<SamplingParams>,
    /// Prompt, then what was generated.
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) prompt_tokens: usize,
    /// Tokens whose KV is in the blocks.
    pub(crate) computed_tokens: usize,
    /// While it waits for the first time: tokens that the cache held when it came, and that it may find there.
    pub(crate) foreseen_tokens: usize,
    /// The block from which on the KV of its prompt, but for the last token, comes from another worker; `None` if it does not.
    pub(crate) fetched_from: Option<usize>,
    /// Blocks that are full of computed tokens.
    pub(crate) full_blocks: usize,
    /// Tokens of the prompt that were in the cache when it was first admitted; `None` before.
    pub(crate) cached_tokens: Option<usize>,
    pub(crate) table: BlockTable,
    pub(crate) priority: i64,
    pub(crate) adapter: Option<u32>,
    /// Tokens that were computed when it was retracted last: computing one of those again is what that cost.
    pub(crate) lost_tokens: usize,
    /// The most of its tokens that were ever computed before it was retracted: what it finds of those was its own.
    pub(crate) furthest_tokens: usize,
    /// Whether its blocks are kept apart from those of others, who cannot find them.
    pub(crate) is_salted: bool,
    /// It has drawn its last token.
    pub(crate) is_finished: bool,
    end_tokens: Arc<[TokenId]>,
    pub(crate) max_tokens: usize,
    chain: ChainHasher,
    hashes: Vec<BlockHash>,
}

impl Sequence {
    pub(crate) fn new(id: SequenceId, submission: Submission, root: ChainHasher) -> Self {
        let Submission { prompt, params, max_tokens, end_tokens, priority, adapter } = submission;
        Self {
            id,
            params,
            prompt_tokens: prompt.len(),
            tokens: prompt,
            computed_tokens: 0,
            foreseen_tokens: 0,
            fetched_from: None,
            full_blocks: 0,
            cached_tokens: None,
            table: BlockTable::default(),
            priority,
            adapter,
            lost_tokens: 0,
            furthest_tokens: 0,
            is_salted: false,
            is_finished: false,
            end_tokens,
            max_tokens,
            chain: root,
            hashes: Vec::new(),
        }
    }

    /// Tokens that have to go through the model before the next one can be drawn.
    pub(crate) fn remaining_tokens(&self) -> usize {
        self.tokens.len() - self.computed_tokens
    }

    /// The same, less what it may find in the cache.
    pub(crate) fn owed_tokens(&self) -> usize {
        self.remaining_tokens() - self.foreseen_tokens
    }

    /// Whether the KV of its prompt comes from another worker.
    pub(crate) fn is_fetched(&self) -> bool {
        self.fetched_from.is_some()
    }

    /// Whether its next step computes just the token drawn last, or the last one of a prompt that was fetched.
    pub(crate) fn is_decoding(&self) -> bool {
        self.remaining_tokens() == 1 && (self.is_fetched() || self.tokens.len() > self.prompt_tokens)
    }

    /// Whether it decodes and has not drawn anything yet.
    pub(crate) fn joins_decodes(&self) -> bool {
        self.is_decoding() && self.tokens.len() == self.prompt_tokens
    }

    pub(crate) fn generated_tokens(&self) -> usize {
        self.tokens.len() - self.prompt_tokens
    }

    /// Tokens it may still generate.
    pub(crate) fn ungenerated_tokens(&self) -> usize {
        self.max_tokens.saturating_sub(self.generated_tokens())
    }

    /// What penalties look at; a copy, since a step outlives no borrow of the scheduler.
    pub(crate) fn history(&self) -> History {
        History { tokens: self.tokens.clone(), prompt_tokens: self.prompt_tokens }
    }

    /// Chained hashes of all full blocks of its tokens.
    pub(crate) fn hashes(&mut self, block_tokens: usize) -> &[BlockHash] {
        for block in self.tokens.chunks_exact(block_tokens).skip(self.hashes.len()) {
            self.hashes.push(self.chain.push_tokens(block));
        }
        &self.hashes
    }

    /// Adds a drawn token; says why the generation ends, if it does.
    pub(crate) fn append(&mut self, token: TokenId) -> Option<FinishReason> {
        self.tokens.push(token);
        if self.end_tokens.contains(&token) {
            return Some(FinishReason::Stop);
        }
        self.end_by_length()
    }

    /// Why the generation ends if it has its full length.
    pub(crate) fn end_by_length(&self) -> Option<FinishReason> {
        (self.generated_tokens() >= self.max_tokens).then_some(FinishReason::Length)
    }

    /// Whether no token can end the generation.
    pub(crate) fn ends_by_length(&self) -> bool {
        self.end_tokens.is_empty()
    }
}
