//! Both tables and the JSON figures against golden files that `tests/golden/reference.py` computed with numpy.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::{Duration, SystemTime};

use bench::args::{Metric, Style};
use bench::arrivals::{Arrivals, Burstiness, RampStrategy};
use bench::record::{RequestRecord, Response, Usage};
use bench::report::{self, Settings, Summary, json, vllm};
use bench::statistics::{DatasetCount, Goodput, Statistics};
use serde_json::Value;

fn ms(value: &Value) -> Duration {
    Duration::from_secs_f64(value.as_f64().unwrap() / 1e3)
}

fn record(request: &Value) -> RequestRecord {
    let start = ms(&request["start_ms"]);
    if let Some(failure) = request["failure"].as_str() {
        return RequestRecord { start, failure: Some(failure.to_owned()), ..RequestRecord::default() };
    }
    let count = |key: &str| request[key].as_u64();
    let itls: Vec<_> = request["itls_ms"].as_array().unwrap().iter().map(ms).collect();
    let ttft = ms(&request["ttft_ms"]);
    let response = Response {
        ttft: Some(ttft),
        latency: ttft + itls.iter().sum::<Duration>(),
        chunks: itls.len() as u64 + 1,
        itls,
        usage: Some(Usage {
            prompt_tokens: count("prompt").unwrap(),
            completion_tokens: count("completion").unwrap(),
            cached_tokens: count("cached"),
        }),
        worker: request["worker"].as_str().map(str::to_owned),
        predicted_hit_tokens: count("predicted"),
        ..Response::default()
    };
    RequestRecord {
        start,
        response,
        dataset_input_tokens: count("prompt").unwrap(),
        requested_output_tokens: count("completion"),
        retokenized_tokens: count("retokenized"),
        ..RequestRecord::default()
    }
}

fn summary(style: Style) -> Summary {
    let run: Value = serde_json::from_str(include_str!("golden/records.json")).unwrap();
    let records: Vec<_> = run["requests"].as_array().unwrap().iter().map(record).collect();
    let duration = Duration::from_secs_f64(run["duration_s"].as_f64().unwrap());
    let goal = Goodput {
        ttft: Some(Duration::from_millis(250)),
        tpot: Some(Duration::from_millis(100)),
        e2el: None,
    };
    let statistics = Statistics::of(&records, duration, DatasetCount::Exact, Some(goal));
    let settings = Settings {
        style,
        backend: "sglang-oai-chat".to_owned(),
        dataset_name: "random".to_owned(),
        model: "m".to_owned(),
        tokenizer: None,
        num_prompts: records.len(),
        arrivals: Arrivals::Steady { rate: 20.0, burstiness: Burstiness::Shape(1.0) },
        max_concurrency: (style == Style::Vllm).then_some(8),
        random_input_tokens: 1024,
        random_output_tokens: 1024,
        random_range_ratio: 0.0,
        sharegpt_output_tokens: None,
        percentile_metrics: vec![Metric::E2el, Metric::Ttft, Metric::Tpot, Metric::Itl],
        metric_percentiles: vec![50.0, 99.9],
        tag: None,
    };
    Summary { settings, statistics, client_cpu: None }
}

#[test]
fn sglang_table_is_that_of_the_reference() {
    assert_eq!(report::table(&summary(Style::Sglang)), include_str!("golden/sglang.txt"));
}

#[test]
fn vllm_table_is_that_of_the_reference() {
    assert_eq!(report::table(&summary(Style::Vllm)), include_str!("golden/vllm.txt"));
}

#[test]
fn json_figures_are_those_of_the_reference() {
    let expected: Value = serde_json::from_str(include_str!("golden/figures.json")).unwrap();
    let result = json::result(&summary(Style::Sglang), SystemTime::UNIX_EPOCH);
    for (key, expected) in expected.as_object().unwrap() {
        let (expected, found) = (expected.as_f64().unwrap(), result[key].as_f64());
        let close = found.is_some_and(|found| (found - expected).abs() <= 1e-9 * expected.abs().max(1.0));
        assert!(close, "{key}: expected {expected}, found {found:?}");
    }
}

/// The keys of SGLang's JSON line (`bench_serving`, as of 0.5.18), without the arrays of `--output-details`.
const SGLANG_KEYS: [&str; 51] = [
    "tag",
    "backend",
    "dataset_name",
    "request_rate",
    "max_concurrency",
    "sharegpt_output_len",
    "random_input_len",
    "random_output_len",
    "random_range_ratio",
    "server_info",
    "duration",
    "completed",
    "total_input_tokens",
    "total_input_text_tokens",
    "total_input_vision_tokens",
    "total_output_tokens",
    "total_output_tokens_retokenized",
    "request_throughput",
    "input_throughput",
    "output_throughput",
    "total_throughput",
    "mean_e2e_latency_ms",
    "median_e2e_latency_ms",
    "std_e2e_latency_ms",
    "p90_e2e_latency_ms",
    "p95_e2e_latency_ms",
    "p99_e2e_latency_ms",
    "mean_ttft_ms",
    "median_ttft_ms",
    "std_ttft_ms",
    "p90_ttft_ms",
    "p95_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "median_tpot_ms",
    "std_tpot_ms",
    "p90_tpot_ms",
    "p95_tpot_ms",
    "p99_tpot_ms",
    "mean_itl_ms",
    "median_itl_ms",
    "std_itl_ms",
    "p90_itl_ms",
    "p95_itl_ms",
    "p99_itl_ms",
    "concurrency",
    "accept_length",
    "max_output_tokens_per_s",
    "max_concurrent_requests",
    // Not the original's, but between its keys and all of our others.
    "model_id",
    "num_prompts",
];

/// The keys of vLLM's JSON file (`vllm bench serve`, as of 0.32) for the percentiles 50 and 99.9 of all metrics, without
/// the arrays of `--save-detailed`.
const VLLM_KEYS: [&str; 43] = [
    "date",
    "endpoint_type",
    "backend",
    "label",
    "model_id",
    "tokenizer_id",
    "num_prompts",
    "request_rate",
    "burstiness",
    "max_concurrency",
    "duration",
    "completed",
    "failed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "total_token_throughput",
    "max_output_tokens_per_s",
    "max_concurrent_requests",
    "rtfx",
    "mean_ttft_ms",
    "median_ttft_ms",
    "std_ttft_ms",
    "p50_ttft_ms",
    "p99.9_ttft_ms",
    "mean_tpot_ms",
    "median_tpot_ms",
    "std_tpot_ms",
    "p50_tpot_ms",
    "p99.9_tpot_ms",
    "mean_itl_ms",
    "median_itl_ms",
    "std_itl_ms",
    "p50_itl_ms",
    "p99.9_itl_ms",
    "mean_e2el_ms",
    "median_e2el_ms",
    "std_e2el_ms",
    "p50_e2el_ms",
    "p99.9_e2el_ms",
    "errors_by_message", // ours begin
];

/// Ours, in both styles.
const OWN_KEYS: [&str; 22] = [
    "errors_by_message",
    "input_tokens_source",
    "dataset_input_tokens",
    "usage_input_tokens",
    "output_tokens_requested",
    "output_tokens_usage",
    "output_tokens_chunks",
    "output_tokens_retokenized",
    "good_requests",
    "request_goodput",
    "total_cached_tokens",
    "cache_hit_percent",
    "predicted_hit_tokens",
    "requests_by_worker",
    "max_itl_ms",
    "trace_speed",
    "client_cpu_percent",
    "warnings",
    "p99_client_queueing_ms",
    "p50_client_lateness_ms",
    "p99_client_lateness_ms",
    "max_client_lateness_ms",
];

#[test]
fn json_lines_begin_with_the_originals_keys_and_end_with_ours() {
    let keys = |style| {
        let object = json::result(&summary(style), SystemTime::UNIX_EPOCH);
        object.keys().cloned().collect::<Vec<_>>()
    };
    for (style, originals) in [(Style::Sglang, &SGLANG_KEYS[..]), (Style::Vllm, &VLLM_KEYS[..])] {
        let keys = keys(style);
        assert_eq!(keys[..originals.len()], *originals);
        for own in OWN_KEYS {
            assert!(keys.iter().any(|key| key == own), "{own} missing");
        }
    }
}

#[test]
fn json_of_other_arrivals_says_what_they_were() {
    let of = |arrivals| {
        let mut summary = summary(Style::Vllm);
        summary.settings.arrivals = arrivals;
        json::result(&summary, SystemTime::UNIX_EPOCH)
    };
    let constant = of(Arrivals::Steady { rate: 2.0, burstiness: Burstiness::Constant });
    assert_eq!((&constant["request_rate"], &constant["burstiness"]), (&2.0.into(), &"inf".into()));
    let ramp = of(Arrivals::Ramp {
        strategy: RampStrategy::Linear,
        start_rate: 1.0,
        end_rate: 8.0,
        burstiness: Burstiness::Shape(0.5),
    });
    assert_eq!((&ramp["request_rate"], &ramp["ramp_up_strategy"]), (&"inf".into(), &"linear".into()));
    assert_eq!((&ramp["ramp_up_start_rps"], &ramp["ramp_up_end_rps"]), (&1.0.into(), &8.0.into()));
    let trace = of(Arrivals::Trace { speed: 10.0 });
    assert_eq!((&trace["request_rate"], &trace["trace_speed"]), (&"trace".into(), &10.0.into()));
}

#[test]
fn a_client_that_is_busy_warns_of_itself() {
    let mut summary = summary(Style::Sglang);
    let warns = |summary: &Summary| {
        report::warnings::warnings(summary)
            .iter()
            .any(|warning| warning.contains("the client took 95 % of a core"))
    };
    assert!(!warns(&summary));
    summary.client_cpu = Some(summary.statistics.duration.mul_f64(0.95));
    assert!(warns(&summary));
    assert!(report::notes::notes(&summary).contains("Client CPU: 95.0 % of a core"));
}

#[test]
fn figures_that_are_not_known_say_so() {
    let mut summary = summary(Style::Sglang);
    summary.statistics.output_counts.retokenized = None;
    summary.statistics.good_requests = None;
    summary.statistics.cache = bench::statistics::CacheReport::default();
    summary.settings.max_concurrency = Some(4);
    summary.settings.arrivals = Arrivals::Infinite;
    let table = report::table(&summary);
    assert!(table.contains("Total generated tokens (retokenized):    n/a       \n"));
    assert!(table.contains("Max request concurrency:                 4         \n"));
    assert!(table.contains("Traffic request rate:                    inf       \n"));
    assert!(!table.contains("Goodput") && !table.contains("Cache Hit Details"));
    assert_eq!(vllm::DEFAULT_PERCENTILES, [99.0]);
}

#[test]
fn every_line_of_a_table_is_fifty_columns_wide_or_longer_by_its_number() {
    for style in [Style::Sglang, Style::Vllm] {
        for line in report::table(&summary(style)).lines() {
            let is_long_word = line.contains("sglang-oai-chat");
            assert!(line.len() == 50 || line.len() == 51 || is_long_word, "{line:?} has {}", line.len());
        }
    }
}
