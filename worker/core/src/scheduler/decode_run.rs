//! Decode steps in which nothing happens, many at a time.
//!
//! A simulator knows how long a step takes without computing it, and then a step is its bookkeeping and nothing else. While every
//! running sequence decodes, nobody can be admitted and nobody has to be retracted, all steps up to the one in which a sequence ends
//! or fills a block are alike: `decode_run → commit_run` takes them at once, and leaves the scheduler as `schedule → commit`, as
//! many times, would have left it.

use std::ops::Range;

use roundhouse_types::TokenId;

use super::{Progress, Scheduler};
use crate::step::SequenceId;

/// Decode steps that are alike.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DecodeRun {
    /// Sequences in each of them.
    pub sequences: usize,
    /// Tokens that they attend to in the first; one more for each sequence with every step.
    pub context_tokens: usize,
    /// How many there are at most; at least one.
    pub steps: usize,
}

/// Appends to the last argument the tokens that a sequence draws at these positions.
pub type DrawTokens<'a> = dyn FnMut(SequenceId, Range<usize>, &mut Vec<TokenId>) + 'a;

impl Scheduler {
    /// The next steps, if they are decode steps that are alike, and takes the blocks that the first of them writes to. To be followed by
    /// [`commit_run`](Self::commit_run). `None` if the next step is another one, or if generations may end by what they draw.
    pub fn decode_run(&mut self) -> Option<DecodeRun> {
        let is_full = self.running.len() >= self.limits.max_running;
        if self.running.is_empty()
            || self.running.len() > self.limits.max_tokens_per_step
            || !(is_full || self.is_blocked() || self.first_admissible().is_none())
        {
            return None;
        }
        let block_tokens = self.block_tokens;
        let mut run = DecodeRun { sequences: self.running.len(), context_tokens: 0, steps: usize::MAX };
        let mut wanted_blocks = 0;
        for sequence in &self.running {
            // A first token is told when it comes.
            if !sequence.is_decoding() || sequence.joins_decodes() || !sequence.ends_by_length() {
                return None;
            }
            let computed = sequence.computed_tokens;
            wanted_blocks += usize::from(sequence.table.len() * block_tokens == computed);
            run.context_tokens += computed + 1;
            run.steps =
                run.steps.min(sequence.ungenerated_tokens()).min(block_tokens - computed % block_tokens);
        }
        if wanted_blocks > self.pool.free_blocks() {
            return None;
        }
        if wanted_blocks > 0 {
            for at in 0..self.running.len() {
                let has_room = self.make_room_without_retracting(at, 1);
                debug_assert!(has_room, "there are as many free blocks as are wanted");
            }
        }
        Some(run)
    }

    /// Takes in the first `steps` of a run, at least one and at most as many as it has. Returns who ended, in batch order.
    pub fn commit_run(&mut self, steps: usize, draw: &mut DrawTokens<'_>) -> Vec<Progress> {
        let mut ended = Vec::new();
        for at in 0..self.running.len() {
            let sequence = &mut self.running[at];
            let drawn = sequence.tokens.len()..sequence.tokens.len() + steps;
            draw(sequence.id, drawn.clone(), &mut sequence.tokens);
            debug_assert_eq!(sequence.tokens.len(), drawn.end, "as many are drawn as there are positions");
            // For each token that is computed there is another one to compute.
            self.counted.uncomputed_tokens += steps;
            self.count_computed(at, steps);
            let sequence = &mut self.running[at];
            let Some(finished) = sequence.end_by_length() else { continue };
            sequence.is_finished = true;
            let token = sequence.tokens.last().copied().unwrap_or_default();
            let cached_tokens = sequence.cached_tokens.unwrap_or(0);
            ended.push(Progress { id: sequence.id, token, cached_tokens, finished: Some(finished) });
        }
        if let Some(reserve) = self.limits.reserve {
            for _ in 0..steps {
                self.reserved_share = reserve.shrunk(self.reserved_share);
            }
        }
        if !ended.is_empty() {
            self.remove_finished();
        }
        ended
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::super::{GrowthReserve, PrefillOrder, SchedulerLimits};
    use super::*;
    use crate::sampling::SamplingParams;
    use crate::sequence::Submission;
    use crate::step::{KvCapacity, NextToken};

    const BLOCK_TOKENS: usize = 4;

    /// With few running at most it has few places for adapters.
    fn scheduler(blocks: usize, max_running: usize, prefill: PrefillOrder) -> Scheduler {
        let limits = SchedulerLimits {
            max_running,
            max_tokens_per_step: 9,
            prefill,
            reserve: Some(GrowthReserve { ahead_tokens: 2, ..GrowthReserve::SGLANG }),
            max_adapters: 1 + max_running / 3,
            shares_within_steps: max_running.is_multiple_of(2),
        };
        Scheduler::new(KvCapacity { block_tokens: BLOCK_TOKENS, blocks }, limits, 5)
    }

    /// Few different ones, so that generations fill equal blocks.
    fn token(id: SequenceId, position: usize) -> TokenId {
        u32::try_from((id.0 as usize / 2 + position) % 2).unwrap()
    }

    /// One ordinary step. Returns who ended.
    fn step(scheduler: &mut Scheduler) -> Vec<Progress> {
        let batch = scheduler.schedule();
        let sampling = batch.sequences.iter().filter(|step| step.sample.is_some());
        let draw = |step: &crate::step::SequenceStep| NextToken {
            id: step.id,
            token: token(step.id, step.context_tokens + step.tokens.len()),
            logprobs: None,
        };
        let drawn: Vec<NextToken> = sampling.map(draw).collect();
        let mut progress = scheduler.commit(&batch, &drawn);
        progress.retain(|progress| progress.finished.is_some());
        progress
    }

    fn context(scheduler: &Scheduler) -> usize {
        scheduler.running.iter().map(|sequence| sequence.computed_tokens + 1).sum()
    }

    proptest! {
        #[test]
        fn a_run_leaves_what_as_many_steps_would_have_left(
            requests in prop::collection::vec(
                (prop::collection::vec(0u32..2, 1..14), 1usize..20, 0usize..12, any::<bool>()), 1..14),
            blocks in 9usize..24,
            max_running in 1usize..7,
            first in any::<bool>(),
            cuts in prop::collection::vec(0usize..20, 200),
        ) {
            let order = if first { PrefillOrder::First } else { PrefillOrder::Mixed };
            let [mut runs, mut steps] = [0; 2].map(|_| scheduler(blocks, max_running, order));
            let params = Arc::new(SamplingParams::greedy());
            for (turn, cut) in cuts.iter().enumerate() {
                for (prompt, max_tokens, _, is_fetched) in requests.iter().filter(|(.., at, _)| *at == turn) {
                    let (prompt, params) = (prompt.clone(), Arc::clone(&params));
                    let end_tokens = Arc::new([]);
                    let adapter = u32::try_from(max_tokens % 4).ok();
                    let max_tokens = *max_tokens;
                    let submission = Submission { prompt, params, max_tokens, end_tokens, priority: 0, adapter };
                    let submit = |scheduler: &mut Scheduler| {
                        let submission = submission.clone();
                        if *is_fetched { scheduler.submit_fetched(submission, None, 0) } else { scheduler.submit(submission) }
                    };
                    prop_assert_eq!(submit(&mut runs).is_ok(), submit(&mut steps).is_ok());
                }
                let (mut ended, mut ended_in_steps) = (Vec::new(), Vec::new());
                if let Some(run) = runs.decode_run() {
                    prop_assert_eq!(run.context_tokens, context(&steps));
                    let count = 1 + cut % run.steps;
                    ended = runs.commit_run(count, &mut |id, positions, tokens| {
                        tokens.extend(positions.map(|position| token(id, position)));
                    });
                    for number in 1..=count {
                        prop_assert!(ended_in_steps.is_empty(), "only the last step ends a generation");
                        prop_assert_eq!(steps.running.len(), run.sequences);
                        ended_in_steps = step(&mut steps);
                        prop_assert!(number == count || ended_in_steps.is_empty());
                    }
                } else if !runs.is_idle() {
                    ended = step(&mut runs);
                    ended_in_steps = step(&mut steps);
                }
                runs.check_invariants();
                prop_assert_eq!(ended, ended_in_steps);
                prop_assert_eq!(runs.stats(), steps.stats());
                prop_assert_eq!(runs.reserved_share, steps.reserved_share);
                let tables = |scheduler: &Scheduler| -> Vec<_> {
                    scheduler.running.iter().map(|one| (one.id, one.tokens.clone(), one.table.clone())).collect()
                };
                prop_assert_eq!(tables(&runs), tables(&steps));
            }
        }
    }
}
