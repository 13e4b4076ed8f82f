//! Real-time priority for an engine thread that only keeps time.
//!
//! A thread that sleeps until a step is due is late by as long as the system lets others finish their turn on the cores, some
//! milliseconds where all are busy. One of real-time priority gets a core at once. It must be one that sleeps: a thread that
//! computes would take its core from everybody else, up to what the system's throttle leaves them. Knows no backend.

use std::fmt;

use thread_priority::{
    RealtimeThreadSchedulePolicy, ThreadPriority, ThreadSchedulePolicy, set_thread_priority_and_policy,
    thread_native_id,
};

/// First in, first out, and the lowest of its priorities: before ordinary threads, and after whatever else needs that.
pub(super) const FIFO: ThreadSchedulePolicy =
    ThreadSchedulePolicy::Realtime(RealtimeThreadSchedulePolicy::Fifo);

/// How soon the system gives an engine's thread a core when it wakes up.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Priority {
    /// In turn with all others.
    #[default]
    Ordinary,
    /// At once.
    RealTime,
}

impl fmt::Display for Priority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ordinary => "ordinary",
            Self::RealTime => "real-time",
        })
    }
}

/// Asks for real-time priority for the calling thread. Returns what it has got: not everybody may have it.
pub(super) fn raise() -> Priority {
    match set_thread_priority_and_policy(thread_native_id(), ThreadPriority::Min, FIFO) {
        Ok(()) => Priority::RealTime,
        Err(error) => {
            // Lateness is measured and reported either way.
            tracing::info!(
                %error,
                "no real-time priority for the engine thread: steps may end late on a busy machine (it needs \
                 CAP_SYS_NICE, or a limit of RLIMIT_RTPRIO of 1)"
            );
            Priority::Ordinary
        }
    }
}

#[cfg(test)]
mod tests {
    use thread_priority::thread_schedule_policy_param;

    use super::*;

    /// Whether it gets the priority depends on who runs the test.
    #[test]
    fn a_thread_has_the_priority_that_it_is_said_to_have() {
        let said_and_has = || {
            let before = thread_schedule_policy_param(thread_native_id()).unwrap();
            let said = raise();
            (before, said, thread_schedule_policy_param(thread_native_id()).unwrap())
        };
        let (before, said, has) = std::thread::spawn(said_and_has).join().unwrap();
        match said {
            Priority::Ordinary => assert_eq!(has, before),
            Priority::RealTime => assert_eq!((has.0, has.1.sched_priority), (FIFO, 1)),
        }
    }
}
