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

use crate::args::{Metric, Style};
use crate::arrivals::RequestRate;
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
    /// Rate of starts.
    pub request_rate: RequestRate,
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
}

/// The table in the run's style.
pub fn table(summary: &Summary) -> String {
    match summary.settings.style {
        Style::Sglang => sglang::table(summary),
        Style::Vllm => vllm::table(summary),
    }
}
