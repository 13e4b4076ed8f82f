//! Draws against plain references, and what each parameter keeps.

use std::collections::HashSet;
use std::sync::Arc;

use proptest::prelude::*;

use super::*;

fn request(params: SamplingParams, generated_tokens: u64) -> SampleRequest {
    SampleRequest { params: Arc::new(params), generated_tokens, history: None }
}

fn params(temperature: f32, top_k: Option<u32>, top_p: f32) -> SamplingParams {
    SamplingParams { temperature, top_k, top_p, seed: 42, ..SamplingParams::default() }
}

fn token(logits: &[f32], params: &SamplingParams, position: u64) -> TokenId {
    sample(logits, &request(params.clone(), position)).unwrap().token
}

/// Tokens drawn at positions `0..draws`.
fn draws(logits: &[f32], params: &SamplingParams, draws: u64) -> Vec<TokenId> {
    (0..draws).map(|position| token(logits, params, position)).collect()
}

/// Token of each rank.
fn ranked(logits: &[f32]) -> Vec<TokenId> {
    let mut tokens: Vec<TokenId> = (0..logits.len() as u32).collect();
    tokens.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b)));
    tokens
}

#[test]
fn greedy_takes_the_lowest_token_among_equals() {
    let logits = [0.5, 2.0, -1.0, 2.0];
    assert_eq!(token(&logits, &SamplingParams::greedy(), 0), 1);
    assert_eq!(token(&logits, &params(1.0, Some(1), 1.0), 0), 1);
}

#[test]
fn broken_logits_are_an_error() {
    for logits in [&[0.0, f32::NAN][..], &[f32::INFINITY], &[]] {
        let error = sample(logits, &request(SamplingParams::greedy(), 0));
        assert_eq!(error, Err(SampleError::NotFinite));
    }
}

#[test]
fn frequencies_follow_the_probabilities() {
    let logits = [1.0f32, 0.0, -1.0, 2.0];
    for temperature in [0.5f32, 1.0, 2.0] {
        let n = 40_000;
        let drawn = draws(&logits, &params(temperature, None, 1.0), n);
        let total: f32 = logits.iter().map(|logit| (logit / temperature).exp()).sum();
        for (token, logit) in logits.iter().enumerate() {
            let expected = f64::from((logit / temperature).exp() / total);
            let seen = drawn.iter().filter(|&&t| t as usize == token).count() as f64 / n as f64;
            // Five standard deviations; the seed is fixed, so this holds or it does not.
            let bound = 5.0 * (expected * (1.0 - expected) / n as f64).sqrt();
            assert!((seen - expected).abs() < bound, "{temperature}: {token} seen {seen} of {expected}");
        }
    }
}

#[test]
fn nucleus_is_the_smallest_set_that_reaches_p() {
    // Probabilities 0.5, 0.25, 0.15, 0.1.
    let logits = [0.15f32.ln(), 0.5f32.ln(), 0.1f32.ln(), 0.25f32.ln()];
    for (p, expected) in [(0.4, vec![1]), (0.6, vec![1, 3]), (0.8, vec![1, 3, 0]), (0.95, vec![1, 3, 0, 2])] {
        let seen: HashSet<_> = draws(&logits, &params(1.0, None, p), 2_000).into_iter().collect();
        assert_eq!(seen, expected.into_iter().collect(), "top_p {p}");
    }
}

#[test]
fn a_wide_nucleus_goes_beyond_the_first_sorted() {
    let logits = vec![0.0; 4 * FIRST_SORTED];
    let mut candidates = weigh(&logits, 0.0, 1.0);
    keep_nucleus(&mut candidates, 0.75);
    assert_eq!(candidates.len(), 3 * FIRST_SORTED);
    assert!(candidates.iter().zip(0..).all(|(candidate, token)| candidate.token == token));
}

#[test]
fn seed_and_position_decide_the_draw() {
    let logits = vec![0.0; 1000];
    let one = draws(&logits, &params(1.0, None, 1.0), 50);
    assert_eq!(one, draws(&logits, &params(1.0, None, 1.0), 50));
    let other = draws(&logits, &SamplingParams { seed: 43, ..params(1.0, None, 1.0) }, 50);
    assert_ne!(one, other);
    assert!(one.iter().collect::<HashSet<_>>().len() > 40, "positions draw independently");
}

#[test]
fn a_bias_decides_what_is_greedy() {
    let logits = [0.5, 2.0, -1.0];
    let bias = SamplingParams { logit_bias: vec![(2, 3.5)], ..SamplingParams::greedy() };
    assert_eq!(token(&logits, &bias, 0), 2);
    let ban = SamplingParams { logit_bias: vec![(1, -100.0)], ..SamplingParams::greedy() };
    assert_eq!(token(&logits, &ban, 0), 0);
}

#[test]
fn withheld_tokens_are_not_drawn_at_any_temperature() {
    let logits = [0.0, 9.0, 1.0];
    for temperature in [0.0, 1.0, 2.0] {
        let params =
            SamplingParams { min_tokens: 100, withheld_tokens: vec![1], ..params(temperature, None, 1.0) };
        assert!(!draws(&logits, &params, 100).contains(&1));
        assert!(draws(&logits, &params, 300)[100..].contains(&1));
    }
}

#[test]
fn log_probabilities_are_of_the_logits_before_any_parameter() {
    let logits = [0.15f32.ln() + 7.0, 0.5f32.ln() + 7.0, 0.1f32.ln() + 7.0, 0.25f32.ln() + 7.0];
    let params = SamplingParams {
        logprobs: Some(2),
        logit_bias: vec![(2, 100.0)],
        temperature: 0.1,
        ..SamplingParams::default()
    };
    let drawn = sample(&logits, &request(params.clone(), 0)).unwrap();
    let found = drawn.logprobs.unwrap();
    assert_eq!(drawn.token, 2);
    assert!((found.drawn - 0.1f32.ln()).abs() < 1e-6);
    assert_eq!(found.top.iter().map(|(token, _)| *token).collect::<Vec<_>>(), [1, 3]);
    assert!((found.top[0].1 - 0.5f32.ln()).abs() < 1e-6 && (found.top[1].1 - 0.25f32.ln()).abs() < 1e-6);
    let none = SamplingParams { logprobs: Some(0), ..params.clone() };
    assert!(sample(&logits, &request(none, 0)).unwrap().logprobs.unwrap().top.is_empty());
    let all = SamplingParams { logprobs: Some(20), ..params };
    assert_eq!(sample(&logits, &request(all, 0)).unwrap().logprobs.unwrap().top.len(), 4);
}

proptest! {
    #[test]
    fn draws_stay_within_min_p(
        logits in prop::collection::vec(-8.0f32..8.0, 1..100), min_p in 0.01f32..=1.0, temperature in 0.1f32..3.0,
    ) {
        let params = SamplingParams { min_p, ..params(temperature, None, 1.0) };
        let total: f64 = logits.iter().map(|&logit| f64::from(logit / temperature).exp()).sum();
        let probability = |token: u32| f64::from(logits[token as usize] / temperature).exp() / total;
        let highest = probability(ranked(&logits)[0]);
        for token in draws(&logits, &params, 40) {
            prop_assert!(probability(token) >= f64::from(min_p) * highest * (1.0 - 1e-4));
        }
    }

    #[test]
    fn draws_stay_within_top_k_and_top_p(
        logits in prop::collection::vec(-8.0f32..8.0, 1..600),
        k in 1u32..50,
        p in 0.05f32..1.0,
        temperature in 0.1f32..3.0,
    ) {
        let ranked = ranked(&logits);
        let params = params(temperature, Some(k), p);
        let highest = logits[ranked[0] as usize];
        let weights: Vec<f64> = ranked.iter().take(k as usize)
            .map(|&token| f64::from((logits[token as usize] - highest) / temperature).exp()).collect();
        let total: f64 = weights.iter().sum();
        // A hair beyond p, for the sums here are in f64 of another exponential.
        let mut before = 0.0;
        let kept = weights.iter()
            .take_while(|&&weight| { let keep = before < (f64::from(p) + 1e-4) * total; before += weight; keep })
            .count();
        for token in draws(&logits, &params, 40) {
            prop_assert!(ranked[..kept].contains(&token), "{token} is not among the first {kept}");
        }
    }
}
