//! Latency at a fixed rate, whatever comes back: requests are due on a schedule, and a request that had to wait because
//! router or generator were busy is not forgiven that wait.
//!
//! Next on the path: [`super::connection`].

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rand::SeedableRng;
use rand::rngs::Xoshiro256PlusPlus;
use serde::Serialize;
use tokio::task::JoinSet;

use super::connection::{Connection, ExchangeError};
use super::load::LAST_ANSWER;
use super::rig::{Rig, Usage};
use super::tally::Tally;
use super::workload::{Delivery, Draft, Workload};
use crate::statistics::Distribution;
use crate::ticker::Ticker;

/// Latencies of 1-KB requests at a fixed rate.
#[derive(Debug, Clone, Serialize)]
pub struct Latency {
    /// Requests due each second.
    pub rate_per_s: u32,
    /// Half were answered within this time of being due.
    pub p50_ms: f64,
    /// All but one of a hundred were.
    pub p99_ms: f64,
    /// The longest.
    pub max_ms: f64,
    /// Arithmetic mean.
    pub mean_ms: f64,
    /// How long after it was due the 99th of a hundred requests was sent: what of the latencies is the generator's own.
    pub lateness_p99_ms: f64,
    /// Connections it took.
    pub connections: usize,
    /// CPU and counts, warm-up included.
    #[serde(flatten)]
    pub usage: Usage,
}

/// Measures [`Latency`].
///
/// # Errors
/// The system has no timer left, or the router is gone.
pub async fn measure(rig: &Rig, rate_per_s: u32) -> anyhow::Result<Latency> {
    let tally = Arc::<Tally>::default();
    let mut schedule = Schedule::new(rig, &tally)?;
    let before = rig.snapshot(&tally)?;
    schedule.run(rate_per_s, rig.timing.warmup).await?;
    schedule.shared.forget();
    schedule.run(rate_per_s, rig.timing.duration).await?;
    let usage = rig.snapshot(&tally)?.since(&before, &tally);
    let Seen { latencies, lateness, opened, .. } =
        std::mem::take(&mut *schedule.shared.seen.lock().unwrap_or_else(PoisonError::into_inner));
    let (latencies, lateness) = (Distribution::of(latencies), Distribution::of(lateness));
    Ok(Latency {
        rate_per_s,
        p50_ms: latencies.median_ms(),
        p99_ms: latencies.percentile_ms(99.0),
        max_ms: latencies.max_ms(),
        mean_ms: latencies.mean_ms(),
        lateness_p99_ms: lateness.percentile_ms(99.0),
        connections: opened,
        usage,
    })
}

struct Schedule {
    shared: Arc<Shared>,
    rng: Xoshiro256PlusPlus,
}

/// What the requests in flight share.
struct Shared {
    addresses: Vec<std::net::SocketAddr>,
    workload: Workload,
    tally: Arc<Tally>,
    seen: Mutex<Seen>,
}

#[derive(Default)]
struct Seen {
    idle: Vec<Connection>,
    opened: usize,
    latencies: Vec<Duration>,
    lateness: Vec<Duration>,
}

impl Schedule {
    fn new(rig: &Rig, tally: &Arc<Tally>) -> anyhow::Result<Self> {
        let shared = Shared {
            addresses: rig.addresses.clone(),
            workload: rig.workload(1, Delivery::Whole)?,
            tally: Arc::clone(tally),
            seen: Mutex::default(),
        };
        Ok(Self { shared: Arc::new(shared), rng: Xoshiro256PlusPlus::seed_from_u64(0) })
    }

    /// Sends what is due within `time` and waits for the answers.
    async fn run(&mut self, rate_per_s: u32, time: Duration) -> anyhow::Result<()> {
        let period = Duration::from_secs(1) / rate_per_s;
        let count = (time.as_secs_f64() * f64::from(rate_per_s)) as u32;
        let (mut tasks, mut sent) = (JoinSet::new(), 0);
        let start = Instant::now();
        let mut ticker = Ticker::start(period, period)?;
        while sent < count {
            let due_now = u32::try_from(ticker.tick().await?).unwrap_or(u32::MAX);
            for _ in 0..due_now.min(count - sent) {
                sent += 1;
                let draft = self.shared.workload.draft(&mut self.rng);
                tasks.spawn(Arc::clone(&self.shared).ask(draft, start + period * sent));
            }
        }
        let all = async { while tasks.join_next().await.is_some() {} };
        if tokio::time::timeout(LAST_ANSWER, all).await.is_err() {
            for _ in 0..tasks.len() {
                self.shared.tally.add_error(&format!("no answer within {} s", LAST_ANSWER.as_secs()));
            }
        }
        Ok(())
    }
}

impl Shared {
    async fn ask(self: Arc<Self>, draft: Draft, due: Instant) {
        let lateness = due.elapsed();
        let outcome = self.exchange(&draft).await;
        let latency = due.elapsed();
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        match outcome {
            Ok(connection) => {
                self.tally.add_request();
                seen.latencies.push(latency);
                seen.lateness.push(lateness);
                if !connection.closes() {
                    seen.idle.push(connection);
                }
            }
            Err(error) => self.tally.add_error(&error),
        }
    }

    async fn exchange(&self, draft: &Draft) -> Result<Connection, ExchangeError> {
        let mut connection = match self.take_idle() {
            Ok(idle) => idle,
            Err(number) => Connection::open(self.addresses[number % self.addresses.len()]).await?,
        };
        connection.exchange(self.workload.pieces(draft)).await?;
        Ok(connection)
    }

    /// A free connection, or the number of the one that is to be opened. The one used longest ago is taken, so that
    /// all take turns.
    fn take_idle(&self) -> Result<Connection, usize> {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if seen.idle.is_empty() {
            seen.opened += 1;
            return Err(seen.opened - 1);
        }
        Ok(seen.idle.remove(0))
    }

    /// Forgets the warm-up.
    fn forget(&self) {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.latencies.clear();
        seen.lateness.clear();
    }
}
