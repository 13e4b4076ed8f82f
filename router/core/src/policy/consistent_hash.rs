//! A session stays where it is, unless that worker has more than its share.

use super::{Choice, LeastLoad, Policy};
use crate::request::{PromptUse, RequestView};

/// A worker may have this many times the mean number of requests before its sessions go on to the next on the ring
/// (Mirrokni et al., "Consistent Hashing with Bounded Loads", 2018).
const BOUND: f64 = 1.25;

/// Hashes the session header, or `user`, or the beginning of the prompt, onto a ring; goes on along the ring past
/// workers at their bound. Requests without any of these go to the least loaded.
#[derive(Clone, Copy, Debug)]
pub struct ConsistentHash;

impl Policy for ConsistentHash {
    fn name(&self) -> &'static str {
        "consistent_hash"
    }

    fn prompt_use(&self) -> PromptUse {
        PromptUse::FirstKib
    }

    /// The unit is steps along the ring; workers at their bound come after all that are not.
    fn costs(&self, request: &RequestView<'_>, choice: &Choice<'_>) -> Vec<f64> {
        match request.affinity() {
            Some(key) => bounded_walk(key, choice),
            None => LeastLoad.costs(request, choice),
        }
    }
}

/// For each candidate how many steps along the ring it is from `key`; at its bound, after all that are not. Infinite for
/// those beyond the one that gets the request.
pub(super) fn bounded_walk(key: u64, choice: &Choice<'_>) -> Vec<f64> {
    let candidates = choice.candidates;
    let bound = (BOUND * (choice.requests + 1) as f64 / candidates.len() as f64).ceil();
    let mut costs = vec![f64::INFINITY; candidates.len()];
    for (steps, slot) in (choice.ring)().walk(key).enumerate() {
        if let Some(at) = candidates.iter().position(|candidate| candidate.slot == slot) {
            let full = f64::from(candidates[at].load.requests + 1) > bound;
            costs[at] = steps as f64 + if full { 1e9 } else { 0.0 };
            if !full {
                // Whoever comes later on the ring costs more; no need to look.
                break;
            }
        }
    }
    costs
}
