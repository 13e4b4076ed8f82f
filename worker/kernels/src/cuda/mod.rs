//! The operations on NVIDIA GPUs: kernels of `cu/`, compiled ahead (`build_cubins.py`), and the driver that runs them.
//!
//! Plain values, tested on any machine: [`params`] mirrors the kernels' parameters, [`plan`] cuts a batch into their work lists,
//! [`launch`] says with how many blocks, threads and bytes each runs. Then what a GPU is needed for, through cudarc: [`driver`] looks whether
//! there is one, [`gpu`] is one device and [`memory`] its memory, `blas` the dense products, [`tensor_map`] what Hopper's copies are told, [`kernels`] the operations (attention's in `attention`), `sampling` the draw. A machine without
//! a GPU gets a [`CudaError`] that says what is missing; nothing here is linked.

mod attention;
pub mod blas;
mod buffer;
pub mod driver;
mod error;
pub mod gpu;
pub mod graph;
pub mod kernels;
pub mod launch;
pub mod memory;
mod modules;
pub mod moe;
pub mod params;
pub mod plan;
mod products;
mod sampling;
mod staging;
pub mod tensor_map;

pub use buffer::{CudaBuffer, CudaKvPool, CudaLinear};
pub use error::CudaError;
pub use gpu::Gpu;
pub use graph::Graph;
pub use kernels::{CudaKernels, PrefillKernel};
pub use memory::Memory;
pub use sampling::Draws;
