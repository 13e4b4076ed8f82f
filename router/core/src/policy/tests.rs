//! What each policy promises, on hand-made candidates.

mod peers;

use rand::SeedableRng;
use rand::rngs::SmallRng;
use roundhouse_types::BlockHash;

use super::*;
use crate::fleet::Fleet;
use crate::reports::OthersLoad;
use crate::speed::PrefillSpeed;
use crate::worker::{WorkerId, WorkerSpec};

fn candidate(slot: u32, requests: u32) -> Candidate {
    let load = LoadReading { requests, last_pick: u64::from(slot), ..LoadReading::default() };
    Candidate { load, ..Candidate::new(WorkerSlot(slot)) }
}

fn fleet(workers: usize) -> Fleet {
    let specs: Vec<_> = (0..workers)
        .map(|n| WorkerSpec::new(WorkerId::new(&format!("w{n}")), format!("http://w{n}:8000")))
        .collect();
    let mut fleet = Fleet::default();
    fleet.reconcile(&specs);
    fleet
}

/// A choice among `candidates`, of whom no reports are known.
fn choice<'a>(candidates: &'a [Candidate], ring: &'a dyn Fn() -> &'a Ring) -> Choice<'a> {
    let sum = |part: fn(&LoadReading) -> u32| candidates.iter().map(|one| u64::from(part(&one.load))).sum();
    Choice {
        candidates,
        reports: &[],
        outlooks: &[],
        shared_tokens: &[],
        requests: sum(|load| load.requests),
        prefilling: sum(|load| load.prefilling),
        busy: candidates.iter().filter(|one| one.load.prefilling > 0).count() as u64,
        context_tokens: sum(|load| load.context_tokens),
        share: 1.0,
        workers: candidates.len() as u32,
        router_place: RouterPlace::ALONE,
        told_by: 0,
        ring,
        arrivals_per_s: 0.0,
        later_turns: 0.0,
        answer_tokens: 0.0,
        followers: Followers::default(),
        unseen: Unseen::default(),
        speed: PrefillSpeed::default(),
    }
}

fn pick(policy: &dyn Policy, request: &RequestView<'_>, candidates: &[Candidate], seed: u64) -> usize {
    let snapshot = fleet(candidates.len()).snapshot();
    let ring = &|| snapshot.ring();
    policy.pick(request, &choice(candidates, ring), &mut SmallRng::seed_from_u64(seed))
}

fn prompt(tokens: usize) -> RequestView<'static> {
    RequestView { prompt_tokens: tokens, prompt_bytes: tokens * 4, ..RequestView::default() }
}

#[test]
fn every_policy_is_found_by_its_name() {
    for (name, _) in policies() {
        assert_eq!(by_name(name).unwrap().name(), name);
    }
    assert!(by_name("fastest").is_none());
    assert_eq!(policies().next().unwrap().0, "prefix_aware");
}

#[test]
fn round_robin_takes_the_one_picked_longest_ago() {
    let mut candidates = [candidate(0, 0), candidate(1, 9), candidate(2, 0)];
    candidates[0].load.last_pick = 7;
    candidates[2].load.last_pick = 8;
    assert_eq!(pick(&RoundRobin, &prompt(10), &candidates, 0), 1);
}

#[test]
fn least_load_takes_the_fewest_requests_and_turns_among_equals() {
    assert_eq!(pick(&LeastLoad, &prompt(10), &[candidate(0, 3), candidate(1, 1), candidate(2, 2)], 0), 1);
    assert_eq!(pick(&LeastLoad, &prompt(10), &[candidate(5, 1), candidate(2, 1), candidate(9, 1)], 0), 1);
}

#[test]
fn power_of_two_never_takes_the_most_loaded() {
    let candidates = [candidate(0, 1), candidate(1, 50), candidate(2, 2)];
    let picked: Vec<_> = (0..200).map(|seed| pick(&PowerOfTwo, &prompt(10), &candidates, seed)).collect();
    assert!(!picked.contains(&1));
    assert!(picked.contains(&0) && picked.contains(&2));
    assert_eq!(pick(&PowerOfTwo, &prompt(10), &candidates[1..2], 0), 0);
}

#[test]
fn random_reaches_every_worker() {
    let candidates = [candidate(0, 1), candidate(1, 50), candidate(2, 2)];
    let mut picked: Vec<_> = (0..100).map(|seed| pick(&Random, &prompt(10), &candidates, seed)).collect();
    picked.sort_unstable();
    picked.dedup();
    assert_eq!(picked, [0, 1, 2]);
}

#[test]
fn consistent_hash_keeps_a_session_until_its_worker_is_full() {
    let mut candidates: Vec<_> = (0..4).map(|slot| candidate(slot, 2)).collect();
    let request = RequestView { session: Some(77), ..prompt(10) };
    let home = pick(&ConsistentHash, &request, &candidates, 0);
    candidates[(home + 1) % 4].load.requests = 0;
    assert_eq!(
        pick(&ConsistentHash, &request, &candidates, 1),
        home,
        "load below the bound does not move it"
    );
    candidates[home].load.requests = 12;
    let next = pick(&ConsistentHash, &request, &candidates, 0);
    assert_ne!(next, home);
    let without_home: Vec<_> = candidates.iter().copied().filter(|c| c.slot.index() != home).collect();
    let snapshot = fleet(4).snapshot();
    let ring = &|| snapshot.ring();
    let choice = choice(&without_home, ring);
    let elsewhere = cheapest(&ConsistentHash.costs(&request, &choice), &without_home);
    assert_eq!(
        without_home[elsewhere].slot.index(),
        next,
        "a missing worker's sessions go to the same next one"
    );
}

#[test]
fn consistent_hash_falls_back_to_the_prompt_and_then_to_load() {
    let candidates = [candidate(0, 3), candidate(1, 0), candidate(2, 3)];
    assert_eq!(pick(&ConsistentHash, &prompt(1), &candidates, 0), 1);
    let blocks = [BlockHash(5), BlockHash(6)];
    let even = [candidate(0, 1), candidate(1, 1), candidate(2, 1)];
    let request = RequestView { blocks: &blocks, ..prompt(40) };
    let other_tail = [BlockHash(5), BlockHash(6)];
    let same = RequestView { blocks: &other_tail, ..prompt(400) };
    assert_eq!(pick(&ConsistentHash, &request, &even, 0), pick(&ConsistentHash, &same, &even, 9));
}

#[test]
fn consistent_hash_with_every_worker_full_still_picks() {
    let candidates = [candidate(0, 100)];
    let request = RequestView { session: Some(1), ..prompt(1) };
    assert_eq!(pick(&ConsistentHash, &request, &candidates, 0), 0);
}

/// What `prefix_aware` picks, with queues and prefills foreseen at the fleet's speed; ten requests a second come.
fn pick_aware(request: &RequestView<'_>, candidates: &[Candidate]) -> usize {
    pick_expecting(request, candidates, (0.0, 0.0))
}

/// The same for a request that so many turns are expected to follow, where answers have so many tokens.
fn pick_expecting(
    request: &RequestView<'_>,
    candidates: &[Candidate],
    (later_turns, answer_tokens): (f64, f64),
) -> usize {
    let speed = PrefillSpeed::default();
    let mut candidates = candidates.to_vec();
    for candidate in &mut candidates {
        candidate.queued_s = speed.token_s * f64::from(candidate.load.prefill_tokens);
        candidate.own_s = f64::from(candidate.ratio) * speed.seconds(candidate.prefill(request));
    }
    let snapshot = fleet(candidates.len()).snapshot();
    let ring = &|| snapshot.ring();
    let expected = Choice { arrivals_per_s: 10.0, later_turns, answer_tokens, ..choice(&candidates, ring) };
    let choice = Choice { speed, ..expected };
    PrefixAware.pick(request, &choice, &mut SmallRng::seed_from_u64(0))
}

#[test]
fn prefix_aware_goes_where_the_prefix_is() {
    let mut candidates = [candidate(0, 0), candidate(1, 0), candidate(2, 0)];
    candidates[2].hit_tokens = 900;
    assert_eq!(pick_aware(&prompt(1_000), &candidates), 2);
}

#[test]
fn prefix_aware_spreads_cold_prompts_over_idle_workers() {
    let mut candidates = [candidate(0, 0), candidate(1, 0), candidate(2, 0)];
    // What is learned of a worker's speed is never quite that of another.
    candidates[1].ratio = 1.001;
    candidates[2].ratio = 0.999;
    let mut picked = Vec::new();
    for number in 10..16 {
        let at = pick_aware(&prompt(500), &candidates);
        candidates[at].load.last_pick = number;
        picked.push(at);
    }
    assert_eq!(picked, [0, 1, 2, 0, 1, 2]);
}

#[test]
fn prefix_aware_leaves_a_hit_that_costs_more_in_queue_than_it_saves() {
    let mut candidates = [candidate(0, 0), candidate(1, 1)];
    candidates[1].hit_tokens = 900;
    candidates[1].load.prefilling = 1;
    candidates[1].load.prefill_tokens = 5_000;
    assert_eq!(pick_aware(&prompt(1_000), &candidates), 0);
    candidates[1].load.prefill_tokens = 500;
    assert_eq!(pick_aware(&prompt(1_000), &candidates), 1);
}

#[test]
fn prefix_aware_goes_to_the_faster_of_two_idle_workers() {
    let mut candidates = [candidate(0, 0), candidate(1, 0)];
    candidates[0].ratio = 2.0;
    assert_eq!(pick_aware(&prompt(1_000), &candidates), 1);
    candidates[0].hit_tokens = 900;
    assert_eq!(pick_aware(&prompt(1_000), &candidates), 0, "slow as it is, it has little to compute");
}

#[test]
fn prefix_aware_leaves_a_hit_that_would_have_to_wait_for_memory() {
    let mut candidates = [candidate(0, 20), candidate(1, 20)];
    candidates[0].hit_tokens = 500;
    for (candidate, held_tokens) in candidates.iter_mut().zip([95_000, 80_000]) {
        candidate.load.context_tokens = 95_000;
        candidate.load.held_tokens = held_tokens;
    }
    assert_eq!(pick_aware(&prompt(12_000), &candidates), 0, "nothing is known of capacities");
    for candidate in &mut candidates {
        candidate.kv_capacity_tokens = 100_000;
    }
    assert_eq!(pick_aware(&prompt(12_000), &candidates), 1);
    candidates[0].load.held_tokens = 20_000;
    assert_eq!(pick_aware(&prompt(12_000), &candidates), 0, "nearly all of it is shared");
}

#[test]
fn prefix_aware_knows_that_answers_will_want_memory() {
    let mut candidates = [candidate(0, 20), candidate(1, 10)];
    candidates[0].hit_tokens = 5_000;
    for candidate in &mut candidates {
        candidate.load.context_tokens = 60_000;
        candidate.load.held_tokens = 60_000;
        candidate.kv_capacity_tokens = 100_000;
    }
    let picked = |answer_tokens| pick_expecting(&prompt(6_000), &candidates, (0.0, answer_tokens));
    assert_eq!(picked(0.0), 0, "prompts alone fit in both");
    assert_eq!(picked(3_000.0), 1, "twenty answers do not");
}

#[test]
fn prefix_aware_makes_a_copy_of_what_many_will_ask_for() {
    let mut candidates = [candidate(0, 60), candidate(1, 20)];
    for candidate in &mut candidates {
        candidate.load.context_tokens = candidate.load.requests * 8_000;
    }
    (candidates[0].hit_tokens, candidates[0].hit_blocks) = (8_000, 80);
    let blocks: Vec<_> = (0..82).map(BlockHash).collect();
    let request = RequestView { blocks: &blocks, block_tokens: Some(100), ..prompt(8_200) };
    let picked = |followers| {
        let snapshot = fleet(2).snapshot();
        let ring = &|| snapshot.ring();
        let speed = PrefillSpeed::default();
        let mut candidates = candidates;
        for candidate in &mut candidates {
            candidate.own_s = speed.seconds(candidate.prefill(&request));
        }
        let expected = Choice { arrivals_per_s: 10.0, followers, speed, ..choice(&candidates, ring) };
        PrefixAware.pick(&request, &expected, &mut SmallRng::seed_from_u64(0))
    };
    let many = Followers { blocks: 64, requests: 20.0, share: 0.8 };
    assert_eq!(picked(Followers::default()), 0, "computing it again costs more than forty that decode");
    assert_eq!(picked(many), 1);
    assert_eq!(picked(Followers { requests: 1.0, ..many }), 0, "for one it is not worth it");
    assert_eq!(picked(Followers { share: 0.01, ..many }), 0, "others will even it out");
}

#[test]
fn prefix_aware_does_not_bury_the_worker_of_a_hot_prefix() {
    let mut candidates = [candidate(0, 0), candidate(1, 0)];
    candidates[0].hit_tokens = 1_000;
    // Fully cached requests keep coming and decode for ever.
    let mut on_hot = 0;
    for _ in 0..200 {
        let at = pick_aware(&prompt(1_000), &candidates);
        candidates[at].load.requests += 1;
        candidates[at].usual_requests += 1.0;
        candidates[at].load.context_tokens += 1_000;
        candidates[at].hit_tokens = 1_000;
        on_hot += usize::from(at == 0);
    }
    assert!((80..=130).contains(&on_hot), "{on_hot} of 200 on the first worker");
}

#[test]
fn prefix_aware_goes_by_what_usually_runs_more_than_by_what_runs_now() {
    let mut candidates = [candidate(0, 6), candidate(1, 0)];
    candidates[0].hit_tokens = 5_000;
    for (candidate, usual_requests) in candidates.iter_mut().zip([3.0, 3.0]) {
        candidate.load.context_tokens = 8_000 * candidate.load.requests;
        candidate.usual_requests = usual_requests;
    }
    assert_eq!(pick_aware(&prompt(8_000), &candidates), 0, "six at once are chance");
    (candidates[0].usual_requests, candidates[1].usual_requests) = (12.0, 0.0);
    assert_eq!(pick_aware(&prompt(8_000), &candidates), 1, "twelve all the time are not");
}

#[test]
fn prefix_aware_begins_a_long_session_where_less_usually_runs() {
    let mut candidates = [candidate(0, 0), candidate(1, 0)];
    candidates[0].hit_tokens = 5_000;
    candidates[0].usual_requests = 4.0;
    assert_eq!(pick_expecting(&prompt(8_000), &candidates, (0.0, 0.0)), 0);
    assert_eq!(
        pick_expecting(&prompt(8_000), &candidates, (14.0, 0.0)),
        1,
        "its turns will meet those four each time"
    );
    candidates[1].usual_requests = 4.0;
    assert_eq!(pick_expecting(&prompt(8_000), &candidates, (14.0, 0.0)), 0);
}

#[test]
fn prefix_aware_counts_who_is_in_line_at_a_worker_that_others_use() {
    let mut candidates = [candidate(0, 2), candidate(1, 2)];
    let others = OthersLoad { requests: 3, waiting: 1, uncached_tokens: 5_000, sent_us: 0 };
    let report = LoadReport {
        running: 4,
        waiting: 1,
        waiting_uncached_tokens: 5_004,
        others,
        ..LoadReport::default()
    };
    let reports = [Some(report), Some(report)];
    let snapshot = fleet(2).snapshot();
    let costs = |candidates: &[Candidate]| {
        let ring = &|| snapshot.ring();
        let choice = Choice { reports: &reports, ..choice(candidates, ring) };
        PrefixAware.costs(&prompt(1_000), &choice)
    };
    let alike = costs(&candidates);
    assert_eq!(alike[0], alike[1]);
    candidates[0].line_s = 2.0;
    let costs = costs(&candidates);
    assert!(costs[0] > alike[0] + 1.999 && costs[1] == alike[1], "{costs:?}");
}

#[test]
fn prefix_aware_splits_siblings_sooner_where_others_are_idle() {
    let mut candidates = [candidate(0, 4), candidate(1, 4), candidate(2, 0), candidate(3, 0)];
    let picked = |candidates: &[Candidate]| pick_aware(&prompt(8_000), candidates);
    for candidate in &mut candidates[..2] {
        candidate.load.prefilling = 4;
        candidate.load.prefill_tokens = 13_000;
        candidate.hit_tokens = 7_500;
    }
    assert!(picked(&candidates) >= 2, "nobody would have to wait for a copy");
    for candidate in &mut candidates[2..] {
        (candidate.load.requests, candidate.load.prefilling, candidate.load.prefill_tokens) = (1, 1, 100);
    }
    assert!(picked(&candidates) < 2, "somebody would, everywhere");
}

#[test]
fn prefix_aware_lets_siblings_share_one_prefill() {
    let mut candidates = [candidate(0, 0), candidate(1, 0)];
    let request = prompt(4_000);
    let first = pick_aware(&request, &candidates);
    candidates[first].load =
        LoadReading { requests: 1, prefilling: 1, prefill_tokens: 4_000, ..LoadReading::default() };
    candidates[first].hit_tokens = 3_990;
    assert_eq!(pick_aware(&request, &candidates), first);
}

#[test]
fn prefix_aware_joins_a_step_that_will_be_computed_anyway() {
    let mut candidates = [candidate(0, 60), candidate(1, 60)];
    for candidate in &mut candidates {
        candidate.load.prefilling = 2;
    }
    // One waits behind the step that is being computed; at the other both are in that step.
    candidates[1].joins_step = true;
    assert_eq!(pick_aware(&prompt(500), &candidates), 1);
    candidates[1].joins_step = false;
    assert_eq!(pick_aware(&prompt(500), &candidates), 0, "picked longer ago");
}

#[test]
fn prefix_aware_delays_one_that_waits_rather_than_eight() {
    let mut candidates = [candidate(0, 8), candidate(1, 8)];
    for (candidate, prefilling) in candidates.iter_mut().zip([8, 1]) {
        candidate.load.prefilling = prefilling;
        candidate.load.prefill_tokens = 2_000;
    }
    assert_eq!(pick_aware(&prompt(1_000), &candidates), 1);
}

#[test]
fn what_waits_and_what_is_held_is_the_ledgers_and_others_where_an_engine_was_asked_a_while_ago() {
    let snapshot = fleet(1).snapshot();
    let load = LoadReading { requests: 4, prefilling: 2, context_tokens: 1_000, ..LoadReading::default() };
    let candidates = [Candidate { load, kv_capacity_tokens: 10_000, ..Candidate::new(WorkerSlot(0)) }];
    let report = |queue, others| LoadReport {
        queue,
        others,
        waiting: 7,
        kv_used_tokens: 8_000,
        kv_free_tokens: 2_000,
        ..LoadReport::default()
    };
    let others = OthersLoad { requests: 3, waiting: 1, ..OthersLoad::default() };
    let expected = [
        (report(QueueSource::Told, others), 7, 0.8),
        (report(QueueSource::Counted, others), 3, 0.8),
        (report(QueueSource::Counted, OthersLoad::default()), 2, 0.1),
    ];
    for (report, waiting, used) in expected {
        let reports = [Some(report)];
        let ring = &|| snapshot.ring();
        let choice = Choice { reports: &reports, ..choice(&candidates, ring) };
        assert_eq!((choice.waiting_requests(0), choice.kv_usage(0)), (waiting, used), "{report:?}");
    }
}
