//! A clock that ticks on time: tokio's timers count in milliseconds, which is more than some routers take for a request.
//!
//! Knows nothing of what is done at a tick. Used by the schedule of [`crate::run`], and by the paced requests and streams
//! of [`crate::overhead`].

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// A period that does not repeat.
const ONCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// Ticks at a fixed period, whoever listens or not, or once.
#[derive(Debug)]
pub struct Ticker {
    timer: AsyncFd<OwnedFd>,
}

impl Ticker {
    /// The first tick comes after `first`, the others a `period` apart. Both must be above zero.
    ///
    /// # Errors
    /// The system has no timer left.
    pub fn start(first: Duration, period: Duration) -> io::Result<Self> {
        let ticker = Self::silent()?;
        ticker.set(first, timespec(period))?;
        Ok(ticker)
    }

    /// A clock that says nothing until [`Self::sleep`].
    ///
    /// # Errors
    /// The system has no timer left.
    pub fn silent() -> io::Result<Self> {
        let timer =
            timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC)?;
        #[expect(
            deprecated,
            reason = "unsound for types without I/O safety only, which OwnedFd is not; the new one is unsafe"
        )]
        let timer = AsyncFd::with_interest(timer, Interest::READABLE)?;
        Ok(Self { timer })
    }

    /// Waits for this long and ticks no more.
    ///
    /// # Errors
    /// The timer cannot be set or read.
    pub async fn sleep(&mut self, time: Duration) -> io::Result<()> {
        self.set(time, ONCE)?;
        self.tick().await.map(drop)
    }

    fn set(&self, first: Duration, period: Timespec) -> io::Result<()> {
        let times = Itimerspec { it_interval: period, it_value: timespec(first) };
        timerfd_settime(self.timer.get_ref(), TimerfdTimerFlags::empty(), &times)?;
        Ok(())
    }

    /// Waits for the next tick; more than one when somebody came late.
    ///
    /// # Errors
    /// The timer cannot be read.
    pub async fn tick(&mut self) -> io::Result<u64> {
        self.timer
            .async_io(Interest::READABLE, |timer| {
                let mut count = [0; 8];
                rustix::io::read(timer, &mut count)?;
                Ok(u64::from_ne_bytes(count))
            })
            .await
    }
}

fn timespec(duration: Duration) -> Timespec {
    let duration = duration.max(Duration::from_nanos(1)); // zero would switch the timer off
    Timespec { tv_sec: duration.as_secs().cast_signed(), tv_nsec: duration.subsec_nanos().into() }
}
