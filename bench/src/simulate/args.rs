//! The command line of `bench simulate`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use worker_core::PrefillOrder;

use super::contender::Splits;
use super::recorded;
use super::workload::generated::Kind;

/// More routers than anybody has.
const MOST_REPLICAS: usize = 1_000;

/// What figures are of, unless their trace's name says otherwise.
const USUAL_ENGINE: &str = "qwen3-8b";
const USUAL_TTFT_MS: f64 = 2_000.0;
const USUAL_TPOT_MS: f64 = 100.0;

/// Everything `bench simulate` takes.
#[derive(Debug, Clone, Args)]
pub struct SimulateArgs {
    /// The whole comparison: the traces given, every generated workload, fleets, sizes, loads and seeds as below; judged at the end
    #[arg(long)]
    pub grid: bool,
    /// Traces to follow: JSON lines with timestamp (ms), input_length, output_length and hash_ids of 512-token blocks
    #[arg(long, value_name = "FILES", value_delimiter = ',')]
    pub trace: Vec<PathBuf>,
    /// Azure's traces of arrivals and lengths (TIMESTAMP,ContextTokens,GeneratedTokens); prefixes are made up
    #[arg(long, value_name = "FILES", value_delimiter = ',')]
    pub azure: Vec<PathBuf>,
    /// Generated workloads
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub workload: Vec<Kind>,
    /// At most so many requests of each trace, and so many of each generated workload [default: all, and 6000]
    #[arg(long, value_name = "N")]
    pub requests: Option<usize>,
    /// Engine: plain (one serial prefill server a worker, see design/bench.md), or a preset of recorded ones: qwen3-8b,
    /// qwen3-32b, qwen3-30b-a3b, qwen3-235b-a22b or vllm-chunked
    #[arg(long, value_name = "NAME", default_value = USUAL_ENGINE)]
    pub engine: String,
    /// When engines compute prompts [default: as the preset's did]
    #[arg(long, value_name = "ORDER")]
    pub prefill: Option<Prefill>,
    /// Whether a prompt finds what another one computes in the same step [default: as the preset's did: vLLM's yes, SGLang's no]
    #[arg(long, value_name = "true|false")]
    pub share_within_steps: Option<bool>,
    /// Numbers of workers [default: 8; with --grid 4,8,16]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub workers: Vec<usize>,
    /// Sizes of each worker's cache, in blocks of 512 tokens [default: 2000; with --grid 500,2000,8000]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub blocks: Vec<usize>,
    /// Offered rates over R*, the completions a second of round_robin when offered far more. With --engine plain: utilisation
    /// [default: 0.7,0.9; with --grid 0.7,0.9,1.0,1.2]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub load: Vec<f64>,
    /// Of the workers, so many do nothing but compute prompts, whose KV then goes to those that generate; several to compare [default: 0]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub prefill_workers: Vec<usize>,
    /// Which prompts these compute [default: as each policy's own router does]
    #[arg(long, value_name = "RULE")]
    pub split: Option<Splits>,
    /// What a second that answers stand still counts where the router's own rule says which, against one that a first token is late
    #[arg(long, value_name = "TIMES", default_value_t = Apart::NOBODY.decode_weight)]
    pub split_decode_weight: f64,
    /// How fast KV comes to a worker, in GB/s
    #[arg(long, value_name = "GB/S", default_value_t = Apart::GB_PER_S)]
    pub kv_bandwidth: f64,
    /// Who is compared: names, or all (the router's policies and the oracle). Besides: prefix_aware_reported, prefix_aware_asking, llm_d_adapters, min_ttft,
    /// hash_two_blocks, cache_aware_smallest_tree
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "all")]
    pub policies: Vec<String>,
    /// Speeds of the workers [default: even; with --grid the others too, on the traces]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub fleet: Vec<FleetKind>,
    /// Routers; they share nothing, unless --told-after is given
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub replicas: usize,
    /// Routers tell each other what they send where, and this is after how many milliseconds the others know it, as with the router's --replicas
    #[arg(long, value_name = "MS")]
    pub told_after: Option<u64>,
    /// How a balancer in front of them chooses one for a request
    #[arg(long, value_name = "RULE", value_enum, default_value_t = Front::Random)]
    pub front: Front,
    /// Milliseconds between two reports of a worker's load, for every policy that goes by them [default: the policy's own]
    #[arg(long, value_name = "MS")]
    pub reports_every: Option<u64>,
    /// Routers do not know how large workers' caches are, as before engines that do not say: what an index holds of a worker has no bound then, unless the
    /// policy has one of its own
    #[arg(long)]
    pub unknown_capacity: bool,
    /// Of the sessions, so many percent are of strangers, who give their requests to the first half of the workers, in turn; results leave them out
    #[arg(long, value_name = "PERCENT", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=90))]
    pub strangers: u8,
    /// Each session is for one of so many adapters of the model, the nth of them with a weight of 1/n; 0 for none
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=10_000))]
    pub adapters: u32,
    /// How many adapters an engine computes side by side; requests for others wait in it until one of these has none that runs
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..))]
    pub adapter_places: u32,
    /// A trace whose requests are in the background: all there from the beginning, in its order, and in no figures but `spare tok/s`, the tokens of
    /// prompts and answers of theirs a second until the last of the others is done
    #[arg(long, value_name = "FILE")]
    pub background: Option<PathBuf>,
    /// The router's --background-load: how much of a worker's time and memory these get beside others
    #[arg(long, value_name = "SHARE", default_value_t = 0.25)]
    pub background_load: f64,
    /// In place of that so many clients for each worker send them as requests like others, one after the other each
    #[arg(long, value_name = "N")]
    pub background_clients: Option<usize>,
    /// Routers are told no priorities and tenants of a trace (`priority` and `tenant` of its lines, more going first); figures are by them all the same
    #[arg(long)]
    pub all_alike: bool,
    /// Write into --json what the first router took its workers to have to do, for each of them, as `demand`
    #[arg(long)]
    pub demand: bool,
    /// First seed
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// How many seeds, one after the other, of what is generated; all policies see the same workloads [default: 1; with
    /// --grid 5]
    #[arg(long, value_name = "N")]
    pub seeds: Option<u64>,
    /// Longest time to the first token that counts as good, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = USUAL_TTFT_MS)]
    pub goodput_ttft: f64,
    /// Longest time per output token that counts as good, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = USUAL_TPOT_MS)]
    pub goodput_tpot: f64,
    /// File for the figures, one JSON object a line and a simulation; what it holds is replaced, unless --resume is given
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// File for a page with plots
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// File for one plot (SVG) of all cells together: times over load, geometric means
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Keep what the --json file holds already, and simulate what is missing
    #[arg(long, requires = "json")]
    pub resume: bool,
    /// Simulate recorded runs of real engines (bench/seed_runs.csv), and show both beside each other
    #[arg(long, value_name = "FILE")]
    pub recorded: Option<PathBuf>,
    /// The same of one preset, or of all of them; without --recorded, of the runs of bench/seed_runs.csv, which this program has in it
    #[arg(long, value_name = "NAME", num_args = 0..=1, default_missing_value = recorded::ALL)]
    pub preset: Option<String>,
    /// Simulate nothing: judge files that --json has written
    #[arg(long, value_name = "FILES", value_delimiter = ',')]
    pub judge: Vec<PathBuf>,
    /// Simulations at a time, a core each; they give the same figures whatever their number
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub threads: usize,
}

/// When engines compute prompts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Prefill {
    /// Beside decodes, in chunks.
    Mixed,
    /// Before decodes.
    First,
}

impl From<Prefill> for PrefillOrder {
    fn from(prefill: Prefill) -> Self {
        match prefill {
            Prefill::Mixed => Self::Mixed,
            Prefill::First => Self::First,
        }
    }
}

/// What a balancer in front of several routers goes by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Front {
    /// Nothing.
    Random,
    /// A hash of the session; nothing where a workload has none.
    Session,
    /// A hash of the prompt's first two blocks of 512 tokens.
    Prefix,
}

/// The routers of a simulation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Routers {
    /// How many there are.
    pub count: usize,
    /// Milliseconds after which each knows what another does; `None` if they share nothing.
    pub told_after_ms: Option<u64>,
    /// What stands in front of them.
    pub front: Front,
    /// Milliseconds between two reports of a worker's load; `None` for the policy's own.
    pub reports_every_ms: Option<u64>,
    /// Of a hundred sessions, those of strangers, of which these routers know nothing.
    pub strangers: u8,
    /// Whether they know how large workers' caches are.
    pub know_capacity: bool,
}

impl Routers {
    /// One, and nothing in front of it.
    pub const ONE: Self = Self {
        count: 1,
        told_after_ms: None,
        front: Front::Random,
        reports_every_ms: None,
        strangers: 0,
        know_capacity: true,
    };

    /// What they add to the name of a trace.
    #[must_use]
    pub fn suffix(self) -> String {
        let front = match self.front {
            Front::Random => "",
            Front::Session => "-by-session",
            Front::Prefix => "-by-prefix",
        };
        let told = self.told_after_ms.map_or(String::new(), |ms| format!("-told-after-{ms}-ms"));
        let routers =
            if self.count > 1 { format!("+{}-routers{told}{front}", self.count) } else { String::new() };
        let strangers =
            if self.strangers > 0 { format!("+strangers-{}", self.strangers) } else { String::new() };
        let reports = self.reports_every_ms.map_or(String::new(), |ms| format!("+reports-{ms}-ms"));
        let capacity = if self.know_capacity { "" } else { "+unknown-capacity" };
        [routers.as_str(), &strangers, &reports, capacity].concat()
    }
}

impl SimulateArgs {
    /// What an engine, an objective and what is left out of precedences add to the name of a trace, where they are not the usual ones: figures of
    /// different ones are not to be taken for each other's.
    #[must_use]
    pub fn suffix(&self) -> String {
        let mut suffix = String::new();
        if self.engine != USUAL_ENGINE {
            suffix += &format!("+{}", self.engine);
        }
        match self.prefill {
            None => {}
            Some(Prefill::Mixed) => suffix += "+prefill-mixed",
            Some(Prefill::First) => suffix += "+prefill-first",
        }
        if let Some(shares) = self.share_within_steps {
            suffix += if shares { "+shares-within-steps" } else { "+shares-nothing-within-steps" };
        }
        let (ttft_ms, tpot_ms) = (self.goodput_ttft, self.goodput_tpot);
        if (ttft_ms, tpot_ms) != (USUAL_TTFT_MS, USUAL_TPOT_MS) {
            suffix += &format!("+good-within-{ttft_ms}-and-{tpot_ms}-ms");
        }
        if self.all_alike {
            suffix += "+all-alike";
        }
        suffix
    }
}

/// What becomes of requests in the background.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Background {
    /// Nobody sends them.
    LeftOut,
    /// They get time to spare, and such a share of it beside others.
    Spare(f64),
    /// So many clients for each worker send them as requests like others, one after the other.
    Clients(usize),
}

impl Background {
    /// What it adds to the name of a trace.
    #[must_use]
    pub fn suffix(self) -> String {
        match self {
            Self::LeftOut => String::new(),
            Self::Spare(share) => format!("+spare-{share}"),
            Self::Clients(count) => format!("+{count}-clients"),
        }
    }

    /// The router's share.
    #[must_use]
    pub fn share(self) -> Option<f64> {
        match self {
            Self::Spare(share) => Some(share),
            Self::LeftOut | Self::Clients(_) => None,
        }
    }
}

/// Workers that compute prompts and do nothing else.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Apart {
    /// How many; the first ones.
    pub prefill_workers: usize,
    /// Which prompts they compute, if not those that the policy's own router says.
    pub splits: Option<Splits>,
    /// The router's `--split-decode-weight`.
    pub decode_weight: f64,
    /// How fast KV comes to a worker.
    pub gb_per_s: f64,
}

impl Apart {
    /// A network card of 200 Gb/s for each worker.
    pub const GB_PER_S: f64 = 25.0;
    /// All workers do both.
    pub const NOBODY: Self =
        Self { prefill_workers: 0, splits: None, decode_weight: 1.0, gb_per_s: Self::GB_PER_S };

    /// What they add to the name of a trace.
    #[must_use]
    pub fn suffix(self) -> String {
        let Self { prefill_workers, splits, decode_weight, gb_per_s } = self;
        if prefill_workers == 0 {
            return String::new();
        }
        let rule = splits.and_then(|splits| splits.to_possible_value());
        let rule = rule.map_or(String::new(), |rule| format!("-{}", rule.get_name()));
        let weight = if decode_weight == Self::NOBODY.decode_weight {
            String::new()
        } else {
            format!("-weight-{decode_weight}")
        };
        let speed = if gb_per_s == Self::GB_PER_S { String::new() } else { format!("-{gb_per_s}-GB/s") };
        format!("+{prefill_workers}-prefill{rule}{weight}{speed}")
    }
}

/// How fast the workers of a fleet are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum FleetKind {
    /// All alike.
    Even,
    /// Every other worker takes twice as long for everything.
    HalfSpeed,
    /// The first worker takes four times as long, from a third of the time to two thirds.
    Slowing,
    /// The first worker dies after a third of the time, and is back with an empty cache after half of it.
    Restarting,
}

impl FleetKind {
    /// Those of `--grid`.
    pub const OF_GRID: &[Self] = &[Self::Even, Self::HalfSpeed, Self::Slowing];

    /// Of how few workers there may be one.
    #[must_use]
    pub fn least_workers(self) -> usize {
        match self {
            Self::Even | Self::HalfSpeed | Self::Slowing => 1,
            // Somebody is left when one dies.
            Self::Restarting => 2,
        }
    }

    /// What it adds to the name of a trace.
    #[must_use]
    pub fn suffix(self) -> &'static str {
        match self {
            Self::Even => "",
            Self::HalfSpeed => "+half-speed",
            Self::Slowing => "+slowing",
            Self::Restarting => "+restarting",
        }
    }
}

impl SimulateArgs {
    /// What becomes of requests in the background.
    #[must_use]
    pub fn background(&self) -> Background {
        match (&self.background, self.background_clients) {
            (None, _) => Background::LeftOut,
            (Some(_), Some(clients)) => Background::Clients(clients),
            (Some(_), None) => Background::Spare(self.background_load),
        }
    }

    /// Checks what clap cannot.
    ///
    /// # Errors
    /// All problems at once, each naming the flag and what would be right.
    pub fn validate(&self) -> anyhow::Result<()> {
        let mut problems = Vec::new();
        let bytes_per_s = self.kv_bandwidth * 1e9;
        if !(bytes_per_s > 0.0 && bytes_per_s.is_finite()) {
            problems.push("--kv-bandwidth must be a number above 0, such as 25".to_owned());
        }
        if !(self.split_decode_weight >= 0.0 && self.split_decode_weight.is_finite()) {
            problems.push("--split-decode-weight must be a number of at least 0, such as 1".to_owned());
        }
        let apart = self.prefill_workers.iter().any(|count| *count > 0);
        if apart && (self.engine == "plain" || self.fleet.contains(&FleetKind::Restarting)) {
            problems
                .push("--prefill-workers go with neither --engine plain nor --fleet restarting".to_owned());
        }
        if !(self.background_load > 0.0 && self.background_load <= 1.0) {
            problems.push("--background-load must be above 0 and at most 1, such as 0.25".to_owned());
        }
        if self.background.is_some() && (apart || self.told_after.is_some() || self.engine == "plain") {
            problems.push(
                "--background goes with none of --told-after, --prefill-workers and --engine plain"
                    .to_owned(),
            );
        }
        for (flag, values) in [("--workers", &self.workers), ("--blocks", &self.blocks)] {
            if values.contains(&0) {
                problems.push(format!("{flag} must be numbers of at least 1"));
            }
        }
        if self.load.iter().any(|load| !(*load > 0.0 && load.is_finite())) {
            problems.push("--load must be numbers above 0, such as 0.7,0.9".to_owned());
        }
        for (flag, value) in [("--threads", self.threads), ("--replicas", self.replicas)] {
            if value == 0 {
                problems.push(format!("{flag} must be at least 1"));
            }
        }
        if self.replicas > MOST_REPLICAS {
            problems.push(format!("--replicas must be at most {MOST_REPLICAS}"));
        }
        if self.strangers > 0
            && (self.told_after.is_some() || apart || self.fleet.contains(&FleetKind::Restarting))
        {
            problems.push(
                "--strangers go with none of --told-after, --prefill-workers and --fleet restarting"
                    .to_owned(),
            );
        }
        if self.reports_every == Some(0) {
            problems.push("--reports-every must be at least 1".to_owned());
        }
        if self.requests == Some(0) {
            problems.push("--requests must be at least 1".to_owned());
        }
        if self.engine == "plain" && (self.grid || self.fleet.iter().any(|kind| *kind != FleetKind::Even)) {
            problems.push("--engine plain knows no other --fleet than even, and no --grid".to_owned());
        }
        if self.seeds == Some(0) {
            problems.push("--seeds must be at least 1".to_owned());
        }
        let names_nothing = self.trace.is_empty() && self.azure.is_empty() && self.workload.is_empty();
        let asks_else =
            self.grid || !self.judge.is_empty() || self.recorded.is_some() || self.preset.is_some();
        if names_nothing && !asks_else {
            problems.push(
                "nothing to simulate: give --trace FILE, --azure FILE, --workload NAME, --grid, --recorded FILE \
                 or --preset"
                    .to_owned(),
            );
        }
        if problems.is_empty() { Ok(()) } else { Err(anyhow::anyhow!(problems.join("\n       "))) }
    }
}
