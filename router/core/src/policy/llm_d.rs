//! llm-d's endpoint picker: its default scorers, and its newer affinity valve.
//!
//! From `design/protocols.md` §4. Default: argmax `2·queue + 2·(1 − kv_usage) + 3·prefix`, `queue = (maxQ − q) / (maxQ − minQ)`, both of them
//! scraped every 50 ms; prefix = matched / total of at most 256 blocks of 64 characters, in an LRU of 31,250 blocks a pod. Valve: stay
//! with the warm pod until its uncached tokens in flight exceed the best cold pod's by τ, then argmin(uncached in flight
//! + prompt·(1 − hit)).

use std::time::Duration;

use super::{Candidate, Choice, IndexBound, IndexUse, Policy};
use crate::request::{PromptUse, RequestView};

/// 256 blocks of 64 characters, at four characters a token.
const READ_TOKENS: u32 = 256 * 64 / 4;
/// 31,250 blocks of 64 characters.
const LRU_TOKENS: usize = 31_250 * 64 / 4;
const SCRAPE_EVERY: Duration = Duration::from_millis(50);
const QUEUE_WEIGHT: f64 = 2.0;
const KV_WEIGHT: f64 = 2.0;
const PREFIX_WEIGHT: f64 = 3.0;
/// τ = R_peak · T_max: a second of prefill at 16,400 tokens a second.
const VALVE_TOKENS: u32 = 16_400;

/// The default scorers.
#[derive(Clone, Copy, Debug)]
pub struct LlmD;

impl Policy for LlmD {
    fn name(&self) -> &'static str {
        "llm_d"
    }

    fn prompt_use(&self) -> PromptUse {
        PromptUse::Whole
    }

    fn index_use(&self) -> IndexUse {
        IndexUse {
            bound: IndexBound::Tokens(LRU_TOKENS),
            first_tokens: Some(READ_TOKENS as usize),
            reports_every: Some(SCRAPE_EVERY),
            ..IndexUse::default()
        }
    }

    /// Seven less the score, so that lower is better.
    fn costs(&self, request: &RequestView<'_>, choice: &Choice<'_>) -> Vec<f64> {
        let queues = || (0..choice.candidates.len()).map(|at| choice.waiting_requests(at));
        let (most, fewest) = (queues().max().unwrap_or(0), queues().min().unwrap_or(0));
        let total = request.prompt_tokens.clamp(1, READ_TOKENS as usize) as f64;
        let score = |at: usize, one: &Candidate| {
            let queue = match most - fewest {
                0 => 1.0,
                spread => f64::from(most - choice.waiting_requests(at)) / f64::from(spread),
            };
            let prefix = f64::from(one.hit_tokens.min(READ_TOKENS)) / total;
            QUEUE_WEIGHT * queue + KV_WEIGHT * (1.0 - choice.kv_usage(at)) + PREFIX_WEIGHT * prefix
        };
        let candidates = choice.candidates.iter().enumerate();
        candidates.map(|(at, one)| QUEUE_WEIGHT + KV_WEIGHT + PREFIX_WEIGHT - score(at, one)).collect()
    }
}

/// The affinity valve.
#[derive(Clone, Copy, Debug)]
pub struct LlmDValve;

impl Policy for LlmDValve {
    fn name(&self) -> &'static str {
        "llm_d_valve"
    }

    fn prompt_use(&self) -> PromptUse {
        PromptUse::Whole
    }

    /// Uncached tokens in flight; with those of the prompt once the valve is open, without the cold pods while it is shut.
    fn costs(&self, request: &RequestView<'_>, choice: &Choice<'_>) -> Vec<f64> {
        let candidates = choice.candidates;
        let deepest = candidates.iter().map(|one| one.hit_tokens).max().unwrap_or(0);
        let is_warm = |one: &&Candidate| deepest > 0 && one.hit_tokens == deepest;
        let uncached = |one: &Candidate| one.load.prefill_tokens;
        let warm = candidates.iter().filter(is_warm).map(uncached).min();
        let cold = candidates.iter().filter(|one| !is_warm(one)).map(uncached).min();
        let stays = match (warm, cold) {
            (Some(warm), Some(cold)) => warm <= cold + VALVE_TOKENS,
            (warm, _) => warm.is_some(),
        };
        let cost = |one: &Candidate| match stays {
            true if is_warm(&one) => f64::from(uncached(one)),
            true => f64::INFINITY,
            false => f64::from(uncached(one)) + one.new_tokens(request) as f64,
        };
        candidates.iter().map(cost).collect()
    }
}
