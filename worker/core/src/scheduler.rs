//! Continuous batching: who takes part in the next step, with how many tokens, in which blocks.
//!
//! A step is `schedule → forward → commit`. In a mixed step sequences that decode come first, so that nobody's stream
//! stops for somebody's prompt; what is left of the token budget goes to prompts, in chunks, higher priorities first
//! and among equals in order of arrival. With [`PrefillOrder::First`] prompts have steps of their own, before the next
//! decode. When no block is left, of the lowest priority whoever has generated least, and among equals the newest, is
//! retracted to the end of the queue, its blocks given back.

mod admission;
mod decode_run;
mod events;
mod invariants;
mod limits;
mod queue;
mod reserve;
mod stats;

use roundhouse_types::{BlockHash, ChainHasher, FinishReason, TokenId};
use smallvec::SmallVec;

use self::admission::Blocked;
pub use self::decode_run::{DecodeRun, DrawTokens};
use self::events::EventLog;
pub use self::limits::{PrefillOrder, SchedulerLimits};
use self::queue::WaitingQueue;
pub use self::reserve::GrowthReserve;
pub use self::stats::SchedulerStats;
use crate::block_pool::BlockPool;
use crate::block_table::BlockTable;
use crate::kv_event::KvEvent;
use crate::sequence::{Sequence, Submission};
use crate::step::{Batch, KvCapacity, NextToken, SampleRequest, SequenceId, SequenceStep};

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

/// A prompt whose KV has come from another worker, and has blocks now.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Arrival {
    /// Whose.
    pub id: SequenceId,
    /// All blocks of the prompt, in order of position.
    pub blocks: BlockTable,
    /// The first of them that the cache did not hold: from here on the KV that has come is to be written, up to the prompt's last token.
    pub first: usize,
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
#[derive(Clone, Debug)]
pub struct Scheduler {
    limits: SchedulerLimits,
    block_tokens: usize,
    pool: BlockPool,
    /// Higher priorities first, among equals whoever had generated more when it was admitted, then whoever was admitted
    /// first. The last is retracted first: that loses least, and whoever is in front gets done.
    running: Vec<Sequence>,
    waiting: WaitingQueue,
    /// Where in `running` each sequence of the batch is, from `schedule` to `commit`.
    planned: Vec<usize>,
    /// Of the last `schedule`.
    arrivals: Vec<Arrival>,
    /// Why the first that waits does not run; `None` when that has to be looked at.
    blocked: Option<Blocked>,
    next_id: u64,
    root: ChainHasher,
    /// Of what running sequences may still generate, the share that is kept free; with a reserve only.
    reserved_share: f64,
    counted: Counted,
    events: EventLog,
}

/// What [`SchedulerStats`] needs beside what can be read off.
#[derive(Clone, Copy, Debug, Default)]
struct Counted {
    uncomputed_tokens: usize,
    computed_tokens: u64,
    queried_tokens: u64,
    hit_tokens: u64,
    retractions: u64,
    retracted_tokens: u64,
    recomputed_tokens: u64,
}

/// A step in the making.
struct Plan {
    batch: Batch,
    budget_tokens: usize,
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
            waiting: WaitingQueue::default(),
            planned: Vec::new(),
            arrivals: Vec::new(),
            blocked: None,
            next_id: 0,
            root: ChainHasher::new(hash_seed),
            reserved_share: limits.reserve.map_or(0.0, |reserve| reserve.first_share),
            counted: Counted::default(),
            events: EventLog::default(),
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
        self.enqueue(submission, None, None)
    }

    /// The same for a prompt whose KV was computed by another worker and has come, from its first `from_blocks` blocks on and but for its last token:
    /// it is in its blocks as soon as it has any ([`arrivals`](Self::arrivals)), and the step that computes the last token is a decode. If it is
    /// retracted, or what comes before is not in the cache any more, it computes its prompt itself.
    ///
    /// # Errors
    /// As [`submit`](Self::submit).
    pub fn submit_fetched(
        &mut self,
        submission: Submission,
        salt: Option<&[u8]>,
        from_blocks: usize,
    ) -> Result<SequenceId, SubmitError> {
        self.enqueue(submission, salt, Some(from_blocks))
    }

    /// The same for a generation that shares blocks only with those of the same salt. What becomes of its blocks is not among
    /// the events when they are stored: whoever follows those could not find them by their tokens.
    ///
    /// # Errors
    /// As [`submit`](Self::submit).
    pub fn submit_salted(
        &mut self,
        submission: Submission,
        salt: Option<&[u8]>,
    ) -> Result<SequenceId, SubmitError> {
        self.enqueue(submission, salt, None)
    }

    fn enqueue(
        &mut self,
        submission: Submission,
        salt: Option<&[u8]>,
        fetched_from: Option<usize>,
    ) -> Result<SequenceId, SubmitError> {
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
        let mut sequence = Sequence::new(id, submission, self.root_of(salt));
        sequence.is_salted = salt.is_some();
        sequence.fetched_from = fetched_from;
        sequence.foreseen_tokens = self.foresee(&mut sequence);
        self.counted.uncomputed_tokens += sequence.owed_tokens();
        self.waiting.push(sequence);
        if self
            .first_admissible()
            .and_then(|first| self.waiting.get_mut(first))
            .is_some_and(|first| first.id == id)
        {
            self.blocked = None;
        }
        Ok(id)
    }

    fn root_of(&self, salt: Option<&[u8]>) -> ChainHasher {
        salt.map_or(self.root, |salt| self.root.salted(salt))
    }

    /// Tokens of a sequence that the cache holds now, or that come with it.
    fn foresee(&self, sequence: &mut Sequence) -> usize {
        if sequence.is_fetched() {
            return sequence.prompt_tokens - 1;
        }
        let findable = (sequence.tokens.len() - 1) / self.block_tokens;
        self.pool.match_prefix(sequence.hashes(self.block_tokens), findable) * self.block_tokens
    }

    /// Ends a generation and gives its blocks back. Must not be called between `schedule` and `commit`.
    pub fn cancel(&mut self, id: SequenceId) {
        let running = self.running.iter().position(|sequence| sequence.id == id);
        let sequence = match running {
            Some(at) => Some(self.running.remove(at)),
            None => self.waiting.remove(id),
        };
        if let Some(sequence) = sequence {
            self.let_go(&sequence);
        }
    }

    /// Gives back what a sequence that will not go on has.
    fn let_go(&mut self, sequence: &Sequence) {
        self.counted.uncomputed_tokens -= sequence.owed_tokens();
        self.pool.release_all(&sequence.table);
        self.blocked = None;
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

    /// How many of the blocks that `prompt` begins with could be found now, by a submission of the same salt.
    #[must_use]
    pub fn cached_prefix_blocks(&self, prompt: &[TokenId], salt: Option<&[u8]>) -> usize {
        let mut chain = self.root_of(salt);
        let findable = prompt.len().saturating_sub(1) / self.block_tokens;
        let blocks = prompt.chunks_exact(self.block_tokens).take(findable);
        blocks.take_while(|block| self.pool.knows(chain.push_tokens(block))).count()
    }

    /// Who got its blocks in the last [`schedule`](Self::schedule), with KV that another worker has computed: it has to be in them before
    /// the next step begins.
    #[must_use]
    pub fn arrivals(&self) -> &[Arrival] {
        &self.arrivals
    }

    /// Forgets the contents of all blocks that nobody holds. Returns how many there were.
    pub fn flush_cache(&mut self) -> usize {
        self.events.removed(&mut self.pool);
        let forgotten = self.pool.flush();
        if self.pool.cached_blocks() == 0 {
            self.events.cleared(&mut self.pool);
        } else {
            self.events.removed(&mut self.pool);
        }
        forgotten
    }

    /// From now on keeps what happens to the cache for [`take_events`](Self::take_events). To be called before the
    /// first step: what is cached already is not told.
    pub fn record_events(&mut self) {
        self.events.switch_on(&mut self.pool);
    }

    /// What has happened to the cache since the last call, in order; nothing unless it is recorded. A step adds at most the
    /// blocks it takes and fills, so calling this after each step bounds it.
    pub fn take_events(&mut self) -> Vec<KvEvent> {
        self.events.take(&mut self.pool)
    }

    /// The counters now. O(1).
    #[must_use]
    pub fn stats(&self) -> SchedulerStats {
        SchedulerStats {
            running: self.running.len(),
            waiting: self.waiting.len(),
            uncomputed_tokens: self.counted.uncomputed_tokens,
            held_blocks: self.pool.total_blocks() - self.pool.free_blocks(),
            cached_blocks: self.pool.cached_blocks(),
            total_blocks: self.pool.total_blocks(),
            computed_tokens: self.counted.computed_tokens,
            cache_queried_tokens: self.counted.queried_tokens,
            cache_hit_tokens: self.counted.hit_tokens,
            retractions: self.counted.retractions,
            retracted_tokens: self.counted.retracted_tokens,
            recomputed_tokens: self.counted.recomputed_tokens,
        }
    }

    /// Makes the next step's batch; empty only when idle.
    pub fn schedule(&mut self) -> Batch {
        self.planned.clear();
        self.arrivals.clear();
        let mut plan = Plan {
            batch: Batch { sequences: Vec::with_capacity(self.running.len() + 1) },
            budget_tokens: self.limits.max_tokens_per_step,
        };
        match self.limits.prefill {
            PrefillOrder::Mixed => {
                let retractions = self.counted.retractions;
                self.schedule_decodes(&mut plan);
                if plan.batch.sequences.len() < self.running.len() {
                    self.schedule_prefills(&mut plan);
                }
                // After a retraction there is no room for anybody new.
                if self.counted.retractions == retractions {
                    self.admit(&mut plan);
                }
            }
            PrefillOrder::First => {
                self.schedule_prefills(&mut plan);
                self.admit(&mut plan);
                if plan.batch.sequences.is_empty() {
                    self.schedule_decodes(&mut plan);
                }
            }
        }
        plan.batch
    }

    /// Puts the next `tokens` of a running sequence, which has blocks for them, into the step.
    fn take_part(&mut self, plan: &mut Plan, at: usize, tokens: usize) {
        // What a generation fills is of use to nobody yet.
        if self.limits.shares_within_steps && !self.running[at].is_decoding() {
            self.enter_full_blocks(at, self.running[at].computed_tokens + tokens);
        }
        plan.batch.sequences.push(self.running[at].step(tokens));
        plan.budget_tokens -= tokens;
        self.planned.push(at);
    }

    fn schedule_decodes(&mut self, plan: &mut Plan) {
        let retractions = self.counted.retractions;
        let mut at = 0;
        while at < self.running.len() && plan.budget_tokens > 0 {
            if self.running[at].is_decoding() && self.make_room(at, 1) {
                self.take_part(plan, at, 1);
            }
            // When it was retracted itself, it was the last.
            at += 1;
        }
        if let Some(reserve) = self.limits.reserve {
            self.reserved_share = if self.counted.retractions > retractions {
                reserve.after_retraction(&self.running)
            } else {
                reserve.shrunk(self.reserved_share)
            };
        }
    }

    fn schedule_prefills(&mut self, plan: &mut Plan) {
        for at in 0..self.running.len() {
            if plan.budget_tokens == 0 {
                return;
            }
            if self.running[at].is_decoding() {
                continue;
            }
            self.adopt_computed_blocks(at);
            let chunk = self.running[at].remaining_tokens().min(plan.budget_tokens);
            if self.make_room_without_retracting(at, chunk) {
                self.take_part(plan, at, chunk);
            }
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
            sequence.table.replace(index, known);
            sequence.computed_tokens += block_tokens;
            sequence.full_blocks += 1;
            self.counted.uncomputed_tokens -= block_tokens;
            // What it had before a retraction was counted then, as found or as computed.
            let is_new = index * block_tokens >= sequence.furthest_tokens;
            if is_new && sequence.generated_tokens() == 0 {
                sequence.cached_tokens = sequence.cached_tokens.map(|tokens| tokens + block_tokens);
                self.counted.hit_tokens += block_tokens as u64;
            }
        }
    }

    /// Gives the sequence blocks for `tokens` more; retracts the last others until there is room. False if it had to
    /// be retracted itself.
    fn make_room(&mut self, at: usize, tokens: usize) -> bool {
        loop {
            if self.make_room_without_retracting(at, tokens) {
                return true;
            }
            self.retract_last();
            if at >= self.running.len() {
                return false;
            }
            let ahead_tokens = self.limits.reserve.map_or(0, |reserve| reserve.ahead_tokens);
            while self.running.len() > at + 1
                && self.pool.free_blocks() * self.block_tokens < self.running.len() * ahead_tokens
            {
                self.retract_last();
            }
        }
    }

    fn make_room_without_retracting(&mut self, at: usize, tokens: usize) -> bool {
        let sequence = &mut self.running[at];
        let needed_tokens = sequence.computed_tokens + tokens;
        while sequence.table.len() * self.block_tokens < needed_tokens {
            let Some(block) = self.pool.allocate() else { return false };
            sequence.table.push(block);
        }
        true
    }

    fn retract_last(&mut self) {
        if let Some(last) = self.running.len().checked_sub(1) {
            self.retract(last);
        }
    }

    fn retract(&mut self, at: usize) {
        let mut sequence = self.running.remove(at);
        self.pool.release_all(&sequence.table.take());
        self.counted.retractions += 1;
        self.counted.retracted_tokens += sequence.computed_tokens as u64;
        self.counted.uncomputed_tokens += sequence.computed_tokens;
        sequence.lost_tokens = sequence.computed_tokens;
        sequence.furthest_tokens = sequence.furthest_tokens.max(sequence.computed_tokens);
        sequence.computed_tokens = 0;
        sequence.fetched_from = None;
        sequence.full_blocks = 0;
        self.waiting.push(sequence);
        self.blocked = None;
    }

    /// Takes in what a step computed: `batch` as `schedule` made it, and the tokens it drew, in batch order.
    pub fn commit(&mut self, batch: &Batch, drawn: &[NextToken]) -> Vec<Progress> {
        let mut progress = Vec::with_capacity(drawn.len());
        let mut drawn = drawn.iter().peekable();
        let mut finished = 0;
        let planned = std::mem::take(&mut self.planned);
        for (step, at) in batch.sequences.iter().zip(planned.iter().copied()) {
            debug_assert_eq!(self.running[at].id, step.id, "nothing happens between schedule and commit");
            self.count_computed(at, step.tokens.len());
            let Some(next) = drawn.next_if(|next| next.id == step.id) else { continue };
            let sequence = &mut self.running[at];
            let outcome = sequence.append(next.token);
            self.counted.uncomputed_tokens += 1;
            let cached_tokens = sequence.cached_tokens.unwrap_or(0);
            progress.push(Progress { id: step.id, token: next.token, cached_tokens, finished: outcome });
            sequence.is_finished = outcome.is_some();
            finished += usize::from(sequence.is_finished);
        }
        debug_assert!(drawn.next().is_none(), "tokens are drawn for sequences of the batch, in its order");
        self.planned = planned;
        self.planned.clear();
        if finished > 0 {
            self.remove_finished();
        }
        progress
    }

    /// In place of [`commit`](Self::commit): the step came to nothing. What it was to fill, or had come from other workers, can be found no more, and whoever
    /// is still there of those who were in it begins anew.
    pub fn abandon(&mut self, batch: &Batch) {
        self.planned.clear();
        let may_be_found = self.limits.shares_within_steps || !self.arrivals.is_empty();
        if !may_be_found {
            return;
        }
        let steps = batch.sequences.iter().map(|step| step.id);
        for id in steps.chain(std::mem::take(&mut self.arrivals).into_iter().map(|arrival| arrival.id)) {
            if let Some(at) = self.running.iter().position(|sequence| sequence.id == id) {
                self.retract(at);
            }
        }
        self.flush_cache();
    }

    fn remove_finished(&mut self) {
        let finished: Vec<Sequence> = self.running.extract_if(.., |sequence| sequence.is_finished).collect();
        finished.iter().for_each(|sequence| self.let_go(sequence));
    }

    /// Takes in that a step has computed so many tokens of a sequence.
    fn count_computed(&mut self, at: usize, computed: usize) {
        let sequence = &mut self.running[at];
        let before = sequence.computed_tokens;
        sequence.computed_tokens += computed;
        self.counted.uncomputed_tokens -= computed;
        self.counted.computed_tokens += computed as u64;
        if before < sequence.lost_tokens {
            let again = sequence.lost_tokens.min(sequence.computed_tokens) - before;
            self.counted.recomputed_tokens += again as u64;
        }
        self.enter_full_blocks(at, self.running[at].computed_tokens);
    }

    /// Makes the blocks findable that are full once a sequence's first `computed_tokens` are computed, for sequences that run beside it as well.
    fn enter_full_blocks(&mut self, at: usize, computed_tokens: usize) {
        let block_tokens = self.block_tokens;
        let sequence = &mut self.running[at];
        let first = sequence.full_blocks;
        if computed_tokens < (first + 1) * block_tokens {
            return;
        }
        let end = computed_tokens / block_tokens;
        sequence.full_blocks = end;
        sequence.hashes(block_tokens);
        let mut stored = first;
        for index in first..end {
            let hash = sequence.hashes(block_tokens)[index];
            let was_known = self.pool.knows(hash);
            sequence.table.replace(index, self.pool.enter(sequence.table[index], hash));
            if was_known {
                self.events.stored(&mut self.pool, sequence, stored..index, block_tokens);
                stored = index + 1;
            }
        }
        self.events.stored(&mut self.pool, sequence, stored..end, block_tokens);
    }
}

impl Sequence {
    /// Its part of a step: the next `tokens` that have not been computed.
    fn step(&self, tokens: usize) -> SequenceStep {
        let end = self.computed_tokens + tokens;
        let sample = (end == self.tokens.len()).then(|| SampleRequest {
            params: self.params.clone(),
            generated_tokens: self.generated_tokens() as u64,
            history: self.params.reads_history().then(|| self.history()),
        });
        SequenceStep {
            id: self.id,
            tokens: match &self.tokens[self.computed_tokens..end] {
                // The same, without a call.
                [token] => SmallVec::from_iter([*token]),
                tokens => SmallVec::from_slice(tokens),
            },
            context_tokens: self.computed_tokens,
            decodes: self.is_decoding(),
            block_table: self.table.clone(),
            sample,
        }
    }
}

#[cfg(test)]
mod tests;
