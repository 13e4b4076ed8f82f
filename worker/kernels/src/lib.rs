//! The operations models need, and the only crate with unsafe code.
//!
//! [`Kernels`] is the dozen operations, [`Device`] the memory they work on; [`cpu`] implements both. Knows rows, heads and
//! blocks, never sequences' ids, scheduling or sampling. Caller: the model's forward pass in `worker`.

pub mod cpu;
pub mod cuda;
mod device;
mod mapped;
mod weight;

pub use cpu::CpuKernels;
pub use device::{AttentionShape, Device, KernelError, Kernels, KvLayout, QkNorm, RopeShape, Span};
pub use mapped::MappedFile;
pub use weight::{Dtype, WeightView};
