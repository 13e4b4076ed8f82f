//! Scheduler and timing model together against what seed 002 recorded of SGLang v0.5.1: all requests sent at once,
//! fixed lengths. No clock: the time is what the steps add up to.

use std::collections::HashMap;
use std::sync::Arc;

use worker_core::step::{KvCapacity, NextToken, SequenceId};
use worker_core::timing::{EnginePreset, preset};
use worker_core::{SamplingParams, Scheduler, Submission};

/// What came out of a run, in seconds.
struct Run {
    duration: f64,
    mean_ttft: f64,
    median_itl: f64,
    mean_tpot: f64,
    median_tpot: f64,
    retractions: u64,
    recomputed_tokens: u64,
}

/// Times of a sequence's first and last token.
#[derive(Default)]
struct Stream {
    first: f64,
    last: f64,
}

fn run(engine: &EnginePreset, requests: u32, prompt_tokens: u32, output_tokens: usize) -> Run {
    let capacity = KvCapacity { block_tokens: 16, blocks: engine.kv_tokens / 16 };
    let mut scheduler = Scheduler::new(capacity, engine.limits(), 1);
    let params = Arc::new(SamplingParams::greedy());
    for request in 0..requests {
        let prompt = (0..prompt_tokens).map(|token| request * 7_919 + token).collect();
        let params = Arc::clone(&params);
        let end_tokens = Arc::new([]);
        scheduler
            .submit(Submission {
                prompt,
                params,
                max_tokens: output_tokens,
                end_tokens,
                priority: 0,
                adapter: None,
            })
            .expect("it fits into the pool");
    }
    let (mut now, mut gaps) = (0.0, Vec::new());
    let mut streams: HashMap<SequenceId, Stream> = HashMap::new();
    while !scheduler.is_idle() {
        let batch = scheduler.schedule();
        now += engine.timing.step(&batch).as_secs_f64();
        let sampling = batch.sequences.iter().filter(|step| step.sample.is_some());
        let drawn: Vec<_> =
            sampling.map(|step| NextToken { id: step.id, token: 3, logprobs: None }).collect();
        for progress in scheduler.commit(&batch, &drawn) {
            let stream = streams.entry(progress.id).or_insert(Stream { first: now, last: now });
            if stream.first < now {
                gaps.push(now - stream.last);
            }
            stream.last = now;
        }
    }
    let later_tokens = (output_tokens - 1) as f64;
    let mut tpot: Vec<f64> =
        streams.values().map(|stream| (stream.last - stream.first) / later_tokens).collect();
    let stats = scheduler.stats();
    Run {
        duration: now,
        mean_ttft: streams.values().map(|stream| stream.first).sum::<f64>() / f64::from(requests),
        median_itl: median(&mut gaps),
        mean_tpot: tpot.iter().sum::<f64>() / tpot.len() as f64,
        median_tpot: median(&mut tpot),
        retractions: stats.retractions,
        recomputed_tokens: stats.recomputed_tokens,
    }
}

fn median(values: &mut [f64]) -> f64 {
    let middle = values.len() / 2;
    *values.select_nth_unstable_by(middle, f64::total_cmp).1
}

/// `got` is within `share` of what was recorded.
#[track_caller]
fn assert_near(what: &str, got: f64, recorded: f64, share: f64) {
    let off = got / recorded - 1.0;
    assert!(off.abs() <= share, "{what}: {got:.2} instead of {recorded:.2}, {:+.1} %", off * 100.0);
}

#[test]
fn decode_pace_of_qwen3_8b_at_1024_tokens_is_the_recorded_one() {
    let run = run(preset("qwen3-8b").expect("it is in the table"), 2_000, 1_024, 1_024);
    assert_near("median ITL, ms", run.median_itl * 1e3, 48.53, 0.10);
    assert_near("median TPOT, ms", run.median_tpot * 1e3, 55.24, 0.10);
    assert_near("mean TTFT, s", run.mean_ttft, 274.6, 0.10);
    assert_near("duration, s", run.duration, 640.6, 0.10);
    // As recorded: a retracted sequence waits long, and most are not.
    assert!(run.retractions > 0 && run.recomputed_tokens > 0 && run.mean_tpot > 1.1 * run.median_tpot);
}

#[test]
fn long_outputs_and_long_prompts_take_as_long_as_recorded() {
    for (name, prompt, output, duration, mean_ttft) in [
        ("qwen3-8b", 2_000, 6_000, 2_053.7, 776.8),
        ("qwen3-8b", 6_000, 2_000, 1_067.1, 475.5),
        ("qwen3-32b", 2_000, 6_000, 3_130.3, 1_210.8),
        ("qwen3-32b", 6_000, 2_000, 1_728.2, 794.7),
        ("qwen3-30b-a3b", 2_000, 6_000, 1_182.0, 371.3),
        ("qwen3-30b-a3b", 6_000, 2_000, 516.3, 208.4),
    ] {
        let run = run(preset(name).expect("it is in the table"), 500, prompt, output);
        let what = format!("{name} {prompt}/{output}");
        assert_near(&format!("{what}: duration, s"), run.duration, duration, 0.10);
        assert_near(&format!("{what}: mean TTFT, s"), run.mean_ttft, mean_ttft, 0.10);
    }
}
