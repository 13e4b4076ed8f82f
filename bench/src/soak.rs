//! Whether a router lasts: `bench soak` sends at a fixed rate while one worker after another is killed and comes back.
//!
//! Each mock worker is a process of its own (`bench overhead --mocks-only`) and dies by SIGKILL. Every request is counted: answered,
//! or failed with what the client saw. Memory and open files of the router are read as time goes by. Built from the parts of
//! [`crate::overhead`]; next on the path: [`workers`].

pub mod workers;

use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Args;
use rand::SeedableRng;
use rand::rngs::Xoshiro256PlusPlus;
use serde::Serialize;
use tokio::task::JoinSet;

use crate::overhead::connection::{Connection, ExchangeError};
use crate::overhead::load::LAST_ANSWER;
use crate::overhead::machine::{Core, Machine, commit, pin_to, raise_open_files};
use crate::overhead::memory::megabytes;
use crate::overhead::process::ProcessTree;
use crate::overhead::router::{Cores, Launched};
use crate::overhead::tally::Tally;
use crate::overhead::workload::{Delivery, Draft, Workload};
use crate::ticker::Ticker;
use workers::MockProcesses;

/// Requests are due this often; several at once when the rate is higher.
const TICK: Duration = Duration::from_millis(1);
/// A connection that has waited longer is not used again: the router may be closing it at this moment, as it says it does.
const LONGEST_IDLE: Duration = Duration::from_secs(20);

/// Everything `bench soak` takes.
#[derive(Debug, Clone, Args)]
pub struct SoakArgs {
    /// Where the router will serve, ADDRESS:PORT
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:19100")]
    pub address: SocketAddr,
    /// Command that starts the router; {workers} becomes the mocks' URLs with commas between them
    #[arg(long, value_name = "COMMAND")]
    pub command: String,
    /// File for what the router prints; without it that is thrown away
    #[arg(long, value_name = "FILE")]
    pub router_log: Option<PathBuf>,
    /// Core for the router, or any
    #[arg(long, value_name = "CORE", default_value = "0")]
    pub router_core: Core,
    /// Core for the generator and the mocks together, or any
    #[arg(long, value_name = "CORE", default_value = "1")]
    pub core: Core,
    /// Loopback ports of the mock workers
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "19001,19002,19003,19004")]
    pub mock_ports: Vec<u16>,
    /// Requests a second
    #[arg(long, value_name = "N", default_value_t = 2_000)]
    pub rate: u32,
    /// Seconds in all
    #[arg(long, value_name = "SECONDS", default_value_t = 1_200)]
    pub duration: u64,
    /// Seconds from one kill to the next
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    pub kill_every: u64,
    /// Seconds that a killed worker stays away
    #[arg(long, value_name = "SECONDS", default_value_t = 3)]
    pub down: u64,
    /// Seconds from one reading of memory and open files to the next
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub read_every: u64,
    /// Append one JSON line with every figure to this file
    #[arg(long, value_name = "FILE")]
    pub output_file: Option<PathBuf>,
}

/// The router at one moment.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Reading {
    /// Seconds since the first request.
    pub seconds: u64,
    /// Resident memory.
    pub rss_mb: f64,
    /// Open files, sockets among them.
    pub open_files: usize,
    /// Requests answered so far.
    pub answered: u64,
    /// Requests failed so far.
    pub failed: u64,
}

/// What came of it.
#[derive(Debug, Clone, Serialize)]
pub struct SoakReport {
    /// As given.
    pub command_line: Vec<String>,
    /// Of the tree this was built from.
    pub commit: Option<String>,
    /// Where it ran.
    pub machine: Machine,
    /// Workers killed.
    pub kills: u64,
    /// Requests answered whole.
    pub answered: u64,
    /// Failures by what the client saw.
    pub failures: std::collections::BTreeMap<String, u64>,
    /// The router as time went by.
    pub readings: Vec<Reading>,
}

/// Runs `bench soak` and prints what came of it.
///
/// # Errors
/// Something cannot be started, the router never answers, or it ends on its own. Failed requests are part of the result.
pub fn soak(args: &SoakArgs) -> anyhow::Result<SoakReport> {
    if args.rate == 0 || args.kill_every <= args.down {
        bail!("--rate must be at least 1, and --kill-every more than --down");
    }
    pin_to(args.core).context("--core")?;
    raise_open_files();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let report = runtime.block_on(run(args))?;
    print!("{}", report.text());
    if let Some(path) = &args.output_file {
        let line = serde_json::to_string(&report)? + "\n";
        let mut all = fs::read_to_string(path).unwrap_or_default();
        all.push_str(&line);
        fs::write(path, all).with_context(|| format!("--output-file {}", path.display()))?;
    }
    Ok(report)
}

async fn run(args: &SoakArgs) -> anyhow::Result<SoakReport> {
    let mut mocks = MockProcesses::start(&args.mock_ports, args.core)?;
    let cores = Cores { bench: args.core, router: args.router_core };
    let launched = Launched::start(&args.command, &mocks.urls(), cores, args.router_log.as_deref())?;
    let router = ProcessTree::of(launched.pid());
    let shared = Arc::new(Shared {
        address: args.address,
        workload: Workload::new(&args.address.to_string(), "/v1/chat/completions", 1, Delivery::Whole)?,
        tally: Tally::default(),
        idle: Mutex::default(),
    });
    shared.wait_until_ready().await?;
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(0);
    let (mut tasks, mut sent, mut readings) = (JoinSet::new(), 0, Vec::new());
    let mut ticker = Ticker::start(TICK, TICK)?;
    let start = Instant::now();
    let whole = Duration::from_secs(args.duration);
    loop {
        ticker.tick().await?;
        let now = start.elapsed().min(whole); // what is due, and no more, also when the machine stood still
        let due = (now.as_secs_f64() * f64::from(args.rate)) as u64;
        for _ in sent..due {
            tasks.spawn(Arc::clone(&shared).ask(shared.workload.draft(&mut rng)));
        }
        sent = due.max(sent);
        while tasks.try_join_next().is_some() {}
        let all_killed =
            mocks.keep(now, Duration::from_secs(args.kill_every), Duration::from_secs(args.down))?;
        if now.as_secs() >= readings.len() as u64 * args.read_every {
            readings.push(shared.read(&router, launched.pid(), start)?);
        }
        if now == whole && all_killed {
            break;
        }
    }
    let all = async { while tasks.join_next().await.is_some() {} };
    if tokio::time::timeout(LAST_ANSWER, all).await.is_err() {
        bail!("{} requests were never answered", tasks.len());
    }
    readings.push(shared.read(&router, launched.pid(), start)?);
    Ok(SoakReport {
        command_line: std::env::args().collect(),
        commit: commit(),
        machine: Machine::this(),
        kills: mocks.kills(),
        answered: shared.tally.counts().requests,
        failures: shared.tally.errors(),
        readings,
    })
}

/// What the requests in flight share.
struct Shared {
    address: SocketAddr,
    workload: Workload,
    tally: Tally,
    /// With the time since which each waits; the one used last is taken first.
    idle: Mutex<Vec<(Connection, Instant)>>,
}

impl Shared {
    async fn ask(self: Arc<Self>, draft: Draft) {
        match self.exchange(&draft).await {
            Ok(()) => {
                self.tally.add_request();
            }
            Err(error) => self.tally.add_error(&error),
        }
    }

    async fn exchange(&self, draft: &Draft) -> Result<(), ExchangeError> {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut connection = match idle {
            Some((connection, since)) if since.elapsed() < LONGEST_IDLE => connection,
            _ => Connection::open(self.address).await?,
        };
        connection.exchange(self.workload.pieces(draft)).await?;
        if !connection.closes() {
            self.idle.lock().unwrap_or_else(PoisonError::into_inner).push((connection, Instant::now()));
        }
        Ok(())
    }

    async fn wait_until_ready(&self) -> anyhow::Result<()> {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(1);
        for _ in 0..600 {
            if self.exchange(&self.workload.draft(&mut rng)).await.is_ok() {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        bail!("nobody answers at {}", self.address)
    }

    fn read(&self, router: &ProcessTree, pid: u32, start: Instant) -> anyhow::Result<Reading> {
        let memory = router.memory().context("the router has ended")?;
        Ok(Reading {
            seconds: start.elapsed().as_secs(),
            rss_mb: megabytes(memory),
            open_files: fs::read_dir(format!("/proc/{pid}/fd"))?.count(),
            answered: self.tally.counts().requests,
            failed: self.tally.errors().values().sum(),
        })
    }
}

impl SoakReport {
    /// For people.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text =
            String::from("| s | RSS MB | open files | answered | failed |\n|---|---|---|---|---|\n");
        for Reading { seconds, rss_mb, open_files, answered, failed } in &self.readings {
            text += &format!("| {seconds} | {rss_mb:.1} | {open_files} | {answered} | {failed} |\n");
        }
        text += &format!("{} answered, {} workers killed", self.answered, self.kills);
        for (what, count) in &self.failures {
            text += &format!("; {count} × {what}");
        }
        text + "\n"
    }
}
