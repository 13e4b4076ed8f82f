//! Prints how fast a model runs on this machine's CPU.
//!
//! `cargo run --release -p worker --example speed -- DIRECTORY [THREADS]`; `builtin` is a directory too.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use worker::backend::CpuBackend;
use worker::model::{Model, ModelSource};
use worker_core::sampling::SamplingParams;
use worker_core::step::{Backend, Batch, BlockId, KvCapacity, SampleRequest, SequenceId, SequenceStep};

const BLOCK_TOKENS: usize = 16;
const SEQUENCES: usize = 32;
/// Positions of each sequence at most.
const CONTEXT_TOKENS: usize = 4096;
/// Tokens of a prefill step, as the engine chunks them.
const CHUNK_TOKENS: usize = 512;

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let source: ModelSource = arguments.next().context("name a model directory, or `builtin`")?.parse()?;
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let threads = arguments.next().map(|text| text.parse()).transpose()?.unwrap_or(cores);
    let start = Instant::now();
    let model = Arc::new(Model::open(&source)?);
    println!("{}: loaded in {:.2?}, {threads} threads", model.name(), start.elapsed());
    let context = model.config().context_tokens.min(CONTEXT_TOKENS);
    let blocks = SEQUENCES * context.div_ceil(BLOCK_TOKENS);
    let backend = CpuBackend::new(model, KvCapacity { block_tokens: BLOCK_TOKENS, blocks }, threads)?;
    let mut speed = Speed { backend, context };
    for tokens in [64, 512, 2048, 4000] {
        if tokens <= context {
            let took = speed.best_of(3, |speed| speed.prefill(tokens))?;
            println!("prefill {tokens:5} tokens: {:8.1} tok/s", tokens as f64 / took.as_secs_f64());
        }
    }
    for (sequences, at) in [(1, 16), (1, 1024), (2, 16), (4, 16), (8, 16), (32, 16), (8, 1024), (32, 1024)] {
        if at + 64 <= context {
            let took = speed.best_of(3, |speed| speed.decode(sequences, at, 32))?;
            let rate = (sequences * 32) as f64 / took.as_secs_f64();
            println!("decode {sequences} at position {at:4}: {rate:8.1} tok/s together");
        }
    }
    Ok(())
}

struct Speed {
    backend: CpuBackend,
    context: usize,
}

impl Speed {
    fn best_of(
        &mut self,
        runs: usize,
        run: impl Fn(&mut Self) -> anyhow::Result<Duration>,
    ) -> anyhow::Result<Duration> {
        let times = (0..runs).map(|_| run(self)).collect::<anyhow::Result<Vec<_>>>()?;
        times.into_iter().min().context("at least one run")
    }

    fn step(&self, sequence: usize, context_tokens: usize, tokens: usize) -> SequenceStep {
        let blocks = self.context.div_ceil(BLOCK_TOKENS);
        SequenceStep {
            id: SequenceId(sequence as u64),
            tokens: (0..tokens).map(|i| ((i * 31 + context_tokens * 7) % 300) as u32).collect(),
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

    fn prefill(&mut self, tokens: usize) -> anyhow::Result<Duration> {
        let start = Instant::now();
        for context in (0..tokens).step_by(CHUNK_TOKENS) {
            let step = self.step(0, context, CHUNK_TOKENS.min(tokens - context));
            self.backend.forward(&Batch { sequences: vec![step] })?;
        }
        Ok(start.elapsed())
    }

    /// `steps` decodes of `sequences` side by side. What the KV holds does not matter to the speed.
    fn decode(&mut self, sequences: usize, at: usize, steps: usize) -> anyhow::Result<Duration> {
        let start = Instant::now();
        for position in at..at + steps {
            let sequences = (0..sequences).map(|sequence| self.step(sequence, position, 1)).collect();
            self.backend.forward(&Batch { sequences })?;
        }
        Ok(start.elapsed())
    }
}
