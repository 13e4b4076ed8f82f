//! How late simulated steps were: counted without a lock by the engine's thread, read by whoever asks.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::Serialize;

/// Counters for each doubling: a value read off is up to 1/16 too high.
const FINENESS: usize = 16;
const COUNTERS: usize = 40 * FINENESS;
/// Shares are counted in ten-thousandths.
const SHARE_UNITS: f64 = 10_000.0;

/// How late steps were, absolutely and as a share of what they should have taken.
#[derive(Debug, Default)]
pub struct Lateness {
    micros: Histogram,
    shares: Histogram,
    /// Together.
    total_micros: AtomicU64,
}

/// What is read of it. A quantile of nothing is 0.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct LatenessSummary {
    /// Steps so far.
    pub steps: u64,
    /// Half of the steps were not later than this, in milliseconds.
    pub p50_ms: f64,
    /// 99 % of the steps were not later than this, in milliseconds.
    pub p99_ms: f64,
    /// The latest step, in milliseconds.
    pub max_ms: f64,
    /// Half of the steps were not later than this share of themselves, in percent.
    pub p50_percent_of_step: f64,
    /// 99 % of the steps were not later than this share of themselves, in percent.
    pub p99_percent_of_step: f64,
    /// All steps together, in seconds.
    pub sum_s: f64,
}

impl Lateness {
    /// A step that should have taken `step` came `late`.
    pub fn note(&self, late: Duration, step: Duration) {
        let micros = u64::try_from(late.as_micros()).unwrap_or(u64::MAX);
        self.micros.note(micros);
        self.total_micros.fetch_add(micros, Ordering::Relaxed);
        if !step.is_zero() {
            // Saturates.
            self.shares.note((late.div_duration_f64(step) * SHARE_UNITS) as u64);
        }
    }

    /// The counts now.
    #[must_use]
    pub fn summary(&self) -> LatenessSummary {
        let ms = |micros: u64| micros as f64 / 1e3;
        let percent = |share: u64| share as f64 * 100.0 / SHARE_UNITS;
        LatenessSummary {
            steps: self.micros.count(),
            p50_ms: ms(self.micros.quantile(0.50)),
            p99_ms: ms(self.micros.quantile(0.99)),
            max_ms: ms(self.micros.max.load(Ordering::Relaxed)),
            p50_percent_of_step: percent(self.shares.quantile(0.50)),
            p99_percent_of_step: percent(self.shares.quantile(0.99)),
            sum_s: self.total_micros.load(Ordering::Relaxed) as f64 / 1e6,
        }
    }
}

/// Counts of whole numbers, close together for small ones and far apart for large ones.
#[derive(Debug)]
struct Histogram {
    counters: Box<[AtomicU64]>,
    max: AtomicU64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { counters: (0..COUNTERS).map(|_| AtomicU64::new(0)).collect(), max: AtomicU64::new(0) }
    }
}

impl Histogram {
    fn note(&self, value: u64) {
        self.counters[counter_of(value)].fetch_add(1, Ordering::Relaxed);
        self.max.fetch_max(value, Ordering::Relaxed);
    }

    fn count(&self) -> u64 {
        self.counters.iter().map(|counter| counter.load(Ordering::Relaxed)).sum()
    }

    /// The largest value of the counter in which the quantile lies, and not more than the largest value of all.
    fn quantile(&self, quantile: f64) -> u64 {
        let rank = (self.count() as f64 * quantile).ceil() as u64;
        let mut seen = 0;
        for (index, counter) in self.counters.iter().enumerate() {
            seen += counter.load(Ordering::Relaxed);
            if seen >= rank.max(1) {
                return largest_of(index).min(self.max.load(Ordering::Relaxed));
            }
        }
        0
    }
}

/// Values below [`FINENESS`] have a counter each; above, each doubling has [`FINENESS`] of them.
fn counter_of(value: u64) -> usize {
    let fineness = FINENESS.trailing_zeros();
    let doublings = (63 - value.max(1).leading_zeros()).saturating_sub(fineness);
    let within = (value >> doublings) as usize;
    (doublings as usize * FINENESS + within).min(COUNTERS - 1)
}

fn largest_of(counter: usize) -> u64 {
    if counter < 2 * FINENESS {
        return counter as u64;
    }
    let doublings = counter / FINENESS - 1;
    let within = (counter % FINENESS + FINENESS) as u64;
    ((within + 1) << doublings) - 1
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_counter_holds_its_values_and_no_smaller_ones(value in 0u64..1 << 40) {
            let counter = counter_of(value);
            prop_assert!(value <= largest_of(counter));
            prop_assert!(counter == 0 || largest_of(counter - 1) < value);
        }

        #[test]
        fn quantiles_are_at_most_a_sixteenth_too_high(mut values in prop::collection::vec(0u64..1 << 30, 1..200)) {
            let histogram = Histogram::default();
            values.iter().for_each(|value| histogram.note(*value));
            values.sort_unstable();
            for quantile in [0.5, 0.99, 1.0] {
                let exact = values[((values.len() as f64 * quantile).ceil() as usize).max(1) - 1];
                let read = histogram.quantile(quantile);
                prop_assert!(exact <= read && read <= exact + exact / 16 + 1, "{} read as {}", exact, read);
            }
        }
    }

    #[test]
    fn a_summary_says_how_late_and_what_share_that_is() {
        let lateness = Lateness::default();
        assert_eq!(lateness.summary().p99_ms, 0.0);
        for _ in 0..99 {
            lateness.note(Duration::from_micros(100), Duration::from_millis(10));
        }
        lateness.note(Duration::from_millis(5), Duration::from_millis(10));
        let summary = lateness.summary();
        assert_eq!((summary.steps, summary.max_ms), (100, 5.0));
        assert!((0.1..=0.107).contains(&summary.p50_ms) && (0.1..=0.107).contains(&summary.p99_ms));
        assert!((1.0..=1.07).contains(&summary.p99_percent_of_step));
        assert!((summary.sum_s - 0.0149).abs() < 1e-9);
    }
}
