//! Both tables and the JSON figures against golden files that `tests/golden/reference.py` computed with numpy.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::{Duration, SystemTime};

use bench::args::{Metric, Style};
use bench::arrivals::{Arrivals, Burstiness};
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

#[test]
fn json_lines_begin_with_the_originals_keys_in_their_order() {
    let keys =
        |style| json::result(&summary(style), SystemTime::UNIX_EPOCH).keys().cloned().collect::<Vec<_>>();
    let sglang = keys(Style::Sglang);
    let start = ["tag", "backend", "dataset_name", "request_rate", "max_concurrency", "sharegpt_output_len"];
    assert_eq!(sglang[..start.len()], start);
    let vllm_keys = keys(Style::Vllm);
    let start = ["date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts"];
    assert_eq!(vllm_keys[..start.len()], start);
    for key in
        ["mean_ttft_ms", "p50_tpot_ms", "p99.9_itl_ms", "std_e2el_ms", "total_token_throughput", "failed"]
    {
        assert!(vllm_keys.iter().any(|found| found == key), "{key} missing");
    }
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
