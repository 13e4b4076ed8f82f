//! How much may be tried again.
//!
//! A retry is work that nobody asked for. When one worker fails, it saves a request; when all fail, retries multiply
//! the load of a fleet that is failing under it. So retries are bounded in two accounts:
//!
//! - [`RetryBudget`], one for the router: a share of the requests of the last ten seconds, plus a floor so that a quiet
//!   router retries at all. Everything draws on it.
//! - [`Rescue`], one for each worker: the requests that were in flight at a worker when it died, all at once. They lose
//!   their worker and move to others, which is no more work than before, so a death may always be survived: at most
//!   as many rescues in ten seconds as the worker had requests at that time's worst failure. Only failures of
//!   the connection draw on it; what a living worker refuses does not.
//!
//! And a request may be what workers die of. [`Doubt`] bounds how many it may take along.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::window::{WINDOW, Window};

/// Retries a second that are allowed whatever the traffic: a router with little of it must be able to save a request.
const FLOOR_PER_S: u64 = 10;

/// The router's account.
#[derive(Debug)]
pub struct RetryBudget {
    /// Retries for each request; `None`: as many as may be.
    share: Option<f64>,
    /// Requests, and retries as marked events.
    window: Window,
}

impl RetryBudget {
    /// Allows `share` retries for each request of the last ten seconds (0.2: a fifth), and 10 a second besides; with
    /// `None`, any number.
    #[must_use]
    pub fn new(share: Option<f64>) -> Self {
        Self { share, window: Window::default() }
    }

    /// A request has come; what it adds is there at once.
    pub fn count_request(&self, now: Duration) {
        if self.share.is_some() {
            self.window.add_ordinary(now);
        }
    }

    /// Takes one retry, if there is one. Cores that ask at the same moment may each get the last one.
    #[must_use]
    pub fn take(&self, now: Duration) -> bool {
        let Some(share) = self.share else { return true };
        let counts = self.window.read(now);
        let allowed = share * counts.ordinary as f64 + (FLOOR_PER_S * WINDOW.as_secs()) as f64;
        let granted = ((counts.marked + 1) as f64) <= allowed;
        if granted {
            self.window.add_marked(now);
        }
        granted
    }
}

/// A worker's account: those who were there when it died.
#[derive(Debug, Default)]
pub struct Rescue {
    state: Mutex<RescueState>,
}

#[derive(Debug, Default)]
struct RescueState {
    began: Duration,
    /// Most requests that were there at a failure since `began`.
    in_flight: usize,
    taken: usize,
}

impl Rescue {
    /// A connection to the worker failed while `in_flight` requests were there, the failed one included. Returns how many were at the first
    /// failure of these ten seconds that most were at: those that go down together hear of it one by one.
    pub fn note(&self, now: Duration, in_flight: usize) -> usize {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if now >= state.began + WINDOW {
            *state = RescueState { began: now, ..RescueState::default() };
        }
        state.in_flight = state.in_flight.max(in_flight);
        state.in_flight
    }

    /// Takes one rescue, if there is one.
    #[must_use]
    pub fn take(&self) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let granted = state.taken < state.in_flight;
        state.taken += usize::from(granted);
        granted
    }
}

/// How long one request that three workers have died of speaks against all that two have died of.
const DOUBT: Duration = Duration::from_secs(600);

/// Whether a request that two workers have died of may be what they died of.
///
/// Where workers are taken away one after another, whoever was at one and moved to the next has seen two die, and has killed neither: there were
/// others with it both times. It gets a third, which tells: if that one dies as well, no such request gets a third for ten minutes. One that
/// was alone when a worker died gets none.
#[derive(Debug, Default)]
pub struct Doubt {
    until: Mutex<Duration>,
}

impl Doubt {
    /// Whether a request is at fault that workers have died of: for each of them, how many requests were there.
    pub fn is_at_fault(&self, now: Duration, deaths: &[usize]) -> bool {
        let mut until = self.until.lock().unwrap_or_else(PoisonError::into_inner);
        match deaths {
            [] | [_] => false,
            [_, _] => deaths.contains(&1) || now < *until,
            _ => {
                *until = now + DOUBT;
                true
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const AT: Duration = Duration::from_secs(100);

    fn granted(budget: &RetryBudget, now: Duration) -> usize {
        (0..100_000).take_while(|_| budget.take(now)).count()
    }

    #[test]
    fn a_quiet_router_has_the_floor() {
        let budget = RetryBudget::new(Some(0.2));
        assert_eq!(granted(&budget, AT), 100, "ten a second, over ten seconds");
        assert_eq!(granted(&budget, AT + WINDOW), 100, "and again when those are forgotten");
    }

    #[test]
    fn a_busy_router_has_its_share_besides() {
        let budget = RetryBudget::new(Some(0.2));
        (0..5_000).for_each(|_| budget.count_request(AT));
        assert_eq!(granted(&budget, AT), 1_100);
        (0..500).for_each(|_| budget.count_request(AT));
        assert_eq!(granted(&budget, AT), 100, "a fifth of the new ones");
    }

    #[test]
    fn without_a_share_there_is_no_end() {
        assert_eq!(granted(&RetryBudget::new(None), AT), 100_000);
    }

    #[test]
    fn everyone_who_was_there_is_rescued_and_nobody_else() {
        let rescue = Rescue::default();
        assert!(!rescue.take(), "nobody has died");
        // As leases are dropped, each failure sees one fewer.
        for left in (1..=500).rev() {
            rescue.note(AT, left);
            assert!(rescue.take());
        }
        rescue.note(AT, 1);
        assert!(!rescue.take(), "a worker that dies again and again is not a death");
        rescue.note(AT + WINDOW, 3);
        assert_eq!((0..9).filter(|_| rescue.take()).count(), 3);
    }

    #[test]
    fn a_third_death_tells() {
        let doubt = Doubt::default();
        let is_at_fault = |now, deaths: &[usize]| doubt.is_at_fault(now, deaths);
        assert!(!is_at_fault(AT, &[1]), "it may have been anything");
        assert!(is_at_fault(AT, &[1, 5]) && is_at_fault(AT, &[5, 1]), "nobody else was there");
        assert!(!is_at_fault(AT, &[5, 2]));
        assert!(is_at_fault(AT, &[5, 2, 9]));
        assert!(is_at_fault(AT + DOUBT / 2, &[5, 5]), "there is one that kills");
        assert!(!is_at_fault(AT + DOUBT, &[5, 5]));
    }

    proptest! {
        /// However failures, rescues and windows mix: those in flight at a death are all rescued.
        #[test]
        fn a_death_is_survived_at_any_moment(
            before in prop::collection::vec(0u64..15_000, 0..20),
            in_flight in 1usize..300,
        ) {
            let rescue = Rescue::default();
            let mut now = Duration::ZERO;
            for wait_ms in &before {
                now += Duration::from_millis(*wait_ms);
                rescue.note(now, 1);
                let _ = rescue.take();
            }
            now += WINDOW;
            let saved = (1..=in_flight).rev().filter(|left| { rescue.note(now, *left); rescue.take() }).count();
            prop_assert_eq!(saved, in_flight);
        }
    }
}
