//! Prints how fast a model runs on this machine, step by step, without a server before it.
//!
//! `cargo run --release -p worker --example speed -- DIRECTORY [THREADS|cuda [SEQUENCES@POSITION..]]`; `builtin` is a directory too. With
//! `cuda`, on the first GPU; with sequences and the position at which they begin to decode, those alone.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use worker::backend::{CpuBackend, CudaBackend, CudaModel};
use worker::model::{Model, ModelFiles, ModelSource};
use worker_core::sampling::SamplingParams;
use worker_core::step::{Backend, Batch, BlockId, KvCapacity, SampleRequest, SequenceId, SequenceStep};
use worker_kernels::cuda::CudaKernels;

const BLOCK_TOKENS: usize = 16;
/// Positions of the KV pool, which the sequences of a measurement share.
const POOL_TOKENS: usize = 32 * 4096;

/// What is measured where.
struct Plan {
    prompts: &'static [usize],
    /// Tokens of a prefill step.
    chunk_tokens: usize,
    /// Sequences and the position that they begin to decode at.
    decodes: Cow<'static, [(usize, usize)]>,
}

const CPU: Plan = Plan {
    prompts: &[64, 512, 2048, 4000],
    chunk_tokens: 512,
    decodes: Cow::Borrowed(&[(1, 16), (1, 1024), (2, 16), (4, 16), (8, 16), (32, 16), (8, 1024), (32, 1024)]),
};
const GPU: Plan = Plan {
    prompts: &[512, 4096],
    chunk_tokens: 8192,
    decodes: Cow::Borrowed(&[
        (1, 512),
        (2, 512),
        (4, 512),
        (8, 512),
        (16, 512),
        (32, 512),
        (64, 512),
        (128, 512),
        (1, 8000),
        (16, 8000),
    ]),
};

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let source: ModelSource = arguments.next().context("name a model directory, or `builtin`")?.parse()?;
    let start = Instant::now();
    let (mut speed, mut plan) = match arguments.next().as_deref() {
        Some("cuda") => (Speed::on_a_gpu(&source)?, GPU),
        threads => (Speed::on_the_cpu(&source, threads.map(str::parse).transpose()?)?, CPU),
    };
    let chosen = arguments.map(|text| decode_of(&text)).collect::<anyhow::Result<Vec<_>>>()?;
    if !chosen.is_empty() {
        plan = Plan { prompts: &[], decodes: chosen.into(), ..plan };
    }
    println!("loaded in {:.2?}", start.elapsed());
    let context = speed.context;
    for &tokens in plan.prompts.iter().filter(|&&tokens| tokens <= context) {
        let took = speed.best_of(3, |speed| speed.prefill(tokens, plan.chunk_tokens))?;
        println!("prefill {tokens:5} tokens: {:8.1} tok/s", tokens as f64 / took.as_secs_f64());
    }
    for &(sequences, at) in plan.decodes.iter().filter(|(_, at)| at + 64 <= context) {
        let took = speed.best_of(3, |speed| speed.decode(sequences, at, 32))?;
        let (rate, step) = ((sequences * 32) as f64 / took.as_secs_f64(), took.as_secs_f64() * 1e3 / 32.0);
        println!("decode {sequences} at position {at:4}: {rate:8.1} tok/s together, {step:.3} ms a step");
    }
    Ok(())
}

/// Of `SEQUENCES@POSITION`.
fn decode_of(text: &str) -> anyhow::Result<(usize, usize)> {
    let (sequences, position) = text.split_once('@').context("name SEQUENCES@POSITION")?;
    Ok((sequences.parse()?, position.parse()?))
}

struct Speed {
    backend: Box<dyn Backend>,
    context: usize,
    vocab: usize,
}

impl Speed {
    fn on_the_cpu(source: &ModelSource, threads: Option<usize>) -> anyhow::Result<Self> {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let model = Arc::new(Model::open(source)?);
        let (context, vocab) = (model.config().context_tokens, model.config().vocab);
        let backend = CpuBackend::new(model, Self::capacity(), threads.unwrap_or(cores))?;
        Ok(Self { backend: Box::new(backend), context, vocab })
    }

    fn on_a_gpu(source: &ModelSource) -> anyhow::Result<Self> {
        let model = CudaModel::load(CudaKernels::open(0)?, &ModelFiles::open(source)?)?;
        let (context, vocab) = (model.config().context_tokens, model.config().vocab);
        Ok(Self { backend: Box::new(CudaBackend::new(model, Self::capacity())?), context, vocab })
    }

    fn capacity() -> KvCapacity {
        KvCapacity { block_tokens: BLOCK_TOKENS, blocks: POOL_TOKENS / BLOCK_TOKENS }
    }

    fn best_of(
        &mut self,
        runs: usize,
        run: impl Fn(&mut Self) -> anyhow::Result<Duration>,
    ) -> anyhow::Result<Duration> {
        let times = (0..runs).map(|_| run(self)).collect::<anyhow::Result<Vec<_>>>()?;
        times.into_iter().min().context("at least one run")
    }

    /// Of one of so many sequences, which share the pool.
    fn step(&self, sequence: usize, sequences: usize, context_tokens: usize, tokens: usize) -> SequenceStep {
        let blocks = POOL_TOKENS / BLOCK_TOKENS / sequences;
        let needed = (context_tokens + tokens).div_ceil(BLOCK_TOKENS);
        SequenceStep {
            id: SequenceId(sequence as u64),
            tokens: (0..tokens)
                .map(|i| ((i * 31 + context_tokens * 7) % self.vocab.min(300)) as u32)
                .collect(),
            context_tokens,
            decodes: tokens == 1,
            block_table: (0..needed).map(|block| BlockId((sequence * blocks + block) as u32)).collect(),
            sample: Some(SampleRequest {
                params: Arc::new(SamplingParams::greedy()),
                generated_tokens: 0,
                history: None,
            }),
        }
    }

    fn prefill(&mut self, tokens: usize, chunk_tokens: usize) -> anyhow::Result<Duration> {
        let start = Instant::now();
        for context in (0..tokens).step_by(chunk_tokens) {
            let step = self.step(0, 1, context, chunk_tokens.min(tokens - context));
            self.backend.forward(&Batch { sequences: vec![step] })?;
        }
        Ok(start.elapsed())
    }

    /// `steps` decodes of `sequences` side by side. What the KV holds does not matter to the speed.
    fn decode(&mut self, sequences: usize, at: usize, steps: usize) -> anyhow::Result<Duration> {
        let start = Instant::now();
        for position in at..at + steps {
            let sequences =
                (0..sequences).map(|sequence| self.step(sequence, sequences, position, 1)).collect();
            self.backend.forward(&Batch { sequences })?;
        }
        Ok(start.elapsed())
    }
}
