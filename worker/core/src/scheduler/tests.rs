//! The scheduler against a model that keeps every sequence's KV as plain text.

use std::collections::HashMap;
use std::sync::Arc;

use proptest::prelude::*;
use roundhouse_types::BlockHash;

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
    Submission {
        prompt: prompt.to_vec(),
        params,
        max_tokens,
        end_tokens: Arc::new([]),
        priority: 0,
        adapter: None,
    }
}

fn scheduler(blocks: usize, max_running: usize, max_tokens_per_step: usize) -> Scheduler {
    let capacity = KvCapacity { block_tokens: BLOCK_TOKENS, blocks };
    Scheduler::new(capacity, SchedulerLimits::mixed(max_running, max_tokens_per_step), 5)
}

/// What a generation gives when nothing else runs.
fn alone(prompt: &[TokenId], max_tokens: usize) -> Vec<TokenId> {
    let mut tokens = prompt.to_vec();
    for _ in 0..max_tokens {
        tokens.push(successor(&tokens));
    }
    tokens.split_off(prompt.len())
}

/// One step; what it was.
fn step(scheduler: &mut Scheduler, device: &mut Device) -> Batch {
    let batch = scheduler.schedule();
    let drawn = device.forward(&batch);
    scheduler.commit(&batch, &drawn);
    scheduler.check_invariants();
    batch
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
fn what_waits_owes_what_the_cache_did_not_hold_when_it_came() {
    let (mut scheduler, mut device) = (scheduler(20, 4, 100), Device::default());
    let prompt: Vec<TokenId> = (0..16).collect();
    scheduler.submit(submission(&prompt, 2)).unwrap();
    assert_eq!(scheduler.stats().uncomputed_tokens, 16);
    finish(&mut scheduler, &mut device);
    let again = scheduler.submit(submission(&prompt, 2)).unwrap();
    assert_eq!(scheduler.stats().uncomputed_tokens, 4);
    scheduler.flush_cache();
    scheduler.check_invariants();
    scheduler.cancel(again);
    assert_eq!(scheduler.stats().uncomputed_tokens, 0);
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
    assert_eq!(
        stats.computed_tokens,
        (16 + 1) + (4 + 1),
        "what was found is not computed, nor what was drawn last"
    );
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

#[test]
fn prompts_first_means_no_decode_beside_them() {
    let limits = SchedulerLimits { prefill: PrefillOrder::First, ..SchedulerLimits::mixed(4, 10) };
    let capacity = KvCapacity { block_tokens: BLOCK_TOKENS, blocks: 40 };
    let (mut scheduler, mut device) = (Scheduler::new(capacity, limits, 5), Device::default());
    let short = scheduler.submit(submission(&[1], 30)).unwrap();
    step(&mut scheduler, &mut device);
    let long = scheduler.submit(submission(&[2; 25], 2)).unwrap();
    let steps: Vec<Vec<_>> = (0..4)
        .map(|_| {
            let batch = step(&mut scheduler, &mut device);
            batch.sequences.iter().map(|step| (step.id, step.tokens.len())).collect()
        })
        .collect();
    assert_eq!(steps, [vec![(long, 10)], vec![(long, 10)], vec![(long, 5)], vec![(short, 1), (long, 1)]]);
}

#[test]
fn a_higher_priority_waits_in_front() {
    let (mut scheduler, mut device) = (scheduler(6, 2, 100), Device::default());
    let ids: Vec<_> = [0, 0, 5, 5, -1, 7]
        .map(|priority| {
            let submission = Submission { priority, ..submission(&[(priority + 9) as TokenId; 7], 9) };
            scheduler.submit(submission).unwrap()
        })
        .to_vec();
    let mut first_tokens = Vec::new();
    while !scheduler.is_idle() {
        for step in step(&mut scheduler, &mut device).sequences {
            if step.sample.is_some() && !first_tokens.contains(&step.id) {
                first_tokens.push(step.id);
            }
        }
    }
    let order = [5, 2, 3, 0, 1, 4].map(|index: usize| ids[index]);
    assert_eq!(first_tokens, order, "7, then both 5 in order of arrival, both 0, and -1");
}

#[test]
fn a_higher_priority_is_retracted_last() {
    let (mut scheduler, mut device) = (scheduler(4, 4, 100), Device::default());
    let low = scheduler.submit(submission(&[1; 7], 8)).unwrap();
    step(&mut scheduler, &mut device);
    let high = scheduler.submit(Submission { priority: 1, ..submission(&[2; 7], 8) }).unwrap();
    let mut last = None;
    while !scheduler.is_idle() {
        last = step(&mut scheduler, &mut device).sequences.last().map(|step| step.id);
        if scheduler.stats().retractions > 0 && scheduler.stats().running == 1 {
            assert!(scheduler.running[0].id == high || scheduler.stats().waiting == 0);
        }
    }
    assert!(scheduler.stats().retractions > 0);
    assert_eq!(last, Some(low), "it came first, and is done last");
}

#[test]
fn what_retraction_costs_is_counted() {
    let (mut scheduler, mut device) = (scheduler(4, 4, 100), Device::default());
    scheduler.submit(submission(&[1; 7], 8)).unwrap();
    scheduler.submit(submission(&[2; 7], 8)).unwrap();
    let mut computed = 0;
    while !scheduler.is_idle() {
        computed += step(&mut scheduler, &mut device).tokens() as u64;
    }
    let stats = scheduler.stats();
    assert!(stats.retractions >= 1 && stats.retracted_tokens >= stats.recomputed_tokens);
    assert!(stats.recomputed_tokens > 0, "the older one grows into what the newer one had");
    assert_eq!(computed, 2 * 14 + stats.recomputed_tokens);
}

#[test]
fn a_reserve_admits_no_more_than_can_grow() {
    let reserve = GrowthReserve {
        first_share: 1.0,
        least_share: 1.0,
        decay_steps: 1,
        horizon_tokens: 4_096,
        ahead_tokens: 1,
    };
    let limits = SchedulerLimits { reserve: Some(reserve), ..SchedulerLimits::mixed(16, 100) };
    let capacity = KvCapacity { block_tokens: BLOCK_TOKENS, blocks: 12 };
    let (mut scheduler, mut device) = (Scheduler::new(capacity, limits, 5), Device::default());
    for request in 0..8 {
        scheduler.submit(submission(&[request; 8], 9)).unwrap();
    }
    let mut most = 0;
    while !scheduler.is_idle() {
        step(&mut scheduler, &mut device);
        most = most.max(scheduler.stats().running);
    }
    assert_eq!(
        (most, scheduler.stats().retractions),
        (2, 0),
        "48 tokens are room for two of 17 and their growth"
    );
}

/// What one who follows the events believes to be cached.
#[derive(Default)]
struct Follower {
    tokens: HashMap<BlockHash, Vec<TokenId>>,
}

impl Follower {
    fn follow(&mut self, events: Vec<KvEvent>, root: ChainHasher) {
        for event in events {
            match event {
                KvEvent::Cleared => self.tokens.clear(),
                KvEvent::Removed { hashes } => {
                    for hash in hashes {
                        assert!(self.tokens.remove(&hash).is_some(), "only what was stored is removed");
                    }
                }
                KvEvent::Stored(stored) => {
                    assert_eq!(stored.positions.len(), stored.tokens.len());
                    assert_eq!(stored.parent.is_none(), stored.positions.start == 0);
                    // The hash chains on, from the parent.
                    let before = stored.parent.map(|parent| self.tokens[&parent].clone()).unwrap_or_default();
                    assert_eq!(
                        before.len(),
                        stored.positions.start,
                        "the parent can be found, and all before it"
                    );
                    let (mut chain, mut path) = (root, before.clone());
                    for block in before.chunks_exact(stored.block_tokens) {
                        chain.push_tokens(block);
                    }
                    for (hash, block) in
                        stored.hashes.iter().zip(stored.tokens.chunks_exact(stored.block_tokens))
                    {
                        assert_eq!(chain.push_tokens(block), *hash);
                        path.extend(block);
                        assert!(self.tokens.insert(*hash, path.clone()).is_none(), "nothing is stored twice");
                    }
                }
            }
        }
    }
}

#[test]
fn nothing_is_recorded_unless_asked_for() {
    let (mut scheduler, mut device) = (scheduler(20, 4, 100), Device::default());
    scheduler.submit(submission(&[1; 9], 4)).unwrap();
    finish(&mut scheduler, &mut device);
    assert_eq!(scheduler.take_events(), []);
}

#[test]
fn events_name_sequence_and_positions() {
    let (mut scheduler, mut device) = (scheduler(20, 4, 100), Device::default());
    scheduler.record_events();
    let id = scheduler.submit(submission(&[1, 2, 3, 4, 5, 6, 7, 8, 9], 1)).unwrap();
    finish(&mut scheduler, &mut device);
    let events = scheduler.take_events();
    let [KvEvent::Stored(stored)] = &events[..] else { panic!("{events:?}") };
    assert_eq!((stored.sequence, stored.positions.clone(), stored.hashes.len()), (id, 0..8, 2));
    assert_eq!(
        (stored.parent, &stored.tokens[..], stored.block_tokens),
        (None, &[1, 2, 3, 4, 5, 6, 7, 8][..], 4)
    );
    scheduler.flush_cache();
    assert_eq!(scheduler.take_events(), [KvEvent::Cleared]);
}

/// Something that happens to a scheduler.
#[derive(Clone, Debug)]
enum Happening {
    Submit { prompt: Vec<TokenId>, max_tokens: usize, priority: i64, is_fetched: bool },
    Cancel(prop::sample::Index),
    Flush,
    Steps(usize),
}

fn happening() -> impl Strategy<Value = Happening> {
    let submit = (prop::collection::vec(0u32..3, 1..30), 1usize..12, -1i64..2, any::<bool>()).prop_map(
        |(prompt, max_tokens, priority, is_fetched)| Happening::Submit {
            prompt,
            max_tokens,
            priority,
            is_fetched,
        },
    );
    prop_oneof![
        4 => submit,
        1 => any::<prop::sample::Index>().prop_map(Happening::Cancel),
        1 => Just(Happening::Flush),
        4 => (1usize..6).prop_map(Happening::Steps),
    ]
}

fn limits() -> impl Strategy<Value = SchedulerLimits> {
    let reserve = GrowthReserve { decay_steps: 3, ahead_tokens: 2, ..GrowthReserve::SGLANG };
    let order = prop_oneof![Just(PrefillOrder::Mixed), Just(PrefillOrder::First)];
    let adapters = prop_oneof![Just(usize::MAX), 1usize..3];
    let reserve = prop_oneof![Just(None), Just(Some(reserve))];
    ((1usize..6, 1usize..40), order, reserve, adapters, any::<bool>()).prop_map(
        |((max_running, max_tokens_per_step), prefill, reserve, max_adapters, shares_within_steps)| {
            SchedulerLimits {
                max_running,
                max_tokens_per_step,
                prefill,
                reserve,
                max_adapters,
                shares_within_steps,
            }
        },
    )
}

/// A scheduler beside what is known of each of its sequences without it.
struct Trial {
    scheduler: Scheduler,
    device: Device,
    follower: Follower,
    /// What comes of prompts from another worker: from which block on, and the prompt but for its last token.
    coming: HashMap<SequenceId, (usize, Vec<TokenId>)>,
    /// What each is to get, and what it got.
    expected: HashMap<SequenceId, Vec<TokenId>>,
    output: HashMap<SequenceId, Vec<TokenId>>,
}

impl Trial {
    fn step(&mut self) {
        let batch = self.scheduler.schedule();
        self.scheduler.check_invariants();
        self.receive();
        assert_eq!(
            batch.sequences.is_empty(),
            self.scheduler.is_idle(),
            "a step that is not idle does something"
        );
        let limits = self.scheduler.limits;
        assert!(batch.tokens() <= limits.max_tokens_per_step && batch.sequences.len() <= limits.max_running);
        if limits.prefill == PrefillOrder::First {
            let decodes = batch.sequences.iter().filter(|step| step.decodes).count();
            // Only a retracted sequence's prefill can look like a decode.
            let retracted = self.scheduler.stats().retractions > 0;
            assert!(decodes == 0 || decodes == batch.sequences.len() || retracted);
        }
        let drawn = self.device.forward(&batch);
        for progress in self.scheduler.commit(&batch, &drawn) {
            let output = self.output.entry(progress.id).or_default();
            output.push(progress.token);
            let done = *output == self.expected[&progress.id];
            assert_eq!(progress.finished.is_some(), done, "it ends with its last token and not before");
        }
        self.check();
    }

    /// What another worker computed is written as soon as it has blocks.
    fn receive(&mut self) {
        for Arrival { id, blocks, first } in self.scheduler.arrivals() {
            let (from, prompt) = self.coming.remove(id).expect("it comes once");
            assert!(from <= *first, "what comes before it is in the cache");
            for (block, tokens) in blocks.iter().zip(prompt.chunks(BLOCK_TOKENS)).skip(*first) {
                for (offset, token) in tokens.iter().enumerate() {
                    self.device.written.insert((block.0, offset), *token);
                }
            }
        }
    }

    fn check(&mut self) {
        self.scheduler.check_invariants();
        let root = self.scheduler.root;
        self.follower.follow(self.scheduler.take_events(), root);
        assert_eq!(self.follower.tokens.len(), self.scheduler.stats().cached_blocks);
        assert!(self.follower.tokens.keys().all(|hash| self.scheduler.pool.knows(*hash)));
        for (id, output) in &self.output {
            assert!(self.expected[id].starts_with(output));
        }
    }

    fn apply(&mut self, happening: Happening) {
        match happening {
            Happening::Submit { prompt, max_tokens, priority, is_fetched } => {
                let adapter = u32::try_from(prompt.len() % 4).ok().filter(|adapter| *adapter > 0);
                let submission = Submission { priority, adapter, ..submission(&prompt, max_tokens) };
                let id = if is_fetched {
                    let from = self.scheduler.cached_prefix_blocks(&prompt, None);
                    let id = self.scheduler.submit_fetched(submission, None, from).unwrap();
                    self.coming.insert(id, (from, prompt[..prompt.len() - 1].to_vec()));
                    id
                } else {
                    self.scheduler.submit(submission).unwrap()
                };
                self.expected.insert(id, alone(&prompt, max_tokens));
            }
            Happening::Cancel(which) if !self.expected.is_empty() => {
                let mut ids: Vec<_> = self.expected.keys().copied().collect();
                ids.sort();
                let id = ids[which.index(ids.len())];
                self.scheduler.cancel(id);
                let got = self.output.get(&id).cloned().unwrap_or_default();
                self.expected.insert(id, got);
            }
            Happening::Cancel(_) => {}
            Happening::Flush => {
                self.scheduler.flush_cache();
                assert_eq!(self.scheduler.stats().cached_blocks > 0, !self.follower_after_flush_is_empty());
            }
            Happening::Steps(steps) => (0..steps).for_each(|_| self.step()),
        }
        self.check();
    }

    fn follower_after_flush_is_empty(&mut self) -> bool {
        let root = self.scheduler.root;
        self.follower.follow(self.scheduler.take_events(), root);
        self.follower.tokens.is_empty()
    }
}

proptest! {
    /// The model: each sequence alone, a device that only remembers what was written, and one who follows the events.
    #[test]
    fn whatever_happens_outputs_blocks_and_events_agree(
        happenings in prop::collection::vec(happening(), 1..40),
        blocks in 11usize..30,
        limits in limits(),
    ) {
        let capacity = KvCapacity { block_tokens: BLOCK_TOKENS, blocks };
        let mut scheduler = Scheduler::new(capacity, limits, 5);
        scheduler.record_events();
        let mut trial = Trial {
            scheduler,
            device: Device::default(),
            follower: Follower::default(),
            coming: HashMap::new(),
            expected: HashMap::new(),
            output: HashMap::new(),
        };
        for happening in happenings {
            trial.apply(happening);
        }
        for _ in 0..10_000 {
            if trial.scheduler.is_idle() {
                break;
            }
            trial.step();
        }
        prop_assert!(trial.scheduler.is_idle());
        trial.output.retain(|_, output| !output.is_empty());
        trial.expected.retain(|_, expected| !expected.is_empty());
        prop_assert_eq!(&trial.output, &trial.expected);
        prop_assert_eq!(trial.scheduler.stats().held_blocks, 0);
        prop_assert_eq!(trial.scheduler.stats().uncomputed_tokens, 0);
    }

    /// The model: a stable sort.
    #[test]
    fn first_tokens_come_by_priority_then_arrival(
        requests in prop::collection::vec((1usize..30, -2i64..3), 1..12),
        limits in limits(),
    ) {
        // Room for all, so that nobody is retracted; one at a time, so that only the queue decides.
        let capacity = KvCapacity { block_tokens: BLOCK_TOKENS, blocks: 200 };
        let mut scheduler = Scheduler::new(capacity, SchedulerLimits { max_running: 1, ..limits }, 5);
        let mut device = Device::default();
        let mut expected = Vec::new();
        for (index, (length, priority)) in requests.iter().enumerate() {
            let prompt = vec![index as TokenId; *length];
            expected.push((scheduler.submit(Submission { priority: *priority, ..submission(&prompt, 2) }).unwrap(), *priority));
        }
        expected.sort_by_key(|(_, priority)| -priority);
        let mut order = Vec::new();
        while !scheduler.is_idle() {
            order.extend(step(&mut scheduler, &mut device).sequences.iter().map(|step| step.id));
        }
        order.dedup();
        prop_assert_eq!(order, expected.into_iter().map(|(id, _)| id).collect::<Vec<_>>());
    }
}

#[test]
fn salts_keep_blocks_apart_and_are_no_events() {
    let mut scheduler = scheduler(20, 4, 40);
    scheduler.record_events();
    let mut device = Device::default();
    let prompt = [1; 13];
    let mut run = |salt: Option<&[u8]>| {
        scheduler.submit_salted(submission(&prompt, 1), salt).unwrap();
        let batch = scheduler.schedule();
        let drawn = device.forward(&batch);
        let cached = scheduler.commit(&batch, &drawn)[0].cached_tokens;
        scheduler.check_invariants();
        let stored = |event: &KvEvent| matches!(event, KvEvent::Stored(_));
        (cached, scheduler.take_events().iter().filter(|event| stored(event)).count())
    };
    assert_eq!(run(Some(b"a")), (0, 0));
    assert_eq!(run(Some(b"a")), (12, 0));
    assert_eq!(run(Some(b"b")), (0, 0));
    assert_eq!(run(None), (0, 1));
    assert_eq!(run(None), (12, 0));
}

#[test]
fn what_is_taken_over_again_after_a_retraction_is_counted_once() {
    let limits = SchedulerLimits { shares_within_steps: false, ..SchedulerLimits::mixed(4, 13) };
    let mut scheduler = Scheduler::new(KvCapacity { block_tokens: BLOCK_TOKENS, blocks: 40 }, limits, 5);
    let mut device = Device::default();
    scheduler.submit(submission(&[1; 40], 1)).unwrap();
    for _ in 0..12 {
        // It computes two blocks in a step in which the long one computes the first of them.
        scheduler.submit(Submission { priority: 1, ..submission(&[1; 9], 1) }).unwrap();
        step(&mut scheduler, &mut device);
        // The long one takes the second over.
        let batch = step(&mut scheduler, &mut device);
        assert_eq!(batch.sequences[0].context_tokens, 8);
        scheduler.retract_last();
        scheduler.flush_cache();
    }
    let cached_tokens = loop {
        let batch = scheduler.schedule();
        let drawn = device.forward(&batch);
        if let [progress] = scheduler.commit(&batch, &drawn)[..] {
            break progress.cached_tokens;
        }
    };
    assert_eq!(cached_tokens, 4);
}

#[test]
fn a_prompt_that_was_fetched_computes_its_last_token_beside_those_that_decode() {
    for prefill in [PrefillOrder::First, PrefillOrder::Mixed] {
        let capacity = KvCapacity { block_tokens: BLOCK_TOKENS, blocks: 20 };
        let limits = SchedulerLimits { prefill, ..SchedulerLimits::mixed(4, 16) };
        let mut scheduler = Scheduler::new(capacity, limits, 5);
        let draw = |batch: &Batch| -> Vec<NextToken> {
            let draw = |step: &SequenceStep| NextToken { id: step.id, token: 1, logprobs: None };
            batch.sequences.iter().filter(|step| step.sample.is_some()).map(draw).collect()
        };
        scheduler.submit(submission(&[2; 6], 9)).unwrap();
        let batch = scheduler.schedule();
        scheduler.commit(&batch, &draw(&batch));
        let fetched = scheduler.submit_fetched(submission(&[3; 10], 2), None, 0).unwrap();
        assert_eq!(scheduler.stats().uncomputed_tokens, 2, "a token each");
        assert_eq!(scheduler.decode_run(), None, "somebody waits");
        let batch = scheduler.schedule();
        let lengths: Vec<_> =
            batch.sequences.iter().map(|step| (step.tokens.len(), step.context_tokens)).collect();
        assert_eq!(lengths, [(1, 6), (1, 9)], "{prefill:?}");
        let [arrival] = scheduler.arrivals() else { panic!("one has come") };
        assert_eq!((arrival.id, arrival.blocks.len(), arrival.first), (fetched, 3, 0));
        let progress = scheduler.commit(&batch, &draw(&batch));
        assert_eq!((progress[1].id, progress[1].cached_tokens), (fetched, 0));
        let stats = scheduler.stats();
        assert_eq!((stats.computed_tokens, stats.cached_blocks), (6 + 2, 1 + 2));
        scheduler.check_invariants();
    }
}

#[test]
fn prompts_of_one_step_compute_what_they_share_once_where_the_engine_can() {
    for (shares_within_steps, lengths) in [(true, [14, 6, 2]), (false, [14, 14, 10])] {
        let limits = SchedulerLimits { shares_within_steps, ..SchedulerLimits::mixed(4, 100) };
        let mut scheduler = Scheduler::new(KvCapacity { block_tokens: BLOCK_TOKENS, blocks: 40 }, limits, 5);
        let mut device = Device::default();
        let prompts = [vec![1; 14], [vec![1; 8], vec![2; 6]].concat(), vec![1; 10]];
        let ids = prompts.clone().map(|prompt| scheduler.submit(submission(&prompt, 3)).unwrap());
        let batch = scheduler.schedule();
        scheduler.check_invariants();
        let stepped: Vec<_> = batch.sequences.iter().map(|step| step.tokens.len()).collect();
        assert_eq!(stepped, lengths);
        let drawn = device.forward(&batch);
        let cached: Vec<_> = scheduler.commit(&batch, &drawn).iter().map(|one| one.cached_tokens).collect();
        assert_eq!(cached, if shares_within_steps { [0, 8, 8] } else { [0; 3] });
        scheduler.check_invariants();
        let output = finish(&mut scheduler, &mut device);
        for (id, (prompt, drawn)) in ids.iter().zip(prompts.iter().zip(drawn)) {
            let all = [vec![drawn.token], output[id].clone()].concat();
            assert_eq!(all, alone(prompt, 3));
        }
    }
}

#[test]
fn what_a_step_did_not_compute_is_found_by_nobody() {
    let mut scheduler = scheduler(40, 4, 100);
    scheduler.record_events();
    let mut device = Device::default();
    let prompt = [1; 14];
    let first = scheduler.submit(submission(&prompt, 2)).unwrap();
    let second = scheduler.submit(submission(&prompt, 2)).unwrap();
    let fetched = scheduler.submit_fetched(submission(&[3; 9], 2), None, 0).unwrap();
    let batch = scheduler.schedule();
    scheduler.cancel(first);
    scheduler.abandon(&batch);
    scheduler.check_invariants();
    assert_eq!((scheduler.stats().cached_blocks, scheduler.stats().running), (0, 0));
    let mut follower = Follower::default();
    follower.follow(scheduler.take_events(), scheduler.root);
    assert!(follower.tokens.is_empty());
    let output = finish(&mut scheduler, &mut device);
    assert_eq!(output.len(), 2);
    assert_eq!((&output[&second], &output[&fetched]), (&alone(&prompt, 2), &alone(&[3; 9], 2)));
}

#[test]
fn what_was_fetched_is_of_no_use_without_what_comes_before_it() {
    let prompt: Vec<TokenId> = (0..10).collect();
    for is_evicted in [false, true] {
        let capacity = KvCapacity { block_tokens: BLOCK_TOKENS, blocks: 20 };
        let mut scheduler = Scheduler::new(capacity, SchedulerLimits::mixed(4, 16), 5);
        let mut device = Device::default();
        scheduler.submit(submission(&prompt[..5], 1)).unwrap();
        let batch = scheduler.schedule();
        let drawn = device.forward(&batch);
        scheduler.commit(&batch, &drawn);
        assert_eq!(scheduler.cached_prefix_blocks(&prompt, None), 1);
        assert_eq!(scheduler.cached_prefix_blocks(&prompt, Some(b"salt")), 0);
        if is_evicted {
            scheduler.flush_cache();
        }
        scheduler.submit_fetched(submission(&prompt, 2), None, 1).unwrap();
        let batch = scheduler.schedule();
        let firsts: Vec<usize> = scheduler.arrivals().iter().map(|arrival| arrival.first).collect();
        let step = &batch.sequences[0];
        let stepped = (step.context_tokens, step.tokens.len(), step.decodes);
        if is_evicted {
            assert_eq!((firsts, stepped), (vec![], (0, 10, false)), "it computes its prompt itself");
        } else {
            assert_eq!((firsts, stepped), (vec![1], (9, 1, true)));
        }
        scheduler.check_invariants();
    }
}

#[test]
fn who_wants_an_adapter_without_a_place_waits_and_is_passed() {
    let limits = SchedulerLimits { max_adapters: 2, ..SchedulerLimits::mixed(16, 100) };
    let mut scheduler = Scheduler::new(KvCapacity { block_tokens: BLOCK_TOKENS, blocks: 64 }, limits, 5);
    let asked = [(Some(1), 2), (Some(2), 4), (Some(3), 4), (None, 4), (Some(2), 4)];
    let mut device = Device::default();
    let ids = asked.map(|(adapter, max_tokens)| {
        scheduler.submit(Submission { adapter, ..submission(&[7; 5], max_tokens) }).unwrap()
    });
    let mut step = || {
        let batch = scheduler.schedule();
        let drawn = device.forward(&batch);
        scheduler.commit(&batch, &drawn);
        batch.sequences.iter().map(|step| step.id).collect::<Vec<_>>()
    };
    assert_eq!(step(), [ids[0], ids[1], ids[3], ids[4]]);
    assert_eq!(step().len(), 4);
    let third = step();
    assert!(third.contains(&ids[2]) && !third.contains(&ids[0]), "the first has ended: {third:?}");
}
