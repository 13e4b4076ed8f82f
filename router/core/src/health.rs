//! What a worker's failures mean for whoever picks next: circuit breaker, cooling, slow start.
//!
//! Each attempt holds a [`Trial`] and tells it what became of it. Time comes as readings of the router's clock, counted
//! from its start; randomness as draws from 0 to 1. A pick reads one atomic of a worker that is well, and three of one
//! that is not; locks are taken only when something changes. Next on the path: [`decide`](crate::decide).

mod breaker;

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::load_table::RowHandle;
use crate::window::Window;
use breaker::{Breaker, Pass, Role, State};

/// Longest time that a worker's `Retry-After` keeps requests away: a wrong one must not take it out for long.
pub const LONGEST_COOLING: Duration = Duration::from_secs(30);
/// Share of its work that a worker gets when it has just come back.
const FIRST_SHARE: f64 = 0.1;
/// Eras are counted in 24 bits.
const MAX_ERA: u32 = (1 << ERA_BITS) - 1;

const ERA_BITS: u32 = 24;
const STATE_BITS: u32 = 2;
const TIME_BITS: u32 = 64 - ERA_BITS - STATE_BITS;
/// Until something changes: the breaker is not closed.
const NEVER: u64 = u64::MAX;

/// What is known of how well a worker does.
#[derive(Debug, Default)]
pub struct Health {
    /// Says from when on there is nothing special about the worker: all that a pick reads of one that is well.
    row: RowHandle,
    /// The breaker's state for those who do not hold the lock: `era | milliseconds | state`.
    gate: AtomicU64,
    cooling_until_ms: AtomicU64,
    warming_from_ms: AtomicU64,
    warming_until_ms: AtomicU64,
    in_a_row: AtomicU32,
    /// Successes, and failures as marked events.
    window: Window,
    breaker: Mutex<Breaker>,
}

/// How much a pick wants a worker; the best first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Standing {
    /// It takes requests.
    Ready,
    /// It has just come back, and this request is not among its share.
    Warming,
    /// It has said that it is busy.
    Cooling,
    /// Its breaker is open.
    Open,
}

/// A breaker's state, as operators see it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BreakerState {
    /// All may pass.
    Closed,
    /// One may pass, or is on its way.
    HalfOpen,
    /// None may pass, unless all workers are like this.
    Open,
}

impl Health {
    /// The health of the worker that has this row.
    pub(crate) fn at(row: RowHandle) -> Self {
        Self { row, ..Self::default() }
    }

    /// How much a pick wants it. `draw` is asked for only while the worker is warming.
    #[must_use]
    pub fn standing(&self, now: Duration, draw: &mut dyn FnMut() -> f64) -> Standing {
        if milliseconds(now) >= self.row.ordinary_from_ms.load(Ordering::Relaxed) {
            return Standing::Ready;
        }
        match read_gate(self.gate.load(Ordering::Relaxed)).0 {
            State::Probing { .. } => return Standing::Open,
            State::Open { until } if now < until => return Standing::Open,
            _ => {}
        }
        if self.cooling(now).is_some() {
            return Standing::Cooling;
        }
        match self.warming_share(now) {
            Some(share) if draw() >= share => Standing::Warming,
            _ => Standing::Ready,
        }
    }

    /// The breaker's state.
    #[must_use]
    pub fn breaker(&self, now: Duration) -> BreakerState {
        match read_gate(self.gate.load(Ordering::Relaxed)).0 {
            State::Closed => BreakerState::Closed,
            State::Open { until } if now < until => BreakerState::Open,
            State::Open { .. } | State::Probing { .. } => BreakerState::HalfOpen,
        }
    }

    /// How much longer the worker wants to be left alone; `None` if it does not.
    #[must_use]
    pub fn cooling(&self, now: Duration) -> Option<Duration> {
        let until = self.cooling_until_ms.load(Ordering::Relaxed);
        let left = until.checked_sub(milliseconds(now)).filter(|left| *left > 0)?;
        Some(Duration::from_millis(left))
    }

    /// The share of its work that a worker gets that has come back, from 0 to 1; `None` once it gets all.
    #[must_use]
    pub fn warming_share(&self, now: Duration) -> Option<f64> {
        let until = self.warming_until_ms.load(Ordering::Relaxed);
        let from = self.warming_from_ms.load(Ordering::Relaxed);
        let now = milliseconds(now);
        if now >= until || from >= until {
            return None;
        }
        let passed = now.saturating_sub(from) as f64 / (until - from) as f64;
        Some(FIRST_SHARE + (1.0 - FIRST_SHARE) * passed)
    }

    /// The worker has said that it is busy, and for how long.
    pub fn cool(&self, now: Duration, how_long: Duration) {
        let breaker = self.lock();
        let until = end_milliseconds(now + how_long.min(LONGEST_COOLING));
        self.cooling_until_ms.fetch_max(until, Ordering::Relaxed);
        self.show(&breaker);
    }

    /// The worker has come back after having been down: what it did before counts no more, and it gets its share of work
    /// little by little, all of it after `slow_start`.
    pub fn come_back(&self, now: Duration, slow_start: Option<Duration>) {
        let mut breaker = self.lock();
        breaker.close();
        self.forget_outcomes();
        self.cooling_until_ms.store(0, Ordering::Relaxed);
        self.warming_from_ms.store(milliseconds(now), Ordering::Relaxed);
        self.warming_until_ms
            .store(end_milliseconds(now + slow_start.unwrap_or_default()), Ordering::Relaxed);
        self.show(&breaker);
    }

    fn forget_outcomes(&self) {
        self.window.clear();
        self.in_a_row.store(0, Ordering::Relaxed);
    }

    /// Shows the state to those who do not take the lock; whoever changed it still holds it.
    fn show(&self, breaker: &Breaker) {
        self.gate.store(write_gate(breaker.state, breaker.era), Ordering::Relaxed);
        let warm = self.warming_until_ms.load(Ordering::Relaxed);
        let ordinary_from = match breaker.state {
            State::Closed => self.cooling_until_ms.load(Ordering::Relaxed).max(warm),
            _ => NEVER,
        };
        self.row.ordinary_from_ms.store(ordinary_from, Ordering::Relaxed);
    }

    fn lock(&self) -> MutexGuard<'_, Breaker> {
        // No code that holds it can panic half-way through a change.
        self.breaker.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One attempt's stake in its worker's health. Dropped without a word, it says nothing: the client left, or the worker
/// was busy. If it was the probe of a half-open breaker, the next request may then be it.
#[derive(Debug)]
pub struct Trial {
    health: Arc<Health>,
    pass: Pass,
}

impl Trial {
    /// Begins an attempt at a worker whose standing allowed it; `None` if it needs the one probe of a half-open breaker
    /// and another attempt has it.
    #[must_use]
    pub fn begin(health: &Arc<Health>, now: Duration) -> Option<Self> {
        let (state, era) = read_gate(health.gate.load(Ordering::Relaxed));
        let pass = match state {
            State::Closed => Pass { era, role: Role::Ordinary },
            _ => {
                let mut breaker = health.lock();
                let probe = breaker.take_probe(now);
                health.show(&breaker);
                match (probe, breaker.state) {
                    (Some(pass), _) => pass,
                    (None, State::Closed) => Pass { era: breaker.era, role: Role::Ordinary },
                    (None, _) => return None,
                }
            }
        };
        Some(Self { health: Arc::clone(health), pass })
    }

    /// Begins an attempt at a worker that nobody would pick if there were a better one.
    #[must_use]
    pub fn begin_anyway(health: &Arc<Health>, now: Duration) -> Self {
        Self::begin(health, now).unwrap_or_else(|| {
            let (_, era) = read_gate(health.gate.load(Ordering::Relaxed));
            Self { health: Arc::clone(health), pass: Pass { era, role: Role::Ordinary } }
        })
    }

    /// The first byte of a good reply has come. Closes a breaker that is not closed: its probe must not depend on how
    /// long the reply is. That the reply breaks later is a failure of its own.
    pub fn first_byte(&mut self) {
        if !matches!(read_gate(self.health.gate.load(Ordering::Relaxed)).0, State::Closed) {
            self.close_breaker();
        }
        self.pass.role = Role::Ordinary;
    }

    /// The reply has ended well.
    pub fn succeed(self, now: Duration) {
        let health = &self.health;
        if !matches!(read_gate(health.gate.load(Ordering::Relaxed)).0, State::Closed) {
            self.close_breaker();
            return;
        }
        health.window.add_ordinary(now);
        // A look costs less than a write that other cores must hear of.
        if health.in_a_row.load(Ordering::Relaxed) != 0 {
            health.in_a_row.store(0, Ordering::Relaxed);
        }
    }

    /// The worker failed. `draw` is from 0 to 1. Returns whether that opened the breaker.
    pub fn fail(self, now: Duration, draw: f64) -> bool {
        let health = &self.health;
        let mut breaker = health.lock();
        health.window.add_marked(now);
        let in_a_row = health.in_a_row.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        let before = breaker.era;
        breaker.fail(self.pass, now, health.window.read(now), in_a_row, draw);
        health.show(&breaker);
        breaker.era != before
    }

    fn close_breaker(&self) {
        let mut breaker = self.health.lock();
        if breaker.succeed(self.pass) {
            self.health.forget_outcomes();
        }
        self.health.show(&breaker);
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        if self.pass.role == Role::Probe {
            // Without effect once the probe has had its say.
            let mut breaker = self.health.lock();
            breaker.give_back(self.pass);
            self.health.show(&breaker);
        }
    }
}

/// A moment that has come.
fn milliseconds(now: Duration) -> u64 {
    u64::try_from(now.as_millis()).unwrap_or(NEVER - 1)
}

/// A moment to wait for; rounded up, so that it has not come before it has.
fn end_milliseconds(until: Duration) -> u64 {
    u64::try_from(until.as_micros().div_ceil(1_000)).unwrap_or(NEVER - 1)
}

fn write_gate(state: State, era: u32) -> u64 {
    let (code, until) = match state {
        State::Closed => (0, Duration::ZERO),
        State::Open { until } => (1, until),
        State::Probing { until } => (2, until),
    };
    let until = end_milliseconds(until) & ((1 << TIME_BITS) - 1);
    u64::from(era) << (TIME_BITS + STATE_BITS) | until << STATE_BITS | code
}

fn read_gate(gate: u64) -> (State, u32) {
    let until = Duration::from_millis(gate >> STATE_BITS & ((1 << TIME_BITS) - 1));
    let state = match gate & ((1 << STATE_BITS) - 1) {
        0 => State::Closed,
        1 => State::Open { until },
        _ => State::Probing { until },
    };
    let era = (gate >> (TIME_BITS + STATE_BITS)) as u32;
    (state, era)
}

#[cfg(test)]
mod tests;
