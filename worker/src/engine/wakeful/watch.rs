//! What the second thread on a core does: it spins while something is due, unless others want the core, and sleeps otherwise.
//!
//! It comes last, so nobody may wait for it: the engine's thread writes an atomic and wakes it up, and there is no lock.
//! Coming last holds within one control group or session only: of a core that another one wants as well it would get half,
//! and the system would not move others here who wait elsewhere. So it looks how long it was kept waiting, and whether anybody
//! waits at all. When that is more than an engine takes that keeps time, it leaves the core, which does not halt where there is
//! more to do than cores, and tries now and then whether they still wait. Knows no engine. Next: `demand` does the looking.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{park, park_timeout};
use std::time::{Duration, Instant};

use super::claim::Name;
use super::demand::Demand;

/// How long it spins between two looks at who else wants the core. A look takes some microseconds.
const LOOKS_EVERY: Duration = Duration::from_millis(1);
/// How often the processor is told to spin between two readings of the clock, some microseconds in all.
const SPINS: usize = 64;
/// Waits, its own and others', are added up for so long.
const PERIOD: Duration = Duration::from_millis(20);
/// More than that in a period, a quarter of it, and others want the core: the engine itself spins through an eighth of a
/// step at most.
const MOST_WAITS: Duration = Duration::from_millis(5);
/// After how long it tries first whether the core is free again.
const LEAST_PAUSE: Duration = Duration::from_millis(20);
/// And at most, when the core is wanted again each time that it was free.
const MOST_PAUSE: Duration = Duration::from_millis(320);
/// Whoever gets a core this soon after waking up was the only one who wanted it: who comes last waits for others' turns to end.
const AT_ONCE: Duration = Duration::from_micros(200);
/// How often it looks whether somebody else still keeps the core awake.
const HANDOVER: Duration = Duration::from_millis(50);

/// What the thread is asked to do, and what it does.
#[derive(Debug, Default)]
pub(super) struct Watch {
    is_due: AtomicBool,
    is_over: AtomicBool,
    spins: AtomicBool,
}

impl Watch {
    /// Something is due from now on. Whether that is news; then the thread has to be woken up.
    pub(super) fn begin(&self) -> bool {
        !self.is_due.swap(true, Ordering::Release)
    }

    /// Nothing is due from now on.
    pub(super) fn rest(&self) {
        self.is_due.store(false, Ordering::Release);
    }

    /// The thread is to end. It has to be woken up.
    pub(super) fn end(&self) {
        self.is_over.store(true, Ordering::Release);
        self.rest();
    }

    /// Whether it keeps the core awake now.
    pub(super) fn spins(&self) -> bool {
        self.spins.load(Ordering::Relaxed)
    }

    /// What the thread does until it is to end. Whoever keeps the same core awake holds `name`.
    pub(super) fn keep(&self, demand: &Demand, name: &str) {
        let (mut core, mut courtesy) = (Core::Free, Courtesy::default());
        while !self.is_over.load(Ordering::Acquire) {
            if !self.is_due.load(Ordering::Acquire) {
                park();
                continue;
            }
            core = match core {
                Core::Wanted => self.try_again(demand, courtesy.pause),
                Core::Free => match Name::take(name) {
                    Ok(None) => {
                        park_timeout(HANDOVER);
                        Core::Free
                    }
                    // Where names are not to be had, two may do it at a time.
                    _held => self.spin(demand, &mut courtesy),
                },
            };
        }
    }

    /// Spins until nothing is due or others want the core.
    fn spin(&self, demand: &Demand, courtesy: &mut Courtesy) -> Core {
        let (mut looked, mut others) = (Instant::now(), Duration::ZERO);
        courtesy.begin(looked, demand.waited());
        self.spins.store(true, Ordering::Relaxed);
        let mut core = Core::Free;
        while core == Core::Free && self.is_due.load(Ordering::Relaxed) {
            (0..SPINS).for_each(|_| std::hint::spin_loop());
            let now = Instant::now();
            if now.duration_since(looked) >= LOOKS_EVERY {
                if demand.is_beyond_cores() {
                    others += now.duration_since(looked);
                }
                looked = now;
                core = courtesy.look(now, demand.waited() + others);
            }
        }
        self.spins.store(false, Ordering::Relaxed);
        core
    }

    /// Sleeps for `pause`, and sees whether it gets the core at once then, and nobody else waits for one. When nothing is due
    /// before that, it does not know.
    fn try_again(&self, demand: &Demand, pause: Duration) -> Core {
        let ends = Instant::now() + pause;
        loop {
            let before = demand.waited();
            let left = ends.saturating_duration_since(Instant::now());
            park_timeout(left);
            // Woken up before its time it has waited for who woke it, and that says nothing.
            if left.is_zero() || !self.is_due.load(Ordering::Acquire) {
                return Core::Wanted;
            }
            if Instant::now() >= ends {
                let was_at_once = demand.waited().saturating_sub(before) <= AT_ONCE;
                return if was_at_once && !demand.is_beyond_cores() { Core::Free } else { Core::Wanted };
            }
        }
    }
}

/// Whether others want the core.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Core {
    Free,
    Wanted,
}

/// When to leave the core to others, and for how long.
#[derive(Debug)]
struct Courtesy {
    began: Instant,
    waited_before: Duration,
    pause: Duration,
}

impl Default for Courtesy {
    fn default() -> Self {
        Self { began: Instant::now(), waited_before: Duration::ZERO, pause: Duration::ZERO }
    }
}

impl Courtesy {
    /// Begins a period: the thread has waited for so long in all.
    fn begin(&mut self, now: Instant, waited: Duration) {
        (self.began, self.waited_before) = (now, waited);
    }

    /// Takes in for how long the thread has waited and others have waited, in all. If others want the core, the pause is twice as long as the one before,
    /// unless a period has passed in which nobody did.
    fn look(&mut self, now: Instant, waited: Duration) -> Core {
        if waited.saturating_sub(self.waited_before) > MOST_WAITS {
            self.pause = (self.pause * 2).clamp(LEAST_PAUSE, MOST_PAUSE);
            return Core::Wanted;
        }
        if now.duration_since(self.began) >= PERIOD {
            self.pause = Duration::ZERO;
            self.begin(now, waited);
        }
        Core::Free
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, mpsc};

    use super::super::tests::until;
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// `R` of a thread that runs or is ready to, `S` of one that sleeps.
    fn state_of(thread: i32) -> char {
        let stat = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat")).unwrap();
        stat.rsplit(')').next().unwrap().trim_start().chars().next().unwrap()
    }

    #[test]
    fn the_thread_spins_while_something_is_due_and_sleeps_otherwise() {
        let (watch, (tell, told)) = (Arc::new(Watch::default()), mpsc::channel());
        let thread = {
            let (watch, name) = (Arc::clone(&watch), format!("roundhouse-test-{}-keeps", std::process::id()));
            std::thread::spawn(move || {
                tell.send(rustix::thread::gettid().as_raw_nonzero().get()).unwrap();
                watch.keep(&Demand::of_this_thread().unwrap(), &name);
            })
        };
        let id = told.recv().unwrap();
        let sleeps = || state_of(id) == 'S' && !watch.spins();
        until("it sleeps", sleeps);
        assert!(watch.begin());
        assert!(!watch.begin(), "that is no news");
        thread.thread().unpark();
        until("it spins", || state_of(id) == 'R' && watch.spins());
        watch.rest();
        until("it sleeps again", sleeps);
        watch.end();
        thread.thread().unpark();
        thread.join().unwrap();
        assert!(!watch.spins());
    }

    #[test]
    fn one_at_a_time_keeps_a_core_awake() {
        let name = format!("roundhouse-test-{}-one", std::process::id());
        let other = Name::take(&name).unwrap();
        let watch = Arc::new(Watch::default());
        watch.begin();
        let thread = {
            let (watch, name) = (Arc::clone(&watch), name.clone());
            std::thread::spawn(move || watch.keep(&Demand::of_this_thread().unwrap(), &name))
        };
        assert!(!watch.spins(), "the other does");
        drop(other);
        until("it takes over", || watch.spins() && Name::take(&name).unwrap().is_none());
        watch.end();
        thread.thread().unpark();
        thread.join().unwrap();
        assert!(Name::take(&name).unwrap().is_some(), "it is given back");
    }

    #[test]
    fn a_core_that_others_want_is_left_to_them_for_longer_each_time() {
        let (start, mut courtesy) = (Instant::now(), Courtesy::default());
        let mut pauses = Vec::new();
        for _ in 0..6 {
            courtesy.begin(start, 100 * MS);
            assert_eq!(courtesy.look(start + 9 * MS, 105 * MS), Core::Free, "that may be the engine");
            assert_eq!(courtesy.look(start + 12 * MS, 106 * MS), Core::Wanted);
            pauses.push(courtesy.pause);
        }
        assert_eq!(pauses, [20, 40, 80, 160, 320, 320].map(Duration::from_millis));
        courtesy.begin(start, Duration::ZERO);
        assert_eq!(courtesy.look(start + PERIOD, 4 * MS), Core::Free);
        assert_eq!(courtesy.look(start + PERIOD + 15 * MS, 9 * MS), Core::Free, "another period");
        assert_eq!(courtesy.look(start + PERIOD + 16 * MS, 10 * MS), Core::Wanted);
        assert_eq!(courtesy.pause, LEAST_PAUSE);
    }
}
