//! Drawing a token from logits: a pure function of the logits, the parameters, the seed and the position.
//!
//! Order of application: temperature, top-k, top-p, as [`worker_core::sampling::SamplingParams`] says.

use roundhouse_types::TokenId;
use worker_core::sampling::SamplingParams;
use worker_core::step::SampleRequest;

/// Candidates looked at first when top-p needs them sorted; nearly always enough.
const FIRST_SORTED: usize = 256;

/// Why no token could be drawn.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SampleError {
    /// There are no logits, or one is not a number or infinite.
    #[error("logits are not finite numbers")]
    NotFinite,
}

/// Draws the token that follows.
///
/// # Errors
/// [`SampleError::NotFinite`] when the logits are no numbers: a broken model rather than a bad request.
pub fn sample(logits: &[f32], request: &SampleRequest) -> Result<TokenId, SampleError> {
    let best = greedy(logits)?;
    let params = &request.params;
    if params.temperature == 0.0 || params.top_k == Some(1) {
        return Ok(best);
    }
    let draw = uniform(params.seed, request.generated_tokens);
    Ok(draw_from(weigh(logits, logits[best as usize], params.temperature), params, draw))
}

/// The highest logit; the lowest token among equals.
fn greedy(logits: &[f32]) -> Result<TokenId, SampleError> {
    let mut best: Option<(TokenId, f32)> = None;
    for (token, &logit) in (0..).zip(logits) {
        if !logit.is_finite() {
            return Err(SampleError::NotFinite);
        }
        if best.is_none_or(|(_, highest)| logit > highest) {
            best = Some((token, logit));
        }
    }
    best.map(|(token, _)| token).ok_or(SampleError::NotFinite)
}

/// A token and its probability, up to the common factor.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Candidate {
    token: TokenId,
    weight: f32,
}

/// Most probable first; the lower token among equals, so that the order is total.
fn by_weight(a: &Candidate, b: &Candidate) -> std::cmp::Ordering {
    b.weight.total_cmp(&a.weight).then(a.token.cmp(&b.token))
}

fn weigh(logits: &[f32], highest: f32, temperature: f32) -> Vec<Candidate> {
    let weight = |(token, &logit): (TokenId, &f32)| {
        // The best has weight 1, so that a tiny temperature cannot overflow.
        Candidate { token, weight: ((logit - highest) / temperature).exp() }
    };
    (0..).zip(logits).map(weight).collect()
}

fn draw_from(mut candidates: Vec<Candidate>, params: &SamplingParams, draw: f64) -> TokenId {
    if let Some(k) = params.top_k.map(|k| k as usize).filter(|&k| k < candidates.len()) {
        candidates.select_nth_unstable_by(k - 1, by_weight);
        candidates.truncate(k);
        // Selection leaves them in no order that could be relied on.
        candidates.sort_unstable_by(by_weight);
    }
    if params.top_p < 1.0 {
        keep_nucleus(&mut candidates, f64::from(params.top_p));
    }
    let target = draw * total(&candidates);
    let mut sum = 0.0;
    for candidate in &candidates {
        sum += f64::from(candidate.weight);
        if sum > target {
            return candidate.token;
        }
    }
    // Rounding may leave the sum a hair short of the target; the last one that has weight stands for it.
    candidates.iter().rev().find(|candidate| candidate.weight > 0.0).map_or(0, |candidate| candidate.token)
}

fn total(candidates: &[Candidate]) -> f64 {
    candidates.iter().map(|candidate| f64::from(candidate.weight)).sum()
}

/// Keeps the smallest set of most probable candidates that reaches `p`, sorted; always at least one.
///
/// Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration".
fn keep_nucleus(candidates: &mut Vec<Candidate>, p: f64) {
    let target = p * total(candidates);
    let mut sorted = FIRST_SORTED.min(candidates.len());
    loop {
        if sorted < candidates.len() {
            candidates.select_nth_unstable_by(sorted - 1, by_weight);
        }
        candidates[..sorted].sort_unstable_by(by_weight);
        let mut sum = 0.0;
        let reached = candidates[..sorted].iter().position(|candidate| {
            sum += f64::from(candidate.weight);
            sum >= target
        });
        if let Some(last) = reached {
            return candidates.truncate(last + 1);
        }
        if sorted == candidates.len() {
            return;
        }
        sorted = (sorted * 4).min(candidates.len());
    }
}

/// A number in `[0, 1)` that depends on seed and position only: SplitMix64 (Steele, Lea & Flood 2014) over both.
fn uniform(seed: u64, generated_tokens: u64) -> f64 {
    let mixed = mix(mix(seed) ^ generated_tokens);
    (mixed >> 11) as f64 / (1u64 << 53) as f64
}

fn mix(state: u64) -> u64 {
    let mut z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;

    fn request(params: SamplingParams, generated_tokens: u64) -> SampleRequest {
        SampleRequest { params: Arc::new(params), generated_tokens }
    }

    fn params(temperature: f32, top_k: Option<u32>, top_p: f32) -> SamplingParams {
        SamplingParams { temperature, top_k, top_p, seed: 42 }
    }

    /// Tokens drawn at positions `0..draws`.
    fn draws(logits: &[f32], params: &SamplingParams, draws: u64) -> Vec<TokenId> {
        (0..draws).map(|position| sample(logits, &request(params.clone(), position)).unwrap()).collect()
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
        assert_eq!(sample(&logits, &request(SamplingParams::greedy(), 0)), Ok(1));
        assert_eq!(sample(&logits, &request(params(1.0, Some(1), 1.0), 0)), Ok(1));
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
        for (p, expected) in
            [(0.4, vec![1]), (0.6, vec![1, 3]), (0.8, vec![1, 3, 0]), (0.95, vec![1, 3, 0, 2])]
        {
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

    proptest! {
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
}
