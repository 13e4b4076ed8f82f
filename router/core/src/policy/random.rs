//! Any worker, each as likely as the other.

use rand::{Rng, RngExt};

use super::{Choice, Policy};
use crate::request::RequestView;

/// Draws a worker at random.
#[derive(Clone, Copy, Debug)]
pub struct Random;

impl Policy for Random {
    fn name(&self) -> &'static str {
        "random"
    }

    fn costs(&self, _: &RequestView<'_>, choice: &Choice<'_>) -> Vec<f64> {
        vec![0.0; choice.candidates.len()]
    }

    fn pick(&self, _: &RequestView<'_>, choice: &Choice<'_>, rng: &mut dyn Rng) -> usize {
        rng.random_range(0..choice.candidates.len())
    }
}
