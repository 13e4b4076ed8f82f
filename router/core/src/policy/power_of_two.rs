//! The less loaded of two.

use rand::{Rng, RngExt};

use super::{Choice, Policy, cheapest};
use crate::request::RequestView;

/// Draws two different workers and picks the one with fewer requests in flight (Mitzenmacher, "The Power of Two
/// Choices in Randomized Load Balancing", 1996).
#[derive(Clone, Copy, Debug)]
pub struct PowerOfTwo;

impl Policy for PowerOfTwo {
    fn name(&self) -> &'static str {
        "power_of_two"
    }

    fn costs(&self, _: &RequestView<'_>, choice: &Choice<'_>) -> Vec<f64> {
        choice.candidates.iter().map(|candidate| f64::from(candidate.load.requests)).collect()
    }

    fn pick(&self, request: &RequestView<'_>, choice: &Choice<'_>, rng: &mut dyn Rng) -> usize {
        let count = choice.candidates.len();
        if count == 1 {
            return 0;
        }
        let first = rng.random_range(0..count);
        let second = (first + rng.random_range(1..count)) % count;
        let costs = self.costs(request, choice);
        let two = [choice.candidates[first], choice.candidates[second]];
        [first, second][cheapest(&[costs[first], costs[second]], &two)]
    }
}
