//! Causal attention over the paged pool, for prefill chunks and decodes alike.
//!
//! A task is one KV head of some neighbouring positions of one sequence: its rows are those positions × the query heads
//! that share the KV head. It walks the positions in chunks of whole blocks, from the first, with a running maximum
//! (online softmax: Milakov & Gimelshein 2018). Chunks begin at fixed positions and what a row may not see counts exactly
//! zero, so a row's result depends neither on the rows beside it nor on how the prompt was cut.

use std::ops::Range;

use super::CpuKernels;
use super::activations::Activations;
use super::isa::Job;
use super::kv_pool::CpuKvPool;
use super::shared::SharedMut;
use super::simd::{LANES, Simd};
use super::tile::{Columns, Rows, Sums, TILE_ROWS, TileJob, sweep};
use crate::{AttentionShape, KernelError, Span};

/// Positions that a chunk has at least, unless one block has more: their keys and values stay in the first-level cache.
const CHUNK_LANES: usize = 128;
/// Rows of a task: enough to use each key tile often.
const TASK_ROWS: usize = 6 * TILE_ROWS;

/// Attention of all rows of `qkv`; see [`crate::Kernels::attention`].
pub(crate) fn attention(
    kernels: &CpuKernels,
    qkv: &Activations,
    pool: &CpuKvPool,
    shape: AttentionShape<'_>,
    out: &mut Activations,
) -> Result<(), KernelError> {
    let layout = pool.layout();
    pool.layout().check(shape.spans, qkv.rows(), shape.layer)?;
    if shape.heads == 0 || !shape.heads.is_multiple_of(layout.kv_heads) {
        return Err(KernelError::Shape {
            operation: "attention",
            expected: format!("a multiple of {} heads", layout.kv_heads),
            found: format!("{}", shape.heads),
        });
    }
    qkv.expect_width("attention", (shape.heads + 2 * layout.kv_heads) * layout.head_dim)?;
    out.reset(qkv.rows(), shape.heads * layout.head_dim);
    let group = shape.heads / layout.kv_heads;
    let tasks = tasks(shape.spans, layout.kv_heads, (TASK_ROWS / group).max(1));
    let work: usize = tasks.iter().map(|task| task.work() * group * layout.head_dim).sum();
    let width = out.width();
    let target = SharedMut::new(out.numbers_mut());
    kernels.for_each_worth(tasks.len(), work, |index| {
        let task = &tasks[index];
        let scratch = Scratch::new(pool, task.positions.len() * group);
        kernels.isa().run(Head { qkv, pool, shape, group, task, scratch, out: target, width });
    });
    Ok(())
}

/// One KV head of neighbouring positions of one span.
struct Task<'a> {
    span: &'a Span<'a>,
    kv_head: usize,
    /// Positions in the sequence.
    positions: Range<usize>,
}

impl Task<'_> {
    fn work(&self) -> usize {
        2 * self.positions.len() * self.positions.end
    }
}

fn tasks<'a>(spans: &'a [Span<'a>], kv_heads: usize, step: usize) -> Vec<Task<'a>> {
    let mut tasks = Vec::new();
    for span in spans {
        for start in (span.context_tokens..span.end()).step_by(step) {
            let end = (start + step).min(span.end());
            tasks.extend((0..kv_heads).map(|kv_head| Task { span, kv_head, positions: start..end }));
        }
    }
    tasks
}

/// What a task remembers of its rows.
struct Scratch {
    /// `[rows, head_dim]`
    queries: Vec<f32>,
    /// `[rows, chunk lanes]`, scores and then weights.
    scores: Vec<f32>,
    /// `[rows, value_width]`, not yet divided by the sum of weights.
    values: Vec<f32>,
    /// `[rows, LANES]`, sums of weights by lane.
    sums: Vec<f32>,
    /// `[rows]`, the highest score so far.
    highest: Vec<f32>,
    /// `[rows]`, what earlier chunks count for under the new maximum.
    rescale: Vec<f32>,
}

impl Scratch {
    fn new(pool: &CpuKvPool, rows: usize) -> Self {
        Self {
            queries: vec![0.0; rows * pool.layout().head_dim],
            scores: vec![0.0; rows * chunk_blocks(pool) * pool.block_lanes()],
            values: vec![0.0; rows * pool.value_width()],
            sums: vec![0.0; rows * LANES],
            highest: vec![f32::NEG_INFINITY; rows],
            rescale: vec![0.0; rows],
        }
    }

    fn rows(&self) -> usize {
        self.highest.len()
    }
}

fn chunk_blocks(pool: &CpuKvPool) -> usize {
    CHUNK_LANES.div_ceil(pool.block_lanes())
}

/// A block of a chunk, as one task sees it.
struct VisibleBlock<'a> {
    block: u32,
    /// Its first lane in the chunk's scores.
    first_lane: usize,
    /// Its first position in the sequence.
    first_position: usize,
    /// Positions that some row of the task may see.
    visible: usize,
    keys: &'a [f32],
    values: &'a [f32],
}

impl VisibleBlock<'_> {
    fn lanes(&self) -> usize {
        self.visible.next_multiple_of(LANES)
    }

    /// Asks for the values, which are read after all scores of the chunk are weights: memory would idle until then.
    #[inline(always)]
    fn fetch_values<V: Simd>(&self, value_width: usize) {
        for part in self.values[..self.visible * value_width].as_chunks::<LANES>().0 {
            V::fetch(part.as_ptr().cast());
        }
    }
}

struct Head<'a> {
    qkv: &'a Activations,
    pool: &'a CpuKvPool,
    shape: AttentionShape<'a>,
    group: usize,
    task: &'a Task<'a>,
    scratch: Scratch,
    out: SharedMut<'a>,
    width: usize,
}

impl Job for Head<'_> {
    #[inline(always)]
    unsafe fn run<V: Simd>(mut self) {
        self.gather_queries();
        let chunk_tokens = chunk_blocks(self.pool) * self.pool.layout().block_tokens;
        for chunk in 0..self.task.positions.end.div_ceil(chunk_tokens) {
            let blocks = self.chunk(chunk);
            // SAFETY: the caller vouches for the instructions; the blocks are those of this chunk.
            unsafe {
                self.score::<V>(&blocks);
                self.mask(&blocks);
                self.weigh::<V>(&blocks);
                self.add_values::<V>(&blocks);
            }
        }
        // SAFETY: the caller vouches for the instructions.
        unsafe { self.finish::<V>() };
    }
}

impl<'a> Head<'a> {
    /// Copies the task's queries side by side: row `i · group + g` is position i, head g of the group.
    fn gather_queries(&mut self) {
        let head_dim = self.pool.layout().head_dim;
        let first_row = self.task.span.first_row + self.task.positions.start - self.task.span.context_tokens;
        let columns = self.group * head_dim;
        for (i, rows) in self.scratch.queries.chunks_exact_mut(columns).enumerate() {
            rows.copy_from_slice(&self.qkv.row(first_row + i)[self.task.kv_head * columns..][..columns]);
        }
    }

    fn chunk(&self, chunk: usize) -> Vec<VisibleBlock<'a>> {
        let (layer, head, end) = (self.shape.layer, self.task.kv_head, self.task.positions.end);
        let block_tokens = self.pool.layout().block_tokens;
        let first = chunk * chunk_blocks(self.pool);
        let last = (first + chunk_blocks(self.pool)).min(end.div_ceil(block_tokens));
        let block = |index: usize| {
            let block = self.task.span.blocks[index];
            VisibleBlock {
                block,
                first_lane: (index - first) * self.pool.block_lanes(),
                first_position: index * block_tokens,
                visible: block_tokens.min(end - index * block_tokens),
                keys: self.pool.keys(layer, block, head),
                values: self.pool.values(layer, block, head),
            }
        };
        (first..last).map(block).collect()
    }

    fn chunk_lanes(&self) -> usize {
        self.scratch.scores.len() / self.scratch.rows()
    }

    /// Scores of all rows against the chunk's keys.
    ///
    /// # Safety
    /// The machine has `V`'s instructions.
    #[inline(always)]
    unsafe fn score<V: Simd>(&mut self, blocks: &[VisibleBlock<'_>]) {
        let (lanes, rows) = (self.chunk_lanes(), self.scratch.rows());
        for block in blocks {
            debug_assert!(block.first_lane + block.lanes() <= lanes, "block {}", block.block);
            block.fetch_values::<V>(self.pool.value_width());
            let mut scores = Scores {
                queries: &self.scratch.queries,
                head_dim: self.pool.layout().head_dim,
                keys: block.keys,
                scale: self.shape.scale,
                scores: &mut self.scratch.scores[block.first_lane..],
                lanes,
            };
            // SAFETY: the block has these key tiles, and the scores have room for them in each row.
            unsafe { sweep::<V, _>(&mut scores, 0..rows, 0..block.lanes() / LANES) };
        }
    }

    /// Sets to −∞ what a row may not see: later positions, and lanes that are no positions.
    fn mask(&mut self, blocks: &[VisibleBlock<'_>]) {
        let lanes = self.chunk_lanes();
        for (row, scores) in self.scratch.scores.chunks_exact_mut(lanes).enumerate() {
            let end = self.task.positions.start + row / self.group + 1;
            for block in blocks {
                let seen = end.saturating_sub(block.first_position).min(block.visible);
                scores[block.first_lane..][seen..block.lanes()].fill(f32::NEG_INFINITY);
            }
        }
    }

    /// Scores become weights: e^(score − maximum), with the maximum of everything up to this chunk.
    ///
    /// # Safety
    /// The machine has `V`'s instructions.
    #[inline(always)]
    unsafe fn weigh<V: Simd>(&mut self, blocks: &[VisibleBlock<'_>]) {
        let lanes = self.chunk_lanes();
        let used = blocks.last().map_or(0, |block| block.first_lane + block.lanes());
        for row in 0..self.scratch.rows() {
            let scores = &mut self.scratch.scores[row * lanes..][..used];
            let sums = &mut self.scratch.sums[row * LANES..][..LANES];
            // SAFETY: chunks and `sums` have LANES numbers; the caller vouches for the instructions.
            unsafe {
                let mut highest = V::splat(self.scratch.highest[row]);
                for part in scores.chunks_exact(LANES) {
                    highest = highest.max(V::load(part.as_ptr()));
                }
                let maximum = highest.highest();
                let rescale = V::splat(self.scratch.highest[row] - maximum).exp();
                let mut sum = V::load(sums.as_ptr()).mul(rescale);
                for part in scores.chunks_exact_mut(LANES) {
                    let weight = V::load(part.as_ptr()).sub(V::splat(maximum)).exp();
                    weight.store(part.as_mut_ptr());
                    sum = sum.add(weight);
                }
                sum.store(sums.as_mut_ptr());
                self.scratch.highest[row] = maximum;
                self.scratch.rescale[row] = rescale.to_array()[0];
            }
        }
    }

    /// Adds the chunk's weighted values.
    ///
    /// # Safety
    /// The machine has `V`'s instructions.
    #[inline(always)]
    unsafe fn add_values<V: Simd>(&mut self, blocks: &[VisibleBlock<'_>]) {
        let (lanes, rows, value_width) = (self.chunk_lanes(), self.scratch.rows(), self.pool.value_width());
        let mut values = Values {
            weights: &self.scratch.scores,
            lanes,
            rescale: &self.scratch.rescale,
            blocks,
            values: &mut self.scratch.values,
            value_width,
        };
        // SAFETY: the blocks' values have this width, and `values` has `rows` rows of it.
        unsafe { sweep::<V, _>(&mut values, 0..rows, 0..value_width / LANES) };
    }

    /// Divides by the sum of weights and writes the rows to their place.
    ///
    /// # Safety
    /// The machine has `V`'s instructions.
    #[inline(always)]
    unsafe fn finish<V: Simd>(&mut self) {
        let (head_dim, value_width) = (self.pool.layout().head_dim, self.pool.value_width());
        let first_row = self.task.span.first_row + self.task.positions.start - self.task.span.context_tokens;
        for (row, values) in self.scratch.values.chunks_exact_mut(value_width).enumerate() {
            // SAFETY: chunks have LANES numbers; each row and head of `out` belongs to one row of one task.
            let to = unsafe {
                let total = V::splat(V::load(self.scratch.sums[row * LANES..][..LANES].as_ptr()).sum());
                for part in values.chunks_exact_mut(LANES) {
                    V::load(part.as_ptr()).div(total).store(part.as_mut_ptr());
                }
                let head = self.task.kv_head * self.group + row % self.group;
                self.out.slice((first_row + row / self.group) * self.width + head * head_dim, head_dim)
            };
            to.copy_from_slice(&values[..head_dim]);
        }
    }
}

/// Tiles of queries × keys.
struct Scores<'a> {
    queries: &'a [f32],
    head_dim: usize,
    keys: &'a [f32],
    scale: f32,
    scores: &'a mut [f32],
    lanes: usize,
}

impl TileJob for Scores<'_> {
    #[inline(always)]
    unsafe fn tile<V: Simd, const R: usize, const P: usize>(&mut self, row: usize, panel: usize) {
        let tile = self.head_dim * LANES;
        // SAFETY: R queries and P key tiles from here on exist, as the caller vouches.
        unsafe {
            let rows = Rows { start: self.queries.as_ptr(), row_stride: self.head_dim }.at(row, 0);
            let columns =
                Columns { start: self.keys[panel * tile..].as_ptr(), k_stride: LANES, panel_stride: tile };
            let mut sums = Sums::<V, R, P>::zero();
            sums.accumulate(rows, &columns, self.head_dim);
            for (r, panel_sums) in sums.0.iter().enumerate() {
                for (p, sum) in panel_sums.iter().enumerate() {
                    let to = &mut self.scores[(row + r) * self.lanes + (panel + p) * LANES..][..LANES];
                    sum.mul(V::splat(self.scale)).store(to.as_mut_ptr());
                }
            }
        }
    }
}

/// Tiles of weights × values.
struct Values<'a> {
    weights: &'a [f32],
    lanes: usize,
    rescale: &'a [f32],
    blocks: &'a [VisibleBlock<'a>],
    values: &'a mut [f32],
    value_width: usize,
}

impl TileJob for Values<'_> {
    #[inline(always)]
    unsafe fn tile<V: Simd, const R: usize, const P: usize>(&mut self, row: usize, panel: usize) {
        // SAFETY: R rows and P panels of values and weights exist, as the caller vouches; a block has `visible` positions.
        unsafe {
            let mut sums = Sums::<V, R, P>::zero();
            for (r, panel_sums) in sums.0.iter_mut().enumerate() {
                for (p, sum) in panel_sums.iter_mut().enumerate() {
                    let from = &self.values[(row + r) * self.value_width + (panel + p) * LANES..][..LANES];
                    *sum = V::load(from.as_ptr()).mul(V::splat(self.rescale[row + r]));
                }
            }
            for block in self.blocks {
                let rows = Rows { start: self.weights.as_ptr(), row_stride: self.lanes };
                let columns = Columns {
                    start: block.values[panel * LANES..].as_ptr(),
                    k_stride: self.value_width,
                    panel_stride: LANES,
                };
                sums.accumulate(rows.at(row, block.first_lane), &columns, block.visible);
            }
            for (r, panel_sums) in sums.0.iter().enumerate() {
                for (p, sum) in panel_sums.iter().enumerate() {
                    let to = &mut self.values[(row + r) * self.value_width + (panel + p) * LANES..][..LANES];
                    sum.store(to.as_mut_ptr());
                }
            }
        }
    }
}
