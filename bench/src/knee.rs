//! `bench knee`: the highest request rate at which enough requests still meet their objectives, and what lies around it.
//!
//! Each step is a run of [`crate::run`] with prompts of its own. [`search`] names the rates. Next on the path:
//! [`crate::plot`].

pub mod search;

use std::fmt::Write as _;
use std::path::PathBuf;

use anyhow::{Context, bail};
use clap::Args;

use crate::args::{RequestRate, ServeArgs};
use crate::plot::{Axis, Chart, Scale, Series, svg};
use crate::report::{Summary, warnings};
use crate::run;
use search::{Bounds, Search, Verdict};

/// Requests of a step, at least: a share of fewer means little.
const LEAST_REQUESTS: usize = 10;

/// Everything `bench knee` takes.
#[derive(Debug, Clone, Args)]
pub struct KneeArgs {
    /// Share of all requests that has to meet --goodput
    #[arg(long, value_name = "SHARE", default_value_t = 0.9, help_heading = "Knee")]
    // as DistServe's and Mooncake's goodput
    pub good_share: f64,
    /// First rate to try, in requests per second
    #[arg(long, value_name = "RPS", default_value_t = 1.0, help_heading = "Knee")]
    pub start_rate: f64,
    /// Highest rate to try
    #[arg(long, value_name = "RPS", default_value_t = 10_000.0, help_heading = "Knee")]
    pub max_rate: f64,
    /// Lowest rate to try
    #[arg(long, value_name = "RPS", default_value_t = 0.01, help_heading = "Knee")]
    pub min_rate: f64,
    /// How close to come: the next rate that misses is at most this share higher
    #[arg(long, value_name = "SHARE", default_value_t = 0.1, help_heading = "Knee")]
    pub precision: f64,
    /// How long requests are sent at each rate
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0, help_heading = "Knee")]
    pub step_seconds: f64,
    /// File for the plot
    #[arg(long, value_name = "FILE.svg", help_heading = "Knee")]
    pub plot: Option<PathBuf>,
    /// What all steps have in common; --output-file gets a JSON line for each.
    #[command(flatten)]
    pub serve: ServeArgs,
}

/// One finished step.
#[derive(Debug, Clone)]
pub struct Step {
    /// Requests per second that were sent.
    pub rate: f64,
    /// Share of all requests that met the objectives.
    pub good_share: f64,
    /// Whether that was enough.
    pub verdict: Verdict,
    /// What came out.
    pub summary: Summary,
}

/// What a search found.
#[derive(Debug, Clone)]
pub struct Knee {
    /// Every step, in the order of the search.
    pub steps: Vec<Step>,
    /// The highest rate that met the objectives.
    pub rate: Option<f64>,
}

/// Runs `bench knee`: measures rate after rate, prints the table, writes JSON lines and the plot.
///
/// # Errors
/// As [`run::measure`], flags that make no sense, and a plot that cannot be written.
pub fn knee(args: &KneeArgs) -> anyhow::Result<Knee> {
    args.validate()?;
    let (start_rate, max_rate, min_rate) = (args.start_rate, args.max_rate, args.min_rate);
    let mut search = Search::new(Bounds { start_rate, max_rate, min_rate, precision: 1.0 + args.precision });
    let mut steps = Vec::new();
    while let Some(rate) = search.next() {
        println!("\nstep {}: {rate:.2} requests/s", steps.len() + 1);
        let serve = args.step(rate, steps.len() as u64);
        let (summary, records) = run::measure(&serve)?;
        run::append_json_line(&serve, &summary, &records)?;
        let step = Step::of(rate, args.good_share, summary);
        search.hear(step.verdict);
        steps.push(step);
    }
    let found = Knee { steps, rate: search.knee() };
    print!("\n{}", found.table());
    if let Some(path) = &args.plot {
        let written = std::fs::write(path, svg(&found.charts()));
        written.with_context(|| format!("cannot write --plot {}", path.display()))?;
    }
    Ok(found)
}

impl KneeArgs {
    fn validate(&self) -> anyhow::Result<()> {
        let traffic = &self.serve.traffic;
        let mut problems = Vec::new();
        if self.serve.goodput().is_none() {
            problems.push("a knee needs objectives, e.g. --goodput ttft:500 tpot:50".to_owned());
        }
        for (flag, given) in [
            ("--num-prompts", traffic.num_prompts.is_some()),
            ("--request-rate", traffic.request_rate != RequestRate::Infinite),
            ("--ramp-up-strategy", traffic.ramp_up_strategy.is_some()),
            ("--use-trace-timestamps", traffic.use_trace_timestamps),
        ] {
            if given {
                problems.push(format!("a knee sets the rate itself, from --start-rate on; leave out {flag}"));
            }
        }
        if traffic.max_concurrency.is_some() {
            problems.push(
                "--max-concurrency lets requests wait in the client, where waiting is no part of TTFT: the knee found would be too \
                 high; leave it out"
                    .to_owned(),
            );
        }
        if !(self.good_share > 0.0 && self.good_share <= 1.0) {
            problems.push("--good-share must be above 0 and at most 1".to_owned());
        }
        if !(self.min_rate > 0.0 && self.min_rate <= self.start_rate && self.start_rate <= self.max_rate) {
            problems.push("rates must be 0 < --min-rate ≤ --start-rate ≤ --max-rate".to_owned());
        }
        if !(self.max_rate.is_finite() && self.precision > 0.0 && self.precision.is_finite()) {
            problems.push("--max-rate and --precision must be finite, --precision above 0".to_owned());
        }
        if !(self.step_seconds > 0.0 && self.step_seconds.is_finite()) {
            problems.push("--step-seconds must be a number of seconds above 0".to_owned());
        }
        if problems.is_empty() { Ok(()) } else { bail!(problems.join("\n       ")) }
    }

    /// The run of one step.
    fn step(&self, rate: f64, number: u64) -> ServeArgs {
        let mut serve = self.serve.clone();
        serve.traffic.request_rate = RequestRate::PerSecond(rate);
        serve.traffic.num_prompts = Some(((rate * self.step_seconds).ceil() as usize).max(LEAST_REQUESTS));
        serve.traffic.seed = serve.traffic.seed.wrapping_add(number << 32); // no two steps share prompts
        serve
    }
}

impl Step {
    fn of(rate: f64, wanted_share: f64, summary: Summary) -> Self {
        let stats = &summary.statistics;
        let all = stats.completed_requests + stats.failed_requests;
        let good_share = stats.good_requests.unwrap_or(0) as f64 / all.max(1) as f64;
        let verdict = if good_share >= wanted_share { Verdict::Met } else { Verdict::Missed };
        Self { rate, good_share, verdict, summary }
    }
}

impl Knee {
    fn by_rate(&self) -> Vec<&Step> {
        let mut steps: Vec<_> = self.steps.iter().collect();
        steps.sort_by(|a, b| a.rate.total_cmp(&b.rate));
        steps
    }

    /// All steps by their rates, a line each, and the knee.
    pub fn table(&self) -> String {
        const NEVER_FAILS: &str = "writing to a string cannot fail";
        let mut out = String::new();
        writeln!(
            out,
            "{:>9} {:>9} {:>7} {:>9} {:>10} {:>10} {:>10} {:>10} {:>7}",
            "rate", "req/s", "good %", "good/s", "p50 TTFT", "p99 TTFT", "p50 TPOT", "p99 TPOT", ""
        )
        .expect(NEVER_FAILS);
        for step in self.by_rate() {
            let stats = &step.summary.statistics;
            writeln!(
                out,
                "{:>9.2} {:>9.2} {:>7.1} {:>9.2} {:>10.2} {:>10.2} {:>10.2} {:>10.2} {:>7}",
                step.rate,
                stats.request_throughput,
                100.0 * step.good_share,
                stats.goodput().unwrap_or(0.0),
                stats.ttft.median_ms(),
                stats.ttft.percentile_ms(99.0),
                stats.tpot.median_ms(),
                stats.tpot.percentile_ms(99.0),
                if step.verdict == Verdict::Met { "met" } else { "missed" },
            )
            .expect(NEVER_FAILS);
        }
        match self.rate {
            Some(rate) => writeln!(out, "knee: {rate:.2} requests/s").expect(NEVER_FAILS),
            None => out.push_str("knee: none; the objectives were missed at every rate\n"),
        }
        let runs =
            self.by_rate().into_iter().map(|step| (format!("{:.2} requests/s", step.rate), &step.summary));
        out.push_str(&warnings::of_runs(runs));
        out
    }

    /// Goodput and the latencies over the rate.
    pub fn charts(&self) -> Vec<Chart> {
        let steps = self.by_rate();
        let points =
            |value: &dyn Fn(&Step) -> f64| steps.iter().map(|step| (step.rate, value(step))).collect();
        let series = |name: &str, points| Series { name: name.to_owned(), points };
        let chart = |title: &str, unit: &str, scale, series| Chart {
            title: title.to_owned(),
            x: Axis { label: "requests/s sent".to_owned(), scale: Scale::Log },
            y: Axis { label: unit.to_owned(), scale },
            series,
        };
        let p99 = |value: &dyn Fn(&Step) -> f64, median: &dyn Fn(&Step) -> f64| {
            vec![series("P99", points(value)), series("median", points(median))]
        };
        let goodput = |step: &Step| step.summary.statistics.goodput().unwrap_or(0.0);
        let answered = |step: &Step| step.summary.statistics.request_throughput;
        vec![
            chart(
                "Requests answered, and good ones",
                "requests/s",
                Scale::Linear,
                vec![
                    series("P99; good requests", points(&goodput)),
                    series("median; all answers", points(&answered)),
                ],
            ),
            chart(
                "TTFT",
                "ms",
                Scale::Log,
                p99(&|step| step.summary.statistics.ttft.percentile_ms(99.0), &|step| {
                    step.summary.statistics.ttft.median_ms()
                }),
            ),
            chart(
                "TPOT",
                "ms",
                Scale::Log,
                p99(&|step| step.summary.statistics.tpot.percentile_ms(99.0), &|step| {
                    step.summary.statistics.tpot.median_ms()
                }),
            ),
        ]
    }
}
