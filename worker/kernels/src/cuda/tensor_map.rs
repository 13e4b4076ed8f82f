//! Tensors as the tensor memory accelerator of Hopper is told of them: what a kernel's copies may bring, a box at a time.
//!
//! Next: [`super::launch`] names the kernel that takes them ([`super::params::PrefillWgmmaParams`]).

use std::ffi::c_void;

use cudarc::driver::sys::{
    self, CUtensorMap, CUtensorMapDataType, CUtensorMapFloatOOBfill, CUtensorMapInterleave,
    CUtensorMapL2promotion, CUtensorMapSwizzle,
};

use super::driver::during;
use super::error::CudaError;
use super::launch;
use super::params::{Address, DeviceValue, PrefillParams, PrefillWgmmaParams};
use crate::KvLayout;

/// What the driver writes, which only it and the GPU read.
#[repr(C, align(64))]
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct TensorMap {
    opaque: [u64; 16],
}

// SAFETY: repr(C), plain numbers only.
unsafe impl cudarc::driver::DeviceRepr for TensorMap {}
// SAFETY: likewise, and 128 bytes are a multiple of the alignment.
unsafe impl DeviceValue for TensorMap {}

/// A matrix of bf16 in device memory, and what one copy brings of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Matrix {
    /// Where it begins; a multiple of 16.
    pub address: Address,
    /// Rows; what a box has beyond them are zeros.
    pub rows: u64,
    /// Numbers of a row.
    pub columns: u64,
    /// Bytes from row to row; a multiple of 16.
    pub row_bytes: u64,
    /// What one copy brings.
    pub boxes: Boxes,
}

/// A part of a matrix that one copy brings, and how it lies in shared memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Boxes {
    /// [`Boxes::COLUMNS`] of so many rows, at most 256.
    Columns(u32),
    /// All columns, a multiple of [`Boxes::COLUMNS`], of so many rows, a multiple of [`Boxes::GROUP`], as are the matrix's. Of eight rows lie
    /// the first 64 columns, then the next, and behind them the next eight rows.
    Groups(u32),
}

impl Boxes {
    /// 128 bytes, over which a swizzle goes.
    pub const COLUMNS: u32 = 64;
    /// Rows over which a swizzle goes.
    pub const GROUP: u32 = 8;
}

impl Matrix {
    /// Describes it; no GPU is asked.
    ///
    /// # Errors
    /// [`CudaError::Call`], when the driver finds that it cannot be described.
    pub fn map(self) -> Result<TensorMap, CudaError> {
        const COLUMNS: u64 = Boxes::COLUMNS as u64;
        const GROUP: u64 = Boxes::GROUP as u64;
        match self.boxes {
            Boxes::Columns(rows) => {
                self.encode([self.columns, self.rows], &[self.row_bytes], [Boxes::COLUMNS, rows])
            }
            Boxes::Groups(rows) => {
                let panels = self.columns / COLUMNS;
                self.encode(
                    [COLUMNS, GROUP, panels, self.rows / GROUP],
                    &[self.row_bytes, COLUMNS * 2, self.row_bytes * GROUP],
                    [Boxes::COLUMNS, Boxes::GROUP, panels as u32, rows / Boxes::GROUP],
                )
            }
        }
    }

    /// As a tensor of so many dimensions; `strides`, in bytes, are those of all but the first.
    fn encode<const DIMENSIONS: usize>(
        self,
        sizes: [u64; DIMENSIONS],
        strides: &[u64],
        of_box: [u32; DIMENSIONS],
    ) -> Result<TensorMap, CudaError> {
        assert_eq!(strides.len(), DIMENSIONS - 1);
        let steps = [1; DIMENSIONS];
        let mut map = TensorMap::default();
        const _: () = assert!(size_of::<TensorMap>() == size_of::<CUtensorMap>());
        // SAFETY: a map is as large and as aligned as the driver's; the lists have a number for each dimension, and one stride less.
        unsafe {
            sys::cuTensorMapEncodeTiled(
                (&raw mut map).cast(),
                CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                DIMENSIONS as u32,
                self.address as *mut c_void,
                sizes.as_ptr(),
                strides.as_ptr(),
                of_box.as_ptr(),
                steps.as_ptr(),
                CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        }
        .result()
        .map_err(|error| during("cuTensorMapEncodeTiled")(error).of(|| format!("{self:?}")))?;
        Ok(map)
    }
}

/// Rows of a tile of queries, and so of the largest box.
const TILE_ROWS: u32 = launch::WGMMA_TILE_ROWS as u32;

/// The most rows of a box of keys: a power of two of which a tile of keys is a multiple (`cu/attention_prefill_wgmma.cu`).
fn most_box_rows(head_dim: usize) -> u32 {
    if head_dim == 256 { 64 } else { 128 }
}

impl PrefillWgmmaParams {
    /// What `prefill` says, of so many rows of queries and a layer's pool: of so many tiles, by so many blocks. `map` describes matrices.
    ///
    /// # Errors
    /// What `map` returns.
    pub fn new<E>(
        prefill: &PrefillParams,
        rows: usize,
        layout: KvLayout,
        (tiles, blocks): (usize, u32),
        map: impl Fn(Matrix) -> Result<TensorMap, E>,
    ) -> Result<Self, E> {
        let KvLayout { kv_heads, head_dim, block_tokens, .. } = layout;
        let pool_rows = (layout.blocks * kv_heads * block_tokens) as u64;
        let box_rows = most_box_rows(head_dim).min(block_tokens as u32);
        let of_pool = |address| {
            let (columns, row_bytes) = (head_dim as u64, head_dim as u64 * 2);
            map(Matrix { address, rows: pool_rows, columns, row_bytes, boxes: Boxes::Groups(box_rows) })
        };
        let columns = u64::from(prefill.q_stride);
        Ok(Self {
            q: map(Matrix {
                address: prefill.q,
                rows: rows as u64,
                columns,
                row_bytes: columns * 2,
                boxes: Boxes::Columns(TILE_ROWS),
            })?,
            keys: of_pool(prefill.keys)?,
            values: of_pool(prefill.values)?,
            out: prefill.out,
            sink_logits: prefill.sink_logits,
            tiles: prefill.tiles,
            sequences: prefill.sequences,
            paging: prefill.paging,
            visibility: prefill.visibility,
            heads: prefill.heads,
            out_stride: prefill.out_stride,
            box_rows,
            works: tiles as u32 * prefill.heads,
            blocks,
            score_scale: prefill.score_scale,
            reserved: [0; 12],
        })
    }
}
