//! The forward pass of the three architectures, over any [`Kernels`].
//!
//! A step's rows go through as one ragged batch; logits are computed only for the rows that sample. Caller: a backend.

use worker_kernels::{AttentionShape, Device, KernelError, Kernels, QkNorm, RopeShape, Span};

use super::rope::push_angles;
use super::weights::{LayerWeights, QkWeights};
use super::{ModelConfig, Weights};

/// Positions whose angles are computed at first.
pub(crate) const FIRST_POSITIONS: usize = 1024;

/// A decoder: configuration and weights, run with `kernels`.
pub struct Transformer<'a, K: Kernels> {
    kernels: &'a K,
    config: &'a ModelConfig,
    weights: &'a Weights<K>,
}

/// Buffers of a forward pass, kept from step to step.
pub struct Workspace<D: Device> {
    /// Residual stream.
    x: D::Buffer,
    normed: D::Buffer,
    qkv: D::Buffer,
    attended: D::Buffer,
    gate_up: D::Buffer,
    mlp: D::Buffer,
    /// Of positions `0..positions`: as many as the longest sequence had, and up to twice that.
    angles: D::Buffer,
    positions: usize,
    logits: D::Buffer,
    /// Radians per position of each pair of a head.
    frequencies: Vec<f32>,
}

impl<D: Device> Workspace<D> {
    /// Empty buffers; they grow to the largest step.
    #[must_use]
    pub fn new(device: &D, config: &ModelConfig) -> Self {
        Self {
            x: device.buffer(),
            normed: device.buffer(),
            qkv: device.buffer(),
            attended: device.buffer(),
            gate_up: device.buffer(),
            mlp: device.buffer(),
            angles: device.buffer(),
            positions: 0,
            logits: device.buffer(),
            frequencies: config.rope.frequencies(config.head_dim),
        }
    }

    /// Logits of the last step, `[sampling rows, vocab]`.
    #[must_use]
    pub fn logits(&self) -> &D::Buffer {
        &self.logits
    }

    /// The same, to draw from and change.
    pub fn logits_mut(&mut self) -> &mut D::Buffer {
        &mut self.logits
    }
}

/// The rows of a step.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// One token a row.
    pub tokens: &'a [u32],
    /// Which rows belong to which sequence.
    pub spans: &'a [Span<'a>],
    /// Rows whose logits are wanted.
    pub sampling: &'a [usize],
}

impl<'a, K: Kernels> Transformer<'a, K> {
    /// Puts the parts together.
    #[must_use]
    pub fn new(kernels: &'a K, config: &'a ModelConfig, weights: &'a Weights<K>) -> Self {
        Self { kernels, config, weights }
    }

    /// Runs one step: writes the rows' KV to `pool` and their logits to `work`.
    ///
    /// # Errors
    /// [`KernelError`] when rows, spans and pool do not fit together, or the device failed.
    pub fn forward(
        &self,
        rows: Rows<'_>,
        pool: &mut K::KvPool,
        work: &mut Workspace<K>,
    ) -> Result<(), KernelError> {
        self.place(rows.spans, work)?;
        self.kernels.embed(&self.weights.embedding, rows.tokens, &mut work.x)?;
        for (index, layer) in self.weights.layers.iter().enumerate() {
            self.attend(index, layer, rows.spans, pool, work)?;
            self.think(layer, work)?;
        }
        self.project(rows.sampling, work)
    }

    /// Sees to it that the angles of all positions are there.
    fn place(&self, spans: &[Span<'_>], work: &mut Workspace<K>) -> Result<(), KernelError> {
        let end = Span::last_end(spans);
        if end > work.positions {
            let (positions, mut angles) = (end.next_power_of_two().max(FIRST_POSITIONS), Vec::new());
            for position in 0..positions {
                push_angles(&work.frequencies, position, &mut angles);
            }
            self.kernels.write(&angles, self.config.head_dim, &mut work.angles)?;
            work.positions = positions;
        }
        Ok(())
    }

    /// Attention, added to the residual stream.
    fn attend(
        &self,
        index: usize,
        layer: &LayerWeights<K>,
        spans: &[Span<'_>],
        pool: &mut K::KvPool,
        work: &mut Workspace<K>,
    ) -> Result<(), KernelError> {
        let (kernels, config) = (self.kernels, self.config);
        kernels.rms_norm(&work.x, &layer.input_norm, config.rms_norm_eps, &mut work.normed)?;
        kernels.linear_into(&work.normed, &layer.qkv, &mut work.qkv)?;
        let norm = layer.qk_norm.as_ref().map(|QkWeights { query, key }| QkNorm {
            query,
            key,
            eps: config.rms_norm_eps,
        });
        let shape = RopeShape { layer: index, heads: config.heads, angles: &work.angles, norm, spans };
        kernels.rope_store(&mut work.qkv, shape, pool)?;
        let scale = 1.0 / (config.head_dim as f32).sqrt();
        let shape = AttentionShape { layer: index, heads: config.heads, scale, spans };
        kernels.attention(&work.qkv, pool, shape, &mut work.attended)?;
        kernels.linear_add(&work.attended, &layer.output, &mut work.x)
    }

    /// The MLP, added to the residual stream.
    fn think(&self, layer: &LayerWeights<K>, work: &mut Workspace<K>) -> Result<(), KernelError> {
        self.kernels.rms_norm(&work.x, &layer.mlp_norm, self.config.rms_norm_eps, &mut work.normed)?;
        self.kernels.linear_silu_mul(&work.normed, &layer.gate_up, &mut work.gate_up, &mut work.mlp)?;
        self.kernels.linear_add(&work.mlp, &layer.down, &mut work.x)
    }

    /// Logits of the rows that sample.
    fn project(&self, sampling: &[usize], work: &mut Workspace<K>) -> Result<(), KernelError> {
        self.kernels.select_rows(&work.x, sampling, &mut work.attended)?;
        self.kernels.rms_norm(
            &work.attended,
            &self.weights.norm,
            self.config.rms_norm_eps,
            &mut work.normed,
        )?;
        self.kernels.logits(&work.normed, self.weights.head(), &mut work.logits)
    }
}
