//! Which instructions this machine has, and running a kernel compiled for them.

#[cfg(not(target_arch = "x86_64"))]
mod other;
#[cfg(target_arch = "x86_64")]
mod x86_64;

use super::simd::Simd;

#[cfg(not(target_arch = "x86_64"))]
pub use other::Isa;
#[cfg(target_arch = "x86_64")]
pub use x86_64::Isa;

/// A kernel, written once over [`Simd`]; [`Isa::run`] compiles and runs it with the widest vectors there are.
pub(crate) trait Job {
    /// Does the work. Implementations are `#[inline(always)]`, or they would not be compiled for the instructions.
    ///
    /// # Safety
    /// The machine has `V`'s instructions.
    unsafe fn run<V: Simd>(self);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::simd::LANES;

    struct Exp<'a>(&'a [f32; LANES], &'a mut [f32; LANES]);

    impl Job for Exp<'_> {
        #[inline(always)]
        unsafe fn run<V: Simd>(self) {
            // SAFETY: the caller vouches for the instructions; both arrays have LANES numbers.
            unsafe { V::load(self.0.as_ptr()).exp().store(self.1.as_mut_ptr()) }
        }
    }

    fn exp(isa: Isa, x: [f32; LANES]) -> [f32; LANES] {
        let mut out = [f32::NAN; LANES];
        isa.run(Exp(&x, &mut out));
        out
    }

    #[test]
    fn exp_is_near_the_true_value_everywhere() {
        for isa in Isa::available() {
            for step in 0..20_000 {
                let x = -86.0 + step as f32 * 0.0086;
                let got = f64::from(exp(isa, [x; LANES])[3]);
                let want = f64::from(x).exp();
                assert!(((got - want) / want).abs() < 2e-7, "{isa:?}: e^{x} = {want}, got {got}");
            }
        }
    }

    #[test]
    fn exp_is_exact_where_attention_relies_on_it() {
        for isa in Isa::available() {
            let mut x = [0.0; LANES];
            x[1] = f32::NEG_INFINITY;
            x[2] = -100.0;
            x[3] = -0.0;
            let got = exp(isa, x);
            assert_eq!(got[..4], [1.0, 0.0, 0.0, 1.0], "{isa:?}");
        }
    }

    #[test]
    fn portable_is_always_available_and_the_best_comes_first() {
        let available = Isa::available();
        assert_eq!(available.first().copied(), Some(Isa::detect()));
        assert_eq!(available.last().copied(), Some(Isa::Portable));
    }
}
