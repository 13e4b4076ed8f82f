//! Least squares of intervals over what was computed in them, old intervals counting less and less.
//!
//! Kept are the decayed sums of the normal equations, which rounding cannot make anything but symmetric and positive, however long a
//! router lives; a recursion over their inverse is cheaper by nothing that matters for three unknowns, and diverges after some ten
//! thousand observations. No coefficient is negative: one that would be is nought, and the others are fitted without it.

use super::{Observation, PrefillSpeed};

/// What the features are divided by, so that all three are about one.
const TOKENS: f64 = 1e3;
const PAIRS: f64 = 1e6;
/// Weight of what is known already, against each new observation: some five hundred count.
const FORGETTING: f64 = 0.998;
/// Weight of the start values against one observation, each in its own direction. It does not fade: where nothing varies, only the
/// start values can tell the coefficients apart.
const START_WEIGHT: f64 = 0.01;
/// Weight of the start values' ratios to one another. Where all prompts are about as long, d and p cannot be told apart, and what chance says of them
/// makes prompts cost nothing or everything; how fast all is together, these say nothing of.
const SHAPE_WEIGHT: f64 = 0.1;
/// An interval this many times what was expected says that something else happened; it counts as so much.
const LARGEST_SURPRISE: f64 = 4.0;
/// Coefficients stay above this share of their start values' ratio to one another, so that a queue is never free.
const LEAST_TOKEN_S: f64 = 1e-8;

/// d, p and q, and what they follow from.
#[derive(Clone, Debug)]
pub(super) struct Regression {
    speed: PrefillSpeed,
    /// Start values, in scaled units.
    start: [f64; 3],
    /// Decayed sums of products of two features, and of features and what was seen.
    products: [[f64; 3]; 3],
    seen: [f64; 3],
}

impl Default for Regression {
    fn default() -> Self {
        let speed = PrefillSpeed::default();
        let start = [speed.fixed_s, speed.token_s * TOKENS, speed.pair_s * PAIRS];
        Self { speed, start, products: [[0.0; 3]; 3], seen: [0.0; 3] }
    }
}

impl Regression {
    pub(super) fn speed(&self) -> PrefillSpeed {
        self.speed
    }

    pub(super) fn learn(&mut self, observation: &Observation) {
        let expected_s = self.speed.of(observation);
        let seen_s = observation.seconds / observation.ratio.max(1e-6);
        let seen_s = seen_s.clamp(expected_s / LARGEST_SURPRISE, expected_s * LARGEST_SURPRISE);
        // Relative errors are alike, so each observation is weighed by what was expected.
        let weight = 1.0 / expected_s.max(1e-9);
        let features = [weight, weight * observation.new_tokens / TOKENS, weight * observation.pairs / PAIRS];
        for (at, row) in self.products.iter_mut().enumerate() {
            for (cell, other) in row.iter_mut().zip(features) {
                *cell = *cell * FORGETTING + features[at] * other;
            }
            self.seen[at] = self.seen[at] * FORGETTING + features[at] * weight * seen_s;
        }
        let [fixed_s, token_s, pair_s] = self.fit();
        self.speed = PrefillSpeed {
            fixed_s,
            token_s: (token_s / TOKENS).max(LEAST_TOKEN_S),
            pair_s: pair_s / PAIRS,
            ..self.speed
        };
    }

    /// The coefficients, none of them negative.
    fn fit(&self) -> [f64; 3] {
        let mut is_fitted = [true; 3];
        loop {
            let fitted = self.fit_some(is_fitted);
            let least =
                (0..3).min_by(|a, b| fitted[*a].total_cmp(&fitted[*b])).filter(|at| fitted[*at] < 0.0);
            match least {
                Some(least) => is_fitted[least] = false,
                None => return fitted,
            }
        }
    }

    /// The coefficients, of which those that are not fitted are nought: Gauss's elimination, which needs no pivots here.
    fn fit_some(&self, is_fitted: [bool; 3]) -> [f64; 3] {
        let (mut left, mut right) = (self.products, self.seen);
        for at in 0..3 {
            for (other, cell) in left[at].iter_mut().enumerate() {
                let centred = f64::from(u8::from(at == other)) - 1.0 / 3.0;
                *cell += SHAPE_WEIGHT * centred / (self.start[at] * self.start[other]);
            }
            left[at][at] += START_WEIGHT;
            right[at] += START_WEIGHT * self.start[at];
            if !is_fitted[at] {
                left[at] = [0.0; 3];
                left.iter_mut().for_each(|row| row[at] = 0.0);
                left[at][at] = 1.0;
                right[at] = 0.0;
            }
        }
        for at in 0..3 {
            let (row, value) = (left[at].map(|cell| cell / left[at][at]), right[at] / left[at][at]);
            (left[at], right[at]) = (row, value);
            for other in (0..3).filter(|other| *other != at) {
                let factor = left[other][at];
                left[other].iter_mut().zip(row).for_each(|(cell, from)| *cell -= factor * from);
                right[other] -= factor * value;
            }
        }
        right
    }
}
