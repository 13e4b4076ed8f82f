//! What is learned, from workers whose speed is known.

mod siblings;
mod silent;

use std::task::Waker;

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use super::*;
use crate::adapters::Adapter;
use crate::precedence::Precedence;
use crate::request::Answer;

const TRUTH: PrefillSpeed = PrefillSpeed { fixed_s: 0.05, token_s: 2e-4, pair_s: 5e-9, surprise: 0.0 };

fn seconds(value: f64) -> Duration {
    Duration::from_secs_f64(value)
}

/// A prompt of the model itself, whose first token will be seen.
fn streamed(prefill: Prefill) -> Asked {
    Asked {
        prefill,
        answer: Answer::Streamed,
        adapter: None,
        siblings: Siblings::default(),
        whose: Precedence::default(),
    }
}

fn draw(rng: &mut SmallRng) -> Prefill {
    Prefill { new_tokens: rng.random_range(50..8_000), cached_tokens: rng.random_range(0..8_000) }
}

fn whole_s(speed: &PrefillSpeed, prefill: Prefill) -> f64 {
    speed.fixed_s + speed.seconds(prefill)
}

/// Sends two workers prompts to compute, one after the other; the second is `slowness` times slower.
fn two_workers(slowness: f64, requests: u64) -> (Speeds, [PrefillQueue; 2]) {
    let (mut speeds, mut queues) = (Speeds::default(), [PrefillQueue::default(), PrefillQueue::default()]);
    let mut rng = SmallRng::seed_from_u64(1);
    let mut clocks = [0.0, 0.0];
    for ticket in 0..requests {
        for (at, queue) in queues.iter_mut().enumerate() {
            let prefill = draw(&mut rng);
            let speed = speeds.prefill();
            queue.push(ticket, streamed(prefill), &speed, seconds(clocks[at]));
            clocks[at] += whole_s(&TRUTH, prefill) * if at == 1 { slowness } else { 1.0 };
            if let Some(observation) = queue.first_token(ticket, seconds(clocks[at]), &speed) {
                speeds.learn(&observation);
            }
        }
    }
    (speeds, queues)
}

#[test]
fn learns_the_speed_of_an_engine_it_has_never_seen() {
    let (speeds, queues) = two_workers(1.0, 500);
    for (new_tokens, cached_tokens) in [(200, 0), (4_000, 0), (1_000, 7_000)] {
        let prefill = Prefill { new_tokens, cached_tokens };
        let learned = whole_s(&speeds.prefill(), prefill) * f64::from(queues[0].reading().ratio);
        let truth = whole_s(&TRUTH, prefill);
        assert!((learned / truth - 1.0).abs() < 0.1, "{new_tokens}+{cached_tokens}: {learned} for {truth}");
    }
}

/// A fleet that has just begun, with prompts of about one length: at first two of them were computed between two first tokens, and those
/// happened to be short.
#[test]
fn what_cannot_be_told_apart_keeps_its_usual_shape() {
    let mut speeds = Speeds::default();
    let doubled = [8_299.0, 8_342.0, 8_437.0, 8_245.0].map(|new_tokens| (new_tokens, 1.12));
    let single = [8_632.0, 8_583.0, 8_849.0, 8_485.0, 8_275.0, 8_538.0, 8_839.0, 8_801.0];
    for (new_tokens, seconds) in doubled.into_iter().chain(single.map(|new_tokens| (new_tokens, 0.56))) {
        speeds.learn(&Observation { seconds, new_tokens, pairs: new_tokens * new_tokens / 2.0, ratio: 1.0 });
        let prompt = |new_tokens| speeds.prefill().seconds(Prefill { new_tokens, cached_tokens: 0 });
        assert!((0.4..1.2).contains(&prompt(8_500)), "{} {:?}", prompt(8_500), speeds.prefill());
        assert!((0.01..0.06).contains(&prompt(400)), "{} {:?}", prompt(400), speeds.prefill());
    }
}

/// Prompts that differ little, with waits that have nothing to do with them, told for hours.
#[test]
fn what_is_learned_does_not_drift_away() {
    let (mut speeds, mut rng) = (Speeds::default(), SmallRng::seed_from_u64(7));
    for _ in 0..60_000 {
        let prefill = Prefill { new_tokens: rng.random_range(20..400), cached_tokens: 0 };
        let wait_s = if rng.random_bool(0.3) { rng.random_range(0.0..0.2) } else { 0.0 };
        speeds.learn(&Observation {
            seconds: whole_s(&TRUTH, prefill) + wait_s,
            new_tokens: prefill.new_tokens as f64,
            pairs: prefill.pairs(),
            ratio: 1.0,
        });
        let learned = speeds.prefill();
        let expected_s = whole_s(&learned, Prefill { new_tokens: 200, cached_tokens: 0 });
        assert!((0.05..0.4).contains(&expected_s), "{learned:?}");
    }
}

#[test]
fn a_router_that_lives_long_still_knows_its_engine() {
    let (mut rng, mut speeds) = (SmallRng::seed_from_u64(2), Speeds::default());
    let kinds: [fn(&mut SmallRng) -> Prefill; 3] = [
        |_| Prefill { new_tokens: 1_000, cached_tokens: 0 },
        |rng| Prefill { new_tokens: rng.random_range(900..1_100), cached_tokens: 0 },
        draw,
    ];
    for (kind, number) in kinds.iter().flat_map(|kind| (0..40_000).map(move |number| (kind, number))) {
        let prefill = kind(&mut rng);
        let seconds = whole_s(&TRUTH, prefill) * rng.random_range(0.85..1.15);
        let new_tokens = prefill.new_tokens as f64;
        speeds.learn(&Observation { seconds, new_tokens, pairs: prefill.pairs(), ratio: 1.0 });
        if number > 2_000 {
            let off = whole_s(&speeds.prefill(), prefill) / whole_s(&TRUTH, prefill);
            assert!((0.6..1.6).contains(&off), "observation {number}: {off} times as long");
        }
    }
}

#[test]
fn tells_a_slow_worker_from_a_fast_one() {
    let (_, queues) = two_workers(3.0, 200);
    let apart = queues[1].reading().ratio / queues[0].reading().ratio;
    assert!((2.8..3.2).contains(&apart), "{apart} times slower");
}

#[test]
fn a_worker_that_slows_is_known_within_some_ten_requests() {
    let (mut speeds, [mut queue, _]) = two_workers(1.0, 100);
    let expected_s = |speeds: &Speeds, queue: &PrefillQueue| {
        let prefill = Prefill { new_tokens: 2_000, cached_tokens: 0 };
        f64::from(queue.reading().ratio) * whole_s(&speeds.prefill(), prefill)
    };
    let before_s = expected_s(&speeds, &queue);
    let mut clock_s = 1e6;
    for ticket in 1_000..1_015 {
        let prefill = Prefill { new_tokens: 2_000, cached_tokens: 0 };
        let speed = speeds.prefill();
        queue.push(ticket, streamed(prefill), &speed, seconds(clock_s));
        clock_s += 4.0 * whole_s(&TRUTH, prefill);
        if let Some(observation) = queue.first_token(ticket, seconds(clock_s), &speed) {
            speeds.learn(&observation);
        }
    }
    let slower = expected_s(&speeds, &queue) / before_s;
    assert!((2.5..4.5).contains(&slower), "{slower} times slower");
}

#[test]
fn a_worker_that_is_well_again_is_forgiven_within_a_few_requests() {
    let (mut speeds, [_, mut queue]) = two_workers(4.0, 100);
    assert!(queue.reading().ratio > 2.0);
    let mut clock_s = 1e6;
    for ticket in 1_000..1_005 {
        let prefill = Prefill { new_tokens: 2_000, cached_tokens: 0 };
        let speed = speeds.prefill();
        queue.push(ticket, streamed(prefill), &speed, seconds(clock_s));
        clock_s += whole_s(&TRUTH, prefill);
        if let Some(observation) = queue.first_token(ticket, seconds(clock_s), &speed) {
            speeds.learn(&observation);
        }
    }
    assert_eq!(queue.reading().ratio, 1.0);
}

/// A worker of the fleet's speed, at which every third request waits for memory for a long time.
#[test]
fn waiting_for_memory_is_not_taken_for_slowness() {
    let (mut speeds, [_, mut queue]) = two_workers(1.0, 100);
    let mut clock_s = 1e6;
    for ticket in 1_000..1_100 {
        let prefill = Prefill { new_tokens: 2_000, cached_tokens: 0 };
        let speed = speeds.prefill();
        queue.push(ticket, streamed(prefill), &speed, seconds(clock_s));
        clock_s += whole_s(&TRUTH, prefill) + if ticket % 3 == 0 { 5.0 } else { 0.0 };
        if let Some(observation) = queue.first_token(ticket, seconds(clock_s), &speed) {
            speeds.learn(&observation);
        }
        assert_eq!(queue.reading().ratio, 1.0);
    }
}

#[test]
fn a_head_that_is_late_is_expected_to_be_as_late_again() {
    let (mut queue, speed) =
        (PrefillQueue::default(), PrefillSpeed { fixed_s: 0.5, ..PrefillSpeed::default() });
    let prefill = Prefill { new_tokens: 0, cached_tokens: 0 };
    let stream = |queue: &mut PrefillQueue, ticket| {
        queue.push(ticket, streamed(prefill), &speed, seconds(1.0));
        queue.first_token(ticket, seconds(1.1), &speed);
    };
    (0..20).for_each(|ticket| stream(&mut queue, ticket));
    queue.push(50, streamed(prefill), &speed, seconds(10.0));
    let left = |queue: &PrefillQueue, at: f64| queue.reading().left_s(at);
    assert!((left(&queue, 10.2) - 0.3).abs() < 1e-6);
    assert!((left(&queue, 13.0) - 2.5).abs() < 1e-6, "2.5 s late");
    // Where answers come whole, late first tokens say nothing.
    queue.push(51, streamed(prefill), &speed, seconds(10.0));
    queue.whole_answer(51, seconds(12.0));
    assert_eq!(left(&queue, 13.0), 0.0);
    queue.remove(50);
    assert_eq!(left(&queue, 13.0), 0.0);
}

#[test]
fn what_the_first_request_has_had_is_not_owed_any_more() {
    let mut queue = PrefillQueue::default();
    let speed = PrefillSpeed { fixed_s: 0.5, token_s: 0.1, pair_s: 0.0, surprise: 0.0 };
    let tokens = |new_tokens| Prefill { new_tokens, cached_tokens: 0 };
    queue.push(1, streamed(tokens(20)), &speed, seconds(10.0));
    queue.push(2, streamed(tokens(30)), &speed, seconds(11.0));
    assert!(queue.reading().joins_step, "the second will be in another step");
    let left = |at: f64| queue.reading().left_s(at);
    assert!((left(11.0) - 4.5).abs() < 1e-6);
    assert!((left(30.0) - 3.0).abs() < 1e-6, "late as the first is, the second has not begun");
    queue.push(3, streamed(tokens(30)), &speed, seconds(12.0));
    queue.remove(2);
    assert!(queue.reading().joins_step, "the third is left");
    queue.remove(3);
    assert!(!queue.reading().joins_step, "nobody has come since the first began");
    queue.remove(1);
    assert_eq!(queue.reading().left_s(30.0), 0.0);
}

#[test]
fn what_a_worker_takes_while_it_computes_for_others_teaches_nothing() {
    let speed = PrefillSpeed::default();
    let mut queue = PrefillQueue::default();
    for ticket in 0..5 {
        queue.push(ticket, streamed(Prefill { new_tokens: 1_000, cached_tokens: 0 }), &speed, Duration::ZERO);
    }
    let first_token = |queue: &mut PrefillQueue, ticket: u64| {
        queue.first_token(ticket, Duration::from_secs(ticket + 1), &speed).is_some()
    };
    assert!(!first_token(&mut queue, 0), "when it ended is known with the next one");
    assert!(first_token(&mut queue, 1));
    queue.shared(Duration::from_millis(2_500));
    assert!(first_token(&mut queue, 2), "of the interval before");
    assert!(!first_token(&mut queue, 3), "of the one in which others had prompts there");
    assert!(first_token(&mut queue, 4));
}

#[test]
fn first_tokens_of_one_step_are_one_observation() {
    let (mut queue, speed) = (PrefillQueue::default(), PrefillSpeed::default());
    let prefill = Prefill { new_tokens: 100, cached_tokens: 0 };
    for ticket in 1..=3 {
        queue.push(ticket, streamed(prefill), &speed, seconds(1.0));
    }
    assert_eq!(queue.first_token(1, seconds(2.0), &speed), None);
    assert_eq!(queue.first_token(2, seconds(2.001), &speed), None);
    let observation = queue.first_token(3, seconds(3.0), &speed).unwrap();
    assert_eq!((observation.seconds, observation.new_tokens), (1.0, 200.0));
    assert_eq!(queue.first_token(7, seconds(4.0), &speed), None, "a ticket that is not there");
}

/// What a fleet that never streams has learned after 300 prompts of 250 tokens, each answered after `answer_s`.
fn learned_from_whole_answers(answer_s: f64) -> f64 {
    let (mut speeds, mut queue) = (Speeds::default(), PrefillQueue::default());
    let prefill = Prefill { new_tokens: 250, cached_tokens: 0 };
    for ticket in 0..300 {
        queue.push(ticket, streamed(prefill), &speeds.prefill(), seconds(10.0));
        let answer = queue.whole_answer(ticket, seconds(10.0 + answer_s)).unwrap();
        speeds.learn_whole(&answer);
    }
    assert_eq!(queue.reading().left_s(11.0), 0.0, "nothing waits");
    whole_s(&speeds.prefill(), prefill)
}

#[test]
fn whole_answers_teach_only_that_prefill_took_no_longer() {
    let prefill = Prefill { new_tokens: 250, cached_tokens: 0 };
    assert_eq!(learned_from_whole_answers(8.0), whole_s(&PrefillSpeed::default(), prefill), "most is output");
    let learned = learned_from_whole_answers(0.001);
    assert!(
        (0.0007..0.0013).contains(&learned),
        "{learned} s for an engine that answers within a millisecond"
    );
}

#[test]
fn arrivals_are_counted_from_the_first_on_and_forgotten() {
    let mut arrivals = Arrivals::default();
    assert_eq!(arrivals.per_second(seconds(5.0)), 0.0);
    for number in 0..50 {
        arrivals.add(seconds(100.0 + f64::from(number) * 0.2), 1.0);
    }
    let rate = |arrivals: &Arrivals| arrivals.per_second(arrivals.last);
    assert!((4.0..6.5).contains(&rate(&arrivals)), "{}", rate(&arrivals));
    for number in 0..50 {
        arrivals.add(seconds(110.0 + f64::from(number) * 4.0), 1.0);
    }
    assert!((0.2..0.35).contains(&rate(&arrivals)), "{}", rate(&arrivals));
    assert!(arrivals.per_second(seconds(1_000.0)) < 1e-6, "it is long ago");
}

const LONG: Prefill = Prefill { new_tokens: 60_000, cached_tokens: 0 };
const SHORT: Prefill = Prefill { new_tokens: 100, cached_tokens: 0 };

/// A worker whose first tokens have been seen, with nothing to do.
fn telling() -> (PrefillQueue, PrefillSpeed) {
    let (mut queue, speed) = (PrefillQueue::default(), PrefillSpeed::default());
    for ticket in 0..40 {
        queue.push(ticket, streamed(SHORT), &speed, seconds(1.0));
        queue.first_token(ticket, seconds(2.0), &speed);
    }
    (queue, speed)
}

fn enter(queue: &mut PrefillQueue, ticket: u64, prefill: Prefill, speed: &PrefillSpeed) -> bool {
    queue.push_or_wait(ticket, (streamed(prefill), 3.0), speed, seconds(3.0))
}

#[test]
fn a_worker_that_has_enough_to_compute_gets_no_more_until_a_first_token_comes() {
    let (mut queue, speed) = telling();
    let waits: Vec<bool> = (100..104).map(|ticket| enter(&mut queue, ticket, LONG, &speed)).collect();
    assert_eq!(waits, [false, false, true, true]);
    assert!(enter(&mut queue, 104, SHORT, &speed));
    let reading = queue.reading();
    let long_s = speed.seconds(LONG) as f32;
    assert!((reading.line_s - 2.0 * long_s).abs() < 0.1 && reading.owed_s > 4.0 * long_s);
    assert!(queue.call().is_empty() && queue.in_line() == 3);
    queue.first_token(100, seconds(5.0), &speed);
    let waker = std::task::Waker::noop();
    assert!(queue.waits(104, waker) && queue.waits(102, waker));
    assert_eq!(queue.call().len(), 1, "one there, one to come");
    assert!(!queue.waits(104, waker) && queue.waits(102, waker), "the short one goes first");
    queue.goes(104, seconds(5.0));
    queue.remove(102);
    queue.remove(103);
    assert_eq!((queue.in_line(), queue.reading().line_s), (0, 0.0));
}

/// How many prompts of 100 tokens a worker is sent before one waits.
fn sent_at_once(queue: &mut PrefillQueue, speed: &PrefillSpeed) -> usize {
    (100..1_000).take_while(|ticket| !enter(queue, *ticket, SHORT, speed)).count()
}

#[test]
fn a_worker_is_sent_two_usual_steps_of_short_prompts() {
    let (mut queue, speed) = telling();
    let sent = sent_at_once(&mut queue, &speed);
    assert!((160..=165).contains(&sent), "16,384 tokens of them: {sent}");
}

#[test]
fn short_prompts_are_not_held_back_where_tokens_seem_to_take_no_time() {
    let (mut queue, speed) = telling();
    let sent = sent_at_once(&mut queue, &PrefillSpeed { token_s: 0.0, ..speed });
    assert_eq!(sent, 900, "all of them");
}

#[test]
fn a_slow_worker_and_one_with_little_memory_are_sent_four_seconds() {
    let (mut queue, speed) = telling();
    let slow = PrefillSpeed { token_s: 10.0 * speed.token_s, ..speed };
    let sent = sent_at_once(&mut queue, &slow);
    assert!((60..=70).contains(&sent), "60 ms each: {sent}");
    let (mut queue, speed) = telling();
    queue.may_add(CacheRoom { each: 1_000_000, all: Some(1_000_000) });
    let sent = sent_at_once(&mut queue, &speed);
    assert!((600..=700).contains(&sent), "6 ms each: {sent}");
}

#[test]
fn a_worker_that_tells_of_no_first_tokens_gets_everything() {
    let (mut queue, speed) = (PrefillQueue::default(), PrefillSpeed::default());
    assert!((0..50).all(|ticket| !enter(&mut queue, ticket, LONG, &speed)));
    let (mut queue, speed) = telling();
    for ticket in 100..140 {
        queue.push(ticket, streamed(SHORT), &speed, seconds(3.0));
        queue.whole_answer(ticket, seconds(4.0));
    }
    assert!((200..250).all(|ticket| !enter(&mut queue, ticket, LONG, &speed)), "answers come whole");
}

#[test]
fn what_answers_whole_makes_nobody_wait_once_a_later_one_has_its_first_token() {
    let (mut queue, speed) = telling();
    // The first of them will tell of its prefill with its whole answer.
    assert!(!enter(&mut queue, 100, LONG, &speed) && !enter(&mut queue, 101, LONG, &speed));
    assert!(enter(&mut queue, 102, LONG, &speed));
    queue.first_token(101, seconds(5.0), &speed);
    queue.call();
    assert_eq!(queue.in_line(), 0);
    assert!(!enter(&mut queue, 103, LONG, &speed), "102 is the only one there");
    queue.whole_answer(100, seconds(9.0));
    assert!(enter(&mut queue, 104, LONG, &speed), "102 and 103 are");
}

/// Adds prompts of `new_tokens` each to a queue whose requests may add 1,000 together; which of them wait.
fn bounded(queue: &mut PrefillQueue, prompts: &[(u64, usize)], now_s: f64) -> Vec<bool> {
    let speed = PrefillSpeed { fixed_s: 0.0, token_s: 1e-3, pair_s: 0.0, surprise: 0.0 };
    let mut push = |(ticket, new_tokens): &(u64, usize)| {
        let prefill = Prefill { new_tokens: *new_tokens, cached_tokens: 0 };
        queue.may_add(CacheRoom { each: 500, all: Some(1_000) });
        let waits = queue.push_or_wait(*ticket, (streamed(prefill), 0.0), &speed, seconds(now_s));
        queue.adds((*new_tokens).min(500));
        queue.call();
        waits && queue.waits(*ticket, Waker::noop())
    };
    prompts.iter().map(&mut push).collect()
}

#[test]
fn prompts_wait_while_those_under_way_add_enough_to_the_cache() {
    let mut queue = PrefillQueue::default();
    let waits = bounded(&mut queue, &[(1, 400), (2, 300), (3, 400), (4, 50), (5, 280)], 1.0);
    assert_eq!(waits, [false, false, true, false, true], "what is mostly cached passes");
    queue.remove(1);
    queue.call();
    assert_eq!(queue.in_line(), 2, "until its last token it holds its memory");
    queue.over(0, 400, None);
    queue.call();
    assert_eq!(queue.in_line(), 1, "the one that is due first");
    queue.over(0, 300, None);
    queue.call();
    assert_eq!(queue.in_line(), 0);
}

#[test]
fn a_prompt_that_fills_the_cache_goes_with_half_of_what_may_be_added_left() {
    let mut queue = PrefillQueue::default();
    assert_eq!(
        bounded(&mut queue, &[(1, 400), (2, 90_000), (3, 100), (4, 200)], 1.0),
        [false, false, false, true]
    );
}

#[test]
fn nobody_waits_for_memory_much_longer_than_it_computes() {
    let mut queue = PrefillQueue::default();
    assert_eq!(bounded(&mut queue, &[(1, 1_000), (2, 490), (3, 500)], 3.0), [false, false, true]);
    assert_eq!(queue.remove(3).map(|prefill| prefill.new_tokens), Some(500));
    queue.over(0, 500, None);
    assert_eq!(bounded(&mut queue, &[(3, 500)], 4.1), [false], "0.5 s of its own, and it came 4.1 s ago");
}

#[test]
fn prompts_whose_adapter_has_no_place_wait_and_are_passed() {
    let speed = PrefillSpeed { fixed_s: 0.0, token_s: 1e-3, pair_s: 0.0, surprise: 0.0 };
    let [one, two, three] = ["one", "two", "three"].map(Adapter::named);
    let mut queue = PrefillQueue::default();
    let push = |queue: &mut PrefillQueue, ticket: u64, adapter: Option<Adapter>| {
        let asked = Asked { adapter, ..streamed(Prefill { new_tokens: 100, cached_tokens: 0 }) };
        let waits = queue.push_or_wait(ticket, (asked, 0.0), &speed, seconds(1.0));
        queue.call();
        waits && queue.waits(ticket, Waker::noop())
    };
    queue.set_adapter_places(2);
    let asked = [(1, Some(one)), (2, Some(two)), (3, Some(three)), (4, Some(one)), (5, None), (6, Some(two))];
    let waits = asked.map(|(ticket, adapter)| push(&mut queue, ticket, adapter));
    assert_eq!(waits, [false, false, true, false, false, false]);
    let waits_for = |queue: &PrefillQueue, adapter| queue.adapter_outlook(adapter).waits_for;
    assert_eq!([one, two, three].map(|adapter| waits_for(&queue, adapter)), [0, 0, 2]);
    assert_eq!(waits_for(&queue, Adapter::named("four")), 2, "after the third, when both have gone");
    queue.over(3, 0, Some(three));
    queue.remove(3);
    assert!(push(&mut queue, 3, Some(three)), "who was in line had no place");
    for ticket in [1, 4] {
        queue.first_token(ticket, seconds(2.0), &speed);
        queue.call();
        assert_eq!(queue.in_line(), 1, "it is computed still");
        queue.over(ticket, 0, Some(one));
        queue.call();
    }
    assert_eq!((queue.in_line(), waits_for(&queue, three)), (0, 0));
}

#[test]
fn whoever_has_waited_long_for_a_place_gets_the_one_that_has_the_fewest_requests() {
    let speed = PrefillSpeed { fixed_s: 0.0, token_s: 1e-3, pair_s: 0.0, surprise: 0.0 };
    let [one, two, three] = ["one", "two", "three"].map(Adapter::named);
    let mut queue = PrefillQueue::default();
    let push = |queue: &mut PrefillQueue, ticket: u64, adapter: Adapter, now_s: f64| {
        let adapter = Some(adapter);
        let asked = Asked { adapter, ..streamed(Prefill { new_tokens: 100, cached_tokens: 0 }) };
        let waits = queue.push_or_wait(ticket, (asked, now_s), &speed, seconds(now_s));
        queue.call();
        waits && queue.waits(ticket, Waker::noop())
    };
    queue.set_adapter_places(2);
    let waits =
        [(1, one), (2, two), (3, two), (4, three)].map(|(ticket, name)| push(&mut queue, ticket, name, 1.0));
    assert_eq!(waits, [false, false, false, true]);
    assert!(!push(&mut queue, 5, one, 20.0) && !push(&mut queue, 6, two, 21.0), "it has not waited for long");
    assert!(push(&mut queue, 7, one, 40.0), "one has the fewest");
    assert!(!push(&mut queue, 8, two, 41.0));
    assert!(queue.adapter_outlook(one).waits_for > 0 && queue.adapter_outlook(two).waits_for == 0);
    for ticket in [1, 5] {
        queue.first_token(ticket, seconds(42.0), &speed);
        queue.over(ticket, 0, Some(one));
        queue.call();
    }
    assert!(!queue.waits(4, Waker::noop()) && queue.waits(7, Waker::noop()));
}
