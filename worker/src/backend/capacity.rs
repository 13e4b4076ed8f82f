//! How much KV a model needs, and how many blocks a budget buys.

use worker_core::step::KvCapacity;
use worker_kernels::{KvLayout, cpu::CpuKvPool};

use crate::model::ModelConfig;

/// Bytes of one KV block of `block_tokens` positions on the CPU, all layers together.
///
/// Positions are padded to multiples of 16, so blocks of a multiple of 16 waste nothing.
#[must_use]
pub fn kv_block_bytes(config: &ModelConfig, block_tokens: usize) -> usize {
    CpuKvPool::block_bytes(kv_layout(config, KvCapacity { block_tokens, blocks: 1 }))
}

/// As many blocks of `block_bytes` as fit in `budget_bytes`; none when not even one does.
#[must_use]
pub fn kv_blocks(block_bytes: usize, budget_bytes: u64) -> usize {
    // Block ids are u32.
    (budget_bytes / (block_bytes as u64).max(1)).min(u64::from(u32::MAX)) as usize
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{ModelFiles, ModelSource};

    #[test]
    fn a_budget_buys_whole_blocks() {
        let files = ModelFiles::open(&ModelSource::Builtin).unwrap();
        let config = ModelConfig::from_files(&files).unwrap();
        let block = kv_block_bytes(&config, 16);
        // Keys and values, f32.
        assert_eq!(block, config.layers * 2 * config.kv_width() * 16 * 4);
        assert_eq!(kv_blocks(block, 10 * block as u64 + 1), 10);
        assert_eq!(kv_blocks(block, block as u64 - 1), 0);
    }
}
