//! The time a timing backend goes by: the system's, or a test's.

use std::time::{Duration, Instant};

/// The last part of a wait, at least, which is spun through: the system wakes a sleeper 50 to 100 µs late. At 10 ms a
/// step it is 1 % of a core, and none of one while the engine is idle.
pub(super) const LEAST_SPIN: Duration = Duration::from_micros(100);
/// The last part at most: who is late for longer has no core to run on, and spinning would make it worse.
const MOST_SPIN: Duration = Duration::from_millis(2);
/// And at most one part in so many of a wait, so that short steps leave the core to others as well.
const SPIN_SHARE: u32 = 8;
/// How much of the margin is left after a step that would have done without: half of it after 35 steps.
const KEPT_SHARE: f64 = 0.98;

/// Tells the time, and waits.
pub trait Clock: Send {
    /// Time since some beginning.
    fn now(&self) -> Duration;

    /// Returns at `deadline`, or at once when it has passed.
    fn wait_until(&mut self, deadline: Duration);
}

/// The system's.
#[derive(Debug)]
pub struct SystemClock {
    begun: Instant,
    margin: Margin,
}

impl Default for SystemClock {
    fn default() -> Self {
        Self { begun: Instant::now(), margin: Margin::default() }
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Duration {
        self.begun.elapsed()
    }

    fn wait_until(&mut self, deadline: Duration) {
        let left = deadline.saturating_sub(self.now());
        let sleep = left.saturating_sub(self.margin.of(left));
        if !sleep.is_zero() {
            let wakes = deadline - (left - sleep);
            std::thread::sleep(sleep);
            self.margin.woken(self.now().saturating_sub(wakes));
        }
        while self.now() < deadline {
            std::hint::spin_loop();
        }
    }
}

/// How long before a deadline a sleep ends. A thread that is running when its time comes is on time; one that sleeps has
/// to get a core first, and on a busy machine that takes as long as the scheduler lets others finish their turn. So the
/// margin is what that took lately: it grows with the first sleep that came late, and shrinks again step by step.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Margin(Duration);

impl Default for Margin {
    fn default() -> Self {
        Self(LEAST_SPIN)
    }
}

impl Margin {
    /// What of a wait is spun through.
    fn of(self, wait: Duration) -> Duration {
        self.0.min((wait / SPIN_SHARE).max(LEAST_SPIN)).min(wait)
    }

    /// Takes in that the system woke us `late`.
    fn woken(&mut self, late: Duration) {
        // A quarter more: the next may be a little later.
        let wanted = late + late / 4;
        self.0 = wanted.max(self.0.mul_f64(KEPT_SHARE)).clamp(LEAST_SPIN, MOST_SPIN);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn the_margin_grows_at_once_and_shrinks_step_by_step() {
        let mut margin = Margin::default();
        margin.woken(MS / 20);
        assert_eq!(margin.of(20 * MS), LEAST_SPIN);
        margin.woken(MS);
        assert_eq!(margin.of(20 * MS), MS * 5 / 4);
        for _ in 0..35 {
            margin.woken(MS / 20);
        }
        assert!((MS / 2..MS * 3 / 4).contains(&margin.of(20 * MS)), "{margin:?}");
        (0..1_000).for_each(|_| margin.woken(Duration::ZERO));
        assert_eq!(margin, Margin::default());
    }

    #[test]
    fn a_machine_without_a_core_to_spare_is_not_spun_on_for_long() {
        let mut margin = Margin::default();
        margin.woken(500 * MS);
        assert_eq!(margin.of(100 * MS), MOST_SPIN);
        assert_eq!(margin.of(8 * MS), MS, "a share of a short wait");
        assert_eq!(margin.of(MS / 2), LEAST_SPIN);
        assert_eq!(margin.of(MS / 100), MS / 100);
    }

    #[test]
    fn a_wait_never_ends_before_its_deadline() {
        let mut clock = SystemClock::default();
        for _ in 0..20 {
            let deadline = clock.now() + MS;
            clock.wait_until(deadline);
            assert!(clock.now() >= deadline);
        }
    }
}
