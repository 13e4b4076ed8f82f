//! Lanes as an array: every other machine, and the yardstick of the rest.

use half::bf16;

use super::{LANES, PAIRS, Simd};

/// Whether multiply-add is one instruction. Where it is not, libm's exact emulation would be a hundred times slower, so
/// that the product is rounded there: equal within a machine, a last bit away from fused ones.
const FUSED: bool = cfg!(any(target_feature = "fma", target_arch = "aarch64"));

/// [`LANES`] floats for the compiler to vectorise.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(crate) struct Portable([f32; LANES]);

#[inline(always)]
fn zip(left: Portable, right: Portable, f: impl Fn(f32, f32) -> f32) -> Portable {
    let mut lanes = left.0;
    for (lane, other) in lanes.iter_mut().zip(right.0) {
        *lane = f(*lane, other);
    }
    Portable(lanes)
}

impl Simd for Portable {
    const PANELS: [usize; 6] = [1; 6];

    #[inline(always)]
    unsafe fn splat(number: f32) -> Self {
        Self([number; LANES])
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller vouches for LANES readable numbers; unaligned reads are allowed.
        Self(unsafe { from.cast::<[f32; LANES]>().read_unaligned() })
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16) -> Self {
        // SAFETY: the caller vouches for LANES readable numbers; unaligned reads are allowed.
        let pairs = unsafe { from.cast::<[[u16; 2]; PAIRS]>().read_unaligned() };
        let mut lanes = [0.0; LANES];
        for (lane, [low, high]) in pairs.into_iter().enumerate() {
            lanes[lane] = f32::from_bits(u32::from(low) << 16);
            lanes[lane + PAIRS] = f32::from_bits(u32::from(high) << 16);
        }
        Self(lanes)
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller vouches for LANES writable numbers; unaligned writes are allowed.
        unsafe { to.cast::<[f32; LANES]>().write_unaligned(self.0) }
    }

    #[inline(always)]
    fn mul_add(self, by: Self, plus: Self) -> Self {
        let mut lanes = self.0;
        for (lane, (by, plus)) in lanes.iter_mut().zip(by.0.into_iter().zip(plus.0)) {
            *lane = if FUSED { lane.mul_add(by, plus) } else { *lane * by + plus };
        }
        Self(lanes)
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        zip(self, other, |a, b| a + b)
    }

    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        zip(self, other, |a, b| a - b)
    }

    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        zip(self, other, |a, b| a * b)
    }

    #[inline(always)]
    fn div(self, other: Self) -> Self {
        zip(self, other, |a, b| a / b)
    }

    #[inline(always)]
    fn max(self, other: Self) -> Self {
        zip(self, other, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn min(self, other: Self) -> Self {
        zip(self, other, |a, b| if a < b { a } else { b })
    }

    #[inline(always)]
    fn bits_to_exponent(self) -> Self {
        Self(self.0.map(|lane| f32::from_bits(lane.to_bits() << 23)))
    }

    #[inline(always)]
    fn keep_where_ge(self, x: Self, bound: Self) -> Self {
        let mut lanes = self.0;
        for (lane, (x, bound)) in lanes.iter_mut().zip(x.0.into_iter().zip(bound.0)) {
            // In this order a lane that is not a number goes to zero, as in the other implementations.
            *lane = if x >= bound { *lane } else { 0.0 };
        }
        Self(lanes)
    }
}
