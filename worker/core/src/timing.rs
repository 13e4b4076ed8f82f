//! How long an engine takes for a step: what simulated workers wait and what the simulator adds up.
//!
//! A formula over what a batch holds, with coefficients fitted to recorded runs (`design/bench.md`, "Timing model of an
//! engine"). Knows no clock, and decides nothing: the scheduler makes the batch. Next: the worker's timing backend, and
//! the simulator.

use std::time::Duration;

use crate::scheduler::{GrowthReserve, PrefillOrder, SchedulerLimits};
use crate::step::{Batch, SequenceStep};

/// Sequences beyond which a recorded engine left its captured graphs: each one more costs [`EngineTiming::crowd_s`] too.
const CROWD_SEQUENCES: usize = 256;

/// What of a batch costs time.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct StepLoad {
    /// B: sequences that decode.
    pub decoding: usize,
    /// K: tokens that the decoding sequences attend to, the one that is run included.
    pub context_tokens: usize,
    /// T: tokens of prompts that are run, those found in the cache left out.
    pub prefill_tokens: usize,
    /// Σ Lᵢ·(cᵢ + Lᵢ/2): pairs of tokens that the prompts' attention looks at; L run in this step, c before them.
    pub prefill_pairs: f64,
}

impl StepLoad {
    /// What `batch` amounts to.
    ///
    /// What does not decode is prefill: prompts, their chunks, and what a retracted sequence computes again.
    #[must_use]
    pub fn of(batch: &Batch) -> Self {
        let mut load = Self::default();
        for step in &batch.sequences {
            load.add(step);
        }
        load
    }

    fn add(&mut self, step: &SequenceStep) {
        let tokens = step.tokens.len();
        if step.decodes {
            self.decoding += 1;
            self.context_tokens += step.context_tokens + 1;
        } else {
            self.prefill_tokens += tokens;
            self.prefill_pairs += tokens as f64 * (step.context_tokens as f64 + tokens as f64 / 2.0);
        }
    }
}

/// The coefficients of an engine, all in seconds.
///
/// A decode step takes `a + b·B + b2·max(0, B − 256) + g·K`, a prefill step `d + p·T + q·Σ Lᵢ·(cᵢ + Lᵢ/2)`.
///
/// A step that does both takes `max(a, d + p·T + q·Σ…) + b·B + b2·max(0, B − 256) + g·K`: the weights are read once,
/// behind the prompts' arithmetic, and what each decoding sequence costs comes on top. Recorded in seed 004: with 64
/// prompts of 10,000 tokens in chunks of 512, 640,000 tokens took 792 s, 634 ms a step; this rule gives 633 ms and 1 ms
/// for each sequence that decodes beside them (about five), the sum of both formulas 685 ms.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct EngineTiming {
    /// a: a decode step, whatever is in it.
    pub decode_s: f64,
    /// b: each sequence that decodes.
    pub sequence_s: f64,
    /// b2: each of them beyond 256, on top.
    pub crowd_s: f64,
    /// g: each token of context of the sequences that decode.
    pub context_token_s: f64,
    /// d: a prefill step, whatever is in it.
    pub prefill_s: f64,
    /// p: each token of a prompt.
    pub prefill_token_s: f64,
    /// q: each pair of tokens that a prompt's attention looks at.
    pub prefill_pair_s: f64,
    /// What a request waits outside of steps before it can be scheduled; other requests do not wait with it.
    pub request_s: f64,
}

impl EngineTiming {
    /// How long `batch` takes.
    #[must_use]
    pub fn step(&self, batch: &Batch) -> Duration {
        Duration::from_secs_f64(self.load_seconds(&StepLoad::of(batch)))
    }

    /// The same in seconds, of a batch that has been summed up. Nothing takes no time.
    #[must_use]
    pub fn load_seconds(&self, load: &StepLoad) -> f64 {
        let prefill = if load.prefill_tokens == 0 {
            0.0
        } else {
            self.prefill_s
                + self.prefill_token_s * load.prefill_tokens as f64
                + self.prefill_pair_s * load.prefill_pairs
        };
        if load.decoding == 0 {
            return prefill;
        }
        prefill.max(self.decode_s)
            + self.sequence_s * load.decoding as f64
            + self.crowd_s * load.decoding.saturating_sub(CROWD_SEQUENCES) as f64
            + self.context_token_s * load.context_tokens as f64
    }

    /// What a request waits outside of steps, before it can be scheduled.
    #[must_use]
    pub fn request(&self) -> Duration {
        Duration::from_secs_f64(self.request_s)
    }
}

/// A recorded engine: its times, its KV, and how it was configured.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct EnginePreset {
    /// What it is asked for by.
    pub name: &'static str,
    /// Which engine on which run, for people.
    pub about: &'static str,
    /// Its times.
    pub timing: EngineTiming,
    /// Longest prompt and answer together that it takes.
    pub context_tokens: usize,
    /// M: tokens whose KV it has room for.
    pub kv_tokens: usize,
    /// Bytes of a token's KV, over all layers.
    pub kv_token_bytes: usize,
    /// Sequences in a step at most.
    pub max_running: usize,
    /// Tokens in a step at most.
    pub max_tokens_per_step: usize,
    /// Whether prompts run beside decodes, or before them.
    pub prefill: PrefillOrder,
    /// Room it leaves for running sequences to grow into.
    pub reserve: Option<GrowthReserve>,
    /// Whether a prompt finds what another one computes in the same step.
    pub shares_within_steps: bool,
}

impl EnginePreset {
    /// How its scheduler is configured.
    #[must_use]
    pub fn limits(&self) -> SchedulerLimits {
        let Self { max_running, max_tokens_per_step, prefill, reserve, shares_within_steps, .. } = *self;
        let max_adapters = usize::MAX;
        SchedulerLimits {
            max_running,
            max_tokens_per_step,
            prefill,
            reserve,
            max_adapters,
            shares_within_steps,
        }
    }
}

const MS: f64 = 1e-3;
const US: f64 = 1e-6;
const NS: f64 = 1e-9;

/// Bytes of a token's keys and values in bf16, with heads of 128.
const fn kv_token_bytes(layers: usize, kv_heads: usize) -> usize {
    2 * 2 * 128 * layers * kv_heads
}

/// `max_position_embeddings` of the four.
const QWEN3_CONTEXT_TOKENS: usize = 40_960;

/// `SGLang` v0.5.1 as in seed 002: prompts first, in chunks of 8,192 tokens.
const fn sglang(
    name: &'static str,
    about: &'static str,
    (kv_tokens, kv_token_bytes): (usize, usize),
    timing: EngineTiming,
) -> EnginePreset {
    // Its own default: 512 sequences for each context length of 40,960 that fits, from 2,048 to 4,096.
    let by_memory = kv_tokens * 512 / QWEN3_CONTEXT_TOKENS;
    let max_running = if by_memory > 4_096 { 4_096 } else { by_memory };
    let prefill = PrefillOrder::First;
    let reserve = Some(GrowthReserve::SGLANG);
    EnginePreset {
        name,
        about,
        timing,
        context_tokens: QWEN3_CONTEXT_TOKENS,
        kv_tokens,
        kv_token_bytes,
        max_running,
        max_tokens_per_step: 8_192,
        prefill,
        reserve,
        shares_within_steps: false,
    }
}

/// Every preset.
pub const PRESETS: &[EnginePreset] = &[
    sglang(
        "qwen3-8b",
        "Qwen3-8B, SGLang v0.5.1, one GPU",
        (417_000, kv_token_bytes(36, 8)),
        EngineTiming {
            decode_s: 11.3 * MS,
            sequence_s: 0.030 * MS,
            crowd_s: 0.060 * MS,
            context_token_s: 0.088 * US,
            prefill_s: 30.0 * MS,
            prefill_token_s: 0.061 * MS,
            prefill_pair_s: 0.91 * NS,
            request_s: 0.0,
        },
    ),
    sglang(
        "qwen3-32b",
        "Qwen3-32B, SGLang v0.5.1, two GPUs",
        (296_000, kv_token_bytes(64, 8)),
        EngineTiming {
            decode_s: 23.8 * MS,
            sequence_s: 0.044 * MS,
            crowd_s: 0.088 * MS,
            context_token_s: 0.094 * US,
            prefill_s: 100.0 * MS,
            prefill_token_s: 0.140 * MS,
            prefill_pair_s: 0.76 * NS,
            request_s: 0.0,
        },
    ),
    sglang(
        "qwen3-30b-a3b",
        "Qwen3-30B-A3B, SGLang v0.5.1, two GPUs",
        (726_000, kv_token_bytes(48, 4)),
        EngineTiming {
            decode_s: 5.9 * MS,
            sequence_s: 0.090 * MS,
            crowd_s: 0.0,
            context_token_s: 0.046 * US,
            prefill_s: 10.0 * MS,
            prefill_token_s: 0.0137 * MS,
            prefill_pair_s: 0.53 * NS,
            request_s: 0.0,
        },
    ),
    sglang(
        "qwen3-235b-a22b",
        "Qwen3-235B-A22B, SGLang v0.5.1, eight GPUs",
        (200_000, kv_token_bytes(94, 4)),
        EngineTiming {
            decode_s: 12.1 * MS,
            sequence_s: 0.041 * MS,
            crowd_s: 0.041 * MS,
            context_token_s: 0.146 * US,
            prefill_s: 100.0 * MS,
            prefill_token_s: 0.123 * MS,
            prefill_pair_s: 0.70 * NS,
            request_s: 0.0,
        },
    ),
    EnginePreset {
        name: "vllm-chunked",
        about: "a slow engine under vLLM, prompts in chunks of 512 tokens beside decodes (seed 004; decode as recorded up to \
                32 sequences)",
        timing: EngineTiming {
            decode_s: 47.3 * MS,
            // 1.03 ms a sequence were recorded at about 130 tokens of context each, which stand in `context_token_s` here.
            sequence_s: 0.97 * MS,
            crowd_s: 0.0,
            // Least squares over the runs of one sequence of 10,000 to 128,000 tokens, through 48.3 ms at none; -23 … +7 %.
            context_token_s: 0.45 * US,
            // TTFT(L) = 0.247 + 8.37e-4·L + 3.83e-8·L² s: the constant delayed nobody else's tokens, so it is not a step's.
            prefill_s: 0.0,
            prefill_token_s: 0.837 * MS,
            prefill_pair_s: 76.6 * NS,
            request_s: 0.247,
        },
        // Prompts of up to 128,000 tokens were recorded.
        context_tokens: 131_072,
        // Not recorded: room for the most that was sent at once, 64 prompts of 10,000 tokens, so that nothing is retracted.
        kv_tokens: 700_000,
        // Not recorded either: that of an 8B model.
        kv_token_bytes: kv_token_bytes(36, 8),
        max_running: 256,
        max_tokens_per_step: 512,
        prefill: PrefillOrder::Mixed,
        reserve: None,
        // Seen with vLLM 0.32, by what it calls cached.
        shares_within_steps: true,
    },
];

/// A name that is no preset's.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("unknown engine preset {name:?}; there are {}", names())]
pub struct UnknownPreset {
    /// What was asked for.
    pub name: String,
}

fn names() -> String {
    PRESETS.iter().map(|preset| preset.name).collect::<Vec<_>>().join(", ")
}

/// The preset of that name.
///
/// # Errors
/// [`UnknownPreset`], which lists the names there are.
pub fn preset(name: &str) -> Result<&'static EnginePreset, UnknownPreset> {
    let known = PRESETS.iter().find(|preset| preset.name == name);
    known.ok_or_else(|| UnknownPreset { name: name.to_owned() })
}

#[cfg(test)]
mod tests;
