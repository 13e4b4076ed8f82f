//! The operations on the CPU: own kernels, compiled for the instructions found at run time.
//!
//! Path of a linear layer: [`matrix`] packs it once, `gemm` cuts the product into tasks, `tile` computes. What every kernel
//! keeps to: a row's numbers are summed in one order, whatever the batch and however many threads.

mod activations;
mod aligned;
mod attention;
mod gemm;
mod isa;
mod kv_pool;
mod matrix;
mod norm;
mod rope_store;
mod rowwise;
mod shared;
mod simd;
mod tile;

use std::borrow::Cow;

use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::{AttentionShape, Device, KernelError, Kernels, KvLayout, RopeShape, WeightView};

pub use activations::Activations;
pub use isa::Isa;
pub use kv_pool::CpuKvPool;
pub use matrix::PackedLinear;

use gemm::{Store, gemm};

/// Multiply-adds below which a second thread costs more than it brings.
const PARALLEL_WORK: usize = 1 << 18;

/// The kernels and the threads they run on.
#[derive(Debug)]
pub struct CpuKernels {
    pool: ThreadPool,
    isa: Isa,
}

impl CpuKernels {
    /// Starts `threads` threads (at least one) named `name-0`, `name-1`…, and takes the best instructions there are.
    ///
    /// # Errors
    /// [`KernelError::Device`] when the threads cannot be started.
    pub fn new(name: &str, threads: usize) -> Result<Self, KernelError> {
        Self::with_isa(name, threads, Isa::detect())
    }

    /// The same with instructions chosen by the caller.
    ///
    /// # Errors
    /// [`KernelError::Unsupported`] when this machine has not got them; otherwise as [`CpuKernels::new`].
    pub fn with_isa(name: &str, threads: usize, isa: Isa) -> Result<Self, KernelError> {
        if !isa.is_available() {
            return Err(KernelError::Unsupported(isa.name()));
        }
        let name = name.to_owned();
        let pool = ThreadPoolBuilder::new()
            .num_threads(threads.max(1))
            .thread_name(move |index| format!("{name}-{index}"))
            .build()
            .map_err(|error| KernelError::Device(error.to_string()))?;
        Ok(Self { pool, isa })
    }

    /// Runs `work` on the kernels' threads. Operations called from within do not change threads, which is what makes
    /// small ones cheap.
    pub fn install<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        self.pool.install(work)
    }

    /// Instructions in use.
    #[must_use]
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Threads in use.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.pool.current_num_threads()
    }

    /// Runs tasks `0..tasks` in any order.
    pub(crate) fn for_each(&self, tasks: usize, run: impl Fn(usize) + Sync + Send) {
        if tasks <= 1 || self.threads() == 1 {
            return (0..tasks).for_each(run);
        }
        self.pool.install(|| (0..tasks).into_par_iter().with_max_len(1).for_each(run));
    }

    /// The same, on one thread when `work` multiply-adds are too few to share.
    pub(crate) fn for_each_worth(&self, tasks: usize, work: usize, run: impl Fn(usize) + Sync + Send) {
        if work < PARALLEL_WORK {
            return (0..tasks).for_each(run);
        }
        self.for_each(tasks, run);
    }

    /// Cuts rows of `width` into tasks of about `task_numbers`; `run` gets the index of its first row, and its rows.
    pub(crate) fn for_rows(
        &self,
        numbers: &mut [f32],
        width: usize,
        task_numbers: usize,
        run: impl Fn(usize, &mut [f32]) + Sync + Send,
    ) {
        let width = width.max(1);
        let rows = (task_numbers / width).max(1);
        if numbers.len() <= rows * width || self.threads() == 1 {
            return run(0, numbers);
        }
        self.pool.install(|| {
            let tasks = numbers.par_chunks_mut(rows * width).enumerate();
            tasks.for_each(|(task, numbers)| run(task * rows, numbers));
        });
    }
}

impl Device for CpuKernels {
    type Buffer = Activations;
    type Linear = PackedLinear;
    type Vector = Vec<f32>;
    type KvPool = CpuKvPool;

    fn buffer(&self) -> Activations {
        Activations::default()
    }

    fn write(&self, rows: &[f32], width: usize, buffer: &mut Activations) -> Result<(), KernelError> {
        if width == 0 || !rows.len().is_multiple_of(width) {
            return Err(KernelError::Shape {
                operation: "write",
                expected: format!("whole rows of {width}"),
                found: format!("{} numbers", rows.len()),
            });
        }
        buffer.reset(rows.len() / width, width);
        buffer.numbers_mut().copy_from_slice(rows);
        Ok(())
    }

    fn read<'a>(&self, buffer: &'a Activations) -> Result<Cow<'a, [f32]>, KernelError> {
        Ok(Cow::Borrowed(buffer.numbers()))
    }

    fn linear(&self, parts: &[WeightView<'_>], bias: &[WeightView<'_>]) -> Result<PackedLinear, KernelError> {
        self.pool.install(|| PackedLinear::pack(parts, bias))
    }

    fn vector(&self, weight: WeightView<'_>) -> Result<Vec<f32>, KernelError> {
        let mut numbers = vec![0.0; weight.rows() * weight.columns()];
        for (row, to) in numbers.chunks_exact_mut(weight.columns().max(1)).enumerate() {
            weight.read_row(row, to);
        }
        Ok(numbers)
    }

    fn kv_pool(&self, layout: KvLayout) -> Result<CpuKvPool, KernelError> {
        CpuKvPool::new(layout)
    }

    fn kv_format(&self) -> &'static str {
        "cpu-f32"
    }

    fn read_blocks(&self, pool: &CpuKvPool, blocks: &[u32], bytes: &mut [u8]) -> Result<(), KernelError> {
        pool.read_blocks(blocks, bytes)
    }

    fn write_blocks(&self, pool: &mut CpuKvPool, blocks: &[u32], bytes: &[u8]) -> Result<(), KernelError> {
        pool.write_blocks(blocks, bytes)
    }
}

impl Kernels for CpuKernels {
    fn embed(&self, table: &PackedLinear, tokens: &[u32], out: &mut Activations) -> Result<(), KernelError> {
        rowwise::embed(self, table, tokens, out)
    }

    fn rms_norm(
        &self,
        x: &Activations,
        weight: &Vec<f32>,
        eps: f32,
        out: &mut Activations,
    ) -> Result<(), KernelError> {
        norm::rms_norm(self, x, weight, eps, out)
    }

    fn linear_into(
        &self,
        x: &Activations,
        w: &PackedLinear,
        out: &mut Activations,
    ) -> Result<(), KernelError> {
        x.expect_width("linear", w.inputs)?;
        out.reset(x.rows(), w.outputs);
        gemm(self, x, w, out, Store::Replace);
        Ok(())
    }

    fn linear_add(
        &self,
        x: &Activations,
        w: &PackedLinear,
        out: &mut Activations,
    ) -> Result<(), KernelError> {
        x.expect_width("linear", w.inputs)?;
        out.expect_width("linear", w.outputs)?;
        if out.rows() != x.rows() {
            return Err(KernelError::Shape {
                operation: "linear",
                expected: format!("{} rows to add to", x.rows()),
                found: format!("{}", out.rows()),
            });
        }
        gemm(self, x, w, out, Store::Add);
        Ok(())
    }

    fn rope_store(
        &self,
        qkv: &mut Activations,
        shape: RopeShape<'_, Self>,
        pool: &mut CpuKvPool,
    ) -> Result<(), KernelError> {
        rope_store::rope_store(self, qkv, shape, pool)
    }

    fn attention(
        &self,
        qkv: &Activations,
        pool: &CpuKvPool,
        shape: AttentionShape<'_>,
        out: &mut Activations,
    ) -> Result<(), KernelError> {
        attention::attention(self, qkv, pool, shape, out)
    }

    fn silu_mul(&self, gate_up: &Activations, out: &mut Activations) -> Result<(), KernelError> {
        rowwise::silu_mul(self, gate_up, out)
    }

    fn select_rows(&self, x: &Activations, rows: &[usize], out: &mut Activations) -> Result<(), KernelError> {
        rowwise::select_rows(x, rows, out)
    }
}
