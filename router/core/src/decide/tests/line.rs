//! Requests that wait in line until their worker has room.

use super::*;
use crate::models::PoolNumber;
use crate::pools::Part;

/// A prompt of 40,000 tokens by itself.
pub(super) fn long(name: &str) -> PromptBlocks {
    hashed(&format!("{name} goes on and on. ").repeat(8_000))
}

pub(super) fn may_wait(prompt: &PromptBlocks) -> RequestView<'_> {
    RequestView { may_wait_since: Some(NOW), ..view(prompt) }
}

/// A worker's first tokens are seen.
pub(super) fn tells_first_tokens(decider: &Decider, fleet: &FleetSnapshot) {
    let prompt = hashed("hello");
    for _ in 0..20 * fleet.workers().len() {
        let mut decided = decider.decide(fleet, &view(&prompt), Among::Untried(&[]), NOW).unwrap();
        decided.lease.first_token_at(NOW, &PrefillSpeed::default());
    }
}

#[test]
fn who_waits_in_line_is_nowhere_until_it_goes() {
    let (fleet, decider) = (fleet(1), decider("prefix_aware"));
    tells_first_tokens(&decider, &fleet);
    let prompts: Vec<_> = ["one", "two", "three"].map(long).into();
    let decide =
        |at: usize| decider.decide(&fleet, &may_wait(&prompts[at]), Among::Untried(&[]), NOW).unwrap();
    let (mut first, second, mut third) = (decide(0), decide(1), decide(2));
    assert!(first.lease.turn().is_none() && second.lease.turn().is_none());
    let mut turn = third.lease.turn().expect("the worker has enough to compute");
    let worker = Arc::clone(&third.worker);
    assert_eq!((worker.load.in_line(), worker.load.read().requests), (1, 3));
    let blocks = decider.tree_blocks();
    let mut poll =
        || std::pin::Pin::new(&mut turn).poll(&mut std::task::Context::from_waker(std::task::Waker::noop()));
    assert!(poll().is_pending());
    decider.first_token(&mut first.lease, NOW);
    assert!(poll().is_ready());
    decider.goes(&mut third, &may_wait(&prompts[2]), NOW);
    assert!(third.lease.turn().is_none() && decider.tree_blocks() > blocks, "it is held there now");
    drop((first, second, third));
    assert_eq!(
        (worker.load.in_line(), worker.load.read()),
        (0, LoadReading { last_pick: worker.load.read().last_pick, ..LoadReading::default() })
    );
}

#[test]
fn what_would_evict_what_is_about_to_come_back_waits() {
    let (fleet, decider) = (fleet(1), decider("prefix_aware"));
    tells_first_tokens(&decider, &fleet);
    let prompts: Vec<_> = ["one", "two", "three", "four", "five"].map(long).into();
    let decide =
        |prompt: &PromptBlocks| decider.decide(&fleet, &may_wait(prompt), Among::Untried(&[]), NOW).unwrap();
    let slot = fleet.workers()[0].slot;
    fleet.workers()[0].reports.set_kv_capacity(Some(2 * may_wait(&prompts[0]).prompt_tokens));
    for prompt in prompts.iter().cycle().take(40) {
        let mut decided = decide(prompt);
        assert!(decided.lease.turn().is_none(), "nobody else adds anything");
        decider.first_token(&mut decided.lease, NOW);
    }
    assert!(decider.recomputed_share(slot) > 0.8, "{}", decider.recomputed_share(slot));
    let there: Vec<_> = prompts[..2].iter().map(decide).collect();
    let there = there.into_iter().map(|mut decided| {
        decider.first_token(&mut decided.lease, NOW);
        decided
    });
    let there: Vec<_> = there.collect();
    let (cold, cached) = (decide(&prompts[2]), decide(&prompts[0]));
    assert!(cold.lease.turn().is_some(), "until their last tokens they hold what they added");
    let ready = |decided: &Decided| {
        let mut turn = decided.lease.turn()?;
        let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
        Some(std::pin::Pin::new(&mut turn).poll(&mut cx).is_ready())
    };
    assert_eq!((ready(&cold), ready(&cached)), (Some(false), Some(true)), "what is cached adds nothing");
    drop(there);
    assert_eq!(ready(&cold), Some(true));
}

#[test]
fn what_a_worker_reports_is_compared_with_what_it_has_been_sent() {
    let (fleet, decider) = (fleet(1), decider("prefix_aware"));
    tells_first_tokens(&decider, &fleet);
    let worker = &fleet.workers()[0];
    let before = worker.load.sent();
    let prompts: Vec<_> = ["one", "two", "three"].map(long).into();
    let decide =
        |at: usize| decider.decide(&fleet, &may_wait(&prompts[at]), Among::Untried(&[]), NOW).unwrap();
    let (first, _second) = (decide(0), decide(1));
    let two = worker.load.sent();
    let there = worker.load.read();
    let _in_line = decide(2);
    assert_eq!((worker.load.in_line(), worker.load.sent()), (1, two));
    assert_eq!(two.tokens - before.tokens, u64::from(there.prefill_tokens));
    // The two that it has been sent, and one of somebody else's.
    let tokens = there.prefill_tokens as usize + 5_000;
    let report =
        ReportedWorkerLoad { waiting_requests: 3, waiting_uncached_tokens: tokens, ..Default::default() };
    worker.hear_load(&report, NOW);
    let others = worker.reports.load(NOW).unwrap().others;
    assert_eq!((others.requests, others.waiting, others.uncached_tokens), (1, 1, 5_000));
    drop(first);
    let ready = worker.load.sent();
    assert_eq!((worker.load.in_line(), ready.tokens > two.tokens), (0, true), "it was called");
}

#[test]
fn who_waits_in_line_goes_elsewhere_when_that_is_better_and_leaves_nothing_behind() {
    let (fleet, decider) = (fleet(2), decider("prefix_aware"));
    tells_first_tokens(&decider, &fleet);
    let prompts: Vec<_> = ["one", "two", "three", "four", "five"].map(long).into();
    let decide =
        |at: usize| decider.decide(&fleet, &may_wait(&prompts[at]), Among::Untried(&[]), NOW).unwrap();
    let mut there: Vec<_> = (0..4).map(decide).collect();
    assert!(there.iter().all(|decided| decided.lease.turn().is_none()));
    let last = decide(4);
    assert!(last.lease.turn().is_some());
    let all = || std::iter::once(Part { pool: PoolNumber::default(), of_candidates: 1.0, of_pool: 1.0 });
    let (from, arrivals) = (Arc::clone(&last.worker), decider.lock().pools.arrivals_per_s(all()));
    there.retain(|decided| decided.worker.slot == from.slot);
    let again =
        decider.decide_again(&fleet, &may_wait(&prompts[4]), (last, Among::Untried(&[])), NOW).unwrap();
    assert!(again.worker.slot != from.slot && again.lease.turn().is_none());
    assert_eq!((from.load.in_line(), from.load.read().requests), (0, 2));
    assert_eq!(decider.lock().pools.arrivals_per_s(all()), arrivals, "it has not come again");
}

#[test]
fn others_policies_send_at_once() {
    let (fleet, decider) = (fleet(1), decider("kv_aware"));
    tells_first_tokens(&decider, &fleet);
    let prompt = long("one");
    let all: Vec<_> = (0..5)
        .map(|_| decider.decide(&fleet, &may_wait(&prompt), Among::Untried(&[]), NOW).unwrap())
        .collect();
    assert!(all.iter().all(|decided| decided.lease.turn().is_none()));
}
