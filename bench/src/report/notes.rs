//! The lines under the table: who counted, how late the client was, warnings.

use std::fmt::Write;

use super::{Summary, warnings};
use crate::statistics::{Distribution, InputSource};

/// All lines under the table.
pub fn notes(summary: &Summary) -> String {
    let stats = &summary.statistics;
    let mut text = String::new();
    let mut line = |note: &str| writeln!(text, "{note}").expect("writing to a string cannot fail");
    match stats.input_source {
        InputSource::Tokenizer => {}
        InputSource::Usage => {
            line("Input tokens are the server's usage (no --tokenizer; prompts were cut by words)");
        }
        InputSource::Approximation => {
            line("Input tokens are approximated from words or characters (no --tokenizer and no usage)");
        }
    }
    if summary.settings.max_concurrency.is_some() {
        line(&spread("Client queueing (waiting for --max-concurrency)", &stats.queueing));
    }
    line(&spread("Client lateness (sent after schedule or limit)", &stats.lateness));
    if let Some(share) = summary.client_cpu_share() {
        line(&format!("Client CPU: {:.1} % of a core", 100.0 * share));
    }
    for warning in warnings::warnings(summary) {
        line(&format!("WARNING: {warning}"));
    }
    text
}

fn spread(what: &str, values: &Distribution) -> String {
    let (p50, p99, max) = (values.median_ms(), values.percentile_ms(99.0), values.max_ms());
    format!("{what}: P50 {p50:.2} ms, P99 {p99:.2} ms, max {max:.2} ms")
}
