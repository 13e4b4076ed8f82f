//! What is in flight, and what replies teach.

use roundhouse_types::ChainHasher;

use super::*;
use crate::prefix::blocks::Cut;

const WORKER: WorkerSlot = WorkerSlot(2);

fn index() -> PrefixIndex {
    PrefixIndex::new(TreeLimits { total_blocks: 10_000, worker_blocks: 10_000 })
}

/// Prompt number `number`, of ten blocks of 100 tokens.
fn hashes(number: u32) -> Vec<BlockHash> {
    let mut chain = ChainHasher::new(1).salted(&number.to_le_bytes());
    (0..10u8).map(|block| chain.push_bytes(&[block])).collect()
}

fn path(hashes: &[BlockHash]) -> Path<'_> {
    Path::new(hashes, Cut::Tokens(100))
}

fn enter(index: &mut PrefixIndex, number: u32) -> (Basis, Option<InFlight>) {
    enter_path(index, &hashes(number), None)
}

fn enter_path(
    index: &mut PrefixIndex,
    hashes: &[BlockHash],
    capacity: Option<u64>,
) -> (Basis, Option<InFlight>) {
    index.catch_up();
    let hits = index.hits(hashes);
    index.enter(WORKER, (path(hashes), &hits), WorkerTells { capacity, blocks: false })
}

/// A request from beginning to end.
fn serve(index: &mut PrefixIndex, number: u32) -> Basis {
    enter(index, number).0
}

fn depth(index: &PrefixIndex, number: u32) -> usize {
    index.hits(&hashes(number)).blocks(WORKER)
}

const fn found(predicted_tokens: usize, cached_tokens: usize) -> Comparison {
    Comparison { predicted_tokens, cached_tokens }
}

#[test]
fn a_path_is_pinned_until_its_request_is_over() {
    let mut index = index();
    let (_, in_flight) = enter_path(&mut index, &hashes(0), Some(1_500));
    for number in 1..5 {
        enter_path(&mut index, &hashes(number), Some(1_500));
        assert_eq!((depth(&index, 0), depth(&index, number)), (10, 10), "of all that runs nothing goes");
    }
    assert_eq!(index.tree().worker_size(WORKER), 2_000);
    drop(in_flight);
    enter_path(&mut index, &hashes(5), Some(1_500));
    enter_path(&mut index, &hashes(6), Some(1_500));
    assert_eq!((depth(&index, 0), depth(&index, 6)), (0, 10));
}

#[test]
fn a_failed_request_takes_its_own_entry_back_and_no_others() {
    let mut index = index();
    let (_, other) = enter(&mut index, 0);
    let longer: Vec<_> = hashes(0).into_iter().chain(hashes(1)).collect();
    let (basis, in_flight) = enter_path(&mut index, &longer, None);
    index.take_back(in_flight, WORKER, &longer, basis.known_blocks);
    assert_eq!(index.hits(&longer).blocks(WORKER), 10);
    let (basis, in_flight) = enter(&mut index, 0);
    index.take_back(in_flight, WORKER, &hashes(0), 0);
    assert_eq!((basis.known_blocks, depth(&index, 0)), (10, 10), "the other still runs");
    index.take_back(other, WORKER, &hashes(0), 0);
    assert_eq!(depth(&index, 0), 0);
}

#[test]
fn what_a_worker_has_lost_says_what_else_it_has_lost() {
    let mut index = index();
    for number in 0..8 {
        serve(&mut index, number);
    }
    // Number 2 has been evicted, so 0 and 1 have been too. It has been computed anew since.
    let basis = serve(&mut index, 2);
    assert_eq!(index.compare(WORKER, basis, found(1_000, 0)), 20);
    let depths: Vec<_> = (0..8).map(|number| depth(&index, number)).collect();
    assert_eq!(depths, [0, 0, 10, 10, 10, 10, 10, 10]);
}

#[test]
fn one_reply_takes_at_most_half() {
    let mut index = index();
    for number in 0..8 {
        serve(&mut index, number);
    }
    let basis = serve(&mut index, 7);
    assert_eq!(index.compare(WORKER, basis, found(1_000, 0)), 40);
}

#[test]
fn small_differences_and_finding_more_change_nothing() {
    let mut index = index();
    serve(&mut index, 0);
    for comparison in [found(1_000, 800), found(100, 40), found(0, 5_000), found(1_000, 1_000)] {
        let basis = serve(&mut index, 1);
        assert_eq!(index.compare(WORKER, basis, comparison), 0);
    }
    assert_eq!((depth(&index, 0), depth(&index, 1)), (10, 10));
}

#[test]
fn nothing_follows_from_a_sibling_that_came_before_the_first_token() {
    let mut index = index();
    serve(&mut index, 0);
    let (_, mut first) = enter(&mut index, 1);
    let (basis, _second) = enter(&mut index, 1);
    assert_eq!(index.compare(WORKER, basis, found(1_000, 0)), 0);
    assert_eq!(depth(&index, 0), 10);
    first.as_mut().unwrap().settle();
    drop(_second);
    let (basis, _third) = enter(&mut index, 1);
    assert_eq!(index.compare(WORKER, basis, found(1_000, 0)), 10, "it had computed that");
    assert_eq!((depth(&index, 0), depth(&index, 1)), (0, 10));
}

#[test]
fn a_worker_that_caches_nothing_gets_no_entries_until_it_does() {
    let mut index = index();
    for _ in 0..100 {
        serve(&mut index, 0);
        let basis = serve(&mut index, 0);
        index.compare(WORKER, basis, found(100 * basis.known_blocks, 0));
    }
    assert_eq!(index.tree().held_blocks(), 0);
    for _ in 0..10 {
        assert_eq!(serve(&mut index, 0).known_blocks, 0);
    }
    index.compare(WORKER, Basis::default(), found(0, 1_000));
    assert_eq!((serve(&mut index, 0).known_blocks, serve(&mut index, 0).known_blocks), (0, 10));
}

#[test]
fn a_restart_makes_all_that_was_in_flight_mean_nothing() {
    let mut index = index();
    let (basis, before) = enter(&mut index, 0);
    index.forget(WORKER);
    let (_, _after) = enter(&mut index, 0);
    drop(before);
    assert_eq!(index.compare(WORKER, basis, found(0, 0)), 0);
    index.clear(WORKER);
    assert_eq!(depth(&index, 0), 10, "still pinned by the one that runs");
}

#[test]
fn what_a_worker_says_is_gone_is_gone_with_all_below_unless_it_runs() {
    let mut index = index();
    let enter = |index: &mut PrefixIndex| {
        let (hashes, tells) = (hashes(0), WorkerTells { capacity: None, blocks: true });
        let hits = index.hits(&hashes);
        index.enter(WORKER, (path(&hashes), &hits), tells)
    };
    drop(enter(&mut index));
    index.withdraw(WORKER, &hashes(0)[4..5]);
    assert_eq!(depth(&index, 0), 4);
    let (_, in_flight) = enter(&mut index);
    index.withdraw(WORKER, &hashes(0)[4..5]);
    assert_eq!(depth(&index, 0), 10);
    drop(in_flight);
    index.withdraw(WORKER, &hashes(0)[..1]);
    assert_eq!(index.tree().held_blocks(), 0);
}
