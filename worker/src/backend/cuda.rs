//! The CUDA backend: one model, one KV pool, one GPU. The same forward pass as the CPU's, over other kernels.
//!
//! Correct first: a step launches every operation, the draw among them, and waits once, for its tokens; where log-probabilities are
//! asked for, once more, for those rows' logits. Tokens are those of the CPU backend as far as bf16 activations allow.
//! Next: `worker_kernels::cuda`.

use worker_core::step::{
    Backend, BackendError, Batch, BlockId, KvCapacity, KvFormat, NextToken, SampleRequest,
};
use worker_kernels::cuda::{CudaKernels, CudaKvPool};
use worker_kernels::{Device, KernelError};

use super::batch::FlatBatch;
use super::capacity::{cuda_workspace_bytes, kv_format, kv_layout, numbers};
use super::draws::draws;
use super::sample::{Drawn, SampleError, logprobs};
use crate::StepSize;
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

    /// Bytes that steps of this size take beside weights and KV, of sequences of up to `context_tokens`.
    #[must_use]
    pub fn workspace_bytes(&self, step: StepSize, context_tokens: usize) -> usize {
        cuda_workspace_bytes(&self.config, step, context_tokens)
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

    /// The forward pass, up to the logits of the sequences that sample.
    fn run(&mut self, flat: &FlatBatch) -> Result<(), KernelError> {
        let Self { model: CudaModel { kernels, config, weights }, pool, work, .. } = self;
        let spans = flat.spans();
        let rows = Rows { tokens: &flat.tokens, spans: &spans, sampling: &flat.sampling };
        Transformer::new(kernels, config, weights).forward(rows, pool, work)
    }

    /// The tokens that these requests draw, each from its row of the logits.
    fn draw(&mut self, requests: &[&SampleRequest]) -> Result<Vec<Drawn>, BackendError> {
        let (kernels, vocab) = (&self.model.kernels, self.model.config.vocab);
        let top = |row: usize| requests[row].params.logprobs;
        let rows: Vec<usize> = (0..requests.len()).filter(|&row| top(row).is_some()).collect();
        let logits = self.work.logits_mut();
        // Before they are changed; and without a wait where nobody asks.
        let told =
            if rows.is_empty() { Vec::new() } else { kernels.read_rows(logits, &rows).map_err(device)? };
        let mut told = told.chunks_exact(vocab);
        let tokens = kernels.draw(logits, &draws(requests, vocab)).map_err(device)?;
        let drawn = |(row, token): (usize, Option<u32>)| {
            let token = token.ok_or_else(|| BackendError::Device(SampleError::NotFinite.to_string()))?;
            let logprobs = match top(row) {
                Some(top) => told.next().map(|logits| Box::new(logprobs(logits, token, top as usize))),
                None => None,
            };
            Ok(Drawn { token, logprobs })
        };
        tokens.into_iter().enumerate().map(drawn).collect()
    }
}

impl Backend for CudaBackend {
    fn kv_capacity(&self) -> KvCapacity {
        self.capacity
    }

    fn kv_format(&self) -> Option<KvFormat> {
        let layout = self.pool.layout();
        Some(kv_format(self.model.kernels.kv_format(), layout, CudaKvPool::block_bytes(layout)))
    }

    fn read_kv(&mut self, blocks: &[BlockId]) -> Result<Vec<u8>, BackendError> {
        let mut bytes = vec![0; blocks.len() * CudaKvPool::block_bytes(self.pool.layout())];
        self.model.kernels.read_blocks(&self.pool, &numbers(blocks), &mut bytes).map_err(device)?;
        Ok(bytes)
    }

    fn write_kv(&mut self, blocks: &[BlockId], bytes: &[u8]) -> Result<(), BackendError> {
        self.model.kernels.write_blocks(&mut self.pool, &numbers(blocks), bytes).map_err(device)
    }

    fn forward(&mut self, batch: &Batch) -> Result<Vec<NextToken>, BackendError> {
        let flat = FlatBatch::new(batch, &self.model.config, self.capacity)?;
        if flat.tokens.is_empty() {
            return Ok(Vec::new());
        }
        self.run(&flat).map_err(device)?;
        let wanted = batch.sequences.iter().filter_map(|step| Some((step.id, step.sample.as_ref()?)));
        let (ids, requests): (Vec<_>, Vec<_>) = wanted.unzip();
        let drawn = self.draw(&requests)?;
        let token = |(id, Drawn { token, logprobs })| NextToken { id, token, logprobs };
        Ok(ids.into_iter().zip(drawn).map(token).collect())
    }
}

fn device(error: KernelError) -> BackendError {
    match error {
        KernelError::DeviceLost(reason) => BackendError::DeviceLost(reason),
        error => BackendError::Device(error.to_string()),
    }
}
