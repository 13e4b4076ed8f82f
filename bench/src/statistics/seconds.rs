//! Peaks: the run cut into one-second buckets.

use crate::record::RequestRecord;

/// The fullest second.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Peaks {
    /// Most output tokens in one second.
    pub output_tokens_per_s: f64,
    /// Most requests that overlap one second.
    pub concurrent_requests: u64,
}

/// Peaks of the successful requests, seconds counted from the first start. A chunk counts for as many tokens as the
/// chunks of its request carry on average (one, where the server sends token by token).
pub fn peaks(successful: &[&RequestRecord]) -> Peaks {
    let Some(first_start) = successful.iter().map(|record| record.start).min() else {
        return Peaks::default();
    };
    let last_end =
        successful.iter().map(|record| record.start + record.response.latency).max().unwrap_or(first_start);
    let second_count = (last_end - first_start).as_secs() as usize + 1;
    let mut tokens = vec![0.0; second_count];
    // Starts and ends as steps, summed afterwards: a long request costs no more than a short one.
    let mut steps = vec![0_i64; second_count + 1];
    for record in successful {
        let start = record.start - first_start;
        let end = start + record.response.latency;
        steps[start.as_secs() as usize] += 1;
        steps[end.as_secs() as usize + 1] -= 1;
        let tokens_per_chunk = record.output_tokens() as f64 / record.response.chunks.max(1) as f64;
        let Some(ttft) = record.response.ttft else { continue };
        let mut at = start + ttft;
        tokens[(at.as_secs() as usize).min(second_count - 1)] += tokens_per_chunk;
        for gap in &record.response.itls {
            at += *gap;
            tokens[(at.as_secs() as usize).min(second_count - 1)] += tokens_per_chunk;
        }
    }
    let mut running = 0;
    let concurrent = steps.iter().map(|step| {
        running += step;
        running
    });
    Peaks {
        output_tokens_per_s: tokens.iter().copied().fold(0.0, f64::max),
        concurrent_requests: concurrent.max().unwrap_or(0).unsigned_abs(),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::record::{Response, Usage};

    fn record(start_ms: u64, ttft_ms: u64, itls_ms: &[u64], tokens: u64) -> RequestRecord {
        let itls: Vec<_> = itls_ms.iter().copied().map(Duration::from_millis).collect();
        let ttft = Duration::from_millis(ttft_ms);
        let response = Response {
            ttft: Some(ttft),
            latency: ttft + itls.iter().sum::<Duration>(),
            chunks: itls.len() as u64 + 1,
            itls,
            usage: Some(Usage { prompt_tokens: 1, completion_tokens: tokens, cached_tokens: None }),
            ..Response::default()
        };
        RequestRecord { start: Duration::from_millis(start_ms), response, ..RequestRecord::default() }
    }

    #[test]
    fn counts_tokens_and_overlaps_by_second_from_the_first_start() {
        // Second 0 is 5.0 to 6.0 s. a: tokens at 0.5, 0.9, 1.4; b: tokens at 0.9, 1.9; c: one token at 3.2.
        let a = record(5000, 500, &[400, 500], 3);
        let b = record(5800, 100, &[1000], 2);
        let c = record(8000, 200, &[], 1);
        let peaks = peaks(&[&a, &b, &c]);
        assert_eq!(peaks, Peaks { output_tokens_per_s: 3.0, concurrent_requests: 2 });
    }

    #[test]
    fn a_chunk_of_several_tokens_counts_for_them() {
        let record = record(0, 100, &[100], 8);
        assert_eq!(peaks(&[&record]).output_tokens_per_s, 8.0);
    }

    #[test]
    fn nothing_has_no_peak() {
        assert_eq!(peaks(&[]), Peaks::default());
    }
}
