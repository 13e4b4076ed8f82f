//! The first 256 tokens on a hash ring, with bounded load (Envoy's bounded consistent hashing; `prefix_hash` of several gateways).

use super::consistent_hash::bounded_walk;
use super::{Choice, LeastLoad, Policy};
use crate::request::{PromptUse, RequestView};

/// Hashes the prompt's beginning onto the ring; sessions play no part.
#[derive(Clone, Copy, Debug)]
pub struct PrefixHash;

impl Policy for PrefixHash {
    fn name(&self) -> &'static str {
        "prefix_hash"
    }

    fn prompt_use(&self) -> PromptUse {
        PromptUse::FirstKib
    }

    /// Steps along the ring; workers at their bound come after all that are not.
    fn costs(&self, request: &RequestView<'_>, choice: &Choice<'_>) -> Vec<f64> {
        match request.beginning() {
            Some(key) => bounded_walk(key, choice),
            None => LeastLoad.costs(request, choice),
        }
    }
}
