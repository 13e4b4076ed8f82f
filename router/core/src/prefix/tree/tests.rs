//! The tree against a naive model: for each worker the list of its blocks in order of use.

use std::collections::HashMap;

use proptest::prelude::*;
use roundhouse_types::ChainHasher;

use super::*;
use crate::prefix::blocks::Cut;

impl PrefixTree {
    pub(crate) fn check_invariants(&self) {
        let mut held = 0;
        let mut children: HashMap<(u32, WorkerSlot), u32> = HashMap::new();
        for (_, holding) in self.holdings.iter() {
            *children.entry((self.nodes.parent(holding.node), holding.worker)).or_default() += 1;
        }
        let mut of_workers = vec![(0, 0); self.workers.len()];
        for (at, holding) in self.holdings.iter() {
            let below = children.get(&(holding.node, holding.worker)).copied().unwrap_or_default();
            assert_eq!(holding.children, below);
            assert!(below > 0 || holding.has_place(), "ends of paths are in the order of use");
            let parent = self.nodes.parent(holding.node);
            let closed = parent == NONE || self.nodes.holding(parent, holding.worker).is_some();
            assert!(closed, "closed under prefixes");
            let tail = self.tail(at);
            let alone = || self.nodes.holders(holding.node).len() == 1 && below == 0;
            assert!(tail.is_empty() || alone(), "nothing is below a tail, and nobody else there");
            let (blocks, weight) = self.weight(at);
            let (count, size) = &mut of_workers[holding.worker.index()];
            (*count, *size) = (*count + blocks, *size + weight);
        }
        for (index, list) in self.workers.iter().enumerate() {
            let (mut at, mut newer, mut age) = (list.newest, NONE, 0);
            while at != NONE {
                let holding = &self.holdings[at];
                assert_eq!((holding.worker.index(), holding.newer), (index, newer));
                if holding.children == 0 {
                    let older = self.clock.wrapping_sub(holding.used);
                    assert!(older >= age, "in order of use");
                    age = older;
                }
                (newer, at) = (at, holding.older);
            }
            assert_eq!(newer, list.oldest);
            let slot = WorkerSlot(u32::try_from(index).unwrap());
            assert_eq!(of_workers[index], (list.blocks, self.worker_size(slot)));
            held += list.blocks;
        }
        assert_eq!(held, self.held);
        assert_eq!(self.nodes.check(), self.holdings.iter().count());
        assert_eq!(
            self.tails.iter().count(),
            self.holdings.iter().filter(|(_, one)| one.tail != NONE).count()
        );
    }

    fn set_capacity(&mut self, worker: WorkerSlot, capacity: usize) {
        self.set_tells(worker, WorkerTells { capacity: Some(capacity as u64), blocks: names_blocks(worker) });
    }

    /// What keeps holdings besides what is below them.
    fn pins(&self) -> u32 {
        self.holdings.iter().map(|(_, holding)| holding.pins).sum()
    }
}

/// Some workers' events name any block.
fn names_blocks(worker: WorkerSlot) -> bool {
    worker.0 >= 3
}

/// One worker's blocks, most recently used last, each by the steps that lead to it.
#[derive(Default)]
struct Naive {
    blocks: Vec<Vec<u8>>,
    pins: Vec<Vec<u8>>,
    capacity: usize,
}

impl Naive {
    fn prefixes(steps: &[u8]) -> std::vec::IntoIter<Vec<u8>> {
        (1..=steps.len()).map(|depth| steps[..depth].to_vec()).collect::<Vec<_>>().into_iter()
    }

    fn holds(&self, block: &[u8]) -> bool {
        self.blocks.iter().any(|held| held == block)
    }

    fn depth(&self, steps: &[u8]) -> usize {
        Self::prefixes(steps).take_while(|block| self.holds(block)).count()
    }

    fn is_end(&self, block: &[u8]) -> bool {
        !self.blocks.iter().any(|other| other.len() > block.len() && other.starts_with(block))
    }

    fn is_tied(&self, block: &[u8]) -> bool {
        !self.is_end(block) || self.pins.iter().any(|pin| pin == block)
    }

    fn use_now(&mut self, steps: &[u8]) {
        self.blocks.retain(|block| !steps.starts_with(block));
        self.blocks.extend(Self::prefixes(steps).rev());
    }

    fn insert(&mut self, steps: &[u8]) -> usize {
        let known = self.depth(steps);
        self.use_now(steps);
        known
    }

    /// The path that was used longest ago loses its end; one that is pinned is in use, and goes to the front.
    fn evict_one(&mut self) -> bool {
        let ends = self.blocks.iter().filter(|block| self.is_end(block)).count();
        for _ in 0..ends {
            let oldest = self.blocks.iter().position(|block| self.is_end(block)).expect("a path has an end");
            let end = self.blocks[oldest].clone();
            if !self.is_tied(&end) {
                self.blocks.remove(oldest);
                return true;
            }
            self.use_now(&end);
        }
        false
    }

    fn evict(&mut self) {
        while self.blocks.len() > self.capacity && self.evict_one() {}
    }

    /// Takes what is not tied by a pin, of `block` and all below it.
    fn withdraw(&mut self, block: &[u8]) {
        let pins = std::mem::take(&mut self.pins);
        let is_kept =
            |held: &Vec<u8>| !held.starts_with(block) || pins.iter().any(|pin| pin.starts_with(held));
        self.blocks.retain(is_kept);
        self.pins = pins;
    }

    fn take_back(&mut self, steps: &[u8], keep: usize) {
        for block in Self::prefixes(steps).skip(keep).rev() {
            if self.holds(&block) {
                if self.is_tied(&block) {
                    return;
                }
                self.blocks.retain(|held| *held != block);
            }
        }
    }
}

/// Paths over a small alphabet, so that they share prefixes.
fn path(steps: &[u8]) -> Vec<BlockHash> {
    let mut chain = ChainHasher::new(9);
    steps.iter().map(|step| chain.push_bytes(&[*step])).collect()
}

/// A path of blocks of one token each.
fn of(hashes: &[BlockHash]) -> Path<'_> {
    Path::new(hashes, Cut::Tokens(1))
}

/// Enters a path of which nothing was looked up.
fn insert(tree: &mut PrefixTree, worker: WorkerSlot, path: Path<'_>) -> usize {
    let hits = tree.hits(path.hashes);
    tree.insert(worker, path, &hits).known
}

fn limits(total_blocks: usize) -> TreeLimits {
    TreeLimits { total_blocks, worker_blocks: total_blocks }
}

#[derive(Clone, Debug)]
enum Operation {
    Insert(u32, Vec<u8>),
    /// A request begins.
    Pin(u32, Vec<u8>),
    /// One of the requests in flight is over.
    Unpin(prop::sample::Index),
    Forget(u32),
    Clear(u32),
    TakeBack(u32, Vec<u8>),
    /// The worker says that it has lost the last of these, and it may not be a leaf.
    Withdraw(u32, Vec<u8>),
    Capacity(u32, usize),
    /// Another tree takes its place.
    Succeed,
}

fn steps() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(0u8..3, 0..7)
}

fn operation() -> impl Strategy<Value = Operation> {
    let worker = || 0u32..5;
    prop_oneof![
        6 => (worker(), steps()).prop_map(|(worker, steps)| Operation::Insert(worker, steps)),
        4 => (worker(), steps()).prop_map(|(worker, steps)| Operation::Pin(worker, steps)),
        4 => any::<prop::sample::Index>().prop_map(Operation::Unpin),
        1 => worker().prop_map(Operation::Forget),
        1 => worker().prop_map(Operation::Clear),
        2 => (worker(), steps()).prop_map(|(worker, steps)| Operation::TakeBack(worker, steps)),
        4 => (3u32..5, steps()).prop_map(|(worker, steps)| Operation::Withdraw(worker, steps)),
        1 => (worker(), 1usize..20).prop_map(|(worker, capacity)| Operation::Capacity(worker, capacity)),
        1 => Just(Operation::Succeed),
    ]
}

/// The tree, the model, and what is in flight in both.
struct Both {
    tree: PrefixTree,
    naive: Vec<Naive>,
    pins: Vec<(Option<Pin>, u32, Vec<u8>)>,
}

impl Both {
    fn new(capacity: usize) -> Self {
        let mut tree = PrefixTree::new(limits(10_000));
        let naive = (0..5).map(|_| Naive { capacity, ..Naive::default() }).collect();
        (0..5).for_each(|worker| tree.set_capacity(WorkerSlot(worker), capacity));
        Self { tree, naive, pins: Vec::new() }
    }

    fn apply(&mut self, operation: Operation) {
        match operation {
            Operation::Insert(worker, steps) => {
                let naive = &mut self.naive[worker as usize];
                let known = insert(&mut self.tree, WorkerSlot(worker), of(&path(&steps)));
                assert_eq!(known, naive.insert(&steps));
                naive.evict();
            }
            Operation::Pin(worker, steps) => {
                let naive = &mut self.naive[worker as usize];
                let hits = self.tree.hits(&path(&steps));
                let (inserted, pin) = self.tree.insert_pinned(WorkerSlot(worker), of(&path(&steps)), &hits);
                assert_eq!((inserted.known, pin.is_some()), (naive.insert(&steps), !steps.is_empty()));
                naive.pins.extend((!steps.is_empty()).then(|| steps.clone()));
                naive.evict();
                self.pins.push((pin, worker, steps));
            }
            Operation::Unpin(index) if !self.pins.is_empty() => self.unpin(index.index(self.pins.len())),
            Operation::Unpin(_) => {}
            Operation::Forget(worker) => {
                self.tree.forget(WorkerSlot(worker));
                let naive = &mut self.naive[worker as usize];
                (naive.blocks, naive.pins) = (Vec::new(), Vec::new());
                // Whoever is in flight there holds a pin that must not do anything any more.
                for (pin, of, _) in self.pins.extract_if(.., |(_, of, _)| *of == worker) {
                    assert_eq!(of, worker);
                    pin.into_iter().for_each(|pin| self.tree.unpin(pin));
                }
            }
            Operation::Clear(worker) => {
                self.tree.clear(WorkerSlot(worker));
                self.naive[worker as usize].withdraw(&[]);
            }
            Operation::TakeBack(worker, steps) => {
                let (slot, path) = (WorkerSlot(worker), path(&steps));
                let naive = &mut self.naive[worker as usize];
                let before = insert(&mut self.tree, slot, of(&path));
                naive.insert(&steps);
                naive.evict();
                self.tree.take_back(slot, &path, before);
                naive.take_back(&steps, before);
            }
            Operation::Withdraw(worker, steps) => {
                if let Some(last) = path(&steps).last() {
                    self.tree.withdraw(WorkerSlot(worker), *last);
                    self.naive[worker as usize].withdraw(&steps);
                }
            }
            Operation::Succeed => {
                while !self.pins.is_empty() {
                    self.unpin(0);
                }
                // A bound counts from the next insertion on, and what is put back is inserted.
                self.naive.iter_mut().for_each(Naive::evict);
                self.tree = self.successor();
            }
            Operation::Capacity(worker, capacity) => {
                self.tree.set_capacity(WorkerSlot(worker), capacity);
                self.naive[worker as usize].capacity = capacity;
            }
        }
    }

    /// One of the requests in flight is over.
    fn unpin(&mut self, at: usize) {
        let (pin, worker, steps) = self.pins.swap_remove(at);
        let naive = &mut self.naive[worker as usize];
        // One that was forgotten with its worker is none any more.
        if let Some(at) = naive.pins.iter().position(|pin| *pin == steps) {
            naive.pins.remove(at);
            naive.evict();
        }
        pin.into_iter().for_each(|pin| self.tree.unpin(pin));
    }

    /// Another tree that is given all that this one knows.
    fn successor(&self) -> PrefixTree {
        let mut kept = KeptBlocks::default();
        let slots = || (0..5).map(WorkerSlot);
        let ends: Vec<_> = slots().map(|slot| self.tree.keep(slot, &mut kept)).collect();
        let kept = KeptBlocks::of(kept.blocks().to_vec()).unwrap();
        let mut new = PrefixTree::new(limits(10_000));
        for (slot, naive) in slots().zip(&self.naive) {
            new.set_capacity(slot, naive.capacity);
        }
        for (slot, ends) in slots().zip(ends) {
            ends.iter().for_each(|end| new.put_back(slot, &kept, *end));
        }
        new
    }

    fn check(&self, asked: &[u8]) {
        self.tree.check_invariants();
        let hits = self.tree.hits(&path(asked));
        assert!(hits.iter().is_sorted_by(|(_, one), (_, two)| one >= two), "deepest first");
        for (worker, naive) in (0..).zip(&self.naive) {
            let slot = WorkerSlot(worker);
            assert_eq!(self.tree.worker_blocks(slot), naive.blocks.len());
            assert_eq!(hits.blocks(slot), naive.depth(asked));
            for block in &naive.blocks {
                assert_eq!(self.tree.hits(&path(block)).blocks(slot), block.len());
                let is_node = self.tree.nodes.held_by(*path(block).last().unwrap(), slot).is_some();
                assert!(is_node || !names_blocks(slot), "what may be named is found by its name");
            }
        }
        let pins: usize = self.naive.iter().map(|naive| naive.pins.len()).sum();
        assert_eq!(self.tree.pins() as usize, pins);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn agrees_with_the_naive_model(
        operations in prop::collection::vec(operation(), 0..60),
        capacity in 1usize..24,
        asked in steps(),
    ) {
        let mut both = Both::new(capacity);
        for operation in operations {
            both.apply(operation);
            both.check(&asked);
        }
        for (pin, ..) in both.pins {
            pin.into_iter().for_each(|pin| both.tree.unpin(pin));
        }
        both.tree.check_invariants();
        prop_assert_eq!(both.tree.pins(), 0);
        for worker in 0..5 {
            both.tree.forget(WorkerSlot(worker));
        }
        prop_assert_eq!(both.tree.held_blocks(), 0);
    }

    #[test]
    fn stays_within_the_common_bound(inserts in prop::collection::vec((0u32..5, steps()), 0..60), limit in 1usize..12) {
        let mut tree = PrefixTree::new(limits(limit));
        for (worker, steps) in inserts {
            insert(&mut tree, WorkerSlot(worker), of(&path(&steps)));
            tree.check_invariants();
            prop_assert!(tree.held_blocks() <= limit);
        }
    }
}

#[test]
fn evicts_leaf_before_parent_and_the_longest_unused_first() {
    let mut tree = PrefixTree::new(TreeLimits { total_blocks: 100, worker_blocks: 4 });
    let worker = WorkerSlot(0);
    insert(&mut tree, worker, of(&path(&[0, 1, 2])));
    insert(&mut tree, worker, of(&path(&[0, 2, 2])));
    assert_eq!(tree.hits(&path(&[0, 1, 2])).blocks(worker), 2, "the leaf of the older path went");
    assert_eq!(tree.hits(&path(&[0, 2, 2])).blocks(worker), 3);
}

#[test]
fn what_runs_is_not_evicted_for_what_comes_later() {
    let mut tree = PrefixTree::new(limits(100));
    let worker = WorkerSlot(0);
    tree.set_capacity(worker, 4);
    let (_, pin) = tree.insert_pinned(worker, of(&path(&[0, 0, 0])), &PrefixHits::default());
    for step in 1..3 {
        insert(&mut tree, worker, of(&path(&[step, 0, 0])));
        assert_eq!(tree.hits(&path(&[0, 0, 0])).blocks(worker), 3);
        assert_eq!(tree.worker_size(worker), 4);
    }
    tree.unpin(pin.unwrap());
    insert(&mut tree, worker, of(&path(&[1, 1, 1])));
    insert(&mut tree, worker, of(&path(&[2, 1, 1])));
    assert_eq!(tree.hits(&path(&[0, 0, 0])).blocks(worker), 0);
}

#[test]
fn capacity_is_in_the_unit_of_the_cut() {
    let mut tree = PrefixTree::new(limits(100));
    let worker = WorkerSlot(0);
    tree.set_capacity(worker, 1_000);
    let hashes = path(&[0; 40]);
    insert(&mut tree, worker, Path::new(&hashes, Cut::Bytes(Default::default())));
    assert_eq!((tree.worker_blocks(worker), tree.worker_size(worker)), (15, 960), "64 bytes each");
    insert(&mut tree, worker, Path::new(&path(&[1; 40]), Cut::Tokens(100)));
    assert_eq!((tree.worker_blocks(worker), tree.worker_size(worker)), (10, 1_000));
}

#[test]
fn a_prompt_longer_than_a_worker_keeps_its_beginning() {
    let mut tree = PrefixTree::new(TreeLimits { total_blocks: 100, worker_blocks: 2 });
    insert(&mut tree, WorkerSlot(3), of(&path(&[0, 1, 2, 0, 1])));
    assert_eq!(tree.hits(&path(&[0, 1, 2, 0, 1])).blocks(WorkerSlot(3)), 2);
}

#[test]
fn taking_back_leaves_what_another_request_built_upon() {
    let mut tree = PrefixTree::new(limits(100));
    let worker = WorkerSlot(0);
    let known = insert(&mut tree, worker, of(&path(&[0, 1])));
    insert(&mut tree, worker, of(&path(&[0, 1, 2])));
    tree.take_back(worker, &path(&[0, 1]), known);
    assert_eq!(tree.hits(&path(&[0, 1, 2])).blocks(worker), 3);
    tree.check_invariants();
}

#[test]
fn forgets_what_was_not_used_since_a_reading_of_its_clock() {
    let mut tree = PrefixTree::new(limits(100));
    insert(&mut tree, WorkerSlot(0), of(&path(&[0, 1, 2])));
    insert(&mut tree, WorkerSlot(1), of(&path(&[0, 1, 2])));
    let reading = tree.clock();
    insert(&mut tree, WorkerSlot(0), of(&path(&[0, 1])));
    tree.forget_unused_since(reading);
    let hits = tree.hits(&path(&[0, 1, 2]));
    assert_eq!((hits.blocks(WorkerSlot(0)), hits.blocks(WorkerSlot(1))), (2, 0));
    tree.check_invariants();
}

#[test]
fn ten_thousand_workers_hold_what_they_were_given_and_leave_one_by_one() {
    const WORKERS: u32 = 10_000;
    let mut tree = PrefixTree::new(limits(1_000_000));
    let whole = [0, 1, 2, 0, 1];
    let depth = |worker: u32| 1 + worker as usize % whole.len();
    for worker in 0..WORKERS {
        let slot = WorkerSlot(worker);
        insert(&mut tree, slot, of(&path(&whole[..depth(worker)])));
        insert(&mut tree, slot, of(&path(&[2, (worker % 251) as u8, (worker / 251) as u8])));
    }
    let blocks: usize = (0..WORKERS).map(|worker| depth(worker) + 3).sum();
    assert_eq!(tree.held_blocks(), blocks);
    tree.check_invariants();
    let hits = tree.hits(&path(&whole));
    assert_eq!(hits.iter().count(), WORKERS as usize);
    for (slot, blocks) in hits.iter() {
        assert_eq!(blocks, depth(slot.0));
    }
    let own = tree.hits(&path(&[2, (7_777 % 251) as u8, (7_777 / 251) as u8]));
    assert_eq!(own.blocks(WorkerSlot(7_777)), 3, "its own prompt, of which others share the first block");
    assert_eq!(own.blocks(WorkerSlot(7_778)), 1);
    for worker in (0..WORKERS).filter(|worker| worker % 3 == 0) {
        tree.forget(WorkerSlot(worker));
    }
    tree.check_invariants();
    let left = tree.hits(&path(&whole));
    assert!(left.iter().all(|(slot, blocks)| slot.0 % 3 != 0 && blocks == depth(slot.0)));
    assert_eq!(left.iter().count(), (0..WORKERS).filter(|worker| worker % 3 != 0).count());
}

#[test]
fn a_large_tree_stays_closed_and_keeps_what_is_used_all_the_time() {
    let mut tree = PrefixTree::new(limits(3_000));
    let worker = WorkerSlot(0);
    let mut chain = ChainHasher::new(7);
    let hot: Vec<BlockHash> = (0..20u8).map(|step| chain.push_bytes(&[step])).collect();
    for number in 0..4_000u32 {
        let mut chain = chain;
        let own = (0..5u32).map(|step| chain.push_bytes(&(number * 8 + step).to_le_bytes()));
        let whole: Vec<BlockHash> = hot.iter().copied().chain(own).collect();
        assert_eq!(insert(&mut tree, worker, of(&whole)), if number == 0 { 0 } else { hot.len() });
    }
    assert_eq!(tree.worker_blocks(worker), 3_000);
    tree.check_invariants();
}

#[test]
fn what_no_other_prompt_shares_costs_one_node_until_somebody_comes_back_to_it() {
    let mut tree = PrefixTree::new(limits(1_000));
    let (one, other) = (WorkerSlot(0), WorkerSlot(1));
    let whole: Vec<u8> = (0..10).collect();
    insert(&mut tree, one, of(&path(&whole[..6])));
    assert_eq!((tree.holdings.iter().count(), tree.held_blocks()), (1, 6));
    assert_eq!(insert(&mut tree, one, of(&path(&whole[..6]))), 6, "the same again");
    assert_eq!(insert(&mut tree, one, of(&path(&whole))), 6, "and its next turn");
    assert_eq!((tree.holdings.iter().count(), tree.held_blocks()), (1, 10));
    assert_eq!(tree.hits(&path(&whole[..8])).blocks(one), 8);
    assert_eq!(insert(&mut tree, other, of(&path(&whole[..3]))), 0);
    assert_eq!((tree.holdings.iter().count(), tree.held_blocks()), (13, 13), "spread out, all of it");
    tree.check_invariants();
}

#[test]
fn what_goes_on_below_a_pin_can_be_evicted_without_what_is_pinned() {
    let mut tree = PrefixTree::new(limits(1_000));
    let worker = WorkerSlot(0);
    let (_, pin) = tree.insert_pinned(worker, of(&path(&[0, 1, 2])), &PrefixHits::default());
    insert(&mut tree, worker, of(&path(&[0, 1, 2, 0, 1])));
    tree.set_capacity(worker, 3);
    insert(&mut tree, worker, of(&path(&[1])));
    assert_eq!(tree.hits(&path(&[0, 1, 2, 0, 1])).blocks(worker), 3);
    tree.unpin(pin.unwrap());
    tree.check_invariants();
}
