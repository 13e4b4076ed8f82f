//! Dynamo's cost.
//!
//! From `design/protocols.md` §4: argmin of `max((active_prefill_tokens + input_tokens) / block − overlap_blocks, 0) +
//! decode_blocks`, without the optional softmax. Its index is fed by the engines' KV events, so that it knows their caches.

use super::{Choice, IndexSource, IndexUse, Policy};
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

    fn costs(&self, request: &RequestView<'_>, choice: &Choice<'_>) -> Vec<f64> {
        let cost = |prefill: u32, hit: u32, held: u32| {
            let to_compute = (f64::from(prefill) + request.prompt_tokens as f64) / BLOCK_TOKENS;
            let overlap = (f64::from(hit) / BLOCK_TOKENS).floor();
            (to_compute - overlap).max(0.0) + (f64::from(held) / BLOCK_TOKENS).ceil()
        };
        let candidates = choice.candidates.iter();
        candidates.map(|one| cost(one.load.prefill_tokens, one.hit_tokens, one.load.context_tokens)).collect()
    }
}
