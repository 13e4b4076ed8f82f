//! Starts conversations on an absolute schedule and under a limit, and waits for all of them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::time::{ClockId, clock_gettime};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;

use super::conversation::{Due, Workload};
use crate::record::RequestRecord;
use crate::ticker::Ticker;

/// How many starts may follow one another before those that were started get a turn on the thread.
const STARTS_A_TURN: usize = 32;

/// The end of a run.
#[derive(Debug)]
pub struct Finished {
    /// Every request of every conversation, in the dataset's order.
    pub records: Vec<RequestRecord>,
    /// From the start of the run to the end of its last request.
    pub duration: Duration,
    /// CPU time of the client's thread within it.
    pub client_cpu: Duration,
}

/// Starts every conversation at its offset of `schedule`, at most `limit` at a time and always in order.
///
/// # Errors
/// A conversation's task that broke: a bug. A system without a timer left.
pub async fn run(
    workload: &Arc<Workload>,
    schedule: &[Duration],
    limit: Option<u32>,
) -> anyhow::Result<Finished> {
    let permits = limit.map(|limit| Arc::new(Semaphore::new(limit as usize)));
    let mut tasks = JoinSet::new();
    let mut records = Vec::with_capacity(schedule.len());
    let mut ticker = Ticker::silent().context("no timer for the schedule")?; // tokio's timers count in milliseconds
    let cpu_before = thread_cpu();
    let start = Instant::now();
    let mut blocked_until = Duration::ZERO;
    for (index, scheduled) in schedule.iter().copied().enumerate() {
        if let Some(early) = scheduled.checked_sub(start.elapsed()).filter(|early| !early.is_zero()) {
            ticker.sleep(early).await.context("the timer of the schedule")?;
        } else if index % STARTS_A_TURN == STARTS_A_TURN - 1 {
            tokio::task::yield_now().await;
        }
        let permit = acquire(permits.as_ref(), start, &mut blocked_until).await;
        let due = Due { index, run_start: start, scheduled, blocked_until };
        let workload = Arc::clone(workload);
        tasks.spawn(async move {
            let records = workload.converse(due).await;
            drop(permit);
            records
        });
        while let Some(done) = tasks.try_join_next() {
            records.extend(done?);
        }
    }
    while let Some(done) = tasks.join_next().await {
        records.extend(done?);
    }
    let duration = start.elapsed();
    let client_cpu = thread_cpu().saturating_sub(cpu_before);
    records.sort_by_key(|record: &RequestRecord| (record.session, record.turn));
    Ok(Finished { records, duration, client_cpu })
}

/// CPU time of this thread, which is the client's only one.
fn thread_cpu() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.try_into().unwrap_or(0))
}

/// Waits for the limit; notes in `blocked_until` when it opened, if it was closed.
async fn acquire(
    permits: Option<&Arc<Semaphore>>,
    start: Instant,
    blocked_until: &mut Duration,
) -> Option<OwnedSemaphorePermit> {
    let permits = permits?;
    if let Ok(permit) = Arc::clone(permits).try_acquire_owned() {
        return Some(permit);
    }
    let permit = Arc::clone(permits).acquire_owned().await.ok(); // never closed
    *blocked_until = start.elapsed();
    permit
}
