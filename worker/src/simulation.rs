//! A worker that plays a recorded engine: which, how fast, with which words, and what it says of itself.
//!
//! A simulated worker never passes for a real one: its model id, `/v1/models`, `/server_info`, `/metrics` and the log
//! say what it is. Next: [`backend::timing`](crate::backend::timing) plays it.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use roundhouse_text::Tokenizer;
use serde_json::{Value, json};
use worker_core::timing::{EnginePreset, UnknownPreset, preset};

use crate::backend::timing::{Lateness, Pace};
use crate::engine::{AwakeCore, Engine, Precedence};

/// Bytes of KV a second between simulated engines: 200 Gb/s. Assumed, not measured.
const FETCHED_BYTES_PER_S: f64 = 25e9;

/// What computes.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub enum BackendChoice {
    /// The model, on the CPU.
    #[default]
    Cpu,
    /// The model, on the first GPU.
    Cuda,
    /// The first GPU if there is one that can be used, otherwise the CPU.
    Auto,
    /// Nothing: steps take as long as they took a recorded engine.
    Timing(&'static EnginePreset),
}

/// A name that is no backend's.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum UnknownBackend {
    /// None of them.
    #[error("unknown backend {0:?}; there are auto, cuda, cpu, and timing:PRESET")]
    Name(String),
    /// A preset that there is not.
    #[error(transparent)]
    Preset(#[from] UnknownPreset),
}

impl FromStr for BackendChoice {
    type Err = UnknownBackend;

    /// `auto`, `cuda`, `cpu`, or `timing:` and the name of a preset.
    fn from_str(text: &str) -> Result<Self, UnknownBackend> {
        match text.split_once(':') {
            Some(("timing", name)) => Ok(Self::Timing(preset(name)?)),
            _ if text == "cpu" => Ok(Self::Cpu),
            _ if text == "cuda" => Ok(Self::Cuda),
            _ if text == "auto" => Ok(Self::Auto),
            _ => Err(UnknownBackend::Name(text.to_owned())),
        }
    }
}

impl fmt::Display for BackendChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda => f.write_str("cuda"),
            Self::Auto => f.write_str("auto"),
            Self::Timing(preset) => write!(f, "timing:{}", preset.name),
        }
    }
}

/// What is simulated, and how well.
#[derive(Clone, Debug)]
pub struct Simulation {
    /// The engine.
    pub preset: &'static EnginePreset,
    /// Each step takes so many times as long.
    pub time_scale: f64,
    /// How late its steps were.
    pub lateness: Arc<Lateness>,
    /// What the system gives the thread that keeps their time.
    pub precedence: Precedence,
}

impl Simulation {
    /// Of that engine, with nothing counted.
    #[must_use]
    pub fn new(preset: &'static EnginePreset, time_scale: f64) -> Self {
        Self { preset, time_scale, lateness: Arc::default(), precedence: Precedence::default() }
    }

    /// The engine's times.
    #[must_use]
    pub fn pace(&self) -> Pace {
        Pace { timing: self.preset.timing, time_scale: self.time_scale }
    }

    /// What fetching a token's KV from another such engine takes.
    #[must_use]
    pub fn fetch_token(&self) -> Duration {
        let seconds = self.preset.kv_token_bytes as f64 / FETCHED_BYTES_PER_S;
        Duration::from_secs_f64(seconds * self.time_scale)
    }

    /// Asks for precedence for the thread that keeps the time, unless steps are so short that it spins through them.
    #[must_use]
    pub fn on(mut self, engine: &Engine) -> Self {
        if self.pace().is_slept_through() {
            self.precedence = engine.take_precedence();
        }
        self
    }

    /// For people.
    #[must_use]
    pub fn describe(&self) -> String {
        let core = self.precedence.core.as_ref();
        let core = core.map(|core| format!(" on core {}, kept awake while steps are due", core.number()));
        format!(
            "SIMULATED compute: {} ({}), time scale {}, clock with {} priority{}; its text is random words",
            self.preset.name,
            self.preset.about,
            self.time_scale,
            self.precedence.priority,
            core.unwrap_or_default()
        )
    }

    /// For `/server_info`.
    #[must_use]
    pub fn info(&self) -> Value {
        json!({
            "preset": self.preset.name,
            "about": self.preset.about,
            "time_scale": self.time_scale,
            "clock_priority": self.precedence.priority.to_string(),
            "clock_core": self.precedence.core.as_ref().map(core_info),
            "step_lateness": self.lateness.summary(),
        })
    }

    /// For `/metrics`.
    #[must_use]
    pub fn metrics(&self) -> String {
        let lateness = self.lateness.summary();
        let (name, preset, scale) = ("worker:simulated_step_lateness", self.preset.name, self.time_scale);
        format!(
            "# HELP worker:simulated_info Compute is simulated: steps take as long as a recorded engine's.\n\
             # TYPE worker:simulated_info gauge\n\
             worker:simulated_info{{preset=\"{preset}\",time_scale=\"{scale}\"}} 1\n\
             # HELP {name}_seconds How late simulated steps were.\n\
             # TYPE {name}_seconds summary\n\
             {name}_seconds{{quantile=\"0.5\"}} {}\n\
             {name}_seconds{{quantile=\"0.99\"}} {}\n\
             {name}_seconds{{quantile=\"1\"}} {}\n\
             {name}_seconds_sum {}\n\
             {name}_seconds_count {}\n\
             # HELP {name}_ratio The same as a share of the step.\n\
             # TYPE {name}_ratio gauge\n\
             {name}_ratio{{quantile=\"0.5\"}} {}\n\
             {name}_ratio{{quantile=\"0.99\"}} {}\n",
            lateness.p50_ms / 1e3,
            lateness.p99_ms / 1e3,
            lateness.max_ms / 1e3,
            lateness.sum_s,
            lateness.steps,
            lateness.p50_percent_of_step / 100.0,
            lateness.p99_percent_of_step / 100.0,
        )
    }
}

/// Which core, and whether it is kept awake right now.
fn core_info(core: &AwakeCore) -> Value {
    json!({"number": core.number(), "kept_awake": core.is_kept_awake()})
}

/// Tokens to draw from: whole words with the space before them, so that their text read again gives about the same
/// tokens. A vocabulary without such words gives what letters it has.
#[must_use]
pub fn plain_words(tokenizer: &Tokenizer, end_tokens: &[u32]) -> Vec<u32> {
    let ids = 0..u32::try_from(tokenizer.vocab_size()).unwrap_or(u32::MAX);
    let texts: Vec<(u32, String)> = ids
        .filter(|id| !end_tokens.contains(id))
        .filter_map(|id| Some((id, tokenizer.decode(&[id]).ok()?)))
        .collect();
    let chosen = |fits: fn(&str) -> bool| -> Vec<u32> {
        texts.iter().filter(|(_, text)| fits(text)).map(|(id, _)| *id).collect()
    };
    let is_word = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_lowercase());
    let words =
        texts.iter().filter(|(_, text)| text.strip_prefix(' ').is_some_and(is_word)).map(|(id, _)| *id);
    let words: Vec<u32> = words.collect();
    if words.is_empty() { chosen(|text| text.chars().any(char::is_alphanumeric)) } else { words }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{ModelFiles, ModelSource};

    #[test]
    fn backends_are_read_and_named() {
        for name in ["auto", "cuda", "cpu"] {
            assert_eq!(name.parse::<BackendChoice>().unwrap().to_string(), name);
        }
        let timing: BackendChoice = "timing:qwen3-8b".parse().unwrap();
        assert_eq!(timing.to_string(), "timing:qwen3-8b");
        for (text, expected) in [
            ("gpu", "unknown backend \"gpu\"; there are auto, cuda, cpu, and timing:PRESET"),
            ("timing:x", "vllm-chunked"),
        ] {
            let said = text.parse::<BackendChoice>().unwrap_err().to_string();
            assert!(said.contains(expected), "{said}");
        }
    }

    #[test]
    fn the_builtin_models_words_read_back_as_themselves() {
        let files = ModelFiles::open(&ModelSource::Builtin).unwrap();
        let tokenizer = Tokenizer::from_json(files.tokenizer.as_deref().unwrap().as_bytes()).unwrap();
        let words = plain_words(&tokenizer, &[2]);
        assert!(words.len() > 300, "{}", words.len());
        let text = tokenizer.decode(&words).unwrap();
        let again = tokenizer.encode(&text, roundhouse_text::SpecialTokenPolicy::Omit).unwrap();
        let same = again.iter().zip(&words).filter(|(again, word)| again == word).count();
        assert!(same * 100 > words.len() * 98, "{same} of {}", words.len());
    }
}
