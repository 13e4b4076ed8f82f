//! When each conversation should start: absolute offsets from the start of the run, fixed before it starts.
//!
//! Must not know what is sent, nor the clock. [`crate::run`] follows the schedule and measures how late it was.

use std::fmt;
use std::time::Duration;

use rand::RngExt;
use rand::rngs::Xoshiro256PlusPlus;

/// How many conversations start per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RequestRate {
    /// All at once.
    Infinite,
    /// A Poisson process of this rate.
    PerSecond(f64),
}

/// As Python prints the float: `inf`, `20.0`, `0.5`.
impl fmt::Display for RequestRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Infinite => f.pad("inf"),
            Self::PerSecond(rate) => f.pad(&format!("{rate:?}")),
        }
    }
}

/// The start of each of `count` conversations, ascending. The first starts at zero, as in the originals.
pub fn schedule(rate: RequestRate, count: usize, rng: &mut Xoshiro256PlusPlus) -> Vec<Duration> {
    let RequestRate::PerSecond(rate) = rate else {
        return vec![Duration::ZERO; count];
    };
    let mut at_seconds = 0.0;
    (0..count)
        .map(|_| {
            let start = Duration::from_secs_f64(at_seconds);
            at_seconds += exponential_seconds(rate, rng);
            start
        })
        .collect()
}

/// A gap of a Poisson process, by inversion: −ln(1 − u) / rate, with u in [0, 1).
fn exponential_seconds(rate: f64, rng: &mut Xoshiro256PlusPlus) -> f64 {
    let uniform: f64 = rng.random();
    -(1.0 - uniform).ln() / rate
}

/// How a start that came after its schedule divides into waiting for the concurrency limit and the client's own
/// lateness.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Delay {
    /// Waiting for `--max-concurrency`.
    pub queued: Duration,
    /// Neither scheduled nor waiting: the client was late.
    pub late: Duration,
}

/// Divides the delay of a start at `sent` that was due at `scheduled`, when the limit last held the line up until
/// `blocked_until`. All are offsets from the start of the run; starts are in schedule order, so that whoever was due
/// before `blocked_until` was waiting for the limit until then.
pub fn split_delay(scheduled: Duration, blocked_until: Duration, sent: Duration) -> Delay {
    let free = scheduled.max(blocked_until).min(sent.max(scheduled));
    Delay { queued: free - scheduled, late: sent.saturating_sub(free) }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;

    use super::*;

    fn rng(seed: u64) -> Xoshiro256PlusPlus {
        Xoshiro256PlusPlus::seed_from_u64(seed)
    }

    #[test]
    fn infinite_rate_starts_everything_at_zero() {
        assert_eq!(schedule(RequestRate::Infinite, 3, &mut rng(1)), [Duration::ZERO; 3]);
    }

    #[test]
    fn poisson_gaps_have_the_mean_and_spread_of_an_exponential() {
        let starts = schedule(RequestRate::PerSecond(50.0), 20_001, &mut rng(3));
        assert_eq!(starts[0], Duration::ZERO);
        let gaps: Vec<f64> = starts.windows(2).map(|w| (w[1] - w[0]).as_secs_f64()).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let variance = gaps.iter().map(|g| (g - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
        // Standard error of the mean at this count is 0.7 %; of the deviation about 1 %.
        assert!((mean * 50.0 - 1.0).abs() < 0.03, "mean gap {mean}");
        assert!((variance.sqrt() * 50.0 - 1.0).abs() < 0.05, "deviation {}", variance.sqrt());
    }

    #[test]
    fn the_same_seed_gives_the_same_schedule_and_another_seed_another() {
        let of = |seed| schedule(RequestRate::PerSecond(5.0), 10, &mut rng(seed));
        assert_eq!(of(1), of(1));
        assert_ne!(of(1), of(2));
    }

    #[test]
    fn delay_before_the_limit_opened_is_queueing_and_after_it_lateness() {
        let ms = Duration::from_millis;
        let cases = [
            // (scheduled, blocked until, sent) → (queued, late)
            ((100, 0, 100), (0, 0)),
            ((100, 0, 103), (0, 3)),
            ((100, 150, 151), (50, 1)),
            ((200, 150, 202), (0, 2)),
            ((0, 70, 70), (70, 0)),
        ];
        for ((scheduled, blocked, sent), (queued, late)) in cases {
            let delay = split_delay(ms(scheduled), ms(blocked), ms(sent));
            assert_eq!(delay, Delay { queued: ms(queued), late: ms(late) }, "{scheduled} {blocked} {sent}");
        }
    }

    #[test]
    fn rates_print_as_python_floats() {
        assert_eq!(RequestRate::Infinite.to_string(), "inf");
        assert_eq!(RequestRate::PerSecond(20.0).to_string(), "20.0");
        assert_eq!(format!("{:<6}|", RequestRate::PerSecond(0.5)), "0.5   |");
    }
}
