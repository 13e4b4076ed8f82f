//! Dynamo's cost.
//!
//! From `design/protocols.md` §4: argmin of `max((active_prefill_tokens + input_tokens) / block − overlap_blocks, 0) +
//! decode_blocks`, without the optional softmax. Its index is fed by the engines' KV events, so that it knows their caches. The decode blocks are
//! those that would be in use with the request, each counted once however many have it (Dynamo's `ActiveSequences`; its router design document).

use super::{Candidate, Choice, IndexSource, IndexUse, Policy};
use crate::request::{PromptUse, RequestView};

/// Its block size beside vLLM; both terms are in blocks, so that it matters for rounding only.
const BLOCK_TOKENS: f64 = 16.0;

/// Picks by blocks to compute plus blocks held.
#[derive(Clone, Copy, Debug)]
pub struct Dynamo;

impl Policy for Dynamo {
    fn name(&self) -> &'static str {
        "dynamo"
    }

    fn prompt_use(&self) -> PromptUse {
        PromptUse::Whole
    }

    fn index_use(&self) -> IndexUse {
        IndexUse { source: IndexSource::Reported, ..IndexUse::default() }
    }

    fn counts_shared(&self) -> bool {
        true
    }

    fn costs(&self, request: &RequestView<'_>, choice: &Choice<'_>) -> Vec<f64> {
        let prompt_tokens = request.prompt_tokens as f64;
        let cost = |(at, one): (usize, &Candidate)| {
            let to_compute = (f64::from(one.load.prefill_tokens) + prompt_tokens) / BLOCK_TOKENS;
            let overlap = (f64::from(one.hit_tokens) / BLOCK_TOKENS).floor();
            let shared = f64::from(choice.shared_tokens.get(at).copied().unwrap_or(0));
            let in_use = f64::from(one.load.held_tokens) + prompt_tokens - shared;
            (to_compute - overlap).max(0.0) + (in_use / BLOCK_TOKENS).ceil()
        };
        choice.candidates.iter().enumerate().map(cost).collect()
    }
}
