//! Keeps the generator's thread awake.
//!
//! A thread that sleeps has to be woken up by whoever sends to it: by the router, whose CPU time we measure. Between two
//! virtual cores that takes several microseconds, more than some routers need for a chunk, and tells nothing of the router:
//! its real clients and workers are on other machines. So between two messages this thread looks for the next one instead.
//! Next on the path: [`super::rig`], which asks how much of the time it looked in vain.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A look around that took longer than this was none: a task has run in between. Looking costs some 0.1 µs, at times a
/// question to the kernel that moves nothing, and whatever a task does has at least one call in it that moves data.
const LOOK_LIMIT: Duration = Duration::from_micros(2);

/// Whether the generator's thread may sleep.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Waiting {
    /// Never: the router is not charged for waking it up
    Spin,
    /// Whenever there is nothing to do, as a server would
    Sleep,
}

/// Time spent looking in vain.
#[derive(Debug, Clone, Default)]
pub struct Idle(Arc<AtomicU64>);

impl Idle {
    /// Starts looking; ends with the runtime.
    pub fn spin() -> Self {
        let idle = Self::default();
        let total = Arc::clone(&idle.0);
        tokio::spawn(async move {
            let mut before = Instant::now();
            loop {
                tokio::task::yield_now().await;
                let now = Instant::now();
                let gap = now - before;
                if gap < LOOK_LIMIT {
                    total.fetch_add(gap.as_nanos() as u64, Ordering::Relaxed);
                }
                before = now;
            }
        });
        idle
    }

    /// Time so far.
    pub fn total(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::Relaxed))
    }
}
