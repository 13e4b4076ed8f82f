//! Drawing a token from logits: a pure function of the logits, the parameters, the seed, the position and, for penalties, the
//! tokens before.
//!
//! Order of application as [`worker_core::sampling::SamplingParams`] says: [`adjust`](super::adjust) changes logits, then come
//! temperature, min-p, top-k and top-p here. A request that asks for none of the former pays nothing for them.

use roundhouse_types::TokenId;
use worker_core::sampling::{Logprobs, SamplingParams};
use worker_core::step::SampleRequest;

use super::adjust::adjust;

/// Candidates looked at first when top-p needs them sorted; nearly always enough.
const FIRST_SORTED: usize = 256;

/// Logits that are looked through in one go.
const PART: usize = 1_024;

/// Why no token could be drawn.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SampleError {
    /// There are no logits, or one is not a number or infinite.
    #[error("logits are not finite numbers")]
    NotFinite,
}

/// A token, and what was asked to be known about it.
#[derive(Clone, PartialEq, Debug)]
pub struct Drawn {
    /// The token.
    pub token: TokenId,
    /// Set when the parameters ask for it.
    pub logprobs: Option<Box<Logprobs>>,
}

/// Draws the token that follows.
///
/// # Errors
/// [`SampleError::NotFinite`] when the logits are no numbers: a broken model rather than a bad request.
pub fn sample(logits: &[f32], request: &SampleRequest) -> Result<Drawn, SampleError> {
    if !are_finite(logits) {
        return Err(SampleError::NotFinite);
    }
    let params = &request.params;
    let adjusted = adjust(logits, request);
    let best = greedy(&adjusted).ok_or(SampleError::NotFinite)?;
    let token = if params.temperature == 0.0 || params.top_k == Some(1) {
        best
    } else {
        let draw = uniform(params.seed, request.generated_tokens);
        draw_from(weigh(&adjusted, adjusted[best as usize], params.temperature), params, draw)
    };
    let logprobs = params.logprobs.map(|top| Box::new(logprobs(logits, token, top as usize)));
    Ok(Drawn { token, logprobs })
}

/// In parts, each without a branch: a vocabulary is long, and every sequence of a step is checked.
fn are_finite(logits: &[f32]) -> bool {
    logits.chunks(PART).all(|part| part.iter().fold(true, |finite, logit| finite & logit.is_finite()))
}

/// The highest logit; the lowest token among equals. Looks for it in the first part that has it.
fn greedy(logits: &[f32]) -> Option<TokenId> {
    let highest_of = |part: &[f32]| {
        let mut lanes = [f32::NEG_INFINITY; 8];
        let (whole, rest) = part.as_chunks::<8>();
        for numbers in whole {
            for (lane, number) in lanes.iter_mut().zip(numbers) {
                *lane = if *number > *lane { *number } else { *lane };
            }
        }
        lanes.iter().chain(rest).copied().fold(f32::NEG_INFINITY, f32::max)
    };
    let mut best = (0, f32::NEG_INFINITY);
    for (index, part) in logits.chunks(PART).enumerate() {
        let highest = highest_of(part);
        if highest > best.1 {
            best = (index * PART, highest);
        }
    }
    let from_best = logits.get(best.0..)?;
    let offset = from_best.iter().position(|logit| *logit == best.1)?;
    TokenId::try_from(best.0 + offset).ok()
}

/// Log-probabilities of the drawn token and of the `top` most probable ones.
pub(super) fn logprobs(logits: &[f32], drawn: TokenId, top: usize) -> Logprobs {
    let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - highest).exp()).sum();
    let log_sum = f64::from(highest) + sum.ln();
    let logprob = |logit: f32| (f64::from(logit) - log_sum) as f32;
    let mut candidates: Vec<Candidate> =
        (0..).zip(logits).map(|(token, &weight)| Candidate { token, weight }).collect();
    keep_heaviest(&mut candidates, top);
    let top = candidates.into_iter().map(|candidate| (candidate.token, logprob(candidate.weight))).collect();
    Logprobs { drawn: logprob(logits[drawn as usize]), top }
}

/// A token and its probability up to the common factor, or its logit.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Candidate {
    token: TokenId,
    weight: f32,
}

/// Most probable first; the lower token among equals, so that the order is total.
fn by_weight(a: &Candidate, b: &Candidate) -> std::cmp::Ordering {
    b.weight.total_cmp(&a.weight).then(a.token.cmp(&b.token))
}

/// Keeps the `k` heaviest, sorted; all of them, in any order, when there are no more.
fn keep_heaviest(candidates: &mut Vec<Candidate>, k: usize) {
    if k == 0 {
        return candidates.clear();
    }
    if k < candidates.len() {
        candidates.select_nth_unstable_by(k - 1, by_weight);
        candidates.truncate(k);
    }
    // Selection leaves them in no order that could be relied on.
    candidates.sort_unstable_by(by_weight);
}

fn weigh(logits: &[f32], highest: f32, temperature: f32) -> Vec<Candidate> {
    let weight = |(token, &logit): (TokenId, &f32)| {
        // The best has weight 1, so that a tiny temperature cannot overflow.
        Candidate { token, weight: ((logit - highest) / temperature).exp() }
    };
    (0..).zip(logits).map(weight).collect()
}

fn draw_from(mut candidates: Vec<Candidate>, params: &SamplingParams, draw: f64) -> TokenId {
    if params.min_p > 0.0 {
        // The most probable one weighs 1.
        candidates.retain(|candidate| candidate.weight >= params.min_p);
    }
    if let Some(k) = params.top_k.map(|k| k as usize).filter(|&k| k < candidates.len()) {
        keep_heaviest(&mut candidates, k);
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
#[path = "sample_tests.rs"]
mod tests;
