//! The CUDA kernels of `cu/`, run on this machine's CPU and compared with references in f64.
//!
//! `machine` compiles a kernel with g++ against `cu/host` and runs it there, one fiber a thread; the tests know only buffers and
//! launches. Needs g++ on x86-64.

#![cfg(all(target_arch = "x86_64", target_os = "linux"))]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod attention;
mod device;
mod fake;
mod fenced;
mod gpu;
mod layer;
mod linear;
mod machine;
mod moe;
mod mutants;
mod rowwise;
mod sampling;
mod script;
mod sizes;
