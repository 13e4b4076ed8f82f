//! Keys and values in blocks, laid out for the tile loop.
//!
//! Keys lie in tiles of [`LANES`] positions, `[head_dim][lane]`, like weights: scores need no horizontal sums. Values lie
//! by position, `[position][head_dim]`, padded to whole vectors. Next: [`super::attention`] reads them.

use super::CpuKernels;
use super::activations::Activations;
use super::aligned::AlignedBox;
use super::shared::SharedMut;
use super::simd::LANES;
use crate::{KernelError, KvLayout, Span};

/// Multiply-adds that storing a number is worth: it waits for a cache line that the last step did not leave behind.
const STORE_WORK: usize = 32;

/// Keys and values of all layers, f32, allocated once and backed by memory when first written.
#[derive(Debug)]
pub struct CpuKvPool {
    layout: KvLayout,
    keys: AlignedBox<f32>,
    values: AlignedBox<f32>,
}

impl CpuKvPool {
    /// Allocates the pool.
    pub(crate) fn new(layout: KvLayout) -> Result<Self, KernelError> {
        if layout.block_tokens == 0 || layout.kv_heads == 0 || layout.head_dim == 0 {
            return Err(KernelError::Shape {
                operation: "kv pool",
                expected: "at least one position, head and dimension".into(),
                found: format!("{layout:?}"),
            });
        }
        let blocks = layout.layers.saturating_mul(layout.blocks).saturating_mul(layout.kv_heads);
        let lanes = layout.block_tokens.next_multiple_of(LANES);
        let keys = AlignedBox::zeroed(blocks.saturating_mul(lanes * layout.head_dim))?;
        let values = AlignedBox::zeroed(blocks.saturating_mul(lanes * padded(layout.head_dim)))?;
        Ok(Self { layout, keys, values })
    }

    /// Bytes that one block takes in all layers.
    #[must_use]
    pub fn block_bytes(layout: KvLayout) -> usize {
        let lanes = layout.block_tokens.next_multiple_of(LANES);
        layout.layers
            * layout.kv_heads
            * lanes
            * (layout.head_dim + padded(layout.head_dim))
            * size_of::<f32>()
    }

    /// Its shape.
    #[must_use]
    pub fn layout(&self) -> KvLayout {
        self.layout
    }

    /// Lanes of a block: its positions, rounded up to whole tiles.
    pub(crate) fn block_lanes(&self) -> usize {
        self.layout.block_tokens.next_multiple_of(LANES)
    }

    /// Width of a value row, padded to whole vectors.
    pub(crate) fn value_width(&self) -> usize {
        padded(self.layout.head_dim)
    }

    /// Key tiles `[tile][head_dim][lane]` of one head in one block.
    pub(crate) fn keys(&self, layer: usize, block: u32, head: usize) -> &[f32] {
        let len = self.block_lanes() * self.layout.head_dim;
        &self.keys[index(self.layout, layer, block, head) * len..][..len]
    }

    /// Values `[position][value_width]` of one head in one block.
    pub(crate) fn values(&self, layer: usize, block: u32, head: usize) -> &[f32] {
        let len = self.block_lanes() * self.value_width();
        &self.values[index(self.layout, layer, block, head) * len..][..len]
    }

    /// Bytes of the keys, and of the values, of all heads of a block in one layer.
    fn layer_bytes(&self) -> [usize; 2] {
        let numbers = self.layout.kv_heads * self.block_lanes();
        [self.layout.head_dim, self.value_width()].map(|width| numbers * width * size_of::<f32>())
    }

    /// Where keys and values of all heads of a block in one layer begin, in bytes.
    fn layer_at(&self, layer: usize, block: u32) -> [usize; 2] {
        let at = layer * self.layout.blocks + block as usize;
        self.layer_bytes().map(|bytes| at * bytes)
    }

    /// The bytes of `blocks`: of each block layer by layer, its keys as they lie here and then its values.
    pub(crate) fn read_blocks(&self, blocks: &[u32], bytes: &mut [u8]) -> Result<(), KernelError> {
        self.layout.check_blocks(blocks, bytes.len(), Self::block_bytes(self.layout))?;
        let [keys, values] = [&self.keys, &self.values].map(|numbers| bytes_of(numbers));
        let mut rest = bytes;
        for (block, layer) in each_layer(blocks, self.layout.layers) {
            let parts = [keys, values].into_iter().zip(self.layer_at(layer, block)).zip(self.layer_bytes());
            for ((from, at), length) in parts {
                let (to, others) = rest.split_at_mut(length);
                to.copy_from_slice(&from[at..][..length]);
                rest = others;
            }
        }
        Ok(())
    }

    /// The way back.
    pub(crate) fn write_blocks(&mut self, blocks: &[u32], bytes: &[u8]) -> Result<(), KernelError> {
        self.layout.check_blocks(blocks, bytes.len(), Self::block_bytes(self.layout))?;
        let mut rest = bytes;
        for (block, layer) in each_layer(blocks, self.layout.layers) {
            let places = self.layer_at(layer, block).into_iter().zip(self.layer_bytes());
            for (numbers, (at, length)) in [&mut self.keys, &mut self.values].into_iter().zip(places) {
                let (from, others) = rest.split_at(length);
                bytes_of_mut(numbers)[at..][..length].copy_from_slice(from);
                rest = others;
            }
        }
        Ok(())
    }

    /// Writes keys and values of every row, whose spans have been checked; they are the last `2 · kv_heads` heads of it.
    pub(crate) fn store(
        &mut self,
        kernels: &CpuKernels,
        qkv: &Activations,
        spans: &[Span<'_>],
        layer: usize,
    ) {
        let KvLayout { kv_heads, head_dim, .. } = self.layout;
        let kv_width = kv_heads * head_dim;
        let first_column = qkv.width() - 2 * kv_width;
        let (layout, key_len) = (self.layout, self.block_lanes() * head_dim);
        let (value_len, value_width) = (self.block_lanes() * self.value_width(), self.value_width());
        let (keys, values) = (SharedMut::new(&mut self.keys), SharedMut::new(&mut self.values));
        let work = qkv.rows() * 2 * kv_width * STORE_WORK;
        kernels.for_each_worth(2 * kv_heads, work, |task| {
            let (head, column) = (task % kv_heads, first_column + task * head_dim);
            for (row, block, slot) in places(spans, layout.block_tokens) {
                let from = &qkv.row(row)[column..][..head_dim];
                let index = index(layout, layer, block, head);
                if task < kv_heads {
                    let tile = index * key_len + slot / LANES * LANES * head_dim;
                    // SAFETY: the keys of one head, in whatever block, are those of this task alone.
                    let tile = unsafe { keys.slice(tile, LANES * head_dim) };
                    for (to, from) in tile[slot % LANES..].iter_mut().step_by(LANES).zip(from) {
                        *to = *from;
                    }
                } else {
                    // SAFETY: so are its values.
                    let to = unsafe { values.slice(index * value_len + slot * value_width, head_dim) };
                    to.copy_from_slice(from);
                }
            }
        });
    }
}

/// Every layer of every block, block by block.
fn each_layer(blocks: &[u32], layers: usize) -> impl Iterator<Item = (u32, usize)> + '_ {
    blocks.iter().flat_map(move |block| (0..layers).map(move |layer| (*block, layer)))
}

fn bytes_of(numbers: &[f32]) -> &[u8] {
    // SAFETY: every byte of a number is a byte, and they lie one behind another.
    unsafe { std::slice::from_raw_parts(numbers.as_ptr().cast(), size_of_val(numbers)) }
}

fn bytes_of_mut(numbers: &mut [f32]) -> &mut [u8] {
    // SAFETY: as above, and any four bytes are a number.
    unsafe { std::slice::from_raw_parts_mut(numbers.as_mut_ptr().cast(), size_of_val(numbers)) }
}

/// Where a head of a block stands among all of them.
fn index(layout: KvLayout, layer: usize, block: u32, head: usize) -> usize {
    (layer * layout.blocks + block as usize) * layout.kv_heads + head
}

/// Row, block and slot of every position that the spans compute.
fn places<'a>(spans: &'a [Span<'a>], block_tokens: usize) -> impl Iterator<Item = (usize, u32, usize)> + 'a {
    spans.iter().flat_map(move |span| {
        (0..span.rows).map(move |row| {
            let position = span.context_tokens + row;
            (span.first_row + row, span.blocks[position / block_tokens], position % block_tokens)
        })
    })
}

fn padded(head_dim: usize) -> usize {
    head_dim.next_multiple_of(LANES)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool() -> CpuKvPool {
        CpuKvPool::new(KvLayout { layers: 2, kv_heads: 1, head_dim: 8, block_tokens: 4, blocks: 3 }).unwrap()
    }

    #[test]
    fn blocks_go_to_another_pool_as_they_are() {
        let layout = KvLayout { layers: 2, kv_heads: 3, head_dim: 8, block_tokens: 4, blocks: 5 };
        let [mut from, mut to] = [0, 0].map(|_| CpuKvPool::new(layout).unwrap());
        for (numbers, first) in [(&mut from.keys, 1.0), (&mut from.values, 0.5)] {
            for (index, number) in numbers.iter_mut().enumerate() {
                *number = first + index as f32;
            }
        }
        let mut bytes = vec![0; 2 * CpuKvPool::block_bytes(layout)];
        from.read_blocks(&[4, 1], &mut bytes).unwrap();
        to.write_blocks(&[0, 3], &bytes).unwrap();
        for (layer, head) in [(0, 0), (0, 2), (1, 0), (1, 2)] {
            for (there, here) in [(4, 0), (1, 3)] {
                assert_eq!(from.keys(layer, there, head), to.keys(layer, here, head));
                assert_eq!(from.values(layer, there, head), to.values(layer, here, head));
            }
            assert!(to.keys(layer, 2, head).iter().all(|number| *number == 0.0), "the others are left alone");
        }
        let refused = [to.write_blocks(&[5], &bytes[..bytes.len() / 2]), to.write_blocks(&[1], &bytes)];
        assert!(refused.iter().all(|outcome| matches!(outcome, Err(KernelError::Shape { .. }))));
    }

    #[test]
    fn a_block_takes_what_the_pool_allocates_for_it() {
        let layout = pool().layout();
        let allocated = size_of_val::<[f32]>(&pool().keys) + size_of_val::<[f32]>(&pool().values);
        assert_eq!(allocated, CpuKvPool::block_bytes(layout) * layout.blocks);
    }
}
