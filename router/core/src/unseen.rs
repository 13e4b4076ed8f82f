//! What this router has decided since workers last told their load: a measure of how much other routers will have decided meanwhile,
//! of which nothing can be seen.
//!
//! Knows no clock: readings come in. Fed by the decider with each pick; policies get it as a value.

use std::collections::VecDeque;
use std::time::Duration;

/// Weight of a pick in the averages: some fifty decide.
const WEIGHT: f64 = 0.02;
/// Picks remembered; whoever makes more between two reports knows enough.
const MOST_PICKS: usize = 256;

/// What other routers may have decided, by what this one did.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Unseen {
    /// How many picks of this router's there are before one that no report shows yet, on average: many where requests come in bursts.
    pub picks: f64,
    /// What the prefill of a request takes, on average, in seconds.
    pub service_s: f64,
}

/// The last picks.
#[derive(Debug, Default)]
pub(crate) struct UnseenPicks {
    times: VecDeque<Duration>,
    mean: Unseen,
}

impl UnseenPicks {
    /// A pick is made `now`, when the oldest report is of `age`. Returns what is known before it.
    pub(crate) fn at(&mut self, now: Duration, age: Duration) -> Unseen {
        while self.times.front().is_some_and(|at| now.saturating_sub(*at) > age) {
            self.times.pop_front();
        }
        self.mean.picks += WEIGHT * (self.times.len() as f64 - self.mean.picks);
        if self.times.len() < MOST_PICKS {
            self.times.push_back(now);
        }
        self.mean
    }

    /// A pick has been made whose prefill is expected to take `service_s`.
    pub(crate) fn picked(&mut self, service_s: f64) {
        self.mean.service_s += WEIGHT * (service_s - self.mean.service_s);
    }

    /// The same as at the last pick.
    pub(crate) fn mean(&self) -> Unseen {
        self.mean
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_what_came_since_the_last_reports() {
        let age = Duration::from_millis(100);
        let (mut bursts, mut even) = (UnseenPicks::default(), UnseenPicks::default());
        for number in 0..1_000 {
            even.at(Duration::from_secs(number), age);
            bursts.at(Duration::from_secs(number / 5), age);
        }
        assert_eq!(even.mean().picks, 0.0);
        assert!((bursts.mean().picks - 2.0).abs() < 0.2, "0, 1, 2, 3 and 4 before each: {:?}", bursts.mean());
    }
}
