//! The circuit breaker of one worker: closed, open for a while, half-open with one probe.
//!
//! A plain state machine; [`Health`](super::Health) keeps it behind a lock and shows its state to picks without one.

use std::time::Duration;

use crate::window::Counts;

/// Outcomes in the window below which a rate says nothing.
const MIN_SAMPLES: u64 = 5;
/// Failures without a success between them that open it whatever the rate: a worker that has died must not be asked
/// by everybody until its good past is outweighed.
const MAX_IN_A_ROW: u32 = 5;
/// How long it is open at first.
const FIRST_OPEN: Duration = Duration::from_secs(1);
/// Each failed probe doubles that, up to here: a worker that recovers is not ignored for longer.
const LONGEST_OPEN: Duration = Duration::from_secs(30);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    /// All may pass.
    Closed,
    /// None may pass before that time, and then one.
    Open { until: Duration },
    /// That one is on its way. Should it come back with nothing, the breaker is open until then, as before.
    Probing { until: Duration },
}

/// What an attempt remembers of the breaker as it passed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Pass {
    /// How often the breaker had opened. Outcomes of attempts from before the last opening say nothing new.
    pub(super) era: u32,
    /// Whether it is the one probe.
    pub(super) role: Role,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Role {
    Ordinary,
    Probe,
}

#[derive(Debug)]
pub(super) struct Breaker {
    pub(super) state: State,
    pub(super) era: u32,
    /// Openings since it was last closed.
    openings: u32,
}

impl Default for Breaker {
    fn default() -> Self {
        Self { state: State::Closed, era: 0, openings: 0 }
    }
}

impl Breaker {
    /// Takes the half-open breaker's one probe.
    pub(super) fn take_probe(&mut self, now: Duration) -> Option<Pass> {
        let State::Open { until } = self.state else { return None };
        if now < until {
            return None;
        }
        self.state = State::Probing { until };
        Some(Pass { era: self.era, role: Role::Probe })
    }

    /// An attempt failed. `recent` and `in_a_row` include it; `draw`, from 0 to 1, spreads the ends of openings, so that
    /// routers that saw the same failure do not all probe at once.
    pub(super) fn fail(&mut self, pass: Pass, now: Duration, recent: Counts, in_a_row: u32, draw: f64) {
        let opens = match self.state {
            State::Closed => {
                let samples = recent.ordinary + recent.marked;
                let half_failed = samples >= MIN_SAMPLES && 2 * recent.marked >= samples;
                half_failed || in_a_row >= MAX_IN_A_ROW
            }
            State::Probing { .. } => pass == Pass { era: self.era, role: Role::Probe },
            State::Open { .. } => false,
        };
        if opens {
            let delay = FIRST_OPEN.saturating_mul(1 << self.openings.min(8)).min(LONGEST_OPEN);
            self.state = State::Open { until: now + delay.mul_f64(0.8 + 0.4 * draw) };
            self.era = self.era.wrapping_add(1) & super::MAX_ERA;
            self.openings += 1;
        }
    }

    /// An attempt succeeded. Returns whether that closed the breaker: the probe's success does, and that of any attempt
    /// that began after it had opened, because nobody else was left.
    pub(super) fn succeed(&mut self, pass: Pass) -> bool {
        let closes = self.state != State::Closed && pass.era == self.era;
        if closes {
            self.close();
        }
        closes
    }

    /// The probe came to nothing: the next one may go.
    pub(super) fn give_back(&mut self, pass: Pass) {
        if let (State::Probing { until }, true) = (self.state, pass.era == self.era) {
            self.state = State::Open { until };
        }
    }

    /// Back to the beginning.
    pub(super) fn close(&mut self) {
        self.state = State::Closed;
        self.openings = 0;
    }
}
