//! How much of the time of a pool's workers others leave to requests in the background, and whether these have had it.
//!
//! They are sent one by one, at the rate that fills what others have left of late up to a load: a constant trickle that follows the tide slows others down
//! less than waves of as much work do. Knows no clock: readings come in. Used by [`decide`](crate::decide), a pool at a time.

use crate::speed::{Prefill, PrefillSpeed};

/// How long what others take is remembered.
const OF_LATE_S: f64 = 10.0;
/// Of the time of each worker, what the background gets at least while nobody waits there: it goes on, however slowly.
const LEAST_LEFT: f64 = 0.02;

/// What could have been given for so long can be given at once: it is looked for time every now and then.
const BETWEEN_LOOKS_S: f64 = 0.05;

/// What a token of an answer takes of a worker's time, in tokens of prefill: 0.06 ms beside 0.06.
const ANSWER_TOKEN: f64 = 1.0;
/// The same for each token of its context: 0.088 µs.
const ANSWER_CONTEXT: f64 = 0.0014;

/// What a prompt takes of a worker's time, in seconds.
pub(crate) fn prompt_s(speed: &PrefillSpeed, prefill: Prefill) -> f64 {
    speed.fixed_s + speed.seconds(prefill)
}

/// What an answer to a prompt of so many tokens takes of it: of steps that others share, what it makes them longer by.
pub(crate) fn answer_s(speed: &PrefillSpeed, prompt_tokens: usize, answer_tokens: f64) -> f64 {
    let context = prompt_tokens as f64 + answer_tokens / 2.0;
    speed.token_s * answer_tokens * (ANSWER_TOKEN + ANSWER_CONTEXT * context)
}

/// What there is to know of the workers of a pool that do the same.
#[derive(Debug, Default)]
pub(crate) struct SpareTime {
    /// Seconds of work a second, as of when others last came.
    others: f64,
    others_at_s: f64,
    /// Seconds of work that the background has been given and that have not been made up for, as of when it was last looked; below 0 if it could
    /// have been given more since the look before.
    owes_s: f64,
    looked_at_s: f64,
}

impl SpareTime {
    /// Others take so many seconds of a worker's time.
    pub(crate) fn take(&mut self, seconds: f64, now_s: f64) {
        self.others = self.others(now_s) + seconds / OF_LATE_S;
        self.others_at_s = self.others_at_s.max(now_s);
    }

    /// One in the background takes so many.
    pub(crate) fn give(&mut self, seconds: f64) {
        self.owes_s += seconds;
    }

    /// Nothing came of one that others took so many for a moment ago.
    pub(crate) fn take_back(&mut self, seconds: f64) {
        self.others = (self.others - seconds / OF_LATE_S).max(0.0);
    }

    /// Nor of one in the background.
    pub(crate) fn give_back(&mut self, seconds: f64) {
        self.owes_s -= seconds;
    }

    /// Whether there is time for another one, if each of so many `workers` may be busy for such a part of the time.
    pub(crate) fn is_there(&mut self, load: f64, workers: f64, now_s: f64) -> bool {
        let left = (load * workers - self.others(now_s)).max(LEAST_LEFT * workers);
        let passed_s = (now_s - self.looked_at_s).max(0.0);
        self.owes_s = (self.owes_s - left * passed_s).max(-left * BETWEEN_LOOKS_S);
        self.looked_at_s = self.looked_at_s.max(now_s);
        self.owes_s <= 0.0
    }

    /// What others take of late, in seconds of work a second.
    pub(crate) fn others(&self, now_s: f64) -> f64 {
        self.others * (-(now_s - self.others_at_s).max(0.0) / OF_LATE_S).exp()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many seconds of work the background is given in `seconds`, each request taking `each`, if others take `others` a second of as many `workers`,
    /// and it is looked every 20 ms.
    fn given((workers, others): (f64, f64), load: f64, each: f64, seconds: u32) -> f64 {
        let mut spare = SpareTime::default();
        let mut given = 0.0;
        for look in 0..(60 + seconds) * 50 {
            let now_s = f64::from(look) / 50.0;
            if look % 5 == 0 && others > 0.0 {
                spare.take(others / 10.0, now_s);
            }
            while spare.is_there(load, workers, now_s) {
                spare.give(each);
                given += if look > 60 * 50 { each } else { 0.0 };
            }
        }
        given
    }

    #[test]
    fn the_background_gets_what_others_leave_and_no_more() {
        let close = |given: f64, expected: f64| {
            assert!((given / expected - 1.0).abs() < 0.1, "{given}, not {expected}");
        };
        close(given((4.0, 0.0), 0.6, 0.25, 100), 240.0);
        close(given((4.0, 1.4), 0.6, 0.25, 100), 100.0);
        close(given((4.0, 3.5), 0.6, 0.25, 100), 0.02 * 4.0 * 100.0);
        // Many workers and little work: several at a look.
        close(given((1_000.0, 100.0), 0.6, 0.01, 20), 500.0 * 20.0);
    }

    #[test]
    fn what_others_took_is_forgotten_and_what_was_put_off_comes_sooner_then() {
        let mut spare = SpareTime::default();
        spare.take(400.0, 10.0);
        assert!(spare.is_there(0.5, 2.0, 10.0));
        spare.give(1.0);
        assert!(!spare.is_there(0.5, 2.0, 12.0));
        assert!(spare.is_there(0.5, 2.0, 200.0));
        let mut quiet = SpareTime::default();
        assert!(quiet.is_there(0.5, 2.0, 10.0));
        // From two routers at once.
        quiet.give(1.0);
        quiet.give(1.0);
        assert!(!quiet.is_there(0.5, 2.0, 11.5) && quiet.is_there(0.5, 2.0, 12.1));
    }

    #[test]
    fn an_answer_takes_time_besides_its_prompt() {
        let speed = PrefillSpeed { fixed_s: 0.03, token_s: 6e-5, pair_s: 0.0, surprise: 0.0 };
        let prefill = Prefill { new_tokens: 1_000, cached_tokens: 1_000 };
        assert!((prompt_s(&speed, prefill) - 0.09).abs() < 1e-9);
        assert!((answer_s(&speed, 2_000, 200.0) - 200.0 * 6e-5 * (1.0 + 2.94)).abs() < 1e-9);
        assert_eq!(answer_s(&speed, 2_000, 0.0), 0.0);
    }

    #[test]
    fn what_came_to_nothing_is_taken_from_nobody() {
        let mut spare = SpareTime::default();
        spare.take(4.0, 1.0);
        spare.take_back(3.0);
        assert!((spare.others(1.0) - 0.1).abs() < 1e-9);
        spare.take_back(3.0);
        assert_eq!(spare.others(1.0), 0.0);
        assert!(spare.is_there(0.5, 2.0, 2.0));
        spare.give(9.0);
        assert!(!spare.is_there(0.5, 2.0, 2.0));
        spare.give_back(9.0);
        assert!(spare.is_there(0.5, 2.0, 2.0));
    }
}
