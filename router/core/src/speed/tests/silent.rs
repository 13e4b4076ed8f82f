//! Prompts without a first token that anybody sees.

use super::*;

const SPEED: PrefillSpeed = PrefillSpeed { fixed_s: 0.5, token_s: 0.01, pair_s: 0.0, surprise: 0.0 };

fn tokens(new_tokens: usize) -> Prefill {
    Prefill { new_tokens, cached_tokens: 0 }
}

fn push(queue: &mut PrefillQueue, ticket: u64, answer: Answer, now_s: f64) {
    queue.push(ticket, Asked { answer, ..streamed(tokens(100)) }, &SPEED, seconds(now_s));
}

fn left_s(queue: &mut PrefillQueue, now_s: f64) -> f64 {
    queue.lapse(seconds(now_s));
    queue.reading().left_s(now_s)
}

#[test]
fn they_are_computed_one_after_the_other() {
    let mut queue = PrefillQueue::default();
    (1..=3).for_each(|ticket| push(&mut queue, ticket, Answer::Whole, 10.0));
    assert_eq!(queue.reading().lapses_s, Some(11.5), "a second of its own, and the fixed part");
    for (now_s, expected_s) in [(10.0, 3.5), (11.4, 2.1), (11.6, 1.9), (12.4, 1.1), (13.4, 0.1), (20.0, 0.0)]
    {
        let left_s = left_s(&mut queue, now_s);
        assert!((left_s - expected_s).abs() < 1e-6, "{left_s} at {now_s}");
    }
    assert_eq!((queue.take_computed(), queue.take_computed()), ((3, 300), (0, 0)));
    assert!(
        queue.has_computed(2) && queue.whole_answer(2, seconds(18.0)).is_some_and(|one| one.seconds == 8.0)
    );
    push(&mut queue, 4, Answer::Whole, 20.0);
    assert_eq!(queue.reading().lapses_s, Some(21.5), "it found an idle worker");
}

#[test]
fn one_that_comes_later_is_not_computed_before_it_comes() {
    let mut queue = PrefillQueue::default();
    push(&mut queue, 1, Answer::Whole, 10.0);
    push(&mut queue, 2, Answer::Whole, 11.2);
    assert!((left_s(&mut queue, 11.6) - 1.1).abs() < 1e-6, "the first should have ended at 11.5");
    assert_eq!(queue.reading().lapses_s, Some(12.7));
}

#[test]
fn a_stream_behind_them_begins_when_they_should_have_ended() {
    let mut queue = PrefillQueue::default();
    push(&mut queue, 1, Answer::Whole, 10.0);
    push(&mut queue, 2, Answer::Streamed, 10.0);
    push(&mut queue, 3, Answer::Whole, 10.0);
    assert!((left_s(&mut queue, 12.0) - 1.5).abs() < 1e-6);
    assert_eq!(queue.reading().lapses_s, None, "its first token will tell");
    assert!((left_s(&mut queue, 30.0) - 1.0).abs() < 1e-6, "late as it is, the last one has not begun");
    assert_eq!(queue.first_token(2, seconds(31.0), &SPEED), None);
    assert_eq!(queue.reading().lapses_s, Some(32.5));
}

#[test]
fn a_first_token_says_that_those_before_it_have_been_computed_and_teaches_with_their_tokens() {
    let mut queue = PrefillQueue::default();
    push(&mut queue, 1, Answer::Whole, 10.0);
    push(&mut queue, 2, Answer::Whole, 10.0);
    push(&mut queue, 3, Answer::Streamed, 10.0);
    queue.lapse(seconds(11.6));
    assert_eq!(queue.first_token(3, seconds(11.7), &SPEED), None, "it has not ended yet");
    assert_eq!((queue.take_computed(), queue.reading().owed_s), ((2, 200), 0.0));
    push(&mut queue, 4, Answer::Streamed, 20.0);
    let observation = queue.first_token(4, seconds(21.0), &SPEED).unwrap();
    assert!((observation.seconds - 1.7).abs() < 1e-9);
    assert_eq!((observation.new_tokens, observation.pairs), (300.0, 15_000.0));
}

#[test]
fn a_whole_answer_says_the_same_of_those_before_it() {
    let mut queue = PrefillQueue::default();
    (1..=3).for_each(|ticket| push(&mut queue, ticket, Answer::Whole, 10.0));
    assert!(queue.whole_answer(2, seconds(10.1)).is_some());
    assert!(queue.has_computed(1) && !queue.has_computed(3));
    assert!((left_s(&mut queue, 10.1) - 1.4).abs() < 1e-6);
}

#[test]
fn no_more_are_remembered_than_wait() {
    let mut queue = PrefillQueue::default();
    for ticket in 0..10_000 {
        push(&mut queue, ticket, Answer::Whole, ticket as f64 * 10.0);
    }
    assert_eq!(queue.take_computed().0, 4_096);
    let left = (0..10_000).filter_map(|ticket| queue.remove(ticket)).count();
    assert_eq!(left, 2 * 4_096, "computed, and waiting");
    assert_eq!(queue.reading().owed_s, 0.0);
}
