//! SmolLM2 (or any Llama of safetensors) on our CPU backend and on candle's, in turn, round by round: prefill and decode in tokens a
//! second. candle computes in f32, which is the faster of its types on CPUs; ours keeps weights in bf16 and computes in f32. Both
//! have the same threads, the same prompts, a KV cache, logits for the last token only, and draw greedily; both are compiled for
//! this machine. Rates are by the clock; on a machine that others use, what a quiet one would give is nearer to the best of the
//! rounds than to their median, and nearer still to the ratio by CPU time, which leaves out what the threads had to wait for a
//! core. All three are printed.
//!
//! `cargo run --release -- DIRECTORY [THREADS]`; the directory has `config.json` and `model.safetensors`. With fewer threads than
//! cores set RAYON_NUM_THREADS to as many: candle's matrix products ask the machine, not the pool.

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

/// Sequences side by side, against one alone.
const SIDE_BY_SIDE: [usize; 3] = [1, 8, SEQUENCES];

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let directory = arguments.next().context("name a model directory")?;
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let threads = arguments.next().map(|text| text.parse()).transpose()?.unwrap_or(cores);
    // candle computes on rayon's global pool.
    rayon::ThreadPoolBuilder::new().num_threads(threads).build_global()?;
    let mut ours = Ours::open(&directory, threads)?;
    let candle = Candle::open(Path::new(&directory))?;
    println!("{directory}, {threads} threads, {ROUNDS} rounds, tokens a second: median (best)\n");
    agree(&mut ours, &candle)?;
    side_by_side(&mut ours)?;
    println!(
        "| | ours | candle f32 | ours ÷ candle: median | best | by CPU time |\n|---|---|---|---|---|---|"
    );
    for at in [16, 512] {
        let before = candle.after(at)?;
        row(&format!("decode at {at}"), DECODE_STEPS, || ours.decode(1, at), || candle.decode(at, &before))?;
    }
    for tokens in [64, 512, 1_024] {
        row(&format!("prefill {tokens}"), tokens, || ours.prefill(tokens), || candle.prefill(tokens))?;
    }
    Ok(())
}

/// Both compute the same model: prints at how many of some prompts they draw the same token.
fn agree(ours: &mut Ours, candle: &Candle) -> anyhow::Result<()> {
    let (mut same, mut all) = (0, 0);
    for tokens in (5..=100).step_by(10) {
        let step = Ours::step(0, 0, tokens);
        let drawn = ours.backend.forward(&Batch { sequences: vec![step] })?;
        let prompt: Vec<_> = (0..tokens).map(token).collect();
        same += usize::from(drawn[0].token == candle.forward(&prompt, 0, &mut candle.cache()?)?);
        all += 1;
    }
    println!("the next token after {all} prompts is the same for {same}\n");
    Ok(())
}

/// Ours with many sequences against one alone, round by round.
fn side_by_side(ours: &mut Ours) -> anyhow::Result<()> {
    let mut all = SIDE_BY_SIDE.map(|_| Rounds::default());
    for _ in 0..ROUNDS {
        for (sequences, rounds) in SIDE_BY_SIDE.iter().zip(&mut all) {
            rounds.add(sequences * DECODE_STEPS, ours.decode(*sequences, 64)?);
        }
    }
    println!(
        "\n| ours, side by side at 64 | together | ÷ one: median | best | by CPU time |\n|---|---|---|---|---|"
    );
    for (sequences, rounds) in SIDE_BY_SIDE.iter().zip(&all) {
        println!("| {sequences} | {rounds} | {} |", rounds.against(&all[0]));
    }
    println!();
    Ok(())
}

/// What a run took.
#[derive(Clone, Copy)]
struct Spent {
    seconds: f64,
    /// Of all threads together.
    cpu_seconds: f64,
}

/// Runs `work` with a look at the clocks before and after.
fn spent(work: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<Spent> {
    let (start, cpu_before) = (Instant::now(), cpu_seconds()?);
    work()?;
    Ok(Spent { seconds: start.elapsed().as_secs_f64(), cpu_seconds: cpu_seconds()? - cpu_before })
}

/// CPU time of all threads so far.
fn cpu_seconds() -> anyhow::Result<f64> {
    let mut nanoseconds = 0;
    for task in std::fs::read_dir("/proc/self/task")? {
        let schedstat = std::fs::read_to_string(task?.path().join("schedstat"))?;
        nanoseconds += schedstat.split(' ').next().context("schedstat is empty")?.parse::<u64>()?;
    }
    Ok(nanoseconds as f64 / 1e9)
}

/// What came out of the rounds: tokens a second, and tokens a second of CPU.
#[derive(Clone, Default)]
struct Rounds {
    rates: Vec<f64>,
    cpu_rates: Vec<f64>,
}

impl Rounds {
    fn add(&mut self, tokens: usize, spent: Spent) {
        self.rates.push(tokens as f64 / spent.seconds);
        self.cpu_rates.push(tokens as f64 / spent.cpu_seconds);
    }

    fn median(values: &[f64]) -> f64 {
        let mut values = values.to_vec();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    }

    fn best(&self) -> f64 {
        self.rates.iter().copied().fold(0.0, f64::max)
    }

    /// What this is of another, for the table: median of the rounds, best, by CPU time.
    fn against(&self, other: &Self) -> String {
        let ratios = |one: &[f64], other: &[f64]| {
            Self::median(&one.iter().zip(other).map(|(one, other)| one / other).collect::<Vec<_>>())
        };
        let (by_clock, by_cpu) =
            (ratios(&self.rates, &other.rates), ratios(&self.cpu_rates, &other.cpu_rates));
        format!("{by_clock:.2} | {:.2} | {by_cpu:.2}", self.best() / other.best())
    }
}

impl std::fmt::Display for Rounds {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:.1} ({:.1})", Self::median(&self.rates), self.best())
    }
}

/// Runs both in turn and prints a line.
fn row(
    what: &str,
    tokens: usize,
    mut ours: impl FnMut() -> anyhow::Result<Spent>,
    mut candle: impl FnMut() -> anyhow::Result<Spent>,
) -> anyhow::Result<()> {
    let (mut of_ours, mut of_candle) = (Rounds::default(), Rounds::default());
    for _ in 0..ROUNDS {
        of_ours.add(tokens, ours()?);
        of_candle.add(tokens, candle()?);
    }
    println!("| {what} | {of_ours} | {of_candle} | {} |", of_ours.against(&of_candle));
    Ok(())
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
            decodes: tokens == 1,
            block_table: (0..blocks).map(|block| BlockId((sequence * blocks + block) as u32)).collect(),
            sample: Some(SampleRequest {
                params: Arc::new(SamplingParams::greedy()),
                generated_tokens: 0,
                history: None,
            }),
        }
    }

    /// A prompt.
    fn prefill(&mut self, tokens: usize) -> anyhow::Result<Spent> {
        spent(|| {
            for context in (0..tokens).step_by(CHUNK_TOKENS) {
                let step = Self::step(0, context, CHUNK_TOKENS.min(tokens - context));
                self.backend.forward(&Batch { sequences: vec![step] })?;
            }
            Ok(())
        })
    }

    /// [`DECODE_STEPS`] steps of so many sequences.
    fn decode(&mut self, sequences: usize, at: usize) -> anyhow::Result<Spent> {
        spent(|| {
            for position in at..at + DECODE_STEPS {
                let sequences = (0..sequences).map(|sequence| Self::step(sequence, position, 1)).collect();
                self.backend.forward(&Batch { sequences })?;
            }
            Ok(())
        })
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

    /// A prompt.
    fn prefill(&self, tokens: usize) -> anyhow::Result<Spent> {
        let prompt: Vec<_> = (0..tokens).map(token).collect();
        let mut cache = self.cache()?;
        spent(|| self.forward(&prompt, 0, &mut cache).map(drop))
    }

    /// The cache after a prompt of so many tokens.
    fn after(&self, tokens: usize) -> anyhow::Result<Cache> {
        let prompt: Vec<_> = (0..tokens).map(token).collect();
        let mut cache = self.cache()?;
        self.forward(&prompt, 0, &mut cache)?;
        Ok(cache)
    }

    /// [`DECODE_STEPS`] steps of one sequence, `before` being the cache after its first `at` tokens.
    fn decode(&self, at: usize, before: &Cache) -> anyhow::Result<Spent> {
        let mut cache = before.clone();
        spent(|| {
            for position in at..at + DECODE_STEPS {
                self.forward(&[token(position)], position, &mut cache)?;
            }
            Ok(())
        })
    }
}
