//! A core that stays awake while steps are due.
//!
//! A virtual core that nobody wants halts, and comes back when its host has one to give, milliseconds late: no priority
//! within the machine changes that. So an engine's thread that keeps time stays on one core, and on the same core a second
//! thread spins while steps are due. It is of the class that comes last (`SCHED_IDLE`), leaves the core to whoever else
//! wants it, and sleeps while the engine has nothing to do. Knows no steps: the engine says when there are any. Next:
//! `claim` chooses the core, `watch` is what the second thread does.

mod claim;
mod demand;
mod watch;

use std::io;
use std::os::unix::thread::JoinHandleExt;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use rustix::thread::{CpuSet, sched_setaffinity};
use thread_priority::{
    NormalThreadSchedulePolicy, ThreadPriority, ThreadSchedulePolicy, set_thread_priority_and_policy,
    thread_schedule_policy_param,
};

use self::claim::CoreClaim;
use self::demand::Demand;
use self::watch::Watch;
use super::priority::{FIFO, Priority};
use crate::cpu_quota::CpuQuota;

/// After all others of its control group or session; among those it takes turns like anybody.
const LAST: ThreadSchedulePolicy = ThreadSchedulePolicy::Normal(NormalThreadSchedulePolicy::Idle);

/// A core that is kept awake while steps are due, as others see it.
#[derive(Clone, Debug)]
pub struct AwakeCore {
    number: usize,
    watch: Arc<Watch>,
}

impl AwakeCore {
    /// Which core it is.
    #[must_use]
    pub fn number(&self) -> usize {
        self.number
    }

    /// Whether it is kept awake now: not while nothing is due, and not by this worker while others want it anyway.
    #[must_use]
    pub fn is_kept_awake(&self) -> bool {
        self.watch.spins()
    }
}

/// The core that the calling thread stays on, with the thread that keeps it awake; that one ends with this value.
#[derive(Debug)]
pub(super) struct WakefulCore {
    core: AwakeCore,
    _claim: CoreClaim,
    /// `None` once it has been waited for.
    companion: Option<JoinHandle<()>>,
}

impl WakefulCore {
    /// One of the cores that the calling thread may run on, and on which it stays from now on. Only for a thread of
    /// real-time priority, which gets its core whatever else runs there, and without a quota, which spinning would use up.
    pub(super) fn start(priority: Priority, quota: CpuQuota) -> Option<Self> {
        if priority != Priority::RealTime {
            return None;
        }
        if quota == CpuQuota::Limited {
            tracing::info!(
                "no core is kept awake for the engine thread, since that would use up the CPU quota of its control \
                 group: steps may end late on an idle machine"
            );
            return None;
        }
        let said = |error: &io::Error| {
            tracing::info!(%error, "no core is kept awake for the engine thread: steps may end late on an idle machine");
        };
        Self::begin().inspect_err(said).ok()
    }

    fn begin() -> io::Result<Self> {
        let claim = CoreClaim::take()?;
        let core = AwakeCore { number: claim.number(), watch: Arc::default() };
        let (tell, told) = mpsc::channel();
        let (number, watch) = (core.number, Arc::clone(&core.watch));
        let body = move || {
            let prepared = stay_on(number).and_then(|()| Demand::of_this_thread());
            let (demand, prepared) =
                prepared.map_or_else(|error| (None, Err(error)), |demand| (Some(demand), Ok(())));
            // It is waited for.
            let _ = tell.send(prepared);
            if let Some(demand) = demand {
                watch.keep(&demand, &claim::awake(number));
            }
        };
        let companion = std::thread::Builder::new().name("wakeful".to_owned()).spawn(body)?;
        // From here on it ends however this does.
        let this = Self { core, _claim: claim, companion: Some(companion) };
        told.recv().map_err(io::Error::other)??;
        this.put_last()?;
        // Last of all, since it is not taken back.
        stay_on(number)?;
        Ok(this)
    }

    /// Has the companion come after all others. Until then it has this thread's priority, and is not asked to spin.
    fn put_last(&self) -> io::Result<()> {
        let Some(companion) = &self.companion else { return Ok(()) };
        let thread = companion.as_pthread_t();
        // It sets a nice value as well, which the class ignores and not everybody may set: so what became of it is looked up.
        let asked = set_thread_priority_and_policy(thread, ThreadPriority::Min, LAST);
        match thread_schedule_policy_param(thread) {
            Ok((LAST, _)) => Ok(()),
            _ => Err(io::Error::other(format!("a thread cannot be put last (SCHED_IDLE): {asked:?}"))),
        }
    }

    /// For whoever reports it.
    pub(super) fn core(&self) -> AwakeCore {
        self.core.clone()
    }

    /// Keeps it awake from now on.
    pub(super) fn stay_awake(&self) {
        if let (true, Some(companion)) = (self.core.watch.begin(), &self.companion) {
            companion.thread().unpark();
        }
    }

    /// Nothing is due until further notice.
    pub(super) fn rest(&self) {
        self.core.watch.rest();
    }
}

impl Drop for WakefulCore {
    /// Ends the companion and waits for it.
    fn drop(&mut self) {
        let Some(companion) = self.companion.take() else { return };
        self.core.watch.end();
        // Whoever comes last may wait a second for a turn on a busy core. Not everybody may change that; it ends all the same.
        let _ = set_thread_priority_and_policy(companion.as_pthread_t(), ThreadPriority::Min, FIFO);
        companion.thread().unpark();
        if companion.join().is_err() {
            tracing::error!("the thread that kept core {} awake panicked", self.core.number);
        }
    }
}

/// Keeps the calling thread on a core.
fn stay_on(core: usize) -> io::Result<()> {
    let mut cores = CpuSet::new();
    cores.set(core);
    Ok(sched_setaffinity(None, &cores)?)
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::{Duration, Instant};

    use rustix::thread::sched_getaffinity;

    use super::*;

    /// Waits until something is so; that it is not within a minute is failure.
    pub(in super::super) fn until(what: &str, is_so: impl Fn() -> bool) {
        let gives_up = Instant::now() + Duration::from_secs(60);
        while !is_so() {
            assert!(Instant::now() < gives_up, "{what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// On a thread of its own, which stays on the core.
    fn with_core<T: Send + 'static>(test: impl FnOnce(WakefulCore) -> T + Send + 'static) -> T {
        let body = || test(WakefulCore::start(Priority::RealTime, CpuQuota::Unlimited).expect("a core"));
        std::thread::spawn(body).join().unwrap()
    }

    fn own_cores() -> Vec<usize> {
        let cores = sched_getaffinity(None).unwrap();
        (0..CpuSet::MAX_CPU).filter(|core| cores.is_set(*core)).collect()
    }

    #[test]
    fn only_a_real_time_thread_without_a_quota_gets_one() {
        std::thread::spawn(|| {
            let before = own_cores();
            for (priority, quota) in [
                (Priority::Ordinary, CpuQuota::Unlimited),
                (Priority::Ordinary, CpuQuota::Limited),
                (Priority::RealTime, CpuQuota::Limited),
            ] {
                assert!(WakefulCore::start(priority, quota).is_none(), "{priority:?}, {quota:?}");
            }
            assert_eq!(own_cores(), before, "it may run wherever it might before");
        })
        .join()
        .unwrap();
    }

    #[test]
    fn both_threads_are_where_they_are_said_to_be() {
        let allowed = own_cores();
        with_core(move |core| {
            assert!(allowed.contains(&core.core().number()));
            assert_eq!(own_cores(), [core.core().number()]);
            let companion = core.companion.as_ref().unwrap().as_pthread_t();
            assert_eq!(thread_schedule_policy_param(companion).unwrap().0, LAST);
            let stays = std::thread::spawn(|| stay_on(own_cores()[0]).map(|()| own_cores().len()));
            assert_eq!(stays.join().unwrap().unwrap(), 1);
        });
    }

    #[test]
    fn it_is_kept_awake_while_something_is_due() {
        with_core(|core| {
            let seen = core.core();
            assert!(!seen.is_kept_awake(), "nothing is due yet");
            core.stay_awake();
            until("it is kept awake", || seen.is_kept_awake());
            core.stay_awake();
            core.rest();
            until("it is left alone", || !seen.is_kept_awake());
        });
    }

    #[test]
    fn a_core_that_somebody_else_keeps_busy_is_left_to_them() {
        with_core(|core| {
            let (number, is_over) = (core.core().number(), AtomicBool::new(false));
            core.stay_awake();
            until("it is kept awake", || core.core().is_kept_awake());
            std::thread::scope(|threads| {
                threads.spawn(|| {
                    stay_on(number).unwrap();
                    while !is_over.load(Ordering::Relaxed) {
                        std::hint::spin_loop();
                    }
                });
                until("it is left to the other thread", || !core.core().is_kept_awake());
                is_over.store(true, Ordering::Relaxed);
            });
        });
    }

    #[test]
    fn the_companion_is_gone_with_the_value() {
        for is_due in [false, true] {
            let seen = with_core(move |core| {
                if is_due {
                    core.stay_awake();
                }
                core.core()
            });
            assert_eq!(Arc::strong_count(&seen.watch), 1, "nobody else has it");
            assert!(!seen.is_kept_awake());
        }
    }
}
