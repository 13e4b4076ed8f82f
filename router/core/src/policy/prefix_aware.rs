//! The least expected work: ours, and the default.
//!
//! `cost = W + x·(1 + q̄ + ω·A) + A·(a + c·prompt)`, in tokens of prefill:
//!
//! | term | meaning |
//! |---|---|
//! | `W` | uncached prompt tokens queued at the worker, which come first |
//! | `x` | this request's own uncached tokens there |
//! | `q̄` | mean requests without a first token, over the candidates: how many others wait while `x` is computed |
//! | `A` | requests decoding at the worker: `x` delays each of them, a second of decode being worth ω of a second of TTFT |
//! | `a + c·prompt` | what one more running sequence of this length slows each of the others down |
//!
//! `W` and `x` are what this request waits for; `x·q̄` makes repeating a prefill that another worker has done dearer the
//! busier the fleet is, so that a burst of siblings shares one; the last term lets a hot prefix overflow to other
//! workers instead of burying the one that has it. The form is that of the study in `design/policy.md`, with token
//! counts in place of learned speeds.

use super::{Choice, Policy};
use crate::request::{PromptUse, RequestView};

/// ω: a second of decode delay against a second of first-token delay.
const DECODE_WORTH: f64 = 0.1;
/// a: prefill tokens that one more running request is worth to each of the others, whatever its length. From a decode
/// step's slope of 0.03 ms a sequence over some 300 steps, ×ω, at 0.06 ms a prefilled token.
const RUNNING_TOKENS: f64 = 15.0;
/// c: the same for each token of its context: 0.088 µs a step over some 300 steps, ×ω, at 0.06 ms a token.
const RUNNING_SHARE_OF_PROMPT: f64 = 0.04;

/// Picks the worker where the request causes the least work and waiting.
#[derive(Clone, Copy, Debug)]
pub struct PrefixAware;

impl Policy for PrefixAware {
    fn name(&self) -> &'static str {
        "prefix_aware"
    }

    fn prompt_use(&self) -> PromptUse {
        PromptUse::Whole
    }

    fn costs(&self, request: &RequestView<'_>, choice: &Choice<'_>) -> Vec<f64> {
        let candidates = choice.candidates;
        let prefilling: usize = candidates.iter().map(|candidate| candidate.load.prefilling).sum();
        let mean_waiting = prefilling as f64 / candidates.len() as f64;
        let prompt = request.prompt_tokens as f64;
        let cost = |queued: usize, hit: usize, decoding: usize| {
            let own = request.prompt_tokens.saturating_sub(hit).max(1) as f64;
            let running = decoding as f64;
            let others = running * (RUNNING_TOKENS + RUNNING_SHARE_OF_PROMPT * prompt);
            queued as f64 + own * (1.0 + mean_waiting + DECODE_WORTH * running) + others
        };
        candidates
            .iter()
            .map(|candidate| {
                cost(candidate.load.prefill_tokens, candidate.hit_tokens, candidate.load.decoding())
            })
            .collect()
    }
}
