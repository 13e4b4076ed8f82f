//! Backends: models that can be stepped, and the sampler that ends each step.
//!
//! [`CpuBackend`] implements the engine's `Backend` over the CPU kernels, [`CudaBackend`] over a GPU's, [`TimingBackend`] over a clock. Knows no requests, channels or text.

mod adjust;
mod batch;
pub mod capacity;
pub mod cpu;
pub mod cuda;
mod draws;
pub mod sample;
pub mod timing;

pub use capacity::kv_block_bytes;
pub use cpu::CpuBackend;
pub use cuda::{CudaBackend, CudaModel};
pub use timing::TimingBackend;
