//! The pool against a model that keeps everything in plain lists.

use proptest::prelude::*;

use super::*;

fn hashes(names: &[u64]) -> Vec<BlockHash> {
    names.iter().map(|name| BlockHash(*name)).collect()
}

/// Holds, fills and enters a path of blocks.
fn run(pool: &mut BlockPool, path: &[BlockHash]) -> Vec<BlockId> {
    let mut table = pool.find(path, path.len()).blocks;
    pool.hold_all(&table);
    for hash in &path[table.len()..] {
        let block = pool.allocate().unwrap();
        table.push(pool.enter(block, *hash));
    }
    table
}

#[test]
fn evicts_leaf_before_parent_and_the_longest_unused_first() {
    let mut pool = BlockPool::new(4);
    let old = run(&mut pool, &hashes(&[1, 2]));
    let new = run(&mut pool, &hashes(&[3, 4]));
    pool.release_all(&old);
    pool.release_all(&new);
    for gone in [2, 1, 4, 3] {
        assert!(pool.knows(BlockHash(gone)));
        pool.allocate().unwrap();
        assert!(!pool.knows(BlockHash(gone)));
    }
    assert_eq!(pool.allocate(), None);
}

#[test]
fn equal_contents_are_kept_once() {
    let mut pool = BlockPool::new(4);
    let (one, two) = (pool.allocate().unwrap(), pool.allocate().unwrap());
    assert_eq!(pool.enter(one, BlockHash(7)), one);
    assert_eq!(pool.enter(two, BlockHash(7)), one);
    assert_eq!((pool.references(one), pool.free_blocks()), (2, 3));
    pool.check_invariants();
}

#[test]
fn blocks_without_contents_are_taken_before_cached_ones() {
    let mut pool = BlockPool::new(2);
    let cached = run(&mut pool, &hashes(&[1]));
    let partial = pool.allocate().unwrap();
    pool.release_all(&cached);
    pool.release_all(&[partial]);
    assert_eq!(pool.allocate(), Some(partial));
    assert_eq!(pool.cached_blocks(), 1);
}

#[test]
fn flushing_forgets_what_nobody_holds() {
    let mut pool = BlockPool::new(4);
    pool.record_forgotten();
    let held = run(&mut pool, &hashes(&[1]));
    let released = run(&mut pool, &hashes(&[2, 3]));
    pool.release_all(&released);
    assert_eq!(pool.flush(), 2);
    assert_eq!(pool.take_forgotten(), hashes(&[3, 2]), "a child before its parent");
    assert_eq!((pool.knows(BlockHash(1)), pool.knows(BlockHash(2))), (true, false));
    pool.release_all(&held);
    pool.check_invariants();
}

#[test]
fn what_is_forgotten_is_kept_only_when_asked_for() {
    let mut pool = BlockPool::new(1);
    let table = run(&mut pool, &hashes(&[1]));
    pool.release_all(&table);
    pool.allocate().unwrap();
    assert_eq!(pool.take_forgotten(), []);
}

/// A path of at most five blocks over a small alphabet; its hashes name the whole path.
fn path(steps: &[u8]) -> Vec<BlockHash> {
    steps
        .iter()
        .scan(7u64, |state, step| {
            *state = *state * 31 + u64::from(*step) + 1;
            Some(BlockHash(*state))
        })
        .collect()
}

/// The pool as lists: whose tables there are, and what is kept that nobody holds, longest unused first.
#[derive(Default)]
struct Model {
    tables: Vec<Vec<BlockHash>>,
    unheld: Vec<BlockHash>,
    blocks: usize,
}

impl Model {
    fn held(&self) -> std::collections::HashSet<BlockHash> {
        self.tables.iter().flatten().copied().collect()
    }

    fn free(&self) -> usize {
        self.blocks - self.held().len()
    }

    fn knows(&self, hash: BlockHash) -> bool {
        self.held().contains(&hash) || self.unheld.contains(&hash)
    }

    /// Takes `path` if there is room; says what had to be forgotten for it.
    fn run(&mut self, path: &[BlockHash]) -> Option<Vec<BlockHash>> {
        let held = self.held();
        let taken = path.iter().filter(|hash| !held.contains(hash)).count();
        if taken > self.free() {
            return None;
        }
        let missing = path.iter().filter(|hash| !self.knows(**hash)).count();
        self.unheld.retain(|hash| !path.contains(hash));
        let empty = self.free() - taken + missing - self.unheld.len();
        let forgotten = self.unheld.drain(..missing.saturating_sub(empty)).collect();
        self.tables.push(path.to_vec());
        Some(forgotten)
    }

    fn release(&mut self, which: usize) {
        let path = self.tables.swap_remove(which);
        let held = self.held();
        self.unheld.extend(path.into_iter().rev().filter(|hash| !held.contains(hash)));
    }
}

proptest! {
    #[test]
    fn holds_finds_and_forgets_what_the_lists_say(
        operations in prop::collection::vec(
            (0u8..12, prop::collection::vec(0u8..3, 1..5), any::<prop::sample::Index>()), 0..80),
        blocks in 5usize..12,
    ) {
        let mut pool = BlockPool::new(blocks);
        pool.record_forgotten();
        let mut model = Model { blocks, ..Model::default() };
        let mut tables: Vec<Vec<BlockId>> = Vec::new();
        for (what, steps, which) in operations {
            let path = path(&steps);
            match what {
                0 => {
                    prop_assert_eq!(pool.flush(), model.unheld.len());
                    prop_assert_eq!(pool.take_forgotten(), std::mem::take(&mut model.unheld));
                }
                1..=6 => {
                    let found = pool.find(&path, path.len());
                    prop_assert_eq!(found.blocks.len(), path.iter().take_while(|hash| model.knows(**hash)).count());
                    if let Some(forgotten) = model.run(&path) {
                        tables.push(run(&mut pool, &path));
                        prop_assert_eq!(pool.take_forgotten(), forgotten);
                    } else {
                        prop_assert!(path.len() - found.blocks.len() + found.unheld > pool.free_blocks());
                    }
                }
                _ if tables.is_empty() => {}
                _ => {
                    let which = which.index(tables.len());
                    pool.release_all(&tables.swap_remove(which));
                    model.release(which);
                }
            }
            pool.check_invariants();
            prop_assert_eq!(pool.free_blocks(), model.free());
            prop_assert_eq!(pool.cached_blocks(), model.held().len() + model.unheld.len());
            for (table, path) in tables.iter().zip(&model.tables) {
                prop_assert_eq!(&pool.find(path, path.len()).blocks, table);
            }
            // Whatever can be found, so can its parent.
            let kept = |hash: &BlockHash| pool.knows(*hash);
            for all in [&[0u8, 0, 0, 0], &[1, 1, 1, 1], &[0, 1, 2, 0], &[2, 1, 0, 2]].map(|steps| self::path(steps)) {
                prop_assert_eq!(all.iter().take_while(|hash| kept(hash)).count(), all.iter().filter(|hash| kept(hash)).count());
            }
        }
    }
}
