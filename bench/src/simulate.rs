//! What a policy would do: `bench simulate` runs the router's own decisions over simulated workers, on a clock of its own.
//!
//! The router's `Policy`, ledger, prefix tree and `Decider` decide; the worker's `Scheduler` and block pool serve, with step times of the
//! timing model. The path: [`args`] → [`plan`] → [`workload`] → [`grid`] → [`run`] (over [`engine`], for each [`contender`]) →
//! [`outcome`] → [`report`] → [`comparison`], [`summary`] and [`goals`]. No HTTP, no threads but one a simulation, no clock.

pub mod args;
pub mod comparison;
pub mod contender;
pub mod engine;
pub mod floor;
pub mod goals;
pub mod grid;
pub mod html;
pub mod in_flight;
pub mod outcome;
pub mod plan;
pub mod recorded;
pub mod report;
pub mod run;
pub mod summary;
pub mod workload;

use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;

use anyhow::Context;
use indicatif::{ProgressBar, ProgressStyle};

use args::SimulateArgs;
use comparison::Comparison;
use contender::Family;
use grid::{Job, Row, run_all};
use html::Watched;
use outcome::Objective;
use report::{Key, Line};
use summary::HIGHEST_LOAD;

/// Runs `bench simulate`: prints the table, writes the JSON. Returns how many simulations there are figures of, those of an earlier run included.
///
/// # Errors
/// Flags that make no sense, traces that cannot be read, files that cannot be written.
pub fn simulate(args: &SimulateArgs) -> anyhow::Result<usize> {
    args.validate()?;
    if !args.judge.is_empty() {
        return judge(args);
    }
    if args.recorded.is_some() || args.preset.is_some() {
        return recorded::compare(args.recorded.as_deref(), args.preset.as_deref().unwrap_or(recorded::ALL));
    }
    let contenders = contender::named(&args.policies)?;
    let scenes = plan::scenes(args)?;
    let cells = plan::cells(args, &scenes)?;
    let mut writer = Writer::new(args)?;
    let jobs = plan::jobs(args, &cells, &contenders, &writer.done);
    let figures = writer.done.len() + jobs.len();
    writer.begin(plan::requests(&jobs))?;
    let objective = Objective { ttft_ms: args.goodput_ttft, tpot_ms: args.goodput_tpot };
    let bar = writer.bar.clone();
    let mut failure = None;
    run_all(&jobs, args.threads, objective, &|count| bar.inc(count), &mut |row| {
        if let Err(error) = writer.write(&row) {
            failure.get_or_insert(error);
        }
    });
    writer.finish(args)?;
    failure.map_or(Ok(figures), Err)
}

/// Reads files of figures, prints what they amount to. Returns how many figures there were.
fn judge(args: &SimulateArgs) -> anyhow::Result<usize> {
    let mut comparison = Comparison::default();
    let mut count = 0;
    for path in &args.judge {
        let lines = report::read(path)?;
        count += lines.len();
        lines.iter().for_each(|line| comparison.add(line));
    }
    summary::lines(&comparison).iter().chain(&goals::lines(&comparison)).for_each(|line| println!("{line}"));
    write_page(args, &comparison, &[])?;
    Ok(count)
}

fn write_page(args: &SimulateArgs, comparison: &Comparison, in_flight: &[Watched]) -> anyhow::Result<()> {
    let write = |path: &Path, text: String| {
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
    };
    if let Some(path) = &args.svg {
        write(path, html::overview(comparison))?;
    }
    args.html.as_deref().map_or(Ok(()), |path| write(path, html::page(comparison, in_flight)))
}

/// Where rows go.
struct Writer {
    bar: ProgressBar,
    json: Option<File>,
    /// Whether it has a key more.
    demand: bool,
    /// What the file had before.
    done: HashSet<Key>,
    heading: String,
    comparison: Comparison,
    /// Of each trace ours at the highest load up to R*.
    in_flight: Vec<Watched>,
}

impl Writer {
    fn new(args: &SimulateArgs) -> anyhow::Result<Self> {
        let mut writer = Self {
            bar: ProgressBar::hidden(),
            json: None,
            demand: args.demand,
            done: HashSet::new(),
            heading: String::new(),
            comparison: Comparison::default(),
            in_flight: Vec::new(),
        };
        let Some(path) = &args.json else { return Ok(writer) };
        let mut kept = String::new();
        if args.resume && path.exists() {
            for line in report::read(path)? {
                writer.done.insert(line.key());
                writer.comparison.add(&line);
                kept += &serde_json::to_string(&line)?;
                kept.push('\n');
            }
        }
        // What was cut off when an earlier run ended goes.
        let place = || format!("cannot write {}", path.display());
        std::fs::write(path, kept).with_context(place)?;
        writer.json = Some(OpenOptions::new().append(true).open(path).with_context(place)?);
        Ok(writer)
    }

    fn begin(&mut self, requests: u64) -> anyhow::Result<()> {
        self.bar = ProgressBar::new(requests);
        let style = ProgressStyle::with_template("{bar:30} {human_pos} of {human_len} requests, {eta} left");
        self.bar.set_style(style.context("the progress bar's template")?);
        Ok(())
    }

    fn write(&mut self, row: &Row<'_>) -> anyhow::Result<()> {
        let heading = report::heading(&row.job);
        let is_new = heading != self.heading;
        self.bar.suspend(|| {
            if is_new {
                println!("{heading}");
            }
            println!("{}", report::line(row));
            report::parts(row).for_each(|line| println!("{line}"));
        });
        self.heading = heading;
        let mut line = Line::of(row);
        if !self.demand {
            line.figures.demand = 0.0;
        }
        self.comparison.add(&line);
        self.watch(row);
        if let Some(json) = &mut self.json {
            // At once, so that a run that is ended loses nothing.
            let text = serde_json::to_string(&line)? + "\n";
            json.write_all(text.as_bytes()).context("cannot write the JSON file")?;
        }
        Ok(())
    }

    fn watch(&mut self, row: &Row<'_>) {
        let Job { cell, load, contender } = row.job;
        if contender.family != Family::Ours || load > HIGHEST_LOAD {
            return;
        }
        let watched = || Watched {
            trace: cell.name.clone(),
            load,
            title: format!("{} workers of {} blocks at load {load}", cell.workers, cell.blocks),
            in_flight: row.in_flight.clone(),
        };
        match self.in_flight.iter_mut().find(|watched| watched.trace == cell.name) {
            Some(best) if best.load < load => *best = watched(),
            Some(_) => {}
            None => self.in_flight.push(watched()),
        }
    }

    fn finish(self, args: &SimulateArgs) -> anyhow::Result<()> {
        self.bar.finish_and_clear();
        let goals = if args.grid { goals::lines(&self.comparison) } else { Vec::new() };
        for line in summary::lines(&self.comparison).iter().chain(&goals) {
            println!("{line}");
        }
        write_page(args, &self.comparison, &self.in_flight)
    }
}
