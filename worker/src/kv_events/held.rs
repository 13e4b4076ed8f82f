//! What the cache holds, as its events tell it: the source of snapshots. At most as many blocks as the pool has.

use std::collections::HashMap;
use std::sync::Arc;

use roundhouse_types::{BlockHash, KvEvent, StoredBlocks, TokenId};

/// Longest run in a snapshot, so that none makes a message of its own too long.
const MAX_RUN_BLOCKS: usize = 1_024;

/// All blocks that can be found.
#[derive(Clone, Debug, Default)]
pub(super) struct HeldBlocks {
    blocks: HashMap<BlockHash, Held>,
}

#[derive(Clone, Debug)]
struct Held {
    parent: Option<BlockHash>,
    tokens: Arc<[TokenId]>,
    first_position: usize,
}

impl HeldBlocks {
    /// Takes in what happened.
    pub(super) fn apply(&mut self, event: &KvEvent) {
        match event {
            KvEvent::Stored(stored) => {
                let mut parent = stored.parent;
                let tokens = stored.tokens.chunks_exact(stored.block_tokens);
                for (at, (hash, tokens)) in stored.hashes.iter().zip(tokens).enumerate() {
                    let first_position = stored.first_position + at * stored.block_tokens;
                    self.blocks.insert(*hash, Held { parent, tokens: tokens.into(), first_position });
                    parent = Some(*hash);
                }
            }
            KvEvent::Removed { hashes } => {
                for hash in hashes {
                    self.blocks.remove(hash);
                }
            }
            KvEvent::Cleared => self.blocks.clear(),
            KvEvent::Routed(_) | KvEvent::Ended(_) => {}
        }
    }

    /// All of them, parents before children, in runs as long as nothing branches off.
    pub(super) fn into_runs(self) -> Vec<StoredBlocks> {
        let mut children: HashMap<Option<BlockHash>, Vec<BlockHash>> = HashMap::new();
        for (hash, held) in &self.blocks {
            // One whose parent is not there would be a mistake of the scheduler's; it is told all the same.
            let parent = held.parent.filter(|parent| self.blocks.contains_key(parent));
            children.entry(parent).or_default().push(*hash);
        }
        let mut runs = Vec::new();
        let mut begins = children.remove(&None).unwrap_or_default();
        while let Some(first) = begins.pop() {
            let mut run = vec![first];
            let mut last = first;
            loop {
                let mut next = children.remove(&Some(last)).unwrap_or_default();
                if next.len() != 1 || run.len() >= MAX_RUN_BLOCKS {
                    begins.append(&mut next);
                    break;
                }
                last = next[0];
                run.push(last);
            }
            runs.push(self.run(run));
        }
        runs
    }

    fn run(&self, hashes: Vec<BlockHash>) -> StoredBlocks {
        let first = &self.blocks[&hashes[0]];
        StoredBlocks {
            parent: first.parent,
            block_tokens: first.tokens.len(),
            request_id: None,
            first_position: first.first_position,
            tokens: hashes.iter().flat_map(|hash| self.blocks[hash].tokens.iter().copied()).collect(),
            hashes,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::*;

    const BLOCK_TOKENS: usize = 2;

    /// A block's hash says where it is: its parent's, and which child it is.
    fn stored(path: &[u64]) -> KvEvent {
        let hash = |depth: usize| path[..depth].iter().fold(1, |hash, step| hash * 10 + step);
        let last = path.len();
        KvEvent::Stored(StoredBlocks {
            hashes: vec![BlockHash(hash(last))],
            parent: (last > 1).then(|| BlockHash(hash(last - 1))),
            tokens: vec![path[last - 1] as u32; BLOCK_TOKENS],
            block_tokens: BLOCK_TOKENS,
            request_id: Some("r".into()),
            first_position: (last - 1) * BLOCK_TOKENS,
        })
    }

    proptest! {
        /// Paths are stored from their roots and leaves removed; whoever reads the runs in order knows the same blocks.
        #[test]
        fn snapshots_hold_what_was_stored_and_not_removed(
            paths in prop::collection::vec(prop::collection::vec(0..3u64, 1..6), 0..20),
            removals in prop::collection::vec(any::<prop::sample::Index>(), 0..10),
        ) {
            let mut held = HeldBlocks::default();
            let mut model: BTreeSet<Vec<u64>> = BTreeSet::new();
            for path in &paths {
                for depth in 1..=path.len() {
                    if model.insert(path[..depth].to_vec()) {
                        held.apply(&stored(&path[..depth]));
                    }
                }
            }
            for removal in removals {
                let is_leaf = |path: &&Vec<u64>| {
                    !model.iter().any(|other| other.len() > path.len() && other.starts_with(path.as_slice()))
                };
                let leaves: Vec<_> = model.iter().filter(is_leaf).cloned().collect();
                if leaves.is_empty() {
                    break;
                }
                let leaf = &leaves[removal.index(leaves.len())];
                model.remove(leaf);
                let KvEvent::Stored(blocks) = stored(leaf) else { unreachable!() };
                held.apply(&KvEvent::Removed { hashes: blocks.hashes });
            }
            let mut known = BTreeMap::new();
            for run in held.into_runs() {
                let mut parent = run.parent;
                prop_assert_eq!(run.tokens.len(), run.hashes.len() * BLOCK_TOKENS);
                for (at, hash) in run.hashes.iter().enumerate() {
                    prop_assert!(parent.is_none_or(|parent| known.contains_key(&parent)), "a child before its parent");
                    let tokens = run.tokens[at * BLOCK_TOKENS..][..BLOCK_TOKENS].to_vec();
                    let first = run.first_position + at * BLOCK_TOKENS;
                    prop_assert!(known.insert(*hash, (parent, tokens, first)).is_none(), "told twice");
                    parent = Some(*hash);
                }
            }
            let expected: BTreeMap<_, _> = model.iter().map(|path| {
                let KvEvent::Stored(blocks) = stored(path) else { unreachable!() };
                (blocks.hashes[0], (blocks.parent, blocks.tokens, blocks.first_position))
            }).collect();
            prop_assert_eq!(known, expected);
        }
    }

    #[test]
    fn long_runs_are_cut() {
        let mut held = HeldBlocks::default();
        let blocks = 2 * MAX_RUN_BLOCKS as u64 + 1;
        held.apply(&KvEvent::Stored(StoredBlocks {
            hashes: (0..blocks).map(BlockHash).collect(),
            parent: None,
            tokens: vec![7; blocks as usize],
            block_tokens: 1,
            request_id: None,
            first_position: 0,
        }));
        let lengths: Vec<_> = held.clone().into_runs().iter().map(|run| run.hashes.len()).collect();
        assert_eq!(lengths, [MAX_RUN_BLOCKS, MAX_RUN_BLOCKS, 1]);
        held.apply(&KvEvent::Cleared);
        assert!(held.into_runs().is_empty());
    }
}
