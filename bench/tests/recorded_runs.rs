//! The formulas against 52 recorded runs of the originals (`seed_runs.csv`): from the counts, the duration and the
//! mean latency of each, our statistics must give the throughputs and the concurrency that were printed.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::HashMap;
use std::time::Duration;

use bench::record::{RequestRecord, Response, Usage};
use bench::statistics::{DatasetCount, Statistics};

type Row = HashMap<&'static str, &'static str>;

fn rows() -> Vec<Row> {
    let mut lines = include_str!("../seed_runs.csv").lines();
    let names: Vec<_> = lines.next().unwrap().split(',').collect();
    lines.map(|line| names.iter().copied().zip(line.split(',')).collect()).collect()
}

fn number(row: &Row, name: &str) -> Option<f64> {
    row[name].parse().ok()
}

/// `total` as evenly over `count` as whole numbers go.
fn share(total: u64, count: u64, index: u64) -> u64 {
    total / count + u64::from(index < total % count)
}

fn statistics(row: &Row) -> Statistics {
    let whole = |name| number(row, name).unwrap() as u64;
    let (count, input, output) = (whole("successful"), whole("total_input"), whole("total_generated"));
    let latency = Duration::from_secs_f64(number(row, "mean_e2e_ms").unwrap_or(0.0) / 1e3);
    let records: Vec<_> = (0..count)
        .map(|index| {
            let usage = Usage {
                prompt_tokens: share(input, count, index),
                completion_tokens: share(output, count, index),
                cached_tokens: None,
            };
            let response = Response { latency, usage: Some(usage), ..Response::default() };
            RequestRecord { dataset_input_tokens: usage.prompt_tokens, response, ..RequestRecord::default() }
        })
        .collect();
    let duration = Duration::from_secs_f64(number(row, "duration_s").unwrap());
    Statistics::of(&records, duration, DatasetCount::Exact, None)
}

#[test]
fn throughputs_and_concurrency_of_every_recorded_run_recompute() {
    let rows = rows();
    assert_eq!(rows.len(), 52);
    let mut compared = 0;
    for row in &rows {
        let stats = statistics(row);
        let duration = number(row, "duration_s").unwrap();
        for (name, found) in [
            ("req_s", stats.request_throughput),
            ("in_tok_s", stats.input_throughput),
            ("out_tok_s", stats.output_throughput),
            ("total_tok_s", stats.total_throughput),
            ("concurrency", stats.concurrency),
        ] {
            let Some(printed) = number(row, name) else { continue };
            // Two decimals were printed of the figure and of the duration it is divided by.
            let rounding = 0.0051 + found * 0.0051 / duration;
            let place = format!("{} line {}", row["seed_file"], row["line"]);
            assert!((found - printed).abs() <= rounding, "{place}: {name} is {found}, printed {printed}");
            compared += 1;
        }
    }
    assert!(compared > 52 * 2, "only {compared} figures compared");
}
