//! The command line of `bench`, spelled as SGLang's `bench_serving` spells it wherever that has the flag.
//!
//! Knows nothing of HTTP or of datasets' contents; the next on the path is [`crate::run`].

pub mod validate;
pub mod values;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::arrivals::{Arrivals, Burstiness, RampStrategy};
use crate::knee::KneeArgs;
use crate::overhead::args::OverheadArgs;
use crate::simulate::args::SimulateArgs;
use crate::size::SizeArgs;
use crate::soak::SoakArgs;
use crate::statistics::Goodput;
use crate::sweep::SweepArgs;
pub use values::{Api, Backend, DatasetName, GoodputMetric, JsonObject, Metric, RequestRate, Style};
use values::{parse_burstiness, parse_header, parse_object, parse_objective, parse_rate, parse_request_rate};

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
    /// Run a grid of concurrency × input length and show it as one table and one plot
    Sweep(Box<SweepArgs>),
    /// Find the highest request rate at which a server still meets its objectives
    Knee(Box<KneeArgs>),
    /// Measure what a router costs: CPU, latency and memory, before mock workers of this program's own
    Overhead(Box<OverheadArgs>),
    /// Send at a fixed rate for long, while workers are killed and come back
    Soak(SoakArgs),
    /// Ask what a policy would do: the router's own decisions over simulated workers, on a trace
    Simulate(Box<SimulateArgs>),
    /// Ask how many workers a policy needs for some traffic or, with --workers, how much traffic these carry; simulated
    Size(Box<SizeArgs>),
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
    /// groups × prompts per group; for openai, trace and azure the whole file]
    #[arg(long)]
    pub num_prompts: Option<usize>,
    /// Conversations started per second; inf starts all at once
    #[arg(long, value_name = "RPS", default_value = "inf", value_parser = parse_request_rate)]
    pub request_rate: RequestRate,
    /// Shape of the gamma distribution that the gaps between starts have: 1 is Poisson, less comes in bursts, more is more
    /// even, inf makes all gaps equal
    #[arg(long, value_name = "SHAPE", default_value = "1", value_parser = parse_burstiness)]
    pub burstiness: Burstiness,
    /// Let the rate change from the first conversation to the last, in place of --request-rate
    #[arg(long, value_enum, requires_all = ["ramp_up_start_rps", "ramp_up_end_rps"])]
    pub ramp_up_strategy: Option<RampStrategy>,
    /// Rate at the beginning of the ramp
    #[arg(long, value_name = "RPS", requires = "ramp_up_strategy", value_parser = parse_rate)]
    pub ramp_up_start_rps: Option<f64>,
    /// Rate at the end of the ramp
    #[arg(long, value_name = "RPS", requires = "ramp_up_strategy", value_parser = parse_rate)]
    pub ramp_up_end_rps: Option<f64>,
    /// Start each request of a trace or azure dataset when the trace says, in place of --request-rate
    #[arg(long)]
    pub use_trace_timestamps: bool,
    /// How fast time goes by in the trace: 2 replays it in half the time
    #[arg(long, value_name = "FACTOR", requires = "use_trace_timestamps", value_parser = parse_rate)]
    pub trace_speed: Option<f64>,
    /// Most conversations in flight; waiting for it is measured and reported apart
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_concurrency: Option<u32>,
    /// Seed of prompts, lengths and arrivals: the same seed sends the same run
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Requests sent before the clock starts, with a prompt of their own, as long as the first, and at most 32 output tokens
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
    /// File of the dataset: sharegpt (JSON), openai and trace (JSONL), azure (CSV)
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
    /// trace, azure: drop requests whose prompt and output together are longer
    #[arg(long, value_name = "TOKENS")]
    pub trace_context_len: Option<u64>,
    /// trace: tokens of the block that each of the hash_ids stands for
    #[arg(long, value_name = "TOKENS", default_value_t = 512)] // as the Mooncake traces are published
    pub trace_block_len: u64,
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

impl ServeArgs {
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
            given.and_then(|(_, limit_ms)| values::time(limit_ms / 1e3))
        };
        (!self.report.goodput.is_empty()).then(|| Goodput {
            ttft: limit(GoodputMetric::Ttft),
            tpot: limit(GoodputMetric::Tpot),
            e2el: limit(GoodputMetric::E2el),
        })
    }

    /// When conversations start.
    pub fn arrivals(&self) -> Arrivals {
        let traffic = &self.traffic;
        let burstiness = traffic.burstiness;
        if traffic.use_trace_timestamps {
            return Arrivals::Trace { speed: traffic.trace_speed.unwrap_or(1.0) };
        }
        let ramp = (traffic.ramp_up_strategy, traffic.ramp_up_start_rps, traffic.ramp_up_end_rps);
        match (ramp, traffic.request_rate) {
            ((Some(strategy), Some(start_rate), Some(end_rate)), _) => {
                Arrivals::Ramp { strategy, start_rate, end_rate, burstiness }
            }
            (_, RequestRate::Infinite) => Arrivals::Infinite,
            (_, RequestRate::PerSecond(rate)) => Arrivals::Steady { rate, burstiness },
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn parse(line: &str) -> Result<ServeArgs, clap::Error> {
        let words = ["bench", "serve"].into_iter().chain(line.split_whitespace());
        Cli::try_parse_from(words).map(|cli| match cli.command {
            Command::Serve(args) => *args,
            _ => panic!("parsed serve as something else"),
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
        for line in [
            "--request-rate 0",
            "--request-rate nan",
            "--burstiness 0",
            "--goodput itl:5",
            "--goodput ttft:-1",
            "--goodput ttft:1e300",
            "--goodput tpot:inf",
            "--header x",
        ] {
            assert!(parse(line).is_err(), "{line} was accepted");
        }
        assert!(parse("--base-url http://a --port 1").is_err());
        assert!(parse("--backend sglang").is_err(), "the native /generate protocol is not spoken");
    }

    #[test]
    fn refuses_times_that_no_clock_can_be_moved_by() {
        for (line, flag) in [
            ("--timeout 1e300", "--timeout"),
            ("--timeout inf", "--timeout"),
            ("--turn-delay-ms 18446744073709551615", "--turn-delay-ms"),
        ] {
            let message = parse(line).unwrap().validate().unwrap_err().to_string();
            assert!(message.contains(flag), "{line}: {message}");
        }
    }

    #[test]
    fn arrivals_are_those_of_the_flags() {
        let arrivals = |line: &str| {
            let args = parse(line).unwrap();
            args.validate().unwrap();
            args.arrivals()
        };
        let steady = |burstiness| Arrivals::Steady { rate: 2.0, burstiness };
        assert_eq!(arrivals(""), Arrivals::Infinite);
        assert_eq!(arrivals("--request-rate 2"), steady(Burstiness::Shape(1.0)));
        assert_eq!(arrivals("--request-rate 2 --burstiness 0.5"), steady(Burstiness::Shape(0.5)));
        assert_eq!(arrivals("--request-rate 2 --burstiness inf"), steady(Burstiness::Constant));
        assert_eq!(
            arrivals("--ramp-up-strategy exponential --ramp-up-start-rps 1 --ramp-up-end-rps 8"),
            Arrivals::Ramp {
                strategy: RampStrategy::Exponential,
                start_rate: 1.0,
                end_rate: 8.0,
                burstiness: Burstiness::Shape(1.0)
            }
        );
        let trace = "--dataset-name trace --dataset-path t --use-trace-timestamps";
        assert_eq!(arrivals(trace), Arrivals::Trace { speed: 1.0 });
        assert_eq!(arrivals(&format!("{trace} --trace-speed 10")), Arrivals::Trace { speed: 10.0 });
    }

    #[test]
    fn refuses_arrivals_that_contradict_one_another() {
        for line in ["--ramp-up-strategy linear", "--ramp-up-end-rps 5", "--trace-speed 2"] {
            assert!(parse(line).is_err(), "{line} was accepted");
        }
        let ramp = "--ramp-up-strategy linear --ramp-up-start-rps 1 --ramp-up-end-rps 8";
        for (line, part) in [
            ("--use-trace-timestamps".to_owned(), "--dataset-name trace or azure"),
            ("--burstiness 2".to_owned(), "--request-rate"),
            (format!("{ramp} --request-rate 2"), "--request-rate"),
            (
                "--dataset-name trace --dataset-path t --use-trace-timestamps --request-rate 2".to_owned(),
                "--request-rate",
            ),
        ] {
            let message = parse(&line).unwrap().validate().unwrap_err().to_string();
            assert!(message.contains(part), "{line}: {message}");
        }
    }

    #[test]
    fn builds_the_url_of_an_ipv6_host() {
        assert_eq!(parse("--host ::1 --port 8001").unwrap().base_url(), "http://[::1]:8001");
    }
}
