//! SmolLM2 (or any Llama of safetensors) on our CPU backend and on candle's, in turn, round by round: prefill and decode in tokens a
//! second. candle computes in f32, as it does on CPUs; ours keeps weights in bf16 and sums in f32.
//!
//! `cargo run --release -- DIRECTORY [THREADS]`; the directory has `config.json` and `model.safetensors`.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Context;
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::llama::{Cache, Config, Llama, LlamaConfig};
use worker::backend::CpuBackend;
use worker::model::{Model, ModelSource};
use worker_core::sampling::SamplingParams;
use worker_core::step::{Backend, Batch, BlockId, KvCapacity, SampleRequest, SequenceId, SequenceStep};

const ROUNDS: usize = 5;
const BLOCK_TOKENS: usize = 16;
const SEQUENCES: usize = 32;
/// Positions of each sequence at most.
const CONTEXT_TOKENS: usize = 2_048;
/// Tokens of one of our prefill steps, as the engine chunks them.
const CHUNK_TOKENS: usize = 512;
const DECODE_STEPS: usize = 32;

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let directory = arguments.next().context("name a model directory")?;
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let threads = arguments.next().map(|text| text.parse()).transpose()?.unwrap_or(cores);
    // candle computes on rayon's global pool.
    rayon::ThreadPoolBuilder::new().num_threads(threads).build_global()?;
    let mut ours = Ours::open(&directory, threads)?;
    let candle = Candle::open(Path::new(&directory))?;
    println!("{directory}, {threads} threads, {ROUNDS} rounds, medians of tokens a second\n");
    println!("| | ours | candle f32 | ours ÷ candle |\n|---|---|---|---|");
    for tokens in [64, 512, 1_024] {
        row(&format!("prefill {tokens}"), tokens, || ours.prefill(tokens), || candle.prefill(tokens))?;
    }
    for at in [16, 512] {
        row(&format!("decode at {at}"), DECODE_STEPS, || ours.decode(1, at), || candle.decode(at))?;
    }
    let mut rates = Vec::new();
    for sequences in [1, 8, 32] {
        let mut rounds = Vec::new();
        for _ in 0..ROUNDS {
            rounds.push((sequences * DECODE_STEPS) as f64 / ours.decode(sequences, 64)?);
        }
        rates.push((sequences, median(&mut rounds)));
    }
    println!("\nours, sequences side by side at 64: tokens a second together, and against one");
    for (sequences, rate) in &rates {
        println!("{sequences:3}: {rate:8.1}  {:.2}", rate / rates[0].1);
    }
    Ok(())
}

/// Runs both in turn and prints a line.
fn row(
    what: &str,
    tokens: usize,
    mut ours: impl FnMut() -> anyhow::Result<f64>,
    mut candle: impl FnMut() -> anyhow::Result<f64>,
) -> anyhow::Result<()> {
    let (mut one, mut two, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let (of_ours, of_candle) = (tokens as f64 / ours()?, tokens as f64 / candle()?);
        one.push(of_ours);
        two.push(of_candle);
        ratios.push(of_ours / of_candle);
    }
    let (ours, candle, ratio) = (median(&mut one), median(&mut two), median(&mut ratios));
    println!("| {what} | {ours:.1} | {candle:.1} | {ratio:.2} ({:.2}–{:.2}) |", ratios[0], ratios[ROUNDS - 1]);
    Ok(())
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn token(position: usize) -> u32 {
    ((position * 31 + 7) % 300) as u32
}

struct Ours {
    backend: CpuBackend,
}

impl Ours {
    fn open(directory: &str, threads: usize) -> anyhow::Result<Self> {
        let source: ModelSource = directory.parse()?;
        let model = Arc::new(Model::open(&source)?);
        let blocks = SEQUENCES * CONTEXT_TOKENS / BLOCK_TOKENS;
        let backend = CpuBackend::new(model, KvCapacity { block_tokens: BLOCK_TOKENS, blocks }, threads)?;
        Ok(Self { backend })
    }

    fn step(sequence: usize, context_tokens: usize, tokens: usize) -> SequenceStep {
        let blocks = CONTEXT_TOKENS / BLOCK_TOKENS;
        SequenceStep {
            id: SequenceId(sequence as u64),
            tokens: (context_tokens..context_tokens + tokens).map(token).collect(),
            context_tokens,
            block_table: (0..blocks).map(|block| BlockId((sequence * blocks + block) as u32)).collect(),
            sample: Some(SampleRequest { params: Arc::new(SamplingParams::greedy()), generated_tokens: 0 }),
        }
    }

    /// Seconds for a prompt.
    fn prefill(&mut self, tokens: usize) -> anyhow::Result<f64> {
        let start = Instant::now();
        for context in (0..tokens).step_by(CHUNK_TOKENS) {
            let step = Self::step(0, context, CHUNK_TOKENS.min(tokens - context));
            self.backend.forward(&Batch { sequences: vec![step] })?;
        }
        Ok(start.elapsed().as_secs_f64())
    }

    /// Seconds for [`DECODE_STEPS`] steps of so many sequences.
    fn decode(&mut self, sequences: usize, at: usize) -> anyhow::Result<f64> {
        let start = Instant::now();
        for position in at..at + DECODE_STEPS {
            let sequences = (0..sequences).map(|sequence| Self::step(sequence, position, 1)).collect();
            self.backend.forward(&Batch { sequences })?;
        }
        Ok(start.elapsed().as_secs_f64())
    }
}

struct Candle {
    model: Llama,
    config: Config,
}

impl Candle {
    fn open(directory: &Path) -> anyhow::Result<Self> {
        let config: LlamaConfig = serde_json::from_slice(&std::fs::read(directory.join("config.json"))?)?;
        let config = config.into_config(false);
        let tensors = candle_core::safetensors::load(directory.join("model.safetensors"), &Device::Cpu)?;
        let weights = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
        Ok(Self { model: Llama::load(weights, &config)?, config })
    }

    fn cache(&self) -> anyhow::Result<Cache> {
        Ok(Cache::new(true, DType::F32, &self.config, &Device::Cpu)?)
    }

    /// The greedy next token after `tokens`, whose first stands at `position`.
    fn forward(&self, tokens: &[u32], position: usize, cache: &mut Cache) -> anyhow::Result<u32> {
        let input = Tensor::new(tokens, &Device::Cpu)?.unsqueeze(0)?;
        let logits = self.model.forward(&input, position, cache)?.squeeze(0)?;
        Ok(logits.argmax(0)?.to_scalar()?)
    }

    /// Seconds for a prompt.
    fn prefill(&self, tokens: usize) -> anyhow::Result<f64> {
        let prompt: Vec<_> = (0..tokens).map(token).collect();
        let mut cache = self.cache()?;
        let start = Instant::now();
        self.forward(&prompt, 0, &mut cache)?;
        Ok(start.elapsed().as_secs_f64())
    }

    /// Seconds for [`DECODE_STEPS`] steps of one sequence.
    fn decode(&self, at: usize) -> anyhow::Result<f64> {
        let prompt: Vec<_> = (0..at).map(token).collect();
        let mut cache = self.cache()?;
        self.forward(&prompt, 0, &mut cache)?;
        let start = Instant::now();
        for position in at..at + DECODE_STEPS {
            self.forward(&[token(position)], position, &mut cache)?;
        }
        Ok(start.elapsed().as_secs_f64())
    }
}
