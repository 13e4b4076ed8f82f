//! The one inner loop: sums of a small tile of rows × panels, kept in registers.
//!
//! Linear layers, scores and weighted values all go through [`Sums::accumulate`]. Each output lane is one chain of
//! multiply-adds in the order of k, whatever the tile's shape: this is where batch invariance comes from.

use super::simd::{LANES, Simd, Weight};

/// Rows that a tile may have.
pub(crate) const TILE_ROWS: usize = 6;

/// Steps of k in one turn of the loop, so that the rows' addresses are computed once for all of them.
const UNROLL: usize = 4;

/// The left operand: `row_stride` numbers from one row to the next.
#[derive(Clone, Copy)]
pub(crate) struct Rows {
    pub(crate) start: *const f32,
    pub(crate) row_stride: usize,
}

impl Rows {
    /// # Safety
    /// `row` and `k` lie within the memory that `start` points into.
    #[inline(always)]
    pub(crate) unsafe fn at(self, row: usize, k: usize) -> Self {
        // SAFETY: the caller vouches for the range.
        Self { start: unsafe { self.start.add(row * self.row_stride + k) }, ..self }
    }
}

/// The right operand: [`LANES`] numbers for each k and panel.
pub(crate) trait Right {
    /// The numbers of `k` in panel `panel` of the tile.
    ///
    /// # Safety
    /// The machine has `V`'s instructions, and `k` and `panel` lie within the operand.
    unsafe fn load<V: Simd>(&self, k: usize, panel: usize) -> V;

    /// Asks for what will be read later; called once in [`UNROLL`] steps of k.
    #[inline(always)]
    fn fetch_ahead<V: Simd>(&self, _k: usize) {}
}

/// A right operand in memory: `k_stride` numbers from one k to the next, the next panel `panel_stride` further on.
pub(crate) struct Columns<W> {
    pub(crate) start: *const W,
    pub(crate) k_stride: usize,
    pub(crate) panel_stride: usize,
}

impl<W: Weight> Right for Columns<W> {
    #[inline(always)]
    unsafe fn load<V: Simd>(&self, k: usize, panel: usize) -> V {
        // SAFETY: the caller vouches for k and panel, and for the instructions.
        unsafe { W::load(self.start.add(k * self.k_stride + panel * self.panel_stride)) }
    }
}

/// The same, while a part of what stands behind it is brought into the second-level cache.
pub(crate) struct Streamed<W> {
    pub(crate) columns: Columns<W>,
    /// Where that part begins. It need not exist.
    pub(crate) ahead: *const W,
    /// Numbers of it for each k.
    pub(crate) ahead_stride: usize,
}

impl<W: Weight> Right for Streamed<W> {
    #[inline(always)]
    unsafe fn load<V: Simd>(&self, k: usize, panel: usize) -> V {
        // SAFETY: the caller's promise is the one that `Columns` asks for.
        unsafe { self.columns.load(k, panel) }
    }

    #[inline(always)]
    fn fetch_ahead<V: Simd>(&self, k: usize) {
        V::fetch(self.ahead.wrapping_add(k * self.ahead_stride).cast());
    }
}

/// Sums of R rows × P panels.
#[derive(Clone, Copy)]
pub(crate) struct Sums<V, const R: usize, const P: usize>(pub(crate) [[V; P]; R]);

impl<V: Simd, const R: usize, const P: usize> Sums<V, R, P> {
    /// # Safety
    /// The machine has `V`'s instructions.
    #[inline(always)]
    pub(crate) unsafe fn zero() -> Self {
        // SAFETY: the caller vouches for the instructions.
        Self([[unsafe { V::splat(0.0) }; P]; R])
    }

    /// `sums[r][p] += rows[r][k] · columns[k][p]` for k in `0..depth`, in this order.
    ///
    /// # Safety
    /// R rows of `depth` numbers can be read from `rows`, `depth` vectors of P panels from `columns`.
    #[inline(always)]
    pub(crate) unsafe fn accumulate(&mut self, rows: Rows, columns: &impl Right, depth: usize) {
        let whole = depth - depth % UNROLL;
        for first in (0..whole).step_by(UNROLL) {
            columns.fetch_ahead::<V>(first);
            // SAFETY: k < depth, and the caller vouches for depth numbers in each row and column.
            unsafe {
                self.add_products(rows, columns, first);
                self.add_products(rows, columns, first + 1);
                self.add_products(rows, columns, first + 2);
                self.add_products(rows, columns, first + 3);
            }
        }
        for k in whole..depth {
            // SAFETY: as above.
            unsafe { self.add_products(rows, columns, k) };
        }
    }

    /// The products of one k.
    ///
    /// # Safety
    /// k lies within the rows and columns.
    #[inline(always)]
    unsafe fn add_products(&mut self, rows: Rows, columns: &impl Right, k: usize) {
        // SAFETY: the caller vouches for k.
        unsafe {
            let mut weights = [V::splat(0.0); P];
            for (p, weight) in weights.iter_mut().enumerate() {
                *weight = columns.load(k, p);
            }
            for (r, sums) in self.0.iter_mut().enumerate() {
                let x = V::splat(*rows.start.add(r * rows.row_stride + k));
                for (sum, weight) in sums.iter_mut().zip(weights) {
                    *sum = x.mul_add(weight, *sum);
                }
            }
        }
    }
}

/// What is done with each tile of a sweep.
pub(crate) trait TileJob {
    /// Computes rows `row..row + R` of panels `panel..panel + P`.
    ///
    /// # Safety
    /// The machine has `V`'s instructions, and the tile lies within the job's operands.
    unsafe fn tile<V: Simd, const R: usize, const P: usize>(&mut self, row: usize, panel: usize);
}

/// Covers `rows` × `panels` with tiles: panels outside, so that each is read from memory once. Tiles are about equally
/// high, since a tile of one or two rows takes as long as one of four: it has too few sums to wait for one with another.
///
/// # Safety
/// The machine has `V`'s instructions, and rows and panels lie within the job's operands.
#[inline(always)]
pub(crate) unsafe fn sweep<V: Simd, J: TileJob>(
    job: &mut J,
    rows: std::ops::Range<usize>,
    panels: std::ops::Range<usize>,
) {
    let tiles = rows.len().div_ceil(TILE_ROWS).max(1);
    let highest = rows.len().div_ceil(tiles).max(1);
    let wide = V::PANELS[highest - 1];
    let mut panel = panels.start;
    while panel < panels.end {
        let take = if panel + wide <= panels.end { wide } else { 1 };
        let mut row = rows.start;
        for tiles_left in (1..=tiles).rev() {
            let height = (rows.end - row).div_ceil(tiles_left);
            // SAFETY: the tile lies within both ranges, for which the caller vouches.
            unsafe {
                match height {
                    0 => break,
                    1 => tile_row::<V, J, 1>(job, row, panel, take),
                    2 => tile_row::<V, J, 2>(job, row, panel, take),
                    3 => tile_row::<V, J, 3>(job, row, panel, take),
                    4 => tile_row::<V, J, 4>(job, row, panel, take),
                    5 => tile_row::<V, J, 5>(job, row, panel, take),
                    _ => tile_row::<V, J, TILE_ROWS>(job, row, panel, take),
                }
            }
            row += height;
        }
        panel += take;
    }
}

/// `take` panels for R rows, in tiles as wide as R rows allow.
///
/// # Safety
/// As [`sweep`].
#[inline(always)]
unsafe fn tile_row<V: Simd, J: TileJob, const R: usize>(job: &mut J, row: usize, panel: usize, take: usize) {
    // SAFETY: the caller vouches for the tile.
    unsafe {
        match V::PANELS[R - 1].min(take) {
            4 => job.tile::<V, R, 4>(row, panel),
            2 => {
                for step in (0..take).step_by(2) {
                    job.tile::<V, R, 2>(row, panel + step);
                }
            }
            _ => {
                for step in 0..take {
                    job.tile::<V, R, 1>(row, panel + step);
                }
            }
        }
    }
}

/// Numbers from one panel's k to the next.
pub(crate) const PANEL_STRIDE: usize = LANES;
