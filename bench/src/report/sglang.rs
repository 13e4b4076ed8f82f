//! The table of `sglang.bench_serving`.

use super::Summary;
use super::table::Table;
use crate::statistics::{Distribution, Statistics};

/// The whole table.
pub fn table(summary: &Summary) -> String {
    let Summary { settings, statistics: stats, .. } = summary;
    let mut table = Table::new("Serving Benchmark Result");
    table.value("Backend:", &settings.backend);
    table.value("Traffic request rate:", settings.arrivals);
    let limit = settings.max_concurrency.map_or_else(|| "not set".to_owned(), |limit| limit.to_string());
    table.value("Max request concurrency:", limit);
    totals(&mut table, stats);
    if let (Some(good), Some(goodput)) = (stats.good_requests, stats.goodput()) {
        table.section("Goodput");
        table.value("Good requests:", good);
        table.decimal("Request goodput (req/s):", goodput);
    }
    table.section("End-to-End Latency");
    latency(&mut table, "E2E Latency", &stats.e2el);
    table.section("Time to First Token");
    latency(&mut table, "TTFT", &stats.ttft);
    table.section("Time per Output Token (excl. 1st token)");
    latency(&mut table, "TPOT", &stats.tpot);
    table.section("Inter-Token Latency");
    latency(&mut table, "ITL", &stats.itl);
    table.decimal("Max ITL (ms):", stats.itl.max_ms());
    table.cache_section(&stats.cache);
    table.finish()
}

fn totals(table: &mut Table, stats: &Statistics) {
    let retokenized =
        stats.output_counts.retokenized.map_or_else(|| "n/a".to_owned(), |count| count.to_string());
    table.value("Successful requests:", stats.completed_requests);
    table.decimal("Benchmark duration (s):", stats.duration.as_secs_f64());
    table.value("Total input tokens:", stats.input_tokens);
    table.value("Total input text tokens:", stats.input_tokens);
    table.value("Total generated tokens:", stats.output_tokens);
    table.value("Total generated tokens (retokenized):", retokenized);
    table.decimal("Request throughput (req/s):", stats.request_throughput);
    table.decimal("Input token throughput (tok/s):", stats.input_throughput);
    table.decimal("Output token throughput (tok/s):", stats.output_throughput);
    table.decimal("Peak output token throughput (tok/s):", stats.peaks.output_tokens_per_s);
    table.value("Peak concurrent requests:", stats.peaks.concurrent_requests);
    table.decimal("Total token throughput (tok/s):", stats.total_throughput);
    table.decimal("Concurrency:", stats.concurrency);
}

fn latency(table: &mut Table, name: &str, values: &Distribution) {
    table.decimal(&format!("Mean {name} (ms):"), values.mean_ms());
    table.decimal(&format!("Median {name} (ms):"), values.median_ms());
    for percent in [90.0, 95.0, 99.0] {
        table.decimal(&format!("P{percent} {name} (ms):"), values.percentile_ms(percent));
    }
}
