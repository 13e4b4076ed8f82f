//! vLLM production-stack's two policies for caches.
//!
//! From `design/protocols.md` §4. `prefixaware`: the pod with the longest match in a trie of 128-character chunks, without load and without
//! eviction. `session`: a hash ring on a session header, and for requests without one the pod of the lowest rate.

use rand::{Rng, RngExt};

use super::{Choice, IndexBound, IndexUse, Policy};
use crate::request::{PromptUse, RequestView};

/// Picks the longest match, any of them among equals.
#[derive(Clone, Copy, Debug)]
pub struct PstackPrefix;

impl Policy for PstackPrefix {
    fn name(&self) -> &'static str {
        "pstack_prefix"
    }

    fn prompt_use(&self) -> PromptUse {
        PromptUse::Whole
    }

    fn index_use(&self) -> IndexUse {
        IndexUse { bound: IndexBound::None, ..IndexUse::default() }
    }

    /// Matched tokens, below zero.
    fn costs(&self, _: &RequestView<'_>, choice: &Choice<'_>) -> Vec<f64> {
        choice.candidates.iter().map(|one| -f64::from(one.hit_tokens)).collect()
    }

    fn pick(&self, _: &RequestView<'_>, choice: &Choice<'_>, rng: &mut dyn Rng) -> usize {
        let deepest = choice.candidates.iter().map(|one| one.hit_tokens).max().unwrap_or(0);
        let holders = || choice.candidates.iter().enumerate().filter(|(_, one)| one.hit_tokens == deepest);
        let drawn = rng.random_range(0..holders().count());
        holders().nth(drawn).map_or(0, |(at, _)| at)
    }
}

/// Keeps sessions on a hash ring.
#[derive(Clone, Copy, Debug)]
pub struct PstackSession;

impl Policy for PstackSession {
    fn name(&self) -> &'static str {
        "pstack_session"
    }

    /// Steps along the ring. Without a session: when the pod was picked last; going to whoever waits longest evens out rates.
    fn costs(&self, request: &RequestView<'_>, choice: &Choice<'_>) -> Vec<f64> {
        let candidates = choice.candidates;
        let Some(session) = request.session else {
            return candidates.iter().map(|one| one.load.last_pick as f64).collect();
        };
        let mut costs = vec![f64::INFINITY; candidates.len()];
        for (steps, slot) in (choice.ring)().walk(session).enumerate() {
            if let Some(at) = candidates.iter().position(|candidate| candidate.slot == slot) {
                costs[at] = steps as f64;
                break;
            }
        }
        costs
    }
}
