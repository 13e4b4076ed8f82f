//! The machine: which core runs what, how many descriptors there are, what a result has to say of it.

use std::fs;
use std::process::Command;

use anyhow::Context;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CpuSet, sched_setaffinity};
use serde::Serialize;

/// Where a thread may run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Core {
    /// Wherever the system likes.
    Any,
    /// On this core only.
    Number(usize),
}

impl std::str::FromStr for Core {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            Ok(number) if number < CpuSet::MAX_CPU => Ok(Self::Number(number)),
            _ if text == "any" => Ok(Self::Any),
            _ => Err("expected the number of a core, or any".to_owned()),
        }
    }
}

impl std::fmt::Display for Core {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Any => f.write_str("any"),
            Self::Number(number) => number.fmt(f),
        }
    }
}

/// Keeps this thread, and whatever it starts from now on, on a core.
///
/// # Errors
/// There is no such core.
pub fn pin_to(core: Core) -> anyhow::Result<()> {
    let mut cores = CpuSet::new();
    match core {
        Core::Any => (0..CpuSet::MAX_CPU).for_each(|number| cores.set(number)),
        Core::Number(number) => cores.set(number),
    }
    sched_setaffinity(None, &cores).with_context(|| match core {
        Core::Any => "cannot run on any core".to_owned(),
        Core::Number(number) => format!("cannot run on core {number}; `any` asks for none in particular"),
    })
}

/// Raises the limit of open files as far as it goes; the limit.
pub fn raise_open_files() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// What a result says of where it was made.
#[derive(Debug, Clone, Serialize)]
pub struct Machine {
    /// Name of the processor.
    pub cpu_model: Option<String>,
    /// Cores of the machine, by `/proc/cpuinfo`.
    pub cores: usize,
    /// Version of the kernel.
    pub kernel: Option<String>,
    /// Load average of the last minute when the measurement began: on a busy machine the figures mean little.
    pub load_average: Option<f64>,
}

impl Machine {
    /// This machine.
    pub fn this() -> Self {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = cpuinfo.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
        let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
        Self {
            cpu_model: model.map(|(_, name)| name.trim().to_owned()),
            cores: cpuinfo.lines().filter(|line| line.starts_with("processor")).count(),
            kernel: fs::read_to_string("/proc/sys/kernel/osrelease").ok().map(|text| text.trim().to_owned()),
            load_average: load.split(' ').next().and_then(|load| load.parse().ok()),
        }
    }
}

/// The commit of the working directory, `-dirty` when it holds changes; nothing outside a repository.
pub fn commit() -> Option<String> {
    let output =
        Command::new("git").args(["describe", "--always", "--dirty", "--abbrev=12"]).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    (output.status.success() && !text.trim().is_empty()).then(|| text.trim().to_owned())
}
