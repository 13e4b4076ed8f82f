//! Prompts that begin alike and come together.

use super::*;
use crate::request::{Leg, RequestView};
use roundhouse_types::BlockHash;

const BLOCK_TOKENS: usize = 100;
/// A block takes 40 ms, and 4 s are enough.
const SPEED: PrefillSpeed = PrefillSpeed { fixed_s: 0.02, token_s: 4e-4, pair_s: 0.0, surprise: 0.0 };

/// A worker whose first tokens are seen, and the blocks that it has or is to compute.
struct Known {
    queue: PrefillQueue,
    has: Vec<Vec<u64>>,
}

impl Known {
    fn new() -> Self {
        let mut queue = PrefillQueue::default();
        for ticket in 1_000..1_032 {
            queue.push(ticket, streamed(Prefill { new_tokens: 1, cached_tokens: 0 }), &SPEED, Duration::ZERO);
            queue.first_token(ticket, Duration::ZERO, &SPEED);
        }
        Self { queue, has: Vec::new() }
    }

    /// A prompt of these blocks, each of which stands for those before it too, is to be sent at `now_s`. Whether it waits in line.
    fn comes(&mut self, ticket: u64, prompt: &[u64], leg: Leg, now_s: f64) -> bool {
        let blocks: Vec<_> = prompt.iter().map(|block| BlockHash(*block)).collect();
        let prompt_tokens = blocks.len() * BLOCK_TOKENS;
        let request = RequestView {
            blocks: &blocks,
            block_tokens: Some(BLOCK_TOKENS),
            prompt_tokens,
            leg,
            ..RequestView::default()
        };
        let same = |other: &Vec<u64>| other.iter().zip(prompt).take_while(|(one, two)| one == two).count();
        let hit_blocks = self.has.iter().map(same).max().unwrap_or(0);
        let cached_tokens = hit_blocks * BLOCK_TOKENS;
        let prefill = Prefill { new_tokens: (prompt_tokens - cached_tokens).max(1), cached_tokens };
        let siblings = self.queue.siblings(&request, hit_blocks, &SPEED);
        let asked = Asked { siblings, ..streamed(prefill) };
        let waits = self.queue.push_or_wait(ticket, (asked, now_s), &SPEED, seconds(now_s));
        if !waits {
            self.has.push(prompt.to_vec());
        }
        self.waits(ticket)
    }

    fn begins(&mut self, ticket: u64, now_s: f64) {
        self.queue.first_token(ticket, seconds(now_s), &SPEED);
    }

    fn waits(&mut self, ticket: u64) -> bool {
        self.queue.call();
        self.queue.waits(ticket, Waker::noop())
    }
}

#[test]
fn siblings_wait_until_the_first_of_them_is_in_a_step() {
    let mut worker = Known::new();
    assert!(!worker.comes(1, &[50], Leg::Whole, 1.0), "its step is being computed");
    assert!(!worker.comes(2, &[1, 2, 3, 4, 5], Leg::Whole, 1.01));
    assert!(worker.comes(3, &[1, 2, 3, 4, 6], Leg::Whole, 1.01), "they would be in the next step together");
    assert!(worker.comes(4, &[1, 2, 3, 4, 7], Leg::Whole, 1.02));
    assert!(!worker.comes(5, &[60], Leg::Whole, 1.02), "others pass");
    worker.begins(1, 1.15);
    assert!(!worker.waits(3) && !worker.waits(4), "the step after is theirs");
    assert!(!worker.comes(6, &[1, 2, 3, 4, 8], Leg::Whole, 1.2), "nobody waits for what is being computed");
}

#[test]
fn of_those_in_line_one_goes_first_as_well() {
    let mut worker = Known::new();
    for (ticket, block) in [(1, 50), (2, 60)] {
        let prompt: Vec<_> = (0..60).map(|number| block + 100 * number).collect();
        assert!(!worker.comes(ticket, &prompt, Leg::Whole, 1.0), "too much for another to be sent");
    }
    assert!(worker.comes(3, &[1, 2, 3], Leg::Whole, 1.1));
    assert!(worker.comes(4, &[1, 2, 3], Leg::Whole, 1.1));
    worker.begins(1, 5.0);
    worker.begins(2, 9.0);
    assert!(!worker.waits(3) && worker.waits(4));
}

#[test]
fn who_shares_little_does_not_wait() {
    let mut worker = Known::new();
    assert!(!worker.comes(1, &[50], Leg::Whole, 1.0));
    assert!(!worker.comes(2, &[1, 2], Leg::Whole, 1.0));
    worker.queue.remove(1);
    let small = PrefillSpeed { token_s: SPEED.token_s / 10.0, ..SPEED };
    let blocks = [1, 9].map(BlockHash);
    let request = RequestView {
        blocks: &blocks,
        block_tokens: Some(BLOCK_TOKENS),
        prompt_tokens: 200,
        ..RequestView::default()
    };
    let awaits = |speed| {
        let one = worker.queue.siblings(&request, 1, speed);
        let other = worker.queue.siblings(&RequestView { blocks: &blocks[..1], ..request }, 0, speed);
        one.awaits(&other)
    };
    assert!(awaits(&SPEED), "a block takes longer than a step's fixed part");
    assert!(!awaits(&small));
}

#[test]
fn what_does_not_fit_into_a_step_has_not_begun_with_it() {
    let mut worker = Known::new();
    assert!(!worker.comes(1, &[50], Leg::Whole, 1.0));
    let long: Vec<_> = (1..=79).map(|number| 100 * number).collect();
    assert!(!worker.comes(2, &long, Leg::Whole, 1.01) && !worker.comes(3, &[1, 2, 3], Leg::Whole, 1.02));
    worker.begins(1, 1.2);
    assert!(worker.comes(4, &[1, 2, 4], Leg::Whole, 1.3));
    worker.begins(2, 4.5);
    assert!(!worker.waits(4));
}

#[test]
fn who_finds_nobody_waiting_begins_after_a_step_of_those_that_decode() {
    let mut worker = Known::new();
    assert!(!worker.comes(1, &[1, 2, 3], Leg::Whole, 1.0));
    assert_eq!(worker.queue.begins_after(), Some(seconds(0.05)));
    assert!(worker.comes(2, &[1, 2, 4], Leg::Whole, 1.01));
    worker.queue.lapse(seconds(1.04));
    assert!(worker.waits(2));
    worker.queue.lapse(seconds(1.06));
    assert!(!worker.waits(2) && worker.queue.begins_after().is_none());
}

#[test]
fn nobody_waits_for_one_that_is_gone() {
    let mut worker = Known::new();
    assert!(!worker.comes(1, &[50], Leg::Whole, 1.0) && !worker.comes(2, &[1, 2, 3], Leg::Whole, 1.0));
    assert!(worker.comes(3, &[1, 2, 4], Leg::Whole, 1.0));
    worker.queue.remove(2);
    assert!(!worker.waits(3));
}

#[test]
fn what_comes_from_another_worker_is_not_waited_for() {
    let mut worker = Known::new();
    assert!(!worker.comes(1, &[50], Leg::Whole, 1.0) && !worker.comes(2, &[1, 2, 3], Leg::Decode, 1.0));
    assert!(!worker.comes(3, &[1, 2, 4], Leg::Whole, 1.0));
    assert!(!worker.comes(4, &[1, 2, 4, 5], Leg::Decode, 1.0), "nor does it wait");
}

#[test]
fn a_worker_whose_first_tokens_are_not_seen_gets_everything() {
    let mut worker = Known { queue: PrefillQueue::default(), has: Vec::new() };
    for ticket in 1..9 {
        assert!(!worker.comes(ticket, &[1, 2, 3, ticket], Leg::Whole, 1.0));
    }
}
