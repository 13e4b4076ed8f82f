//! The CPU backend: one model, one KV pool, its own threads.
//!
//! `forward` is check → run → sample. Everything a sequence gets is a function of its own tokens and parameters: the
//! kernels are batch-invariant, and the draw is seeded by request and position.

use std::sync::Arc;

use rayon::prelude::*;
use worker_core::step::{
    Backend, BackendError, Batch, BlockId, KvCapacity, KvFormat, NextToken, SampleRequest, SequenceId,
};
use worker_kernels::cpu::CpuKvPool;
use worker_kernels::{CpuKernels, Device, KernelError};

use super::batch::FlatBatch;
use super::capacity::{kv_format, kv_layout, numbers};
use super::sample::{Drawn, sample};
use crate::model::transformer::Rows;
use crate::model::{Model, Transformer, Workspace};

/// Sequences whose draws are worth a second thread.
const PARALLEL_DRAWS: usize = 4;

/// A model on the CPU.
pub struct CpuBackend {
    model: Arc<Model>,
    capacity: KvCapacity,
    kernels: CpuKernels,
    pool: CpuKvPool,
    work: Workspace<CpuKernels>,
}

impl CpuBackend {
    /// Allocates the KV pool and starts `threads` threads (at least one), named `compute-0` and so on.
    ///
    /// The pool's memory is backed by the system when it is first written.
    ///
    /// # Errors
    /// [`BackendError::Device`] when memory or threads cannot be had, or `capacity` has empty blocks.
    pub fn new(model: Arc<Model>, capacity: KvCapacity, threads: usize) -> Result<Self, BackendError> {
        let kernels = CpuKernels::new("compute", threads).map_err(device)?;
        Self::with_kernels(model, capacity, kernels)
    }

    /// The same on kernels made by the caller.
    ///
    /// # Errors
    /// As [`CpuBackend::new`].
    pub fn with_kernels(
        model: Arc<Model>,
        capacity: KvCapacity,
        kernels: CpuKernels,
    ) -> Result<Self, BackendError> {
        let pool = kernels.kv_pool(kv_layout(model.config(), capacity)).map_err(device)?;
        let work = Workspace::new(&kernels, model.config());
        Ok(Self { model, capacity, kernels, pool, work })
    }

    /// Logits of the last step that was not empty, `[sampling sequences, vocab]`, in batch order.
    #[must_use]
    pub fn logits(&self) -> &[f32] {
        self.work.logits().numbers()
    }

    /// The forward pass: KV to the pool, logits to the workspace.
    fn run(&mut self, flat: &FlatBatch) -> Result<(), BackendError> {
        let Self { model, kernels, pool, work, .. } = self;
        let transformer = Transformer::new(kernels, model.config(), model.weights());
        let spans = flat.spans();
        let rows = Rows { tokens: &flat.tokens, spans: &spans, sampling: &flat.sampling };
        kernels.install(|| transformer.forward(rows, pool, work)).map_err(device)
    }

    /// Draws a token for each row of logits.
    fn sample(&self, batch: &Batch) -> Result<Vec<NextToken>, BackendError> {
        let wanted: Vec<(SequenceId, &SampleRequest)> =
            batch.sequences.iter().filter_map(|step| Some((step.id, step.sample.as_ref()?))).collect();
        let rows = self.logits().chunks_exact(self.model.config().vocab);
        if wanted.len() < PARALLEL_DRAWS {
            // Changing threads would cost more than it brings.
            return wanted.into_iter().zip(rows).map(|(wanted, row)| draw(wanted, row)).collect();
        }
        let rows: Vec<&[f32]> = rows.collect();
        self.kernels
            .install(|| wanted.into_par_iter().zip(rows).map(|(wanted, row)| draw(wanted, row)).collect())
    }
}

fn draw((id, request): (SequenceId, &SampleRequest), logits: &[f32]) -> Result<NextToken, BackendError> {
    match sample(logits, request) {
        Ok(Drawn { token, logprobs }) => Ok(NextToken { id, token, logprobs }),
        Err(error) => Err(BackendError::Device(error.to_string())),
    }
}

impl Backend for CpuBackend {
    fn kv_capacity(&self) -> KvCapacity {
        self.capacity
    }

    fn kv_format(&self) -> Option<KvFormat> {
        let layout = self.pool.layout();
        Some(kv_format(self.kernels.kv_format(), layout, CpuKvPool::block_bytes(layout)))
    }

    fn read_kv(&mut self, blocks: &[BlockId]) -> Result<Vec<u8>, BackendError> {
        let mut bytes = vec![0; blocks.len() * CpuKvPool::block_bytes(self.pool.layout())];
        self.kernels.read_blocks(&self.pool, &numbers(blocks), &mut bytes).map_err(device)?;
        Ok(bytes)
    }

    fn write_kv(&mut self, blocks: &[BlockId], bytes: &[u8]) -> Result<(), BackendError> {
        self.kernels.write_blocks(&mut self.pool, &numbers(blocks), bytes).map_err(device)
    }

    fn forward(&mut self, batch: &Batch) -> Result<Vec<NextToken>, BackendError> {
        let flat = FlatBatch::new(batch, self.model.config(), self.capacity)?;
        if flat.tokens.is_empty() {
            return Ok(Vec::new());
        }
        self.run(&flat)?;
        self.sample(batch)
    }
}

#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
fn device(error: KernelError) -> BackendError {
    BackendError::Device(error.to_string())
}
