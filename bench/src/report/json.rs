//! The JSON line: the originals' keys in their order, then the benchmark's own.
//!
//! Where SGLang writes the bare word `Infinity` (which is not JSON), this writes the string `"inf"`, as vLLM does.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use super::{Summary, vllm, warnings};
use crate::args::{JsonObject, Style};
use crate::arrivals::Arrivals;
use crate::record::RequestRecord;
use crate::statistics::{Distribution, InputSource};

/// The result as one object. `now` is vLLM's `date`.
pub fn result(summary: &Summary, now: SystemTime) -> JsonObject {
    let mut object = match summary.settings.style {
        Style::Sglang => sglang(summary),
        Style::Vllm => vllm(summary, now),
    };
    own(&mut object, summary);
    object
}

fn extend(object: &mut JsonObject, value: Value) {
    if let Value::Object(more) = value {
        object.extend(more);
    }
}

fn rate(arrivals: &Arrivals) -> Value {
    match arrivals {
        Arrivals::Steady { rate, .. } => json!(rate),
        Arrivals::Infinite | Arrivals::Ramp { .. } => json!("inf"), // a ramp has its own keys, as in vLLM
        Arrivals::Trace { .. } => json!("trace"),
    }
}

/// A number, or `"inf"`, which JSON has no number for.
fn number_or_inf(value: f64) -> Value {
    if value.is_finite() { json!(value) } else { json!("inf") }
}

fn sglang(summary: &Summary) -> JsonObject {
    let Summary { settings, statistics: stats, .. } = summary;
    let mut object = JsonObject::new();
    extend(
        &mut object,
        json!({
            "tag": settings.tag,
            "backend": settings.backend,
            "dataset_name": settings.dataset_name,
            "request_rate": rate(&settings.arrivals),
            "max_concurrency": settings.max_concurrency,
            "sharegpt_output_len": settings.sharegpt_output_tokens,
            "random_input_len": settings.random_input_tokens,
            "random_output_len": settings.random_output_tokens,
            "random_range_ratio": settings.random_range_ratio,
            "server_info": null,
            "duration": stats.duration.as_secs_f64(),
            "completed": stats.completed_requests,
            "total_input_tokens": stats.input_tokens,
            "total_input_text_tokens": stats.input_tokens,
            "total_input_vision_tokens": 0,
            "total_output_tokens": stats.output_tokens,
            "total_output_tokens_retokenized": stats.output_counts.retokenized,
            "request_throughput": stats.request_throughput,
            "input_throughput": stats.input_throughput,
            "output_throughput": stats.output_throughput,
            "total_throughput": stats.total_throughput,
        }),
    );
    for (name, values) in
        [("e2e_latency", &stats.e2el), ("ttft", &stats.ttft), ("tpot", &stats.tpot), ("itl", &stats.itl)]
    {
        latency(&mut object, name, values, &[90.0, 95.0, 99.0]);
    }
    extend(
        &mut object,
        json!({
            "concurrency": stats.concurrency,
            "accept_length": null,
            "max_output_tokens_per_s": stats.peaks.output_tokens_per_s,
            "max_concurrent_requests": stats.peaks.concurrent_requests,
        }),
    );
    object
}

fn vllm(summary: &Summary, now: SystemTime) -> JsonObject {
    let Summary { settings, statistics: stats, .. } = summary;
    let mut object = JsonObject::new();
    extend(
        &mut object,
        json!({
            "date": date(now),
            "endpoint_type": settings.backend,
            "backend": settings.backend,
            "label": settings.tag,
            "model_id": settings.model,
            "tokenizer_id": settings.tokenizer,
            "num_prompts": settings.num_prompts,
            "request_rate": rate(&settings.arrivals),
            "burstiness": number_or_inf(settings.arrivals.burstiness().shape()),
            "max_concurrency": settings.max_concurrency,
        }),
    );
    if let Arrivals::Ramp { strategy, start_rate, end_rate, .. } = settings.arrivals {
        extend(
            &mut object,
            json!({"ramp_up_strategy": strategy.name(), "ramp_up_start_rps": start_rate, "ramp_up_end_rps": end_rate}),
        );
    }
    extend(
        &mut object,
        json!({
            "duration": stats.duration.as_secs_f64(),
            "completed": stats.completed_requests,
            "failed": stats.failed_requests,
            "total_input_tokens": stats.input_tokens,
            "total_output_tokens": stats.output_tokens,
            "request_throughput": stats.request_throughput,
            "request_goodput": stats.goodput(),
            "output_throughput": stats.output_throughput,
            "total_token_throughput": stats.total_throughput,
            "max_output_tokens_per_s": stats.peaks.output_tokens_per_s,
            "max_concurrent_requests": stats.peaks.concurrent_requests,
            "rtfx": 0.0,
        }),
    );
    for (metric, name, _) in vllm::SECTIONS {
        if settings.percentile_metrics.contains(&metric) {
            let values = vllm::distribution(stats, metric);
            latency(&mut object, &name.to_lowercase(), values, &settings.metric_percentiles);
        }
    }
    object
}

fn latency(object: &mut JsonObject, name: &str, values: &Distribution, percentiles: &[f64]) {
    object.insert(format!("mean_{name}_ms"), json!(values.mean_ms()));
    object.insert(format!("median_{name}_ms"), json!(values.median_ms()));
    object.insert(format!("std_{name}_ms"), json!(values.std_ms()));
    for percent in percentiles {
        object.insert(format!("p{percent}_{name}_ms"), json!(values.percentile_ms(*percent)));
    }
}

/// What neither original has, after their keys and without touching them.
fn own(object: &mut JsonObject, summary: &Summary) {
    let Summary { settings, statistics: stats, .. } = summary;
    let counts = &stats.output_counts;
    let input_source = match stats.input_source {
        InputSource::Tokenizer => "tokenizer",
        InputSource::Usage => "usage",
        InputSource::Approximation => "approximation",
    };
    let own = json!({
        "model_id": settings.model,
        "num_prompts": settings.num_prompts,
        "failed": stats.failed_requests,
        "errors_by_message": stats.failures.iter().cloned().collect::<std::collections::BTreeMap<_, _>>(),
        "input_tokens_source": input_source,
        "dataset_input_tokens": stats.dataset_input_tokens,
        "usage_input_tokens": stats.usage_input_tokens,
        "output_tokens_requested": counts.requested,
        "output_tokens_usage": counts.usage,
        "output_tokens_chunks": counts.chunks,
        "output_tokens_retokenized": counts.retokenized,
        "good_requests": stats.good_requests,
        "request_goodput": stats.goodput(),
        "total_cached_tokens": (stats.cache.reporting_requests > 0).then_some(stats.cache.cached_tokens),
        "cache_hit_percent": stats.cache.hit_percent(),
        "predicted_hit_tokens": stats.cache.predicted_hit_tokens,
        "requests_by_worker": stats.cache.requests_by_worker,
        "max_itl_ms": stats.itl.max_ms(),
        "trace_speed": trace_speed(&settings.arrivals),
        "client_cpu_percent": summary.client_cpu_share().map(|share| 100.0 * share),
        "warnings": warnings::warnings(summary),
    });
    if let Value::Object(own) = own {
        for (key, value) in own {
            object.entry(key).or_insert(value);
        }
    }
    latency(object, "client_queueing", &stats.queueing, &[99.0]);
    object.insert("max_client_queueing_ms".to_owned(), json!(stats.queueing.max_ms()));
    latency(object, "client_lateness", &stats.lateness, &[50.0, 99.0]);
    object.insert("max_client_lateness_ms".to_owned(), json!(stats.lateness.max_ms()));
}

fn trace_speed(arrivals: &Arrivals) -> Option<f64> {
    match arrivals {
        Arrivals::Trace { speed } => Some(*speed),
        _ => None,
    }
}

/// The arrays of `--output-details`, one entry a request in the dataset's order.
pub fn details(records: &[RequestRecord]) -> JsonObject {
    let seconds = |duration: Duration| duration.as_secs_f64();
    let array = |entry: &dyn Fn(&RequestRecord) -> Value| Value::Array(records.iter().map(entry).collect());
    JsonObject::from_iter([
        ("input_lens".to_owned(), array(&|record| json!(record.dataset_input_tokens))),
        (
            "output_lens".to_owned(),
            array(&|record| json!(if record.is_success() { record.output_tokens() } else { 0 })),
        ),
        ("ttfts".to_owned(), array(&|record| json!(record.response.ttft.map(seconds)))),
        (
            "itls".to_owned(),
            array(&|record| json!(record.response.itls.iter().copied().map(seconds).collect::<Vec<_>>())),
        ),
        ("generated_texts".to_owned(), array(&|record| json!(record.response.text))),
        ("errors".to_owned(), array(&|record| json!(record.failure.as_deref().unwrap_or_default()))),
        ("start_times".to_owned(), array(&|record| json!(seconds(record.start)))),
        ("workers".to_owned(), array(&|record| json!(record.response.worker))),
    ])
}

/// `%Y%m%d-%H%M%S` in UTC.
fn date(now: SystemTime) -> String {
    let seconds = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = civil_date(days);
    format!("{year:04}{month:02}{day:02}-{:02}{:02}{:02}", second / 3600, second / 60 % 60, second % 60)
}

/// Year, month and day of a day since 1970, counted in years that begin in March so that leap days come last.
fn civil_date(days_since_1970: u64) -> (u64, u64, u64) {
    let days = days_since_1970 + 719_468; // days since 0000-03-01
    let era = days / 146_097;
    let day_of_era = days % 146_097;
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    (year, month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_dates_as_vllm_does() {
        let at = |seconds| date(UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(at(0), "19700101-000000");
        assert_eq!(at(951_827_696), "20000229-123456");
        assert_eq!(at(1_735_689_599), "20241231-235959");
    }
}
