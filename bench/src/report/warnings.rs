//! What a reader of the table must know before believing it.

use super::Summary;
use crate::statistics::{InputSource, Statistics};

/// Token counts that differ by more than this share of the larger one are reported.
const COUNT_TOLERANCE: f64 = 0.02;
/// Mean TPOT and mean ITL that differ by more than this share of the larger one are reported.
const PACE_TOLERANCE: f64 = 0.10;
/// A client that takes more of its core than this may be what was measured.
const BUSY_CLIENT_SHARE: f64 = 0.8;
/// How many distinct failures are named.
const NAMED_FAILURES: usize = 5;

/// All warnings, one sentence or line each.
pub fn warnings(summary: &Summary) -> Vec<String> {
    let mut warnings = of_statistics(&summary.statistics);
    warnings.extend(busy_client(summary));
    warnings
}

/// The warnings of many runs, a line for each kind: that of the first run that has it, and how many others do.
pub fn of_runs<'a>(runs: impl Iterator<Item = (String, &'a Summary)>) -> String {
    let mut kinds: Vec<(String, String, usize)> = Vec::new(); // kind, its first line, runs after the first
    for (run, summary) in runs {
        for warning in warnings(summary) {
            let kind = warning.split_once(':').map_or(warning.as_str(), |(kind, _)| kind);
            match kinds.iter_mut().find(|(known, ..)| known == kind) {
                Some((.., more)) => *more += 1,
                None => kinds.push((kind.to_owned(), format!("{run}: {warning}"), 0)),
            }
        }
    }
    let line = |(_, first, more): (String, String, usize)| match more {
        0 => format!("WARNING: {first}\n"),
        1 => format!("WARNING: {first} (and in another run)\n"),
        _ => format!("WARNING: {first} (and in {more} other runs)\n"),
    };
    kinds.into_iter().map(line).collect()
}

fn of_statistics(stats: &Statistics) -> Vec<String> {
    let mut warnings = failures(stats);
    if stats.completed_requests == 0 {
        return warnings;
    }
    warnings.extend(empty_answers(stats));
    warnings.extend(output_counts(stats));
    warnings.extend(input_counts(stats));
    warnings.extend(pace(stats));
    warnings
}

fn differ(a: f64, b: f64, tolerance: f64) -> bool {
    (a - b).abs() > tolerance * a.max(b)
}

fn busy_client(summary: &Summary) -> Option<String> {
    let share = summary.client_cpu_share().filter(|share| *share > BUSY_CLIENT_SHARE)?;
    Some(format!(
        "the client took {:.0} % of a core and has only one: it may have been the limit, not the server",
        100.0 * share
    ))
}

fn failures(stats: &Statistics) -> Vec<String> {
    if stats.failed_requests == 0 {
        return Vec::new();
    }
    let total = stats.failed_requests + stats.completed_requests;
    let mut lines = vec![format!("{} of {total} requests failed", stats.failed_requests)];
    lines.extend(
        stats.failures.iter().take(NAMED_FAILURES).map(|(message, count)| format!("{count} × {message}")),
    );
    if let Some(more) = stats.failures.len().checked_sub(NAMED_FAILURES).filter(|more| *more > 0) {
        lines.push(format!("and {more} more kinds of failure"));
    }
    lines
}

fn empty_answers(stats: &Statistics) -> Option<String> {
    (stats.empty_requests > 0).then(|| {
        format!(
            "{} successful requests had no text: they have no TTFT and their latency runs to the stream's end",
            stats.empty_requests
        )
    })
}

fn output_counts(stats: &Statistics) -> Option<String> {
    let counts = &stats.output_counts;
    let known: Vec<(&str, u64)> = [
        ("requested", counts.requested),
        ("usage", counts.usage),
        ("chunks", (stats.itl.count() > 0).then_some(counts.chunks)), // whole answers are no chunks
        ("retokenized", counts.retokenized),
    ]
    .into_iter()
    .filter_map(|(name, count)| Some((name, count?)))
    .collect();
    let smallest = known.iter().map(|(_, count)| *count).min()?;
    let largest = known.iter().map(|(_, count)| *count).max()?;
    differ(smallest as f64, largest as f64, COUNT_TOLERANCE).then(|| {
        let listed: Vec<String> = known.iter().map(|(name, count)| format!("{name} {count}")).collect();
        format!(
            "counts of output tokens differ by more than 2 %: {}; fewer than requested means that answers ended \
             early, fewer chunks than tokens that chunks carry several (ITL is then the gap between chunks)",
            listed.join(", ")
        )
    })
}

fn input_counts(stats: &Statistics) -> Option<String> {
    let usage = stats.usage_input_tokens?;
    let dataset = stats.dataset_input_tokens;
    let exact = stats.input_source == InputSource::Tokenizer;
    (exact && differ(usage as f64, dataset as f64, COUNT_TOLERANCE)).then(|| {
        format!(
            "counts of input tokens differ by more than 2 %: dataset {dataset}, usage {usage}; the server adds its \
             chat template, or its tokenizer is not the one given"
        )
    })
}

fn pace(stats: &Statistics) -> Option<String> {
    let (tpot, itl) = (stats.tpot.mean_ms(), stats.itl.mean_ms());
    let both = stats.tpot.count() > 0 && stats.itl.count() > 0;
    (both && differ(tpot, itl, PACE_TOLERANCE)).then(|| {
        format!(
            "mean TPOT ({tpot:.2} ms, over requests) and mean ITL ({itl:.2} ms, over chunks) differ by more than \
             10 %: requests of different lengths ran at different paces, or chunks are not tokens"
        )
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::Settings;
    use super::*;
    use crate::args::Style;
    use crate::arrivals::Arrivals;
    use crate::record::{RequestRecord, Response, Usage};
    use crate::statistics::DatasetCount;

    fn record(itl_ms: u64, chunks: u64, usage_tokens: u64) -> RequestRecord {
        let itls = vec![Duration::from_millis(itl_ms); chunks as usize - 1];
        let ttft = Duration::from_millis(10);
        let response = Response {
            ttft: Some(ttft),
            latency: ttft + itls.iter().sum::<Duration>(),
            itls,
            chunks,
            usage: Some(Usage { prompt_tokens: 100, completion_tokens: usage_tokens, cached_tokens: None }),
            ..Response::default()
        };
        RequestRecord {
            response,
            dataset_input_tokens: 100,
            requested_output_tokens: Some(100),
            ..RequestRecord::default()
        }
    }

    fn settings() -> Settings {
        Settings {
            style: Style::Sglang,
            backend: String::new(),
            dataset_name: String::new(),
            model: String::new(),
            tokenizer: None,
            num_prompts: 1,
            arrivals: Arrivals::Infinite,
            max_concurrency: None,
            random_input_tokens: 1,
            random_output_tokens: 1,
            random_range_ratio: 0.0,
            sharegpt_output_tokens: None,
            percentile_metrics: Vec::new(),
            metric_percentiles: Vec::new(),
            tag: None,
        }
    }

    fn warnings_of(records: &[RequestRecord]) -> Vec<String> {
        of_statistics(&Statistics::of(records, Duration::from_secs(1), DatasetCount::Exact, None))
    }

    #[test]
    fn a_consistent_run_has_none() {
        assert_eq!(warnings_of(&[record(5, 100, 100), record(5, 99, 99)]), Vec::<String>::new());
    }

    #[test]
    fn counts_that_differ_by_more_than_two_percent_are_listed() {
        let texts = warnings_of(&[record(5, 97, 97)]);
        assert_eq!(texts.len(), 1, "{texts:?}");
        assert!(texts[0].contains("requested 100, usage 97, chunks 97"), "{texts:?}");
        let mut retokenized = record(5, 100, 100);
        retokenized.retokenized_tokens = Some(500);
        assert!(warnings_of(&[retokenized])[0].contains("retokenized 500"));
    }

    #[test]
    fn of_many_runs_each_kind_is_said_once() {
        let summary = |records: &[RequestRecord]| {
            let statistics = Statistics::of(records, Duration::from_secs(1), DatasetCount::Exact, None);
            Summary { settings: settings(), statistics, client_cpu: None }
        };
        let (few, fewer) = (summary(&[record(5, 90, 90)]), summary(&[record(5, 80, 80)]));
        let good = summary(&[record(5, 100, 100)]);
        let runs = [("a", &good), ("b", &few), ("c", &fewer)].map(|(run, summary)| (run.to_owned(), summary));
        let text = of_runs(runs.into_iter());
        assert_eq!(text.lines().count(), 1, "{text}");
        assert!(text.starts_with("WARNING: b: counts of output tokens"), "{text}");
        assert!(text.ends_with("(and in another run)\n"), "{text}");
    }

    #[test]
    fn whole_answers_are_not_held_to_be_chunks() {
        assert_eq!(warnings_of(&[record(5, 1, 100)]), Vec::<String>::new());
    }

    #[test]
    fn pace_that_differs_between_requests_and_chunks_is_reported() {
        let mut short = record(50, 2, 2);
        short.requested_output_tokens = Some(2);
        let texts = warnings_of(&[record(5, 100, 100), short]);
        assert!(texts.iter().any(|text| text.contains("mean TPOT (27.50 ms")), "{texts:?}");
    }

    #[test]
    fn a_template_that_adds_input_tokens_is_reported() {
        let mut templated = record(5, 100, 100);
        templated.dataset_input_tokens = 90;
        assert!(warnings_of(&[templated])[0].contains("dataset 90, usage 100"));
    }

    #[test]
    fn names_the_first_few_distinct_failures() {
        let failed = |n: usize| RequestRecord { failure: Some(format!("e{n}")), ..RequestRecord::default() };
        let texts = warnings_of(&(0..7).chain([3]).map(failed).collect::<Vec<_>>());
        assert_eq!(texts[0], "8 of 8 requests failed");
        assert_eq!(texts[1], "2 × e3");
        assert_eq!(texts.len(), 1 + 5 + 1);
        assert_eq!(texts[6], "and 2 more kinds of failure");
    }
}
