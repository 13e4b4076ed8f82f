//! The operations on NVIDIA GPUs: what the kernels of `cu/` are given, and how they are launched.
//!
//! [`params`] mirrors their parameters, [`plan`] cuts a batch into their work lists, [`launch`] says with how many blocks, threads and
//! bytes each of them runs. Plain values, so that all of it is tested on a machine without a GPU (`tests/cuda`). What is compiled from
//! `cu/` lies in `cubins/`, made by `build_cubins.py`.

pub mod launch;
pub mod params;
pub mod plan;
