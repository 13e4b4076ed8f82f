//! Peers' formulas, on figures worked out by hand.

use super::*;
use crate::reports::LoadReport;

/// Blocks of 64 tokens, as many as `prompt_tokens` fill.
const BLOCKS: [BlockHash; 4] = [BlockHash(11), BlockHash(12), BlockHash(13), BlockHash(14)];

fn request(prompt_tokens: usize) -> RequestView<'static> {
    RequestView { blocks: &BLOCKS, block_tokens: Some(64), ..prompt(prompt_tokens) }
}

fn busy(slot: u32, requests: u32, prefill_tokens: u32, context_tokens: u32) -> Candidate {
    let load = LoadReading { requests, prefill_tokens, context_tokens, ..candidate(slot, requests).load };
    Candidate { load, ..Candidate::new(WorkerSlot(slot)) }
}

fn holding(of: Candidate, hit_tokens: u32) -> Candidate {
    Candidate { hit_tokens, hit_blocks: hit_tokens / 64, ..of }
}

fn costs(policy: &dyn Policy, request: &RequestView<'_>, candidates: &[Candidate]) -> Vec<f64> {
    let snapshot = fleet(candidates.len()).snapshot();
    let ring = &|| snapshot.ring();
    policy.costs(request, &choice(candidates, ring))
}

#[test]
fn sglang_takes_the_owner_above_its_threshold_only() {
    let candidates = [candidate(0, 0), holding(candidate(1, 60), 64), candidate(2, 1)];
    assert_eq!(pick(&SglangCacheAware::NEWER, &request(200), &candidates, 0), 1, "0.32 matched");
    assert_eq!(pick(&SglangCacheAware::NEWER, &request(214), &candidates, 0), 0, "0.299: least loaded");
    assert_eq!(pick(&SglangCacheAware::OLDER, &request(120), &candidates[1..], 0), 1, "imbalanced: 59 apart");
}

#[test]
fn sglang_goes_by_load_when_imbalanced_both_ways() {
    let owner = |requests| holding(candidate(0, requests), 128);
    let pick =
        |most, fewest| pick(&SglangCacheAware::NEWER, &request(128), &[owner(most), candidate(1, fewest)], 0);
    assert_eq!(pick(64, 0), 0, "64 apart is not more than 64");
    assert_eq!(pick(65, 0), 1);
    assert_eq!(pick(300, 200), 0, "not more than 1.5 times");
    assert_eq!(pick(301, 200), 1);
}

#[test]
fn older_sglang_sends_cold_prompts_to_the_smallest_tree() {
    let mut candidates = [candidate(0, 3), candidate(1, 5)];
    (candidates[0].tree_blocks, candidates[1].tree_blocks) = (90, 80);
    assert_eq!(pick(&SglangCacheAware::OLDER, &request(128), &candidates, 0), 1);
    assert_eq!(pick(&SglangCacheAware::NEWER, &request(128), &candidates, 0), 0);
}

#[test]
fn sglang_takes_one_of_several_owners_whatever_their_load() {
    let owners = |one, two| [holding(candidate(0, one), 128), holding(candidate(1, two), 128)];
    let first = pick(&SglangCacheAware::NEWER, &request(128), &owners(0, 9), 0);
    assert_eq!(pick(&SglangCacheAware::NEWER, &request(128), &owners(9, 0), 1), first);
}

#[test]
fn kv_aware_multiplies_prefill_work_by_requests() {
    let candidates = [holding(busy(0, 3, 500, 0), 900), busy(1, 1, 0, 0)];
    assert_eq!(costs(&KvAware, &prompt(1_000), &candidates), [600.0 * 4.0, 1_000.0 * 2.0]);
}

#[test]
fn dynamo_adds_blocks_to_compute_and_blocks_held() {
    let mut candidates =
        [holding(busy(0, 2, 320, 3_200), 168), busy(1, 0, 0, 0), holding(busy(2, 1, 0, 17), 4_000)];
    // Two requests have the same 1,600 tokens.
    (candidates[0].load.held_tokens, candidates[2].load.held_tokens) = (1_600, 17);
    // (320 + 800)/16 − 10 + (1,600 + 800)/16; 800/16 twice; nothing to compute, and 17 tokens are two blocks.
    assert_eq!(costs(&Dynamo, &prompt(800), &candidates), [210.0, 100.0, 52.0]);
    let snapshot = fleet(3).snapshot();
    let ring = &|| snapshot.ring();
    let shared = Choice { shared_tokens: &[160, 0, 800], ..choice(&candidates, ring) };
    assert_eq!(Dynamo.costs(&prompt(800), &shared), [200.0, 100.0, 2.0]);
    assert_eq!((Dynamo.index_use().source, Dynamo.counts_shared()), (IndexSource::Reported, true));
}

#[test]
fn llm_d_weighs_queue_kv_and_prefix() {
    let reported = |waiting, kv_used_tokens, kv_free_tokens| {
        Some(LoadReport { waiting, kv_used_tokens, kv_free_tokens, ..LoadReport::default() })
    };
    let candidates = [holding(candidate(0, 0), 1_024), candidate(1, 0), candidate(2, 0)];
    let reports = [reported(8, 50, 50), reported(0, 25, 75), reported(4, 0, 100)];
    let snapshot = fleet(3).snapshot();
    let ring = &|| snapshot.ring();
    let choice = Choice { reports: &reports, ..choice(&candidates, ring) };
    // Scores 2·0 + 2·0.5 + 3·0.25, 2·1 + 2·0.75, 2·0.5 + 2·1.
    assert_eq!(LlmD.costs(&prompt(20_000), &choice), [7.0 - 1.75, 7.0 - 3.5, 7.0 - 3.0]);
}

#[test]
fn llm_d_goes_by_the_ledger_where_nothing_is_reported() {
    let mut candidates = [busy(0, 2, 0, 500), busy(1, 0, 0, 0)];
    candidates[0].load.prefilling = 2;
    candidates[0].kv_capacity_tokens = 1_000;
    assert_eq!(costs(&LlmD, &prompt(100), &candidates), [7.0 - 1.0, 7.0 - 4.0]);
}

#[test]
fn llm_d_valve_opens_when_the_warm_one_is_a_second_behind() {
    let warm = |queued| holding(busy(0, 1, queued, 0), 900);
    let cold = busy(1, 1, 100, 0);
    assert_eq!(pick(&LlmDValve, &prompt(1_000), &[warm(16_500), cold], 0), 0);
    assert_eq!(pick(&LlmDValve, &prompt(1_000), &[warm(16_501), cold], 0), 1);
    assert_eq!(costs(&LlmDValve, &prompt(1_000), &[warm(20_000), cold]), [20_100.0, 1_100.0]);
    assert_eq!(
        pick(&LlmDValve, &prompt(1_000), &[busy(0, 1, 200, 0), cold], 0),
        1,
        "all cold: the least in flight"
    );
}

#[test]
fn aibrix_takes_the_best_match_within_a_deviation_of_the_mean() {
    let candidates = [holding(candidate(0, 12), 192), holding(candidate(1, 4), 128), candidate(2, 2)];
    // Mean 6, deviation 4.3: twelve is beyond 10.3.
    assert_eq!(pick(&Aibrix, &request(256), &candidates, 0), 1);
    let spread = [holding(candidate(0, 17), 192), candidate(1, 0)];
    assert_eq!(pick(&Aibrix, &request(256), &spread, 0), 1, "17 apart");
    assert_eq!(pick(&Aibrix, &request(256), &[candidate(0, 2), candidate(1, 1)], 0), 1, "no match");
}

#[test]
fn production_stack_follows_the_longest_match_whatever_the_load() {
    let candidates = [candidate(0, 0), holding(candidate(1, 500), 64), holding(candidate(2, 900), 64)];
    let mut picked: Vec<_> =
        (0..50).map(|seed| pick(&PstackPrefix, &request(256), &candidates, seed)).collect();
    picked.sort_unstable();
    picked.dedup();
    assert_eq!(picked, [1, 2]);
}

#[test]
fn production_stack_keeps_sessions_and_turns_without_one() {
    let session = RequestView { session: Some(5), ..request(100) };
    let home = pick(&PstackSession, &session, &[candidate(0, 0), candidate(1, 0), candidate(2, 0)], 0);
    let mut crowded = [candidate(0, 0), candidate(1, 0), candidate(2, 0)];
    crowded[home].load.requests = 1_000;
    assert_eq!(pick(&PstackSession, &session, &crowded, 0), home);
    crowded[1].load.last_pick = 0;
    crowded[0].load.last_pick = 4;
    assert_eq!(pick(&PstackSession, &request(100), &crowded, 0), 1);
}

#[test]
fn prefix_hash_goes_by_the_first_256_tokens_within_its_bound() {
    let mut candidates: Vec<_> = (0..4).map(|slot| candidate(slot, 4)).collect();
    let session = RequestView { session: Some(1), ..request(256) };
    let home = pick(&PrefixHash, &request(256), &candidates, 0);
    assert_eq!(pick(&PrefixHash, &session, &candidates, 0), home, "sessions play no part");
    let other_beginning = RequestView { blocks: &BLOCKS[..3], ..request(200) };
    let homes: Vec<_> = [request(256), other_beginning].map(|view| view.beginning()).into();
    assert_ne!(homes[0], homes[1]);
    // With 12 more than the others it is beyond 1.25 · 29 / 4.
    candidates[home].load.requests = 16;
    assert_ne!(pick(&PrefixHash, &request(256), &candidates, 0), home);
}
