//! What every part of the measurement stands on: the mocks, the router before them (or none), its process, the times.
//!
//! Reads clocks and counters at the two ends of a window; what happens between them is the parts' affair. Next on the
//! path: [`super::rates`], [`super::latency`], [`super::streams`], [`super::memory`].

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use serde::Serialize;

use super::load::LAST_ANSWER;
use super::mocks::{MockCounts, Mocks};
use super::process::{CpuReading, ProcessTree};
use super::spin::Idle;
use super::tally::{Counts, Tally};
use super::workload::{Delivery, Workload};

/// Where chat completions are asked for.
const CHAT_PATH: &str = "/v1/chat/completions";

/// How long things are watched.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// Load before the window.
    pub warmup: Duration,
    /// The window.
    pub duration: Duration,
}

/// The bench and what it measures.
#[derive(Debug, Clone)]
pub struct Rig {
    /// The mock workers.
    pub mocks: Mocks,
    /// Where requests go: the router, or the mocks themselves.
    pub addresses: Vec<SocketAddr>,
    /// The `host` header.
    pub authority: String,
    /// What stands before `/v1/…`.
    pub path_prefix: String,
    /// The router's process, if it is known.
    pub process: Option<ProcessTree>,
    /// Counts the time in which the generator had nothing to do, if it does not sleep then.
    pub idle: Option<Idle>,
    /// Keep-alive connections of the closed loop.
    pub connections: usize,
    /// How long things are watched.
    pub timing: Timing,
}

/// Clocks and counters at one moment.
#[derive(Debug)]
pub struct Snapshot {
    at: Instant,
    router: Option<CpuReading>,
    bench: CpuReading,
    idle: Duration,
    counts: Counts,
    mocks: MockCounts,
}

/// What went on between two moments.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Usage {
    /// Time between them.
    pub seconds: f64,
    /// Good answers.
    pub requests: u64,
    /// Chunks that arrived.
    pub chunks: u64,
    /// User and system time of the router's processes.
    pub router_cpu_s: Option<f64>,
    /// Share of its core that the generator and the mocks took: near 100 they were the limit.
    pub bench_busy_percent: f64,
    /// Share of the window in which the router could have run, and something else had its core: the machine was not quiet.
    pub router_waited_percent: Option<f64>,
    /// The same of the generator and the mocks.
    pub bench_waited_percent: f64,
    /// Generation requests that reached a mock: more than were sent where a router tries again.
    pub mock_requests: u64,
    /// Hits among them, in percent.
    pub hit_percent: Option<f64>,
    /// Requests whose system prompt no mock could read.
    pub untagged: u64,
    /// Failed requests by reason, from the beginning of the part on.
    pub errors: BTreeMap<String, u64>,
}

impl Rig {
    /// The requests of one size.
    ///
    /// # Errors
    /// A size without room for a prompt.
    pub fn workload(&self, kilobytes: usize, delivery: Delivery) -> anyhow::Result<Workload> {
        let path = format!("{}{CHAT_PATH}", self.path_prefix);
        Ok(Workload::new(&self.authority, &path, kilobytes, delivery)?)
    }

    /// Requests to ask with whether the router is there.
    ///
    /// # Errors
    /// As [`Self::workload`].
    pub fn strangers(&self) -> anyhow::Result<Workload> {
        Ok(Workload::of_strangers(&self.authority, &format!("{}{CHAT_PATH}", self.path_prefix))?)
    }

    /// Reads clocks and counters.
    ///
    /// # Errors
    /// The router is gone.
    pub fn snapshot(&self, tally: &Tally) -> anyhow::Result<Snapshot> {
        let router = self.process.as_ref().map(ProcessTree::cpu).transpose();
        Ok(Snapshot {
            at: Instant::now(),
            router: router.context("the router's process cannot be read; has it ended?")?,
            bench: ProcessTree::of_this_process().cpu_of_root()?,
            idle: self.idle.as_ref().map(Idle::total).unwrap_or_default(),
            counts: tally.counts(),
            mocks: self.mocks.total(),
        })
    }

    /// Lets the load that runs warm up, then watches it for the window's length. A window in which nothing of what is
    /// `counted` has come gives no figure, so it goes on for another length, as long as nothing fails and answers may
    /// take.
    ///
    /// # Errors
    /// The router is gone.
    pub async fn watch(&self, tally: &Arc<Tally>, counted: fn(&Usage) -> u64) -> anyhow::Result<Usage> {
        tokio::time::sleep(self.timing.warmup).await;
        let before = self.snapshot(tally)?;
        loop {
            tokio::time::sleep(self.timing.duration).await;
            let usage = self.snapshot(tally)?.since(&before, tally);
            let is_over = usage.error_count() > 0 || usage.seconds > LAST_ANSWER.as_secs_f64();
            if counted(&usage) > 0 || is_over {
                return Ok(usage);
            }
        }
    }
}

impl Snapshot {
    /// What went on since an earlier moment.
    #[must_use]
    pub fn since(&self, earlier: &Self, tally: &Tally) -> Usage {
        let elapsed = self.at - earlier.at;
        let counts = self.counts.since(earlier.counts);
        let mocks = self.mocks.since(earlier.mocks);
        let router = self.router.as_ref().zip(earlier.router.as_ref());
        let percent = |time: Duration| 100.0 * time.as_secs_f64() / elapsed.as_secs_f64();
        Usage {
            seconds: elapsed.as_secs_f64(),
            requests: counts.requests,
            chunks: counts.chunks,
            router_cpu_s: router.map(|(now, then)| now.since(then).as_secs_f64()),
            bench_busy_percent: percent(
                self.bench.since(&earlier.bench).saturating_sub(self.idle - earlier.idle),
            ),
            router_waited_percent: router.map(|(now, then)| percent(now.waited_since(then))),
            bench_waited_percent: percent(self.bench.waited_since(&earlier.bench)),
            mock_requests: mocks.requests,
            hit_percent: mocks.hit_percent(),
            untagged: mocks.untagged,
            errors: tally.errors(),
        }
    }
}

impl Usage {
    /// Router CPU for each of `count` things, in microseconds.
    pub fn cpu_us_each(&self, count: u64) -> Option<f64> {
        self.router_cpu_s.filter(|_| count > 0).map(|seconds| seconds * 1e6 / count as f64)
    }

    /// Failed requests.
    pub fn error_count(&self) -> u64 {
        self.errors.values().sum()
    }
}
