//! How much memory a model's KV takes.

use worker_core::step::{BlockId, KvCapacity, KvFormat};
use worker_kernels::{KvLayout, cpu::CpuKvPool};

use crate::StepSize;
use crate::model::ModelConfig;
use crate::model::transformer::FIRST_POSITIONS;

/// Bytes of one KV block of `block_tokens` positions on the CPU, all layers together.
///
/// Positions are padded to multiples of 16, so blocks of a multiple of 16 waste nothing.
#[must_use]
pub fn kv_block_bytes(config: &ModelConfig, block_tokens: usize) -> usize {
    CpuKvPool::block_bytes(kv_layout(config, KvCapacity { block_tokens, blocks: 1 }))
}

/// Bytes that a GPU's buffers grow to with steps of this size and sequences of up to `context_tokens`: f32 of the residual stream, angles and
/// logits, bf16 of all else. Without the parts of attention over long contexts, which come and go.
pub(super) fn cuda_workspace_bytes(config: &ModelConfig, step: StepSize, context_tokens: usize) -> usize {
    let ModelConfig { hidden, heads, kv_heads, head_dim, intermediate, vocab, .. } = *config;
    let attended = (2 * heads * head_dim * step.max_tokens).max(4 * hidden * step.max_running);
    let of_a_row = 6 * hidden + 2 * (heads + 2 * kv_heads) * head_dim + 2 * 3 * intermediate;
    let angles = 4 * head_dim * context_tokens.next_power_of_two().max(FIRST_POSITIONS);
    of_a_row * step.max_tokens + attended + angles + 4 * vocab * step.max_running
}

/// The pool's shape on the device.
pub(super) fn kv_layout(config: &ModelConfig, capacity: KvCapacity) -> KvLayout {
    KvLayout {
        layers: config.layers,
        kv_heads: config.kv_heads,
        head_dim: config.head_dim,
        block_tokens: capacity.block_tokens,
        blocks: capacity.blocks,
    }
}

/// How blocks of a pool go to another worker; `device` says how their bytes lie.
pub(super) fn kv_format(device: &str, layout: KvLayout, block_bytes: usize) -> KvFormat {
    let KvLayout { layers, kv_heads, head_dim, block_tokens, .. } = layout;
    KvFormat { name: format!("{device}/{layers}x{kv_heads}x{head_dim}/{block_tokens}"), block_bytes }
}

/// Blocks as the kernels number them.
pub(super) fn numbers(blocks: &[BlockId]) -> Vec<u32> {
    blocks.iter().map(|block| block.0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{ModelFiles, ModelSource};

    #[test]
    fn a_gpu_has_room_for_the_largest_step() {
        let files = ModelFiles::open(&ModelSource::Builtin).unwrap();
        let config = ModelConfig::from_files(&files).unwrap();
        let bytes = |max_running, max_tokens| {
            cuda_workspace_bytes(&config, StepSize { max_running, max_tokens }, 4_096)
        };
        // Stream, normed, queries with keys and values, attended, gate with up, mlp; angles; logits of two.
        let rows = 8 * (4 * 192 + 2 * 192 + 2 * 320 + 2 * 192 + 2 * 1024 + 2 * 512);
        assert_eq!(bytes(2, 8), rows + 4 * 32 * 4_096 + 2 * 4 * 2_048);
        assert_eq!(
            bytes(8, 8) - bytes(4, 8),
            4 * 4 * 2_048 + 192 * (4 * 8 - 2 * 8),
            "rows that draw, f32, where they are most"
        );
    }

    #[test]
    fn a_block_holds_keys_and_values_of_all_layers() {
        let files = ModelFiles::open(&ModelSource::Builtin).unwrap();
        let config = ModelConfig::from_files(&files).unwrap();
        let block = kv_block_bytes(&config, 16);
        // Keys and values, f32.
        assert_eq!(block, config.layers * 2 * config.kv_width() * 16 * 4);
    }
}
