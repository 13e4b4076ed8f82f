//! Dispatch on x86-64.

use super::Job;
use crate::cpu::simd::{Avx2, Avx512, Portable};

/// Instructions that the kernels are compiled for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Isa {
    /// AVX-512F.
    Avx512,
    /// AVX2 and FMA.
    Avx2,
    /// What every x86-64 has.
    Portable,
}

impl Isa {
    /// The best that this machine has.
    #[must_use]
    pub fn detect() -> Self {
        Self::available().first().copied().unwrap_or(Self::Portable)
    }

    /// All that this machine has, the best first.
    #[must_use]
    pub fn available() -> Vec<Self> {
        [Self::Avx512, Self::Avx2, Self::Portable].into_iter().filter(|isa| isa.is_available()).collect()
    }

    /// Whether this machine has it.
    #[must_use]
    pub fn is_available(self) -> bool {
        match self {
            // The kernels for AVX-512 are compiled with the narrower sets as well.
            Self::Avx512 => is_x86_feature_detected!("avx512f") && Self::Avx2.is_available(),
            Self::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            Self::Portable => true,
        }
    }

    /// Its name, for logs and errors.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Avx512 => "AVX-512",
            Self::Avx2 => "AVX2 with FMA",
            Self::Portable => "portable vectors",
        }
    }

    /// Runs `job`. Asks the processor again (a cached bit) rather than trust that `self` came from detection.
    pub(crate) fn run<J: Job>(self, job: J) {
        assert!(self.is_available(), "this machine has no {}", self.name());
        match self {
            // SAFETY: asserted to be available.
            Self::Avx512 => unsafe { avx512(job) },
            // SAFETY: asserted to be available.
            Self::Avx2 => unsafe { avx2(job) },
            // SAFETY: needs nothing beyond the baseline.
            Self::Portable => unsafe { job.run::<Portable>() },
        }
    }
}

/// # Safety
/// The machine has AVX-512F, AVX2 and FMA.
#[target_feature(enable = "avx512f,avx2,fma")]
unsafe fn avx512<J: Job>(job: J) {
    // SAFETY: the caller vouches for the instructions.
    unsafe { job.run::<Avx512>() }
}

/// # Safety
/// The machine has AVX2 and FMA.
#[target_feature(enable = "avx2,fma")]
unsafe fn avx2<J: Job>(job: J) {
    // SAFETY: the caller vouches for the instructions.
    unsafe { job.run::<Avx2>() }
}
