//! From records to the figures of the report. Pure: no clock, no printing.
//!
//! Every formula stands in `bench/README.md` as well; [`crate::report`] is next.

pub mod distribution;
pub mod seconds;

use std::collections::BTreeMap;
use std::time::Duration;

pub use distribution::Distribution;

use crate::record::RequestRecord;

/// Bounds that make a request good; an absent one always holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Goodput {
    /// Longest time to the first token.
    pub ttft: Option<Duration>,
    /// Longest time per output token after the first.
    pub tpot: Option<Duration>,
    /// Longest end-to-end latency.
    pub e2el: Option<Duration>,
}

impl Goodput {
    /// Whether a successful request meets every bound. Without a first token its TTFT is its latency; with fewer
    /// than two tokens its TPOT is 0.
    pub fn is_met_by(&self, record: &RequestRecord) -> bool {
        let within = |limit: Option<Duration>, value: Duration| limit.is_none_or(|limit| value <= limit);
        let response = &record.response;
        within(self.ttft, response.ttft.unwrap_or(response.latency))
            && within(self.tpot, record.tpot().unwrap_or_default())
            && within(self.e2el, response.latency)
    }
}

/// Where the number of input tokens comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InputSource {
    /// Counted by the benchmark's tokenizer.
    Tokenizer,
    /// Reported by the server for every successful request.
    Usage,
    /// Neither: words or characters of the dataset.
    Approximation,
}

/// Who counted the dataset's prompt tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DatasetCount {
    /// The benchmark's tokenizer.
    Exact,
    /// Words or characters.
    Approximate,
}

/// The four counts of output tokens, over the requests that succeeded. `None`: not known for all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OutputCounts {
    /// Asked for.
    pub requested: Option<u64>,
    /// Reported by the server.
    pub usage: Option<u64>,
    /// Chunks with text.
    pub chunks: u64,
    /// Tokens of the text by the benchmark's tokenizer.
    pub retokenized: Option<u64>,
}

/// The prefix cache as server and router report it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CacheReport {
    /// Requests whose usage named cached tokens.
    pub reporting_requests: u64,
    /// Their cached prompt tokens.
    pub cached_tokens: u64,
    /// Their prompt tokens.
    pub prompt_tokens: u64,
    /// The router's predictions, summed; `None` without such headers.
    pub predicted_hit_tokens: Option<u64>,
    /// Successful requests by `x-router-worker`.
    pub requests_by_worker: BTreeMap<String, u64>,
}

impl CacheReport {
    /// Cached share of the prompt tokens, in percent; `None` when no request reported any.
    pub fn hit_percent(&self) -> Option<f64> {
        let reported = self.reporting_requests > 0 && self.prompt_tokens > 0;
        reported.then(|| 100.0 * self.cached_tokens as f64 / self.prompt_tokens as f64)
    }

    /// Whether there is nothing to report.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// The figures of a run.
#[derive(Debug, Clone)]
pub struct Statistics {
    /// From the first start to the end of the last request.
    pub duration: Duration,
    /// Requests answered whole.
    pub completed_requests: u64,
    /// Requests that were not.
    pub failed_requests: u64,
    /// Distinct failures, most frequent first.
    pub failures: Vec<(String, u64)>,
    /// Successful requests without any text.
    pub empty_requests: u64,
    /// Prompt tokens of the successful requests.
    pub input_tokens: u64,
    /// Who counted them.
    pub input_source: InputSource,
    /// Prompt tokens as the dataset counts them.
    pub dataset_input_tokens: u64,
    /// Prompt tokens as the server counts them, when it did for all.
    pub usage_input_tokens: Option<u64>,
    /// Generated tokens of the successful requests ([`RequestRecord::output_tokens`]).
    pub output_tokens: u64,
    /// The four counts.
    pub output_counts: OutputCounts,
    /// Successful requests per second.
    pub request_throughput: f64,
    /// Input tokens per second.
    pub input_throughput: f64,
    /// Output tokens per second.
    pub output_throughput: f64,
    /// Both per second.
    pub total_throughput: f64,
    /// Σ latency / duration.
    pub concurrency: f64,
    /// Peaks by second.
    pub peaks: seconds::Peaks,
    /// Requests that met the objectives; `None` without objectives.
    pub good_requests: Option<u64>,
    /// Time to the first token.
    pub ttft: Distribution,
    /// Time per output token after the first.
    pub tpot: Distribution,
    /// Gaps between tokens, of all requests together.
    pub itl: Distribution,
    /// End-to-end latency.
    pub e2el: Distribution,
    /// Waiting for the concurrency limit, one value a conversation.
    pub queueing: Distribution,
    /// The client's own lateness, one value a request.
    pub lateness: Distribution,
    /// The prefix cache.
    pub cache: CacheReport,
}

impl Statistics {
    /// Good requests per second; `None` without objectives.
    pub fn goodput(&self) -> Option<f64> {
        self.good_requests.map(|good| per_second(good, self.duration))
    }

    /// All figures of `records`.
    pub fn of(
        records: &[RequestRecord],
        duration: Duration,
        count: DatasetCount,
        goodput: Option<Goodput>,
    ) -> Self {
        let successful: Vec<&RequestRecord> = records.iter().filter(|record| record.is_success()).collect();
        let completed_requests = successful.len() as u64;
        let dataset_input_tokens = successful.iter().map(|record| record.dataset_input_tokens).sum();
        let usage_input_tokens =
            sum_if_all(&successful, |r| r.response.usage.map(|usage| usage.prompt_tokens));
        let (input_tokens, input_source) = match (count, usage_input_tokens) {
            (DatasetCount::Exact, _) => (dataset_input_tokens, InputSource::Tokenizer),
            (DatasetCount::Approximate, Some(tokens)) => (tokens, InputSource::Usage),
            (DatasetCount::Approximate, None) => (dataset_input_tokens, InputSource::Approximation),
        };
        let output_tokens = successful.iter().map(|record| record.output_tokens()).sum();
        let latencies: Duration = successful.iter().map(|record| record.response.latency).sum();
        let responses = || successful.iter().map(|record| &record.response);
        let first_turns = records.iter().filter(|record| record.turn == 0);
        Self {
            duration,
            completed_requests,
            failed_requests: records.len() as u64 - completed_requests,
            failures: distinct_failures(records),
            empty_requests: responses().filter(|response| response.ttft.is_none()).count() as u64,
            input_tokens,
            input_source,
            dataset_input_tokens,
            usage_input_tokens,
            output_tokens,
            output_counts: output_counts(&successful),
            request_throughput: per_second(completed_requests, duration),
            input_throughput: per_second(input_tokens, duration),
            output_throughput: per_second(output_tokens, duration),
            total_throughput: per_second(input_tokens + output_tokens, duration),
            concurrency: ratio(latencies.as_secs_f64(), duration.as_secs_f64()),
            peaks: seconds::peaks(&successful),
            good_requests: goodput
                .map(|goal| successful.iter().filter(|record| goal.is_met_by(record)).count() as u64),
            ttft: Distribution::of(responses().filter_map(|response| response.ttft)),
            tpot: Distribution::of(successful.iter().filter_map(|record| record.tpot())),
            itl: Distribution::of(responses().flat_map(|response| response.itls.iter().copied())),
            e2el: Distribution::of(responses().map(|response| response.latency)),
            queueing: Distribution::of(first_turns.map(|record| record.queued)),
            lateness: Distribution::of(records.iter().map(|record| record.late)),
            cache: cache_report(&successful),
        }
    }
}

fn per_second(count: u64, duration: Duration) -> f64 {
    ratio(count as f64, duration.as_secs_f64())
}

fn ratio(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}

/// The sum over all records; `None` if one has no value or there are none.
fn sum_if_all(records: &[&RequestRecord], value: impl Fn(&RequestRecord) -> Option<u64>) -> Option<u64> {
    if records.is_empty() {
        return None;
    }
    records.iter().map(|record| value(record)).sum()
}

fn output_counts(successful: &[&RequestRecord]) -> OutputCounts {
    OutputCounts {
        requested: sum_if_all(successful, |record| record.requested_output_tokens),
        usage: sum_if_all(successful, |record| record.response.usage.map(|usage| usage.completion_tokens)),
        chunks: successful.iter().map(|record| record.response.chunks).sum(),
        retokenized: sum_if_all(successful, |record| record.retokenized_tokens),
    }
}

fn distinct_failures(records: &[RequestRecord]) -> Vec<(String, u64)> {
    let mut counts = BTreeMap::<&str, u64>::new();
    for failure in records.iter().filter_map(|record| record.failure.as_deref()) {
        *counts.entry(failure).or_default() += 1;
    }
    let mut failures: Vec<_> =
        counts.into_iter().map(|(message, count)| (message.to_owned(), count)).collect();
    failures.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    failures
}

fn cache_report(successful: &[&RequestRecord]) -> CacheReport {
    let mut report = CacheReport::default();
    for response in successful.iter().map(|record| &record.response) {
        if let Some((usage, cached)) = response.usage.and_then(|usage| Some((usage, usage.cached_tokens?))) {
            report.reporting_requests += 1;
            report.cached_tokens += cached;
            report.prompt_tokens += usage.prompt_tokens;
        }
        if let Some(tokens) = response.predicted_hit_tokens {
            *report.predicted_hit_tokens.get_or_insert(0) += tokens;
        }
        if let Some(worker) = &response.worker {
            *report.requests_by_worker.entry(worker.clone()).or_default() += 1;
        }
    }
    report
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Response, Usage};

    const fn ms(value: u64) -> Duration {
        Duration::from_millis(value)
    }

    fn record(start: u64, ttft: u64, itls: &[u64]) -> RequestRecord {
        let itls: Vec<_> = itls.iter().copied().map(ms).collect();
        let chunks = itls.len() as u64 + 1;
        let usage = Usage { prompt_tokens: 10, completion_tokens: chunks, cached_tokens: Some(4) };
        let latency = ms(ttft) + itls.iter().sum::<Duration>();
        let response = Response {
            ttft: Some(ms(ttft)),
            itls,
            latency,
            chunks,
            usage: Some(usage),
            ..Response::default()
        };
        RequestRecord {
            start: ms(start),
            response,
            dataset_input_tokens: 9,
            requested_output_tokens: Some(3),
            ..RequestRecord::default()
        }
    }

    fn failed(message: &str) -> RequestRecord {
        RequestRecord {
            failure: Some(message.to_owned()),
            dataset_input_tokens: 9,
            ..RequestRecord::default()
        }
    }

    /// a: TTFT 100, gaps 50 50, latency 200, TPOT 50. b: TTFT 300, gap 100, latency 400, TPOT 100. Run of 2 s.
    fn sample() -> Vec<RequestRecord> {
        vec![record(0, 100, &[50, 50]), record(100, 300, &[100]), failed("HTTP 500: x")]
    }

    #[test]
    fn follows_the_formulas_on_a_sample_computed_by_hand() {
        let stats = Statistics::of(&sample(), ms(2000), DatasetCount::Exact, None);
        assert_eq!((stats.completed_requests, stats.failed_requests), (2, 1));
        assert_eq!((stats.input_tokens, stats.output_tokens), (18, 5));
        assert_eq!((stats.request_throughput, stats.input_throughput), (1.0, 9.0));
        assert_eq!((stats.output_throughput, stats.total_throughput), (2.5, 11.5));
        assert!((stats.concurrency - 0.3).abs() < 1e-12, "(0.2 + 0.4) / 2");
        assert_eq!((stats.ttft.mean_ms(), stats.ttft.std_ms()), (200.0, 100.0));
        assert_eq!((stats.tpot.mean_ms(), stats.e2el.mean_ms()), (75.0, 300.0));
        assert_eq!((stats.itl.count(), stats.itl.median_ms(), stats.itl.max_ms()), (3, 50.0, 100.0));
        assert_eq!(stats.peaks, seconds::Peaks { output_tokens_per_s: 5.0, concurrent_requests: 2 });
    }

    #[test]
    fn keeps_the_four_counts_apart() {
        let stats = Statistics::of(&sample(), ms(2000), DatasetCount::Exact, None);
        let expected = OutputCounts { requested: Some(6), usage: Some(5), chunks: 5, retokenized: None };
        assert_eq!(stats.output_counts, expected);
    }

    #[test]
    fn input_comes_from_usage_when_the_dataset_only_guesses() {
        let mut records = sample();
        let of =
            |records: &[RequestRecord]| Statistics::of(records, ms(2000), DatasetCount::Approximate, None);
        assert_eq!((of(&records).input_tokens, of(&records).input_source), (20, InputSource::Usage));
        records[0].response.usage = None;
        assert_eq!((of(&records).input_tokens, of(&records).input_source), (18, InputSource::Approximation));
    }

    #[test]
    fn goodput_counts_requests_within_every_bound() {
        let good = |ttft, tpot, e2el| {
            let goal = Goodput { ttft, tpot, e2el };
            Statistics::of(&sample(), ms(2000), DatasetCount::Exact, Some(goal)).good_requests.unwrap()
        };
        assert_eq!(good(Some(ms(100)), None, None), 1);
        assert_eq!(good(Some(ms(300)), Some(ms(100)), Some(ms(400))), 2);
        assert_eq!(good(Some(ms(300)), Some(ms(99)), None), 1);
        assert_eq!(good(None, None, Some(ms(100))), 0);
        let goal = Goodput { ttft: Some(ms(100)), ..Goodput::default() };
        let stats = Statistics::of(&sample(), ms(2000), DatasetCount::Exact, Some(goal));
        assert_eq!(stats.goodput(), Some(0.5));
    }

    #[test]
    fn counts_distinct_failures_most_frequent_first() {
        let records = [failed("b"), failed("a"), failed("a")];
        let stats = Statistics::of(&records, ms(10), DatasetCount::Exact, None);
        assert_eq!(stats.failures, [("a".to_owned(), 2), ("b".to_owned(), 1)]);
        assert_eq!((stats.completed_requests, stats.ttft.mean_ms(), stats.concurrency), (0, 0.0, 0.0));
    }

    #[test]
    fn sums_cached_tokens_and_requests_by_worker() {
        let mut records = sample();
        records[0].response.worker = Some("w1".to_owned());
        records[0].response.predicted_hit_tokens = Some(3);
        records[1].response.worker = Some("w1".to_owned());
        let cache = Statistics::of(&records, ms(10), DatasetCount::Exact, None).cache;
        assert_eq!((cache.cached_tokens, cache.prompt_tokens, cache.hit_percent()), (8, 20, Some(40.0)));
        assert_eq!((cache.predicted_hit_tokens, cache.requests_by_worker["w1"]), (Some(3), 2));
        assert!(Statistics::of(&[failed("x")], ms(1), DatasetCount::Exact, None).cache.is_empty());
    }
}
