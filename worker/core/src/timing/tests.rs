//! The formulas against figures worked out by hand and recorded ones.

use std::sync::Arc;

use super::*;
use crate::block_table::BlockTable;
use crate::sampling::SamplingParams;
use crate::step::{SampleRequest, SequenceId};

/// A sequence that runs `tokens` after `context_tokens`, and has `generated` tokens if it draws one.
fn step(tokens: usize, context_tokens: usize, generated: Option<u64>) -> SequenceStep {
    let params = Arc::new(SamplingParams::greedy());
    SequenceStep {
        id: SequenceId(0),
        tokens: vec![0; tokens].into(),
        context_tokens,
        decodes: tokens == 1 && generated.is_some_and(|tokens| tokens > 0),
        block_table: BlockTable::default(),
        sample: generated.map(|generated_tokens| SampleRequest { params, generated_tokens, history: None }),
    }
}

fn batch(sequences: Vec<SequenceStep>) -> Batch {
    Batch { sequences }
}

fn qwen3_8b() -> EngineTiming {
    preset("qwen3-8b").unwrap().timing
}

#[track_caller]
fn assert_seconds(step: Duration, expected: f64) {
    assert!((step.as_secs_f64() - expected).abs() < 1e-8, "{step:?} instead of {expected} s");
}

#[test]
fn decode_grows_with_sequences_and_context_and_faster_beyond_256() {
    let timing = qwen3_8b();
    let few = batch(vec![step(1, 999, Some(1)); 100]);
    assert_seconds(timing.step(&few), 0.0113 + 100.0 * 30e-6 + 100_000.0 * 88e-9);
    let many = batch(vec![step(1, 999, Some(1)); 300]);
    assert_seconds(timing.step(&many), 0.0113 + 300.0 * 30e-6 + 44.0 * 60e-6 + 300_000.0 * 88e-9);
}

#[test]
fn prefill_counts_tokens_and_the_pairs_attention_looks_at() {
    let both = batch(vec![step(1_000, 0, Some(0)), step(2_000, 500, None)]);
    let pairs = 1_000.0 * 500.0 + 2_000.0 * 1_500.0;
    assert_seconds(qwen3_8b().step(&both), 0.030 + 3_000.0 * 61e-6 + pairs * 0.91e-9);
}

#[test]
fn a_mixed_step_pays_for_the_weights_once() {
    let timing = qwen3_8b();
    let mixed = batch(vec![step(1, 999, Some(1)), step(1_000, 0, None)]);
    let prefill = 0.030 + 1_000.0 * 61e-6 + 500_000.0 * 0.91e-9;
    assert_seconds(timing.step(&mixed), prefill + 30e-6 + 1_000.0 * 88e-9);
    // A prompt so short that reading the weights takes longer.
    let timing = preset("vllm-chunked").unwrap().timing;
    let mixed = batch(vec![step(1, 0, Some(1)), step(10, 0, None)]);
    assert_seconds(timing.step(&mixed), 0.0473 + 0.97e-3 + 0.45e-6);
}

#[test]
fn the_first_token_after_a_cached_prompt_is_prefill() {
    let cached = StepLoad::of(&batch(vec![step(1, 640, Some(0))]));
    assert_eq!((cached.decoding, cached.prefill_tokens, cached.prefill_pairs), (0, 1, 640.5));
    let decode = StepLoad::of(&batch(vec![step(1, 640, Some(1))]));
    assert_eq!((decode.decoding, decode.context_tokens, decode.prefill_tokens), (1, 641, 0));
}

#[test]
fn nothing_takes_no_time() {
    assert_eq!(qwen3_8b().step(&Batch::default()), Duration::ZERO);
}

#[test]
fn chunks_of_512_give_the_recorded_ttft_of_seed_004() {
    let engine = preset("vllm-chunked").unwrap();
    for (prompt, recorded_s) in [(80, 0.31458), (10_000, 12.286), (32_000, 66.550), (128_000, 734.189)] {
        let mut ttft = engine.timing.request_s;
        let mut computed = 0;
        while computed < prompt {
            let chunk = engine.max_tokens_per_step.min(prompt - computed);
            ttft += engine.timing.step(&batch(vec![step(chunk, computed, None)])).as_secs_f64();
            computed += chunk;
        }
        assert!((ttft / recorded_s - 1.0).abs() < 0.03, "{prompt}: {ttft} instead of {recorded_s}");
    }
}

#[test]
fn decode_gives_the_recorded_itl_of_seed_004() {
    let timing = preset("vllm-chunked").unwrap().timing;
    for (sequences, recorded_ms) in [(1, 49.66), (2, 49.87), (4, 54.54), (8, 52.68), (16, 58.60), (32, 82.86)]
    {
        let itl_ms = timing.step(&batch(vec![step(1, 130, Some(1)); sequences])).as_secs_f64() * 1e3;
        assert!((itl_ms / recorded_ms - 1.0).abs() < 0.10, "{sequences}: {itl_ms} instead of {recorded_ms}");
    }
}

#[test]
fn an_unknown_preset_is_told_the_names() {
    let said = preset("qwen4").unwrap_err().to_string();
    let expected = "unknown engine preset \"qwen4\"; there are qwen3-8b, qwen3-32b, qwen3-30b-a3b, qwen3-235b-a22b, vllm-chunked";
    assert_eq!(said, expected);
    assert_eq!(preset("qwen3-32b").unwrap().max_running, 3_700);
}
