//! Lengths of the requests of a recorded run, from what was printed of them.
//!
//! `random` and fixed-length runs had lengths that follow from the totals. Of ShareGPT only the totals are known: prompts and answers are
//! taken to be log-normal, cut at what the originals' datasets allow, and scaled to the totals. That shape is an assumption.

use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};

use super::Run;

/// Standard deviation of the logarithm of ShareGPT's lengths.
const SPREAD: f64 = 1.1;
/// The longest ShareGPT prompt or answer.
const LONGEST_TOKENS: f64 = 2_048.0;

/// `(prompt, answer)` in tokens, in the order they are sent.
pub(super) fn of(run: &Run, seed: u64) -> Vec<(u32, u32)> {
    let count = run.requests;
    let (input, output) = if run.dataset.starts_with("sharegpt") {
        let mut rng = SmallRng::seed_from_u64(seed);
        (log_normal(run.input_tokens, count, &mut rng), log_normal(run.output_tokens, count, &mut rng))
    } else {
        (even(run.input_tokens, count), even(run.output_tokens, count))
    };
    input.into_iter().zip(output).collect()
}

/// `total` as evenly over `count` as whole numbers go.
fn even(total: u64, count: usize) -> Vec<u32> {
    let count = count as u64;
    let share = |at: u64| total / count + u64::from(at < total % count);
    (0..count).map(|at| u32::try_from(share(at)).unwrap_or(u32::MAX)).collect()
}

/// `count` lengths of one log-normal, one from each of as many equal parts of it, in random order, with the sum `total`.
fn log_normal(total: u64, count: usize, rng: &mut SmallRng) -> Vec<u32> {
    let of_part = |at: usize, rng: &mut SmallRng| {
        let share = (at as f64 + rng.random::<f64>()) / count as f64;
        (SPREAD * normal_quantile(share)).exp()
    };
    let mut shape: Vec<f64> = (0..count).map(|at| of_part(at, rng)).collect();
    shape.shuffle(rng);
    let cut = |value: f64, scale: f64| (value * scale).clamp(1.0, LONGEST_TOKENS);
    let sum = |scale: f64| shape.iter().map(|value| cut(*value, scale)).sum::<f64>();
    let (mut low, mut high) = (1e-3, LONGEST_TOKENS);
    for _ in 0..60 {
        let middle = f64::midpoint(low, high);
        if sum(middle) < total as f64 { low = middle } else { high = middle }
    }
    let mut lengths = Vec::with_capacity(count);
    let mut carried = 0.0;
    for value in shape {
        // What rounding takes from one is given to the next.
        let wanted = cut(value, low) + carried;
        let rounded = wanted.round().max(1.0);
        carried = wanted - rounded;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "between 1 and LONGEST_TOKENS + 1"
        )]
        lengths.push(rounded as u32);
    }
    lengths
}

/// The standard normal's quantile at `share`, within 5e-4 (Abramowitz and Stegun, 26.2.23).
fn normal_quantile(share: f64) -> f64 {
    let tail = share.min(1.0 - share).max(1e-12);
    let t = (-2.0 * tail.ln()).sqrt();
    let above = 2.515_517 + t * (0.802_853 + t * 0.010_328);
    let below = 1.0 + t * (1.432_788 + t * (0.189_269 + t * 0.001_308));
    let magnitude = t - above / below;
    if share < 0.5 { -magnitude } else { magnitude }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_add_up_to_what_was_recorded() {
        let mut rng = SmallRng::seed_from_u64(1);
        let lengths = log_normal(2_258_583, 10_000, &mut rng);
        let sum: u64 = lengths.iter().map(|length| u64::from(*length)).sum();
        assert!(sum.abs_diff(2_258_583) <= 2, "{sum}");
        let mut sorted = lengths;
        sorted.sort_unstable();
        assert!(sorted[0] >= 1 && sorted[9_999] <= 2_049);
        assert!(sorted[5_000] < 226 * 3 / 4, "the median is far below the mean: {}", sorted[5_000]);
        assert_eq!(even(10, 4), [3, 3, 2, 2]);
    }

    #[test]
    fn the_quantile_is_that_of_the_normal_distribution() {
        for (share, quantile) in [(0.5, 0.0), (0.841_345, 1.0), (0.022_75, -2.0), (0.998_65, 3.0)] {
            assert!((normal_quantile(share) - quantile).abs() < 1e-3, "{share}");
        }
    }
}
