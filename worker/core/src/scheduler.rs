//! Continuous batching: who takes part in the next step, with how many tokens, in which blocks.
//!
//! A step is `schedule → forward → commit`. Sequences that decode come first, so that nobody's stream stops for
//! somebody's prompt; what is left of the token budget goes to prompts, in order of arrival, in chunks. When no block is left the
//! newest sequence is retracted to the end of the queue, its blocks given back; most of them it will find again.

use std::collections::VecDeque;

use roundhouse_types::{BlockHash, ChainHasher, FinishReason, TokenId};

use crate::block_pool::BlockPool;
use crate::sequence::{Sequence, Submission};
use crate::step::{Batch, KvCapacity, NextToken, SampleRequest, SequenceId, SequenceStep};

/// Bounds of a step.
#[derive(Clone, Copy, Debug)]
pub struct SchedulerLimits {
    /// Sequences in a step.
    pub max_running: usize,
    /// Tokens in a step.
    pub max_tokens_per_step: usize,
}

/// When prompts are computed, relative to the sequences that decode.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum PrefillOrder {
    /// Beside them: decodes first, prompts in what they leave of the step's token budget.
    #[default]
    Mixed,
    /// Before them: while a prompt can run, a step holds prompts only.
    First,
}

/// What became of a sequence in a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Progress {
    /// Which.
    pub id: SequenceId,
    /// The token that was drawn.
    pub token: TokenId,
    /// Tokens of the prompt that came from the cache.
    pub cached_tokens: usize,
    /// Set when this was the last token.
    pub finished: Option<FinishReason>,
}

/// Counters, for load reports and metrics.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SchedulerStats {
    /// Sequences that take part in steps.
    pub running: usize,
    /// Sequences that wait.
    pub waiting: usize,
    /// Tokens of waiting sequences, and of running ones, that have not been computed.
    pub uncomputed_tokens: usize,
    /// Blocks that sequences hold.
    pub held_blocks: usize,
    /// Blocks whose contents can be found.
    pub cached_blocks: usize,
    /// All blocks.
    pub total_blocks: usize,
    /// Prompt tokens that were looked up in the cache, since the start.
    pub cache_queried_tokens: u64,
    /// Those of them that were found.
    pub cache_hit_tokens: u64,
    /// Sequences that lost their blocks and started over.
    pub retractions: u64,
}

/// A submission that can never run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SubmitError {
    /// The prompt has no tokens.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// More than the whole pool.
    #[error("{needed_tokens} tokens do not fit into a KV pool of {pool_tokens} tokens")]
    TooLong {
        /// Prompt and generation together.
        needed_tokens: usize,
        /// What there is.
        pool_tokens: usize,
    },
}

/// Decides each step. Owns all sequences and blocks.
#[derive(Debug)]
pub struct Scheduler {
    limits: SchedulerLimits,
    block_tokens: usize,
    pool: BlockPool,
    /// In order of admission: the last is the newest.
    running: Vec<Sequence>,
    waiting: VecDeque<Sequence>,
    next_id: u64,
    root: ChainHasher,
    queried_tokens: u64,
    hit_tokens: u64,
    retractions: u64,
}

impl Scheduler {
    /// A scheduler over an empty pool. `hash_seed` must not be known outside: blocks are found by their hash alone, and who
    /// knew the seed could aim for another prompt's.
    ///
    /// # Panics
    /// When the capacity or a limit is zero.
    #[must_use]
    pub fn new(capacity: KvCapacity, limits: SchedulerLimits, hash_seed: u64) -> Self {
        assert!(capacity.block_tokens > 0 && capacity.blocks > 0, "a pool has blocks");
        assert!(limits.max_running > 0 && limits.max_tokens_per_step > 0, "a step has room for a token");
        Self {
            limits,
            block_tokens: capacity.block_tokens,
            pool: BlockPool::new(capacity.blocks),
            running: Vec::new(),
            waiting: VecDeque::new(),
            next_id: 0,
            root: ChainHasher::new(hash_seed),
            queried_tokens: 0,
            hit_tokens: 0,
            retractions: 0,
        }
    }

    /// Tokens that fit into the pool.
    #[must_use]
    pub fn pool_tokens(&self) -> usize {
        self.pool.total_blocks() * self.block_tokens
    }

    /// Queues a generation.
    ///
    /// # Errors
    /// When it could not run even with the pool to itself.
    pub fn submit(&mut self, submission: Submission) -> Result<SequenceId, SubmitError> {
        if submission.prompt.is_empty() {
            return Err(SubmitError::EmptyPrompt);
        }
        // The last token is drawn and never computed.
        let needed_tokens = submission.prompt.len() + submission.max_tokens.max(1) - 1;
        if needed_tokens > self.pool_tokens() {
            return Err(SubmitError::TooLong { needed_tokens, pool_tokens: self.pool_tokens() });
        }
        let id = SequenceId(self.next_id);
        self.next_id += 1;
        self.waiting.push_back(Sequence::new(id, submission, self.root));
        Ok(id)
    }

    /// Ends a generation and gives its blocks back. Must not be called between `schedule` and `commit`.
    pub fn cancel(&mut self, id: SequenceId) {
        if let Some(at) = self.running.iter().position(|sequence| sequence.id == id) {
            let sequence = self.running.remove(at);
            self.pool.release_all(&sequence.table);
        } else {
            self.waiting.retain(|sequence| sequence.id != id);
        }
    }

    /// Whether there is nothing to do.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// How many blocks of `path`, chained under this scheduler's seed, could be found now.
    #[must_use]
    pub fn cached_blocks(&self, path: &[BlockHash]) -> usize {
        self.pool.match_prefix(path, path.len())
    }

    /// Forgets the contents of all blocks that nobody holds.
    pub fn flush_cache(&mut self) -> usize {
        self.pool.flush()
    }

    /// The counters now.
    #[must_use]
    pub fn stats(&self) -> SchedulerStats {
        let all = self.running.iter().chain(&self.waiting);
        SchedulerStats {
            running: self.running.len(),
            waiting: self.waiting.len(),
            uncomputed_tokens: all.map(Sequence::remaining_tokens).sum(),
            held_blocks: self.pool.total_blocks() - self.pool.free_blocks(),
            cached_blocks: self.pool.cached_blocks(),
            total_blocks: self.pool.total_blocks(),
            cache_queried_tokens: self.queried_tokens,
            cache_hit_tokens: self.hit_tokens,
            retractions: self.retractions,
        }
    }

    /// Makes the next step's batch; empty only when idle.
    pub fn schedule(&mut self) -> Batch {
        let mut batch = Batch::default();
        let mut budget = self.limits.max_tokens_per_step;
        let retractions = self.retractions;
        self.schedule_decodes(&mut batch, &mut budget);
        self.schedule_prefills(&mut batch, &mut budget);
        // After a retraction there is no room for anybody new.
        if self.retractions == retractions {
            self.admit(&mut batch, &mut budget);
        }
        batch
    }

    fn schedule_decodes(&mut self, batch: &mut Batch, budget: &mut usize) {
        let mut at = 0;
        while at < self.running.len() && *budget > 0 {
            if self.running[at].remaining_tokens() == 1 && self.make_room(at, 1) {
                batch.sequences.push(self.running[at].step(1));
                *budget -= 1;
            }
            // When it was retracted itself, it was the last.
            at += 1;
        }
    }

    fn schedule_prefills(&mut self, batch: &mut Batch, budget: &mut usize) {
        let mut at = 0;
        while at < self.running.len() && *budget > 0 {
            let takes_part = batch.sequences.iter().any(|step| step.id == self.running[at].id);
            if !takes_part {
                self.adopt_computed_blocks(at);
            }
            let chunk = self.running[at].remaining_tokens().min(*budget);
            if !takes_part && self.make_room_without_retracting(at, chunk) {
                batch.sequences.push(self.running[at].step(chunk));
                *budget -= chunk;
            }
            at += 1;
        }
    }

    /// Of prompts that begin alike and run side by side, one computes what they share, and the others take it over as it
    /// becomes known.
    fn adopt_computed_blocks(&mut self, at: usize) {
        let block_tokens = self.block_tokens;
        let sequence = &mut self.running[at];
        let findable = (sequence.tokens.len() - 1) / block_tokens;
        while sequence.computed_tokens.is_multiple_of(block_tokens) {
            let index = sequence.computed_tokens / block_tokens;
            if index >= findable.min(sequence.table.len()) {
                return;
            }
            let hash = sequence.hashes(block_tokens)[index];
            let Some(known) = self.pool.exchange(sequence.table[index], hash) else { return };
            sequence.table[index] = known;
            sequence.computed_tokens += block_tokens;
            if sequence.generated_tokens() == 0 {
                sequence.cached_tokens = sequence.cached_tokens.map(|tokens| tokens + block_tokens);
                self.hit_tokens += block_tokens as u64;
            }
        }
    }

    /// Takes sequences from the queue, in order, as long as each finds blocks for all of its tokens.
    fn admit(&mut self, batch: &mut Batch, budget: &mut usize) {
        while *budget > 0 && self.running.len() < self.limits.max_running {
            let Some(next) = self.waiting.front_mut() else { return };
            let block_tokens = self.block_tokens;
            // At least one token must be computed, or there would be nothing to draw from.
            let findable = (next.tokens.len() - 1) / block_tokens;
            let path = next.hashes(block_tokens);
            let known = self.pool.match_prefix(path, findable);
            let spare = self.pool.free_blocks() - self.pool.waiting_among(path, known);
            let needed = next.tokens.len().div_ceil(block_tokens) - known;
            if needed > spare {
                return;
            }
            let Some(mut sequence) = self.waiting.pop_front() else { return };
            sequence.table = self.pool.take_prefix(sequence.hashes(block_tokens), findable);
            sequence.computed_tokens = sequence.table.len() * block_tokens;
            if sequence.cached_tokens.is_none() {
                sequence.cached_tokens = Some(sequence.computed_tokens);
                self.queried_tokens += sequence.prompt_tokens as u64;
                self.hit_tokens += sequence.computed_tokens as u64;
            }
            self.running.push(sequence);
            let at = self.running.len() - 1;
            let remaining = self.running[at].remaining_tokens();
            // All of its blocks at once: two prompts that each held half of what they need would wait for ever.
            if self.make_room_without_retracting(at, remaining) {
                let chunk = remaining.min(*budget);
                batch.sequences.push(self.running[at].step(chunk));
                *budget -= chunk;
            }
        }
    }

    /// Gives the sequence blocks for `tokens` more; retracts the newest others until there is room. False if it had to
    /// be retracted itself.
    fn make_room(&mut self, at: usize, tokens: usize) -> bool {
        loop {
            if self.make_room_without_retracting(at, tokens) {
                return true;
            }
            self.retract_newest();
            if at >= self.running.len() {
                return false;
            }
        }
    }

    fn make_room_without_retracting(&mut self, at: usize, tokens: usize) -> bool {
        let sequence = &mut self.running[at];
        let needed = (sequence.computed_tokens + tokens).div_ceil(self.block_tokens);
        while sequence.table.len() < needed {
            let Some(block) = self.pool.allocate() else { return false };
            sequence.table.push(block);
        }
        true
    }

    fn retract_newest(&mut self) {
        let Some(mut sequence) = self.running.pop() else { return };
        self.pool.release_all(&sequence.table);
        sequence.table.clear();
        sequence.computed_tokens = 0;
        self.waiting.push_back(sequence);
        self.retractions += 1;
    }

    /// Takes in what a step computed: `batch` as `schedule` made it, and the tokens it drew, in batch order.
    pub fn commit(&mut self, batch: &Batch, drawn: &[NextToken]) -> Vec<Progress> {
        let mut progress = Vec::with_capacity(drawn.len());
        for step in &batch.sequences {
            let Some(at) = self.running.iter().position(|sequence| sequence.id == step.id) else { continue };
            self.enter_full_blocks(at, step.tokens.len());
            let Some(next) = drawn.iter().find(|next| next.id == step.id) else { continue };
            let sequence = &mut self.running[at];
            let finished = sequence.append(next.token);
            let cached_tokens = sequence.cached_tokens.unwrap_or(0);
            progress.push(Progress { id: step.id, token: next.token, cached_tokens, finished });
            if finished.is_some() {
                let sequence = self.running.remove(at);
                self.pool.release_all(&sequence.table);
            }
        }
        progress
    }

    /// Makes the blocks that a step has filled findable, for sequences that run beside this one as well.
    fn enter_full_blocks(&mut self, at: usize, computed: usize) {
        let block_tokens = self.block_tokens;
        let sequence = &mut self.running[at];
        let full_before = sequence.computed_tokens / block_tokens;
        sequence.computed_tokens += computed;
        let full_after = sequence.computed_tokens / block_tokens;
        sequence.hashes(block_tokens);
        for index in full_before..full_after {
            let hash = sequence.hashes(block_tokens)[index];
            sequence.table[index] = self.pool.enter(sequence.table[index], hash);
        }
    }

    /// Panics if blocks and sequences contradict each other. For tests.
    ///
    /// # Panics
    /// When an invariant is broken.
    pub fn check_invariants(&self) {
        self.pool.check_invariants();
        let mut references = std::collections::HashMap::new();
        for sequence in &self.running {
            assert!(sequence.table.len() * self.block_tokens >= sequence.computed_tokens);
            assert!(sequence.computed_tokens < sequence.tokens.len());
            for (index, block) in sequence.table.iter().enumerate() {
                *references.entry(*block).or_insert(0) += 1;
                if (index + 1) * self.block_tokens > sequence.computed_tokens {
                    assert_eq!(self.pool.references(*block), 1, "a block that is written to has one holder");
                }
            }
        }
        for (block, count) in &references {
            assert_eq!(self.pool.references(*block), *count);
        }
        assert_eq!(self.pool.total_blocks() - self.pool.free_blocks(), references.len());
        assert!(
            self.waiting.iter().all(|sequence| sequence.table.is_empty() && sequence.computed_tokens == 0)
        );
        assert!(self.running.len() <= self.limits.max_running);
    }
}

impl Sequence {
    /// Its part of a step: the next `tokens` that have not been computed.
    fn step(&self, tokens: usize) -> SequenceStep {
        let end = self.computed_tokens + tokens;
        let sample = (end == self.tokens.len()).then(|| SampleRequest {
            params: self.params.clone(),
            generated_tokens: self.generated_tokens() as u64,
        });
        SequenceStep {
            id: self.id,
            tokens: self.tokens[self.computed_tokens..end].to_vec(),
            context_tokens: self.computed_tokens,
            block_table: self.table.clone(),
            sample,
        }
    }
}

#[cfg(test)]
mod tests;
