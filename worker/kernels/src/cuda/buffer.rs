//! What models keep on a GPU: activations, linear layers, and the KV pool.
//!
//! Next: [`super::kernels`] computes with them.

use std::sync::Arc;

use super::gpu::Gpu;
use super::kernels::mismatch;
use super::launch::head_dim_is_supported;
use super::memory::Memory;
use super::params::{Address, Paging};
use crate::{KernelError, KvLayout, Span, WeightView};

/// What activations are made of.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum Kind {
    /// Residual stream, angles, logits.
    #[default]
    F32,
    /// All else.
    Bf16,
}

impl Kind {
    fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }
}

/// Activations `[rows, width]`; memory grows to the largest step.
#[derive(Default)]
pub struct CudaBuffer {
    memory: Option<Memory>,
    rows: usize,
    width: usize,
    kind: Kind,
}

impl CudaBuffer {
    /// Takes another shape; the contents are lost.
    pub(super) fn reset(
        &mut self,
        gpu: &Arc<Gpu>,
        rows: usize,
        width: usize,
        kind: Kind,
    ) -> Result<(), KernelError> {
        let bytes = rows * width * kind.bytes();
        if self.memory.as_ref().is_none_or(|memory| memory.bytes() < bytes) {
            gpu.refuse_while_recording("an allocation")?;
            // The old memory goes first: both may not fit.
            self.memory = None;
            self.memory = Some(Memory::kept(gpu, bytes).map_err(|error| error.of_allocation(bytes))?);
        }
        (self.rows, self.width, self.kind) = (rows, width, kind);
        Ok(())
    }

    pub(super) fn rows(&self) -> usize {
        self.rows
    }

    pub(super) fn width(&self) -> usize {
        self.width
    }

    pub(super) fn kind(&self) -> Kind {
        self.kind
    }

    pub(super) fn address(&self) -> Address {
        self.memory.as_ref().map_or(0, Memory::address)
    }

    pub(super) fn memory(&self) -> Result<&Memory, KernelError> {
        self.memory
            .as_ref()
            .ok_or_else(|| mismatch("read", "a buffer that was written".into(), "an empty one".into()))
    }

    /// Refuses numbers of another kind; a bug in the caller.
    pub(super) fn expect(&self, operation: &'static str, kind: Kind) -> Result<(), KernelError> {
        if self.kind == kind {
            return Ok(());
        }
        Err(mismatch(operation, format!("{kind:?}"), format!("{:?}", self.kind)))
    }
}

/// A linear layer, bf16 `[outputs, inputs]`.
pub struct CudaLinear {
    pub(super) weights: Memory,
    pub(super) bias: Option<Bias>,
    pub(super) inputs: usize,
    pub(super) outputs: usize,
}

/// In both formats, since a product takes it in that of its result.
pub(super) struct Bias {
    pub(super) bf16: Memory,
    pub(super) f32: Memory,
}

impl CudaLinear {
    pub(super) fn upload(
        gpu: &Arc<Gpu>,
        parts: &[WeightView<'_>],
        bias: &[WeightView<'_>],
    ) -> Result<Self, KernelError> {
        let inputs = parts.first().map_or(0, WeightView::columns);
        let outputs: usize = parts.iter().map(WeightView::rows).sum();
        if let Some(part) = parts.iter().find(|part| part.columns() != inputs) {
            return Err(mismatch("linear", format!("{inputs} columns"), part.columns().to_string()));
        }
        let bias_length: usize = bias.iter().map(|part| part.rows() * part.columns()).sum();
        if !bias.is_empty() && bias_length != outputs {
            return Err(mismatch("linear", format!("a bias of {outputs}"), bias_length.to_string()));
        }
        let keep = |bytes: usize| Memory::kept(gpu, bytes).map_err(|error| error.of_allocation(bytes));
        let weights = keep(2 * inputs * outputs)?;
        weights.write(&narrowed(parts))?;
        let bias = if bias.is_empty() {
            None
        } else {
            let both = Bias { bf16: keep(2 * outputs)?, f32: keep(4 * outputs)? };
            both.bf16.write(&narrowed(bias))?;
            both.f32.write(&numbers(bias))?;
            Some(both)
        };
        Ok(Self { weights, bias, inputs, outputs })
    }
}

fn numbers(parts: &[WeightView<'_>]) -> Vec<f32> {
    let mut numbers = Vec::with_capacity(parts.iter().map(|part| part.rows() * part.columns()).sum());
    for part in parts {
        let mut row = vec![0.0; part.columns()];
        for index in 0..part.rows() {
            part.read_row(index, &mut row);
            numbers.extend_from_slice(&row);
        }
    }
    numbers
}

fn narrowed(parts: &[WeightView<'_>]) -> Vec<u16> {
    let mut numbers = Vec::with_capacity(parts.iter().map(|part| part.rows() * part.columns()).sum());
    parts.iter().for_each(|part| part.append_bf16(&mut numbers));
    numbers
}

/// Keys and values, each bf16 `[layers, blocks, kv_heads, block_tokens, head_dim]`, allocated plainly so that they can be exported.
pub struct CudaKvPool {
    layout: KvLayout,
    keys: Memory,
    values: Memory,
}

impl CudaKvPool {
    pub(super) fn allocate(gpu: &Arc<Gpu>, layout: KvLayout) -> Result<Self, KernelError> {
        if !head_dim_is_supported(layout.head_dim)
            || !layout.block_tokens.is_power_of_two()
            || layout.kv_heads == 0
        {
            return Err(mismatch(
                "kv pool",
                "heads of 64, 128 or 256 numbers, and blocks of a power of two".into(),
                format!("{layout:?}"),
            ));
        }
        // The kernels count a layer's rows in 32 bits.
        let rows = layout.blocks.saturating_mul(layout.block_tokens).saturating_mul(layout.kv_heads);
        if rows >= u32::MAX as usize {
            let expected = format!("fewer than {} positions of all KV heads", u32::MAX);
            return Err(mismatch("kv pool", expected, format!("{layout:?}")));
        }
        let bytes = Self::block_bytes(layout) / 2 * layout.blocks;
        let allocate = || Memory::kept(gpu, bytes).map_err(|error| error.of_allocation(bytes));
        Ok(Self { layout, keys: allocate()?, values: allocate()? })
    }

    /// Bytes that one block takes in all layers.
    #[must_use]
    pub fn block_bytes(layout: KvLayout) -> usize {
        2 * layout.layers * layout.kv_heads * layout.block_tokens * layout.head_dim * 2
    }

    /// Its shape.
    #[must_use]
    pub fn layout(&self) -> KvLayout {
        self.layout
    }

    /// Where a layer's keys and values begin.
    pub(super) fn layer(&self, layer: usize) -> (Address, Address) {
        let offset = (layer
            * (Self::block_bytes(self.layout) / 2 / self.layout.layers.max(1))
            * self.layout.blocks) as u64;
        (self.keys.address() + offset, self.values.address() + offset)
    }

    /// Where keys and values of blocks begin, layer by layer of each block; all are equally large.
    pub(super) fn parts(&self, blocks: &[u32]) -> Vec<Address> {
        let layers = self.layout.layers;
        let part_bytes = Self::block_bytes(self.layout) / (2 * layers).max(1);
        let of_layer = |block: u32, layer: usize| {
            let (keys, values) = self.layer(layer);
            [keys, values].map(|address| address + (block as usize * part_bytes) as u64)
        };
        blocks.iter().flat_map(|block| (0..layers).flat_map(move |layer| of_layer(*block, layer))).collect()
    }

    pub(super) fn paging(&self, block_tables: Address) -> Paging {
        let KvLayout { kv_heads, block_tokens, .. } = self.layout;
        Paging { block_tables, kv_heads: kv_heads as u32, block_shift: block_tokens.ilog2() }
    }

    /// Where each row's keys and values go, of spans that were checked.
    pub(super) fn slots(&self, spans: &[Span<'_>]) -> Vec<u32> {
        let block_tokens = self.layout.block_tokens;
        let slot = |span: &Span<'_>, position: usize| {
            span.blocks[position / block_tokens] * block_tokens as u32 + (position % block_tokens) as u32
        };
        spans
            .iter()
            .flat_map(|span| (span.context_tokens..span.end()).map(move |at| slot(span, at)))
            .collect()
    }
}
