//! The layout of both tables against real outputs: `golden/recorded_sglang.txt` is what SGLang printed (seed 001),
//! `golden/recorded_vllm.txt` what vLLM did (seed 003). Given the same figures, our tables must have the same lines, to the
//! last space and in the same order; what ours have beyond them is listed here.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::HashMap;
use std::time::Duration;

use bench::args::{Metric, Style};
use bench::arrivals::Arrivals;
use bench::report::{self, Settings, Summary};
use bench::statistics::{DatasetCount, Distribution, Statistics};

/// The figures of a recorded table by their labels.
struct Recorded(HashMap<String, String>);

impl Recorded {
    fn read(table: &str) -> Self {
        let figures = table.lines().filter(|line| !line.starts_with(['=', '-'])).map(|line| {
            let (label, value) = line.split_at(41); // labels are 40 columns wide, and a space
            (label.trim().to_owned(), value.trim().to_owned())
        });
        Self(figures.collect())
    }

    fn figure(&self, label: &str) -> Option<f64> {
        self.0.get(label)?.parse().ok()
    }

    fn count(&self, label: &str) -> u64 {
        self.0[label].parse().unwrap()
    }

    /// A sample with the recorded mean, percentiles and maximum of a metric.
    fn distribution(&self, name: &str) -> Distribution {
        let figure = |what: &str| self.figure(&format!("{what} {name} (ms):"));
        let percents = [50.0, 75.0, 90.0, 95.0, 99.0];
        let percentile = |percent: f64| {
            figure(&format!("P{percent}")).or_else(|| figure("Median").filter(|_| percent == 50.0))
        };
        let mut pins = vec![(0, 0.0)];
        pins.extend(percents.iter().filter_map(|p| Some((*p as usize * 10, percentile(*p)?))));
        let largest = figure("Max").unwrap_or(pins.last().unwrap().1 * 10.0);
        pins.push((1000, largest));
        sample(figure("Mean").unwrap(), &pins)
    }
}

/// A sorted sample of 1,001 values, of which those at the pinned ranks are given and the others lie between so that the
/// mean is right. With so many values the percentiles are pinned ranks.
fn sample(mean_ms: f64, pins: &[(usize, f64)]) -> Distribution {
    // Values between two pins may lie anywhere from the lower to the higher one.
    let between: Vec<(f64, f64)> = (0..=1000)
        .map(|rank| {
            let next = pins.iter().position(|(pinned, _)| *pinned >= rank).unwrap();
            let (pinned, high) = pins[next];
            (if pinned == rank { high } else { pins[next - 1].1 }, high)
        })
        .collect();
    let mean = |value: fn(&(f64, f64)) -> f64| between.iter().map(value).sum::<f64>() / between.len() as f64;
    let (lowest, highest) = (mean(|pair| pair.0), mean(|pair| pair.1));
    let share = (mean_ms - lowest) / (highest - lowest);
    assert!((0.0..=1.0).contains(&share), "no sample has mean {mean_ms} and {pins:?}");
    Distribution::of(
        between.iter().map(|(low, high)| Duration::from_secs_f64((low + share * (high - low)) / 1e3)),
    )
}

fn statistics(recorded: &Recorded) -> Statistics {
    let mut stats = Statistics::of(&[], Duration::ZERO, DatasetCount::Exact, None);
    let rate = |label: &str| recorded.figure(label).unwrap_or(0.0);
    stats.duration = Duration::from_secs_f64(recorded.figure("Benchmark duration (s):").unwrap());
    stats.completed_requests = recorded.count("Successful requests:");
    stats.input_tokens = recorded.count("Total input tokens:");
    stats.output_tokens = recorded.count("Total generated tokens:");
    stats.output_counts.retokenized =
        recorded.figure("Total generated tokens (retokenized):").map(|count| count as u64);
    stats.request_throughput = rate("Request throughput (req/s):");
    stats.input_throughput = rate("Input token throughput (tok/s):");
    stats.output_throughput = rate("Output token throughput (tok/s):");
    stats.total_throughput = rate("Total token throughput (tok/s):");
    stats.peaks.output_tokens_per_s = rate("Peak output token throughput (tok/s):");
    stats.peaks.concurrent_requests = rate("Peak concurrent requests:") as u64;
    stats.concurrency = rate("Concurrency:");
    stats.ttft = recorded.distribution("TTFT");
    stats.tpot = recorded.distribution("TPOT");
    stats.itl = recorded.distribution("ITL");
    stats
}

fn summary(style: Style, statistics: Statistics) -> Summary {
    let settings = Settings {
        style,
        backend: "sglang".to_owned(),
        dataset_name: "random".to_owned(),
        model: "m".to_owned(),
        tokenizer: None,
        num_prompts: 1,
        arrivals: Arrivals::Infinite,
        max_concurrency: None,
        random_input_tokens: 64,
        random_output_tokens: 16,
        random_range_ratio: 0.0,
        sharegpt_output_tokens: None,
        percentile_metrics: vec![Metric::Ttft, Metric::Tpot, Metric::Itl, Metric::E2el],
        metric_percentiles: vec![50.0, 75.0, 90.0, 95.0, 99.0],
        tag: None,
    };
    Summary { settings, statistics, client_cpu: None }
}

/// Compares line by line; the lines that only ours has must be `additional`, by their labels.
fn compare(ours: &str, recorded: &str, additional: &[&str]) {
    let mut expected = recorded.lines().peekable();
    let mut more = Vec::new();
    for line in ours.lines() {
        match expected.peek() {
            Some(next) if *next == line => drop(expected.next()),
            _ => more.push(line.split(':').next().unwrap()),
        }
    }
    assert_eq!(expected.next(), None, "ours has no such line there:\n{ours}");
    assert_eq!(more, additional);
}

#[test]
fn the_sglang_table_has_the_lines_that_sglang_printed() {
    let table = include_str!("golden/recorded_sglang.txt");
    let recorded = Recorded::read(table);
    let mut stats = statistics(&recorded);
    stats.e2el = recorded.distribution("E2E Latency");
    // Newer versions print P90, P95 and P99 of everything.
    let additional = [
        "P95 E2E Latency (ms)",
        "P90 TTFT (ms)",
        "P95 TTFT (ms)",
        "P90 TPOT (ms)",
        "P95 TPOT (ms)",
        "P90 ITL (ms)",
    ];
    compare(&report::table(&summary(Style::Sglang, stats)), table, &additional);
}

#[test]
fn the_vllm_table_has_the_lines_that_vllm_printed() {
    // Newer versions write this one word small.
    let table =
        include_str!("golden/recorded_vllm.txt").replace("Total Token throughput", "Total token throughput");
    let recorded = Recorded::read(&table);
    let mut stats = statistics(&recorded);
    stats.e2el = recorded.distribution("E2EL");
    // Newer versions count failures and peaks.
    let additional = ["Failed requests", "Peak output token throughput (tok/s)", "Peak concurrent requests"];
    compare(&report::table(&summary(Style::Vllm, stats)), &table, &additional);
}
