//! Recursive least squares of intervals over what was computed in them.

use super::{Observation, PrefillSpeed};

/// What the features are divided by, so that all three are about one.
const TOKENS: f64 = 1e3;
const PAIRS: f64 = 1e6;
/// Weight of what is known already, against each new observation: some five hundred count.
const FORGETTING: f64 = 0.998;
/// How little the start values are trusted: variance of a coefficient, relative to its start value squared.
const START_VARIANCE: f64 = 100.0;
/// An interval this many times what was expected says that something else happened; it counts as so much.
const LARGEST_SURPRISE: f64 = 4.0;
/// Coefficients stay above this share of their start values' ratio to one another, so that a queue is never free.
const LEAST_TOKEN_S: f64 = 1e-8;

/// d, p and q, and how sure of them.
#[derive(Clone, Debug)]
pub(super) struct Regression {
    speed: PrefillSpeed,
    /// In scaled units.
    coefficients: [f64; 3],
    covariance: [[f64; 3]; 3],
}

impl Default for Regression {
    fn default() -> Self {
        let speed = PrefillSpeed::default();
        let coefficients = [speed.fixed_s, speed.token_s * TOKENS, speed.pair_s * PAIRS];
        let mut covariance = [[0.0; 3]; 3];
        for (at, row) in covariance.iter_mut().enumerate() {
            row[at] = START_VARIANCE;
        }
        Self { speed, coefficients, covariance }
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
        self.update(features, weight * seen_s);
        let [fixed_s, token_s, pair_s] = self.coefficients;
        self.speed = PrefillSpeed {
            fixed_s: fixed_s.max(0.0),
            token_s: (token_s / TOKENS).max(LEAST_TOKEN_S),
            pair_s: (pair_s / PAIRS).max(0.0),
            ..self.speed
        };
    }

    fn update(&mut self, features: [f64; 3], seen: f64) {
        let dot = |one: &[f64; 3], two: &[f64; 3]| one.iter().zip(two).map(|(a, b)| a * b).sum::<f64>();
        let spread = self.covariance.map(|row| dot(&row, &features));
        let error = seen - dot(&self.coefficients, &features);
        let scale = FORGETTING + dot(&features, &spread);
        for (at, coefficient) in self.coefficients.iter_mut().enumerate() {
            *coefficient += spread[at] / scale * error;
            for (cell, other) in self.covariance[at].iter_mut().zip(&spread) {
                *cell = (*cell - spread[at] / scale * other) / FORGETTING;
            }
        }
        // What does not vary is not seen; its variance must not grow for ever.
        for (at, row) in self.covariance.iter_mut().enumerate() {
            row[at] = row[at].min(START_VARIANCE);
        }
    }
}
