//! Rows as people read them, and as JSON lines.

use std::path::Path;

use anyhow::Context;
use serde::{Deserialize, Serialize};

use super::args::Background;
use super::contender::Family;
use super::grid::{Job, Row};
use super::in_flight::InFlightOverTime;
use super::outcome::{Figures, Part};

/// A row of `--json`: an object a line, with these keys and no others.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[expect(
    missing_docs,
    reason = "the keys are those of [`Figures`] and of a cell, in the words of the format"
)]
pub struct Line {
    pub policy: String,
    pub family: Family,
    pub workers: usize,
    pub blocks: usize,
    pub load: f64,
    pub trace: String,
    pub seed: u64,
    #[serde(flatten)]
    pub figures: Figures,
}

impl Line {
    /// What `row` says.
    #[must_use]
    pub fn of(row: &Row<'_>) -> Self {
        let Row { job: Job { cell, load, contender }, figures, .. } = row;
        Self {
            policy: contender.name.to_owned(),
            family: contender.family,
            workers: cell.workers,
            blocks: cell.blocks,
            load: *load,
            trace: cell.name.clone(),
            seed: cell.seed,
            figures: *figures,
        }
    }
}

/// What tells one simulation from another.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Key(String);

impl Line {
    /// Which simulation it is of.
    #[must_use]
    pub fn key(&self) -> Key {
        let Self { policy, workers, blocks, load, trace, seed, figures, .. } = self;
        Key(format!("{trace} {} {seed} {workers} {blocks} {load} {policy}", figures.requests))
    }
}

impl Key {
    /// Which simulation `job` is.
    #[must_use]
    pub fn of(job: &Job<'_>) -> Self {
        let requests = job.cell.workload.foreground().len();
        let figures = Figures { requests, ..Figures::default() };
        Line::of(&Row { job: *job, figures, parts: Vec::new(), in_flight: InFlightOverTime::default() }).key()
    }
}

/// The lines of a file that `--json` wrote; a last line that was cut off is left out.
///
/// # Errors
/// A file that cannot be read, a line that is none.
pub fn read(path: &Path) -> anyhow::Result<Vec<Line>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    let lines = (1..).zip(whole.lines()).filter(|(_, line)| !line.trim().is_empty());
    lines
        .map(|(number, line)| {
            let place = || format!("{} line {number}: not a line of bench simulate --json", path.display());
            serde_json::from_str(line).with_context(place)
        })
        .collect()
}

/// What stands above the rows of one cell and load.
#[must_use]
pub fn heading(job: &Job<'_>) -> String {
    let Job { cell, load, .. } = job;
    let saturated = cell.saturated.get().map_or(String::new(), |rps| format!(", R* = {rps:.3} requests/s"));
    let count = cell.routers.count;
    let replicas = if count > 1 { format!(", {count} routers") } else { String::new() };
    let floor = cell.floor_ms().map_or(String::new(), |ms| format!(", TTFT at least {ms:.0} ms"));
    let (name, workers, blocks, seed) = (&cell.name, cell.workers, cell.blocks, cell.seed);
    format!(
        "\n{name}: {workers} workers of {blocks} blocks, load {load}{saturated}{replicas}, seed {seed}{floor}\n\
         {:<25} {:>9} {:>9} {:>9} {:>9} {:>9} {:>8} {:>8} {:>9} {:>8} {:>6} {:>6} {:>8}{}",
        "policy",
        "TTFT ms",
        "own ms",
        "P50",
        "P90",
        "P99",
        "TPOT ms",
        "P99",
        "E2E ms",
        "good/s",
        "hit %",
        "imbal.",
        "retract.",
        match (cell.apart.prefill_workers > 0, cell.background) {
            (true, _) => "  split %",
            (false, Background::LeftOut) => "",
            (false, _) => " spare tok/s",
        }
    )
}

/// What a row's tenants and priorities had, a line each.
pub fn parts<'a>(row: &'a Row<'_>) -> impl Iterator<Item = String> + 'a {
    row.parts.iter().map(|Part { whose, requests, mean_ttft_ms, p99_ttft_ms, mean_e2e_ms }| {
        let name = whose.tenant.map_or("nobody's".to_owned(), |tenant| format!("tenant {tenant}'s"));
        let priority = whose.priority.0;
        format!(
            "    {name} of priority {priority}: {requests} requests, TTFT {mean_ttft_ms:.0} ms, P99 {p99_ttft_ms:.0}, E2E {mean_e2e_ms:.0}"
        )
    })
}

/// One row of the table.
#[must_use]
pub fn line(row: &Row<'_>) -> String {
    let Figures { mean_ttft_ms, mean_own_ms, p50_ttft_ms, p90_ttft_ms, p99_ttft_ms, mean_tpot_ms, .. } =
        row.figures;
    let Figures { p99_tpot_ms, mean_e2e_ms, goodput_rps, hit_rate, imbalance, retractions, split, .. } =
        row.figures;
    let (hit_percent, split_percent) = (hit_rate * 100.0, split * 100.0);
    let has_split = row.job.cell.apart.prefill_workers > 0;
    let split = match (has_split, row.job.cell.background) {
        (true, _) => format!(" {split_percent:>8.1}"),
        (false, Background::LeftOut) => String::new(),
        (false, _) => format!(" {:>11.0}", row.figures.spare_tokens_per_s),
    };
    format!(
        "{:<25} {mean_ttft_ms:>9.0} {mean_own_ms:>9.0} {p50_ttft_ms:>9.0} {p90_ttft_ms:>9.0} {p99_ttft_ms:>9.0} {mean_tpot_ms:>8.1} \
         {p99_tpot_ms:>8.1} {mean_e2e_ms:>9.0} {goodput_rps:>8.3} {hit_percent:>6.1} {imbalance:>6.2} {retractions:>8}{split}",
        row.job.contender.name
    )
}
