//! The tree against a naive model: for each worker the list of its blocks in order of use.

use proptest::prelude::*;
use roundhouse_types::ChainHasher;

use super::*;

impl PrefixTree {
    fn check_invariants(&self) {
        let mut held = 0;
        for (index, list) in self.workers.iter().enumerate() {
            let mut at = list.newest;
            let mut count = 0;
            let mut newer = NONE;
            while at != NONE {
                let holding = &self.holdings[at];
                assert_eq!(holding.worker.index(), index);
                assert_eq!(holding.newer, newer);
                self.check_parent(holding);
                (newer, at) = (at, holding.older);
                count += 1;
            }
            assert_eq!((count, newer), (list.blocks, list.oldest));
            held += count;
        }
        assert_eq!(held, self.held);
        assert!(held <= self.limits.total_blocks);
        let by_node: usize = self.map.iter().map(|node| self.nodes[*node].holders.len()).sum();
        assert_eq!(by_node, held);
        for node in self.map.iter().map(|node| &self.nodes[*node]) {
            assert!(!node.holders.is_empty());
            assert!(node.holders.is_sorted_by_key(|(worker, _)| *worker));
        }
    }

    fn check_parent(&self, holding: &Holding) {
        let children = self
            .holdings
            .iter()
            .filter(|(_, other)| {
                other.worker == holding.worker && self.nodes[other.node].parent == holding.node
            })
            .count();
        assert_eq!(children, holding.children as usize);
        let parent = self.nodes[holding.node].parent;
        if parent != NONE {
            let holders = &self.nodes[parent].holders;
            assert!(holders.iter().any(|(worker, _)| *worker == holding.worker), "closed under prefixes");
        }
    }
}

/// Most recently used last.
#[derive(Default)]
struct Model(Vec<Vec<BlockHash>>);

impl Model {
    fn of(&mut self, worker: WorkerSlot) -> &mut Vec<BlockHash> {
        if self.0.len() <= worker.index() {
            self.0.resize(worker.index() + 1, Vec::new());
        }
        &mut self.0[worker.index()]
    }

    fn insert(&mut self, worker: WorkerSlot, path: &[BlockHash], limit: usize) -> usize {
        let path = &path[..path.len().min(limit)];
        let blocks = self.of(worker);
        let known = path.iter().filter(|hash| blocks.contains(hash)).count();
        blocks.retain(|hash| !path.contains(hash));
        blocks.extend(path.iter().rev());
        let over = blocks.len().saturating_sub(limit);
        blocks.drain(..over);
        known
    }

    fn depth(&self, worker: usize, path: &[BlockHash]) -> usize {
        path.iter().take_while(|hash| self.0[worker].contains(hash)).count()
    }
}

/// Paths over a small alphabet, so that they share prefixes.
fn path(steps: &[u8]) -> Vec<BlockHash> {
    let mut chain = ChainHasher::new(9);
    steps.iter().map(|step| chain.push_bytes(&[*step])).collect()
}

#[derive(Clone, Debug)]
enum Operation {
    Insert(u32, Vec<u8>),
    Forget(u32),
    TakeBack(u32, Vec<u8>),
}

fn steps() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(0u8..3, 0..7)
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        8 => (0u32..5, steps()).prop_map(|(worker, steps)| Operation::Insert(worker, steps)),
        1 => (0u32..5).prop_map(Operation::Forget),
        2 => (0u32..5, steps()).prop_map(|(worker, steps)| Operation::TakeBack(worker, steps)),
    ]
}

proptest! {
    #[test]
    fn agrees_with_the_naive_model(operations in prop::collection::vec(operation(), 0..60), limit in 1usize..24) {
        let mut tree = PrefixTree::new(TreeLimits { total_blocks: 10_000, worker_blocks: limit });
        let mut model = Model::default();
        for operation in operations {
            match operation {
                Operation::Insert(worker, steps) => {
                    let path = path(&steps);
                    let worker = WorkerSlot(worker);
                    prop_assert_eq!(tree.insert(worker, &path), model.insert(worker, &path, limit));
                }
                Operation::Forget(worker) => {
                    tree.forget(WorkerSlot(worker));
                    model.of(WorkerSlot(worker)).clear();
                }
                Operation::TakeBack(worker, steps) => {
                    let (worker, path) = (WorkerSlot(worker), path(&steps));
                    let before = tree.insert(worker, &path);
                    model.insert(worker, &path, limit);
                    // Whatever eviction did meanwhile, taking back must leave a closed tree.
                    tree.take_back(worker, &path, before);
                    let hits = tree.hits(&path).blocks(worker);
                    model.of(worker).retain(|hash| !path[hits.min(path.len())..].contains(hash));
                }
            }
            tree.check_invariants();
            for worker in 0..model.0.len() {
                let slot = WorkerSlot(u32::try_from(worker).unwrap());
                prop_assert_eq!(tree.worker_blocks(slot), model.0[worker].len());
            }
        }
    }

    #[test]
    fn finds_the_depth_of_every_worker(
        inserts in prop::collection::vec((0u32..12, steps()), 0..40),
        asked in steps(),
    ) {
        let mut tree = PrefixTree::new(TreeLimits { total_blocks: 10_000, worker_blocks: 20 });
        let mut model = Model::default();
        for (worker, steps) in inserts {
            tree.insert(WorkerSlot(worker), &path(&steps));
            model.insert(WorkerSlot(worker), &path(&steps), 20);
        }
        let hits = tree.hits(&path(&asked));
        prop_assert!(hits.iter().is_sorted_by(|(_, one), (_, two)| one >= two), "deepest first");
        for worker in 0..model.0.len() {
            let slot = WorkerSlot(u32::try_from(worker).unwrap());
            prop_assert_eq!(hits.blocks(slot), model.depth(worker, &path(&asked)));
        }
    }

    #[test]
    fn stays_within_the_common_bound(inserts in prop::collection::vec((0u32..5, steps()), 0..60), limit in 1usize..12) {
        let mut tree = PrefixTree::new(TreeLimits { total_blocks: limit, worker_blocks: limit });
        for (worker, steps) in inserts {
            tree.insert(WorkerSlot(worker), &path(&steps));
            tree.check_invariants();
        }
    }
}

#[test]
fn evicts_leaf_before_parent_and_the_longest_unused_first() {
    let mut tree = PrefixTree::new(TreeLimits { total_blocks: 100, worker_blocks: 4 });
    let worker = WorkerSlot(0);
    tree.insert(worker, &path(&[0, 1, 2]));
    tree.insert(worker, &path(&[0, 2, 2]));
    assert_eq!(tree.hits(&path(&[0, 1, 2])).blocks(worker), 2, "the leaf of the older path went");
    assert_eq!(tree.hits(&path(&[0, 2, 2])).blocks(worker), 3);
}

#[test]
fn a_prompt_longer_than_a_worker_keeps_its_beginning() {
    let mut tree = PrefixTree::new(TreeLimits { total_blocks: 100, worker_blocks: 2 });
    tree.insert(WorkerSlot(3), &path(&[0, 1, 2, 0, 1]));
    assert_eq!(tree.hits(&path(&[0, 1, 2, 0, 1])).blocks(WorkerSlot(3)), 2);
}

#[test]
fn taking_back_leaves_what_another_request_built_upon() {
    let mut tree = PrefixTree::new(TreeLimits { total_blocks: 100, worker_blocks: 100 });
    let worker = WorkerSlot(0);
    let known = tree.insert(worker, &path(&[0, 1]));
    tree.insert(worker, &path(&[0, 1, 2]));
    tree.take_back(worker, &path(&[0, 1]), known);
    assert_eq!(tree.hits(&path(&[0, 1, 2])).blocks(worker), 3);
    tree.check_invariants();
}

#[test]
fn forgets_what_was_not_used_since_a_reading_of_its_clock() {
    let mut tree = PrefixTree::new(TreeLimits { total_blocks: 100, worker_blocks: 100 });
    tree.insert(WorkerSlot(0), &path(&[0, 1, 2]));
    tree.insert(WorkerSlot(1), &path(&[0, 1, 2]));
    let reading = tree.clock();
    tree.insert(WorkerSlot(0), &path(&[0, 1]));
    tree.forget_unused_since(reading);
    let hits = tree.hits(&path(&[0, 1, 2]));
    assert_eq!((hits.blocks(WorkerSlot(0)), hits.blocks(WorkerSlot(1))), (2, 0));
    tree.check_invariants();
}

#[test]
fn ten_thousand_workers_may_hold_one_prefix() {
    let mut tree = PrefixTree::new(TreeLimits { total_blocks: 1_000_000, worker_blocks: 100 });
    for worker in 0..10_000 {
        tree.insert(WorkerSlot(worker), &path(&[0, 1, 2][..1 + worker as usize % 3]));
    }
    let hits = tree.hits(&path(&[0, 1, 2]));
    assert_eq!(hits.iter().count(), 10_000);
    assert_eq!(hits.blocks(WorkerSlot(7)), 2);
    tree.forget(WorkerSlot(7));
    assert_eq!(tree.hits(&path(&[0, 1, 2])).blocks(WorkerSlot(7)), 0);
}

#[test]
fn a_large_tree_stays_closed_and_keeps_what_is_used_all_the_time() {
    let mut tree = PrefixTree::new(TreeLimits { total_blocks: 3_000, worker_blocks: 3_000 });
    let worker = WorkerSlot(0);
    let mut chain = ChainHasher::new(7);
    let hot: Vec<BlockHash> = (0..20u8).map(|step| chain.push_bytes(&[step])).collect();
    for number in 0..4_000u32 {
        let mut chain = chain;
        let own = (0..5u32).map(|step| chain.push_bytes(&(number * 8 + step).to_le_bytes()));
        let whole: Vec<BlockHash> = hot.iter().copied().chain(own).collect();
        assert_eq!(tree.insert(worker, &whole), if number == 0 { 0 } else { hot.len() });
    }
    assert_eq!(tree.worker_blocks(worker), 3_000, "some two insertions are a moment here");
    tree.check_invariants();
}
