//! Counters in Prometheus' format, under vLLM's names with the prefix `worker:`.

use prometheus::{Encoder, Histogram, HistogramOpts, IntCounter, Registry, TextEncoder};
use worker_core::scheduler::SchedulerStats;

/// From a millisecond to a minute.
const SECONDS: &[f64] =
    &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];

/// What the worker counts beside its scheduler.
pub struct Metrics {
    registry: Registry,
    /// Prompt tokens of all requests.
    pub prompt_tokens: IntCounter,
    /// Tokens generated.
    pub generation_tokens: IntCounter,
    /// Requests that were answered.
    pub requests: IntCounter,
    /// From a request's submission to its first token.
    pub ttft_seconds: Histogram,
}

impl Default for Metrics {
    fn default() -> Self {
        let registry = Registry::new();
        let counter = |name: &str, help: &str| {
            let counter = IntCounter::new(name, help).expect("names are constants, and valid");
            registry.register(Box::new(counter.clone())).expect("every name is registered once");
            counter
        };
        let options =
            HistogramOpts::new("worker:time_to_first_token_seconds", "From submission to the first token.");
        let ttft_seconds = Histogram::with_opts(options.buckets(SECONDS.to_vec()))
            .expect("buckets are constants, and valid");
        registry.register(Box::new(ttft_seconds.clone())).expect("every name is registered once");
        Self {
            prompt_tokens: counter("worker:prompt_tokens_total", "Prompt tokens of all requests."),
            generation_tokens: counter("worker:generation_tokens_total", "Tokens generated."),
            requests: counter("worker:request_success_total", "Requests answered."),
            ttft_seconds,
            registry,
        }
    }
}

impl Metrics {
    /// Everything, with the scheduler's counters.
    #[must_use]
    pub fn render(&self, stats: &SchedulerStats) -> String {
        let mut text = Vec::new();
        TextEncoder::new()
            .encode(&self.registry.gather(), &mut text)
            .expect("writing to memory does not fail");
        let mut text = String::from_utf8(text).expect("the format is text");
        let usage = stats.held_blocks as f64 / stats.total_blocks.max(1) as f64;
        let gauge = |name: &str, help: &str, value: f64| {
            format!("# HELP worker:{name} {help}\n# TYPE worker:{name} gauge\nworker:{name} {value}\n")
        };
        let counter = |name: &str, help: &str, value: u64| {
            format!("# HELP worker:{name} {help}\n# TYPE worker:{name} counter\nworker:{name} {value}\n")
        };
        text += &gauge("num_requests_running", "Requests that take part in steps.", stats.running as f64);
        text += &gauge("num_requests_waiting", "Requests that wait.", stats.waiting as f64);
        text += &gauge("kv_cache_usage_perc", "Share of KV blocks in use, 1 is all.", usage);
        text +=
            &counter("prefix_cache_queries_total", "Prompt tokens looked up.", stats.cache_queried_tokens);
        text += &counter("prefix_cache_hits_total", "Prompt tokens found.", stats.cache_hit_tokens);
        text += &counter("num_preemptions_total", "Requests that lost their blocks.", stats.retractions);
        text
    }
}
