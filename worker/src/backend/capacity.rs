//! How much memory a model's KV takes.

use worker_core::step::{BlockId, KvCapacity, KvFormat};
use worker_kernels::{KvLayout, cpu::CpuKvPool};

use crate::model::ModelConfig;

/// Bytes of one KV block of `block_tokens` positions on the CPU, all layers together.
///
/// Positions are padded to multiples of 16, so blocks of a multiple of 16 waste nothing.
#[must_use]
pub fn kv_block_bytes(config: &ModelConfig, block_tokens: usize) -> usize {
    CpuKvPool::block_bytes(kv_layout(config, KvCapacity { block_tokens, blocks: 1 }))
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
    fn a_block_holds_keys_and_values_of_all_layers() {
        let files = ModelFiles::open(&ModelSource::Builtin).unwrap();
        let config = ModelConfig::from_files(&files).unwrap();
        let block = kv_block_bytes(&config, 16);
        // Keys and values, f32.
        assert_eq!(block, config.layers * 2 * config.kv_width() * 16 * 4);
    }
}
