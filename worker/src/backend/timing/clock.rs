//! The time a timing backend goes by: the system's, or a test's.

use std::time::{Duration, Instant};

/// The last part of a wait, which is spun through: the system wakes a sleeper 50 to 100 µs late. At 10 ms a step it is 1 % of a core, and
/// none of one while the engine is idle.
const SPIN: Duration = Duration::from_micros(100);

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
}

impl Default for SystemClock {
    fn default() -> Self {
        Self { begun: Instant::now() }
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Duration {
        self.begun.elapsed()
    }

    fn wait_until(&mut self, deadline: Duration) {
        let left = deadline.saturating_sub(self.now());
        if left > SPIN {
            std::thread::sleep(left - SPIN);
        }
        while self.now() < deadline {
            std::hint::spin_loop();
        }
    }
}
