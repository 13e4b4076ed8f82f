//! The values that flags take, and how they are read.
//!
//! Next on the path: [`super::validate`].

use std::time::Duration;

use clap::ValueEnum;

use crate::arrivals::Burstiness;

/// A JSON object given on the command line.
pub type JsonObject = serde_json::Map<String, serde_json::Value>;

/// Longest time that a flag or a file may name, in seconds: 30 years. Clocks can be moved by that much and not by what f64 holds.
pub const LONGEST_SECONDS: f64 = 1e9;

/// `seconds` as a time; `None` unless they are from 0 to [`LONGEST_SECONDS`].
pub fn time(seconds: f64) -> Option<Duration> {
    (0.0..=LONGEST_SECONDS).contains(&seconds).then(|| Duration::from_secs_f64(seconds))
}

/// How many conversations start per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RequestRate {
    /// All at once.
    Infinite,
    /// At a rate.
    PerSecond(f64),
}

/// The endpoint, under the names of SGLang's and vLLM's benchmarks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Backend {
    /// /v1/chat/completions
    SglangOaiChat,
    /// /v1/completions
    SglangOai,
    /// /v1/chat/completions
    VllmChat,
    /// /v1/completions
    Vllm,
    /// /v1/chat/completions
    OpenaiChat,
    /// /v1/completions
    Openai,
}

/// One of the two OpenAI generation endpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Api {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completions,
}

impl Backend {
    /// The endpoint behind the name.
    pub fn api(self) -> Api {
        match self {
            Self::SglangOaiChat | Self::VllmChat | Self::OpenaiChat => Api::Chat,
            Self::SglangOai | Self::Vllm | Self::Openai => Api::Completions,
        }
    }

    /// The name as typed and as printed.
    pub fn name(self) -> String {
        value_name(&self)
    }
}

/// The kinds of workload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DatasetName {
    /// Unrelated prompts of random words and lengths
    Random,
    /// Groups of prompts that share a long prefix
    #[value(alias = "generated-shared-prefix")]
    SharedPrefix,
    /// Conversations whose history grows with the real replies
    MultiTurn,
    /// First exchanges of the conversations in a ShareGPT file
    Sharegpt,
    /// Request bodies from a JSONL file
    Openai,
    /// A trace in Mooncake's JSONL format: times, lengths, and which blocks of prompts are equal
    #[value(alias = "mooncake")]
    Trace,
    /// An Azure LLM inference trace (CSV): times and lengths
    Azure,
}

impl DatasetName {
    /// Whether the dataset comes from a file.
    pub fn has_file(self) -> bool {
        matches!(self, Self::Sharegpt | Self::Openai | Self::Trace | Self::Azure)
    }

    /// Whether the file says when requests come.
    pub fn has_timestamps(self) -> bool {
        matches!(self, Self::Trace | Self::Azure)
    }

    /// The name as typed and as printed.
    pub fn name(self) -> String {
        value_name(&self)
    }
}

/// Whose table and JSON keys to print.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Style {
    /// As `sglang.bench_serving`
    Sglang,
    /// As `vllm bench serve`
    Vllm,
}

/// A latency metric of the vLLM table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Metric {
    /// Time to the first token
    Ttft,
    /// Time per output token after the first
    Tpot,
    /// Gaps between tokens
    Itl,
    /// End-to-end latency
    E2el,
}

/// A metric that `--goodput` can bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GoodputMetric {
    /// Time to the first token
    Ttft,
    /// Time per output token after the first
    Tpot,
    /// End-to-end latency
    E2el,
}

fn value_name<V: ValueEnum>(value: &V) -> String {
    value.to_possible_value().map(|v| v.get_name().to_owned()).unwrap_or_default()
}

/// Reads one value of a flag.
pub(super) fn parse_request_rate(text: &str) -> Result<RequestRate, String> {
    match text.parse::<f64>() {
        Ok(rate) if rate.is_infinite() && rate > 0.0 => Ok(RequestRate::Infinite),
        Ok(rate) if rate > 0.0 => Ok(RequestRate::PerSecond(rate)),
        _ => Err("expected a number above 0, or inf".to_owned()),
    }
}

/// Reads one value of a flag.
pub(super) fn parse_rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if rate > 0.0 && rate.is_finite() => Ok(rate),
        _ => Err("expected a number above 0".to_owned()),
    }
}

/// Reads one value of a flag.
pub(super) fn parse_burstiness(text: &str) -> Result<Burstiness, String> {
    match text.parse::<f64>() {
        Ok(shape) if shape.is_infinite() && shape > 0.0 => Ok(Burstiness::Constant),
        Ok(shape) if shape > 0.0 => Ok(Burstiness::Shape(shape)),
        _ => Err("expected a number above 0, or inf for equal gaps".to_owned()),
    }
}

/// Reads one value of a flag.
pub(super) fn parse_header(text: &str) -> Result<(String, String), String> {
    let (key, value) = text
        .split_once([':', '='])
        .ok_or_else(|| "expected NAME:VALUE, for example x-tenant:blue".to_owned())?;
    Ok((key.trim().to_owned(), value.trim().to_owned()))
}

/// Reads one value of a flag.
pub(super) fn parse_object(text: &str) -> Result<JsonObject, String> {
    serde_json::from_str(text).map_err(|error| format!("expected a JSON object: {error}"))
}

/// Reads one value of a flag.
pub(super) fn parse_objective(text: &str) -> Result<(GoodputMetric, f64), String> {
    let expected = || "expected ttft:MS, tpot:MS or e2el:MS with milliseconds from 0 to 1e12".to_owned();
    let (name, limit) = text.split_once(':').ok_or_else(expected)?;
    let metric = match name {
        "ttft" => GoodputMetric::Ttft,
        "tpot" => GoodputMetric::Tpot,
        "e2el" => GoodputMetric::E2el,
        _ => return Err(expected()),
    };
    let limit_ms: f64 = limit.parse().map_err(|_| expected())?;
    if time(limit_ms / 1e3).is_some() { Ok((metric, limit_ms)) } else { Err(expected()) }
}
