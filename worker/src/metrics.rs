//! Counters in Prometheus' format, under vLLM's names with the prefix `worker:`.

use prometheus::core::Collector;
use prometheus::{Encoder, Histogram, HistogramOpts, IntCounter, IntCounterVec, Opts, Registry, TextEncoder};
use worker_core::scheduler::SchedulerStats;

/// From a millisecond to a minute.
const SECONDS: &[f64] =
    &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];

/// Between tokens: from a tenth of a millisecond, which timing backends reach.
const TOKEN_SECONDS: &[f64] = &[
    0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 1.0, 2.5,
    5.0,
];

/// What the worker counts beside its scheduler. A request with several choices counts as so many.
pub struct Metrics {
    registry: Registry,
    /// Prompt tokens of all requests, once for all choices of a prompt.
    pub prompt_tokens: IntCounter,
    /// Tokens generated.
    pub generation_tokens: IntCounter,
    /// Generations that ended, by `finished_reason`: stop, length, abort (the client left) or error.
    pub finished: IntCounterVec,
    /// Prompts whose KV went to another worker or came from one, by `outcome`: offered, not_offered (for want of room), sent, lapsed
    /// (nobody fetched it), fetched or failed (computed here instead).
    pub kv_transfers: IntCounterVec,
    /// Its bytes, by `way`: sent or fetched.
    pub kv_transfer_bytes: IntCounterVec,
    /// From a request that says where its prompt's KV is until it is here.
    pub kv_fetch_seconds: Histogram,
    /// From a request's submission to its first token.
    pub ttft_seconds: Histogram,
    /// Between two tokens of a generation.
    pub itl_seconds: Histogram,
    /// From a request's submission to its last token, where it came.
    pub e2e_seconds: Histogram,
}

impl Default for Metrics {
    fn default() -> Self {
        let registry = Registry::new();
        let counter = |name: &str, help: &str| {
            let counter = IntCounter::new(name, help).expect("names are constants, and valid");
            registered(&registry, counter)
        };
        let histogram = |name: &str, help: &str, buckets: &[f64]| {
            let options = HistogramOpts::new(name, help).buckets(buckets.to_vec());
            registered(&registry, Histogram::with_opts(options).expect("buckets are constants, and valid"))
        };
        let labelled = |name: &str, help: &str, label: &str, values: &[&str]| {
            let counters = IntCounterVec::new(Opts::new(name, help), &[label]);
            let counters = counters.expect("names are constants, and valid");
            for value in values {
                counters.with_label_values(&[value]);
            }
            registered(&registry, counters)
        };
        Self {
            prompt_tokens: counter("worker:prompt_tokens_total", "Prompt tokens of all requests."),
            generation_tokens: counter("worker:generation_tokens_total", "Tokens generated."),
            finished: labelled(
                "worker:request_success_total",
                "Generations that ended, by reason.",
                "finished_reason",
                &["stop", "length", "abort", "error"],
            ),
            kv_transfers: labelled(
                "worker:kv_transfers_total",
                "Prompts whose KV went to another worker or came from one.",
                "outcome",
                &["offered", "not_offered", "sent", "lapsed", "fetched", "failed"],
            ),
            kv_transfer_bytes: labelled(
                "worker:kv_transfer_bytes_total",
                "Bytes of KV between workers.",
                "way",
                &["sent", "fetched"],
            ),
            kv_fetch_seconds: histogram(
                "worker:kv_fetch_seconds",
                "From a request that says where its prompt's KV is until it is here.",
                SECONDS,
            ),
            ttft_seconds: histogram(
                "worker:time_to_first_token_seconds",
                "From submission to the first token.",
                SECONDS,
            ),
            itl_seconds: histogram(
                "worker:inter_token_latency_seconds",
                "Between two tokens of a generation.",
                TOKEN_SECONDS,
            ),
            e2e_seconds: histogram(
                "worker:e2e_request_latency_seconds",
                "From submission to the last token.",
                SECONDS,
            ),
            registry,
        }
    }
}

fn registered<M: Collector + Clone + 'static>(registry: &Registry, metric: M) -> M {
    registry.register(Box::new(metric.clone())).expect("every name is registered once");
    metric
}

impl Metrics {
    /// Everything, with the scheduler's counters; `block_tokens` are the positions of a KV block.
    #[must_use]
    pub fn render(&self, stats: &SchedulerStats, block_tokens: usize) -> String {
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
        text += &counter("computed_tokens_total", "Tokens that steps computed.", stats.computed_tokens);
        text +=
            &counter("prefix_cache_queries_total", "Prompt tokens looked up.", stats.cache_queried_tokens);
        text += &counter("prefix_cache_hits_total", "Prompt tokens found.", stats.cache_hit_tokens);
        // vLLM's word for blocks, wherever they lie.
        text += &format!(
            "# HELP worker:cache_config_info The KV pool.\n# TYPE worker:cache_config_info gauge\n\
             worker:cache_config_info{{block_size=\"{block_tokens}\",num_gpu_blocks=\"{}\"}} 1\n",
            stats.total_blocks
        );
        text += &counter("num_preemptions_total", "Requests that lost their blocks.", stats.retractions);
        text += &counter(
            "preempted_tokens_total",
            "Tokens whose KV was lost with their blocks.",
            stats.retracted_tokens,
        );
        text += &counter(
            "recomputed_tokens_total",
            "Those of them that had to be computed again.",
            stats.recomputed_tokens,
        );
        text
    }
}
