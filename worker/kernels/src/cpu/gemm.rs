//! `out = x · wᵀ`: packed weights against any number of rows, every output summed over k in one order.
//!
//! Few rows read bf16 weights as they are (decode is bound by memory); many rows widen each panel once, piece by piece, into a
//! scratch that stays in the cache (prefill is bound by arithmetic). Both give the same bits.

use half::bf16;

use super::CpuKernels;
use super::activations::Activations;
use super::isa::{Isa, Job};
use super::matrix::{PackedLinear, Panels};
use super::shared::SharedMut;
use super::simd::{LANES, Simd, Weight};
use super::tile::{Columns, PANEL_STRIDE, Rows, Sums, TILE_ROWS, TileJob, sweep};

/// From so many rows on, widening a panel first pays.
const WIDEN_ROWS: usize = 4 * TILE_ROWS;
/// Inputs that are widened at once, at most: with those of six rows they fill two thirds of a first-level cache of 32 KiB.
const PIECE_DEPTH: usize = 320;
/// Rows of x that a task holds on to; half of a small L2 cache.
const ROWS_BYTES: usize = 256 << 10;
/// Multiply-adds below which a second thread costs more than it brings.
const TASK_WORK: usize = 1 << 17;

/// Whether a product replaces what is there or is added to it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Store {
    Replace,
    Add,
}

/// `out (+)= x · wᵀ (+ bias)`; shapes are checked by the caller, `out` has its shape already.
pub(crate) fn gemm(
    kernels: &CpuKernels,
    x: &Activations,
    w: &PackedLinear,
    out: &mut Activations,
    store: Store,
) {
    let (rows, panels) = (x.rows(), w.outputs.div_ceil(LANES));
    if rows == 0 || panels == 0 {
        return;
    }
    assert!(x.width() == w.inputs && out.width() == w.outputs && out.rows() == rows);
    let plan = Plan::new(rows, w, kernels.threads());
    let target = SharedMut::new(out.numbers_mut());
    kernels.for_each(plan.row_tasks * plan.panel_tasks, |task| {
        let (row_task, panel_task) = (task / plan.panel_tasks, task % plan.panel_tasks);
        let part = Part {
            x: x.numbers(),
            w,
            out: target,
            store,
            rows: row_task * plan.rows..((row_task + 1) * plan.rows).min(rows),
            panels: panel_task * plan.panels..((panel_task + 1) * plan.panels).min(panels),
        };
        part.run_on(kernels.isa());
    });
}

/// How a product is cut into tasks. Changes nothing in the results.
struct Plan {
    rows: usize,
    panels: usize,
    row_tasks: usize,
    panel_tasks: usize,
}

impl Plan {
    fn new(rows: usize, w: &PackedLinear, threads: usize) -> Self {
        let panels = w.outputs.div_ceil(LANES);
        let rows_task = (ROWS_BYTES / (w.inputs.max(1) * 4)).max(2 * WIDEN_ROWS) / TILE_ROWS * TILE_ROWS;
        let rows_task = rows_task.min(rows);
        let row_tasks = rows.div_ceil(rows_task);
        let work = rows_task * panels * LANES * w.inputs.max(1);
        // More tasks than threads, so that a thread that was held up does not hold up the rest.
        let wanted = (work / TASK_WORK).clamp(1, if threads == 1 { 1 } else { threads * 4 });
        // Whole groups of four panels, the widest tile.
        let panels_task = panels.div_ceil(wanted).next_multiple_of(4);
        Self { rows: rows_task, panels: panels_task, row_tasks, panel_tasks: panels.div_ceil(panels_task) }
    }
}

/// One task: a range of rows by a range of panels.
struct Part<'a> {
    x: &'a [f32],
    w: &'a PackedLinear,
    out: SharedMut<'a>,
    store: Store,
    rows: std::ops::Range<usize>,
    panels: std::ops::Range<usize>,
}

impl Part<'_> {
    fn run_on(self, isa: Isa) {
        isa.run(self);
    }

    fn tiles<'a, W>(&'a self, weights: &'a [W]) -> Tiles<'a, W> {
        Tiles { part: self, weights }
    }

    /// Widens each panel, a piece at a time, and runs all rows against the piece while it is in the first-level cache. Sums
    /// wait in memory between two pieces, which changes none of their bits.
    ///
    /// # Safety
    /// The machine has `V`'s instructions.
    #[inline(always)]
    unsafe fn run_widened<V: Simd>(&self, panels: &[bf16]) {
        let depth = self.w.inputs;
        let piece = depth.div_ceil(depth.div_ceil(PIECE_DEPTH).max(1)).max(1);
        let mut widened = vec![0.0f32; piece * LANES];
        let mut sums = vec![0.0f32; self.rows.len() * LANES];
        for panel in self.panels.clone() {
            for first in (0..depth).step_by(piece) {
                let depths = first..(first + piece).min(depth);
                let stored = &panels[(panel * depth + first) * LANES..][..depths.len() * LANES];
                for (to, from) in widened.chunks_exact_mut(LANES).zip(stored.chunks_exact(LANES)) {
                    // SAFETY: both chunks have LANES numbers; the caller vouches for the instructions.
                    unsafe { V::load_bf16(from.as_ptr()).store(to.as_mut_ptr()) };
                }
                let mut tiles = Piece { part: self, widened: &widened, depths, sums: &mut sums };
                // SAFETY: the caller vouches for the instructions, and `widened` holds this piece of this panel.
                unsafe { sweep::<V, _>(&mut tiles, self.rows.clone(), panel..panel + 1) };
            }
        }
    }
}

/// The tiles of a part against a piece of one panel, widened.
struct Piece<'a> {
    part: &'a Part<'a>,
    widened: &'a [f32],
    /// The inputs that it covers.
    depths: std::ops::Range<usize>,
    /// `[rows of the part, LANES]`, over the inputs before.
    sums: &'a mut [f32],
}

impl TileJob for Piece<'_> {
    #[inline(always)]
    unsafe fn tile<V: Simd, const R: usize, const P: usize>(&mut self, row: usize, panel: usize) {
        let depth = self.part.w.inputs;
        debug_assert!(P == 1 && (row + R) * depth <= self.part.x.len());
        debug_assert!(self.depths.len() * LANES <= self.widened.len());
        let kept = &mut self.sums[(row - self.part.rows.start) * LANES..][..R * LANES];
        let mut sums = Sums::<V, R, 1>(
            [[
                // SAFETY: the caller vouches for the instructions.
                unsafe { V::splat(0.0) },
            ]; R],
        );
        if self.depths.start > 0 {
            for (sum, kept) in sums.0.iter_mut().zip(kept.chunks_exact(LANES)) {
                // SAFETY: a chunk has LANES numbers.
                sum[0] = unsafe { V::load(kept.as_ptr()) };
            }
        }
        // SAFETY: R rows from here on lie within x, as the caller vouches, and the piece has these depths of one panel.
        unsafe {
            let rows = Rows { start: self.part.x.as_ptr(), row_stride: depth }.at(row, self.depths.start);
            let columns = Columns { start: self.widened.as_ptr(), k_stride: PANEL_STRIDE, panel_stride: 0 };
            sums.accumulate(rows, &columns, self.depths.len());
        }
        for (r, (sum, kept)) in sums.0.iter().zip(kept.chunks_exact_mut(LANES)).enumerate() {
            if self.depths.end < depth {
                // SAFETY: a chunk has LANES numbers.
                unsafe { sum[0].store(kept.as_mut_ptr()) };
            } else {
                // SAFETY: as above; tasks have disjoint tiles of `out`.
                unsafe { self.part.finish(row + r, panel, sum[0]) };
            }
        }
    }
}

impl Job for Part<'_> {
    #[inline(always)]
    unsafe fn run<V: Simd>(self) {
        let (rows, panels) = (self.rows.clone(), self.panels.clone());
        // SAFETY: the caller vouches for the instructions; the ranges lie within x and w by construction in `gemm`.
        unsafe {
            match &self.w.panels {
                Panels::F32(weights) => sweep::<V, _>(&mut self.tiles(weights), rows, panels),
                Panels::Bf16(weights) if rows.len() >= WIDEN_ROWS => self.run_widened::<V>(weights),
                Panels::Bf16(weights) => sweep::<V, _>(&mut self.tiles(weights), rows, panels),
            }
        }
    }
}

/// The tiles of a part against weights in memory.
struct Tiles<'a, W> {
    part: &'a Part<'a>,
    weights: &'a [W],
}

impl<W: Weight> TileJob for Tiles<'_, W> {
    #[inline(always)]
    unsafe fn tile<V: Simd, const R: usize, const P: usize>(&mut self, row: usize, panel: usize) {
        let depth = self.part.w.inputs;
        let stored = panel * depth * LANES;
        debug_assert!(stored + P * depth * LANES <= self.weights.len());
        debug_assert!((row + R) * depth <= self.part.x.len());
        // SAFETY: R rows and P panels from here on lie within x and the weights, as the caller vouches.
        let sums = unsafe {
            let rows = Rows { start: self.part.x.as_ptr(), row_stride: depth }.at(row, 0);
            let columns = Columns {
                start: self.weights.as_ptr().add(stored),
                k_stride: PANEL_STRIDE,
                panel_stride: depth * LANES,
            };
            let mut sums = Sums::<V, R, P>::zero();
            sums.accumulate(rows, &columns, depth);
            sums
        };
        for (r, panel_sums) in sums.0.iter().enumerate() {
            for (p, &sum) in panel_sums.iter().enumerate() {
                // SAFETY: as above; tasks have disjoint tiles of `out`.
                unsafe { self.part.finish(row + r, panel + p, sum) };
            }
        }
    }
}

impl Part<'_> {
    /// Adds the bias and what is to be added, and stores one panel of one row.
    ///
    /// # Safety
    /// The machine has `V`'s instructions, row and panel lie within `out`, and no other thread has them.
    #[inline(always)]
    unsafe fn finish<V: Simd>(&self, row: usize, panel: usize, mut sum: V) {
        let (width, column) = (self.w.outputs, panel * LANES);
        if let Some(bias) = &self.w.bias {
            // SAFETY: a bias is padded to whole panels.
            sum = sum.add(unsafe { V::load(bias.as_ptr().add(column)) });
        }
        let lanes = LANES.min(width - column);
        // SAFETY: the caller vouches for row and panel, so `lanes` numbers from here on are in `out` and ours.
        let out = unsafe { self.out.slice(row * width + column, lanes) };
        if lanes == LANES {
            // SAFETY: `out` has LANES numbers.
            unsafe {
                if self.store == Store::Add {
                    sum = sum.add(V::load(out.as_ptr()));
                }
                sum.store(out.as_mut_ptr());
            }
            return;
        }
        for (to, from) in out.iter_mut().zip(sum.to_array()) {
            *to = if self.store == Store::Add { from + *to } else { from };
        }
    }
}
