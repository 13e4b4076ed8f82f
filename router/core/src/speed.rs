//! How fast workers compute prompts, learned from when their first tokens come.
//!
//! Between two first tokens of a worker that had prompts waiting it computed what the later ones owed. Over the fleet such intervals give
//! d (s), p (s/token) and q (s/token²) by least squares in which old intervals count less and less; each worker's ratio to that, decayed, tells slow
//! ones from fast ones. Knows no clock: readings come in. Fed by [`Lease`](crate::Lease); read by [`decide`](crate::decide).

mod additions;
mod line;
mod queue;
mod ratio;
mod regression;
mod siblings;
mod silent;

use std::time::Duration;

pub use additions::CacheRoom;
pub(crate) use queue::lapses_s;
pub use queue::{Asked, PrefillQueue, QueueReading, Sent};
use regression::Regression;
pub use siblings::Siblings;

/// What a request makes a worker compute before its first token.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Prefill {
    /// Tokens that are not cached.
    pub new_tokens: usize,
    /// Tokens that are: the new ones attend to them.
    pub cached_tokens: usize,
}

impl Prefill {
    /// Pairs of tokens that its attention looks at: new·(cached + new/2).
    #[must_use]
    pub fn pairs(self) -> f64 {
        let new = self.new_tokens as f64;
        new * (self.cached_tokens as f64 + new / 2.0)
    }
}

/// What was computed in an interval between first tokens.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Observation {
    /// How long it was.
    pub seconds: f64,
    /// Uncached tokens of those whose first tokens ended it.
    pub new_tokens: f64,
    /// Their pairs of tokens.
    pub pairs: f64,
    /// The worker's ratio to the fleet when it ended.
    pub ratio: f64,
}

/// Seconds of a prefill by its size, for the fleet as a whole.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct PrefillSpeed {
    /// d: whatever is in it.
    pub fixed_s: f64,
    /// p: for each token that is not cached.
    pub token_s: f64,
    /// q: for each pair of tokens.
    pub pair_s: f64,
    /// Logarithm of seen over expected below which a quarter of the intervals are that tell something of workers: what d, p and q leave
    /// unexplained on all of them alike.
    pub surprise: f64,
}

impl Default for PrefillSpeed {
    /// About an 8B model on one large GPU; wrong by any factor, since what is compared are workers, until the first tokens tell.
    fn default() -> Self {
        Self { fixed_s: 0.02, token_s: 6e-5, pair_s: 1e-9, surprise: 0.0 }
    }
}

impl PrefillSpeed {
    /// What `prefill` adds to a worker's queue, d left out: it is paid once for all that is computed together.
    #[must_use]
    pub fn seconds(&self, prefill: Prefill) -> f64 {
        self.token_s * prefill.new_tokens as f64 + self.pair_s * prefill.pairs()
    }

    fn of(&self, observation: &Observation) -> f64 {
        self.fixed_s + self.token_s * observation.new_tokens + self.pair_s * observation.pairs
    }

    /// Logarithm of seen over expected, if the interval tells something of its worker: what was computed must take more than the
    /// fixed part. Others are mostly waits for a decode step to end, which says how busy a worker is, not how slow.
    fn surprise_of(&self, observation: &Observation) -> Option<f64> {
        let expected_s = self.of(observation);
        let tells = expected_s > (1.0 + LEAST_WORK) * self.fixed_s && observation.seconds > 0.0;
        tells.then(|| (observation.seconds / expected_s).ln().clamp(-LARGEST_SURPRISE, LARGEST_SURPRISE))
    }
}

/// How many times the fixed part.
const LEAST_WORK: f64 = 2.0;
/// A logarithm: twenty times longer is a worker that was stopped, not a slow one.
const LARGEST_SURPRISE: f64 = 3.0;
/// What is compared between workers is the interval of this rank: little of it is waiting.
const USUAL_SHARE: f64 = 0.25;
/// How far one interval moves what a quarter of them are below, as a logarithm.
const SURPRISE_STEP: f64 = 0.03;

/// Where among the times of whole answers prefill is taken to be at most: the fastest twentieth were hardly more.
const FASTEST_SHARE: f64 = 0.05;
/// How far one whole answer moves what is expected, as a logarithm, when it is slower; nineteen times that when it is faster.
const WHOLE_ANSWER_STEP: f64 = 0.01;
/// As a logarithm: a thousandth of a GPU's time is as good as none.
const MOST_FASTER: f64 = -7.0;
/// What an interval between first tokens leaves of what whole answers have told.
const DIRECT_FADES: f64 = 0.98;

/// The speed of workers that are alike, and how often requests come to them.
#[derive(Debug, Default)]
pub struct Speeds {
    regression: Regression,
    surprise: f64,
    /// Logarithm of how much faster than the regression says prefill must be, as whole answers come too soon for it; never above 0.
    whole_answers: f64,
    arrivals: Arrivals,
}

impl Speeds {
    /// The fleet's speed as known now.
    #[must_use]
    pub fn prefill(&self) -> PrefillSpeed {
        let PrefillSpeed { fixed_s, token_s, pair_s, .. } = self.regression.speed();
        let scale = self.whole_answers.exp();
        PrefillSpeed {
            fixed_s: fixed_s * scale,
            token_s: token_s * scale,
            pair_s: pair_s * scale,
            surprise: self.surprise,
        }
    }

    /// Learns from an interval.
    pub fn learn(&mut self, observation: &Observation) {
        if let Some(surprise) = self.prefill().surprise_of(observation) {
            let is_below = surprise - observation.ratio.ln() < self.surprise;
            self.surprise += SURPRISE_STEP * (USUAL_SHARE - f64::from(u8::from(is_below)));
        }
        self.regression.learn(observation);
        self.whole_answers *= DIRECT_FADES;
    }

    /// Learns from a whole answer, which took at least as long as its prefill: what is expected comes down until a share of
    /// [`FASTEST_SHARE`] of them is faster, and no lower.
    pub fn learn_whole(&mut self, answer: &Observation) {
        let is_faster = answer.seconds < answer.ratio * self.prefill().of(answer);
        let step =
            if is_faster { -WHOLE_ANSWER_STEP * (1.0 / FASTEST_SHARE - 1.0) } else { WHOLE_ANSWER_STEP };
        self.whole_answers = (self.whole_answers + step).clamp(MOST_FASTER, 0.0);
    }

    /// A request comes `now`, or a `share` of one, if it may go elsewhere as well.
    pub fn arrival(&mut self, now: Duration, share: f64) {
        self.arrivals.add(now, share);
    }

    /// Requests a second of late, as of `now`.
    #[must_use]
    pub fn arrivals_per_s(&self, now: Duration) -> f64 {
        self.arrivals.per_second(now)
    }
}

/// Requests a second, weighted by age.
#[derive(Debug, Default)]
struct Arrivals {
    first: Option<Duration>,
    last: Duration,
    /// Arrivals, each worth less the older it is.
    weight: f64,
}

/// An arrival of this age counts 1/e.
const MEMORY_S: f64 = 30.0;

impl Arrivals {
    fn add(&mut self, now: Duration, share: f64) {
        self.first.get_or_insert(now);
        let passed_s = now.saturating_sub(self.last).as_secs_f64();
        self.weight = self.weight * (-passed_s / MEMORY_S).exp() + share;
        self.last = self.last.max(now);
    }

    fn per_second(&self, now: Duration) -> f64 {
        let Some(first) = self.first else { return 0.0 };
        let seen_s = now.saturating_sub(first).as_secs_f64().max(1.0);
        let passed_s = now.saturating_sub(self.last).as_secs_f64();
        // What of the memory's length has been seen at all.
        self.weight * (-passed_s / MEMORY_S).exp() / (MEMORY_S * (1.0 - (-seen_s / MEMORY_S).exp()))
    }
}

#[cfg(test)]
mod tests;
