//! Why a GPU cannot be used, or failed: what an operator reads.

use crate::KernelError;

/// Why there is no GPU to compute on, or what it refused.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CudaError {
    /// No driver.
    #[error("no NVIDIA driver: libcuda.so.1 cannot be loaded")]
    NoDriver,
    /// A driver from before a function that is needed.
    #[error("the NVIDIA driver has no {0}; one of the 580 series (CUDA 13.0) or later is needed")]
    MissingFunction(&'static str),
    /// A driver that does not load this machine code.
    #[error(
        "the NVIDIA driver is for CUDA {major}.{minor}; one of the 580 series (CUDA 13.0) or later is needed"
    )]
    OldDriver {
        /// Of the CUDA it is for.
        major: i32,
        /// Likewise.
        minor: i32,
    },
    /// No GPU.
    #[error("the NVIDIA driver finds no GPU")]
    NoDevice,
    /// Not so many GPUs.
    #[error("there is no GPU {asked}: the driver finds {found}, counted from 0")]
    NoSuchDevice {
        /// Which was asked for.
        asked: usize,
        /// How many there are.
        found: usize,
    },
    /// A GPU without what the kernels are made of.
    #[error("{name} has compute capability {major}.{minor}; 8.0 or later is needed")]
    OldDevice {
        /// Its name.
        name: String,
        /// Of its compute capability.
        major: i32,
        /// Likewise.
        minor: i32,
    },
    /// A GPU without what is asked for of Hopper's.
    #[error("{name} has compute capability {major}.{minor}; kernels by wgmma are for 9.0 only")]
    NoWgmma {
        /// Its name.
        name: String,
        /// Of its compute capability.
        major: i32,
        /// Likewise.
        minor: i32,
    },
    /// No cuBLASLt.
    #[error("no cuBLASLt: libcublasLt.so.13 cannot be loaded; it is part of CUDA 13")]
    NoBlas,
    /// A cuBLASLt from before a function that is needed.
    #[error("cuBLASLt has no {0}; that of CUDA 13 is needed")]
    MissingBlasFunction(&'static str),
    /// A graph without a launch.
    #[error("nothing was launched while a graph was recorded; it needs one kernel at least")]
    EmptyGraph,
    /// Something besides launches, within a graph.
    #[error("{0} cannot be part of a graph, which is launches only; do it before recording")]
    Recorded(&'static str),
    /// A call that failed.
    #[error(
        "{call}{} failed with {code}{}",
        .of.as_ref().map(|of| format!(" of {of}")).unwrap_or_default(),
        .message.as_ref().map(|message| format!(": {message}")).unwrap_or_default()
    )]
    Call {
        /// The function.
        call: &'static str,
        /// What it was called for, where that says more.
        of: Option<String>,
        /// What it returned.
        code: u32,
        /// What the library says of that.
        message: Option<String>,
    },
}

impl CudaError {
    /// Whether there is no GPU, as far as can be told: not one that cannot be used.
    #[must_use]
    pub fn is_no_gpu(&self) -> bool {
        matches!(self, Self::NoDriver | Self::NoDevice)
    }

    /// Says what a call that failed was for.
    pub(super) fn of(mut self, what: impl FnOnce() -> String) -> Self {
        if let Self::Call { of, .. } = &mut self {
            *of = Some(what());
        }
        self
    }
}

/// `CUDA_ERROR_OUT_OF_MEMORY`.
const OUT_OF_MEMORY: u32 = 2;

impl CudaError {
    /// The error of an operation that wanted `bytes`.
    pub(super) fn of_allocation(self, bytes: usize) -> KernelError {
        match self {
            Self::Call { code: OUT_OF_MEMORY, .. } => KernelError::OutOfMemory { bytes },
            other => other.into(),
        }
    }
}

/// Of the driver: what leaves a process without its context. Memory that cannot be corrected, a kernel that accessed what it may not, or hung; a GPU that is
/// there no more, which drivers call unavailable or do not know.
const LOST: [u32; 16] = [46, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 999];

impl From<CudaError> for KernelError {
    fn from(error: CudaError) -> Self {
        match error {
            CudaError::Call { code, .. } if LOST.contains(&code) => Self::DeviceLost(error.to_string()),
            error => Self::Device(error.to_string()),
        }
    }
}
