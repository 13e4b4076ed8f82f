//! The operations on NVIDIA GPUs: kernels of `cu/`, compiled ahead (`build_cubins.py`), and the driver that runs them.
//!
//! Plain values, tested on any machine: [`params`] mirrors the kernels' parameters, [`plan`] cuts a batch into their work lists,
//! [`launch`] says with how many blocks, threads and bytes each runs. Then what a GPU is needed for: `driver` and `blas` are C libraries
//! found at run time, [`gpu`] one device with its memory, [`kernels`] the operations. A machine without a GPU gets a
//! [`CudaError`] that says what is missing; nothing here is linked.

mod blas;
mod buffer;
mod driver;
mod error;
pub mod gpu;
pub mod kernels;
pub mod launch;
mod library;
mod modules;
pub mod params;
pub mod plan;

pub use buffer::{CudaBuffer, CudaKvPool, CudaLinear};
pub use error::CudaError;
pub use gpu::{Gpu, Libraries, Memory};
pub use kernels::CudaKernels;
