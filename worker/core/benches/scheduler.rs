//! What a step costs beside its arithmetic: `schedule` and `commit` with 512 sequences that decode, and taking and
//! releasing a block in pools of two sizes.
//!
//! `cargo bench -p worker-core --bench scheduler`

use std::hint::black_box;
use std::sync::Arc;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use roundhouse_types::{BlockHash, ChainHasher};
use worker_core::step::{Batch, KvCapacity, NextToken};
use worker_core::{BlockPool, SamplingParams, Scheduler, SchedulerLimits, Submission};

const BLOCK_TOKENS: usize = 16;
const PROMPT_TOKENS: u32 = 1_000;

fn draw(batch: &Batch) -> Vec<NextToken> {
    let sampling = batch.sequences.iter().filter(|step| step.sample.is_some());
    sampling.map(|step| NextToken { id: step.id, token: step.id.0 as u32, logprobs: None }).collect()
}

/// `sequences` that all decode, about a thousand tokens of context each, and go on for long.
fn decoding(sequences: usize, events: bool) -> Scheduler {
    let capacity = KvCapacity { block_tokens: BLOCK_TOKENS, blocks: 500_000 };
    let mut scheduler = Scheduler::new(capacity, SchedulerLimits::mixed(sequences, 8_192), 1);
    if events {
        scheduler.record_events();
    }
    for sequence in 0..sequences as u32 {
        let submission = Submission {
            prompt: (0..PROMPT_TOKENS).map(|token| sequence * PROMPT_TOKENS + token).collect(),
            params: Arc::new(SamplingParams::greedy()),
            max_tokens: 5_000_000,
            end_tokens: Arc::new([]),
            priority: 0,
            adapter: None,
        };
        scheduler.submit(submission).expect("the pool has room");
    }
    while scheduler.stats().uncomputed_tokens > sequences {
        let batch = scheduler.schedule();
        let drawn = draw(&batch);
        scheduler.commit(&batch, &drawn);
    }
    scheduler
}

fn step(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("schedule and commit");
    for (sequences, events) in [(64, false), (512, false), (512, true)] {
        let name = format!("{sequences} decoding{}", if events { ", events" } else { "" });
        let mut scheduler = decoding(sequences, events);
        group.bench_function(BenchmarkId::from_parameter(name), |bencher| {
            bencher.iter_custom(|steps| {
                // A fresh start now and then: what is measured must not depend on how long it has run.
                if scheduler.stats().held_blocks > 100_000 {
                    scheduler = decoding(sequences, events);
                }
                let mut spent = std::time::Duration::ZERO;
                for _ in 0..steps {
                    let begun = std::time::Instant::now();
                    let batch = scheduler.schedule();
                    spent += begun.elapsed();
                    let drawn = draw(&batch);
                    let begun = std::time::Instant::now();
                    black_box(scheduler.commit(&batch, &drawn));
                    black_box(scheduler.take_events());
                    drop(batch);
                    spent += begun.elapsed();
                }
                spent
            });
        });
    }
    group.finish();
}

/// A block taken, filled, entered and released: in a pool that is full of cached blocks, so that each takes another's place.
fn allocate(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("allocate, enter and release");
    for blocks in [1_000, 500_000] {
        let mut pool = BlockPool::new(blocks);
        let mut chain = ChainHasher::new(1);
        let mut next = || -> BlockHash { chain.push_bytes(&[7]) };
        for _ in 0..blocks {
            let block = pool.allocate().expect("nothing is held");
            let block = pool.enter(block, next());
            pool.release_all(&[block]);
        }
        group.bench_function(BenchmarkId::from_parameter(format!("{blocks} blocks")), |bencher| {
            bencher.iter(|| {
                let block = pool.allocate().expect("nothing is held");
                let block = pool.enter(block, next());
                pool.release_all(&[block]);
            });
        });
    }
    group.finish();
}

criterion_group!(benches, step, allocate);
criterion_main!(benches);
