//! A sequence's blocks, in order of position: where the KV of each of its tokens is.
//!
//! Shared between scheduler and batch without copying: a step refers to the table as it was when the step was made, and a change
//! copies only while such a step is still around. Knows neither pool nor tokens. Next: [`step`](crate::step).

use std::ops::Deref;
use std::sync::Arc;

use crate::step::BlockId;

/// Blocks in order: `table[i]` holds positions `i * block_tokens..(i + 1) * block_tokens`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct BlockTable(Arc<Vec<BlockId>>);

impl BlockTable {
    /// Adds a block behind the last.
    pub fn push(&mut self, block: BlockId) {
        Arc::make_mut(&mut self.0).push(block);
    }

    /// Puts `block` in the place of the one at `index`.
    ///
    /// # Panics
    /// When there is none.
    pub fn replace(&mut self, index: usize, block: BlockId) {
        // Mostly it is the same block, and nothing has to be copied.
        if self.0[index] != block {
            Arc::make_mut(&mut self.0)[index] = block;
        }
    }

    /// Takes everything out.
    #[must_use]
    pub fn take(&mut self) -> Self {
        std::mem::take(self)
    }
}

impl Deref for BlockTable {
    type Target = [BlockId];

    fn deref(&self) -> &[BlockId] {
        &self.0
    }
}

impl From<Vec<BlockId>> for BlockTable {
    fn from(blocks: Vec<BlockId>) -> Self {
        Self(Arc::new(blocks))
    }
}

impl FromIterator<BlockId> for BlockTable {
    fn from_iter<I: IntoIterator<Item = BlockId>>(blocks: I) -> Self {
        Self(Arc::new(blocks.into_iter().collect()))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The model: plain vectors, copied whenever a step takes one.
        #[test]
        fn a_step_keeps_the_table_it_was_given(
            operations in prop::collection::vec((0u8..4, any::<prop::sample::Index>(), 0u32..50), 0..60),
        ) {
            let (mut table, mut model) = (BlockTable::default(), Vec::new());
            let mut taken: Vec<(BlockTable, Vec<BlockId>)> = Vec::new();
            for (what, index, block) in operations {
                match what {
                    0 => {
                        table.push(BlockId(block));
                        model.push(BlockId(block));
                    }
                    1 if !model.is_empty() => {
                        let index = index.index(model.len());
                        table.replace(index, BlockId(block));
                        model[index] = BlockId(block);
                    }
                    2 => taken.push((table.clone(), model.clone())),
                    _ => drop(taken.pop()),
                }
                prop_assert_eq!(&table[..], &model[..]);
                prop_assert!(taken.iter().all(|(table, model)| table[..] == model[..]));
            }
        }
    }

    #[test]
    fn nothing_is_copied_for_the_same_block() {
        let mut table: BlockTable = [BlockId(1), BlockId(2)].into_iter().collect();
        let step = table.clone();
        table.replace(1, BlockId(2));
        assert!(Arc::ptr_eq(&table.0, &step.0));
        table.replace(1, BlockId(3));
        assert_eq!((table[1], step[1]), (BlockId(3), BlockId(2)));
    }
}
