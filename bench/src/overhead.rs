//! What a router costs, measured alike for every router: `bench overhead`.
//!
//! Mock workers first, then the router in front of them, then the parts of the measurement one after the other, then a
//! row of a table. Generator and mocks share one thread on one core, so that the router has the other to itself. The
//! path: [`args`] → [`mocks`] → [`router`] → [`rig`] → [`memory`], [`rates`], [`beside`], [`latency`], [`streams`] → [`report`].

pub mod args;
pub mod beside;
pub mod connection;
pub mod latency;
pub mod load;
pub mod machine;
pub mod memory;
pub mod mocks;
pub mod process;
pub mod rates;
pub mod report;
pub mod rig;
pub mod router;
pub mod spin;
pub mod streams;
pub mod tally;
pub mod workload;

use std::io::Write;
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};
use tokio::net::lookup_host;
use tokio::signal::unix::{SignalKind, signal};

use crate::client::target::Target;
use args::{LoadArgs, OverheadArgs, Part};
use beside::{Beside, Neighbour};
use machine::{Machine, commit, pin_to, raise_open_files};
use memory::megabytes;
use mocks::{Mocks, Pace};
use process::ProcessTree;
use report::{Figures, Report};
use rig::{Rig, Timing};
use router::{Cores, Launched, read_pid_file, wait_until_ready};
use spin::{Idle, Waiting};

/// Tasks that run between two looks at the sockets: few, so that a message is not left lying.
const EVENT_INTERVAL: u32 = 16;
/// Load before each turn of a router among several.
const TURN_WARMUP: Duration = Duration::from_millis(200);
/// Descriptors for everything but idle streams.
const OTHER_FILES: u64 = 500;

/// Runs `bench overhead`: serves the mocks, waits for the router, measures, prints the row, appends the JSON line.
///
/// # Errors
/// Flags that make no sense, ports or a core that cannot be had, a router that does not answer or ends. Failed requests
/// are no error but part of the result.
pub fn overhead(args: &OverheadArgs) -> anyhow::Result<Report> {
    args.validate()?;
    pin_to(args.router.core).context("--core")?;
    let open_files = raise_open_files();
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().event_interval(EVENT_INTERVAL).build()?;
    let report = runtime.block_on(async {
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        tokio::select! {
            measured = run(args, open_files) => measured,
            // Returning drops the router that was started here, which ends it.
            _ = interrupt.recv() => bail!("interrupted"),
            _ = terminate.recv() => bail!("terminated"),
        }
    })?;
    print!("\n{}\n{}", report.table(), report.remarks());
    if let Some(path) = &args.output_file {
        append(path, &report)?;
    }
    Ok(report)
}

async fn run(args: &OverheadArgs, open_files: u64) -> anyhow::Result<Report> {
    let mocks = Mocks::listen(&args.router.mock_ports).await?;
    println!("workers: {}", mocks.urls().join(","));
    std::io::stdout().flush()?;
    if args.router.mocks_only {
        return std::future::pending().await;
    }
    let mut report = blank_report(args);
    let wait = Duration::from_secs_f64(args.router.wait);
    let cores = Cores { bench: args.router.core, router: args.router.router_core };
    let start = |command| Launched::start(command, &mocks.urls(), cores, args.router.router_log.as_deref());
    let mut launched = args.router.command.as_deref().map(start).transpose()?;
    let mut rig = build_rig(args, mocks).await?;
    if args.router.base_url.is_some() {
        wait_until_ready(&rig, launched.as_mut(), wait).await?;
    }
    let pid = match (&launched, args.router.pid, &args.router.pid_file) {
        (Some(launched), ..) => Some(launched.pid()),
        (None, None, Some(file)) => Some(read_pid_file(file, wait).await?),
        (None, pid, _) => pid,
    };
    rig.process = pid.map(ProcessTree::of);
    if args.router.waiting == Waiting::Spin {
        rig.idle = Some(Idle::spin());
    }
    let (load, limited) = within_open_files(&args.load, open_files);
    report.notes.extend(limited);
    report.figures = measure(&rig, &load).await?;
    if load.includes(Part::Beside) && !args.router.beside.is_empty() {
        report.figures.beside = measure_beside(args, &report.router, &rig).await?;
    }
    report.unknown_to_mocks = rig.mocks.other_requests().into_iter().collect();
    Ok(report)
}

/// All parts that were asked for, in their order.
///
/// # Errors
/// The router is gone.
pub async fn measure(rig: &Rig, load: &LoadArgs) -> anyhow::Result<Figures> {
    let mut figures = Figures { rss_idle_mb: rig.memory()?.map(megabytes), ..Figures::default() };
    if load.includes(Part::Rss) {
        figures.after_requests = Some(memory::after_requests(rig, load.rss_requests).await?);
    }
    if load.includes(Part::Rates) {
        for kilobytes in &load.sizes {
            figures.rates.push(rates::measure(rig, *kilobytes).await?);
        }
    }
    if load.includes(Part::Latency) {
        figures.latency = Some(latency::measure(rig, load.rate).await?);
    }
    if load.includes(Part::Paced) {
        let interval = Duration::from_millis(load.chunk_interval_ms.into());
        let pace = Pace { streams: load.streams, interval, pacing: load.pacing };
        figures.paced = Some(streams::paced(rig, pace).await?);
    }
    if load.includes(Part::Flood) {
        figures.flood = Some(streams::flood(rig, load.flood_chunks).await?);
    }
    let end = rig.memory()?;
    figures.rss_end_mb = end.map(megabytes);
    figures.rss_peak_mb = end.map(|memory| memory.peak_kb as f64 / 1024.0);
    if load.includes(Part::Idle) {
        figures.idle_streams = Some(memory::idle_streams(rig, load.idle_streams).await?);
    }
    Ok(figures)
}

/// The router under test and those beside it, in turn, with bodies of each size.
async fn measure_beside(args: &OverheadArgs, name: &str, rig: &Rig) -> anyhow::Result<Vec<Beside>> {
    let timing = Timing { warmup: TURN_WARMUP, duration: Duration::from_secs_f64(args.load.turn) };
    let mut rigs = vec![(name.to_owned(), Rig { timing, idle: None, ..rig.clone() })];
    for Neighbour { name, pid, base_url } in &args.router.beside {
        let front = find(base_url).await.with_context(|| format!("--beside {name}"))?;
        let (addresses, authority, path_prefix) = front;
        let process = Some(ProcessTree::of(*pid));
        let rig = Rig { addresses, authority, path_prefix, process, timing, idle: None, ..rig.clone() };
        wait_until_ready(&rig, None, Duration::from_secs_f64(args.router.wait)).await?;
        rigs.push((name.clone(), rig));
    }
    let mut sizes = Vec::new();
    for kilobytes in &args.load.sizes {
        sizes.push(beside::measure(&rigs, *kilobytes, args.load.turns).await?);
    }
    Ok(sizes)
}

/// Where a base URL leads: address, `host` header, and what stands before `/v1/…`.
async fn find(url: &str) -> anyhow::Result<(Vec<SocketAddr>, String, String)> {
    let target: Target = url.parse()?;
    let mut found = lookup_host((target.host.as_str(), target.port)).await?;
    let address = found.next().with_context(|| format!("{url}: the host has no address"))?;
    let path_prefix = target.uri("/").path().trim_end_matches('/').to_owned();
    Ok((vec![address], target.authority, path_prefix))
}

async fn build_rig(args: &OverheadArgs, mocks: Mocks) -> anyhow::Result<Rig> {
    let (addresses, authority, path_prefix) = match &args.router.base_url {
        None => (mocks.addresses().to_vec(), mocks.addresses()[0].to_string(), String::new()),
        Some(url) => find(url).await.context("--base-url")?,
    };
    let timing = Timing {
        warmup: Duration::from_secs_f64(args.load.warmup),
        duration: Duration::from_secs_f64(args.load.duration),
    };
    let connections = args.load.connections;
    Ok(Rig { mocks, addresses, authority, path_prefix, process: None, idle: None, connections, timing })
}

/// Fewer idle streams where there are not descriptors enough for them, and a note that says so. A stream takes two: the
/// client's and the mock's.
fn within_open_files(load: &LoadArgs, open_files: u64) -> (LoadArgs, Option<String>) {
    let most = open_files.saturating_sub(OTHER_FILES) / 2;
    let wanted = load.idle_streams;
    let idle_streams = usize::try_from(most).map_or(wanted, |most| most.min(wanted));
    let note = (idle_streams < wanted && load.includes(Part::Idle)).then(|| {
        format!("{idle_streams} idle streams instead of {wanted}: only {open_files} files may be open")
    });
    (LoadArgs { idle_streams, ..load.clone() }, note)
}

fn blank_report(args: &OverheadArgs) -> Report {
    let direct = || args.router.base_url.clone().unwrap_or_else(|| "none (direct)".to_owned());
    Report {
        router: args.router.name.clone().unwrap_or_else(direct),
        router_version: args.router.router_version.clone(),
        tag: args.tag.clone(),
        unix_time: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs(),
        commit: commit(),
        bench_version: env!("CARGO_PKG_VERSION"),
        command_line: std::env::args().collect(),
        machine: Machine::this(),
        figures: Figures::default(),
        unknown_to_mocks: Vec::new(),
        notes: Vec::new(),
    }
}

fn append(path: &Path, report: &Report) -> anyhow::Result<()> {
    let context = || format!("--output-file {}", path.display());
    let mut file = std::fs::OpenOptions::new().create(true).append(true).open(path).with_context(context)?;
    let mut line = serde_json::to_string(report)?;
    line.push('\n');
    file.write_all(line.as_bytes()).with_context(context)
}
