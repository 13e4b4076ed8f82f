//! Who goes first in line, and what is in the background.

use super::legs::divided;
use super::line::{long, may_wait, tells_first_tokens};
use super::*;
use crate::precedence::{Precedence, Priority};
use crate::speed::Observation;

fn of(priority: i8, tenant: u64) -> Precedence {
    Precedence { priority: Priority(priority), tenant: Some(tenant) }
}

/// The names of those that wait at one worker, in the order in which they are called, each as soon as another one is computed.
fn called(requests: &[(&str, Precedence)]) -> Vec<String> {
    let (fleet, decider) = (fleet(1), decider("prefix_aware"));
    tells_first_tokens(&decider, &fleet);
    let prompts: Vec<_> = ["first", "second"].map(long).into();
    let mut there: Vec<_> = prompts
        .iter()
        .map(|prompt| decider.decide(&fleet, &may_wait(prompt), Among::Untried(&[]), NOW).unwrap())
        .collect();
    let prompts: Vec<_> = requests.iter().map(|(name, _)| long(name)).collect();
    let mut in_line: Vec<_> = (0..)
        .zip(requests.iter().zip(&prompts))
        .map(|(at, ((name, precedence), prompt))| {
            let since = NOW + Duration::from_millis(at);
            let request =
                RequestView { precedence: *precedence, may_wait_since: Some(since), ..view(prompt) };
            (*name, decider.decide(&fleet, &request, Among::Untried(&[]), since).unwrap())
        })
        .collect();
    assert!(in_line.iter().all(|(_, decided)| decided.lease.turn().is_some()));
    let mut order = Vec::new();
    while !in_line.is_empty() {
        decider.first_token(&mut there.remove(0).lease, NOW + Duration::from_secs(1));
        let has_turn = |decided: &Decided| {
            let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
            std::pin::Pin::new(&mut decided.lease.turn().unwrap()).poll(&mut cx).is_ready()
        };
        let at = in_line.iter().position(|(_, decided)| has_turn(decided)).expect("one has room now");
        let (name, decided) = in_line.remove(at);
        order.push(name.to_owned());
        there.push(decided);
    }
    order
}

#[test]
fn in_line_higher_priorities_go_first() {
    let (usual, high) = (of(0, 1), of(2, 1));
    assert_eq!(called(&[("a", usual), ("b", usual), ("c", high), ("d", high)]), ["c", "d", "a", "b"]);
}

#[test]
fn in_line_tenants_take_turns() {
    let (flood, other) = (of(0, 1), of(0, 2));
    let order = called(&[("a", flood), ("b", flood), ("c", flood), ("d", flood), ("x", other), ("y", other)]);
    let place = |name: &str| order.iter().position(|one| one == name).unwrap();
    assert!(place("x") <= 1 && place("y") <= 3, "{order:?}");
    assert!(["a", "b", "c", "d"].map(place).is_sorted(), "{order:?}");
}

fn background(prompt: &PromptBlocks) -> RequestView<'_> {
    RequestView { precedence: of(-1, 1), ..view(prompt) }
}

#[test]
fn the_background_waits_while_somebody_waits_everywhere() {
    let (fleet, decider) = (fleet(2), decider("prefix_aware").with_background_load(Some(0.6)));
    let prompts: Vec<_> = ["one", "two", "three"].map(long).into();
    assert!(
        decider.waits_for_spare(&background(&prompts[2])) && !decider.waits_for_spare(&view(&prompts[2]))
    );
    let spare = |now| decider.decide_spare(&fleet, &background(&prompts[2]), Among::Untried(&[]), now);
    let decide = |at: usize| decider.decide(&fleet, &view(&prompts[at]), Among::Untried(&[]), NOW).unwrap();
    let (mut one, _two) = (decide(0), decide(1));
    assert_eq!(spare(NOW).unwrap_err(), PickError::NoneSpare);
    decider.first_token(&mut one.lease, NOW);
    // What the two take has been forgotten by then.
    let later = NOW + Duration::from_secs(300);
    let given = spare(later).unwrap();
    assert_eq!((given.worker.slot, given.worker.load.in_background()), (one.worker.slot, 1));
    assert!(given.lease.turn().is_none() && decider.tree_blocks() > 0);
    drop(given);
    assert_eq!(one.worker.load.in_background(), 0);
}

#[test]
fn the_background_gets_what_others_leave() {
    let (fleet, decider) = (fleet(1), decider("prefix_aware").with_background_load(Some(0.5)));
    let prompt = long("one");
    let own_s = spare_s(&decider, &fleet, &prompt);
    let spare = |at_s: f64| {
        let now = NOW + Duration::from_secs_f64(at_s);
        let given = decider.decide_spare(&fleet, &background(&prompt), Among::Untried(&[]), now);
        given.map(|mut given| decider.first_token(&mut given.lease, now))
    };
    assert_eq!(spare(0.0), Ok(()));
    // All of the prompt but the first time is cached; what counts is what the last one took.
    assert_eq!(spare(own_s * 1.9), Err(PickError::NoneSpare));
    assert_eq!(spare(own_s * 2.1), Ok(()));
}

#[test]
fn the_background_leaves_most_of_the_memory_to_others() {
    let (fleet, decider) = (fleet(1), decider("prefix_aware").with_background_load(Some(1.0)));
    let (prompt, other) = (long("one"), hashed("hello"));
    fleet.workers()[0].reports.set_kv_capacity(Some(4 * background(&prompt).prompt_tokens + 100));
    let spare = |at: u32| {
        let now = NOW + Duration::from_secs(1_000) * at;
        let given = decider.decide_spare(&fleet, &background(&prompt), Among::Untried(&[]), now);
        given.map(|mut given| {
            decider.first_token(&mut given.lease, now);
            given
        })
    };
    let first = spare(1).unwrap();
    assert_eq!(spare(2).map(drop), Err(PickError::NoneSpare), "two are more than a quarter");
    drop(first);
    assert!(spare(3).is_ok());
    let mut beside = decider.decide(&fleet, &view(&other), Among::Untried(&[]), NOW).unwrap();
    decider.first_token(&mut beside.lease, NOW);
    assert!(spare(4).is_ok());
}

#[test]
fn answers_take_memory_too() {
    let (fleet, decider) = (fleet(1), decider("prefix_aware").with_background_load(Some(1.0)));
    let prompt = long("one");
    let tokens = background(&prompt).prompt_tokens;
    fleet.workers()[0].reports.set_kv_capacity(Some(8 * (tokens + 1_000)));
    let mut there = Vec::new();
    let mut spare = |at: u32| {
        let now = NOW + Duration::from_secs(10_000) * at;
        let given = decider.decide_spare(&fleet, &background(&prompt), Among::Untried(&[]), now);
        there.push(given.map(|mut given| {
            decider.first_token(&mut given.lease, now);
            given
        })?);
        Ok(())
    };
    (0..200).for_each(|_| decider.lock().pools.answered(fleet.workers()[0].pool(), 1_000));
    assert_eq!((spare(1), spare(2)), (Ok(()), Ok(())));
    assert_eq!(spare(3), Err(PickError::NoneSpare), "two fill a quarter with what they will generate");
    drop(there.pop());
    assert_eq!(fleet.workers()[0].load.in_background(), 1);
}

#[test]
fn what_failed_was_no_load() {
    let (fleet, decider) = (fleet(1), decider("prefix_aware").with_background_load(Some(0.5)));
    let (prompt, other) = (long("one"), long("other"));
    // They would take all of its time.
    for _ in 0..400 {
        let mut failed = decider.decide(&fleet, &view(&other), Among::Untried(&[]), NOW).unwrap();
        decider.take_back(&mut failed.lease, &failed.worker, &other.hashes, failed.basis);
    }
    let spare = |at_s: f64| {
        let now = NOW + Duration::from_secs_f64(at_s);
        decider.decide_spare(&fleet, &background(&prompt), Among::Untried(&[]), now)
    };
    // Nothing was taken, so there is time; and nothing is owed for one that failed as well.
    for _ in 0..2 {
        let mut given = spare(0.0).unwrap();
        decider.take_back(&mut given.lease, &given.worker, &prompt.hashes, given.basis);
    }
    drop(spare(0.0).unwrap());
    let own_s = spare_s(&decider, &fleet, &prompt);
    assert_eq!(spare(1.9 * own_s).map(drop), Err(PickError::NoneSpare), "it was sent");
    assert!(spare(2.1 * own_s).is_ok(), "half of the time is nobody's");
}

#[test]
fn workers_that_compute_prompts_for_others_have_time_of_their_own() {
    let (fleet, decider) = (divided(), decider("prefix_aware").with_background_load(Some(0.5)));
    // What those who generate have to do.
    for number in 0..200 {
        let prompt = long(&format!("prompt {number}"));
        let mut decided = decider.decide(&fleet, &view(&prompt), Among::Untried(&[]), NOW).unwrap();
        decider.first_token(&mut decided.lease, NOW);
    }
    let prompt = long("one");
    let spare = |leg, at_s: f64| {
        let now = NOW + Duration::from_secs_f64(at_s);
        let request = RequestView { leg, ..background(&prompt) };
        let given = decider.decide_spare(&fleet, &request, Among::Untried(&[]), now);
        given.map(|mut given| decider.first_token(&mut given.lease, now))
    };
    let own_s = spare_s(&decider, &fleet, &prompt);
    assert_eq!((spare(Leg::Whole, 0.0), spare(Leg::Prefill, 0.0)), (Ok(()), Ok(())), "the first of each");
    assert_eq!(spare(Leg::Prefill, 1.1 * own_s), Ok(()), "half of the time of two is nobody's");
    assert_eq!(spare(Leg::Whole, 1.1 * own_s), Err(PickError::NoneSpare), "of theirs nothing is");
}

/// What a prompt takes that nothing is cached of.
fn spare_s(decider: &Decider, fleet: &FleetSnapshot, prompt: &PromptBlocks) -> f64 {
    let speed = decider.prefill_speed(&fleet.workers()[0]);
    crate::spare::prompt_s(&speed, Candidate::new(WorkerSlot(0)).prefill(&view(prompt)))
}

#[test]
fn the_time_of_policies_that_read_no_prompts_is_learned_as_well() {
    let taken = |name| {
        let (fleet, decider) = (fleet(1), decider(name).with_background_load(Some(0.5)));
        let worker = &fleet.workers()[0];
        let slow = |number: u64| Observation {
            seconds: 0.02 + 0.01 * number as f64,
            new_tokens: 100.0 * number as f64,
            pairs: 0.0,
            ratio: 1.0,
        };
        (0..400).for_each(|number| decider.lock().pools.learn(worker.pool(), &slow(1 + number % 20)));
        let prompt = long("one");
        let mut decided = decider.decide(&fleet, &view(&prompt), Among::Untried(&[]), NOW).unwrap();
        decided.lease.take_taken_s()
    };
    let (ours, blind) = (taken("prefix_aware"), taken("round_robin"));
    assert!(blind > 0.0 && (ours / blind - 1.0).abs() < 1e-3, "{ours} and {blind}");
}

#[test]
fn without_a_background_low_priorities_are_requests_like_others() {
    let (fleet, decider) = (fleet(1), decider("prefix_aware"));
    let prompt = hashed("hello");
    assert!(!decider.waits_for_spare(&background(&prompt)));
    let decided = decider.decide(&fleet, &background(&prompt), Among::Untried(&[]), NOW).unwrap();
    assert_eq!(decided.worker.load.in_background(), 0);
}

#[test]
fn nobody_is_told_apart_from_nobody_to_spare() {
    let (fleet, decider) = (fleet(1), decider("prefix_aware").with_background_load(Some(0.6)));
    fleet.workers()[0].mark_down();
    let prompt = hashed("hello");
    let none = decider.decide_spare(&fleet, &background(&prompt), Among::Untried(&[]), NOW).unwrap_err();
    assert!(matches!(none, PickError::NoneUsable { down: 1, .. }), "{none}");
}
