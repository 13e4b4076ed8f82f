//! Blocks, where each stands in the tree, and who holds it.

use hashbrown::HashTable;
use roundhouse_types::BlockHash;
use smallvec::SmallVec;

use super::NONE;
use crate::prefix::arena::Arena;
use crate::worker::WorkerSlot;

/// A worker and the number of its holding.
pub(super) type Holder = (WorkerSlot, u32);

/// In place of a worker: nobody yet.
const NOBODY: WorkerSlot = WorkerSlot(u32::MAX);
/// In place of a worker: there are several, in the list of that number.
const SEVERAL: WorkerSlot = WorkerSlot(u32::MAX - 1);

struct Node {
    hash: BlockHash,
    parent: u32,
    first_child: u32,
    next_sibling: u32,
    previous_sibling: u32,
    /// Most blocks have one holder, which then needs no memory of its own.
    holder: Holder,
}

/// Tables that the map consists of: each grows by itself, so that no insertion waits for all of them to be moved.
const TABLES: usize = 256;

/// All blocks, by their number and by their hash.
pub(super) struct Nodes {
    /// Hashes and numbers: a table is grown and searched without a look at the nodes, each of which may be a wait for memory.
    map: Vec<HashTable<(BlockHash, u32)>>,
    nodes: Arena<Node>,
    /// Holders of blocks that have several, sorted by worker.
    lists: Arena<SmallVec<[Holder; 4]>>,
    /// Nodes that are not in the map yet: see [`Nodes::index_made`].
    made: Vec<u32>,
    /// Nodes that nobody holds any more, which are still in the map: see [`Nodes::sweep`].
    dead: Vec<u32>,
}

impl Default for Nodes {
    fn default() -> Self {
        let map = (0..TABLES).map(|_| HashTable::new()).collect();
        Self { map, nodes: Arena::default(), lists: Arena::default(), made: Vec::new(), dead: Vec::new() }
    }
}

/// Which table a hash is in: by bits that the table itself does not go by, which takes the highest and the lowest.
fn table_of(hash: BlockHash) -> usize {
    usize::try_from(hash.0 >> 40 & (TABLES as u64 - 1)).expect("it is below the number of tables")
}

impl Nodes {
    pub(super) fn find(&self, hash: BlockHash) -> Option<u32> {
        // Block hashes are random already; hashing them again would be waste.
        self.map[table_of(hash)].find(hash.0, |(known, _)| *known == hash).map(|(_, node)| *node)
    }

    /// The node of `hash`, a block that comes right after that of `above`. Mostly it is the newest there, which lies beside `above`, while
    /// a place in the map is three waits for memory.
    pub(super) fn find_below(&self, above: u32, hash: BlockHash) -> Option<u32> {
        let found = match self.nodes[above].first_child {
            NONE => None,
            newest if self.nodes[newest].hash == hash => Some(newest),
            _ => self.find(hash),
        };
        debug_assert_eq!(found, self.find(hash));
        found
    }

    /// Makes the node of `hash`, of which there is none, below `parent`. It is found from the next [`Nodes::index_made`] on.
    pub(super) fn make(&mut self, hash: BlockHash, parent: u32) -> u32 {
        let node = self.nodes.place(Node {
            hash,
            parent: NONE,
            first_child: NONE,
            next_sibling: NONE,
            previous_sibling: NONE,
            holder: (NOBODY, NONE),
        });
        self.attach(node, parent);
        self.made.push(node);
        node
    }

    fn attach(&mut self, node: u32, parent: u32) {
        let next =
            if parent == NONE { NONE } else { std::mem::replace(&mut self.nodes[parent].first_child, node) };
        if next != NONE {
            self.nodes[next].previous_sibling = node;
        }
        let entry = &mut self.nodes[node];
        (entry.parent, entry.next_sibling, entry.previous_sibling) = (parent, next, NONE);
    }

    fn detach(&mut self, node: u32) {
        let Node { parent, next_sibling, previous_sibling, .. } = self.nodes[node];
        if previous_sibling != NONE {
            self.nodes[previous_sibling].next_sibling = next_sibling;
        } else if parent != NONE {
            self.nodes[parent].first_child = next_sibling;
        }
        if next_sibling != NONE {
            self.nodes[next_sibling].previous_sibling = previous_sibling;
        }
    }

    /// Makes `node` the node of the last of `below`, blocks that follow on its own one by one, and makes those of all that are above that,
    /// its former own first. They have no holders yet.
    pub(super) fn spread(&mut self, node: u32, below: &[BlockHash]) -> SmallVec<[u32; 32]> {
        let Node { hash: mut own, parent: mut above, .. } = self.nodes[node];
        if let Ok(entry) = self.map[table_of(own)].find_entry(own.0, |(_, at)| *at == node) {
            entry.remove();
        }
        self.detach(node);
        let mut new = SmallVec::new();
        for next in below {
            above = self.make(own, above);
            new.push(above);
            own = *next;
        }
        self.nodes[node].hash = own;
        self.attach(node, above);
        self.made.push(node);
        self.index_made();
        new
    }

    /// Enters what was made into the map; before anything is looked up again. Apart from all else that making does, for the reason
    /// that [`Nodes::sweep`] has.
    pub(super) fn index_made(&mut self) {
        for node in self.made.drain(..) {
            let hash = self.nodes[node].hash;
            self.map[table_of(hash)].insert_unique(hash.0, (hash, node), |(hash, _)| hash.0);
        }
    }

    pub(super) fn hash(&self, node: u32) -> BlockHash {
        self.nodes[node].hash
    }

    pub(super) fn parent(&self, node: u32) -> u32 {
        self.nodes[node].parent
    }

    pub(super) fn children(&self, node: u32) -> impl Iterator<Item = u32> + '_ {
        let some = |node: u32| (node != NONE).then_some(node);
        std::iter::successors(some(self.nodes[node].first_child), move |child| {
            some(self.nodes[*child].next_sibling)
        })
    }

    /// Who holds `node`, sorted by worker.
    pub(super) fn holders(&self, node: u32) -> &[Holder] {
        let holder = &self.nodes[node].holder;
        match *holder {
            (NOBODY, _) => &[],
            (SEVERAL, list) => &self.lists[list],
            _ => std::slice::from_ref(holder),
        }
    }

    /// Who holds the block of `hash`.
    pub(super) fn holders_of(&self, hash: BlockHash) -> &[Holder] {
        self.find(hash).map_or(&[], |node| self.holders(node))
    }

    /// What `worker` holds of `node`.
    pub(super) fn holding(&self, node: u32, worker: WorkerSlot) -> Option<u32> {
        let holders = self.holders(node);
        let at = holders.binary_search_by_key(&worker, |(slot, _)| *slot).ok()?;
        Some(holders[at].1)
    }

    /// The node of `hash` and what `worker` holds of it.
    pub(super) fn held_by(&self, hash: BlockHash, worker: WorkerSlot) -> Option<(u32, u32)> {
        let node = self.find(hash)?;
        Some((node, self.holding(node, worker)?))
    }

    /// `worker`, which did not hold `node`, holds it now under the number `holding`.
    pub(super) fn add_holder(&mut self, node: u32, worker: WorkerSlot, holding: u32) {
        let new = (worker, holding);
        match self.nodes[node].holder {
            (NOBODY, _) => self.nodes[node].holder = new,
            (SEVERAL, list) => {
                let list = &mut self.lists[list];
                let at = list.partition_point(|(slot, _)| *slot < worker);
                list.insert(at, new);
            }
            other => {
                let list = if other.0 < worker { [other, new] } else { [new, other] };
                self.nodes[node].holder = (SEVERAL, self.lists.place(SmallVec::from_slice(&list)));
            }
        }
    }

    /// `worker` does not hold `node` any more. The last of its holders takes it along; nothing may be below it then.
    pub(super) fn remove_holder(&mut self, node: u32, worker: WorkerSlot) {
        match self.nodes[node].holder {
            (SEVERAL, at) => {
                let list = &mut self.lists[at];
                list.retain(|(slot, _)| *slot != worker);
                if let [last] = list[..] {
                    *list = SmallVec::new();
                    self.lists.free(at);
                    self.nodes[node].holder = last;
                }
            }
            _ => self.remove(node),
        }
    }

    fn remove(&mut self, node: u32) {
        debug_assert_eq!(self.nodes[node].first_child, NONE, "who holds a block holds its parent");
        self.detach(node);
        self.dead.push(node);
    }

    /// Takes nodes that nobody holds out of the map; before anything is looked up again. Apart from all else that a removal does,
    /// since each place in a large map is a wait for memory, and in a loop this short they wait together.
    pub(super) fn sweep(&mut self) {
        for node in &self.dead {
            let hash = self.nodes[*node].hash;
            if let Ok(entry) = self.map[table_of(hash)].find_entry(hash.0, |(_, at)| at == node) {
                entry.remove();
            }
        }
        for node in self.dead.drain(..) {
            self.nodes.free(node);
        }
    }

    #[cfg(test)]
    pub(super) fn check(&self) -> usize {
        assert!(self.made.is_empty() && self.dead.is_empty());
        for (hash, node) in self.map.iter().flatten() {
            assert_eq!(self.nodes[*node].hash, *hash);
            let holders = self.holders(*node);
            assert!(!holders.is_empty());
            assert!(holders.is_sorted_by_key(|(worker, _)| *worker));
            let mut before = NONE;
            for child in self.children(*node) {
                assert_eq!((self.nodes[child].parent, self.nodes[child].previous_sibling), (*node, before));
                before = child;
            }
            let parent = self.nodes[*node].parent;
            assert!(parent == NONE || self.children(parent).any(|child| child == *node));
        }
        self.map.iter().flatten().map(|(_, node)| self.holders(*node).len()).sum()
    }
}
