//! Events of a worker whose tokens are two bytes each, in blocks of four tokens, against byte blocks of 64.

use proptest::prelude::*;
use roundhouse_types::{ChainHasher, StoredBlocks};

use super::*;
use crate::prefix::Path;
use crate::prefix::blocks::{PromptBlocks, PromptHasher};
use crate::prefix::tree::{PrefixTree, TreeLimits, WorkerTells};
use crate::request::PromptUse;
use crate::worker::WorkerSlot;

const BLOCK_TOKENS: usize = 4;
const TOKEN_BYTES: usize = 2;
const BLOCK_BYTES: usize = BLOCK_TOKENS * TOKEN_BYTES;
const WORKER: WorkerSlot = WorkerSlot(0);

/// The blocks of a prompt, as the router cuts it.
fn cut(prompt: &[u8]) -> PromptBlocks {
    let mut hasher = PromptHasher::new(ChainHasher::new(1), PromptUse::Whole);
    hasher.push(prompt);
    hasher.finish(ChainHasher::new(2))
}

fn followed(prompt: &[u8]) -> FollowedPath {
    let blocks = cut(prompt);
    FollowedPath {
        hashes: blocks.hashes.into(),
        cut: Cut::Bytes(blocks.opening),
        size: prompt.len(),
        // Off by half, until the worker counts.
        tokens: prompt.len() / TOKEN_BYTES * 3 / 2,
    }
}

const LISTENER: Listener = Listener { router: 7, seed_digest: Some(99) };

/// What the router of that number says of a prompt that it sends.
fn told(prompt: &[u8], id: &str, router: u64) -> KvEvent {
    let FollowedPath { hashes, size, tokens, .. } = followed(prompt);
    KvEvent::Routed(RoutedPrompt {
        request_id: id.into(),
        router,
        seed_digest: 99,
        hashes: hashes.to_vec(),
        tools_blocks: 0,
        tools_bytes: 0,
        system_blocks: 0,
        system_bytes: 0,
        prompt_bytes: size,
        prompt_tokens: tokens,
    })
}

/// The worker's hashes of the prompt's full blocks.
fn token_hashes(prompt: &[u8]) -> Vec<BlockHash> {
    let mut chain = ChainHasher::new(77);
    prompt.chunks_exact(BLOCK_BYTES).map(|block| chain.push_bytes(block)).collect()
}

/// A worker's cache: what is in it, and what it tells of that.
#[derive(Default)]
struct Engine {
    /// Prefixes of prompts in whole blocks.
    cache: std::collections::BTreeSet<Vec<u8>>,
    next: u64,
}

impl Engine {
    fn batch(&mut self, events: Vec<KvEvent>) -> FeedBatch {
        self.next += 1;
        let batch = KvEventBatch { sequence: self.next - 1, timestamp: 0.0, events };
        FeedBatch { batch, snapshot: None, instance: None }
    }

    fn stored(prompt: &[u8], blocks: std::ops::Range<usize>, request: Option<&str>) -> KvEvent {
        let hashes = token_hashes(prompt);
        KvEvent::Stored(StoredBlocks {
            parent: blocks.start.checked_sub(1).map(|before| hashes[before]),
            tokens: vec![0; blocks.len() * BLOCK_TOKENS],
            block_tokens: BLOCK_TOKENS,
            request_id: request.map(Arc::from),
            first_position: blocks.start * BLOCK_TOKENS,
            hashes: hashes[blocks].to_vec(),
        })
    }

    /// Computes a prompt: what of it is cached, and the events of the rest.
    fn compute(&mut self, prompt: &[u8], request: &str) -> (usize, Option<FeedBatch>) {
        let blocks = prompt.len() / BLOCK_BYTES;
        let prefix = |count: usize| prompt[..count * BLOCK_BYTES].to_vec();
        let cached = (1..=blocks).take_while(|count| self.cache.contains(&prefix(*count))).count();
        self.cache.extend((1..=blocks).map(prefix));
        let told = (cached < blocks).then(|| Self::stored(prompt, cached..blocks, Some(request)));
        (cached * BLOCK_TOKENS, told.map(|event| self.batch(vec![event])))
    }

    /// Loses a block and all below it, the last first.
    fn evict(&mut self, prefix: &[u8]) -> FeedBatch {
        let gone: Vec<_> = self.cache.iter().filter(|held| held.starts_with(prefix)).cloned().collect();
        let hashes = gone.iter().rev().map(|held| *token_hashes(held).last().unwrap()).collect();
        self.cache.retain(|held| !held.starts_with(prefix));
        self.batch(vec![KvEvent::Removed { hashes }])
    }

    fn snapshot(&self, instance: u64) -> Vec<FeedBatch> {
        let told = |held: &Vec<u8>| {
            let blocks = held.len() / BLOCK_BYTES;
            Self::stored(held, blocks - 1..blocks, None)
        };
        let events: Vec<_> = self.cache.iter().map(told).collect();
        let middle = events.len() / 2;
        let parts = [(&events[..middle], true), (&events[middle..], false)];
        let part = |(events, first): (&[KvEvent], bool)| FeedBatch {
            batch: KvEventBatch { sequence: self.next, timestamp: 0.0, events: events.to_vec() },
            snapshot: Some(SnapshotPart { first, last: !first }),
            instance: Some(instance),
        };
        parts.into_iter().map(part).collect()
    }

    /// Byte blocks of the prompt whose last byte is in the cache.
    fn held(&self, prompt: &[u8]) -> usize {
        let is_held = |end: usize| {
            let tokens = end.div_ceil(BLOCK_BYTES) * BLOCK_BYTES;
            tokens <= prompt.len() && self.cache.contains(&prompt[..tokens])
        };
        (1..=cut(prompt).hashes.len())
            .take_while(|count| is_held(super::super::blocks::covered_bytes(*count)))
            .count()
    }
}

/// A router's feed and tree, and the worker that they follow.
struct Followed {
    engine: Engine,
    feed: CacheFeed,
    tree: PrefixTree,
    now: Duration,
}

impl Followed {
    fn new() -> Self {
        let mut tree = PrefixTree::new(TreeLimits { total_blocks: 100_000, worker_blocks: 100_000 });
        tree.set_tells(WORKER, WorkerTells { capacity: None, blocks: true });
        let mut new =
            Self { engine: Engine::default(), feed: CacheFeed::new(LISTENER), tree, now: Duration::ZERO };
        new.take_snapshot(5);
        new
    }

    /// One of an engine that has no snapshots, and whose events come from here on.
    fn of_engine(engine: Engine) -> Self {
        let mut new = Self { engine, feed: CacheFeed::of_engine(), ..Self::new() };
        new.feed.join(new.engine.next);
        new
    }

    /// A request that no router of ours has sent.
    fn serve_strangers(&mut self, prompt: &[u8]) {
        let batch = self.engine.compute(prompt, "nobody's").1;
        batch.into_iter().for_each(|batch| self.take(batch));
    }

    fn take(&mut self, batch: FeedBatch) {
        let changes = self.feed.take(batch).unwrap();
        self.apply(changes);
    }

    fn take_snapshot(&mut self, instance: u64) {
        for part in self.engine.snapshot(instance) {
            self.take(part);
        }
        assert_eq!(self.feed.trust(), CacheTrust::Exact);
    }

    fn apply(&mut self, changes: Vec<CacheChange>) {
        for change in changes {
            match change {
                CacheChange::Routed { path, cut } => {
                    let hits = self.tree.hits(&path);
                    self.tree.insert(WORKER, Path::new(&path, cut), &hits);
                }
                CacheChange::Gone(blocks) => blocks.iter().for_each(|hash| self.tree.withdraw(WORKER, *hash)),
                CacheChange::Settled { path, held } => self.tree.take_back(WORKER, &path, held),
                CacheChange::Cleared => self.tree.clear(WORKER),
                CacheChange::Restarted => self.tree.forget(WORKER),
            }
        }
    }

    /// A request goes there; computed at once, over at once.
    fn serve(&mut self, prompt: &[u8], id: &str) {
        self.dispatch(prompt, id);
        let (cached_tokens, batch) = self.engine.compute(prompt, id);
        batch.into_iter().for_each(|batch| self.take(batch));
        self.end(prompt, id, Some(cached_tokens));
    }

    /// Another router, which hashes alike, sends one there.
    fn serve_elsewhere(&mut self, prompt: &[u8], id: &str) {
        let routed = self.engine.batch(vec![told(prompt, id, 8)]);
        self.take(routed);
        let (cached_tokens, batch) = self.engine.compute(prompt, id);
        batch.into_iter().for_each(|batch| self.take(batch));
        let ended = self.engine.batch(vec![KvEvent::Ended(EndedRequest {
            request_id: id.into(),
            router: 8,
            prompt_tokens: prompt.len() / TOKEN_BYTES,
            cached_tokens: Some(cached_tokens),
        })]);
        self.take(ended);
        for _ in 0..2 {
            let changes = self.feed.settle(self.now);
            self.apply(changes);
            self.now += SETTLING_TIME;
        }
    }

    fn dispatch(&mut self, prompt: &[u8], id: &str) {
        let path = followed(prompt);
        let hits = self.tree.hits(&path.hashes);
        self.tree.insert(WORKER, Path::new(&path.hashes, path.cut), &hits);
        self.feed.dispatched(id.into(), path);
    }

    fn end(&mut self, prompt: &[u8], id: &str, cached_tokens: Option<usize>) {
        let usage = PromptUsage { prompt_tokens: prompt.len() / TOKEN_BYTES, cached_tokens };
        self.feed.ended(id, Some(usage), self.now);
        self.now += SETTLING_TIME;
        let changes = self.feed.settle(self.now);
        self.apply(changes);
    }

    fn depth(&self, prompt: &[u8]) -> usize {
        self.tree.hits(&cut(prompt).hashes).blocks(WORKER)
    }
}

/// A prompt of parts of 200 bytes, which are no multiple of either block.
fn prompt(parts: &[u8]) -> Vec<u8> {
    parts.iter().flat_map(|part| vec![b'a' + part; 200]).collect()
}

fn parts() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(0u8..3, 1..5)
}

#[derive(Clone, Debug)]
enum Operation {
    Serve(Vec<u8>),
    ServeElsewhere(Vec<u8>),
    Evict(Vec<u8>, prop::sample::Index),
    /// The stream breaks, and a snapshot comes.
    Snapshot,
    Clear,
    Restart,
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        5 => parts().prop_map(Operation::Serve),
        4 => parts().prop_map(Operation::ServeElsewhere),
        4 => (parts(), any::<prop::sample::Index>()).prop_map(|(parts, at)| Operation::Evict(parts, at)),
        2 => Just(Operation::Snapshot),
        1 => Just(Operation::Clear),
        1 => Just(Operation::Restart),
    ]
}

proptest! {
    /// Whatever happens to the cache, the tree knows of each prompt that went there as much as is cached.
    #[test]
    fn the_tree_knows_what_the_cache_holds(operations in prop::collection::vec(operation(), 0..40)) {
        let mut all = Followed::new();
        let mut instance = 5;
        let mut served: Vec<Vec<u8>> = Vec::new();
        for (number, operation) in operations.into_iter().enumerate() {
            match operation {
                Operation::Serve(parts) => {
                    served.push(prompt(&parts));
                    all.serve(&prompt(&parts), &number.to_string());
                }
                Operation::ServeElsewhere(parts) => {
                    served.push(prompt(&parts));
                    all.serve_elsewhere(&prompt(&parts), &number.to_string());
                }
                Operation::Evict(parts, at) => {
                    let blocks = prompt(&parts).len() / BLOCK_BYTES;
                    let block = (1 + at.index(blocks)) * BLOCK_BYTES;
                    let batch = all.engine.evict(&prompt(&parts)[..block]);
                    all.take(batch);
                }
                Operation::Snapshot => all.take_snapshot(instance),
                Operation::Clear => {
                    all.engine.cache.clear();
                    let batch = all.engine.batch(vec![KvEvent::Cleared]);
                    all.take(batch);
                }
                Operation::Restart => {
                    instance += 1;
                    all.engine = Engine::default();
                    all.take_snapshot(instance);
                }
            }
            for prompt in &served {
                prop_assert_eq!(all.depth(prompt), all.engine.held(prompt));
            }
        }
    }
}

#[test]
fn a_request_that_never_ran_leaves_nothing() {
    let mut all = Followed::new();
    let text = prompt(&[0, 1]);
    all.dispatch(&text, "r");
    assert_eq!(all.depth(&text), cut(&text).hashes.len(), "while it is in flight");
    all.end(&text, "r", None);
    assert_eq!(all.depth(&text), 0);
}

#[test]
fn what_the_worker_found_cached_is_held_even_if_no_event_says_so() {
    let mut all = Followed::new();
    all.engine.compute(&prompt(&[0, 1]), "from another router");
    all.take_snapshot(5);
    all.serve(&prompt(&[0, 1]), "r");
    assert_eq!(all.depth(&prompt(&[0, 1])), all.engine.held(&prompt(&[0, 1])));
    // Its rest is stored behind blocks that are only known from the snapshot.
    all.serve(&prompt(&[0, 1, 2]), "s");
    let batch = all.engine.evict(&prompt(&[0])[..BLOCK_BYTES]);
    all.take(batch);
    assert_eq!(all.depth(&prompt(&[0, 1])), 0, "and so these hang on them");
}

#[test]
fn a_gap_is_an_error_and_says_where_to_go_on() {
    let mut all = Followed::new();
    all.serve(&prompt(&[0]), "r");
    assert_eq!(all.feed.resume(), Some((1, 5)));
    let lost = all.engine.compute(&prompt(&[1]), "s").1.unwrap();
    let next = all.engine.compute(&prompt(&[2]), "t").1.unwrap();
    assert_eq!(all.feed.take(next.clone()), Err(FeedError::Gap { before: 0, came: 2 }));
    assert_eq!(all.feed.resume(), Some((1, 5)));
    all.take(lost);
    all.take(next);
    assert_eq!(all.feed.resume(), Some((3, 5)));
    let mut fresh = CacheFeed::default();
    let batch = all.engine.evict(&prompt(&[0]));
    assert_eq!(fresh.take(batch), Err(FeedError::NoSnapshot(3)));
}

#[test]
fn a_batch_of_nothing_that_is_known_here_is_no_gap() {
    let mut all = Followed::new();
    all.serve(&prompt(&[0]), "r");
    let nothing = all.engine.batch(vec![]);
    assert_eq!(all.feed.take(nothing), Ok(vec![]));
    all.serve(&prompt(&[0, 1]), "s");
    assert_eq!(all.feed.resume(), Some((3, 5)));
    assert!(all.feed.trust() == CacheTrust::Exact && all.depth(&prompt(&[0, 1])) > all.depth(&prompt(&[0])));
}

#[test]
fn a_part_of_a_snapshot_is_not_believed_before_the_last() {
    let mut all = Followed::new();
    all.serve(&prompt(&[0, 1]), "r");
    let before = all.depth(&prompt(&[0, 1]));
    let parts = all.engine.snapshot(5);
    all.take(parts[0].clone());
    assert_ne!(all.feed.trust(), CacheTrust::Exact);
    assert_eq!((all.feed.resume(), all.depth(&prompt(&[0, 1]))), (None, before));
    all.take(parts[1].clone());
    assert_eq!(all.feed.trust(), CacheTrust::Exact);
    assert_eq!(all.depth(&prompt(&[0, 1])), before);
}

#[test]
fn of_what_routers_tell_only_others_that_hash_alike_are_believed() {
    let mut all = Followed::new();
    let text = prompt(&[0, 1]);
    let KvEvent::Routed(routed) = told(&text, "r", 8) else { unreachable!() };
    let own = RoutedPrompt { router: 7, ..routed.clone() };
    let other_seed = RoutedPrompt { seed_digest: 98, ..routed.clone() };
    let batch = all.engine.batch(vec![KvEvent::Routed(own), KvEvent::Routed(other_seed)]);
    all.take(batch);
    assert_eq!((all.depth(&text), all.feed.requests.len()), (0, 0));
    let batch = all.engine.batch(vec![KvEvent::Routed(routed)]);
    all.feed.listener.seed_digest = None;
    all.take(batch);
    assert_eq!(all.feed.requests.len(), 0, "nobody shares a seed that is drawn");
}

#[test]
fn one_routers_end_is_not_anothers_of_the_same_id() {
    let mut all = Followed::new();
    let ended = |router| {
        KvEvent::Ended(EndedRequest { request_id: "r".into(), router, prompt_tokens: 9, cached_tokens: None })
    };
    all.dispatch(&prompt(&[0, 1]), "r");
    let batch = all.engine.batch(vec![told(&prompt(&[2]), "r", 8), ended(8)]);
    all.take(batch);
    assert_eq!(all.feed.settle(all.now), []);
    assert_eq!(all.feed.settle(all.now + SETTLING_TIME), [], "it still runs");
    let batch = all.engine.batch(vec![told(&prompt(&[2]), "s", 8), ended(9)]);
    all.take(batch);
    assert_eq!(
        (all.depth(&prompt(&[0, 1])), all.feed.requests.len()),
        (cut(&prompt(&[0, 1])).hashes.len(), 2)
    );
}

#[test]
fn requests_of_routers_that_vanish_are_forgotten_in_the_end() {
    let mut all = Followed::new();
    for number in 0..MAX_OTHERS + 10 {
        let batch = all.engine.batch(vec![told(&prompt(&[0]), &number.to_string(), 8)]);
        all.take(batch);
    }
    assert_eq!((all.feed.requests.len(), all.feed.others.len()), (MAX_OTHERS, MAX_OTHERS));
}

#[test]
fn two_requests_of_one_id_do_no_harm() {
    let mut all = Followed::new();
    all.dispatch(&prompt(&[0]), "r");
    all.feed.ended("r", None, all.now);
    all.dispatch(&prompt(&[1]), "r");
    assert_eq!(all.feed.settle(all.now + SETTLING_TIME), [], "the second still runs");
    all.end(&prompt(&[1]), "r", None);
    assert_eq!(all.depth(&prompt(&[1])), 0);
    all.feed.ended("never heard of", None, all.now);
    assert_eq!(all.feed.settle(all.now + SETTLING_TIME), []);
}

proptest! {
    /// Of an engine whose events are followed from the first on, the tree knows no more than is cached, but for ends of prompts that fill no block;
    /// and if others fill it as well, no less of what it is sent.
    #[test]
    fn of_an_engine_is_known_what_it_holds(
        operations in prop::collection::vec(operation(), 0..40),
        is_shared in any::<bool>(),
    ) {
        let mut all = Followed::of_engine(Engine::default());
        let mut served: Vec<Vec<u8>> = Vec::new();
        for (number, operation) in operations.into_iter().enumerate() {
            match operation {
                Operation::ServeElsewhere(parts) if is_shared => all.serve_strangers(&prompt(&parts)),
                Operation::Serve(parts) | Operation::ServeElsewhere(parts) => {
                    let text = prompt(&parts);
                    all.serve(&text, &number.to_string());
                    prop_assert!(all.depth(&text) >= all.engine.held(&text));
                    served.push(text);
                }
                Operation::Evict(parts, at) => {
                    let blocks = prompt(&parts).len() / BLOCK_BYTES;
                    let block = (1 + at.index(blocks)) * BLOCK_BYTES;
                    let batch = all.engine.evict(&prompt(&parts)[..block]);
                    all.take(batch);
                }
                Operation::Clear => {
                    all.engine.cache.clear();
                    let batch = all.engine.batch(vec![KvEvent::Cleared]);
                    all.take(batch);
                }
                Operation::Restart | Operation::Snapshot => {
                    all.engine = Engine::default();
                    let forgotten = all.feed.restarted();
                    all.apply(vec![forgotten]);
                    all.feed.join(0);
                }
            }
            for text in served.iter().filter(|_| !is_shared) {
                let (known, held) = (all.depth(text), all.engine.held(text));
                let is_whole = all.engine.cache.contains(&text[..text.len() / BLOCK_BYTES * BLOCK_BYTES]);
                prop_assert!(known <= held || is_whole, "{known} of {held}");
            }
        }
    }
}

/// An engine that holds a prompt already.
fn warm_engine(prompt: &[u8]) -> Engine {
    let mut engine = Engine::default();
    engine.compute(prompt, "before anybody listened");
    engine
}

#[test]
fn what_hangs_on_blocks_from_before_has_its_place_by_what_was_cached() {
    let (system, text) = (prompt(&[0, 1]), prompt(&[0, 1, 2]));
    let mut all = Followed::of_engine(warm_engine(&system));
    all.serve(&text, "r");
    assert_eq!(all.depth(&text), all.engine.held(&text), "its beginning was cached");
    all.serve(&prompt(&[0, 1, 2, 2]), "s");
    // The last block of what is not known goes, and with it all that hangs on it.
    let end = system.len() / BLOCK_BYTES * BLOCK_BYTES;
    let batch = all.engine.evict(&text[..end + BLOCK_BYTES]);
    all.take(batch);
    let left = all.depth(&text);
    assert_eq!(left, all.engine.held(&text));
    assert!(left > 0, "of what was there before nothing is said");
    assert_eq!(all.depth(&prompt(&[0, 1, 2, 2])), left);
}

#[test]
fn without_a_place_entries_stay_as_they_were_made() {
    let text = prompt(&[0, 1, 2]);
    let mut all = Followed::of_engine(warm_engine(&prompt(&[0, 1])));
    all.dispatch(&text, "r");
    let (_, batch) = all.engine.compute(&text, "r");
    batch.into_iter().for_each(|batch| all.take(batch));
    all.end(&text, "r", None);
    assert_eq!(all.depth(&text), cut(&text).hashes.len());
}

#[test]
fn of_requests_with_one_name_at_once_nothing_is_concluded() {
    let mut all = Followed::of_engine(Engine::default());
    let (one, two) = (prompt(&[0]), prompt(&[1]));
    all.dispatch(&one, "session");
    all.dispatch(&two, "session");
    for text in [&one, &two] {
        let batch = all.engine.compute(text, "session").1.unwrap();
        all.take(batch);
    }
    all.end(&two, "session", Some(0));
    assert_eq!(all.depth(&two), cut(&two).hashes.len());
    all.end(&one, "session", Some(0));
    assert_eq!(all.depth(&one), cut(&one).hashes.len());
    // One that ends leaves the other one running, whose blocks are not the next one's.
    all.dispatch(&one, "parallel");
    all.dispatch(&two, "parallel");
    all.end(&one, "parallel", Some(0));
    all.now += SETTLING_TIME;
    let third = prompt(&[0, 1]);
    all.dispatch(&third, "parallel");
    all.end(&two, "parallel", Some(0));
    all.end(&third, "parallel", Some(0));
    assert_eq!(all.depth(&third), cut(&third).hashes.len(), "nothing is taken back");
    // One after the other, each is known for itself.
    all.serve(&prompt(&[2]), "session");
    let text = prompt(&[2, 1]);
    all.dispatch(&text, "session");
    assert_eq!(all.depth(&prompt(&[2])), all.engine.held(&prompt(&[2])));
}

#[test]
fn an_engine_that_names_nobody_is_mute() {
    let mut all = Followed::of_engine(Engine::default());
    for number in 0..MOST_UNNAMED {
        assert!(!all.feed.is_mute());
        let text = prompt(&[0, 1]);
        all.dispatch(&text, &number.to_string());
        let blocks = text.len() / BLOCK_BYTES;
        let batch = all.engine.batch(vec![Engine::stored(&text, 0..blocks, None)]);
        all.take(batch);
        all.end(&text, &number.to_string(), None);
        assert_eq!(all.depth(&text), cut(&text).hashes.len(), "nothing is taken back");
    }
    assert!(all.feed.is_mute());
    assert_eq!(all.feed.trust(), CacheTrust::Stale);
    all.serve(&prompt(&[2]), "named");
    assert!(!all.feed.is_mute());
    assert_eq!(all.feed.trust(), CacheTrust::Followed);
}

#[test]
fn after_a_gap_what_was_said_before_is_not_known() {
    let mut all = Followed::of_engine(Engine::default());
    all.serve(&prompt(&[0]), "r");
    let running = prompt(&[2, 1]);
    all.dispatch(&running, "running");
    let batch = all.engine.compute(&running, "running").1.unwrap();
    all.take(batch);
    all.engine.next += 5;
    all.feed.join(all.engine.next);
    all.end(&running, "running", Some(0));
    assert_eq!(all.depth(&running), cut(&running).hashes.len(), "nothing is concluded");
    assert_eq!(all.feed.token_blocks(), 0);
    all.serve(&prompt(&[0, 1]), "s");
    assert_eq!(all.depth(&prompt(&[0, 1])), all.engine.held(&prompt(&[0, 1])));
}
