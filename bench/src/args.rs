//! The command line of `bench`, spelled as SGLang's `bench_serving` spells it wherever that has the flag.
//!
//! Knows nothing of HTTP or of datasets' contents; the next on the path is [`crate::run`].

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::arrivals::RequestRate;
use crate::overhead::args::OverheadArgs;
use crate::simulate::args::SimulateArgs;
use crate::soak::SoakArgs;
use crate::statistics::Goodput;

/// The whole command line.
#[derive(Debug, Parser)]
#[command(name = "bench", version, about = "Benchmarks for engines and routers that speak OpenAI HTTP")]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Send a workload to an OpenAI-speaking server and print the result table
    Serve(Box<ServeArgs>),
    /// Measure what a router costs: CPU, latency and memory, before mock workers of this program's own
    Overhead(Box<OverheadArgs>),
    /// Send at a fixed rate for long, while workers are killed and come back
    Soak(SoakArgs),
    /// Ask what a policy would do: the router's own decisions over simulated workers, on a trace
    Simulate(SimulateArgs),
}

/// Everything `bench serve` takes.
#[derive(Debug, Clone, Args)]
pub struct ServeArgs {
    /// Where to send.
    #[command(flatten)]
    pub target: TargetArgs,
    /// How to send.
    #[command(flatten)]
    pub traffic: TrafficArgs,
    /// What to send.
    #[command(flatten)]
    pub dataset: DatasetArgs,
    /// What each request carries besides its prompt.
    #[command(flatten)]
    pub request: RequestArgs,
    /// What to print and write.
    #[command(flatten)]
    pub report: ReportArgs,
}

/// Where to send.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Target")]
pub struct TargetArgs {
    /// Server to measure, e.g. http://127.0.0.1:30000 (plain http; a trailing /v1 is accepted)
    #[arg(long, value_name = "URL", conflicts_with_all = ["host", "port"])]
    pub base_url: Option<String>,
    /// Host, when --base-url is not given
    #[arg(long, default_value = "127.0.0.1")]
    pub host: String,
    /// Port, when --base-url is not given (30000 is the router's and SGLang's)
    #[arg(long, default_value_t = 30000)]
    pub port: u16,
    /// Model name to ask for [default: the first of /v1/models]
    #[arg(long)]
    pub model: Option<String>,
    /// Which of the OpenAI endpoints to use, under the names the originals print
    #[arg(long, value_enum, default_value_t = Backend::SglangOaiChat)]
    pub backend: Backend,
    /// Directory with tokenizer.json (or that file): exact prompt lengths and retokenized counts. Without it prompt
    /// lengths are approximated by counting words, and the output says so
    #[arg(long, value_name = "DIR")]
    pub tokenizer: Option<PathBuf>,
    /// Header to add to every request, repeatable, e.g. --header "x-tenant: blue"
    #[arg(long = "header", value_name = "K:V", value_parser = parse_header)]
    pub headers: Vec<(String, String)>,
    /// Longest a request may take, connect to last byte, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 21_600.0)] // the originals' 6 hours
    pub timeout: f64,
}

/// How to send.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Traffic")]
pub struct TrafficArgs {
    /// Conversations to send (a conversation is one request unless it has turns) [default: 1000; for shared-prefix
    /// groups × prompts per group]
    #[arg(long)]
    pub num_prompts: Option<usize>,
    /// Requests started per second, Poisson; inf starts all at once
    #[arg(long, value_name = "RPS", default_value = "inf", value_parser = parse_request_rate)]
    pub request_rate: RequestRate,
    /// Most conversations in flight; waiting for it is measured and reported apart
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_concurrency: Option<u32>,
    /// Seed of prompts, lengths and arrivals: the same seed sends the same run
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Requests sent before the clock starts, with the first prompt and at most 32 output tokens
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub warmup_requests: u32,
    /// POST /flush_cache after the warm-up
    #[arg(long)]
    pub flush_cache: bool,
}

/// What to send.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Dataset")]
pub struct DatasetArgs {
    /// Kind of workload
    #[arg(long, value_enum, default_value_t = DatasetName::Random)]
    pub dataset_name: DatasetName,
    /// File of the sharegpt dataset (JSON) or the openai dataset (JSONL)
    #[arg(long, value_name = "FILE")]
    pub dataset_path: Option<PathBuf>,
    /// random: longest prompt in tokens
    #[arg(long, value_name = "TOKENS", default_value_t = 1024)]
    pub random_input_len: u64,
    /// random: longest output in tokens
    #[arg(long, value_name = "TOKENS", default_value_t = 1024)]
    pub random_output_len: u64,
    /// random: lengths are uniform in [len × ratio, len]; 1 makes them all equal
    #[arg(long, value_name = "RATIO", default_value_t = 0.0)]
    pub random_range_ratio: f64,
    /// shared-prefix: number of groups
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub gsp_num_groups: usize,
    /// shared-prefix: conversations that share a group's prefix
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub gsp_prompts_per_group: usize,
    /// shared-prefix: length of the shared prefix in tokens
    #[arg(long, value_name = "TOKENS", default_value_t = 2048)]
    pub gsp_system_prompt_len: u64,
    /// shared-prefix: length of each question in tokens
    #[arg(long, value_name = "TOKENS", default_value_t = 128)]
    pub gsp_question_len: u64,
    /// shared-prefix: output tokens of each answer
    #[arg(long, value_name = "TOKENS", default_value_t = 256)]
    pub gsp_output_len: u64,
    /// shared-prefix: turns of each conversation
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub gsp_num_turns: usize,
    /// shared-prefix: keep each group's prompts together instead of shuffling them
    #[arg(long)]
    pub gsp_ordered: bool,
    /// multi-turn: turns of each conversation; every turn is a request that carries the real replies before it
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub multi_turn_num_turns: usize,
    /// multi-turn: length of each conversation's own system message in tokens (0: none)
    #[arg(long, value_name = "TOKENS", default_value_t = 0)]
    pub multi_turn_system_len: u64,
    /// multi-turn: length of each user message in tokens
    #[arg(long, value_name = "TOKENS", default_value_t = 128)]
    pub multi_turn_question_len: u64,
    /// multi-turn: output tokens of each reply
    #[arg(long, value_name = "TOKENS", default_value_t = 128)]
    pub multi_turn_output_len: u64,
    /// Pause between a reply and the next turn of the same conversation, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 0)]
    pub turn_delay_ms: u64,
    /// sharegpt: output tokens of every request, instead of the recorded answer's length
    #[arg(long, value_name = "TOKENS")]
    pub sharegpt_output_len: Option<u64>,
    /// sharegpt: drop requests whose prompt and output together are longer
    #[arg(long, value_name = "TOKENS")]
    pub sharegpt_context_len: Option<u64>,
    /// sharegpt: prune as vLLM does (4 ≤ prompt ≤ 1024, output ≥ 4, together ≤ 2048); without it only conversations
    /// under 2 tokens go, as in SGLang
    #[arg(long)]
    pub sharegpt_prune: bool,
}

/// What each request carries besides its prompt.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Requests")]
pub struct RequestArgs {
    /// Let the model end early: do not send ignore_eos
    #[arg(long)]
    pub disable_ignore_eos: bool,
    /// JSON object merged into every request body, e.g. '{"temperature": 0.7}'
    #[arg(long, value_name = "JSON", value_parser = parse_object)]
    pub extra_request_body: Option<JsonObject>,
    /// Ask for whole answers instead of streams (TTFT is then the whole latency)
    #[arg(long)]
    pub disable_stream: bool,
    /// Send x-session-id, one value for each conversation
    #[arg(long)]
    pub send_session_id: bool,
}

/// What to print and write.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Report")]
pub struct ReportArgs {
    /// Whose table and JSON keys
    #[arg(long, value_enum, default_value_t = Style::Sglang)]
    pub style: Style,
    /// Append one JSON line with the result to this file
    #[arg(long, value_name = "FILE")]
    pub output_file: Option<PathBuf>,
    /// Add lengths, TTFTs, ITLs, texts and errors of every request to the JSON line
    #[arg(long)]
    pub output_details: bool,
    /// vllm style: metrics to print, of ttft, tpot, itl, e2el [default: ttft,tpot,itl]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub percentile_metrics: Option<Vec<Metric>>,
    /// vllm style: percentiles to print [default: 99]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub metric_percentiles: Option<Vec<f64>>,
    /// Objectives in milliseconds that make a request good, e.g. --goodput ttft:500 tpot:50 e2el:5000
    #[arg(long, value_name = "METRIC:MS", num_args = 1.., value_parser = parse_objective)]
    pub goodput: Vec<(GoodputMetric, f64)>,
    /// Accepted for scripts that pass it: cached tokens are always collected and reported
    #[arg(long)]
    pub cache_report: bool,
    /// No progress bar
    #[arg(long)]
    pub disable_tqdm: bool,
    /// Free text kept in the JSON line
    #[arg(long)]
    pub tag: Option<String>,
}

/// A JSON object given on the command line.
pub type JsonObject = serde_json::Map<String, serde_json::Value>;

/// The endpoint, under the names of SGLang's and vLLM's benchmarks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Backend {
    /// /v1/chat/completions
    SglangOaiChat,
    /// /v1/completions
    SglangOai,
    /// /v1/chat/completions
    VllmChat,
    /// /v1/completions
    Vllm,
    /// /v1/chat/completions
    OpenaiChat,
    /// /v1/completions
    Openai,
}

/// One of the two OpenAI generation endpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Api {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completions,
}

impl Backend {
    /// The endpoint behind the name.
    pub fn api(self) -> Api {
        match self {
            Self::SglangOaiChat | Self::VllmChat | Self::OpenaiChat => Api::Chat,
            Self::SglangOai | Self::Vllm | Self::Openai => Api::Completions,
        }
    }

    /// The name as typed and as printed.
    pub fn name(self) -> String {
        value_name(&self)
    }
}

/// The kinds of workload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DatasetName {
    /// Unrelated prompts of random words and lengths
    Random,
    /// Groups of prompts that share a long prefix
    #[value(alias = "generated-shared-prefix")]
    SharedPrefix,
    /// Conversations whose history grows with the real replies
    MultiTurn,
    /// First exchanges of the conversations in a ShareGPT file
    Sharegpt,
    /// Request bodies from a JSONL file
    Openai,
}

impl DatasetName {
    /// The name as typed and as printed.
    pub fn name(self) -> String {
        value_name(&self)
    }
}

/// Whose table and JSON keys to print.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Style {
    /// As `sglang.bench_serving`
    Sglang,
    /// As `vllm bench serve`
    Vllm,
}

/// A latency metric of the vLLM table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Metric {
    /// Time to the first token
    Ttft,
    /// Time per output token after the first
    Tpot,
    /// Gaps between tokens
    Itl,
    /// End-to-end latency
    E2el,
}

/// A metric that `--goodput` can bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GoodputMetric {
    /// Time to the first token
    Ttft,
    /// Time per output token after the first
    Tpot,
    /// End-to-end latency
    E2el,
}

fn value_name<V: ValueEnum>(value: &V) -> String {
    value.to_possible_value().map(|v| v.get_name().to_owned()).unwrap_or_default()
}

fn parse_request_rate(text: &str) -> Result<RequestRate, String> {
    match text.parse::<f64>() {
        Ok(rate) if rate.is_infinite() && rate > 0.0 => Ok(RequestRate::Infinite),
        Ok(rate) if rate > 0.0 => Ok(RequestRate::PerSecond(rate)),
        _ => Err("expected a number above 0, or inf".to_owned()),
    }
}

fn parse_header(text: &str) -> Result<(String, String), String> {
    let (key, value) = text
        .split_once([':', '='])
        .ok_or_else(|| "expected NAME:VALUE, for example x-tenant:blue".to_owned())?;
    Ok((key.trim().to_owned(), value.trim().to_owned()))
}

fn parse_object(text: &str) -> Result<JsonObject, String> {
    serde_json::from_str(text).map_err(|error| format!("expected a JSON object: {error}"))
}

fn parse_objective(text: &str) -> Result<(GoodputMetric, f64), String> {
    let expected = || "expected ttft:MS, tpot:MS or e2el:MS with milliseconds of at least 0".to_owned();
    let (name, limit) = text.split_once(':').ok_or_else(expected)?;
    let metric = match name {
        "ttft" => GoodputMetric::Ttft,
        "tpot" => GoodputMetric::Tpot,
        "e2el" => GoodputMetric::E2el,
        _ => return Err(expected()),
    };
    let limit_ms: f64 = limit.parse().map_err(|_| expected())?;
    if limit_ms >= 0.0 { Ok((metric, limit_ms)) } else { Err(expected()) }
}

impl ServeArgs {
    /// Checks what clap cannot: values and combinations.
    ///
    /// # Errors
    /// All problems at once, one a line, each naming the flag and what would be right.
    pub fn validate(&self) -> anyhow::Result<()> {
        let mut problems = Vec::new();
        self.check_dataset(&mut problems);
        self.check_report(&mut problems);
        if !(self.target.timeout > 0.0 && self.target.timeout.is_finite()) {
            problems.push("--timeout must be a number of seconds above 0".to_owned());
        }
        for key in ["model", "messages", "prompt", "stream", "stream_options"] {
            if self.request.extra_request_body.as_ref().is_some_and(|body| body.contains_key(key)) {
                problems
                    .push(format!("--extra-request-body must not set {key}: the benchmark sets it itself"));
            }
        }
        if problems.is_empty() { Ok(()) } else { Err(anyhow::anyhow!(problems.join("\n       "))) }
    }

    fn check_dataset(&self, problems: &mut Vec<String>) {
        let dataset = &self.dataset;
        let mut at_least_one = |flag: &str, value: u64| {
            if value == 0 {
                problems.push(format!("{flag} must be at least 1"));
            }
        };
        at_least_one("--num-prompts", self.traffic.num_prompts.map_or(1, |n| n as u64));
        match dataset.dataset_name {
            DatasetName::Random => {
                at_least_one("--random-input-len", dataset.random_input_len);
                at_least_one("--random-output-len", dataset.random_output_len);
            }
            DatasetName::SharedPrefix => {
                at_least_one("--gsp-num-groups", dataset.gsp_num_groups as u64);
                at_least_one("--gsp-prompts-per-group", dataset.gsp_prompts_per_group as u64);
                at_least_one("--gsp-system-prompt-len", dataset.gsp_system_prompt_len);
                at_least_one("--gsp-question-len", dataset.gsp_question_len);
                at_least_one("--gsp-output-len", dataset.gsp_output_len);
                at_least_one("--gsp-num-turns", dataset.gsp_num_turns as u64);
            }
            DatasetName::MultiTurn => {
                at_least_one("--multi-turn-num-turns", dataset.multi_turn_num_turns as u64);
                at_least_one("--multi-turn-question-len", dataset.multi_turn_question_len);
                at_least_one("--multi-turn-output-len", dataset.multi_turn_output_len);
            }
            DatasetName::Sharegpt | DatasetName::Openai => {}
        }
        if !(0.0..=1.0).contains(&dataset.random_range_ratio) {
            problems.push("--random-range-ratio must be between 0 and 1".to_owned());
        }
        let needs_file = matches!(dataset.dataset_name, DatasetName::Sharegpt | DatasetName::Openai);
        if needs_file && dataset.dataset_path.is_none() {
            problems
                .push(format!("--dataset-name {} needs --dataset-path FILE", dataset.dataset_name.name()));
        }
    }

    fn check_report(&self, problems: &mut Vec<String>) {
        let report = &self.report;
        if report.style == Style::Sglang {
            for (flag, given) in [
                ("--percentile-metrics", report.percentile_metrics.is_some()),
                ("--metric-percentiles", report.metric_percentiles.is_some()),
            ] {
                if given {
                    problems.push(format!("{flag} needs --style vllm: the sglang table has fixed lines"));
                }
            }
        }
        if report.metric_percentiles.iter().flatten().any(|p| !(0.0..=100.0).contains(p)) {
            problems.push("--metric-percentiles must be between 0 and 100".to_owned());
        }
    }

    /// The server's URL, from `--base-url` or from host and port.
    pub fn base_url(&self) -> String {
        self.target.base_url.clone().unwrap_or_else(|| {
            let host = &self.target.host;
            let host = if host.contains(':') { format!("[{host}]") } else { host.clone() };
            format!("http://{host}:{}", self.target.port)
        })
    }

    /// The bounds of `--goodput`; `None` when none was given.
    pub fn goodput(&self) -> Option<Goodput> {
        let limit = |metric| {
            let given = self.report.goodput.iter().rev().find(|(name, _)| *name == metric);
            given.map(|(_, limit_ms)| Duration::from_secs_f64(limit_ms / 1e3))
        };
        (!self.report.goodput.is_empty()).then(|| Goodput {
            ttft: limit(GoodputMetric::Ttft),
            tpot: limit(GoodputMetric::Tpot),
            e2el: limit(GoodputMetric::E2el),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<ServeArgs, clap::Error> {
        let words = ["bench", "serve"].into_iter().chain(line.split_whitespace());
        Cli::try_parse_from(words).map(|cli| match cli.command {
            Command::Serve(args) => *args,
            Command::Overhead(_) | Command::Soak(_) | Command::Simulate(_) => {
                panic!("parsed serve as something else")
            }
        })
    }

    #[test]
    fn accepts_the_command_line_of_the_original() {
        let args = parse(
            "--backend sglang-oai-chat --base-url http://h:1 --dataset-name generated-shared-prefix --seed 7 \
             --num-prompts 5 --request-rate 20 --max-concurrency 4 --goodput ttft:500 tpot:50 --output-file o.jsonl",
        )
        .unwrap();
        assert_eq!(args.dataset.dataset_name, DatasetName::SharedPrefix);
        assert_eq!(args.traffic.request_rate, RequestRate::PerSecond(20.0));
        assert_eq!(args.goodput().unwrap().ttft, Some(Duration::from_millis(500)));
        assert_eq!(args.goodput().unwrap().e2el, None);
        args.validate().unwrap();
    }

    #[test]
    fn names_all_problems_at_once() {
        let args = parse("--dataset-name sharegpt --random-range-ratio 2 --metric-percentiles 99").unwrap();
        let message = args.validate().unwrap_err().to_string();
        for part in ["--dataset-path", "--random-range-ratio", "--style vllm"] {
            assert!(message.contains(part), "{part} missing in {message}");
        }
    }

    #[test]
    fn refuses_values_that_mean_nothing() {
        for line in
            ["--request-rate 0", "--request-rate nan", "--goodput itl:5", "--goodput ttft:-1", "--header x"]
        {
            assert!(parse(line).is_err(), "{line} was accepted");
        }
        assert!(parse("--base-url http://a --port 1").is_err());
        assert!(parse("--backend sglang").is_err(), "the native /generate protocol is not spoken");
    }

    #[test]
    fn builds_the_url_of_an_ipv6_host() {
        assert_eq!(parse("--host ::1 --port 8001").unwrap().base_url(), "http://[::1]:8001");
    }
}
