//! Dispatch where only the portable vectors exist; the compiler turns them into what the target has (NEON on aarch64).

use super::Job;
use crate::cpu::simd::Portable;

/// Instructions that the kernels are compiled for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Isa {
    /// Whatever the target's baseline is.
    Portable,
}

impl Isa {
    /// The best that this machine has.
    #[must_use]
    pub fn detect() -> Self {
        Self::Portable
    }

    /// All that this machine has, the best first.
    #[must_use]
    pub fn available() -> Vec<Self> {
        vec![Self::Portable]
    }

    /// Whether this machine has it.
    #[must_use]
    pub fn is_available(self) -> bool {
        true
    }

    /// Its name, for logs and errors.
    #[must_use]
    pub fn name(self) -> &'static str {
        "portable vectors"
    }

    /// Runs `job`.
    pub(crate) fn run<J: Job>(self, job: J) {
        // SAFETY: needs nothing beyond the baseline.
        unsafe { job.run::<Portable>() }
    }
}
