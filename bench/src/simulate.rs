//! What a policy would do: `bench simulate` runs the router's own decisions over simulated workers, on a clock of its own.
//!
//! The router's `Policy`, ledger, prefix tree and `Decider` decide; the worker's `Scheduler` and block pool serve, with step times of the
//! timing model. The path: [`args`] → [`workload`] → [`grid`] → [`run`] (over [`engine`], for each [`contender`]) → [`outcome`] →
//! [`report`] and [`summary`]. No HTTP, no threads but one a simulation, no clock.

pub mod args;
pub mod contender;
pub mod engine;
pub mod grid;
pub mod outcome;
pub mod report;
pub mod run;
pub mod summary;
pub mod workload;

use std::fs::File;
use std::io::{BufWriter, Write};
use std::sync::OnceLock;

use anyhow::Context;
use indicatif::{ProgressBar, ProgressStyle};

use args::SimulateArgs;
use contender::Contender;
use grid::{Cell, EngineKind, Job, Row, run_all};
use outcome::Objective;
use summary::Summary;
use workload::Workload;

/// Runs `bench simulate`: prints the table, writes the JSON. Returns how many simulations there were.
///
/// # Errors
/// Flags that make no sense, traces that cannot be read, files that cannot be written.
pub fn simulate(args: &SimulateArgs) -> anyhow::Result<usize> {
    args.validate()?;
    let contenders = contender::named(&args.policies)?;
    let workloads = workloads(args)?;
    let cells = cells(args, &workloads)?;
    let jobs = jobs(&cells, &args.load, &contenders);
    let mut writer = Writer::new(args, requests(&cells, &jobs))?;
    let objective = Objective { ttft_ms: args.goodput_ttft, tpot_ms: args.goodput_tpot };
    let bar = writer.bar.clone();
    let mut failure = None;
    run_all(&jobs, args.threads, objective, &|count| bar.inc(count), &mut |row| {
        if let Err(error) = writer.write(&row) {
            failure.get_or_insert(error);
        }
    });
    writer.finish()?;
    failure.map_or(Ok(jobs.len()), Err)
}

/// Requests of a generated workload, unless `--requests` says otherwise.
const GENERATED_REQUESTS: usize = 6_000;

/// Each workload with its seed; what is generated, once for each.
fn workloads(args: &SimulateArgs) -> anyhow::Result<Vec<(u64, Workload)>> {
    let mut workloads = Vec::new();
    for path in &args.trace {
        workloads.push((args.seed, workload::trace::read(path)?));
    }
    for seed in args.seed..args.seed.saturating_add(args.seeds) {
        for path in &args.azure {
            workloads.push((seed, workload::azure::read(path, seed)?));
        }
        let requests = args.requests.unwrap_or(GENERATED_REQUESTS);
        workloads.extend(args.workload.iter().map(|kind| (seed, kind.generate(requests, seed))));
    }
    for (_, workload) in &mut workloads {
        workload.truncate(args.requests.unwrap_or(usize::MAX));
    }
    Ok(workloads)
}

fn cells<'a>(args: &SimulateArgs, workloads: &'a [(u64, Workload)]) -> anyhow::Result<Vec<Cell<'a>>> {
    let engine = match args.engine.as_str() {
        "plain" => EngineKind::Plain,
        name => {
            let preset = worker_core::timing::preset(name).context("--engine, besides plain")?;
            EngineKind::Preset(preset, args.prefill.map(Into::into))
        }
    };
    let mut cells = Vec::new();
    for (seed, workload) in workloads {
        for fleet in &args.fleet {
            for workers in &args.workers {
                for blocks in &args.blocks {
                    let (seed, fleet, workers, blocks) = (*seed, *fleet, *workers, *blocks);
                    let name = format!("{}{}", workload.name, fleet.suffix());
                    let replicas = args.replicas;
                    let saturated = OnceLock::new();
                    let cell =
                        Cell { workload, name, seed, fleet, workers, blocks, replicas, engine, saturated };
                    cell.check()?;
                    cells.push(cell);
                }
            }
        }
    }
    Ok(cells)
}

fn jobs<'a>(cells: &'a [Cell<'a>], loads: &[f64], contenders: &'a [Contender]) -> Vec<Job<'a>> {
    let mut jobs = Vec::new();
    for cell in cells {
        for load in loads {
            jobs.extend(contenders.iter().map(|contender| Job { cell, load: *load, contender }));
        }
    }
    jobs
}

/// Requests of all simulations, those for R* included.
fn requests(cells: &[Cell<'_>], jobs: &[Job<'_>]) -> u64 {
    let saturating = cells.iter().filter(|cell| matches!(cell.engine, EngineKind::Preset(..)));
    let all = saturating.chain(jobs.iter().map(|job| job.cell));
    all.map(|cell| cell.workload.requests.len() as u64).sum()
}

/// Where rows go.
struct Writer {
    bar: ProgressBar,
    json: Option<BufWriter<File>>,
    heading: String,
    summary: Summary,
}

impl Writer {
    fn new(args: &SimulateArgs, requests: u64) -> anyhow::Result<Self> {
        let open = |path: &std::path::PathBuf| {
            File::create(path).with_context(|| format!("cannot write {}", path.display()))
        };
        let json = args.json.as_ref().map(open).transpose()?.map(BufWriter::new);
        let bar = ProgressBar::new(requests);
        let style = ProgressStyle::with_template("{bar:30} {human_pos} of {human_len} requests, {eta} left");
        bar.set_style(style.context("the progress bar's template")?);
        Ok(Self { bar, json, heading: String::new(), summary: Summary::default() })
    }

    fn write(&mut self, row: &Row<'_>) -> anyhow::Result<()> {
        let heading = report::heading(&row.job);
        let is_new = heading != self.heading;
        self.bar.suspend(|| {
            if is_new {
                println!("{heading}");
            }
            println!("{}", report::line(row));
        });
        self.heading = heading;
        self.summary.add(row);
        if let Some(json) = &mut self.json {
            writeln!(json, "{}", report::json(row)?).context("cannot write the JSON file")?;
        }
        Ok(())
    }

    fn finish(mut self) -> anyhow::Result<()> {
        self.bar.finish_and_clear();
        for line in self.summary.lines() {
            println!("{line}");
        }
        self.json.as_mut().map_or(Ok(()), Write::flush).context("cannot write the JSON file")
    }
}
