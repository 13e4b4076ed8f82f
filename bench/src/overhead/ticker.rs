//! A clock that ticks on time: tokio's timers count in milliseconds, which is more than some routers take for a request.
//!
//! Knows nothing of what is done at a tick. Used by the paced requests of [`super::load`] and the paced streams of
//! [`super::mocks`].

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Ticks at a fixed period, whoever listens or not.
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
        let timer =
            timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC)?;
        let times = Itimerspec { it_interval: timespec(period), it_value: timespec(first) };
        timerfd_settime(&timer, TimerfdTimerFlags::empty(), &times)?;
        #[expect(
            deprecated,
            reason = "unsound for types without I/O safety only, which OwnedFd is not; the new one is unsafe"
        )]
        let timer = AsyncFd::with_interest(timer, Interest::READABLE)?;
        Ok(Self { timer })
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
