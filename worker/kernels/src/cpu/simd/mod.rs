//! Sixteen f32 lanes, whatever the machine has: one `zmm`, two `ymm`, or an array.
//!
//! Kernels are written once over [`Simd`]. The lanes are the same on every machine and never meet except in
//! [`Simd::sum`], whose order is fixed; so the fused implementations agree bit for bit.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

use half::bf16;

#[cfg(target_arch = "x86_64")]
pub(crate) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) use avx512::Avx512;
pub(crate) use portable::Portable;

/// Lanes of every implementation, outputs in a weight panel, and positions in a key tile.
pub(crate) const LANES: usize = 16;

/// Lanes `l` and `l + PAIRS` of bf16 weights are neighbours in memory, halves of one 32-bit word: a shift widens the one, a mask the
/// other, and no number has to cross into another word.
pub(crate) const PAIRS: usize = LANES / 2;

/// Adding it to a number of moderate size rounds that to an integer, found in the low mantissa bits (1.5 · 2²³). The
/// 127 is the exponent's bias, so that the low bits shifted up by 23 are 2ⁿ.
const ROUND: f32 = 12_582_912.0 + 127.0;
/// ln 2 in two parts, the first exact in few bits (Cephes, `expf`).
const LN2_HIGH: f32 = 355.0 / 512.0;
const LN2_LOW: f32 = -2.121_944_4e-4;
/// Coefficients of Cephes' `expf`, highest power first.
const EXP: [f32; 6] = [1.987_569_1e-4, 1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5];
/// Below this e^x is no normal number and taken as zero; above its mirror image it is held.
const EXP_LOWEST: f32 = -87.0;

/// A vector of [`LANES`] f32.
///
/// The functions that make a value are unsafe: they may run only where the instructions exist. A value in hand is
/// proof of that, so the methods are safe. All is `#[inline(always)]` and called under a `#[target_feature]` function.
pub(crate) trait Simd: Copy {
    /// How many panels a tile of 1, 2 … 6 rows takes at once: enough independent sums to hide latency, few enough
    /// to stay in registers.
    const PANELS: [usize; 6];

    /// # Safety
    /// The machine has this implementation's instructions.
    unsafe fn splat(number: f32) -> Self;

    /// # Safety
    /// The machine has this implementation's instructions, and [`LANES`] numbers may be read at `from`.
    unsafe fn load(from: *const f32) -> Self;

    /// Widens [`LANES`] numbers that lie as [`PAIRS`] says.
    ///
    /// # Safety
    /// As [`Simd::load`].
    unsafe fn load_bf16(from: *const bf16) -> Self;

    /// # Safety
    /// [`LANES`] numbers may be written at `to`.
    unsafe fn store(self, to: *mut f32);

    /// Asks for a cache line that will be read soon. Any address will do: it is a wish.
    #[inline(always)]
    fn fetch(_from: *const u8) {}

    /// `self · by + plus`, rounded once where the machine can.
    fn mul_add(self, by: Self, plus: Self) -> Self;
    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn div(self, other: Self) -> Self;
    fn max(self, other: Self) -> Self;
    fn min(self, other: Self) -> Self;
    /// The lanes' bits as integers, shifted left by 23.
    fn bits_to_exponent(self) -> Self;
    /// `self` where `x >= bound`, else 0.
    fn keep_where_ge(self, x: Self, bound: Self) -> Self;

    #[inline(always)]
    fn to_array(self) -> [f32; LANES] {
        let mut lanes = [0.0; LANES];
        // SAFETY: the array has LANES numbers.
        unsafe { self.store(lanes.as_mut_ptr()) };
        lanes
    }

    /// The sum of the lanes, halves folded onto each other.
    #[inline(always)]
    fn sum(self) -> f32 {
        let mut lanes = self.to_array();
        for half in [8, 4, 2, 1] {
            for lane in 0..half {
                lanes[lane] += lanes[lane + half];
            }
        }
        lanes[0]
    }

    /// The highest lane.
    #[inline(always)]
    fn highest(self) -> f32 {
        self.to_array().into_iter().fold(f32::NEG_INFINITY, f32::max)
    }

    /// e^x to about one unit in the last place; exactly 1 at 0 and exactly 0 below −87.
    ///
    /// # Safety
    /// The machine has this implementation's instructions.
    #[inline(always)]
    unsafe fn exp(self) -> Self {
        // SAFETY: the caller vouches for the instructions.
        let splat = |number| unsafe { Self::splat(number) };
        let lowest = splat(EXP_LOWEST);
        let x = self.max(lowest).min(splat(-EXP_LOWEST));
        let shifted = x.mul_add(splat(std::f32::consts::LOG2_E), splat(ROUND));
        let n = shifted.sub(splat(ROUND));
        let r = n.mul_add(splat(-LN2_LOW), n.mul_add(splat(-LN2_HIGH), x));
        let mut sum = splat(EXP[0]);
        for &coefficient in &EXP[1..] {
            sum = sum.mul_add(r, splat(coefficient));
        }
        let fraction = sum.mul_add(r.mul(r), r).add(splat(1.0));
        fraction.mul(shifted.bits_to_exponent()).keep_where_ge(self, lowest)
    }
}

/// Weights in a panel: read as stored, computed in f32.
pub(crate) trait Weight: super::aligned::Number {
    /// Where among the [`LANES`] numbers of a panel that belong to one input lane `lane` is stored.
    fn place(lane: usize) -> usize;

    /// Loads [`LANES`] of them.
    ///
    /// # Safety
    /// As [`Simd::load`].
    unsafe fn load<V: Simd>(from: *const Self) -> V;
}

impl Weight for f32 {
    #[inline(always)]
    fn place(lane: usize) -> usize {
        lane
    }

    #[inline(always)]
    unsafe fn load<V: Simd>(from: *const Self) -> V {
        // SAFETY: the caller's promise is the one `Simd::load` asks for.
        unsafe { V::load(from) }
    }
}

impl Weight for bf16 {
    #[inline(always)]
    fn place(lane: usize) -> usize {
        lane % PAIRS * 2 + lane / PAIRS
    }

    #[inline(always)]
    unsafe fn load<V: Simd>(from: *const Self) -> V {
        // SAFETY: as above.
        unsafe { V::load_bf16(from) }
    }
}
