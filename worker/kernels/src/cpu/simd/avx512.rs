//! Lanes as one 512-bit register (AVX-512F).

use std::arch::x86_64::*;

use half::bf16;

use super::Simd;

/// One `zmm`.
#[derive(Clone, Copy)]
pub(crate) struct Avx512(__m512);

/// Methods on a value, whose existence proves that AVX-512F is there.
macro_rules! lanewise {
    ($($name:ident => $intrinsic:ident),*) => {$(
        #[inline(always)]
        fn $name(self, other: Self) -> Self {
            // SAFETY: `self` exists, so the machine has AVX-512F.
            Self(unsafe { $intrinsic(self.0, other.0) })
        }
    )*};
}

impl Simd for Avx512 {
    const PANELS: [usize; 6] = [4, 4, 4, 2, 2, 2];

    #[inline(always)]
    unsafe fn splat(number: f32) -> Self {
        // SAFETY: the caller vouches for AVX-512F.
        Self(unsafe { _mm512_set1_ps(number) })
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller vouches for AVX-512F and 16 readable numbers.
        Self(unsafe { _mm512_loadu_ps(from) })
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16) -> Self {
        // SAFETY: the caller vouches for AVX-512F and 16 readable numbers, 32 bytes.
        Self(unsafe {
            let pairs = _mm512_broadcast_i64x4(_mm256_loadu_si256(from.cast()));
            // The lower lanes' words are shifted up, the upper lanes' stay; what is left below is masked away.
            let shifts = _mm512_inserti64x4::<0>(_mm512_setzero_si512(), _mm256_set1_epi32(16));
            let upper = _mm512_set1_epi32(0xffff_0000_u32.cast_signed());
            _mm512_castsi512_ps(_mm512_and_si512(_mm512_sllv_epi32(pairs, shifts), upper))
        })
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller vouches for 16 writable numbers.
        unsafe { _mm512_storeu_ps(to, self.0) }
    }

    #[inline(always)]
    fn fetch(from: *const u8) {
        // SAFETY: prefetching never faults, and every x86-64 has it.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(from.cast()) };
    }

    #[inline(always)]
    fn mul_add(self, by: Self, plus: Self) -> Self {
        // SAFETY: `self` exists, so the machine has AVX-512F.
        Self(unsafe { _mm512_fmadd_ps(self.0, by.0, plus.0) })
    }

    lanewise!(add => _mm512_add_ps, sub => _mm512_sub_ps, mul => _mm512_mul_ps, div => _mm512_div_ps,
              max => _mm512_max_ps, min => _mm512_min_ps);

    #[inline(always)]
    fn bits_to_exponent(self) -> Self {
        // SAFETY: `self` exists, so the machine has AVX-512F.
        Self(unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<23>(_mm512_castps_si512(self.0))) })
    }

    #[inline(always)]
    fn keep_where_ge(self, x: Self, bound: Self) -> Self {
        // SAFETY: `self` exists, so the machine has AVX-512F.
        Self(unsafe { _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_GE_OQ>(x.0, bound.0), self.0) })
    }
}
