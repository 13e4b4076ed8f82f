//! Resident memory of the router: at rest, after many requests, and with thousands of streams that say nothing.
//!
//! Next on the path: [`super::process`].

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::Context;
use rand::SeedableRng;
use rand::rngs::Xoshiro256PlusPlus;
use serde::Serialize;
use tokio::sync::{Notify, Semaphore};
use tokio::task::JoinSet;

use super::connection::Connection;
use super::load::Load;
use super::mocks::Plan;
use super::process::Memory;
use super::rig::{Rig, Usage};
use super::tally::Tally;
use super::workload::{Delivery, Workload};

/// Longest that the requests before a reading may take: some routers serve 100 a second.
const REQUESTS_LIMIT: Duration = Duration::from_secs(180);
/// Streams that are being opened at once: few enough for any listen queue.
const OPENING: usize = 64;
/// Longest that opening them may take.
const OPENING_LIMIT: Duration = Duration::from_secs(60);
/// Pause before a reading with idle streams, for what a router puts off.
const SETTLING: Duration = Duration::from_secs(1);

/// Memory after many 1-KB requests.
#[derive(Debug, Clone, Serialize)]
pub struct AfterRequests {
    /// Resident memory then.
    pub rss_mb: Option<f64>,
    /// Counts of these requests.
    #[serde(flatten)]
    pub usage: Usage,
}

/// Memory with idle streams.
#[derive(Debug, Clone, Serialize)]
pub struct IdleStreams {
    /// Streams that were open and had shown their first chunk.
    pub streams: usize,
    /// Those that ended although nobody ended them.
    pub ended_early: usize,
    /// What one takes, in KB: the growth over the memory before, divided.
    pub rss_kb_per_stream: Option<f64>,
    /// Counts of the opening.
    #[serde(flatten)]
    pub usage: Usage,
}

impl Rig {
    /// Memory of the router now, if its process is known.
    ///
    /// # Errors
    /// The router is gone.
    pub fn memory(&self) -> anyhow::Result<Option<Memory>> {
        let read = self.process.map(|process| process.memory()).transpose();
        read.context("the router's process cannot be read; has it ended?")
    }
}

/// Kilobytes as the table's megabytes.
pub fn megabytes(memory: Memory) -> f64 {
    memory.rss_kb as f64 / 1024.0
}

/// Sends `requests` 1-KB requests, or as many as three minutes allow, and reads the memory.
///
/// # Errors
/// The router is gone.
pub async fn after_requests(rig: &Rig, requests: u64) -> anyhow::Result<AfterRequests> {
    let tally = Arc::<Tally>::default();
    let workload = Arc::new(rig.workload(1, Delivery::Whole)?);
    rig.mocks.answer_with(Plan::Whole);
    let before = rig.snapshot(&tally)?;
    let mut load = Load::new(&tally);
    let each = requests.div_ceil(rig.connections as u64);
    load.spawn(rig.connections, &rig.addresses, &workload, |lane, rng| lane.closed_loop(each, rng));
    load.finish(REQUESTS_LIMIT).await;
    let rss_mb = rig.memory()?.map(megabytes);
    Ok(AfterRequests { rss_mb, usage: rig.snapshot(&tally)?.since(&before, &tally) })
}

/// Opens `streams` streams that show one chunk and then nothing, and reads the memory that they take.
///
/// # Errors
/// The router is gone.
pub async fn idle_streams(rig: &Rig, streams: usize) -> anyhow::Result<IdleStreams> {
    let tally = Arc::<Tally>::default();
    let holding = Arc::new(Holding::new(rig.workload(1, Delivery::Stream { chunks: 1000 })?, &tally));
    rig.mocks.answer_with(Plan::Held);
    let (before, memory_before) = (rig.snapshot(&tally)?, rig.memory()?);
    let mut tasks = JoinSet::new();
    for number in 0..streams {
        let address = rig.addresses[number % rig.addresses.len()];
        tasks.spawn(Arc::clone(&holding).hold(address, number as u64));
    }
    let all = holding.until_settled(streams);
    if tokio::time::timeout(OPENING_LIMIT, all).await.is_err() {
        tally.add_error(&format!("not all streams open within {} s", OPENING_LIMIT.as_secs()));
    }
    tokio::time::sleep(SETTLING).await;
    let (usage, memory) = (rig.snapshot(&tally)?.since(&before, &tally), rig.memory()?);
    holding.is_over.store(true, Ordering::Relaxed);
    let (open, ended) = (holding.open.load(Ordering::Relaxed), holding.ended.load(Ordering::Relaxed));
    tasks.shutdown().await;
    rig.mocks.answer_with(Plan::Whole);
    let growth = memory.zip(memory_before).map(|(now, then)| now.rss_kb as f64 - then.rss_kb as f64);
    Ok(IdleStreams {
        streams: open,
        ended_early: ended,
        rss_kb_per_stream: growth.filter(|_| open > 0).map(|kb| kb / open as f64),
        usage,
    })
}

/// What the tasks that hold a stream each share.
struct Holding {
    workload: Workload,
    tally: Arc<Tally>,
    opening: Semaphore,
    open: AtomicUsize,
    ended: AtomicUsize,
    is_over: AtomicBool,
    changed: Notify,
}

impl Holding {
    fn new(workload: Workload, tally: &Arc<Tally>) -> Self {
        Self {
            workload,
            tally: Arc::clone(tally),
            opening: Semaphore::new(OPENING),
            open: AtomicUsize::new(0),
            ended: AtomicUsize::new(0),
            is_over: AtomicBool::new(false),
            changed: Notify::new(),
        }
    }

    /// Opens a stream and reads it for as long as it lasts.
    async fn hold(self: Arc<Self>, address: std::net::SocketAddr, seed: u64) {
        let mut permit = self.opening.acquire().await.ok();
        let draft = self.workload.draft(&mut Xoshiro256PlusPlus::seed_from_u64(seed));
        let on_chunk = || {
            if permit.take().is_some() {
                self.tally.add_chunk();
                self.open.fetch_add(1, Ordering::Relaxed);
                self.changed.notify_one();
            }
        };
        let outcome = match Connection::open(address).await {
            Ok(mut connection) => connection.stream(self.workload.pieces(&draft), on_chunk).await,
            Err(error) => Err(error),
        };
        if self.is_over.load(Ordering::Relaxed) {
            return;
        }
        match outcome {
            Ok(()) => self.tally.add_error(&"idle stream that ended"),
            Err(error) => self.tally.add_error(&error),
        }
        if permit.is_none() {
            self.open.fetch_sub(1, Ordering::Relaxed);
        }
        self.ended.fetch_add(1, Ordering::Relaxed);
        self.changed.notify_one();
    }

    /// Waits until each of `streams` is open or has failed.
    async fn until_settled(&self, streams: usize) {
        while self.open.load(Ordering::Relaxed) + self.ended.load(Ordering::Relaxed) < streams {
            self.changed.notified().await;
        }
    }
}
