//! The table of `vllm bench serve`.

use super::table::Table;
use super::{Settings, Summary};
use crate::args::Metric;
use crate::statistics::{Distribution, Statistics};

/// The metrics in the order of the table, with their names, and the title of their section.
pub const SECTIONS: [(Metric, &str, &str); 4] = [
    (Metric::Ttft, "TTFT", "Time to First Token"),
    (Metric::Tpot, "TPOT", "Time per Output Token (excl. 1st token)"),
    (Metric::Itl, "ITL", "Inter-token Latency"),
    (Metric::E2el, "E2EL", "End-to-end Latency"),
];

/// The metrics that are printed when none are asked for.
pub const DEFAULT_METRICS: [Metric; 3] = [Metric::Ttft, Metric::Tpot, Metric::Itl];
/// The percentiles that are printed when none are asked for.
pub const DEFAULT_PERCENTILES: [f64; 1] = [99.0];

/// The whole table.
pub fn table(summary: &Summary) -> String {
    let Summary { settings, statistics: stats, .. } = summary;
    let mut table = Table::new("Serving Benchmark Result");
    totals(&mut table, settings, stats);
    for (metric, name, title) in SECTIONS {
        if settings.percentile_metrics.contains(&metric) {
            table.section(title);
            latency(&mut table, name, distribution(stats, metric), &settings.metric_percentiles);
        }
    }
    table.cache_section(&stats.cache);
    table.finish()
}

fn totals(table: &mut Table, settings: &Settings, stats: &Statistics) {
    table.value("Successful requests:", stats.completed_requests);
    table.value("Failed requests:", stats.failed_requests);
    if let Some(limit) = settings.max_concurrency {
        table.value("Maximum request concurrency:", limit);
    }
    if let Some(rate) = settings.arrivals.rate() {
        table.decimal("Request rate configured (RPS):", rate);
    }
    table.decimal("Benchmark duration (s):", stats.duration.as_secs_f64());
    table.value("Total input tokens:", stats.input_tokens);
    table.value("Total generated tokens:", stats.output_tokens);
    table.decimal("Request throughput (req/s):", stats.request_throughput);
    if let Some(goodput) = stats.goodput() {
        table.decimal("Request goodput (req/s):", goodput);
    }
    table.decimal("Output token throughput (tok/s):", stats.output_throughput);
    table.decimal("Peak output token throughput (tok/s):", stats.peaks.output_tokens_per_s);
    table.decimal("Peak concurrent requests:", stats.peaks.concurrent_requests as f64); // with decimals in vLLM
    table.decimal("Total token throughput (tok/s):", stats.total_throughput);
}

fn latency(table: &mut Table, name: &str, values: &Distribution, percentiles: &[f64]) {
    table.decimal(&format!("Mean {name} (ms):"), values.mean_ms());
    table.decimal(&format!("Median {name} (ms):"), values.median_ms());
    for percent in percentiles {
        table.decimal(&format!("P{percent} {name} (ms):"), values.percentile_ms(*percent));
    }
}

/// The values of a metric.
pub fn distribution(stats: &Statistics, metric: Metric) -> &Distribution {
    match metric {
        Metric::Ttft => &stats.ttft,
        Metric::Tpot => &stats.tpot,
        Metric::Itl => &stats.itl,
        Metric::E2el => &stats.e2el,
    }
}
