//! AIBrix's prefix-cache routing.
//!
//! From `design/protocols.md` §4: if the spread of running requests exceeds 16, the least loaded; else pods by match, the best first, and of
//! them the first whose running requests are at most mean + k·σ. Its table forgets after 20 minutes.

use std::time::Duration;

use super::{Choice, IndexBound, IndexUse, Policy};
use crate::request::{PromptUse, RequestView};

const SPREAD_REQUESTS: u32 = 16;
/// k.
const DEVIATIONS: f64 = 1.0;
const LIFETIME: Duration = Duration::from_secs(20 * 60);

/// Picks the best match that is not overloaded.
#[derive(Clone, Copy, Debug)]
pub struct Aibrix;

impl Policy for Aibrix {
    fn name(&self) -> &'static str {
        "aibrix"
    }

    fn prompt_use(&self) -> PromptUse {
        PromptUse::Whole
    }

    fn index_use(&self) -> IndexUse {
        IndexUse { bound: IndexBound::None, lifetime: Some(LIFETIME), ..IndexUse::default() }
    }

    /// Requests in flight; or matched tokens below zero, infinite for pods beyond the bound.
    fn costs(&self, _: &RequestView<'_>, choice: &Choice<'_>) -> Vec<f64> {
        let candidates = choice.candidates;
        let running = || candidates.iter().map(|one| one.load.requests);
        let (most, fewest) = (running().max().unwrap_or(0), running().min().unwrap_or(0));
        let matches = candidates.iter().any(|one| one.hit_tokens > 0);
        if most - fewest > SPREAD_REQUESTS || !matches {
            return running().map(f64::from).collect();
        }
        let count = candidates.len() as f64;
        let mean = choice.requests as f64 / count;
        let variance = running().map(|requests| (f64::from(requests) - mean).powi(2)).sum::<f64>() / count;
        let bound = mean + DEVIATIONS * variance.sqrt();
        let cost = |requests: u32, hit: u32| match f64::from(requests) <= bound {
            true => -f64::from(hit),
            false => f64::INFINITY,
        };
        candidates.iter().map(|one| cost(one.load.requests, one.hit_tokens)).collect()
    }
}
