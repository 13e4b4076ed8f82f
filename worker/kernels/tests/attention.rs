//! Paged attention against an f64 reference, and against itself in other company.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

use proptest::prelude::*;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use worker_kernels::cpu::{Activations, CpuKvPool, Isa};
use worker_kernels::{AttentionShape, CpuKernels, Device, Kernels, KvLayout, RopeShape, Span};

/// Heads and blocks of a case.
#[derive(Clone, Copy, Debug)]
struct Shape {
    kv_heads: usize,
    group: usize,
    head_dim: usize,
    block_tokens: usize,
}

impl Shape {
    fn width(self) -> usize {
        self.kv_heads * (self.group + 2) * self.head_dim
    }

    fn heads(self) -> usize {
        self.kv_heads * self.group
    }

    fn scale(self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }
}

/// A whole sequence: a row of queries, keys and values for each position, and its blocks.
#[derive(Clone, Debug)]
struct Sequence {
    qkv: Vec<f32>,
    positions: usize,
    blocks: Vec<u32>,
}

/// Sequences of the given lengths whose blocks lie in the pool in disorder; returns the pool's size in blocks too.
fn sequences(shape: Shape, lengths: &[usize], seed: u64) -> (Vec<Sequence>, usize) {
    let mut rng = StdRng::seed_from_u64(seed);
    let needed = |positions: usize| positions.div_ceil(shape.block_tokens);
    let total: usize = lengths.iter().map(|&positions| needed(positions)).sum::<usize>() + 2;
    let mut free: Vec<u32> = (0..total as u32).collect();
    let mut take = |rng: &mut StdRng| free.swap_remove(rng.random_range(0..free.len()));
    let sequences = lengths
        .iter()
        .map(|&positions| Sequence {
            qkv: (0..positions * shape.width()).map(|_| rng.random_range(-2.0f32..2.0)).collect(),
            positions,
            blocks: (0..needed(positions)).map(|_| take(&mut rng)).collect(),
        })
        .collect();
    (sequences, total)
}

/// A device with a pool, filled with NaN: whatever is read without having been written shows.
struct Machine {
    kernels: CpuKernels,
    pool: CpuKvPool,
    shape: Shape,
}

impl Machine {
    fn new(isa: Isa, threads: usize, shape: Shape, blocks: usize) -> Self {
        let Shape { kv_heads, head_dim, block_tokens, .. } = shape;
        let kernels = CpuKernels::with_isa("test", threads, isa).unwrap();
        let pool = kernels.kv_pool(KvLayout { layers: 2, kv_heads, head_dim, block_tokens, blocks }).unwrap();
        let mut machine = Self { kernels, pool, shape };
        let all: Vec<u32> = (0..blocks as u32).collect();
        let rows = blocks * block_tokens;
        machine.store(
            &vec![f32::NAN; rows * shape.width()],
            &[Span { first_row: 0, rows, context_tokens: 0, blocks: &all }],
        );
        machine
    }

    fn store(&mut self, qkv: &[f32], spans: &[Span<'_>]) -> Activations {
        let (mut rows, mut angles) = (Activations::default(), Activations::default());
        self.kernels.write(qkv, self.shape.width(), &mut rows).unwrap();
        let (half, end) = (self.shape.head_dim / 2, Span::last_end(spans));
        let unturned = [vec![1.0; half], vec![0.0; half]].concat().repeat(end);
        self.kernels.write(&unturned, self.shape.head_dim, &mut angles).unwrap();
        let shape = RopeShape { layer: 1, heads: self.shape.heads(), angles: &angles, norm: None, spans };
        self.kernels.rope_store(&mut rows, shape, &mut self.pool).unwrap();
        rows
    }

    /// One call over `ranges` of positions, one for each sequence; returns each sequence's rows.
    fn step(&mut self, sequences: &[&Sequence], ranges: &[std::ops::Range<usize>]) -> Vec<Vec<f32>> {
        let width = self.shape.width();
        let (mut qkv, mut spans) = (Vec::new(), Vec::new());
        for (sequence, range) in sequences.iter().zip(ranges) {
            let first_row = qkv.len() / width;
            qkv.extend_from_slice(&sequence.qkv[range.start * width..range.end * width]);
            let blocks = &sequence.blocks;
            spans.push(Span { first_row, rows: range.len(), context_tokens: range.start, blocks });
        }
        let rows = self.store(&qkv, &spans);
        let shape =
            AttentionShape { layer: 1, heads: self.shape.heads(), scale: self.shape.scale(), spans: &spans };
        let mut out = Activations::default();
        self.kernels.attention(&rows, &self.pool, shape, &mut out).unwrap();
        let width = self.shape.heads() * self.shape.head_dim;
        let part = |span: &Span<'_>| out.numbers()[span.first_row * width..][..span.rows * width].to_vec();
        spans.iter().map(part).collect()
    }
}

/// Attention of one sequence in f64, row by row.
fn reference(shape: Shape, sequence: &Sequence) -> Vec<f64> {
    let (dim, width) = (shape.head_dim, shape.width());
    let at = |position: usize, head: usize| &sequence.qkv[position * width + head * dim..][..dim];
    let mut out = Vec::new();
    for position in 0..sequence.positions {
        for head in 0..shape.heads() {
            let (key, value) =
                (shape.heads() + head / shape.group, shape.heads() + shape.kv_heads + head / shape.group);
            let score = |other: usize| {
                let dot: f64 = at(position, head)
                    .iter()
                    .zip(at(other, key))
                    .map(|(q, k)| f64::from(*q) * f64::from(*k))
                    .sum();
                dot * f64::from(shape.scale())
            };
            let scores: Vec<f64> = (0..=position).map(score).collect();
            let highest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - highest).exp()).collect();
            let total: f64 = weights.iter().sum();
            for d in 0..dim {
                let sum: f64 =
                    weights.iter().enumerate().map(|(other, w)| w * f64::from(at(other, value)[d])).sum();
                out.push(sum / total);
            }
        }
    }
    out
}

fn assert_near(got: &[f32], want: &[f64], what: &str) {
    assert_eq!(got.len(), want.len());
    for (index, (got, want)) in got.iter().zip(want).enumerate() {
        assert!((f64::from(*got) - want).abs() < 1e-5, "{what}: number {index} is {got}, not {want}");
    }
}

fn shapes() -> impl Strategy<Value = Shape> {
    let dims = prop::sample::select(vec![8usize, 24, 32, 64, 128]);
    let blocks = prop::sample::select(vec![1usize, 5, 16, 32, 200]);
    (1usize..4, 1usize..5, dims, blocks).prop_map(|(kv_heads, group, head_dim, block_tokens)| Shape {
        kv_heads,
        group,
        head_dim,
        block_tokens,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn agrees_with_f64_on_ragged_batches(
        shape in shapes(),
        lengths in prop::collection::vec(1usize..150, 1..4),
        seed: u64,
    ) {
        let (sequences, blocks) = sequences(shape, &lengths, seed);
        let all: Vec<&Sequence> = sequences.iter().collect();
        let ranges: Vec<_> = lengths.iter().map(|&positions| 0..positions).collect();
        for isa in Isa::available() {
            let outs = Machine::new(isa, 2, shape, blocks).step(&all, &ranges);
            for (out, sequence) in outs.iter().zip(&sequences) {
                assert_near(out, &reference(shape, sequence), &format!("{isa:?}"));
            }
        }
    }

    #[test]
    fn chunks_company_and_threads_do_not_change_bits(
        shape in shapes(),
        lengths in prop::collection::vec(2usize..300, 1..4),
        cut in 0.0f64..1.0,
        seed: u64,
    ) {
        let (sequences, blocks) = sequences(shape, &lengths, seed);
        let all: Vec<&Sequence> = sequences.iter().collect();
        let cuts: Vec<usize> = lengths.iter().map(|&n| (n as f64 * cut) as usize).map(|n| n.max(1)).collect();
        for isa in Isa::available() {
            let mut machine = Machine::new(isa, 3, shape, blocks);
            let heads: Vec<_> = cuts.iter().map(|&cut| 0..cut).collect();
            let tails: Vec<_> = cuts.iter().zip(&lengths).map(|(&cut, &end)| cut..end).collect();
            let (mut batched, rest) = (machine.step(&all, &heads), machine.step(&all, &tails));
            for (head, tail) in batched.iter_mut().zip(rest) {
                head.extend(tail);
            }
            let mut alone = Machine::new(isa, 1, shape, blocks);
            for (sequence, batched) in sequences.iter().zip(&batched) {
                let whole = 0..sequence.positions;
                let out = alone.step(&[sequence], std::slice::from_ref(&whole)).swap_remove(0);
                prop_assert!(&out == batched, "{isa:?}: {} positions", sequence.positions);
            }
        }
    }
}

#[test]
fn lengths_around_block_and_chunk_edges_agree() {
    let shape = Shape { kv_heads: 2, group: 3, head_dim: 32, block_tokens: 16 };
    let lengths = [1, 15, 16, 17, 31, 32, 33, 127, 128, 129, 255, 256, 257];
    let (sequences, blocks) = sequences(shape, &lengths, 5);
    for isa in Isa::available() {
        let mut machine = Machine::new(isa, 2, shape, blocks);
        for sequence in &sequences {
            let whole = 0..sequence.positions;
            let out = machine.step(&[sequence], std::slice::from_ref(&whole)).swap_remove(0);
            assert_near(
                &out,
                &reference(shape, sequence),
                &format!("{isa:?}, {} positions", sequence.positions),
            );
        }
    }
}

/// Decoded token by token, each row equals the one of a single prefill, whatever tiles the two are made of.
#[test]
fn a_long_sequence_decodes_to_the_bits_of_its_prefill() {
    for (group, positions) in [(1, 700), (2, 2100), (3, 700)] {
        let shape = Shape { kv_heads: 1, group, head_dim: 64, block_tokens: 16 };
        let (sequences, blocks) = sequences(shape, &[positions], 9);
        let sequence = &sequences[0];
        let width = shape.heads() * shape.head_dim;
        for isa in Isa::available() {
            let mut machine = Machine::new(isa, 2, shape, blocks);
            let whole = 0..positions;
            let prefilled = machine.step(&[sequence], std::slice::from_ref(&whole)).swap_remove(0);
            for position in (0..positions).step_by(97) {
                let one = position..position + 1;
                let decoded = machine.step(&[sequence], std::slice::from_ref(&one)).swap_remove(0);
                assert!(decoded == prefilled[position * width..][..width], "{isa:?}: position {position}");
            }
        }
    }
}

#[test]
fn huge_scores_do_not_overflow() {
    let shape = Shape { kv_heads: 1, group: 1, head_dim: 8, block_tokens: 4 };
    let (mut sequences, blocks) = sequences(shape, &[40], 1);
    for number in &mut sequences[0].qkv {
        *number *= 1e4;
    }
    let whole = 0..40;
    for isa in Isa::available() {
        let out = Machine::new(isa, 1, shape, blocks).step(&[&sequences[0]], std::slice::from_ref(&whole));
        assert!(out[0].iter().all(|number| number.is_finite()), "{isa:?}");
    }
}

#[test]
fn a_block_outside_of_the_pool_is_refused() {
    let shape = Shape { kv_heads: 1, group: 1, head_dim: 8, block_tokens: 4 };
    let machine = Machine::new(Isa::detect(), 1, shape, 3);
    let mut rows = Activations::default();
    machine.kernels.write(&vec![0.0; shape.width()], shape.width(), &mut rows).unwrap();
    let spans = [Span { first_row: 0, rows: 1, context_tokens: 0, blocks: &[3] }];
    let attention = AttentionShape { layer: 0, heads: 1, scale: 1.0, spans: &spans };
    let mut out = Activations::default();
    let error = machine.kernels.attention(&rows, &machine.pool, attention, &mut out).unwrap_err();
    assert!(error.to_string().contains("blocks below 3"), "{error}");
}
