//! What became of all requests → the figures of a cell.
//!
//! Formulas as in `bench serve` (`design/bench.md`): TPOT = (E2E − TTFT) / (output tokens − 1). Next: [`report`](super::report).

use std::collections::BTreeMap;

use router_core::Precedence;
use serde::{Deserialize, Serialize};

use super::run::Record;
use super::workload::{Request, Workload};
use crate::statistics::distribution::Distribution;

/// What a simulation gives.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    /// Of the requests that these routers had, in the workload's order.
    pub records: Vec<Record>,
    /// How many workers there were.
    pub workers: usize,
    /// Sequences that lost their blocks.
    pub retractions: u64,
    /// Tokens of prompts and answers of requests in the background.
    pub spare_tokens: u64,
    /// What the first router took its workers to have to do, in workers for each.
    pub demand: f64,
}

/// Figures of those of one tenant and priority.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Part {
    /// Whose.
    pub whose: Precedence,
    /// Requests.
    pub requests: usize,
    /// Mean time to the first token.
    pub mean_ttft_ms: f64,
    /// Its 99th percentile.
    pub p99_ttft_ms: f64,
    /// Mean time to the last token.
    pub mean_e2e_ms: f64,
}

/// What is good enough.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Objective {
    /// Longest time to the first token, in milliseconds.
    pub ttft_ms: f64,
    /// Longest time per output token, in milliseconds.
    pub tpot_ms: f64,
}

/// The figures of one simulation.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Figures {
    /// Requests, all of which were answered.
    pub requests: usize,
    /// Mean time to the first token.
    pub mean_ttft_ms: f64,
    /// Its median.
    pub p50_ttft_ms: f64,
    /// Its 90th percentile.
    pub p90_ttft_ms: f64,
    /// Its 99th percentile.
    pub p99_ttft_ms: f64,
    /// Mean of what requests' own prefill took of it, at the hits that they had: the rest is waiting. No key of `--json`.
    #[serde(skip)]
    pub mean_own_ms: f64,
    /// Mean time per output token.
    pub mean_tpot_ms: f64,
    /// Its 99th percentile.
    pub p99_tpot_ms: f64,
    /// Mean time to the last token.
    pub mean_e2e_ms: f64,
    /// Requests within the objective, a second.
    pub goodput_rps: f64,
    /// Share of prompt tokens that were in a cache.
    pub hit_rate: f64,
    /// Tokens computed by the busiest worker over the mean.
    pub imbalance: f64,
    /// Sequences that lost their blocks.
    pub retractions: u64,
    /// Share of requests whose prompt another worker computed than the one that generated.
    #[serde(default, skip_serializing_if = "is_none")]
    pub split: f64,
    /// Tokens of prompts and answers of requests in the background, a second.
    #[serde(default, skip_serializing_if = "is_none")]
    pub spare_tokens_per_s: f64,
    /// `router_demand_workers` over the number of workers, the mean of looks a second apart.
    #[serde(default, skip_serializing_if = "is_none")]
    pub demand: f64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "as serde wants it")]
fn is_none(share: &f64) -> bool {
    *share == 0.0
}

impl Outcome {
    /// Sums up.
    #[must_use]
    pub fn figures(&self, workload: &Workload, objective: Objective) -> Figures {
        let ms = |ns: u64| ns as f64 / 1e6;
        let of = |values: Vec<f64>| Distribution::of_ms(values);
        let several = self.each(workload).filter(|(_, request)| request.output_tokens > 1);
        let tpot = several.map(|(record, request)| {
            ms(record.done_ns - record.first_ns) / f64::from(request.output_tokens - 1)
        });
        let ttft = of(self.records.iter().map(|record| ms(record.first_ns - record.arrived_ns)).collect());
        let tpot = of(tpot.collect());
        let e2e = of(self.records.iter().map(|record| ms(record.done_ns - record.arrived_ns)).collect());
        Figures {
            requests: self.records.len(),
            mean_ttft_ms: ttft.mean_ms(),
            p50_ttft_ms: ttft.percentile_ms(50.0),
            p90_ttft_ms: ttft.percentile_ms(90.0),
            p99_ttft_ms: ttft.percentile_ms(99.0),
            mean_own_ms: of(self.records.iter().map(|record| ms(record.own_ns)).collect()).mean_ms(),
            mean_tpot_ms: tpot.mean_ms(),
            p99_tpot_ms: tpot.percentile_ms(99.0),
            mean_e2e_ms: e2e.mean_ms(),
            goodput_rps: self.good(workload, objective) as f64 / self.seconds().max(1e-9),
            hit_rate: self.hit_rate(workload),
            imbalance: self.imbalance(workload),
            retractions: self.retractions,
            split: self.split(),
            spare_tokens_per_s: self.spare_tokens as f64 / self.seconds().max(1e-9),
            demand: self.demand,
        }
    }

    /// Figures by tenant and priority, in that order; none where all are alike.
    #[must_use]
    pub fn parts(&self, workload: &Workload) -> Vec<Part> {
        let mut parts: BTreeMap<_, (Precedence, Vec<f64>, Vec<f64>)> = BTreeMap::new();
        for (record, request) in self.each(workload) {
            let whose = request.precedence;
            let (_, ttft, e2e) = parts
                .entry((whose.tenant, whose.priority))
                .or_insert_with(|| (whose, Vec::new(), Vec::new()));
            let ms_since = |at_ns: u64| (at_ns - record.arrived_ns) as f64 / 1e6;
            ttft.push(ms_since(record.first_ns));
            e2e.push(ms_since(record.done_ns));
        }
        if parts.len() < 2 {
            return Vec::new();
        }
        let part = |(whose, ttft, e2e): (Precedence, Vec<f64>, Vec<f64>)| {
            let (ttft, e2e) = (Distribution::of_ms(ttft), Distribution::of_ms(e2e));
            let (requests, mean_e2e_ms) = (ttft.count(), e2e.mean_ms());
            Part {
                whose,
                requests,
                mean_ttft_ms: ttft.mean_ms(),
                p99_ttft_ms: ttft.percentile_ms(99.0),
                mean_e2e_ms,
            }
        };
        parts.into_values().map(part).collect()
    }

    fn split(&self) -> f64 {
        let split = self.records.iter().filter(|record| record.prefill_worker.is_some()).count();
        split as f64 / self.records.len().max(1) as f64
    }

    /// From the first arrival to the last token.
    fn seconds(&self) -> f64 {
        let first = self.records.iter().map(|record| record.arrived_ns).min().unwrap_or(0);
        let last = self.records.iter().map(|record| record.done_ns).max().unwrap_or(0);
        (last - first) as f64 / 1e9
    }

    /// Arrivals a second, from the first to the last: those of the workload, or fewer where requests wait for the end of others.
    #[must_use]
    pub fn arrivals_per_s(&self) -> f64 {
        let times = || self.records.iter().map(|record| record.arrived_ns);
        let span_ns = times().max().unwrap_or(0) - times().min().unwrap_or(0);
        self.records.len() as f64 / (span_ns as f64 / 1e9).max(1e-9)
    }

    /// Of the requests, the share within the objective.
    #[must_use]
    pub fn good_share(&self, workload: &Workload, objective: Objective) -> f64 {
        self.good(workload, objective) as f64 / self.records.len().max(1) as f64
    }

    fn good(&self, workload: &Workload, objective: Objective) -> usize {
        let is_good = |record: &Record, output_tokens: u32| {
            let ttft_ms = (record.first_ns - record.arrived_ns) as f64 / 1e6;
            let decode_ms = (record.done_ns - record.first_ns) as f64 / 1e6;
            ttft_ms <= objective.ttft_ms && decode_ms <= objective.tpot_ms * f64::from(output_tokens - 1)
        };
        self.each(workload).filter(|(record, request)| is_good(record, request.output_tokens)).count()
    }

    fn hit_rate(&self, workload: &Workload) -> f64 {
        let cached: u64 = self.records.iter().map(|record| u64::from(record.cached_tokens)).sum();
        let all: u64 = self.each(workload).map(|(_, request)| u64::from(request.input_tokens)).sum();
        cached as f64 / all.max(1) as f64
    }

    fn each<'a>(&'a self, workload: &'a Workload) -> impl Iterator<Item = (&'a Record, &'a Request)> {
        self.records.iter().map(|record| (record, &workload.requests[record.request as usize]))
    }

    fn imbalance(&self, workload: &Workload) -> f64 {
        let mut computed = vec![0u64; self.workers];
        for (record, request) in self.each(workload) {
            let prefill_worker = record.prefill_worker.unwrap_or(record.worker);
            computed[prefill_worker as usize] += u64::from(request.input_tokens - record.cached_tokens);
            computed[record.worker as usize] += u64::from(request.output_tokens);
        }
        let mean = computed.iter().sum::<u64>() as f64 / self.workers as f64;
        computed.iter().max().map_or(1.0, |most| *most as f64 / mean.max(1.0))
    }

    /// Completions a second, from the first arrival until 95 % are done. Without the end, when some workers have nothing left to do; with
    /// the beginning, since an engine that computes all prompts first and then decodes together completes nothing for long.
    #[must_use]
    pub fn rate(&self) -> f64 {
        let mut done: Vec<u64> = self.records.iter().map(|record| record.done_ns).collect();
        done.sort_unstable();
        let first = self.records.iter().map(|record| record.arrived_ns).min().unwrap_or(0);
        let count = (done.len() * 95).div_ceil(100);
        let last = count.checked_sub(1).map_or(first, |at| done[at]);
        count as f64 / ((last - first) as f64 / 1e9).max(1e-9)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulate::workload::Draft;

    #[test]
    fn figures_are_those_worked_out_by_hand() {
        let mut workload = Workload::named("w");
        // The second one is another router's.
        for (input_tokens, output_tokens) in [(1_000, 11), (100, 9), (1_000, 1)] {
            workload.push(Draft { input_tokens, output_tokens, ..Draft::default() }, [1, 2]);
        }
        let record = |request, first: u64, done: u64, cached_tokens, worker| Record {
            request,
            arrived_ns: 1_000_000_000,
            first_ns: 1_000_000_000 + first * 1_000_000,
            done_ns: 1_000_000_000 + done * 1_000_000,
            cached_tokens,
            own_ns: first * 500_000,
            hit_tokens: 0,
            worker,
            prefill_worker: None,
        };
        let records = vec![record(0, 100, 600, 0, 0), record(2, 300, 300, 500, 1)];
        let outcome = Outcome { records, workers: 2, retractions: 4, spare_tokens: 0, demand: 0.0 };
        let figures = outcome.figures(&workload, Objective { ttft_ms: 200.0, tpot_ms: 50.0 });
        let close = |one: f64, two: f64| assert!((one - two).abs() < 1e-9, "{one} is not {two}");
        close(figures.mean_ttft_ms, 200.0);
        close(figures.mean_own_ms, 100.0);
        close(figures.mean_tpot_ms, 50.0);
        close(figures.mean_e2e_ms, 450.0);
        close(figures.hit_rate, 0.25);
        close(figures.goodput_rps, 1.0 / 0.6);
        close(figures.imbalance, 1_011.0 / ((1_011.0 + 501.0) / 2.0));
        assert_eq!((figures.requests, figures.retractions), (2, 4));
    }
}
