//! Fewest requests in flight.

use super::{Choice, Policy};
use crate::request::RequestView;

/// Picks the worker with the fewest requests in flight, in turn among equals.
#[derive(Clone, Copy, Debug)]
pub struct LeastLoad;

impl Policy for LeastLoad {
    fn name(&self) -> &'static str {
        "least_load"
    }

    fn costs(&self, _: &RequestView<'_>, choice: &Choice<'_>) -> Vec<f64> {
        choice.candidates.iter().map(|candidate| f64::from(candidate.load.requests)).collect()
    }
}
