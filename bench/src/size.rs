//! `bench size`: how many workers a policy needs so that enough requests meet their objective, or, for a number of workers, how many requests a
//! second they carry.
//!
//! Each step is a simulation of [`crate::simulate`]; [`search`] and [`crate::knee::search`] name the next one.

pub mod search;

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::knee::search::{Bounds, Search, Verdict};
use crate::simulate::args::SimulateArgs;
use crate::simulate::contender::{Contender, Family, named};
use crate::simulate::grid::{Cell, Ticks, in_turn};
use crate::simulate::outcome::{Figures, Objective};
use crate::simulate::plan;
use search::Fewest;

/// How far from a trace's own rate the highest one is looked for.
const FARTHEST: f64 = 1_000.0;
/// The search for a rate ends when the next one that misses is at most this factor higher.
const PRECISION: f64 = 1.02;

/// Everything `bench size` takes.
#[derive(Debug, Clone, Args)]
pub struct SizeArgs {
    /// Share of all requests that has to meet --goodput-ttft and --goodput-tpot
    #[arg(long, value_name = "SHARE", default_value_t = 0.9, help_heading = "Size")]
    pub good_share: f64,
    /// Requests a second that workers are wanted for [default: as many as the trace has]
    #[arg(long, value_name = "RPS", conflicts_with = "workers", help_heading = "Size")]
    pub rate: Option<f64>,
    /// More workers than these are not tried
    #[arg(long, value_name = "N", default_value_t = 256, conflicts_with = "workers", help_heading = "Size")]
    pub max_workers: usize,
    /// What is simulated. With --workers it is not their number that is looked for, but the highest rate that they carry; --json gets an object a line
    /// for each policy
    #[command(flatten)]
    pub simulate: SimulateArgs,
}

/// What was found of one policy in one cell.
#[derive(Debug, Clone, Serialize)]
pub struct Found {
    /// The policy.
    pub policy: String,
    /// What it is in the comparison.
    pub family: Family,
    /// What arrives, and where.
    pub trace: String,
    /// The seed of the workload.
    pub seed: u64,
    /// Blocks of each worker's cache.
    pub blocks: usize,
    /// How many workers: the fewest that are enough, the most there may be if none are, or those that were given.
    pub workers: usize,
    /// Requests that came a second: as many as were asked for, or the most that these workers carry. Of sessions whose turns wait for each other's
    /// ends fewer come than the pace of their beginnings says.
    pub arrivals_per_s: f64,
    /// They carry more than could be tried: all that there is at once.
    pub is_farthest: bool,
    /// Whether enough requests meet the objective there.
    pub met: bool,
    /// How many do.
    pub good_share: f64,
    /// How it was there.
    #[serde(flatten)]
    pub figures: Figures,
}

/// What a search ended with: a fleet, a rate, and how it was there.
struct Answer {
    workers: usize,
    arrivals_per_s: f64,
    is_farthest: bool,
    good_share: f64,
    figures: Figures,
}

/// Runs `bench size`: prints a table for each cell, writes the JSON.
///
/// # Errors
/// Flags that make no sense, traces that cannot be read, a file that cannot be written.
pub fn size(args: &SizeArgs) -> anyhow::Result<Vec<Found>> {
    args.validate()?;
    let contenders = named(&args.simulate.policies)?;
    let scenes = plan::scenes(&args.simulate)?;
    let cells = plan::cells(&args.simulate, &scenes)?;
    let mut json = args.simulate.json.as_deref().map(Json::create).transpose()?;
    let bar = ProgressBar::new_spinner();
    bar.set_style(ProgressStyle::with_template("{spinner} {human_pos} requests simulated, {elapsed}")?);
    let mut all = Vec::new();
    for cell in &cells {
        bar.suspend(|| println!("{}", args.heading(cell)));
        let (mut failure, first) = (None, all.len());
        let search = |number: usize| args.search(cell, &contenders[number], &|count| bar.inc(count));
        in_turn(contenders.len(), args.simulate.threads, &search, &mut |found: Found| {
            bar.suspend(|| println!("{}", found.line(all.get(first))));
            if let Some(Err(error)) = json.as_mut().map(|json| json.write(&found)) {
                failure.get_or_insert(error);
            }
            all.push(found);
        });
        failure.map_or(Ok(()), Err)?;
    }
    bar.finish_and_clear();
    Ok(all)
}

impl SizeArgs {
    fn validate(&self) -> anyhow::Result<()> {
        let simulate = &self.simulate;
        simulate.validate()?;
        let mut problems = Vec::new();
        for (flag, given) in [
            ("--grid", simulate.grid),
            ("--load", !simulate.load.is_empty()),
            ("--recorded", simulate.recorded.is_some()),
            ("--preset", simulate.preset.is_some()),
            ("--judge", !simulate.judge.is_empty()),
            ("--html", simulate.html.is_some()),
            ("--svg", simulate.svg.is_some()),
            ("--resume", simulate.resume),
            ("--demand", simulate.demand),
        ] {
            if given {
                problems.push(format!("{flag} is for bench simulate; leave it out"));
            }
        }
        if simulate.engine == "plain" {
            problems.push("--engine plain has no speed of its own; name one that was recorded".to_owned());
        }
        if simulate.workers.is_empty() && simulate.prefill_workers.iter().any(|count| *count > 0) {
            problems.push("--prefill-workers need to know of how many; give --workers".to_owned());
        }
        if !(self.good_share > 0.0 && self.good_share <= 1.0) {
            problems.push("--good-share must be above 0 and at most 1, such as 0.9".to_owned());
        }
        if self.rate.is_some_and(|rate| !(rate > 0.0 && rate.is_finite())) {
            problems.push("--rate must be a number above 0".to_owned());
        }
        let least = simulate.fleet.iter().map(|fleet| fleet.least_workers()).max().unwrap_or(1);
        if self.max_workers < least {
            problems.push(format!("--max-workers must be at least {least}"));
        }
        if problems.is_empty() { Ok(()) } else { bail!(problems.join("\n       ")) }
    }

    fn objective(&self) -> Objective {
        Objective { ttft_ms: self.simulate.goodput_ttft, tpot_ms: self.simulate.goodput_tpot }
    }

    /// What is looked for in `cell`.
    fn heading(&self, cell: &Cell<'_>) -> String {
        let Objective { ttft_ms, tpot_ms } = self.objective();
        let (name, blocks, percent) = (&cell.name, cell.blocks, self.good_share * 100.0);
        let given = if self.simulate.workers.is_empty() {
            format!("{:.3} requests/s", self.wanted_rate(cell))
        } else {
            format!("{} workers", cell.workers)
        };
        format!(
            "\n{name}: {given}, {blocks} blocks a worker, seed {}, simulated; {percent} % of requests within a TTFT of {ttft_ms} ms and a TPOT of {tpot_ms} ms\n\
             {:<25} {:>8} {:>10} {:>8} {:>7} {:>9} {:>9} {:>9} {:>8} {:>9} {:>6}",
            cell.seed,
            "policy",
            "workers",
            "requests/s",
            "of first",
            "good %",
            "TTFT ms",
            "P90",
            "P99",
            "TPOT ms",
            "E2E ms",
            "hit %",
        )
    }

    fn wanted_rate(&self, cell: &Cell<'_>) -> f64 {
        self.rate.unwrap_or_else(|| cell.workload.rate())
    }

    /// What `contender` needs or carries in `cell`.
    fn search(&self, cell: &Cell<'_>, contender: &Contender, told: &(dyn Fn(u64) + Sync)) -> Found {
        let simulate = |cell: &Cell<'_>, rate_rps: f64| {
            let mut ticks = Ticks::new(told);
            let outcome = cell.outcome(contender, cell.workload.rate() / rate_rps, &mut || ticks.tick());
            let good_share = outcome.good_share(cell.workload, self.objective());
            let figures = outcome.figures(cell.workload, self.objective());
            let arrivals_per_s = outcome.arrivals_per_s();
            Answer { workers: cell.workers, arrivals_per_s, is_farthest: false, good_share, figures }
        };
        let Answer { workers, arrivals_per_s, is_farthest, good_share, figures } =
            if self.simulate.workers.is_empty() {
                let rate_rps = self.wanted_rate(cell);
                self.fewest_workers(cell.fleet.least_workers(), &|workers| {
                    simulate(&cell.with_workers(workers), rate_rps)
                })
            } else {
                self.highest_rate(cell.workload.rate(), &|rate_rps| simulate(cell, rate_rps))
            };
        Found {
            policy: contender.name.to_owned(),
            family: contender.family,
            trace: cell.name.clone(),
            seed: cell.seed,
            blocks: cell.blocks,
            workers,
            arrivals_per_s,
            is_farthest,
            met: self.is_met(good_share),
            good_share,
            figures,
        }
    }

    fn is_met(&self, good_share: f64) -> bool {
        good_share >= self.good_share
    }

    /// With the fewest workers that are enough; with the most there may be if none are.
    fn fewest_workers(&self, least: usize, simulate: &dyn Fn(usize) -> Answer) -> Answer {
        let mut search = Fewest::new(least, self.max_workers);
        let mut best: Option<Answer> = None;
        while let Some(workers) = search.next() {
            let answer = simulate(workers);
            let is_enough = self.is_met(answer.good_share);
            search.hear(workers, is_enough);
            if is_enough || best.as_ref().is_none_or(|best| !self.is_met(best.good_share)) {
                best = Some(answer);
            }
        }
        best.expect("one worker is tried at least")
    }

    /// At the highest rate that is carried; at the lowest that was tried if none is.
    fn highest_rate(&self, own_rate: f64, simulate: &dyn Fn(f64) -> Answer) -> Answer {
        let (min_rate, max_rate) = (own_rate / FARTHEST, own_rate * FARTHEST);
        let bounds = Bounds { start_rate: own_rate, min_rate, max_rate, precision: PRECISION };
        let mut search = Search::new(bounds);
        let mut best: Option<Answer> = None;
        while let Some(rate_rps) = search.next() {
            let mut answer = simulate(rate_rps);
            let is_carried = self.is_met(answer.good_share);
            answer.is_farthest = is_carried && rate_rps >= max_rate;
            search.hear(if is_carried { Verdict::Met } else { Verdict::Missed });
            if is_carried || best.as_ref().is_none_or(|best| !self.is_met(best.good_share)) {
                best = Some(answer);
            }
        }
        best.expect("the trace's own rate is tried at least")
    }
}

impl Found {
    /// A row of the table; `first` is the one above all, which others are compared with.
    fn line(&self, first: Option<&Self>) -> String {
        let Self { policy, workers, arrivals_per_s, is_farthest, met, good_share, .. } = self;
        let Figures { mean_ttft_ms, p90_ttft_ms, p99_ttft_ms, mean_tpot_ms, mean_e2e_ms, hit_rate, .. } =
            self.figures;
        let first = first.unwrap_or(self);
        let of_first = match (first.met && *met, first.workers == *workers) {
            (false, _) => "–".to_owned(),
            (true, false) => format!("{:.2}", *workers as f64 / first.workers as f64),
            (true, true) => format!("{:.2}", arrivals_per_s / first.arrivals_per_s),
        };
        let (good_percent, hit_percent) = (good_share * 100.0, hit_rate * 100.0);
        let remark = match (met, is_farthest) {
            (false, _) => "  missed",
            (true, true) => "  all at once",
            (true, false) => "",
        };
        format!(
            "{policy:<25} {workers:>8} {arrivals_per_s:>10.3} {of_first:>8} {good_percent:>7.1} {mean_ttft_ms:>9.0} {p90_ttft_ms:>9.0} {p99_ttft_ms:>9.0} \
             {mean_tpot_ms:>8.1} {mean_e2e_ms:>9.0} {hit_percent:>6.1}{remark}"
        )
    }
}

/// The file for `--json`.
struct Json {
    file: File,
    path: PathBuf,
}

impl Json {
    fn create(path: &Path) -> anyhow::Result<Self> {
        let file = File::create(path).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Self { file, path: path.to_owned() })
    }

    /// At once, so that a run that is ended loses nothing.
    fn write(&mut self, found: &Found) -> anyhow::Result<()> {
        let line = serde_json::to_string(found)? + "\n";
        self.file.write_all(line.as_bytes()).with_context(|| format!("cannot write {}", self.path.display()))
    }
}
