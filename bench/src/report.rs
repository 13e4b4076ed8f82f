//! What is printed and written: a table in one of two styles, notes under it, and a JSON line.
//!
//! Pure text from values; [`crate::run`] does the printing. The layouts are those of SGLang 0.5.23 and vLLM 0.32, held
//! by the golden files in `tests/golden`.

pub mod json;
pub mod notes;
pub mod sglang;
pub mod table;
pub mod vllm;
pub mod warnings;

use std::time::Duration;

use crate::args::{Metric, Style};
use crate::arrivals::Arrivals;
use crate::statistics::Statistics;

/// What the report repeats of the command line.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Whose table.
    pub style: Style,
    /// Name of the backend as typed.
    pub backend: String,
    /// Name of the dataset as typed.
    pub dataset_name: String,
    /// Model asked for.
    pub model: String,
    /// Tokenizer directory, if one was given.
    pub tokenizer: Option<String>,
    /// Conversations of the dataset.
    pub num_prompts: usize,
    /// When conversations started.
    pub arrivals: Arrivals,
    /// Limit of conversations in flight.
    pub max_concurrency: Option<u32>,
    /// `--random-input-len`.
    pub random_input_tokens: u64,
    /// `--random-output-len`.
    pub random_output_tokens: u64,
    /// `--random-range-ratio`.
    pub random_range_ratio: f64,
    /// `--sharegpt-output-len`.
    pub sharegpt_output_tokens: Option<u64>,
    /// Metrics of the vLLM table.
    pub percentile_metrics: Vec<Metric>,
    /// Percentiles of the vLLM table.
    pub metric_percentiles: Vec<f64>,
    /// `--tag`.
    pub tag: Option<String>,
}

/// A finished run.
#[derive(Debug, Clone)]
pub struct Summary {
    /// What was asked.
    pub settings: Settings,
    /// What came out.
    pub statistics: Statistics,
    /// CPU time of the client meanwhile; `None` where it was not measured.
    pub client_cpu: Option<Duration>,
}

impl Summary {
    /// Share of a core that the client took; above 1 is impossible, since it has one thread.
    pub fn client_cpu_share(&self) -> Option<f64> {
        let duration = self.statistics.duration.as_secs_f64();
        self.client_cpu.filter(|_| duration > 0.0).map(|cpu| cpu.as_secs_f64() / duration)
    }
}

/// The table in the run's style.
pub fn table(summary: &Summary) -> String {
    match summary.settings.style {
        Style::Sglang => sglang::table(summary),
        Style::Vllm => vllm::table(summary),
    }
}
