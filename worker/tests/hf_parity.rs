//! Greedy decoding agrees with Hugging Face transformers, token for token.
//!
//! The golden files were written by `worker/models/golden_hf.py` from the same weights in f32. Another order of summation
//! may choose otherwise where the two highest logits lie closer than [`NEAR`]: only there may a prompt part ways.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use roundhouse_text::{SpecialTokenPolicy, Tokenizer};
use serde::Deserialize;
use worker::backend::CpuBackend;
use worker::model::{Model, ModelFiles, ModelSource};
use worker_core::sampling::SamplingParams;
use worker_core::step::{Backend, Batch, BlockId, KvCapacity, SampleRequest, SequenceId, SequenceStep};

/// Distance of the two highest logits below which their order is nobody's fault.
const NEAR: f64 = 0.05;
const BLOCK_TOKENS: usize = 16;

#[derive(Deserialize)]
struct Golden {
    model: String,
    prompts: Vec<Prompt>,
}

#[derive(Deserialize)]
struct Prompt {
    name: String,
    prompt_ids: Vec<u32>,
    output_ids: Vec<u32>,
    top2_gap: Vec<f64>,
}

/// How far a prompt's answer agrees.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Agreement {
    Whole,
    /// Until this step, where two logits were near.
    Until(usize),
    /// Parts at this step for no good reason.
    Broken(usize),
}

fn tests() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests")
}

fn golden(model: &str) -> Golden {
    let text = std::fs::read_to_string(tests().join("golden").join(format!("{model}.json"))).unwrap();
    let golden: Golden = serde_json::from_str(&text).unwrap();
    assert_eq!(golden.model, model);
    golden
}

/// The greedy answer to `prompt`: prefilled in one step, then decoded token by token.
fn answer(backend: &mut CpuBackend, prompt: &[u32], tokens: usize) -> Vec<u32> {
    let blocks = (prompt.len() + tokens).div_ceil(BLOCK_TOKENS) as u32;
    let mut step = SequenceStep {
        id: SequenceId(0),
        tokens: prompt.into(),
        context_tokens: 0,
        decodes: false,
        block_table: (0..blocks).map(BlockId).collect(),
        sample: Some(SampleRequest {
            params: Arc::new(SamplingParams::greedy()),
            generated_tokens: 0,
            history: None,
        }),
    };
    let mut answer = Vec::new();
    while answer.len() < tokens {
        let next = backend.forward(&Batch { sequences: vec![step.clone()] }).unwrap();
        answer.push(next[0].token);
        step.context_tokens += step.tokens.len();
        step.tokens = vec![next[0].token].into();
    }
    answer
}

fn compare(prompt: &Prompt, answer: &[u32]) -> Agreement {
    let parting = answer.iter().zip(&prompt.output_ids).position(|(ours, theirs)| ours != theirs);
    match parting {
        None => Agreement::Whole,
        Some(step) if prompt.top2_gap[step] < NEAR => Agreement::Until(step),
        Some(step) => Agreement::Broken(step),
    }
}

/// Holds `source` against its golden file, and asks for `whole` prompts that agree to the end.
fn agrees(source: &ModelSource, name: &str, whole: usize) {
    let golden = golden(name);
    let model = Arc::new(Model::open(source).unwrap());
    let longest = golden.prompts.iter().map(|p| p.prompt_ids.len() + p.output_ids.len()).max().unwrap();
    let capacity = KvCapacity { block_tokens: BLOCK_TOKENS, blocks: longest.div_ceil(BLOCK_TOKENS) };
    let mut backend = CpuBackend::new(model, capacity, 2).unwrap();
    let mut agreements = Vec::new();
    for prompt in &golden.prompts {
        assert_eq!(prompt.output_ids.len(), prompt.top2_gap.len());
        let answer = answer(&mut backend, &prompt.prompt_ids, prompt.output_ids.len());
        let agreement = compare(prompt, &answer);
        if agreement != Agreement::Whole {
            println!("{name}: {} ({} tokens): {agreement:?}", prompt.name, prompt.prompt_ids.len());
        }
        assert!(
            !matches!(agreement, Agreement::Broken(_)),
            "{name}: {}: {agreement:?}\nours   {answer:?}\ntheirs {:?}\ngaps   {:?}",
            prompt.name,
            prompt.output_ids,
            prompt.top2_gap,
        );
        agreements.push(agreement);
    }
    let equal = agreements.iter().filter(|&&agreement| agreement == Agreement::Whole).count();
    println!("{name}: {equal} of {} prompts agree to the last token", agreements.len());
    assert!(agreements.len() >= 20, "a golden file has at least 20 prompts");
    assert!(equal >= whole, "{name}: only {equal} of {} prompts agree to the end", agreements.len());
}

fn fixture(name: &str) -> ModelSource {
    ModelSource::Directory(tests().join("fixtures").join(name))
}

#[test]
fn llama_with_stretched_positions_agrees() {
    agrees(&fixture("tiny-llama"), "tiny-llama", 15);
}

#[test]
fn qwen2_with_its_biases_agrees() {
    agrees(&fixture("tiny-qwen2"), "tiny-qwen2", 15);
}

#[test]
fn qwen3_with_its_head_norms_agrees() {
    agrees(&fixture("tiny-qwen3"), "tiny-qwen3", 15);
}

#[test]
fn builtin_agrees() {
    agrees(&ModelSource::Builtin, "builtin", 15);
}

/// The package's own file, which the directory of the test above was made from.
#[test]
fn smollm2_as_gguf_agrees() {
    let Some(file) = std::env::var_os("ROUNDHOUSE_SMOLLM2_GGUF") else {
        return println!("skipped: ROUNDHOUSE_SMOLLM2_GGUF does not name SmolLM2-135M-Instruct.Q4_1.gguf");
    };
    let source = ModelSource::Gguf(file.into());
    agrees(&source, "smollm2", 15);
    let tokenizer = ModelFiles::open(&source).unwrap().tokenizer.unwrap();
    let tokenizer = Tokenizer::from_json(tokenizer.as_bytes()).unwrap();
    for prompt in &golden("smollm2").prompts {
        let text = tokenizer.decode_verbatim(&prompt.prompt_ids).unwrap();
        assert_eq!(tokenizer.encode(&text, SpecialTokenPolicy::Add).unwrap(), prompt.prompt_ids, "{text}");
    }
}

#[test]
fn smollm2_agrees() {
    match std::env::var_os("ROUNDHOUSE_SMOLLM2") {
        Some(directory) => agrees(&ModelSource::Directory(directory.into()), "smollm2", 15),
        None => println!("skipped: ROUNDHOUSE_SMOLLM2 does not name the directory of SmolLM2-135M-Instruct"),
    }
}
