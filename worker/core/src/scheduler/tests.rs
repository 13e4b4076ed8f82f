//! The scheduler against a model that keeps every sequence's KV as plain text.

use std::collections::HashMap;
use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::sampling::SamplingParams;

const BLOCK_TOKENS: usize = 4;

/// A device that remembers what was written where, and draws a token that depends on all of the context. It
/// panics when a step reads what nobody wrote.
#[derive(Default)]
struct Device {
    written: HashMap<(u32, usize), TokenId>,
}

/// What follows `context`, by this device.
fn successor(context: &[TokenId]) -> TokenId {
    context.iter().fold(7u32, |sum, token| sum.wrapping_mul(31).wrapping_add(*token)) % 50
}

impl Device {
    fn forward(&mut self, batch: &Batch) -> Vec<NextToken> {
        for step in &batch.sequences {
            for (offset, token) in step.tokens.iter().enumerate() {
                let position = step.context_tokens + offset;
                let block = step.block_table[position / BLOCK_TOKENS];
                self.written.insert((block.0, position % BLOCK_TOKENS), *token);
            }
        }
        let sampling = batch.sequences.iter().filter(|step| step.sample.is_some());
        sampling
            .map(|step| NextToken { id: step.id, token: successor(&self.context(step)), logprobs: None })
            .collect()
    }

    fn context(&self, step: &SequenceStep) -> Vec<TokenId> {
        let read = |position: usize| {
            let block = step.block_table[position / BLOCK_TOKENS];
            self.written[&(block.0, position % BLOCK_TOKENS)]
        };
        (0..step.context_tokens + step.tokens.len()).map(read).collect()
    }
}

fn submission(prompt: &[TokenId], max_tokens: usize) -> Submission {
    let params = Arc::new(SamplingParams::greedy());
    Submission { prompt: prompt.to_vec(), params, max_tokens, end_tokens: Arc::new([]) }
}

fn scheduler(blocks: usize, max_running: usize, max_tokens_per_step: usize) -> Scheduler {
    let capacity = KvCapacity { block_tokens: BLOCK_TOKENS, blocks };
    Scheduler::new(capacity, SchedulerLimits { max_running, max_tokens_per_step }, 5)
}

/// What a generation gives when nothing else runs.
fn alone(prompt: &[TokenId], max_tokens: usize) -> Vec<TokenId> {
    let mut tokens = prompt.to_vec();
    for _ in 0..max_tokens {
        tokens.push(successor(&tokens));
    }
    tokens.split_off(prompt.len())
}

/// Steps until all is done; returns what each sequence got.
fn finish(scheduler: &mut Scheduler, device: &mut Device) -> HashMap<SequenceId, Vec<TokenId>> {
    let mut output: HashMap<SequenceId, Vec<TokenId>> = HashMap::new();
    for _ in 0..10_000 {
        if scheduler.is_idle() {
            return output;
        }
        let batch = scheduler.schedule();
        assert!(!batch.sequences.is_empty(), "a step that is not idle does something");
        let drawn = device.forward(&batch);
        for progress in scheduler.commit(&batch, &drawn) {
            output.entry(progress.id).or_default().push(progress.token);
        }
        scheduler.check_invariants();
    }
    panic!("never done: {:?}", scheduler.stats());
}

proptest! {
    #[test]
    fn everyone_gets_what_they_would_get_alone(
        requests in prop::collection::vec((prop::collection::vec(0u32..3, 1..30), 1usize..12), 1..12),
        blocks in 11usize..30,
        max_running in 1usize..6,
        budget in 1usize..40,
    ) {
        let mut scheduler = scheduler(blocks, max_running, budget);
        let mut device = Device::default();
        let mut expected = HashMap::new();
        for (prompt, max_tokens) in &requests {
            let id = scheduler.submit(submission(prompt, *max_tokens)).unwrap();
            expected.insert(id, alone(prompt, *max_tokens));
        }
        prop_assert_eq!(finish(&mut scheduler, &mut device), expected);
        prop_assert_eq!(scheduler.stats().held_blocks, 0);
    }

    #[test]
    fn limits_hold_and_cancelling_gives_blocks_back(
        requests in prop::collection::vec((prop::collection::vec(0u32..3, 1..20), 1usize..9, 0usize..12), 1..10),
        max_running in 1usize..5,
        budget in 1usize..20,
    ) {
        let mut scheduler = scheduler(12, max_running, budget);
        let mut device = Device::default();
        let ids: Vec<_> =
            requests.iter().map(|(prompt, max, _)| scheduler.submit(submission(prompt, *max)).unwrap()).collect();
        for step in 0..12 {
            for (id, (_, _, cancel_at)) in ids.iter().zip(&requests) {
                if *cancel_at == step {
                    scheduler.cancel(*id);
                    scheduler.check_invariants();
                }
            }
            let batch = scheduler.schedule();
            prop_assert!(batch.tokens() <= budget && batch.sequences.len() <= max_running);
            let drawn = device.forward(&batch);
            scheduler.commit(&batch, &drawn);
            scheduler.check_invariants();
        }
        ids.iter().for_each(|id| scheduler.cancel(*id));
        prop_assert!(scheduler.is_idle());
        prop_assert_eq!(scheduler.stats().held_blocks, 0);
    }
}

#[test]
fn a_repeated_prompt_is_found_but_for_its_last_token() {
    let (mut scheduler, mut device) = (scheduler(20, 4, 100), Device::default());
    let prompt: Vec<TokenId> = (0..16).collect();
    for expected in [0, 12] {
        let id = scheduler.submit(submission(&prompt, 2)).unwrap();
        let batch = scheduler.schedule();
        assert_eq!((batch.sequences[0].id, batch.sequences[0].context_tokens), (id, expected));
        let drawn = device.forward(&batch);
        assert_eq!(scheduler.commit(&batch, &drawn)[0].cached_tokens, expected);
        finish(&mut scheduler, &mut device);
    }
    let stats = scheduler.stats();
    assert_eq!((stats.cache_queried_tokens, stats.cache_hit_tokens), (32, 12));
}

#[test]
fn of_equal_prompts_at_once_one_computes_for_all() {
    let (mut scheduler, mut device) = (scheduler(40, 4, 8), Device::default());
    let prompt: Vec<TokenId> = (0..33).collect();
    for _ in 0..3 {
        scheduler.submit(submission(&prompt, 1)).unwrap();
    }
    let mut computed = 0;
    while !scheduler.is_idle() {
        let batch = scheduler.schedule();
        computed += batch.tokens();
        let drawn = device.forward(&batch);
        scheduler.commit(&batch, &drawn);
        scheduler.check_invariants();
    }
    assert_eq!(computed, 33 + 2, "the second and the third compute their last token");
    assert_eq!(scheduler.stats().cache_hit_tokens, 64);
}

#[test]
fn outputs_enter_the_cache_too() {
    let (mut scheduler, mut device) = (scheduler(20, 4, 100), Device::default());
    let id = scheduler.submit(submission(&[1, 2, 3, 4], 9)).unwrap();
    let output = finish(&mut scheduler, &mut device).remove(&id).unwrap();
    let next_turn = [&[1, 2, 3, 4][..], &output, &[5, 6]].concat();
    scheduler.submit(submission(&next_turn, 1)).unwrap();
    assert_eq!(scheduler.schedule().sequences[0].context_tokens, 12);
}

#[test]
fn long_prompts_go_in_chunks_beside_decodes() {
    let (mut scheduler, mut device) = (scheduler(40, 4, 10), Device::default());
    let short = scheduler.submit(submission(&[1], 30)).unwrap();
    let batch = scheduler.schedule();
    let drawn = device.forward(&batch);
    scheduler.commit(&batch, &drawn);
    scheduler.submit(submission(&[2; 25], 1)).unwrap();
    let sizes: Vec<_> = (0..3)
        .map(|_| {
            let batch = scheduler.schedule();
            assert_eq!(batch.sequences[0].id, short, "decode comes first, in every step");
            let drawn = device.forward(&batch);
            scheduler.commit(&batch, &drawn);
            batch.sequences[1].tokens.len()
        })
        .collect();
    assert_eq!(sizes, [9, 9, 7]);
}

#[test]
fn the_newest_is_retracted_to_the_end_of_the_queue() {
    let (mut scheduler, mut device) = (scheduler(4, 4, 100), Device::default());
    let old = scheduler.submit(submission(&[1; 7], 8)).unwrap();
    let new = scheduler.submit(submission(&[2; 7], 8)).unwrap();
    let mut last: HashMap<SequenceId, usize> = HashMap::new();
    for step in 0..100 {
        if scheduler.is_idle() {
            break;
        }
        let batch = scheduler.schedule();
        let drawn = device.forward(&batch);
        for progress in scheduler.commit(&batch, &drawn) {
            last.insert(progress.id, step);
        }
        scheduler.check_invariants();
    }
    assert!(scheduler.stats().retractions >= 1);
    assert!(last[&old] < last[&new]);
}

#[test]
fn end_tokens_stop_and_limits_cut() {
    let (mut scheduler, mut device) = (scheduler(20, 4, 100), Device::default());
    let first = successor(&[1, 2]);
    let mut stopping = submission(&[1, 2], 10);
    stopping.end_tokens = Arc::new([first]);
    scheduler.submit(stopping).unwrap();
    scheduler.submit(submission(&[3, 4], 1)).unwrap();
    let batch = scheduler.schedule();
    let drawn = device.forward(&batch);
    let finished: Vec<_> =
        scheduler.commit(&batch, &drawn).iter().map(|progress| progress.finished).collect();
    assert_eq!(finished, [Some(FinishReason::Stop), Some(FinishReason::Length)]);
    assert!(scheduler.is_idle());
}

#[test]
fn what_can_never_run_is_refused() {
    let mut scheduler = scheduler(2, 4, 100);
    assert_eq!(scheduler.submit(submission(&[], 1)), Err(SubmitError::EmptyPrompt));
    let expected = SubmitError::TooLong { needed_tokens: 9, pool_tokens: 8 };
    assert_eq!(scheduler.submit(submission(&[1; 8], 2)), Err(expected));
    assert!(scheduler.submit(submission(&[1; 8], 1)).is_ok());
}
