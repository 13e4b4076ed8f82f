//! Each worker in turn.

use super::{Choice, Policy};
use crate::request::RequestView;

/// Picks the worker that was picked longest ago; the same as a turning counter while the fleet stands still, and fair
/// when workers come, go or are left out of a retry.
#[derive(Clone, Copy, Debug)]
pub struct RoundRobin;

impl Policy for RoundRobin {
    fn name(&self) -> &'static str {
        "round_robin"
    }

    fn costs(&self, _: &RequestView<'_>, choice: &Choice<'_>) -> Vec<f64> {
        choice.candidates.iter().map(|candidate| candidate.load.last_pick as f64).collect()
    }
}
