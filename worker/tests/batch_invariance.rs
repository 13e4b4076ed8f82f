//! A sequence gives the same bits alone, in a batch, in chunks, and from a cached prefix.
//!
//! Each case runs some sequences alone, one step a prompt, and then together under a random schedule: prompts cut anywhere,
//! prefills beside decodes, blocks scattered, some prompts starting from blocks that another sequence filled. Tokens
//! and logits must be equal bit for bit.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, LazyLock};

use proptest::prelude::*;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use worker::backend::CpuBackend;
use worker::model::{Model, ModelSource};
use worker_core::sampling::SamplingParams;
use worker_core::step::{Backend, Batch, BlockId, KvCapacity, SampleRequest, SequenceId, SequenceStep};

static MODELS: LazyLock<Vec<Arc<Model>>> = LazyLock::new(|| {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let mut sources = vec![ModelSource::Builtin];
    sources.extend(
        ["tiny-llama", "tiny-qwen2", "tiny-qwen3"].map(|name| ModelSource::Directory(fixtures.join(name))),
    );
    sources.iter().map(|source| Arc::new(Model::open(source).unwrap())).collect()
});

/// What a client asked for.
#[derive(Clone, Debug)]
struct Wish {
    prompt: Vec<u32>,
    /// Tokens to generate.
    answer_tokens: usize,
    params: Arc<SamplingParams>,
}

/// What it got: each token with the logits it was drawn from.
#[derive(Clone, PartialEq, Debug, Default)]
struct Answer {
    tokens: Vec<u32>,
    logits: Vec<Vec<f32>>,
}

/// A wish on its way.
struct Running {
    wish: Wish,
    blocks: Vec<BlockId>,
    /// Positions whose KV is there.
    done: usize,
    answer: Answer,
}

impl Running {
    fn new(wish: Wish, blocks: Vec<BlockId>, done: usize) -> Self {
        Self { wish, blocks, done, answer: Answer::default() }
    }

    fn finished(&self) -> bool {
        self.answer.tokens.len() == self.wish.answer_tokens
    }

    /// The next step, with at most `limit` tokens.
    fn step(&self, id: u64, limit: usize) -> SequenceStep {
        let known: Vec<u32> = self.wish.prompt.iter().chain(&self.answer.tokens).copied().collect();
        let end = known.len().min(self.done.saturating_add(limit));
        let request = SampleRequest {
            params: self.wish.params.clone(),
            generated_tokens: self.answer.tokens.len() as u64,
            history: None,
        };
        SequenceStep {
            id: SequenceId(id),
            tokens: known[self.done..end].into(),
            context_tokens: self.done,
            decodes: self.done + 1 == known.len() && !self.answer.tokens.is_empty(),
            block_table: self.blocks.clone().into(),
            sample: (end == known.len()).then_some(request),
        }
    }
}

/// Runs one batch, given as indices into `running` and their token limits.
fn step(backend: &mut CpuBackend, running: &mut [Running], chosen: &[(usize, usize)], vocab: usize) {
    let sequences: Vec<_> = chosen.iter().map(|&(i, limit)| running[i].step(i as u64, limit)).collect();
    let batch = Batch { sequences };
    let next = backend.forward(&batch).unwrap();
    let rows: Vec<Vec<f32>> = backend.logits().chunks_exact(vocab).map(<[f32]>::to_vec).collect();
    assert_eq!(next.len(), rows.len());
    for (token, logits) in next.iter().zip(rows) {
        let answer = &mut running[token.id.0 as usize].answer;
        answer.tokens.push(token.token);
        answer.logits.push(logits);
    }
    for sequence in &batch.sequences {
        running[sequence.id.0 as usize].done += sequence.tokens.len();
    }
}

fn blocks_for(wish: &Wish, block_tokens: usize) -> usize {
    (wish.prompt.len() + wish.answer_tokens).div_ceil(block_tokens)
}

fn alone(model: &Arc<Model>, block_tokens: usize, wish: &Wish) -> Answer {
    let blocks = blocks_for(wish, block_tokens);
    let mut backend = CpuBackend::new(model.clone(), KvCapacity { block_tokens, blocks }, 1).unwrap();
    let table = (0..blocks as u32).map(BlockId).collect();
    let mut running = [Running::new(wish.clone(), table, 0)];
    while !running[0].finished() {
        step(&mut backend, &mut running, &[(0, usize::MAX)], model.config().vocab);
    }
    let [running] = running;
    running.answer
}

/// All wishes at once, scheduled at random.
fn together(model: &Arc<Model>, block_tokens: usize, wishes: &[Wish], rng: &mut StdRng) -> Vec<Answer> {
    let blocks: usize = wishes.iter().map(|wish| blocks_for(wish, block_tokens)).sum();
    let mut free: Vec<BlockId> = (0..blocks as u32).map(BlockId).collect();
    free.shuffle(rng);
    let mut backend = CpuBackend::new(model.clone(), KvCapacity { block_tokens, blocks }, 2).unwrap();
    let mut running: Vec<Running> = wishes
        .iter()
        .map(|wish| {
            Running::new(wish.clone(), free.split_off(free.len() - blocks_for(wish, block_tokens)), 0)
        })
        .collect();
    while running.iter().any(|running| !running.finished()) {
        let mut chosen = Vec::new();
        for (i, running) in running.iter().enumerate() {
            if !running.finished() && rng.random_bool(0.7) {
                chosen.push((i, rng.random_range(1..80)));
            }
        }
        if chosen.is_empty() {
            continue;
        }
        chosen.shuffle(rng);
        step(&mut backend, &mut running, &chosen, model.config().vocab);
    }
    running.into_iter().map(|running| running.answer).collect()
}

/// `first` runs; then `second`, in whose prompt the first `shared` blocks equal `first`'s, starts from those.
fn from_prefix(
    model: &Arc<Model>,
    block_tokens: usize,
    first: &Wish,
    second: &Wish,
    shared: usize,
) -> Answer {
    let count = blocks_for(first, block_tokens) + blocks_for(second, block_tokens) - shared;
    let mut backend = CpuBackend::new(model.clone(), KvCapacity { block_tokens, blocks: count }, 2).unwrap();
    let all: Vec<BlockId> = (0..count as u32).rev().map(BlockId).collect();
    let (own, rest) = all.split_at(blocks_for(first, block_tokens));
    let vocab = model.config().vocab;
    let mut running = vec![Running::new(first.clone(), own.to_vec(), 0)];
    while !running[0].finished() {
        step(&mut backend, &mut running, &[(0, 50)], vocab);
    }
    let table = [&own[..shared], rest].concat();
    running.push(Running::new(second.clone(), table, shared * block_tokens));
    while !running[1].finished() {
        step(&mut backend, &mut running, &[(1, usize::MAX)], vocab);
    }
    running.swap_remove(1).answer
}

/// The same where both prompts are computed in one step, the second one's rows first or last.
fn from_prefix_of_the_same_step(
    model: &Arc<Model>,
    block_tokens: usize,
    (first, second): (&Wish, &Wish),
    shared: usize,
    order: [usize; 2],
) -> Answer {
    let count = blocks_for(first, block_tokens) + blocks_for(second, block_tokens) - shared;
    let mut backend = CpuBackend::new(model.clone(), KvCapacity { block_tokens, blocks: count }, 2).unwrap();
    let all: Vec<BlockId> = (0..count as u32).rev().map(BlockId).collect();
    let (own, rest) = all.split_at(blocks_for(first, block_tokens));
    let mut running = vec![
        Running::new(first.clone(), own.to_vec(), 0),
        Running::new(second.clone(), [&own[..shared], rest].concat(), shared * block_tokens),
    ];
    step(&mut backend, &mut running, &order.map(|at| (at, usize::MAX)), model.config().vocab);
    while !running[1].finished() {
        step(&mut backend, &mut running, &[(1, usize::MAX)], model.config().vocab);
    }
    running.swap_remove(1).answer
}

fn wishes() -> impl Strategy<Value = Vec<Wish>> {
    let params =
        (prop_oneof![Just(0.0f32), 0.3f32..1.5], prop::option::of(1u32..40), 0.3f32..=1.0, any::<u64>())
            .prop_map(|(temperature, top_k, top_p, seed)| SamplingParams {
                temperature,
                top_k,
                top_p,
                seed,
                ..SamplingParams::default()
            });
    let wish = (prop::collection::vec(0u32..384, 1..160), 1usize..8, params)
        .prop_map(|(prompt, answer_tokens, params)| Wish { prompt, answer_tokens, params: Arc::new(params) });
    prop::collection::vec(wish, 1..5)
}

fn block_tokens() -> impl Strategy<Value = usize> {
    prop::sample::select(vec![7usize, 16, 64])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn company_and_chunks_change_nothing(
        model in 0usize..4,
        wishes in wishes(),
        block_tokens in block_tokens(),
        seed: u64,
    ) {
        let model = &MODELS[model];
        let expected: Vec<Answer> = wishes.iter().map(|wish| alone(model, block_tokens, wish)).collect();
        let answers = together(model, block_tokens, &wishes, &mut StdRng::seed_from_u64(seed));
        for (got, want) in answers.iter().zip(&expected) {
            prop_assert_eq!(&got.tokens, &want.tokens);
            prop_assert!(got.logits == want.logits, "{}: equal tokens from other logits", model.name());
        }
    }

    #[test]
    fn a_cached_prefix_changes_nothing(
        model in 0usize..4,
        wishes in wishes(),
        tail in prop::collection::vec(0u32..384, 1..60),
        block_tokens in block_tokens(),
    ) {
        let (model, first) = (&MODELS[model], &wishes[0]);
        let shared = first.prompt.len() / block_tokens;
        let prompt = [&first.prompt[..shared * block_tokens], &tail].concat();
        let second = Wish { prompt, ..wishes[wishes.len() - 1].clone() };
        let got = from_prefix(model, block_tokens, first, &second, shared);
        let want = alone(model, block_tokens, &second);
        prop_assert!(got == want, "{}: {shared} blocks shared", model.name());
        for order in [[0, 1], [1, 0]] {
            let got = from_prefix_of_the_same_step(model, block_tokens, (first, &second), shared, order);
            prop_assert!(got == want, "{}: {shared} blocks of the same step shared", model.name());
        }
    }
}

fn backend(blocks: usize) -> CpuBackend {
    CpuBackend::new(MODELS[0].clone(), KvCapacity { block_tokens: 16, blocks }, 1).unwrap()
}

fn plain(id: u64, tokens: usize, context_tokens: usize, table: &[u32]) -> SequenceStep {
    SequenceStep {
        id: SequenceId(id),
        tokens: vec![5; tokens].into(),
        context_tokens,
        decodes: false,
        block_table: table.iter().map(|&block| BlockId(block)).collect(),
        sample: Some(SampleRequest {
            params: Arc::new(SamplingParams::greedy()),
            generated_tokens: 0,
            history: None,
        }),
    }
}

#[test]
fn batches_that_break_the_contract_are_refused_with_the_reason() {
    let vocab = MODELS[0].config().vocab as u32;
    let with = |params: SamplingParams| {
        let sample = Some(SampleRequest { params: Arc::new(params), generated_tokens: 0, history: None });
        SequenceStep { sample, ..plain(1, 1, 0, &[0]) }
    };
    let refused: HashMap<&str, Vec<SequenceStep>> = HashMap::from([
        ("no tokens", vec![plain(1, 0, 0, &[0])]),
        ("vocabulary", vec![SequenceStep { tokens: vec![vocab].into(), ..plain(1, 1, 0, &[0]) }]),
        ("17 positions need 2 blocks", vec![plain(1, 1, 16, &[0])]),
        ("block 4 is not below", vec![plain(1, 1, 0, &[4])]),
        ("beyond the context", vec![plain(1, 1, usize::MAX, &[0])]),
        ("appears twice", vec![plain(1, 1, 0, &[0]), plain(1, 1, 0, &[1])]),
        ("written by another", vec![plain(1, 17, 0, &[0, 1]), plain(2, 1, 16, &[2, 1])]),
        ("temperature", vec![with(SamplingParams { temperature: -1.0, ..SamplingParams::greedy() })]),
        ("top_p", vec![with(SamplingParams { top_p: 0.0, ..SamplingParams::greedy() })]),
        ("top_k", vec![with(SamplingParams { top_k: Some(0), ..SamplingParams::greedy() })]),
    ]);
    let mut backend = backend(4);
    for (reason, sequences) in refused {
        let error = backend.forward(&Batch { sequences }).unwrap_err().to_string();
        assert!(
            error.starts_with("invalid batch: sequence") && error.contains(reason),
            "{error}: no {reason}"
        );
    }
    assert!(backend.forward(&Batch::default()).unwrap().is_empty());
}

#[test]
fn sequences_may_read_the_same_blocks() {
    let mut backend = backend(4);
    backend.forward(&Batch { sequences: vec![plain(1, 16, 0, &[0])] }).unwrap();
    let sequences = vec![plain(1, 1, 16, &[0, 1]), plain(2, 1, 16, &[0, 2])];
    let next = backend.forward(&Batch { sequences }).unwrap();
    assert_eq!(next[0].token, next[1].token);
}

#[test]
fn a_chunk_that_does_not_sample_returns_nothing() {
    let mut backend = backend(4);
    let silent = SequenceStep { sample: None, ..plain(1, 3, 0, &[0]) };
    let next = backend.forward(&Batch { sequences: vec![silent, plain(2, 2, 0, &[1])] }).unwrap();
    assert_eq!(next.iter().map(|next| next.id).collect::<Vec<_>>(), [SequenceId(2)]);
}
