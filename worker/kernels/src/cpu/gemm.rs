//! `out = x · wᵀ`: packed weights against any number of rows, every output summed over k in one order.
//!
//! Weights are read as they are stored, bf16 or f32, by any number of rows. One row is bound by memory; from a few dozen on the
//! multiply-adds are, and the two instructions that widen sixteen bf16 run beside them. While the rows of a panel are computed,
//! each tile of them fetches its share of the next panel.

use std::ops::Range;

use super::CpuKernels;
use super::activations::Activations;
use super::isa::{Isa, Job};
use super::matrix::{PackedLinear, Panels};
use super::shared::SharedMut;
use super::simd::{LANES, Simd, Weight};
use super::tile::{Columns, PANEL_STRIDE, Rows, Streamed, Sums, TILE_ROWS, TileJob, sweep};

/// Rows of x that a task holds on to; half of a small L2 cache.
const ROWS_BYTES: usize = 256 << 10;
/// Rows of a task at least, if there are so many: each panel is read once for all of them.
const LEAST_ROWS: usize = 8 * TILE_ROWS;
/// Lower tiles are computed faster than weights arrive, which the processor fetches well enough in their order.
const LOW_TILE: usize = 4;
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
    let rows = x.rows();
    if rows == 0 || w.outputs == 0 {
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
            rows: plan.rows(row_task, rows),
            panels: plan.panels(panel_task),
        };
        part.run_on(kernels.isa());
    });
}

/// How a product is cut into tasks, all of about the same size. Changes nothing in the results.
struct Plan {
    rows_task: usize,
    row_tasks: usize,
    panels: usize,
    /// Panels that are not parted: those of the widest tile.
    group: usize,
    panel_tasks: usize,
}

impl Plan {
    fn new(rows: usize, w: &PackedLinear, threads: usize) -> Self {
        let panels = w.outputs.div_ceil(LANES);
        let rows_task = (ROWS_BYTES / (w.inputs.max(1) * 4)).max(LEAST_ROWS) / TILE_ROWS * TILE_ROWS;
        let rows_task = rows_task.min(rows);
        let row_tasks = rows.div_ceil(rows_task);
        let group = if rows < LOW_TILE { 4 } else { 2 };
        let work = rows_task * panels * LANES * w.inputs.max(1);
        // More tasks than threads, so that a thread that was held up does not hold up the rest.
        let wanted = (work / TASK_WORK).clamp(1, if threads == 1 { 1 } else { threads * 4 });
        Self { rows_task, row_tasks, panels, group, panel_tasks: wanted.min(panels.div_ceil(group)) }
    }

    fn rows(&self, task: usize, rows: usize) -> Range<usize> {
        let start = task * self.rows_task;
        start..(start + self.rows_task).min(rows)
    }

    fn panels(&self, task: usize) -> Range<usize> {
        let groups = self.panels.div_ceil(self.group);
        // What is left over goes to the first tasks: the thread that is at work already takes those.
        let start = |task: usize| ((task * groups).div_ceil(self.panel_tasks) * self.group).min(self.panels);
        start(task)..start(task + 1)
    }
}

/// One task: a range of rows by a range of panels.
struct Part<'a> {
    x: &'a [f32],
    w: &'a PackedLinear,
    out: SharedMut<'a>,
    store: Store,
    rows: Range<usize>,
    panels: Range<usize>,
}

impl Part<'_> {
    fn run_on(self, isa: Isa) {
        isa.run(self);
    }

    fn tiles<'a, W>(&'a self, weights: &'a [W]) -> Tiles<'a, W> {
        Tiles { part: self, weights }
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
                Panels::Bf16(weights) => sweep::<V, _>(&mut self.tiles(weights), rows, panels),
            }
        }
    }
}

/// The tiles of a part against its weights.
struct Tiles<'a, W> {
    part: &'a Part<'a>,
    weights: &'a [W],
}

impl<W: Weight> Tiles<'_, W> {
    /// P panels, and for the tile that begins with row `row` its share of the P behind them.
    #[inline(always)]
    fn streamed<const P: usize>(&self, row: usize, panel: usize) -> Streamed<W> {
        let (rows, panel_numbers) = (&self.part.rows, self.part.w.inputs * LANES);
        let start = self.weights[panel * panel_numbers..].as_ptr();
        let columns = Columns { start, k_stride: PANEL_STRIDE, panel_stride: panel_numbers };
        let tiles = rows.len().div_ceil(TILE_ROWS);
        if tiles == 1 {
            // All of the next panels would be too much for one tile to ask for; what it reads anyway costs nothing.
            return Streamed { columns, ahead: start, ahead_stride: LANES };
        }
        let tile = (row - rows.start) * tiles / rows.len();
        let ahead = start.wrapping_add(P * panel_numbers + tile * P * panel_numbers / tiles);
        Streamed { columns, ahead, ahead_stride: P * LANES / tiles }
    }
}

impl<W: Weight> TileJob for Tiles<'_, W> {
    #[inline(always)]
    unsafe fn tile<V: Simd, const R: usize, const P: usize>(&mut self, row: usize, panel: usize) {
        let depth = self.part.w.inputs;
        debug_assert!((panel + P) * depth * LANES <= self.weights.len());
        debug_assert!((row + R) * depth <= self.part.x.len());
        let weights = self.streamed::<P>(row, panel);
        // SAFETY: R rows and P panels from here on lie within x and the weights, as the caller vouches.
        let sums = unsafe {
            let rows = Rows { start: self.part.x.as_ptr(), row_stride: depth }.at(row, 0);
            let mut sums = Sums::<V, R, P>::zero();
            if R < LOW_TILE {
                sums.accumulate(rows, &weights.columns, depth);
            } else {
                sums.accumulate(rows, &weights, depth);
            }
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
