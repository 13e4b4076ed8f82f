//! The kernels of a mixture of experts: their parameters, field for field those of `cu/moe_*.cu`, and their launches.
//!
//! In order: [`route`] chooses experts, [`group`] brings each expert's pairs together, [`multiply`] multiplies by the experts' matrices
//! (with `silu_mul` between the first and the second), [`sum`] adds what came out to the stream. No model here calls them yet. Next:
//! [`super::launch`], the tests.

use super::launch::{Launch, launch};
use super::params::{Address, DeviceValue, device_values};
use crate::KernelError;

/// Pairs of a tile, as in `cu/moe.cuh`.
pub const TILE_PAIRS: usize = 64;

/// Outputs of a block of the products, as in `cu/moe_gemm.cu`.
const TILE_OUTPUTS: usize = 128;

/// Three stages of inputs.
pub(super) const MULTIPLY_SHARED_BYTES: u32 = 72 << 10;

/// Most experts that the kernels count.
pub const MOST_EXPERTS: usize = 1024;

/// Most experts of a row: a lane each.
pub const MOST_CHOSEN: usize = 32;

device_values! {
    /// `moe_route`.
    MoeRouteParams {
        /// f32 `[rows, experts]`.
        logits: Address,
        /// u32 `[rows, top_k]`: experts, the best first.
        chosen: Address,
        /// f32 `[rows, top_k]`.
        weights: Address,
        /// How many rows.
        rows: u32,
        /// How many experts.
        experts: u32,
        /// Experts of a row.
        top_k: u32,
        /// 1 when the weights of a row add up to one, 0 when those of all experts would.
        among_chosen: u32,
    }
    /// Places of one expert's pairs that a block of the products computes.
    MoeTile {
        /// Which expert.
        expert: u32,
        /// First place.
        first: u32,
        /// Place after the last.
        end: u32,
    }
    /// `moe_group`.
    MoeGroupParams {
        /// u32 `[pairs]`.
        chosen: Address,
        /// u32 `[pairs]`: which pair is at each place.
        order: Address,
        /// u32 `[pairs]`: at which place each pair is.
        places: Address,
        /// [`MoeTile`]s, [`most_tiles`] of them.
        tiles: Address,
        /// u32: how many of them are written.
        tile_count: Address,
        /// Rows times experts of a row.
        pairs: u32,
        /// How many experts.
        experts: u32,
    }
    /// `moe_gemm`.
    MoeGemmParams {
        /// bf16 `[rows, inputs]`, or `[pairs, inputs]` without `order`.
        x: Address,
        /// bf16 `[experts, outputs, inputs]`.
        w: Address,
        /// bf16 `[pairs, outputs]`, by place.
        out: Address,
        /// u32 `[pairs]`, or null: `x` is by place.
        order: Address,
        /// [`MoeTile`]s.
        tiles: Address,
        /// u32: how many.
        tile_count: Address,
        /// A multiple of 8.
        inputs: u32,
        /// A multiple of 8.
        outputs: u32,
        /// Experts of a row.
        top_k: u32,
        /// Nothing; keeps the size a multiple of 8.
        reserved: u32,
    }
    /// `moe_sum`.
    MoeSumParams {
        /// bf16 `[pairs, width]`, by place.
        from: Address,
        /// f32 `[rows, top_k]`.
        weights: Address,
        /// u32 `[pairs]`.
        places: Address,
        /// f32 `[rows, width]`: added to.
        out: Address,
        /// How many rows.
        rows: u32,
        /// A multiple of 8.
        width: u32,
        /// Experts of a row.
        top_k: u32,
        /// Nothing; keeps the size a multiple of 8.
        reserved: u32,
    }
}

/// How many tiles there can be, however the pairs fall.
#[must_use]
pub fn most_tiles(pairs: usize, experts: usize) -> usize {
    // A tile that is not full is its expert's only one of the kind.
    pairs / TILE_PAIRS + experts.min(pairs)
}

/// Experts of `rows` rows.
///
/// # Errors
/// [`KernelError::Shape`] for more experts, or more of them a row, than the kernels count.
pub fn route(rows: usize, experts: usize, top_k: usize) -> Result<Launch, KernelError> {
    check_experts(experts)?;
    if !(1..=MOST_CHOSEN.min(experts)).contains(&top_k) {
        return Err(KernelError::Shape {
            operation: "moe_route",
            expected: format!("1 to {} experts a row", MOST_CHOSEN.min(experts)),
            found: top_k.to_string(),
        });
    }
    launch("moe_route", (rows as u64).div_ceil(4), 128, 0)
}

/// Groups of all pairs.
///
/// # Errors
/// [`KernelError::Shape`] for more experts, or pairs, than the kernels count.
pub fn group(pairs: usize, experts: usize) -> Result<Launch, KernelError> {
    check_experts(experts)?;
    // The last part of a warp must not run over.
    if pairs >= u32::MAX as usize / 2 {
        return Err(KernelError::Shape {
            operation: "moe_group",
            expected: format!("fewer than {} pairs", u32::MAX / 2),
            found: pairs.to_string(),
        });
    }
    launch("moe_group", experts as u64, 256, (MOST_EXPERTS as u32 + 8) * 4)
}

/// Products of all pairs.
///
/// # Errors
/// [`KernelError::Shape`] for rows that are no multiple of 8, or more blocks than a launch has.
pub fn multiply(pairs: usize, experts: usize, inputs: usize, outputs: usize) -> Result<Launch, KernelError> {
    check_experts(experts)?;
    for length in [inputs, outputs] {
        if !length.is_multiple_of(8) {
            return Err(KernelError::Shape {
                operation: "moe_gemm",
                expected: "rows of a multiple of 8".into(),
                found: length.to_string(),
            });
        }
    }
    let blocks = most_tiles(pairs, experts) as u64 * outputs.div_ceil(TILE_OUTPUTS) as u64;
    launch("moe_gemm", blocks, 128, MULTIPLY_SHARED_BYTES)
}

/// Sums of `rows` rows.
///
/// # Errors
/// [`KernelError::Shape`] for more blocks than a launch has.
pub fn sum(rows: usize, width: usize) -> Result<Launch, KernelError> {
    launch("moe_sum", (rows as u64 * width as u64).div_ceil(8 * 256), 256, 0)
}

fn check_experts(experts: usize) -> Result<(), KernelError> {
    if (1..=MOST_EXPERTS).contains(&experts) {
        return Ok(());
    }
    Err(KernelError::Shape {
        operation: "moe",
        expected: format!("1 to {MOST_EXPERTS} experts"),
        found: experts.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn no_fall_of_the_pairs_has_more_tiles(counts in prop::collection::vec(0usize..300, 1..40)) {
            let tiles: usize = counts.iter().map(|pairs| pairs.div_ceil(TILE_PAIRS)).sum();
            prop_assert!(tiles <= most_tiles(counts.iter().sum(), counts.len()));
        }
    }

    #[test]
    fn real_sizes_fit_a_launch_and_what_does_not_is_refused() {
        // Qwen3-30B-A3B and DeepSeek-V3 with a prompt of 128k.
        assert_eq!(multiply(131_072 * 8, 128, 2048, 1536).unwrap().grid, (16_384 + 128) * 12);
        assert_eq!(multiply(131_072 * 8, 256, 7168, 4096).unwrap().grid, (16_384 + 256) * 32);
        assert_eq!(group(131_072 * 8, 256).unwrap().grid, 256);
        for (error, expected) in [
            (route(1, 128, 33), "1 to 32 experts a row"),
            (route(1, 4, 5), "1 to 4 experts a row"),
            (route(1, 1025, 8), "1 to 1024 experts"),
            (group(1 << 31, 8), "pairs"),
            (multiply(8, 8, 12, 16), "a multiple of 8"),
        ] {
            let error = error.unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
