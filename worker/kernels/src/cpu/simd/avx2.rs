//! Lanes as two 256-bit registers (AVX2 and FMA).

use std::arch::x86_64::*;

use half::bf16;

use super::Simd;

/// Two `ymm`: lanes 0–7 and 8–15.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(__m256, __m256);

/// The half of a pair that is a float's upper half where it stands.
const HIGH_HALF: i32 = 0xffff_0000_u32.cast_signed();

/// Methods on a value, whose existence proves that AVX2 is there.
macro_rules! lanewise {
    ($($name:ident => $intrinsic:ident),*) => {$(
        #[inline(always)]
        fn $name(self, other: Self) -> Self {
            // SAFETY: `self` exists, so the machine has AVX2.
            unsafe { Self($intrinsic(self.0, other.0), $intrinsic(self.1, other.1)) }
        }
    )*};
}

/// Bits shifted up to where a float's exponent is.
///
/// # Safety
/// The machine has AVX2.
#[inline(always)]
unsafe fn shift(lanes: __m256) -> __m256 {
    // SAFETY: the caller vouches for AVX2.
    unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_castps_si256(lanes))) }
}

impl Simd for Avx2 {
    const PANELS: [usize; 6] = [4, 2, 2, 1, 1, 1];

    #[inline(always)]
    unsafe fn splat(number: f32) -> Self {
        // SAFETY: the caller vouches for AVX2.
        unsafe { Self(_mm256_set1_ps(number), _mm256_set1_ps(number)) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller vouches for AVX2 and 16 readable numbers.
        unsafe { Self(_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))) }
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16) -> Self {
        // SAFETY: the caller vouches for AVX2 and 16 readable numbers.
        unsafe {
            let pairs = _mm256_loadu_si256(from.cast());
            let low = _mm256_slli_epi32::<16>(pairs);
            let high = _mm256_and_si256(pairs, _mm256_set1_epi32(HIGH_HALF));
            Self(_mm256_castsi256_ps(low), _mm256_castsi256_ps(high))
        }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller vouches for 16 writable numbers.
        unsafe {
            _mm256_storeu_ps(to, self.0);
            _mm256_storeu_ps(to.add(8), self.1);
        }
    }

    #[inline(always)]
    fn fetch(from: *const u8) {
        // SAFETY: prefetching never faults, and every x86-64 has it.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(from.cast()) };
    }

    #[inline(always)]
    fn mul_add(self, by: Self, plus: Self) -> Self {
        // SAFETY: `self` exists, so the machine has FMA.
        unsafe { Self(_mm256_fmadd_ps(self.0, by.0, plus.0), _mm256_fmadd_ps(self.1, by.1, plus.1)) }
    }

    lanewise!(add => _mm256_add_ps, sub => _mm256_sub_ps, mul => _mm256_mul_ps, div => _mm256_div_ps,
              max => _mm256_max_ps, min => _mm256_min_ps);

    #[inline(always)]
    fn bits_to_exponent(self) -> Self {
        // SAFETY: `self` exists, so the machine has AVX2.
        unsafe { Self(shift(self.0), shift(self.1)) }
    }

    #[inline(always)]
    fn keep_where_ge(self, x: Self, bound: Self) -> Self {
        // SAFETY: `self` exists, so the machine has AVX2.
        unsafe {
            Self(
                _mm256_and_ps(_mm256_cmp_ps::<_CMP_GE_OQ>(x.0, bound.0), self.0),
                _mm256_and_ps(_mm256_cmp_ps::<_CMP_GE_OQ>(x.1, bound.1), self.1),
            )
        }
    }
}
