//! The seam between a model and what computes it: [`Device`] owns memory, [`Kernels`] are the operations on it.
//!
//! Neither knows what a sequence, a request or a step is: only rows, heads, blocks.

use std::borrow::Cow;

use crate::WeightView;

/// Memory of a device: activations, weights and the KV pool.
pub trait Device: Send + Sync {
    /// Activations `[rows, width]`, f32; the operation that writes it sets its rows.
    type Buffer: Send + Sync;
    /// A linear layer `[outputs, inputs]` with or without a bias, packed for this device.
    type Linear: Send + Sync;
    /// A vector of f32: a norm's weight.
    type Vector: Send + Sync;
    /// Keys and values of all layers, in blocks.
    type KvPool: Send + Sync;

    /// An empty buffer.
    fn buffer(&self) -> Self::Buffer;

    /// Replaces the contents of `buffer` with `rows`, each `width` wide.
    ///
    /// # Errors
    /// [`KernelError::Shape`] when `rows` is no multiple of `width`.
    fn write(&self, rows: &[f32], width: usize, buffer: &mut Self::Buffer) -> Result<(), KernelError>;

    /// The contents of `buffer`, row-major.
    ///
    /// # Errors
    /// [`KernelError::Device`] when the device failed.
    fn read<'a>(&self, buffer: &'a Self::Buffer) -> Result<Cow<'a, [f32]>, KernelError>;

    /// Packs `parts`, stacked along their rows, into one linear layer; `bias` is one row as long as all outputs.
    ///
    /// # Errors
    /// [`KernelError::Shape`] when the parts differ in columns or the bias in length, [`KernelError::OutOfMemory`].
    fn linear(&self, parts: &[WeightView<'_>], bias: &[WeightView<'_>]) -> Result<Self::Linear, KernelError>;

    /// Takes a vector over, widened to f32.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`].
    fn vector(&self, weight: WeightView<'_>) -> Result<Self::Vector, KernelError>;

    /// Allocates the KV pool, once.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`].
    fn kv_pool(&self, layout: KvLayout) -> Result<Self::KvPool, KernelError>;

    /// How the bytes of [`read_blocks`](Self::read_blocks) are laid out: a pool of the same layout on a device that says the same takes them.
    fn kv_format(&self) -> &'static str;

    /// Keys and values of `blocks`, all layers of each, one block behind another; all that was stored before is there.
    ///
    /// # Errors
    /// [`KernelError::Shape`] for a block that is not there or bytes that are not as many as theirs, [`KernelError::Device`].
    fn read_blocks(&self, pool: &Self::KvPool, blocks: &[u32], bytes: &mut [u8]) -> Result<(), KernelError>;

    /// Writes what [`read_blocks`](Self::read_blocks) gave into `blocks`.
    ///
    /// # Errors
    /// As of reading. What was written before an error is undefined.
    fn write_blocks(&self, pool: &mut Self::KvPool, blocks: &[u32], bytes: &[u8]) -> Result<(), KernelError>;
}

/// The operations of a decoder. Each row's result depends on that row alone (and on its sequence's KV), bit for bit:
/// not on how many rows there are, in what chunks they came, or on the number of threads.
pub trait Kernels: Device {
    /// Rows of an embedding table: `out[i] = table[tokens[i]]`.
    ///
    /// # Errors
    /// [`KernelError::Shape`] for a token outside of the table.
    fn embed(&self, table: &Self::Linear, tokens: &[u32], out: &mut Self::Buffer) -> Result<(), KernelError>;

    /// `out = x / sqrt(mean(x²) + eps) · weight`, row by row.
    ///
    /// # Errors
    /// [`KernelError::Shape`] when `weight` is not as long as a row.
    fn rms_norm(
        &self,
        x: &Self::Buffer,
        weight: &Self::Vector,
        eps: f32,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError>;

    /// `out = x · wᵀ (+ bias)`.
    ///
    /// # Errors
    /// [`KernelError::Shape`] when a row of `x` is not as long as the layer's inputs.
    fn linear_into(
        &self,
        x: &Self::Buffer,
        w: &Self::Linear,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError>;

    /// The same, for the logits of rows that sample: as exact as the device has them.
    ///
    /// # Errors
    /// As [`Kernels::linear_into`].
    fn logits(&self, x: &Self::Buffer, w: &Self::Linear, out: &mut Self::Buffer) -> Result<(), KernelError> {
        self.linear_into(x, w, out)
    }

    /// `out += x · wᵀ (+ bias)`: the way back into the residual stream.
    ///
    /// # Errors
    /// [`KernelError::Shape`] when `x` or `out` do not fit the layer.
    fn linear_add(
        &self,
        x: &Self::Buffer,
        w: &Self::Linear,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError>;

    /// What comes between the projection of queries, keys and values and attention, in one pass: queries and keys are normalised head
    /// by head where there are norms, and turned (rotary embedding, in Hugging Face's `rotate_half` order); keys and values are written
    /// into their blocks. Of `qkv` only the queries are of use afterwards.
    ///
    /// # Errors
    /// [`KernelError::Shape`] when heads, norms, angles, spans, blocks and rows do not fit together.
    fn rope_store(
        &self,
        qkv: &mut Self::Buffer,
        shape: RopeShape<'_, Self>,
        pool: &mut Self::KvPool,
    ) -> Result<(), KernelError>;

    /// Causal attention of the queries in `qkv` over the KV in the pool, own rows included; `out` is
    /// `[rows, heads · head_dim]`.
    ///
    /// # Errors
    /// [`KernelError::Shape`] when spans, blocks and rows do not fit together.
    fn attention(
        &self,
        qkv: &Self::Buffer,
        pool: &Self::KvPool,
        shape: AttentionShape<'_>,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError>;

    /// `out = silu(gate) · up`, where a row of `gate_up` is the gate and then the up projection.
    ///
    /// # Errors
    /// [`KernelError::Shape`] when rows are of odd width.
    fn silu_mul(&self, gate_up: &Self::Buffer, out: &mut Self::Buffer) -> Result<(), KernelError>;

    /// The same of a product: `out = silu(gate) · up`, of `gate_up = x · wᵀ (+ bias)`, which may be left unwritten.
    ///
    /// # Errors
    /// As [`Kernels::linear_into`] and [`Kernels::silu_mul`].
    fn linear_silu_mul(
        &self,
        x: &Self::Buffer,
        w: &Self::Linear,
        gate_up: &mut Self::Buffer,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError> {
        self.linear_into(x, w, gate_up)?;
        self.silu_mul(gate_up, out)
    }

    /// Copies chosen rows: the ones that sample.
    ///
    /// # Errors
    /// [`KernelError::Shape`] for a row that `x` does not have.
    fn select_rows(
        &self,
        x: &Self::Buffer,
        rows: &[usize],
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError>;
}

/// Rows of one sequence: row `first_row + i` has position `context_tokens + i`.
#[derive(Clone, Copy, Debug)]
pub struct Span<'a> {
    /// Its first row; the spans of a call lie one behind another and cover all rows.
    pub first_row: usize,
    /// How many rows.
    pub rows: usize,
    /// Positions before the first row, whose KV is in the blocks.
    pub context_tokens: usize,
    /// Blocks of the sequence, in order of position.
    pub blocks: &'a [u32],
}

impl Span<'_> {
    /// Positions after this call.
    #[must_use]
    pub fn end(&self) -> usize {
        self.context_tokens + self.rows
    }

    /// The position after the last of all spans.
    #[must_use]
    pub fn last_end(spans: &[Span<'_>]) -> usize {
        spans.iter().map(Span::end).max().unwrap_or(0)
    }
}

/// What [`Kernels::rope_store`] does to rows of queries, keys and values, which lie in this order.
pub struct RopeShape<'a, D: Device + ?Sized> {
    /// Layer of the pool.
    pub layer: usize,
    /// Query heads; there are as many heads of keys, and of values, as the pool has.
    pub heads: usize,
    /// Row p has the `head_dim / 2` cosines and then as many sines of position p; there is one for every position of the spans.
    pub angles: &'a D::Buffer,
    /// Of queries and keys, where the model has them.
    pub norm: Option<QkNorm<'a, D>>,
    /// The rows of each sequence.
    pub spans: &'a [Span<'a>],
}

/// RMSNorm of each head of queries and keys (Qwen3's QK-norm).
pub struct QkNorm<'a, D: Device + ?Sized> {
    /// Weight of the queries, `[head_dim]`.
    pub query: &'a D::Vector,
    /// Weight of the keys.
    pub key: &'a D::Vector,
    /// Added to the mean of squares.
    pub eps: f32,
}

/// What [`Kernels::attention`] computes.
#[derive(Clone, Copy, Debug)]
pub struct AttentionShape<'a> {
    /// Layer of the pool.
    pub layer: usize,
    /// Query heads, a multiple of the pool's KV heads.
    pub heads: usize,
    /// Factor on the scores, usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// The rows of each sequence.
    pub spans: &'a [Span<'a>],
}

/// The shape of a KV pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KvLayout {
    /// Layers, each with keys and values.
    pub layers: usize,
    /// KV heads of a layer.
    pub kv_heads: usize,
    /// Numbers in a head.
    pub head_dim: usize,
    /// Positions in a block.
    pub block_tokens: usize,
    /// Blocks in the pool.
    pub blocks: usize,
}

impl KvLayout {
    /// Refuses blocks that are not there, and bytes that are not `block_bytes` for each.
    pub(crate) fn check_blocks(
        &self,
        blocks: &[u32],
        bytes: usize,
        block_bytes: usize,
    ) -> Result<(), KernelError> {
        let (expected, found) = match blocks.iter().find(|block| **block as usize >= self.blocks) {
            Some(block) => (format!("blocks below {}", self.blocks), block.to_string()),
            None if bytes != blocks.len() * block_bytes => {
                (format!("{block_bytes} bytes for each of {} blocks", blocks.len()), bytes.to_string())
            }
            None => return Ok(()),
        };
        Err(KernelError::Shape { operation: "kv blocks", expected, found })
    }

    /// Refuses spans that do not cover `rows` one behind another, or name a layer or blocks that are not there.
    pub(crate) fn check(&self, spans: &[Span<'_>], rows: usize, layer: usize) -> Result<(), KernelError> {
        let refuse = |expected: String, found: usize| {
            Err(KernelError::Shape { operation: "kv", expected, found: found.to_string() })
        };
        if layer >= self.layers {
            return refuse(format!("a layer below {}", self.layers), layer);
        }
        let mut next_row = 0;
        for span in spans {
            if span.first_row != next_row {
                return refuse(format!("a span from row {next_row}"), span.first_row);
            }
            next_row += span.rows;
            let needed = span.end().div_ceil(self.block_tokens);
            if span.blocks.len() < needed {
                return refuse(format!("{needed} blocks"), span.blocks.len());
            }
            if let Some(&block) = span.blocks.iter().find(|&&block| block as usize >= self.blocks) {
                return refuse(format!("blocks below {}", self.blocks), block as usize);
            }
        }
        if next_row == rows { Ok(()) } else { refuse(format!("spans over {rows} rows"), next_row) }
    }
}

/// Why an operation could not be computed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum KernelError {
    /// Operands that do not fit together; a bug in the caller.
    #[error("{operation}: expected {expected}, found {found}")]
    Shape {
        /// Which operation refused.
        operation: &'static str,
        /// What would have been right.
        expected: String,
        /// What was there.
        found: String,
    },
    /// Memory that could not be allocated.
    #[error("cannot allocate {bytes} bytes")]
    OutOfMemory {
        /// How much was asked for.
        bytes: usize,
    },
    /// A kind of processor asked for by name that is not this one.
    #[error("this machine has no {0}")]
    Unsupported(&'static str),
    /// The device or its driver failed.
    #[error("device failed: {0}")]
    Device(String),
    /// The same, and nothing can be computed on it any more in this process.
    #[error("device lost: {0}")]
    DeviceLost(String),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_that_do_not_fit_are_refused() {
        let layout = KvLayout { layers: 2, kv_heads: 1, head_dim: 8, block_tokens: 4, blocks: 3 };
        let span = |first_row, rows, context_tokens, blocks| Span { first_row, rows, context_tokens, blocks };
        assert_eq!(layout.check(&[span(0, 2, 3, &[0, 2])], 2, 1), Ok(()));
        let wrong: [(&[Span<'_>], usize, &str); 5] = [
            (&[span(0, 2, 3, &[0])], 0, "2 blocks"),
            (&[span(0, 2, 3, &[0, 3])], 0, "blocks below 3"),
            (&[span(1, 1, 0, &[0])], 0, "from row 0"),
            (&[span(0, 1, 0, &[0])], 0, "over 2 rows"),
            (&[span(0, 2, 0, &[0])], 2, "layer below 2"),
        ];
        for (spans, layer, reason) in wrong {
            let error = layout.check(spans, 2, layer).unwrap_err().to_string();
            assert!(error.contains(reason), "{error} should say {reason}");
        }
    }
}
