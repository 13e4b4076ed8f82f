//! Attention: prompts, single rows over long contexts, and both in one step.

use worker_kernels::cuda::launch::{self, Launch};
use worker_kernels::cuda::params::{
    CombineParams, DecodeParams, MixedParams, Paging, PrefillParams, PrefillWgmmaParams, Visibility,
};
use worker_kernels::cuda::plan::{AttentionPlan, Cut};
use worker_kernels::cuda::tensor_map::Matrix;
use worker_kernels::cuda::{CudaError, Memory};
use worker_kernels::{KvLayout, Span};

use crate::{Rates, Size, Work};

/// Query heads and KV heads.
#[derive(Clone, Copy)]
struct Heads {
    query: usize,
    kv: usize,
}

/// As in most models.
const USUAL: Heads = Heads { query: 32, kv: 8 };
/// One KV head for all, as many as a block takes.
const WIDE: Heads = Heads { query: 64, kv: 1 };
const BLOCK_TOKENS: usize = 16;

/// One whole prompt.
pub(crate) fn prefill(rates: &mut Rates, head_dim: usize, rows: usize) {
    let rows = rates.length(rows);
    let batch = Batch::new(rates, (head_dim, USUAL), &[(0, rows)]);
    let what = format!("prefill, head_dim {head_dim}, {rows} rows");
    rates.measure(&what, Work::Flops(batch.prefill_flops), || batch.launch(rates));
}

/// The same by wgmma, where there is that.
pub(crate) fn prefill_by_wgmma(rates: &mut Rates, head_dim: usize, rows: usize) {
    if !rates.gpu.has_wgmma() {
        return rates.not_here("kernels by wgmma are for compute capability 9.0 only");
    }
    let rows = rates.length(rows);
    let batch = Batch::in_tiles(rates, (head_dim, USUAL), &[(0, rows)], launch::WGMMA_TILE_ROWS);
    let (launch, params) = batch.by_wgmma(rates);
    let what = format!("prefill by wgmma, head_dim {head_dim}, {rows} rows");
    rates.measure(&what, Work::Flops(batch.prefill_flops), || rates.launch(launch, &params));
}

/// A row for each of many sequences.
pub(crate) fn decode(rates: &mut Rates, head_dim: usize) {
    let context = rates.length(4096);
    measure_decode(rates, (head_dim, USUAL), many(rates), context);
}

/// The same with many query heads for each KV head: 64 FLOPs a byte, for which the tensor cores may be too slow.
pub(crate) fn decode_wide(rates: &mut Rates) {
    let context = rates.length(16_384);
    measure_decode(rates, (128, WIDE), many(rates), context);
}

fn many(rates: &Rates) -> usize {
    match rates.size {
        Size::Full => 64,
        Size::Small => 2,
    }
}

/// A row of one sequence, whose context is all there is to share among the multiprocessors.
pub(crate) fn decode_alone(rates: &mut Rates) {
    let context = rates.length(131_072);
    measure_decode(rates, (128, USUAL), 1, context);
}

fn measure_decode(rates: &mut Rates, (head_dim, heads): (usize, Heads), sequences: usize, context: usize) {
    let batch = Batch::new(rates, (head_dim, heads), &vec![(context - 1, 1); sequences]);
    let Heads { query, kv } = heads;
    let what =
        format!("decode, head_dim {head_dim}, {query} heads of {kv}, {sequences} sequences of {context}");
    rates.measure(&what, Work::Bytes(batch.decode_bytes), || batch.launch(rates));
}

/// A chunk of a prompt beside sequences that decode: in one launch, and in two. The rate counts the prompt's FLOPs only.
pub(crate) fn mixed(rates: &mut Rates) {
    let (rows, context) = (rates.length(4096), rates.length(4096));
    let mut sequences = vec![(context - 1, 1); many(rates)];
    sequences.push((0, rows));
    let batch = Batch::new(rates, (128, USUAL), &sequences);
    let what = format!("{rows} rows prefill beside {} that decode over {context}", sequences.len() - 1);
    let work = Work::Flops(batch.prefill_flops);
    rates.measure(&format!("{what}, one launch"), work, || batch.launch(rates));
    rates.measure(&format!("{what}, two launches"), work, || batch.launch_apart(rates));
}

/// A step's attention on the device.
struct Batch {
    prefill: PrefillParams,
    decode: DecodeParams,
    combine: CombineParams,
    tiles: Launch,
    chunks: Launch,
    merges: Launch,
    /// Of one layer, with the blocks of all sequences.
    layout: KvLayout,
    rows: usize,
    row_tiles: usize,
    prefill_flops: f64,
    decode_bytes: f64,
    _memory: Vec<Memory>,
}

impl Batch {
    /// `(context, rows)` of each sequence.
    fn new(rates: &mut Rates, shape: (usize, Heads), sequences: &[(usize, usize)]) -> Self {
        Self::in_tiles(rates, shape, sequences, launch::prefill_tile_rows(shape.0).unwrap())
    }

    fn in_tiles(
        rates: &mut Rates,
        (head_dim, heads): (usize, Heads),
        sequences: &[(usize, usize)],
        tile_rows: usize,
    ) -> Self {
        let width = heads.query * head_dim;
        let rows: usize = sequences.iter().map(|(_, rows)| rows).sum();
        let tables = tables(sequences);
        let blocks: usize = tables.iter().map(Vec::len).sum();
        let cut = Cut::of(tile_rows, rates.gpu.multiprocessors(), heads.kv);
        let plan = plan(cut, sequences, &tables);
        let parts = plan.slots as usize * heads.query;
        let pool_numbers = blocks * BLOCK_TOKENS * heads.kv * head_dim;
        let memory = vec![
            rates.random_bf16(rows * width),
            rates.random_bf16(pool_numbers),
            rates.random_bf16(pool_numbers),
            rates.empty(rows * width * 2),
            rates.empty(parts * head_dim * 4),
            rates.empty(parts * 4),
            rates.upload(&plan.tiles),
            rates.upload(&plan.chunks),
            rates.upload(&plan.merges),
            rates.upload(&plan.sequences),
            rates.upload(&plan.block_tables),
        ];
        let [q, keys, values, out, partial_sums, partial_logs, tiles, chunks, merges, list, block_tables] =
            std::array::from_fn(|index| memory[index].address());
        let paging = Paging { block_tables, kv_heads: heads.kv as u32, block_shift: BLOCK_TOKENS.ilog2() };
        let (query_heads, stride) = (heads.query as u32, width as u32);
        let prefill = PrefillParams {
            q,
            keys,
            values,
            out,
            tiles,
            sequences: list,
            paging,
            heads: query_heads,
            q_stride: stride,
            out_stride: stride,
            score_scale: 1.0 / (head_dim as f32).sqrt(),
            ..Default::default()
        };
        let decode = DecodeParams {
            q,
            keys,
            values,
            out,
            partial_sums,
            partial_logs,
            chunks,
            sequences: list,
            paging,
            heads: query_heads,
            q_stride: stride,
            out_stride: stride,
            score_scale: prefill.score_scale,
            begins_early: 1,
            reserved: 0,
            ..Default::default()
        };
        let combine = CombineParams {
            partial_sums,
            partial_logs,
            merges,
            out,
            heads: query_heads,
            out_stride: stride,
            head_dim: head_dim as u32,
            ..Default::default()
        };
        let (prefill_flops, decode_bytes) = work((head_dim, heads), sequences);
        Self {
            prefill,
            decode,
            combine,
            tiles: launch::prefill(head_dim, plan.tiles.len(), heads.query).unwrap(),
            chunks: launch::decode(head_dim, plan.chunks.len(), heads.query, heads.kv).unwrap(),
            merges: launch::combine(head_dim, plan.merges.len(), heads.query).unwrap(),
            layout: KvLayout { layers: 1, kv_heads: heads.kv, head_dim, block_tokens: BLOCK_TOKENS, blocks },
            rows,
            row_tiles: plan.tiles.len(),
            prefill_flops,
            decode_bytes,
            _memory: memory,
        }
    }

    /// As a step does it.
    fn launch(&self, rates: &Rates) -> Result<(), CudaError> {
        if self.tiles.grid == 0 || self.chunks.grid == 0 {
            return self.launch_apart(rates);
        }
        let params = MixedParams {
            prefill: self.prefill,
            decode: self.decode,
            prefill_blocks: self.tiles.grid,
            decode_blocks: self.chunks.grid,
        };
        rates.launch(launch::mixed(self.layout.head_dim, self.tiles, self.chunks).unwrap(), &params)?;
        rates.launch(self.merges, &self.combine)
    }

    fn by_wgmma(&self, rates: &Rates) -> (Launch, PrefillWgmmaParams) {
        let heads = self.prefill.heads as usize;
        let multiprocessors = rates.gpu.multiprocessors();
        let launch =
            launch::prefill_wgmma(self.layout.head_dim, self.row_tiles, heads, multiprocessors).unwrap();
        let works = (self.row_tiles, launch.grid);
        (launch, PrefillWgmmaParams::new(&self.prefill, self.rows, self.layout, works, Matrix::map).unwrap())
    }

    fn launch_apart(&self, rates: &Rates) -> Result<(), CudaError> {
        rates.launch(self.tiles, &self.prefill)?;
        rates.launch(self.chunks, &self.decode)?;
        rates.launch(self.merges, &self.combine)
    }
}

/// FLOPs of those that prefill, bytes of those that decode.
fn work((head_dim, heads): (usize, Heads), sequences: &[(usize, usize)]) -> (f64, f64) {
    let (mut flops, mut bytes) = (0.0, 0.0);
    for &(context, rows) in sequences {
        if rows == 1 {
            bytes += 4.0 * (heads.kv * head_dim * (context + 1)) as f64;
        } else {
            let rows = rows as f64;
            flops += 4.0 * (heads.query * head_dim) as f64 * (rows * context as f64 + rows * rows / 2.0);
        }
    }
    (flops, bytes)
}

fn plan(cut: Cut, sequences: &[(usize, usize)], tables: &[Vec<u32>]) -> AttentionPlan {
    let mut first_row = 0;
    let spans: Vec<Span<'_>> = sequences
        .iter()
        .zip(tables)
        .map(|(&(context_tokens, rows), blocks)| {
            first_row += rows;
            Span { first_row: first_row - rows, rows, context_tokens, blocks }
        })
        .collect();
    AttentionPlan::new(&spans, cut, Visibility::default()).unwrap()
}

/// Blocks of the sequences, in disorder.
fn tables(sequences: &[(usize, usize)]) -> Vec<Vec<u32>> {
    let needed: Vec<usize> =
        sequences.iter().map(|(context, rows)| (context + rows).div_ceil(BLOCK_TOKENS)).collect();
    let total: usize = needed.iter().sum();
    // A step without a divisor in common with the total visits every block once.
    let step = (total / 3 + 1..).find(|&step| gcd(step, total) == 1).unwrap();
    let mut blocks = (0..total).map(|index| (index * step % total) as u32);
    needed.into_iter().map(|count| blocks.by_ref().take(count).collect()).collect()
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}
