//! Paged attention: prefill, decode and combine, against softmax in f64.

use half::bf16;
use rand::RngExt;
use worker_kernels::Span;
use worker_kernels::cuda::params::{DecodeChunk, Merge, Visibility};
use worker_kernels::cuda::plan::{AttentionPlan, Cut, LONG_CHUNK_TOKENS, SHORT_CHUNK_TOKENS};
use worker_kernels::cuda::{PrefillKernel, launch};

use crate::machine::{COPY_MODES, POISON, Run, on_a_real_gpu, rng};

mod groups;
mod launches;
mod wgmma;

use launches::Device;

/// One call: its shape, and `(context, rows)` of each sequence.
#[derive(Clone, Debug)]
struct Case {
    head_dim: usize,
    heads: usize,
    kv_heads: usize,
    block_tokens: usize,
    visibility: Visibility,
    sinks: Sinks,
    sequences: Vec<(usize, usize)>,
    launches: Launches,
    prefill: PrefillKernel,
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Sinks {
    None,
    Learned,
}

/// How a batch of both kinds is run.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Launches {
    Mixed,
    Separate,
}

const ALL: Visibility = Visibility { window: 0, sink_tokens: 0 };

impl Case {
    fn new(head_dim: usize, heads: usize, kv_heads: usize, sequences: &[(usize, usize)]) -> Self {
        let sequences = sequences.to_vec();
        Self {
            head_dim,
            heads,
            kv_heads,
            block_tokens: 16,
            visibility: ALL,
            sinks: Sinks::None,
            sequences,
            launches: Launches::Mixed,
            prefill: PrefillKernel::MmaSync,
        }
    }

    fn with_window(self, window: u32, sink_tokens: u32) -> Self {
        Self { visibility: Visibility { window, sink_tokens }, ..self }
    }

    fn with_blocks_of(self, block_tokens: usize) -> Self {
        Self { block_tokens, ..self }
    }

    fn with_learned_sinks(self) -> Self {
        Self { sinks: Sinks::Learned, ..self }
    }

    fn rows(&self) -> usize {
        self.sequences.iter().map(|(_, rows)| rows).sum()
    }

    fn scale(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }
}

/// A case's numbers. Rows of q and out have more columns than heads, as in the model; what the rows do not fill is poison.
struct Data {
    q: Vec<bf16>,
    keys: Vec<bf16>,
    values: Vec<bf16>,
    sink_logits: Vec<f32>,
    blocks: Vec<Vec<u32>>,
    q_stride: usize,
    out_stride: usize,
}

impl Data {
    fn new(case: &Case, seed: u64) -> Self {
        let mut rng = rng(seed);
        let needed = |&(context, rows): &(usize, usize)| (context + rows).div_ceil(case.block_tokens);
        let total: usize = case.sequences.iter().map(needed).sum::<usize>() + 3;
        let mut free: Vec<u32> = (0..total as u32).collect();
        let blocks: Vec<Vec<u32>> = case
            .sequences
            .iter()
            .map(|sequence| {
                (0..needed(sequence)).map(|_| free.swap_remove(rng.random_range(0..free.len()))).collect()
            })
            .collect();
        let pool = total * case.kv_heads * case.block_tokens * case.head_dim;
        let poison = bf16::from_bits(POISON);
        let (q_stride, out_stride) = ((case.heads + 2) * case.head_dim, (case.heads + 1) * case.head_dim);
        let mut data = Self {
            q: vec![poison; case.rows() * q_stride],
            keys: vec![poison; pool],
            values: vec![poison; pool],
            sink_logits: (0..case.heads).map(|_| rng.random_range(-2.0..3.0)).collect(),
            blocks,
            q_stride,
            out_stride,
        };
        for row in 0..case.rows() {
            // Sharp scores, so that one position more or less shows.
            data.q[row * q_stride..][..case.heads * case.head_dim]
                .fill_with(|| bf16::from_f32(rng.random_range(-3.0..3.0)));
        }
        for (sequence, &(context, rows)) in case.sequences.iter().enumerate() {
            for position in 0..context + rows {
                for head in 0..case.kv_heads {
                    let at = data.offset(case, sequence, head, position);
                    data.keys[at..][..case.head_dim]
                        .fill_with(|| bf16::from_f32(rng.random_range(-1.0..1.0)));
                    data.values[at..][..case.head_dim]
                        .fill_with(|| bf16::from_f32(rng.random_range(-1.0..1.0)));
                }
            }
        }
        data
    }

    fn offset(&self, case: &Case, sequence: usize, kv_head: usize, position: usize) -> usize {
        let block = self.blocks[sequence][position / case.block_tokens] as usize;
        ((block * case.kv_heads + kv_head) * case.block_tokens + position % case.block_tokens) * case.head_dim
    }

    fn plan(&self, case: &Case) -> AttentionPlan {
        let mut first_row = 0;
        let span = |(blocks, &(context_tokens, rows)): (_, &(usize, usize))| {
            first_row += rows;
            Span { first_row: first_row - rows, rows, context_tokens, blocks }
        };
        let spans: Vec<Span<'_>> =
            self.blocks.iter().map(Vec::as_slice).zip(&case.sequences).map(span).collect();
        let tile_rows = match case.prefill {
            PrefillKernel::Wgmma => launch::WGMMA_TILE_ROWS,
            _ => launch::prefill_tile_rows(case.head_dim).unwrap(),
        };
        // As with eight KV heads on an H200.
        AttentionPlan::new(&spans, Cut { tile_rows, few_chunks: 11 }, case.visibility).unwrap()
    }
}

/// How far a result may be off: bf16 weights and a bf16 result, in the worst case.
fn tolerance(want: f64, weighted_values: f64) -> f64 {
    (want.abs() + weighted_values) / 256.0 + 1e-6
}

/// One row of one head in f64: its numbers, and for the tolerance the sums of weights times absolute values.
fn reference(
    case: &Case,
    data: &Data,
    sequence: usize,
    row: usize,
    position: usize,
    head: usize,
) -> Vec<(f64, f64)> {
    let (dim, kv_head) = (case.head_dim, head / (case.heads / case.kv_heads));
    let q = &data.q[row * data.q_stride + head * dim..][..dim];
    let Visibility { window, sink_tokens } = case.visibility;
    let seen = |key: usize| window == 0 || key + window as usize > position || key < sink_tokens as usize;
    let keys: Vec<usize> = (0..=position).filter(|&key| seen(key)).collect();
    let score = |&key: &usize| {
        let key = &data.keys[data.offset(case, sequence, kv_head, key)..][..dim];
        q.iter().zip(key).map(|(a, b)| a.to_f64() * b.to_f64()).sum::<f64>() * f64::from(case.scale())
    };
    let scores: Vec<f64> = keys.iter().map(score).collect();
    let sink = (case.sinks == Sinks::Learned).then(|| f64::from(data.sink_logits[head]));
    let highest = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
    let total: f64 = scores.iter().copied().chain(sink).map(|score| (score - highest).exp()).sum();
    let mut out = vec![(0.0, 0.0); dim];
    for (key, score) in keys.iter().zip(&scores) {
        let weight = (score - highest).exp() / total;
        let value = &data.values[data.offset(case, sequence, kv_head, *key)..][..dim];
        for (out, value) in out.iter_mut().zip(value) {
            out.0 += weight * value.to_f64();
            out.1 += weight * value.to_f64().abs();
        }
    }
    out
}

/// Runs a case as a step does, and returns `out`.
fn compute(case: &Case, data: &Data, run: Run) -> Vec<bf16> {
    compute_planned(case, data, run, |_| {})
}

/// The same, with a plan that `change` has gone over.
fn compute_planned(case: &Case, data: &Data, run: Run, change: fn(&mut AttentionPlan)) -> Vec<bf16> {
    let mut plan = data.plan(case);
    change(&mut plan);
    let device = Device::new(case, data, &plan);
    device.run(case, &plan, run);
    device.out.read_bf16()
}

/// Every number is near the reference, and nothing else was written.
fn check(case: &Case, seed: u64, run: Run) {
    let data = Data::new(case, seed);
    check_out(case, &data, run, &compute(case, &data, run));
}

fn check_out(case: &Case, data: &Data, run: Run, out: &[bf16]) {
    check_rows(case, data, run, out, 1);
}

/// One row of every `each`, and the last of each sequence.
fn check_rows(case: &Case, data: &Data, run: Run, out: &[bf16], each: usize) {
    let mut row = 0;
    for (sequence, &(context, rows)) in case.sequences.iter().enumerate() {
        for i in 0..rows {
            let (numbers, rest) =
                out[row * data.out_stride..][..data.out_stride].split_at(case.heads * case.head_dim);
            let heads = if row % each == 0 || i + 1 == rows { case.heads } else { 0 };
            for head in 0..heads {
                let want = reference(case, data, sequence, row, context + i, head);
                for (d, (want, spread)) in want.into_iter().enumerate() {
                    let got = numbers[head * case.head_dim + d].to_f64();
                    assert!(
                        (got - want).abs() <= tolerance(want, spread),
                        "{case:?}, {run:?}: sequence {sequence}, row {i}, head {head}, number {d} is {got}, not {want}"
                    );
                }
            }
            assert!(rest.iter().all(|number| number.to_bits() == POISON), "wrote beside row {row}");
            row += 1;
        }
    }
}

/// Each case with the copies of every mode, and numbers of its own for each.
fn check_all(cases: impl IntoIterator<Item = Case>) {
    for (number, case) in cases.into_iter().enumerate() {
        for run in (number * COPY_MODES.len()..).take(COPY_MODES.len()) {
            check(&case, run as u64, Run::number(run));
        }
    }
}

#[test]
fn prefill_agrees_around_the_edges_of_rows_and_keys() {
    let edges = [2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129];
    let contexts = [0, 1, 15, 16, 17, 30, 31, 32, 33, 62, 63, 64, 65];
    check_all(edges.iter().map(|&rows| Case::new(64, 1, 1, &[(0, rows)])));
    check_all(contexts.iter().map(|&context| Case::new(128, 1, 1, &[(context, 5)])));
    check_all([31, 32, 33, 64, 65].map(|rows| Case::new(256, 1, 1, &[(rows / 2, rows)])));
    check_all([127, 128, 129].map(|rows| Case::new(128, 1, 1, &[(3, rows)])));
}

#[test]
fn prefill_takes_ragged_batches_of_grouped_heads() {
    check_all([
        Case::new(64, 6, 2, &[(0, 40), (37, 2), (5, 0), (64, 70)]),
        Case::new(128, 4, 2, &[(100, 3), (0, 33), (16, 16)]),
        Case::new(256, 4, 1, &[(7, 9), (0, 66)]),
    ]);
}

#[test]
fn prefill_takes_blocks_of_every_size() {
    check_all(
        [1, 2, 8, 32, 64, 256].map(|size| Case::new(64, 2, 1, &[(50, 30), (3, 20)]).with_blocks_of(size)),
    );
}

#[test]
fn prefill_sees_windows_and_sinks() {
    check_all([
        Case::new(64, 2, 1, &[(0, 150)]).with_window(1, 0),
        Case::new(64, 2, 1, &[(200, 70)]).with_window(64, 0),
        Case::new(64, 2, 1, &[(200, 70)]).with_window(65, 0),
        // The window begins at the last key of a tile, and at the first of one for the last row of a warp.
        Case::new(64, 1, 1, &[(200, 70)]).with_window(74, 0),
        Case::new(64, 1, 1, &[(200, 70)]).with_window(103, 0),
        Case::new(64, 2, 1, &[(300, 40)]).with_window(33, 4),
        Case::new(64, 2, 1, &[(300, 10)]).with_window(20, 64),
        Case::new(64, 2, 1, &[(300, 10)]).with_window(20, 65),
        Case::new(64, 2, 1, &[(130, 10)]).with_window(20, 120),
        Case::new(64, 2, 1, &[(130, 10)]).with_window(u32::MAX, 0),
        Case::new(64, 2, 1, &[(130, 10)]).with_window(u32::MAX - 100, 0),
        Case::new(64, 2, 1, &[(130, 10)]).with_window(20, u32::MAX),
        Case::new(128, 2, 2, &[(90, 40)]).with_window(31, 1).with_learned_sinks(),
        Case::new(256, 2, 1, &[(90, 20)]).with_window(33, 33),
        Case::new(64, 4, 2, &[(0, 20), (3, 2)]).with_learned_sinks(),
    ]);
}

/// The same bits whatever the order of warps and the landing of copies.
#[test]
fn no_order_of_events_changes_a_bit() {
    for head_dim in [64, 128, 256] {
        let case = Case::new(head_dim, 2, 1, &[(75, 70), (600, 1)]).with_window(500, 2);
        let data = Data::new(&case, 77);
        let runs: Vec<Vec<bf16>> = (0..6).map(|number| compute(&case, &data, Run::number(number))).collect();
        assert!(
            runs.iter().all(|out| out.iter().map(|x| x.to_bits()).eq(runs[0].iter().map(|x| x.to_bits())))
        );
        check(&case, 77, Run::number(3));
    }
}

#[test]
fn decode_agrees_around_the_edges_of_tiles_and_chunks() {
    let contexts = [0, 1, 14, 15, 16, 17, 62, 63, 64, 65, 127, 128, 255, 510, 511, 512, 513, 1023, 1024];
    check_all(contexts.iter().map(|&context| Case::new(64, 2, 1, &[(context, 1)])));
    check_all([0, 15, 16, 300, 600].map(|context| Case::new(128, 3, 1, &[(context, 1)])));
    check_all([0, 15, 31, 32, 600].map(|context| Case::new(256, 2, 1, &[(context, 1)])));
}

#[test]
fn decode_takes_ragged_batches_and_groups_of_any_size() {
    check_all([
        Case::new(64, 8, 2, &[(5, 1), (700, 1), (0, 1), (90, 0), (1100, 1)]),
        Case::new(128, 16, 1, &[(40, 1), (530, 1)]),
        Case::new(64, 17, 1, &[(40, 1)]),
        Case::new(128, 40, 2, &[(33, 1), (520, 1)]),
        Case::new(64, 4, 4, &[(20, 1), (31, 1)]).with_blocks_of(1),
        // Nothing comes after the table, where the tile goes on.
        Case::new(64, 4, 4, &[(20, 1)]).with_blocks_of(1),
        Case::new(64, 4, 1, &[(200, 1), (31, 1)]).with_blocks_of(128),
    ]);
}

/// The kernel does not rely on where the plan cuts.
#[test]
fn chunks_may_end_within_a_tile() {
    for head_dim in [64, 128, 256] {
        let case = Case::new(head_dim, 2, 1, &[(99, 1)]);
        let (data, run) = (Data::new(&case, 8), Run::number(head_dim));
        let out = compute_planned(&case, &data, run, |plan| cut_at(plan, [13, 29, 30, 96, 100]));
        check_out(&case, &data, run, &out);
    }
}

/// Cuts the context of the one row there is, up to its end.
fn cut_at(plan: &mut AttentionPlan, ends: [u32; 5]) {
    let begins = [0, ends[0], ends[1], ends[2], ends[3]];
    let chunk = |(slot, (begin, end))| DecodeChunk { sequence: 0, begin, end, slot };
    plan.chunks = (0..).zip(begins.into_iter().zip(ends)).map(chunk).collect();
    plan.merges = vec![Merge { row: 0, first_slot: 0, slots: 5 }];
    plan.slots = 5;
}

#[test]
fn decode_sees_windows_and_sinks() {
    check_all([
        Case::new(64, 2, 1, &[(700, 1)]).with_window(1, 0),
        Case::new(64, 2, 1, &[(700, 1)]).with_window(17, 0),
        Case::new(64, 2, 1, &[(700, 1)]).with_window(188, 0),
        Case::new(64, 2, 1, &[(700, 1)]).with_window(189, 0),
        Case::new(64, 2, 1, &[(700, 1)]).with_window(u32::MAX, 0),
        Case::new(64, 2, 1, &[(700, 1)]).with_window(u32::MAX - 300, 0),
        Case::new(64, 2, 1, &[(700, 1)]).with_window(20, u32::MAX),
        Case::new(64, 2, 1, &[(700, 1), (20, 1)]).with_window(200, 3),
        Case::new(128, 2, 1, &[(1300, 1)]).with_window(30, 5).with_learned_sinks(),
        Case::new(256, 4, 2, &[(90, 1), (600, 1)]).with_learned_sinks(),
    ]);
}

#[test]
fn prefill_and_decode_go_in_one_batch_with_the_bits_they_have_apart() {
    let cases = [
        Case::new(64, 4, 2, &[(30, 1), (10, 50), (600, 1), (0, 2)]),
        Case::new(128, 4, 2, &[(0, 33), (515, 1)]).with_learned_sinks(),
        Case::new(256, 4, 1, &[(0, 3), (70, 65), (530, 1), (2, 1)]).with_window(300, 2),
        Case::new(128, 40, 2, &[(33, 1), (5, 130)]),
    ];
    check_all(cases.clone());
    let bits = |case: &Case| -> Vec<u16> {
        let out = compute(case, &Data::new(case, 3), Run::number(1));
        out.into_iter().map(bf16::to_bits).collect()
    };
    for case in cases {
        assert!(bits(&case) == bits(&Case { launches: Launches::Separate, ..case.clone() }), "{case:?}");
    }
}

/// On a GPU as many blocks as fill it, each of them long: the host's machine runs one after the other.
#[test]
fn rows_of_long_sequences_agree() {
    let (heads, kv_heads, rows, context, decoding) =
        if on_a_real_gpu() { (16, 4, 4000, 6000, 12) } else { (2, 1, 140, 600, 2) };
    for head_dim in [64, 128, 256] {
        let mut sequences = vec![(0, rows), (context / 2, rows / 2)];
        sequences.extend((0..decoding).map(|number| (context + number * 37, 1)));
        let case = Case::new(head_dim, heads, kv_heads, &sequences);
        let (data, run) = (Data::new(&case, head_dim as u64), Run::number(head_dim));
        check_rows(&case, &data, run, &compute(&case, &data, run), 61);
    }
}

/// Scores far beyond what e^x holds: only differences count.
#[test]
fn huge_scores_do_not_overflow() {
    for rows in [1, 20] {
        let case = Case::new(64, 1, 1, &[(40, rows)]);
        let mut data = Data::new(&case, 4);
        for number in &mut data.q[..] {
            *number = bf16::from_f32(number.to_f32() * 1e4);
        }
        let out = compute(&case, &data, Run::number(0));
        let mut rows = out.chunks(data.out_stride);
        assert!(rows.all(|row| row[..case.head_dim].iter().all(|number| number.is_finite())));
    }
}

/// Positions of one score, so high that a float rounds it: those of the first tile count as much as those of the last.
#[test]
fn what_was_seen_early_is_not_worn_away() {
    for (head_dim, rows) in [(64, 2), (64, 1), (128, 2), (256, 2)] {
        let case = Case::new(head_dim, 1, 1, &[(700, rows)]);
        let mut data = Data::new(&case, 6);
        for row in 0..rows {
            data.q[row * data.q_stride..][..head_dim].fill(bf16::from_f32(300.0));
        }
        for position in 0..case.sequences[0].0 + rows {
            let at = data.offset(&case, 0, 0, position);
            data.keys[at..][..head_dim].fill(bf16::from_f32(301.0));
            data.values[at..][..head_dim].fill(bf16::from_f32(if position < 350 { 1.0 } else { -1.0 }));
        }
        let run = Run::number(rows);
        check_out(&case, &data, run, &compute(&case, &data, run));
    }
}

/// Where much is decoded chunks are longer: sequences around the end of one, and of several.
#[test]
fn decode_of_many_sequences_takes_long_chunks() {
    let long = LONG_CHUNK_TOKENS as usize;
    let mut sequences = vec![(3, 1); 8];
    sequences.extend([(long - 2, 1), (long - 1, 1), (long, 1), (2 * long + 100, 1)]);
    for (number, head_dim) in [64, 128, 256].into_iter().enumerate() {
        let case = Case::new(head_dim, 4, 1, &sequences);
        let data = Data::new(&case, number as u64);
        let merges: Vec<u32> = data.plan(&case).merges.iter().map(|merge| merge.slots).collect();
        assert_eq!(merges, [2, 3]);
        let run = Run::number(number);
        check_out(&case, &data, run, &compute(&case, &data, run));
    }
}

/// Parts whose logarithms lie further apart than the exponents of a float reach, the heaviest first, last and between.
#[test]
fn decode_adds_up_parts_that_are_hundreds_apart() {
    for levels in [[0.0, 25.0, 50.0], [50.0, 25.0, 0.0], [0.0, 50.0, 0.0]] {
        let case = Case::new(64, 1, 1, &[(2 * SHORT_CHUNK_TOKENS as usize + 40, 1)]);
        let mut data = Data::new(&case, 5);
        // The first number of query and key adds 64 · level / √64 to a score.
        data.q[0] = bf16::from_f32(64.0);
        for position in 0..=case.sequences[0].0 {
            let at = data.offset(&case, 0, 0, position);
            data.keys[at] = bf16::from_f32(levels[position / SHORT_CHUNK_TOKENS as usize]);
        }
        let run = Run::number(0);
        check_out(&case, &data, run, &compute(&case, &data, run));
    }
}
