//! Steps against a clock that stands still unless somebody moves it.

use std::sync::Mutex;

use worker_core::SamplingParams;
use worker_core::step::{SampleRequest, SequenceId};

use super::*;

/// A clock that tests move; waiting moves it to the deadline, and `oversleeps` further.
#[derive(Clone, Default)]
struct Hands(Arc<Mutex<(Duration, Duration)>>);

impl Hands {
    fn advance(&self, by: Duration) {
        self.0.lock().unwrap().0 += by;
    }

    fn oversleep(&self, by: Duration) {
        self.0.lock().unwrap().1 = by;
    }
}

impl Clock for Hands {
    fn now(&self) -> Duration {
        self.0.lock().unwrap().0
    }

    fn wait_until(&mut self, deadline: Duration) {
        let mut hands = self.0.lock().unwrap();
        if hands.0 < deadline {
            hands.0 = deadline + hands.1;
        }
    }
}

const STEP: Duration = Duration::from_millis(10);

/// A decode step takes 10 ms, whatever is in it.
fn backend(time_scale: f64) -> (TimingBackend<Hands>, Hands, Arc<Lateness>) {
    let timing = EngineTiming {
        decode_s: STEP.as_secs_f64(),
        sequence_s: 0.0,
        crowd_s: 0.0,
        context_token_s: 0.0,
        prefill_s: 0.02,
        prefill_token_s: 0.0,
        prefill_pair_s: 0.0,
        request_s: 0.0,
    };
    let (hands, lateness) = (Hands::default(), Arc::new(Lateness::default()));
    let capacity = KvCapacity { block_tokens: 16, blocks: 4 };
    let words: Arc<[u32]> = (100..200).collect();
    let pace = Pace { timing, time_scale };
    let backend = TimingBackend::new(pace, capacity, words, Arc::clone(&lateness), hands.clone());
    (backend, hands, lateness)
}

fn decode(id: u64, token: u32, position: usize, params: SamplingParams) -> SequenceStep {
    SequenceStep {
        id: SequenceId(id),
        tokens: [token].into_iter().collect(),
        context_tokens: position,
        decodes: true,
        block_table: [worker_core::step::BlockId(0)].into_iter().collect(),
        sample: Some(SampleRequest { params: Arc::new(params), generated_tokens: 1, history: None }),
    }
}

fn batch() -> Batch {
    Batch { sequences: vec![decode(1, 5, 3, SamplingParams::greedy())] }
}

#[test]
fn what_happens_between_steps_does_not_add_up() {
    let (mut backend, hands, lateness) = backend(1.0);
    hands.oversleep(Duration::from_millis(1));
    for steps in 1..=100 {
        backend.forward(&batch()).unwrap();
        assert_eq!(hands.now(), STEP * steps + Duration::from_millis(1));
        hands.advance(Duration::from_millis(2));
    }
    let summary = lateness.summary();
    assert_eq!((summary.steps, summary.max_ms), (100, 1.0), "late by what was overslept, each time");
}

#[test]
fn after_a_pause_a_step_begins_when_there_is_work() {
    let (mut backend, hands, lateness) = backend(1.0);
    backend.forward(&batch()).unwrap();
    backend.idle();
    hands.advance(Duration::from_millis(3));
    backend.forward(&batch()).unwrap();
    assert_eq!(hands.now(), 2 * STEP + Duration::from_millis(3));
    assert_eq!(lateness.summary().max_ms, 0.0);
}

#[test]
fn missed_steps_are_made_up_for_unless_the_machine_stood_still() {
    let (mut backend, hands, lateness) = backend(1.0);
    backend.forward(&batch()).unwrap();
    hands.advance(Duration::from_millis(25));
    for expected_ms in [35, 35, 40] {
        backend.forward(&batch()).unwrap();
        assert_eq!(hands.now(), Duration::from_millis(expected_ms));
    }
    assert_eq!(lateness.summary().max_ms, 15.0);
    hands.advance(Duration::from_secs(60));
    backend.forward(&batch()).unwrap();
    assert_eq!(hands.now(), Duration::from_millis(60_050));
    assert_eq!(lateness.summary().max_ms, 15.0, "the steps it missed are not counted as late");
}

#[test]
fn the_time_scale_stretches_steps() {
    let (mut backend, hands, _) = backend(0.5);
    backend.forward(&batch()).unwrap();
    assert_eq!(hands.now(), STEP / 2);
}

#[test]
fn words_depend_on_the_sequence_alone_and_on_the_seed_unless_greedy() {
    let (mut backend, _, _) = backend(1.0);
    let seeded = |seed| SamplingParams { temperature: 1.0, seed, ..SamplingParams::greedy() };
    let greedy = |seed| SamplingParams { seed, ..SamplingParams::greedy() };
    let mut draw = |steps: Vec<SequenceStep>| -> Vec<u32> {
        backend.forward(&Batch { sequences: steps }).unwrap().iter().map(|next| next.token).collect()
    };
    let together =
        draw(vec![decode(1, 5, 3, greedy(1)), decode(2, 5, 3, greedy(2)), decode(3, 6, 3, greedy(1))]);
    assert_eq!(together[0], together[1]);
    assert_eq!(draw(vec![decode(9, 6, 3, greedy(8))]), [together[2]]);
    let drawn: std::collections::HashSet<_> =
        (0..50).flat_map(|seed| draw(vec![decode(1, 5, 3, seeded(seed))])).collect();
    assert!(drawn.len() > 20 && drawn.iter().all(|token| (100..200).contains(token)));
}

#[test]
fn a_chunk_that_does_not_sample_draws_nothing() {
    let (mut backend, hands, _) = backend(1.0);
    let silent = SequenceStep { sample: None, decodes: false, ..decode(1, 5, 0, SamplingParams::greedy()) };
    assert_eq!(backend.forward(&Batch { sequences: vec![silent] }).unwrap(), []);
    assert_eq!(hands.now(), Duration::from_millis(20), "it is prefill");
}

#[test]
fn what_min_tokens_withholds_is_not_drawn_before() {
    let (mut backend, ..) = backend(1.0);
    let drawn = |backend: &mut TimingBackend<Hands>, withheld: Vec<u32>, min_tokens| {
        let params = SamplingParams { min_tokens, withheld_tokens: withheld, ..SamplingParams::greedy() };
        // It has generated one token.
        backend.forward(&Batch { sequences: vec![decode(1, 5, 3, params)] }).unwrap()[0].token
    };
    let free = drawn(&mut backend, Vec::new(), 9);
    let other = drawn(&mut backend, vec![free], 9);
    assert_ne!(other, free);
    assert!((100..200).contains(&other));
    let third = drawn(&mut backend, vec![free, other], 9);
    assert!(third != free && third != other);
    assert_eq!(drawn(&mut backend, vec![free], 1), free, "it has as many as it must");
    let all_but_one: Vec<u32> = (100..200).filter(|word| *word != 150).collect();
    assert_eq!(drawn(&mut backend, all_but_one, 9), 150);
}
