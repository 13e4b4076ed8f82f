//! What this router has decided since workers last told their load: a measure of how much other routers will have decided meanwhile,
//! of which nothing can be seen.
//!
//! Knows no clock: readings come in. Fed by the decider with each pick; policies get it as a value.

use std::collections::VecDeque;
use std::time::Duration;

use roundhouse_types::BlockHash;

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
    /// Of the requests that other routers have told of while this one's were on their way to them, the share that had the same prompt as one of
    /// those: from 0 to 1.
    pub siblings: f64,
}

/// The last picks.
#[derive(Debug, Default)]
pub(crate) struct UnseenPicks {
    /// When, and the end of the prompt's path; as old as twice the oldest report.
    picks: VecDeque<(Duration, Option<BlockHash>)>,
    mean: Unseen,
}

impl UnseenPicks {
    /// A pick is made `now` for a prompt with that end, when the oldest report is of `age`. Returns what is known before it.
    pub(crate) fn at(&mut self, now: Duration, age: Duration, end: Option<BlockHash>) -> Unseen {
        while self.picks.front().is_some_and(|(at, _)| now.saturating_sub(*at) > 2 * age) {
            self.picks.pop_front();
        }
        let unseen = self.picks.iter().rev().take_while(|(at, _)| now.saturating_sub(*at) <= age).count();
        self.mean.picks += WEIGHT * (unseen as f64 - self.mean.picks);
        if self.picks.len() < MOST_PICKS {
            self.picks.push_back((now, end));
        }
        self.mean
    }

    /// Another router tells `now`, after `age`, of a prompt with that end, which it decided on before it could know what was picked here.
    pub(crate) fn told(&mut self, now: Duration, age: Duration, end: Option<BlockHash>) {
        let mut before = self.picks.iter().filter(|(at, _)| now.saturating_sub(*at) <= 2 * age).peekable();
        if before.peek().is_some() {
            let is_sibling = end.is_some() && before.any(|(_, own)| *own == end);
            self.mean.siblings += WEIGHT * (f64::from(u8::from(is_sibling)) - self.mean.siblings);
        }
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
            even.at(Duration::from_secs(number), age, None);
            bursts.at(Duration::from_secs(number / 5), age, None);
        }
        assert_eq!(even.mean().picks, 0.0);
        assert!((bursts.mean().picks - 2.0).abs() < 0.2, "0, 1, 2, 3 and 4 before each: {:?}", bursts.mean());
    }

    #[test]
    fn knows_whether_others_have_the_same_prompts_at_the_same_time() {
        let (late, after) = (Duration::from_millis(5), Duration::from_millis(6));
        let shares = [0, 1].map(|apart| {
            let mut picks = UnseenPicks::default();
            for number in 0..500 {
                let now = Duration::from_secs(number);
                picks.at(now, late, Some(BlockHash(number)));
                picks.told(now + after, late, Some(BlockHash(number + apart)));
                // What comes later tells nothing, and neither does a prompt that is too short to be known.
                picks.told(now + 3 * late, late, Some(BlockHash(number + 1 - apart)));
            }
            picks.mean().siblings
        });
        assert!(shares[0] > 0.99 && shares[1] < 0.01, "{shares:?}");
        let mut short = UnseenPicks::default();
        for number in 0..500 {
            short.at(Duration::from_secs(number), late, None);
            short.told(Duration::from_secs(number), late, None);
        }
        assert_eq!(short.mean().siblings, 0.0);
    }
}
