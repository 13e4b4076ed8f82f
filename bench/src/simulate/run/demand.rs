//! What the first router takes its workers to have to do, as the simulation goes by.

use std::time::Duration;

use super::fleet::Router;

/// Between two looks.
const EVERY: Duration = Duration::from_secs(1);

/// The mean of what was seen.
#[derive(Debug, Default)]
pub(super) struct Seen {
    next: Duration,
    sum: f64,
    looks: u32,
}

impl Seen {
    /// Looks, if it is time.
    pub(super) fn look(&mut self, router: &Router, now_ns: u64) {
        let now = Duration::from_nanos(now_ns);
        if now < self.next {
            return;
        }
        let demand = router.decider.demand(&router.fleet, now);
        let usable: usize = demand.iter().map(|demand| demand.usable).sum();
        self.sum += demand.iter().map(|demand| demand.workers).sum::<f64>() / usable.max(1) as f64;
        self.looks += 1;
        self.next = now + EVERY;
    }

    /// Work for each worker.
    pub(super) fn mean(&self) -> f64 {
        self.sum / f64::from(self.looks.max(1))
    }
}
