//! The command line of `bench overhead`.
//!
//! Next on the path: [`crate::overhead`].

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::beside::Neighbour;
use super::machine::Core;
use super::mocks::Pacing;
use super::spin::Waiting;

/// Everything `bench overhead` takes.
#[derive(Debug, Clone, Args)]
pub struct OverheadArgs {
    /// The router under test.
    #[command(flatten)]
    pub router: RouterArgs,
    /// What is sent to it.
    #[command(flatten)]
    pub load: LoadArgs,
    /// Append one JSON line with every figure to this file
    #[arg(long, value_name = "FILE")]
    pub output_file: Option<PathBuf>,
    /// Free text kept in the JSON line
    #[arg(long)]
    pub tag: Option<String>,
}

/// The router under test.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Router")]
pub struct RouterArgs {
    /// Where the router serves, e.g. http://127.0.0.1:30000; without it the mocks are measured directly
    #[arg(long, value_name = "URL")]
    pub base_url: Option<String>,
    /// Process whose CPU and memory are read, with all that it started
    #[arg(long, value_name = "PID", conflicts_with_all = ["pid_file", "command"], requires = "base_url")]
    pub pid: Option<u32>,
    /// File that holds the number of the process, or will
    #[arg(long, value_name = "FILE", conflicts_with = "command", requires = "base_url")]
    pub pid_file: Option<PathBuf>,
    /// Command that starts the router, given to sh behind `exec`; {workers} becomes the mocks' URLs with commas between
    /// them, {worker_list} with spaces. It is ended when the measurement is over
    #[arg(long, value_name = "COMMAND", requires = "base_url")]
    pub command: Option<String>,
    /// File for what --command prints; without it that is thrown away
    #[arg(long, value_name = "FILE", requires = "command")]
    pub router_log: Option<PathBuf>,
    /// Core for --command, or any
    #[arg(long, value_name = "CORE", default_value = "0")]
    pub router_core: Core,
    /// Core for the generator and the mocks together, or any
    #[arg(long, value_name = "CORE", default_value = "1")]
    pub core: Core,
    /// What the generator does while there is nothing to do
    #[arg(long, value_enum, default_value_t = Waiting::Spin)]
    pub waiting: Waiting,
    /// Loopback ports of the mock workers
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "19001,19002,19003,19004")]
    pub mock_ports: Vec<u16>,
    /// Serve the mock workers until killed, and measure nothing
    #[arg(long, conflicts_with_all = ["base_url"])]
    pub mocks_only: bool,
    /// Another router that runs before the same mock workers; may be given several times. All are loaded in turn, and compared
    #[arg(long, value_name = "NAME=PID=URL", requires = "base_url")]
    pub beside: Vec<Neighbour>,
    /// Seconds to wait for the router's first answer
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0)]
    pub wait: f64,
    /// Name for the report [default: the URL]
    #[arg(long)]
    pub name: Option<String>,
    /// Version of the router, for the JSON line
    #[arg(long, value_name = "TEXT")]
    pub router_version: Option<String>,
}

/// What is sent.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Load")]
pub struct LoadArgs {
    /// Parts to measure [default: all]
    #[arg(long, value_enum, value_name = "LIST", value_delimiter = ',')]
    pub only: Vec<Part>,
    /// Sizes of the JSON bodies in KB (1,024 bytes)
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "1,16,200")]
    pub sizes: Vec<usize>,
    /// Keep-alive connections of the closed loop, and of the flooding streams
    #[arg(long, value_name = "N", default_value_t = 32)]
    pub connections: usize,
    /// Seconds of load before each window
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0)]
    pub warmup: f64,
    /// Seconds of each window
    #[arg(long, value_name = "SECONDS", default_value_t = 5.0)]
    pub duration: f64,
    /// Requests a second at which latency is measured
    #[arg(long, value_name = "N", default_value_t = 500)]
    pub rate: u32,
    /// Paced streams open together
    #[arg(long, value_name = "N", default_value_t = 50)]
    pub streams: u32,
    /// Milliseconds between two chunks of a paced stream
    #[arg(long, value_name = "MS", default_value_t = 20)]
    pub chunk_interval_ms: u32,
    /// Which paced streams speak together
    #[arg(long, value_enum, default_value_t = Pacing::Steps)]
    pub pacing: Pacing,
    /// Chunks of a flooding stream
    #[arg(long, value_name = "N", default_value_t = 1000)]
    pub flood_chunks: u32,
    /// 1-KB requests before memory is read again
    #[arg(long, value_name = "N", default_value_t = 100_000)]
    pub rss_requests: u64,
    /// Turns of each router where there are several (--beside)
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub turns: usize,
    /// Seconds of such a turn
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0)]
    pub turn: f64,
    /// Streams that are held open without a chunk
    #[arg(long, value_name = "N", default_value_t = 5_000)]
    pub idle_streams: usize,
}

/// The parts of the measurement, in the order in which they are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// Memory after many requests
    Rss,
    /// Requests a second and CPU of each, by size
    Rates,
    /// CPU of a request beside other routers, by size
    Beside,
    /// Latency at a fixed rate
    Latency,
    /// CPU of a chunk of paced streams
    Paced,
    /// CPU of a chunk of flooding streams
    Flood,
    /// Memory of a stream that says nothing
    Idle,
}

impl LoadArgs {
    /// Whether a part is to be measured.
    pub fn includes(&self, part: Part) -> bool {
        self.only.is_empty() || self.only.contains(&part)
    }
}

impl OverheadArgs {
    /// Checks what clap cannot.
    ///
    /// # Errors
    /// All problems at once, one a line, each naming the flag and what would be right.
    pub fn validate(&self) -> anyhow::Result<()> {
        let (router, load) = (&self.router, &self.load);
        let mut problems = Vec::new();
        for (flag, seconds, least) in [
            ("--wait", router.wait, 0.0),
            ("--warmup", load.warmup, 0.0),
            ("--duration", load.duration, 0.1),
            ("--turn", load.turn, 0.1),
        ] {
            if !(least..=3600.0).contains(&seconds) {
                problems.push(format!("{flag} must be between {least} and 3600 seconds"));
            }
        }
        for (flag, is_zero) in [
            ("--mock-ports", router.mock_ports.is_empty()),
            ("--sizes", load.sizes.contains(&0)),
            ("--connections", load.connections == 0),
            ("--rate", load.rate == 0),
            ("--streams", load.streams == 0),
            ("--chunk-interval-ms", load.chunk_interval_ms == 0),
            ("--flood-chunks", load.flood_chunks == 0),
            ("--turns", load.turns == 0),
        ] {
            if is_zero {
                problems.push(format!("{flag} must be at least 1"));
            }
        }
        if problems.is_empty() { Ok(()) } else { Err(anyhow::anyhow!(problems.join("\n       "))) }
    }
}
