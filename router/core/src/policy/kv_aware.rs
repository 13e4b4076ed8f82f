//! LMetric (arXiv 2603.15202), which is vllm-router's `kv_aware`.
//!
//! From `design/protocols.md` §4: argmin of (new prefill tokens + prefill tokens in flight) × (requests in flight + 1), scored and
//! reserved under one lock.

use super::{Choice, Policy};
use crate::request::{PromptUse, RequestView};

/// Picks by the product of prefill work and batch size.
#[derive(Clone, Copy, Debug)]
pub struct KvAware;

impl Policy for KvAware {
    fn name(&self) -> &'static str {
        "kv_aware"
    }

    fn prompt_use(&self) -> PromptUse {
        PromptUse::Whole
    }

    fn costs(&self, request: &RequestView<'_>, choice: &Choice<'_>) -> Vec<f64> {
        let cost = |new: usize, queued: u32, requests: u32| {
            (new as f64 + f64::from(queued)) * (f64::from(requests) + 1.0)
        };
        let candidates = choice.candidates.iter();
        candidates
            .map(|one| cost(one.new_tokens(request), one.load.prefill_tokens, one.load.requests))
            .collect()
    }
}
