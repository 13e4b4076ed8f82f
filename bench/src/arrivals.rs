//! When each conversation should start: absolute offsets from the start of the run, fixed before it starts.
//!
//! Must not know what is sent, nor the clock. [`crate::run`] follows the schedule and measures how late it was.

use std::f64::consts::TAU;
use std::fmt;
use std::time::Duration;

use crate::args::values::time;
use rand::RngExt;
use rand::rngs::Xoshiro256PlusPlus;

/// When conversations start.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Arrivals {
    /// All at once; with a concurrency limit this is the closed loop.
    Infinite,
    /// At a steady rate.
    Steady {
        /// Conversations a second.
        rate: f64,
        /// How the gaps vary.
        burstiness: Burstiness,
    },
    /// At a rate that changes from the first conversation to the last, as in vLLM.
    Ramp {
        /// How it changes.
        strategy: RampStrategy,
        /// Conversations a second at the beginning.
        start_rate: f64,
        /// Conversations a second at the end.
        end_rate: f64,
        /// How the gaps vary.
        burstiness: Burstiness,
    },
    /// When the trace says.
    Trace {
        /// 2 replays twice as fast.
        speed: f64,
    },
}

/// How the gaps between starts vary: they have a gamma distribution of this shape.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Burstiness {
    /// 1 is Poisson, less comes in bursts, more is more even.
    Shape(f64),
    /// The limit of an infinite shape: all gaps equal.
    Constant,
}

/// How the rate of a ramp changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum RampStrategy {
    /// By the same amount from each conversation to the next
    Linear,
    /// By the same factor
    Exponential,
}

impl RampStrategy {
    /// The name as typed and as printed.
    pub fn name(self) -> &'static str {
        match self {
            Self::Linear => "linear",
            Self::Exponential => "exponential",
        }
    }
}

impl Burstiness {
    /// A gap with this mean.
    fn gap_seconds(self, mean_seconds: f64, rng: &mut Xoshiro256PlusPlus) -> f64 {
        match self {
            Self::Constant => mean_seconds,
            Self::Shape(1.0) => -(1.0 - uniform(rng)).ln() * mean_seconds, // exponential, by inversion
            Self::Shape(shape) => gamma(shape, rng) * mean_seconds / shape,
        }
    }

    /// The shape; infinite for constant gaps.
    pub fn shape(self) -> f64 {
        match self {
            Self::Shape(shape) => shape,
            Self::Constant => f64::INFINITY,
        }
    }
}

impl Arrivals {
    /// The steady rate, if there is one.
    pub fn rate(&self) -> Option<f64> {
        match self {
            Self::Steady { rate, .. } => Some(*rate),
            _ => None,
        }
    }

    /// How the gaps vary; Poisson where there are none.
    pub fn burstiness(&self) -> Burstiness {
        match self {
            Self::Steady { burstiness, .. } | Self::Ramp { burstiness, .. } => *burstiness,
            Self::Infinite | Self::Trace { .. } => Burstiness::Shape(1.0),
        }
    }

    /// The mean gap after the start number `index` of `count`.
    fn mean_gap_seconds(&self, index: usize, count: usize) -> f64 {
        let progress = index as f64 / count as f64;
        match *self {
            Self::Infinite | Self::Trace { .. } => 0.0,
            Self::Steady { rate, .. } => 1.0 / rate,
            Self::Ramp { strategy: RampStrategy::Linear, start_rate, end_rate, .. } => {
                1.0 / (start_rate + (end_rate - start_rate) * progress)
            }
            Self::Ramp { strategy: RampStrategy::Exponential, start_rate, end_rate, .. } => {
                1.0 / (start_rate * (end_rate / start_rate).powf(progress))
            }
        }
    }
}

/// As the originals print it: `inf`, `20.0`, `0.5`, `trace`; a ramp as `1.0..20.0`.
impl fmt::Display for Arrivals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Infinite => f.pad("inf"),
            Self::Steady { rate, .. } => f.pad(&format!("{rate:?}")), // Debug writes 20.0, as Python does
            Self::Ramp { start_rate, end_rate, .. } => f.pad(&format!("{start_rate:?}..{end_rate:?}")),
            Self::Trace { .. } => f.pad("trace"),
        }
    }
}

/// The start of each of `count` conversations, ascending. The first starts at zero, as in the originals. `recorded` are
/// the offsets of a trace; they are used for [`Arrivals::Trace`] only, and there must be `count` of them then.
///
/// # Errors
/// A rate or speed so low that a start would be decades away.
pub fn schedule(
    arrivals: &Arrivals,
    count: usize,
    recorded: &[Duration],
    rng: &mut Xoshiro256PlusPlus,
) -> Result<Vec<Duration>, TooLate> {
    let starts = |seconds: f64| time(seconds).ok_or(TooLate { seconds });
    match arrivals {
        Arrivals::Infinite => return Ok(vec![Duration::ZERO; count]),
        Arrivals::Trace { speed } => {
            return recorded.iter().map(|offset| starts(offset.as_secs_f64() / speed)).collect();
        }
        Arrivals::Steady { .. } | Arrivals::Ramp { .. } => {}
    }
    let burstiness = arrivals.burstiness();
    let mut at_seconds = 0.0;
    (0..count)
        .map(|index| {
            let start = starts(at_seconds);
            at_seconds += burstiness.gap_seconds(arrivals.mean_gap_seconds(index, count), rng);
            start
        })
        .collect()
}

/// A start that nobody will live to see.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[error(
    "a conversation would start {seconds:e} seconds after the first, and the latest possible is 1e9: give a higher --request-rate, \
     --ramp-up-start-rps or --trace-speed"
)]
pub struct TooLate {
    /// When it would.
    pub seconds: f64,
}

/// In [0, 1).
fn uniform(rng: &mut Xoshiro256PlusPlus) -> f64 {
    rng.random()
}

/// A gamma variate of this shape and scale 1 (Marsaglia and Tsang, "A simple method for generating gamma variables", 2000).
fn gamma(shape: f64, rng: &mut Xoshiro256PlusPlus) -> f64 {
    if shape < 1.0 {
        // Their note on small shapes: a variate of shape + 1, times a uniform one to the power of 1 / shape.
        return gamma(shape + 1.0, rng) * (1.0 - uniform(rng)).powf(1.0 / shape);
    }
    let d = shape - 1.0 / 3.0;
    let c = 1.0 / (9.0 * d).sqrt();
    loop {
        let x = normal(rng);
        let v = (1.0 + c * x).powi(3);
        let u = 1.0 - uniform(rng); // in (0, 1]
        if v > 0.0 && u.ln() < 0.5 * x * x + d - d * v + d * v.ln() {
            return d * v;
        }
    }
}

/// A standard normal variate (Box and Muller).
fn normal(rng: &mut Xoshiro256PlusPlus) -> f64 {
    let radius = (-2.0 * (1.0 - uniform(rng)).ln()).sqrt();
    radius * (TAU * uniform(rng)).cos()
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

    fn steady(rate: f64, burstiness: Burstiness) -> Arrivals {
        Arrivals::Steady { rate, burstiness }
    }

    fn starts(arrivals: &Arrivals, count: usize, seed: u64) -> Vec<Duration> {
        schedule(arrivals, count, &[], &mut rng(seed)).unwrap()
    }

    /// Mean and standard deviation of the gaps in seconds.
    fn gaps(starts: &[Duration]) -> (f64, f64) {
        assert_eq!(starts[0], Duration::ZERO);
        let gaps: Vec<f64> = starts.windows(2).map(|w| (w[1] - w[0]).as_secs_f64()).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let variance = gaps.iter().map(|g| (g - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
        (mean, variance.sqrt())
    }

    #[test]
    fn infinite_rate_starts_everything_at_zero() {
        assert_eq!(starts(&Arrivals::Infinite, 3, 1), [Duration::ZERO; 3]);
    }

    #[test]
    fn gaps_have_the_mean_of_the_rate_and_the_spread_of_the_burstiness() {
        // A gamma distribution of shape k has a coefficient of variation of 1 / √k; shape 1 is Poisson.
        for shape in [1.0, 0.25, 0.5, 4.0, 100.0] {
            let (mean, deviation) = gaps(&starts(&steady(50.0, Burstiness::Shape(shape)), 40_001, 3));
            let variation = 1.0 / f64::sqrt(shape);
            // The standard error of the mean is variation / 200, that of the deviation below 3 % at a shape of 0.25.
            assert!((mean * 50.0 - 1.0).abs() < variation * 0.02, "shape {shape}: mean gap {mean}");
            let found = deviation / mean;
            assert!((found / variation - 1.0).abs() < 0.1, "shape {shape}: variation {found}");
        }
    }

    #[test]
    fn constant_gaps_are_equal() {
        let starts = starts(&steady(4.0, Burstiness::Constant), 5, 1);
        assert_eq!(starts, [0, 250, 500, 750, 1000].map(Duration::from_millis));
    }

    #[test]
    fn a_ramp_goes_from_one_rate_to_the_other() {
        let ramp = |strategy, end_rate| {
            let burstiness = Burstiness::Constant;
            starts(&Arrivals::Ramp { strategy, start_rate: 1.0, end_rate, burstiness }, 5, 1)
        };
        let seconds = |starts: Vec<Duration>| starts.iter().map(Duration::as_secs_f64).collect::<Vec<_>>();
        let close = |found: Vec<f64>, expected: [f64; 5]| {
            let near = found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6);
            assert!(near, "{found:?} instead of {expected:?}");
        };
        // Rates 1, 2, 3, 4 (5 would follow), and 1, 2, 4, 8.
        close(seconds(ramp(RampStrategy::Linear, 6.0)), [0.0, 1.0, 1.5, 1.5 + 1.0 / 3.0, 1.75 + 1.0 / 3.0]);
        close(seconds(ramp(RampStrategy::Exponential, 32.0)), [0.0, 1.0, 1.5, 1.75, 1.875]);
    }

    #[test]
    fn a_trace_is_replayed_at_its_speed() {
        let recorded = [0, 100, 100, 900].map(Duration::from_millis);
        let starts = schedule(&Arrivals::Trace { speed: 2.0 }, 4, &recorded, &mut rng(1)).unwrap();
        assert_eq!(starts, [0, 50, 50, 450].map(Duration::from_millis));
    }

    #[test]
    fn starts_that_nobody_would_live_to_see_are_refused() {
        let late =
            |arrivals, recorded: &[Duration]| schedule(&arrivals, 3, recorded, &mut rng(1)).unwrap_err();
        let said = late(steady(1e-300, Burstiness::Constant), &[]).to_string();
        assert!(said.contains("seconds after the first") && said.contains("--request-rate"), "{said}");
        late(steady(f64::MIN_POSITIVE / 8.0, Burstiness::Constant), &[]);
        late(Arrivals::Trace { speed: 1e-300 }, &[0, 1, 2].map(Duration::from_secs));
        let ramp = RampStrategy::Exponential;
        let burstiness = Burstiness::Constant;
        late(Arrivals::Ramp { strategy: ramp, start_rate: 1e-200, end_rate: 1.0, burstiness }, &[]);
    }

    #[test]
    fn the_same_seed_gives_the_same_schedule_and_another_seed_another() {
        for burstiness in [Burstiness::Shape(1.0), Burstiness::Shape(0.5)] {
            let of = |seed| starts(&steady(5.0, burstiness), 10, seed);
            assert_eq!(of(1), of(1));
            assert_ne!(of(1), of(2));
        }
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
    fn rates_print_as_in_the_originals() {
        let poisson = Burstiness::Shape(1.0);
        assert_eq!(Arrivals::Infinite.to_string(), "inf");
        assert_eq!(steady(20.0, poisson).to_string(), "20.0");
        assert_eq!(format!("{:<6}|", steady(0.5, poisson)), "0.5   |");
        assert_eq!(Arrivals::Trace { speed: 1.0 }.to_string(), "trace");
    }
}
