//! With how many blocks, threads and bytes of shared memory each kernel runs.
//!
//! Says the same as the shapes in `cu/*.cu`: change both. Knows no device. Next: a device launches, or the host machine of the tests.

use super::params::FewRowsResult;
use crate::{KernelError, KvLayout};

/// One launch; grids and blocks have one dimension.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Launch {
    /// The kernel's name in its cubin.
    pub kernel: &'static str,
    /// Blocks.
    pub grid: u32,
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
}

/// Most blocks of a launch.
const MAX_GRID: u64 = (1 << 31) - 1;

/// What one kernel has of each head dimension: its name, threads and shared memory.
type ByHeadDim = &'static [(usize, &'static str, u32, u32)];

const PREFILL: ByHeadDim = &[
    (64, "attention_prefill_64", 128, 48 << 10),
    (128, "attention_prefill_128", 128, 64 << 10),
    (256, "attention_prefill_256", 128, 96 << 10),
];
/// Tiles of queries and two stages of keys and values, and barriers.
const PREFILL_WGMMA: ByHeadDim = &[
    (64, "attention_prefill_wgmma_64", 384, (96 << 10) + 128),
    (128, "attention_prefill_wgmma_128", 384, (192 << 10) + 128),
    (256, "attention_prefill_wgmma_256", 384, (192 << 10) + 128),
];
const DECODE: ByHeadDim = &[
    (64, "attention_decode_64", 128, 64 << 10),
    (128, "attention_decode_128", 128, 96 << 10),
    (256, "attention_decode_256", 64, 96 << 10),
];
/// Threads of prefill, and the more of both kinds' shared memory.
const MIXED: ByHeadDim = &[
    (64, "attention_mixed_64", 128, 64 << 10),
    (128, "attention_mixed_128", 128, 96 << 10),
    (256, "attention_mixed_256", 128, 96 << 10),
];
const ROPE_STORE: ByHeadDim =
    &[(64, "rope_store_64", 128, 0), (128, "rope_store_128", 128, 0), (256, "rope_store_256", 128, 0)];

/// Most rows of a product by [`linear_few_rows`], and the kernel's name and shared memory.
const FEW_ROWS: [(usize, &str, u32); 2] =
    [(8, "linear_few_rows_8", 80 << 10), (MOST_FEW_ROWS, "linear_few_rows_16", 96 << 10)];

/// Rows of `w` that a block of [`linear_few_rows`] has.
const FEW_ROWS_OUTPUTS: usize = 32;

/// The most rows of [`linear_few_rows`]: with 32 cuBLASLt was faster (bench/results/2026-11-26-h200-decode.md).
pub(super) const MOST_FEW_ROWS: usize = 16;

/// A number for each warp, four sums for each of 128 threads, and as many totals at most.
const COMBINE_SHARED_BYTES: u32 = (32 + 4 * 128 + 128) * 4;

/// A search's sums of each lane and over them, a list of 2048 keys, what was found, and two numbers for each of 16 warps.
const SAMPLE_SHARED_BYTES: u32 = (256 * 32 + 256 + 2048 + 2 + 16) * 8 + 16 * 4 + 8;

/// Kernels that need `plain_bytes` of shared memory or more, and how much.
pub(super) fn large_shared_memory(plain_bytes: u32) -> impl Iterator<Item = (&'static str, u32)> {
    [PREFILL, PREFILL_WGMMA, DECODE, MIXED]
        .into_iter()
        .flatten()
        .map(|&(_, kernel, _, bytes)| (kernel, bytes))
        .chain(FEW_ROWS.map(|(_, kernel, bytes)| (kernel, bytes)))
        .chain([("moe_gemm", super::moe::MULTIPLY_SHARED_BYTES), ("sample", SAMPLE_SHARED_BYTES)])
        .filter(move |(_, bytes)| *bytes >= plain_bytes)
}

/// Head dimensions that there are kernels for.
#[must_use]
pub fn head_dim_is_supported(head_dim: usize) -> bool {
    PREFILL.iter().any(|(dim, ..)| *dim == head_dim)
}

/// Rows of a prefill tile by head dimension, as in `cu/attention_prefill.cu`.
const PREFILL_TILE_ROWS: [(usize, usize); 3] = [(64, 128), (128, 128), (256, 64)];

/// Rows of a prefill tile by wgmma.
pub const WGMMA_TILE_ROWS: usize = 128;

/// Rows of a prefill tile by mma.sync.
///
/// # Errors
/// [`KernelError::Shape`] for a head dimension without a kernel.
pub fn prefill_tile_rows(head_dim: usize) -> Result<usize, KernelError> {
    let rows = PREFILL_TILE_ROWS.iter().find(|(dim, _)| *dim == head_dim).map(|(_, rows)| *rows);
    rows.ok_or_else(|| unsupported("attention", head_dim))
}

/// Attention of `tiles` row tiles.
///
/// # Errors
/// [`KernelError::Shape`] for a head dimension without a kernel, or more blocks than a launch has.
pub fn prefill(head_dim: usize, tiles: usize, heads: usize) -> Result<Launch, KernelError> {
    by_head_dim("attention", PREFILL, head_dim, tiles as u64 * heads as u64)
}

/// Attention of `tiles` row tiles by wgmma, on a GPU of so many multiprocessors: each has one block, which goes over what there is in turn.
///
/// # Errors
/// As [`prefill`].
pub fn prefill_wgmma(
    head_dim: usize,
    tiles: usize,
    heads: usize,
    multiprocessors: u32,
) -> Result<Launch, KernelError> {
    let works = tiles as u64 * heads as u64;
    let all = by_head_dim("attention by wgmma", PREFILL_WGMMA, head_dim, works)?;
    Ok(Launch { grid: all.grid.min(multiprocessors), ..all })
}

/// Whether there is a kernel by wgmma for these: it copies whole blocks, eight rows or more, whose rows are counted in 31 bits.
#[must_use]
pub fn wgmma_takes(layout: KvLayout) -> bool {
    let rows = layout.blocks as u64 * layout.kv_heads as u64 * layout.block_tokens as u64;
    PREFILL_WGMMA.iter().any(|(dim, ..)| *dim == layout.head_dim)
        && layout.block_tokens >= 8
        && rows < 1 << 31
}

/// Attention of `chunks` chunks of context.
///
/// # Errors
/// As [`prefill`].
pub fn decode(head_dim: usize, chunks: usize, heads: usize, kv_heads: usize) -> Result<Launch, KernelError> {
    let one = by_head_dim("attention", DECODE, head_dim, 1)?;
    // A block takes one KV head, and 16 of its query heads a warp.
    let blocks_of_a_group = (heads / kv_heads.max(1)).div_ceil(one.threads as usize / 32 * 16);
    let grid = chunks as u64 * kv_heads as u64 * blocks_of_a_group as u64;
    by_head_dim("attention", DECODE, head_dim, grid)
}

/// The blocks of [`prefill`] and then those of [`decode`] in one launch.
///
/// # Errors
/// As [`prefill`].
pub fn mixed(head_dim: usize, prefill: Launch, decode: Launch) -> Result<Launch, KernelError> {
    let grid = u64::from(prefill.grid) + u64::from(decode.grid);
    by_head_dim("attention", MIXED, head_dim, grid)
}

/// The sum of the parts of `merges` rows.
///
/// # Errors
/// As [`prefill`].
pub fn combine(head_dim: usize, merges: usize, heads: usize) -> Result<Launch, KernelError> {
    if !head_dim_is_supported(head_dim) {
        return Err(unsupported("attention", head_dim));
    }
    launch("attention_combine", merges as u64 * heads as u64, 128, COMBINE_SHARED_BYTES)
}

/// QK-norm, rotary embedding and store of `heads` queries, `kv_heads` keys and as many values a row.
///
/// # Errors
/// As [`prefill`].
pub fn rope_store(
    head_dim: usize,
    rows: usize,
    heads: usize,
    kv_heads: usize,
) -> Result<Launch, KernelError> {
    let all_heads = rows as u64 * (heads + 2 * kv_heads) as u64;
    // The kernel counts parts of them in 32 bits, those of the last block that are not there among them.
    if all_heads > MAX_GRID {
        return Err(KernelError::Shape {
            operation: "rope",
            expected: format!("at most {MAX_GRID} heads of all rows"),
            found: all_heads.to_string(),
        });
    }
    // Up to four heads of a kind are a part, of which a lane has eight numbers of each.
    let parts = rows as u64 * (heads.div_ceil(4) + 2 * kv_heads.div_ceil(4)) as u64;
    by_head_dim("rope", ROPE_STORE, head_dim, (parts * head_dim as u64).div_ceil(128 * 8))
}

/// RMSNorm of `rows` rows.
///
/// # Errors
/// [`KernelError::Shape`] for more blocks than a launch has.
pub fn rms_norm(rows: usize, width: usize) -> Result<Launch, KernelError> {
    let threads = (width.div_ceil(8).next_multiple_of(32) as u32).clamp(32, 256);
    launch("rms_norm", rows as u64, threads, 32 * 4)
}

/// SiLU of the gate times up, `[rows, width]`.
///
/// # Errors
/// As [`rms_norm`].
pub fn silu_mul(rows: usize, width: usize) -> Result<Launch, KernelError> {
    launch("silu_mul", (rows as u64 * width as u64).div_ceil(8 * 256), 256, 0)
}

/// A product of few rows with so many outputs; none is no launch.
///
/// # Errors
/// [`KernelError::Shape`] for more rows than there is a kernel for, or more blocks than a launch has.
pub fn linear_few_rows(rows: usize, outputs: usize, result: FewRowsResult) -> Result<Launch, KernelError> {
    let Some((_, kernel, shared_bytes)) = FEW_ROWS.into_iter().find(|(most, ..)| rows <= *most) else {
        let expected = format!("at most {MOST_FEW_ROWS} rows");
        return Err(KernelError::Shape { operation: "linear_few_rows", expected, found: rows.to_string() });
    };
    // Of a gated MLP an output has two rows of the matrix.
    let is_gated = result == FewRowsResult::GatedBf16;
    let outputs_of_a_block = if is_gated { FEW_ROWS_OUTPUTS / 2 } else { FEW_ROWS_OUTPUTS };
    let blocks = if rows == 0 { 0 } else { outputs.div_ceil(outputs_of_a_block) };
    launch(kernel, blocks as u64, 256, shared_bytes)
}

/// Rows of the embedding table.
///
/// # Errors
/// As [`rms_norm`].
pub fn embed(rows: usize) -> Result<Launch, KernelError> {
    launch("embed", rows as u64, 128, 0)
}

/// Rows of the residual stream.
///
/// # Errors
/// As [`rms_norm`].
pub fn select_rows(rows: usize) -> Result<Launch, KernelError> {
    launch("select_rows", rows as u64, 128, 0)
}

/// So many changes of logits.
///
/// # Errors
/// As [`rms_norm`].
pub fn adjust_logits(changes: usize) -> Result<Launch, KernelError> {
    launch("adjust_logits", (changes as u64).div_ceil(128), 128, 0)
}

/// A token for each of `rows` rows.
///
/// # Errors
/// [`KernelError::Shape`] for a vocabulary of 2²⁴ tokens or more, or too many rows.
pub fn sample(rows: usize, vocab: usize) -> Result<Launch, KernelError> {
    if vocab >= 1 << 24 {
        return Err(KernelError::Shape {
            operation: "sample",
            expected: "a vocabulary below 16777216".into(),
            found: vocab.to_string(),
        });
    }
    launch("sample", rows as u64, 512, SAMPLE_SHARED_BYTES)
}

fn by_head_dim(
    operation: &'static str,
    kernels: ByHeadDim,
    head_dim: usize,
    grid: u64,
) -> Result<Launch, KernelError> {
    let kernel = kernels.iter().find(|(dim, ..)| *dim == head_dim);
    let (_, name, threads, shared_bytes) = *kernel.ok_or_else(|| unsupported(operation, head_dim))?;
    launch(name, grid, threads, shared_bytes)
}

pub(super) fn launch(
    kernel: &'static str,
    grid: u64,
    threads: u32,
    shared_bytes: u32,
) -> Result<Launch, KernelError> {
    if grid > MAX_GRID {
        return Err(KernelError::Shape {
            operation: kernel,
            expected: format!("at most {MAX_GRID} blocks"),
            found: grid.to_string(),
        });
    }
    Ok(Launch { kernel, grid: grid as u32, threads, shared_bytes })
}

fn unsupported(operation: &'static str, head_dim: usize) -> KernelError {
    KernelError::Shape {
        operation,
        expected: "a head dimension of 64, 128 or 256".into(),
        found: head_dim.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_of_heads_has_one_block_until_its_warps_are_full() {
        let blocks = |head_dim, group: usize| decode(head_dim, 10, 3 * group, 3).unwrap().grid;
        assert_eq!(
            [1, 16, 17, 64, 65, 128, 129].map(|group| blocks(64, group)),
            [30, 30, 30, 30, 60, 60, 90]
        );
        assert_eq!(
            [1, 16, 17, 64, 65, 128, 129].map(|group| blocks(128, group)),
            [30, 30, 30, 30, 60, 60, 90]
        );
        assert_eq!([1, 16, 17, 32, 33, 64, 65].map(|group| blocks(256, group)), [30, 30, 30, 30, 60, 60, 90]);
    }

    #[test]
    fn real_sizes_fit_a_launch_and_what_does_not_is_refused() {
        // 128k tokens at 64 heads; 500k blocks of context in chunks.
        assert_eq!(prefill(128, 131_072 / 128, 64).unwrap().grid, 65_536);
        assert_eq!(prefill_wgmma(128, 131_072 / 128, 64, 132).unwrap().grid, 132);
        assert_eq!(prefill_wgmma(128, 1, 64, 132).unwrap().grid, 64);
        assert_eq!(rope_store(128, 131_072, 64, 8).unwrap().grid, 327_680);
        assert_eq!(silu_mul(131_072, 28_672).unwrap().grid, 1_835_008);
        assert_eq!(decode(128, 15_625, 64, 8).unwrap().grid, 125_000);
        assert_eq!(linear_few_rows(1, 152_064, FewRowsResult::ReplaceF32).unwrap().grid, 4752);
        assert_eq!(linear_few_rows(16, 14_336, FewRowsResult::GatedBf16).unwrap().grid, 896);
        // As of a step that draws for nobody.
        assert_eq!(linear_few_rows(0, 152_064, FewRowsResult::ReplaceF32).unwrap().grid, 0);
        let error = prefill(128, 1 << 26, 64).unwrap_err().to_string();
        assert!(error.contains("at most 2147483647 blocks"), "{error}");
        let error = rope_store(128, 1 << 25, 48, 8).unwrap_err().to_string();
        assert!(error.contains("at most 2147483647 heads of all rows"), "{error}");
        let error = prefill(96, 1, 1).unwrap_err().to_string();
        assert!(error.contains("64, 128 or 256"), "{error}");
        let error = sample(1, 1 << 24).unwrap_err().to_string();
        assert!(error.contains("below 16777216"), "{error}");
    }
    #[test]
    fn wgmma_takes_whole_blocks_of_its_heads() {
        let layout = |head_dim, block_tokens, blocks| KvLayout {
            layers: 1,
            kv_heads: 8,
            head_dim,
            block_tokens,
            blocks,
        };
        assert!(wgmma_takes(layout(128, 16, 500_000)) && wgmma_takes(layout(64, 8, 10)));
        assert!(wgmma_takes(layout(256, 16, 10)) && !wgmma_takes(layout(128, 4, 10)));
        assert!(!wgmma_takes(layout(128, 16, 1 << 24)), "rows beyond 31 bits");
    }
}
