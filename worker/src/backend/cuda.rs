//! The CUDA backend: one model, one KV pool, one GPU. The same forward pass as the CPU's, over other kernels.
//!
//! Correct first: a step launches every operation, waits once for the logits, and draws on the CPU with the same sampler, so that
//! tokens are those of the CPU backend as far as bf16 activations allow. Next: `worker_kernels::cuda`.

use worker_core::step::{Backend, BackendError, Batch, KvCapacity, NextToken};
use worker_kernels::cuda::{CudaKernels, CudaKvPool};
use worker_kernels::{Device, KernelError};

use super::batch::FlatBatch;
use super::capacity::kv_layout;
use super::sample::{Drawn, sample};
use crate::model::transformer::Rows;
use crate::model::{ModelConfig, ModelError, ModelFiles, Transformer, Weights, Workspace};

/// A model whose weights are on a GPU.
pub struct CudaModel {
    kernels: CudaKernels,
    config: ModelConfig,
    weights: Weights<CudaKernels>,
}

impl CudaModel {
    /// Uploads the weights.
    ///
    /// # Errors
    /// [`ModelError`], which names the key or tensor at fault, or says that memory does not suffice.
    pub fn load(kernels: CudaKernels, files: &ModelFiles) -> Result<Self, ModelError> {
        let config = ModelConfig::from_files(files)?;
        let weights = Weights::load(&kernels, &config, files)?;
        Ok(Self { kernels, config, weights })
    }

    /// Its shape and options.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Bytes of one KV block of `block_tokens` positions, all layers together.
    #[must_use]
    pub fn kv_block_bytes(&self, block_tokens: usize) -> usize {
        CudaKvPool::block_bytes(kv_layout(&self.config, KvCapacity { block_tokens, blocks: 1 }))
    }

    /// Bytes of the GPU's memory that are free.
    ///
    /// # Errors
    /// [`BackendError::Device`].
    pub fn free_bytes(&self) -> Result<usize, BackendError> {
        self.kernels.gpu().free_bytes().map_err(|error| BackendError::Device(error.to_string()))
    }

    /// For people.
    #[must_use]
    pub fn describe(&self) -> String {
        let (major, minor) = self.kernels.gpu().capability();
        format!("cuda, {} (compute capability {major}.{minor})", self.kernels.gpu().name())
    }
}

/// A model on a GPU, with its KV.
pub struct CudaBackend {
    model: CudaModel,
    capacity: KvCapacity,
    pool: CudaKvPool,
    work: Workspace<CudaKernels>,
}

impl CudaBackend {
    /// Allocates the KV pool.
    ///
    /// # Errors
    /// [`BackendError::Device`] when memory does not suffice, or there are no kernels for the model's heads.
    pub fn new(model: CudaModel, capacity: KvCapacity) -> Result<Self, BackendError> {
        let pool = model.kernels.kv_pool(kv_layout(&model.config, capacity)).map_err(device)?;
        let work = Workspace::new(&model.kernels, &model.config);
        Ok(Self { model, capacity, pool, work })
    }

    /// The forward pass; returns the logits, `[sampling sequences, vocab]`.
    fn run(&mut self, flat: &FlatBatch) -> Result<Vec<f32>, BackendError> {
        let Self { model: CudaModel { kernels, config, weights }, pool, work, .. } = self;
        let spans = flat.spans();
        let rows = Rows { tokens: &flat.tokens, spans: &spans, sampling: &flat.sampling };
        Transformer::new(kernels, config, weights).forward(rows, pool, work).map_err(device)?;
        Ok(kernels.read(work.logits()).map_err(device)?.into_owned())
    }
}

impl Backend for CudaBackend {
    fn kv_capacity(&self) -> KvCapacity {
        self.capacity
    }

    fn forward(&mut self, batch: &Batch) -> Result<Vec<NextToken>, BackendError> {
        let flat = FlatBatch::new(batch, &self.model.config, self.capacity)?;
        if flat.tokens.is_empty() {
            return Ok(Vec::new());
        }
        let logits = self.run(&flat)?;
        let wanted = batch.sequences.iter().filter_map(|step| Some((step.id, step.sample.as_ref()?)));
        wanted
            .zip(logits.chunks_exact(self.model.config.vocab))
            .map(|((id, request), row)| match sample(row, request) {
                Ok(Drawn { token, logprobs }) => Ok(NextToken { id, token, logprobs }),
                Err(error) => Err(BackendError::Device(error.to_string())),
            })
            .collect()
    }
}

#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
fn device(error: KernelError) -> BackendError {
    BackendError::Device(error.to_string())
}
