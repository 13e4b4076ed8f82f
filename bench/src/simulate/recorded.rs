//! `bench simulate --recorded FILE`, or `--preset`: runs that were recorded on real engines, simulated beside what was recorded.
//!
//! One worker and no router: this is about the engine alone, that is, the worker's scheduler with the step times of a preset. A row of
//! the file is one run; its requests come as they were sent, all at once or so many at a time, with the lengths that are known.
//! Rows without a preset stay in the table, with the reason. Next: [`engine::scheduled`](super::engine::scheduled).

mod lengths;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;

use anyhow::Context;
use worker_core::EnginePreset;
use worker_core::timing::preset;

use super::comparison::geometric_mean;
use super::engine::scheduled::{Build, Pace, ScheduledEngine};
use super::engine::{Engine, Notice, Part};
use super::workload::{Draft, Workload};

/// Tokens in a block: as small as any engine's that was recorded, so that short requests waste no memory.
const BLOCK_TOKENS: usize = 16;
const SEED: u64 = 1;

/// A recorded run.
#[derive(Debug, Clone)]
pub struct Run {
    /// File and line it was read from.
    place: String,
    system: String,
    model: String,
    dataset: String,
    requests: usize,
    input_tokens: u64,
    output_tokens: u64,
    /// Requests in flight at most; `None` for no limit.
    concurrency: Option<usize>,
    recorded: Reading,
}

/// What is compared.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Reading {
    /// From the first request to the last token, in seconds.
    pub duration_s: f64,
    /// Mean time to the first token, in milliseconds.
    pub mean_ttft_ms: f64,
    /// Mean time per output token, in milliseconds.
    pub mean_tpot_ms: f64,
    /// Mean time to the last token, in milliseconds, where it was recorded.
    pub mean_e2e_ms: Option<f64>,
}

/// `--preset` without a name.
pub const ALL: &str = "all";

/// The runs that the presets were made from.
const SEED_RUNS: &str = include_str!("../../seed_runs.csv");

/// Reads recorded runs, from a file or the program's own, and prints the table of those of one preset, or of [`ALL`]. Returns how many runs were simulated.
///
/// # Errors
/// A file that cannot be read, columns that are missing, figures that are none; a preset that nobody knows, or that no run is of.
pub fn compare(path: Option<&Path>, name: &str) -> anyhow::Result<usize> {
    let runs = match path {
        Some(path) => {
            let text =
                std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
            read(&text).with_context(|| path.display().to_string())?
        }
        None => read(SEED_RUNS)?,
    };
    let runs = of_preset(runs, name)?;
    println!("{}", heading());
    let mut ratios: BTreeMap<&str, Vec<Reading>> = BTreeMap::new();
    for run in &runs {
        match run.engine() {
            Ok(preset) => {
                let simulated = run.simulate(preset);
                println!("{}", run.line(preset.name, &simulated));
                ratios.entry(preset.name).or_default().push(simulated.over(&run.recorded));
            }
            Err(reason) => println!("{}", run.unexplained(reason)),
        }
    }
    println!("\n{}", summary_heading());
    ratios.iter().for_each(|(name, ratios)| println!("{}", summary(name, ratios)));
    Ok(ratios.values().map(Vec::len).sum())
}

/// Those of the preset of that name; of all, those without one as well.
fn of_preset(runs: Vec<Run>, name: &str) -> anyhow::Result<Vec<Run>> {
    if name == ALL {
        return Ok(runs);
    }
    let wanted = preset(name).map_err(|unknown| anyhow::anyhow!("--preset: {unknown}"))?;
    let is_of = |run: &Run| run.engine().is_ok_and(|preset| preset.name == wanted.name);
    let known: BTreeSet<_> = runs.iter().filter_map(|run| run.engine().ok()).map(|one| one.name).collect();
    let found: Vec<_> = runs.into_iter().filter(is_of).collect();
    let known: Vec<_> = known.into_iter().collect();
    anyhow::ensure!(
        !found.is_empty(),
        "--preset: no recorded run is of {name}; there are runs of {}",
        known.join(", ")
    );
    Ok(found)
}

fn read(text: &str) -> anyhow::Result<Vec<Run>> {
    let mut lines = text.lines();
    let names: Vec<&str> = lines.next().unwrap_or_default().split(',').collect();
    let rows = (2..).zip(lines).filter(|(_, line)| !line.trim().is_empty());
    rows.map(|(number, line)| {
        let row: HashMap<&str, &str> = names.iter().copied().zip(line.split(',')).collect();
        Run::of(&row).with_context(|| format!("line {number}"))
    })
    .collect()
}

impl Run {
    fn of(row: &HashMap<&str, &str>) -> anyhow::Result<Self> {
        let text = |name: &str| row.get(name).copied().with_context(|| format!("there is no column {name}"));
        let optional = |name: &str| anyhow::Ok(text(name)?.parse::<f64>().ok());
        let number = |name: &str| optional(name)?.with_context(|| format!("{name} is not a number"));
        let whole = |name: &str| anyhow::Ok(number(name)? as u64);
        Ok(Self {
            place: format!("{} {}", &text("seed_file")?.chars().take(3).collect::<String>(), text("line")?),
            system: text("system")?.to_owned(),
            model: text("model")?.to_owned(),
            dataset: text("dataset")?.to_owned(),
            requests: usize::try_from(whole("successful")?)?,
            input_tokens: whole("total_input")?,
            output_tokens: whole("total_generated")?,
            concurrency: optional("concurrency_limit")?.map(|limit| limit as usize),
            recorded: Reading {
                duration_s: number("duration_s")?,
                mean_ttft_ms: number("mean_ttft_ms")?,
                mean_tpot_ms: number("mean_tpot_ms")?,
                mean_e2e_ms: optional("mean_e2e_ms")?,
            },
        })
    }

    /// The preset it is of, or why there is none.
    fn engine(&self) -> Result<&'static EnginePreset, &'static str> {
        let has = |part: &str| self.model.to_lowercase().contains(part);
        let name = match () {
            () if has("qwen3-8b") => "qwen3-8b",
            () if has("qwen3-32b") => "qwen3-32b",
            () if has("qwen3-30b-a3b") => "qwen3-30b-a3b",
            () if has("qwen3-235b-a22b") => "qwen3-235b-a22b",
            () if self.system == "vllm" && self.dataset.starts_with("fixed-length") => "vllm-chunked",
            () if has("gpt-oss") => return Err(GPT_OSS),
            () if has("qwen2.5-0.5b") => return Err(HALF_BILLION),
            () if self.system.contains("router") => return Err(ROUTERS),
            () => return Err(NOT_STATED),
        };
        preset(name).map_err(|_| "the preset has been renamed")
    }

    /// Runs it.
    fn simulate(&self, preset: &EnginePreset) -> Reading {
        let mut workload = Workload::named(&self.place);
        for (input_tokens, output_tokens) in lengths::of(self, SEED) {
            workload.push(Draft { input_tokens, output_tokens, ..Draft::default() }, []);
        }
        let build = Build {
            preset,
            block_tokens: BLOCK_TOKENS,
            blocks: preset.kv_tokens / BLOCK_TOKENS,
            pace: Pace::EVEN,
            kv_bytes_per_s: f64::INFINITY,
            queued_tokens_limit: usize::MAX,
            max_adapters: usize::MAX,
        };
        drive(&workload, &mut ScheduledEngine::new(&build), self.concurrency.unwrap_or(usize::MAX))
    }

    fn line(&self, preset: &str, simulated: &Reading) -> String {
        let Self { place, dataset, requests, recorded, .. } = self;
        let (input, output) = (self.input_tokens / *requests as u64, self.output_tokens / *requests as u64);
        let pair = |recorded: f64, simulated: f64| {
            format!("{recorded:>9.1} {simulated:>9.1} {:>5.2}", simulated / recorded)
        };
        let dataset: String = dataset.chars().take(12).collect();
        format!(
            "{place:<9} {preset:<16} {dataset:<12} {requests:>6} {input:>7} {output:>6}  {}  {}  {}",
            pair(recorded.duration_s, simulated.duration_s),
            pair(recorded.mean_ttft_ms / 1e3, simulated.mean_ttft_ms / 1e3),
            pair(recorded.mean_tpot_ms, simulated.mean_tpot_ms),
        )
    }

    fn unexplained(&self, reason: &str) -> String {
        let Self { place, system, model, dataset, requests, recorded, .. } = self;
        let name = if model.starts_with('(') { system } else { model };
        format!("{place:<9} {name}, {dataset}, {requests} requests, {:.1} s: {reason}", recorded.duration_s)
    }
}

const GPT_OSS: &str = "no model of this kind explains it: with 1,024 tokens in and out a token took 2 s (20b), with 2,000 in and 6,000 out, \
                       so with more context, 0.24 s; no step time that grows with batch and context does both";
const HALF_BILLION: &str = "no preset: half a second in all, mostly waiting for the first tokens; a single run tells no coefficients";
const ROUTERS: &str = "no preset: the model and its GPU are not stated, and three routers in front of the same engine differ threefold";
const NOT_STATED: &str = "no preset: model, engine limits and arrivals are not stated";

/// Sends everything, `limit` at a time, and waits for the end.
fn drive(workload: &Workload, engine: &mut ScheduledEngine, limit: usize) -> Reading {
    let count = workload.requests.len();
    let (mut sent_ns, mut first_ns, mut done_ns) = (vec![0; count], vec![0; count], vec![0; count]);
    let mut next = 0;
    let mut notices = Vec::new();
    let mut free = limit.min(count);
    let mut now_ns = 0;
    loop {
        while free > 0 && next < count {
            sent_ns[next] = now_ns;
            engine.submit(workload, u32::try_from(next).unwrap_or(u32::MAX), Part::Whole, now_ns);
            (next, free) = (next + 1, free - 1);
        }
        let Some(at_ns) = engine.next_ns() else { break };
        now_ns = at_ns;
        engine.advance(workload, &mut notices);
        for notice in notices.drain(..) {
            match notice {
                Notice::FirstToken { request, .. } => first_ns[request as usize] = now_ns,
                Notice::Done { request } => {
                    done_ns[request as usize] = now_ns;
                    free += 1;
                }
            }
        }
    }
    let ms = |from: &[u64], to: &[u64], at: usize| (to[at] - from[at]) as f64 / 1e6;
    let mean = |values: Vec<f64>| values.iter().sum::<f64>() / values.len().max(1) as f64;
    let tpot = (0..count).filter_map(|at| {
        let more = workload.requests[at].output_tokens.checked_sub(1).filter(|more| *more > 0)?;
        Some(ms(&first_ns, &done_ns, at) / f64::from(more))
    });
    Reading {
        duration_s: now_ns as f64 / 1e9,
        mean_ttft_ms: mean((0..count).map(|at| ms(&sent_ns, &first_ns, at)).collect()),
        mean_tpot_ms: mean(tpot.collect()),
        mean_e2e_ms: Some(mean((0..count).map(|at| ms(&sent_ns, &done_ns, at)).collect())),
    }
}

impl Reading {
    /// Each figure over `other`'s.
    fn over(&self, other: &Self) -> Self {
        Self {
            duration_s: self.duration_s / other.duration_s,
            mean_ttft_ms: self.mean_ttft_ms / other.mean_ttft_ms,
            mean_tpot_ms: self.mean_tpot_ms / other.mean_tpot_ms,
            mean_e2e_ms: self.mean_e2e_ms.zip(other.mean_e2e_ms).map(|(own, other)| own / other),
        }
    }
}

fn heading() -> String {
    let pair = |what: &str| format!("{what:>9} {:>9} {:>5}", "simulated", "ratio");
    format!(
        "{:<9} {:<16} {:<12} {:>6} {:>7} {:>6}  {}  {}  {}",
        "run",
        "preset",
        "dataset",
        "reqs",
        "in",
        "out",
        pair("time s"),
        pair("TTFT s"),
        pair("TPOT ms"),
    )
}

/// A figure of a ratio, and what it goes by.
type Column = (&'static str, fn(&Reading) -> Option<f64>);

const COLUMNS: [Column; 4] = [
    ("time", |ratio| Some(ratio.duration_s)),
    ("TTFT", |ratio| Some(ratio.mean_ttft_ms)),
    ("TPOT", |ratio| Some(ratio.mean_tpot_ms)),
    ("E2E", |ratio| ratio.mean_e2e_ms),
];

fn summary_heading() -> String {
    let columns = COLUMNS.map(|(what, _)| format!("{:>22}", format!("{what}: mean, range")));
    format!("{:<16} {:>5} {}", "preset", "runs", columns.join(""))
}

fn summary(name: &str, ratios: &[Reading]) -> String {
    let columns = COLUMNS.map(|(_, read)| {
        let values: Vec<f64> = ratios.iter().filter_map(read).collect();
        let (least, most) = values
            .iter()
            .fold((f64::INFINITY, 0.0_f64), |(least, most), value| (least.min(*value), most.max(*value)));
        if values.is_empty() {
            return format!("{:>22}", "not recorded");
        }
        let mean = geometric_mean(values);
        format!("{:>22}", format!("{mean:.2}, {least:.2} to {most:.2}"))
    });
    format!("{name:<16} {:>5} {}", ratios.len(), columns.join(""))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs() -> Vec<Run> {
        read(SEED_RUNS).unwrap()
    }

    #[test]
    fn runs_of_one_preset_are_asked_for_by_its_name() {
        let of = |name| of_preset(runs(), name).map(|runs| runs.len());
        assert_eq!(of(ALL).unwrap(), 52);
        assert!((1..39).contains(&of("qwen3-8b").unwrap()));
        let unknown = of("qwen4").unwrap_err().to_string();
        assert!(unknown.starts_with("--preset: ") && unknown.contains("qwen3-32b"), "{unknown}");
    }

    #[test]
    fn every_recorded_run_has_a_preset_or_a_reason() {
        let runs = runs();
        let explained = runs.iter().filter(|run| run.engine().is_ok()).count();
        assert_eq!((runs.len(), explained), (52, 39));
        assert!(read("seed_file,line\n002.txt,1\n").unwrap_err().to_string().contains("line 2"));
    }

    /// The residuals of durations that the presets were fitted with (`design/bench.md`), and a few percent for lengths that are
    /// not known.
    #[test]
    fn simulated_runs_take_as_long_as_recorded_ones() {
        let small =
            |run: &&Run| run.output_tokens <= 1_000_000 && run.engine().is_ok_and(|it| it.name == "qwen3-8b");
        let runs = runs();
        let mut seen = 0;
        for run in runs.iter().filter(small) {
            let ratio = run.simulate(run.engine().unwrap()).over(&run.recorded);
            assert!((0.9..1.1).contains(&ratio.duration_s), "{}: {ratio:?}", run.place);
            seen += 1;
        }
        assert_eq!(seen, 1, "500 requests of 6,000 and 2,000 tokens");
    }

    #[test]
    fn no_more_are_sent_at_a_time_than_were() {
        let mut run = runs().into_iter().find(|run| run.dataset.starts_with("fixed-length")).unwrap();
        (run.requests, run.input_tokens, run.output_tokens) = (6, 600, 60);
        let preset = run.engine().unwrap();
        let together = run.simulate(preset).mean_ttft_ms;
        run.concurrency = Some(1);
        let alone = run.simulate(preset);
        assert!(alone.mean_ttft_ms < together, "{alone:?} and {together}");
        assert!(alone.duration_s * 1e3 > 6.0 * alone.mean_ttft_ms);
    }
}
