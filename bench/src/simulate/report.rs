//! Rows as people read them, and as JSON lines.

use serde::Serialize;

use super::contender::Family;
use super::grid::{Job, Row};
use super::outcome::Figures;

/// A row of `--json`, with these keys and no others.
#[derive(Debug, Serialize)]
struct Line<'a> {
    policy: &'a str,
    family: Family,
    workers: usize,
    blocks: usize,
    load: f64,
    trace: &'a str,
    seed: u64,
    requests: usize,
    mean_ttft_ms: f64,
    p50_ttft_ms: f64,
    p90_ttft_ms: f64,
    p99_ttft_ms: f64,
    mean_tpot_ms: f64,
    p99_tpot_ms: f64,
    mean_e2e_ms: f64,
    goodput_rps: f64,
    hit_rate: f64,
    imbalance: f64,
    retractions: u64,
}

/// One JSON object for `row`, without a line end.
///
/// # Errors
/// None that can occur: all values are numbers and names.
pub fn json(row: &Row<'_>) -> anyhow::Result<String> {
    let Row { job: Job { cell, load, contender }, figures } = *row;
    let line = Line {
        policy: contender.name,
        family: contender.family,
        workers: cell.workers,
        blocks: cell.blocks,
        load,
        trace: &cell.name,
        seed: cell.seed,
        requests: figures.requests,
        mean_ttft_ms: figures.mean_ttft_ms,
        p50_ttft_ms: figures.p50_ttft_ms,
        p90_ttft_ms: figures.p90_ttft_ms,
        p99_ttft_ms: figures.p99_ttft_ms,
        mean_tpot_ms: figures.mean_tpot_ms,
        p99_tpot_ms: figures.p99_tpot_ms,
        mean_e2e_ms: figures.mean_e2e_ms,
        goodput_rps: figures.goodput_rps,
        hit_rate: figures.hit_rate,
        imbalance: figures.imbalance,
        retractions: figures.retractions,
    };
    Ok(serde_json::to_string(&line)?)
}

/// What stands above the rows of one cell and load.
#[must_use]
pub fn heading(job: &Job<'_>) -> String {
    let Job { cell, load, .. } = job;
    let saturated = cell.saturated.get().map_or(String::new(), |rps| format!(", R* = {rps:.3} requests/s"));
    let replicas = if cell.replicas > 1 { format!(", {} routers", cell.replicas) } else { String::new() };
    let (name, workers, blocks, seed) = (&cell.name, cell.workers, cell.blocks, cell.seed);
    format!(
        "\n{name}: {workers} workers of {blocks} blocks, load {load}{saturated}{replicas}, seed {seed}\n\
         {:<25} {:>9} {:>9} {:>9} {:>9} {:>8} {:>8} {:>9} {:>8} {:>6} {:>6} {:>8}",
        "policy",
        "TTFT ms",
        "P50",
        "P90",
        "P99",
        "TPOT ms",
        "P99",
        "E2E ms",
        "good/s",
        "hit %",
        "imbal.",
        "retract."
    )
}

/// One row of the table.
#[must_use]
pub fn line(row: &Row<'_>) -> String {
    let Figures { mean_ttft_ms, p50_ttft_ms, p90_ttft_ms, p99_ttft_ms, mean_tpot_ms, .. } = row.figures;
    let Figures { p99_tpot_ms, mean_e2e_ms, goodput_rps, hit_rate, imbalance, retractions, .. } = row.figures;
    let hit_percent = hit_rate * 100.0;
    format!(
        "{:<25} {mean_ttft_ms:>9.0} {p50_ttft_ms:>9.0} {p90_ttft_ms:>9.0} {p99_ttft_ms:>9.0} {mean_tpot_ms:>8.1} \
         {p99_tpot_ms:>8.1} {mean_e2e_ms:>9.0} {goodput_rps:>8.3} {hit_percent:>6.1} {imbalance:>6.2} {retractions:>8}",
        row.job.contender.name
    )
}
