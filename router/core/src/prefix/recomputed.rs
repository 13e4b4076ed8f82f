//! How much of what workers compute had been computed not long before, and was evicted since.
//!
//! Where sessions need somewhat more memory than there is, an engine can fall into a state that feeds itself: prompts find nothing cached, so
//! they take long to compute; decodes between them take as long, and hold their memory meanwhile; so still less is left for what comes back. It
//! leads out of it, and keeps from it, to let fewer prompts at a time add to the cache. That pays only where the memory which is won that
//! way would have kept what is computed: where it was computed a short time ago, measured in what was computed since. A prompt that comes back after
//! much longer would not have been kept in any case. Used by the decider alone.

use roundhouse_types::BlockHash;

use crate::models::PoolNumber;
use crate::speed::CacheRoom;
use crate::worker::WorkerSlot;

/// What is computed again before so many times what caches hold has been computed might have been kept. Sessions come back within twice that where
/// memory is twice too short; with 1.5 such a fleet is left to itself.
const SOON: f64 = 3.0;
/// From this share of what a worker computes on, what requests add to its cache is bounded.
const MUCH: f64 = 0.4;
/// To this share of the cache: with three tenths prompts wait where there is no need, with half of it sessions are evicted again.
const ADDED_SHARE: f64 = 0.4;

/// One of so many blocks is looked at, at least.
const SAMPLE_BITS: u32 = 3;
/// More would be a fleet that there is not.
const MOST_BITS: u32 = 24;
/// Blocks that are remembered, by a part of their hash: the newest of those with the same. Of what is soon, half of them at most.
const PLACES: usize = 1 << 17;
/// What has been computed is counted in such steps, in tokens, so that the count fits.
const STEP_TOKENS: u64 = 64;

/// What was computed, when, and what of it again.
#[derive(Debug, Default)]
pub struct Recomputed {
    /// Empty until the first is remembered.
    places: Vec<Place>,
    /// All that was ever computed.
    tokens: u64,
    /// In so many blocks.
    blocks: u64,
    /// What caches have room for, of all that might have got the last request.
    fleet_tokens: usize,
    /// Of what was computed of late, by all workers of each pool, what had been computed a short time before and was held by nobody any more.
    lost: Vec<f64>,
    workers: Vec<Computes>,
}

/// One worker.
#[derive(Clone, Copy, Default, Debug)]
struct Computes {
    /// What its cache has room for; 0 where that is not known.
    capacity: usize,
    /// Of what it computed of late, what had been computed a short time before.
    share: f64,
}

#[derive(Clone, Copy, Default, Debug)]
struct Place {
    /// Another part of the hash; 0 for none.
    print: u32,
    /// The count of steps when it was computed last; wraps.
    step: u32,
}

/// KV memory, in tokens; 0 where it is not known.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Capacity {
    /// Of the worker.
    pub worker: usize,
    /// Of all that might have got the request.
    pub fleet: usize,
}

impl Recomputed {
    /// What all caches hold that a request might have got into, as of the last pick.
    pub(crate) fn fleet_tokens(&self) -> usize {
        self.fleet_tokens
    }

    /// What requests may add to the cache of `worker`: as much as they like where a bound would gain nothing. What is computed there from now on counts
    /// as of a cache of that capacity.
    pub fn room(&mut self, worker: WorkerSlot, capacity: Capacity) -> CacheRoom {
        if capacity.worker == 0 {
            return CacheRoom::default();
        }
        if self.workers.len() <= worker.index() {
            self.workers.resize(worker.index() + 1, Computes::default());
        }
        self.fleet_tokens = capacity.fleet;
        let computes = &mut self.workers[worker.index()];
        computes.capacity = capacity.worker;
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "part of a count")]
        let all = (ADDED_SHARE * capacity.worker as f64) as usize;
        CacheRoom { each: all / 2, all: (computes.share >= MUCH).then_some(all) }
    }

    /// How much of what `worker` computed of late had been computed a short time before; 0 where its memory is not known.
    #[must_use]
    pub fn share(&self, worker: WorkerSlot) -> f64 {
        self.workers.get(worker.index()).map_or(0.0, |computes| computes.share)
    }

    /// `worker` has left or restarted: nothing is known of it any more, and another may have its slot next.
    pub fn forget(&mut self, worker: WorkerSlot) {
        if let Some(computes) = self.workers.get_mut(worker.index()) {
            *computes = Computes::default();
        }
    }

    /// How much of what the workers of a pool computed of late had been computed a short time before, and was held by nobody any more.
    #[must_use]
    pub(crate) fn lost_share(&self, pool: PoolNumber) -> f64 {
        self.lost.get(pool.index()).copied().unwrap_or(0.0)
    }

    /// A worker of that pool is to compute the blocks `new`, of `tokens` tokens; others hold the first `copied` of them.
    pub(crate) fn see(
        &mut self,
        (worker, pool): (WorkerSlot, PoolNumber),
        new: &[BlockHash],
        tokens: usize,
        copied: usize,
    ) {
        let Some(&Computes { capacity, share }) = self.workers.get(worker.index()) else { return };
        if new.is_empty() || capacity == 0 {
            return;
        }
        if self.places.is_empty() {
            self.places = vec![Place::default(); PLACES];
        }
        self.tokens += tokens as u64;
        self.blocks += new.len() as u64;
        let soon_tokens = SOON * self.fleet_tokens as f64;
        let bits = self.sample_bits(soon_tokens);
        #[expect(clippy::cast_possible_truncation, reason = "wraps")]
        let step = (self.tokens / STEP_TOKENS) as u32;
        // Each stands for those that are not looked at.
        let stands_for = tokens as f64 / new.len() as f64 * f64::from(1 << bits);
        let weight = (stands_for / capacity as f64).min(1.0);
        let of_all = (stands_for / self.fleet_tokens.max(capacity) as f64).min(1.0);
        if self.lost.len() <= pool.index() {
            self.lost.resize(pool.index() + 1, 0.0);
        }
        let lost = &mut self.lost[pool.index()];
        let mut share = share;
        for (at, hash) in new.iter().enumerate().filter(|(_, hash)| hash.0.trailing_zeros() >= bits) {
            let place = &mut self.places[place_of(*hash)];
            let print = print_of(*hash);
            let age_tokens = u64::from(step.wrapping_sub(place.step)) * STEP_TOKENS;
            let is_again = place.print == print && age_tokens as f64 <= soon_tokens;
            *place = Place { print, step };
            share += weight * (f64::from(u8::from(is_again)) - share);
            *lost += of_all * (f64::from(u8::from(is_again && at >= copied)) - *lost);
        }
        self.workers[worker.index()].share = share;
    }

    /// So that what is computed within `tokens` takes half of the places at most.
    fn sample_bits(&self, tokens: f64) -> u32 {
        let blocks = tokens * self.blocks as f64 / self.tokens.max(1) as f64;
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "some thirty at most")]
        let bits = (blocks * 2.0 / PLACES as f64).max(1.0).log2().ceil() as u32;
        bits.clamp(SAMPLE_BITS, MOST_BITS)
    }
}

fn place_of(hash: BlockHash) -> usize {
    usize::try_from(hash.0 >> 32 & (PLACES as u64 - 1)).unwrap_or(0)
}

fn print_of(hash: BlockHash) -> u32 {
    // The lowest bits are those of the sample.
    u32::try_from(hash.0 >> 16 & u64::from(u32::MAX)).unwrap_or(0) | 1
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORKER: WorkerSlot = WorkerSlot(1);
    const POOL: PoolNumber = PoolNumber(2);
    const BLOCK_TOKENS: usize = 100;
    const CAPACITY: Capacity = Capacity { worker: 50_000, fleet: 100_000 };

    /// Prompts of ten blocks, so many different ones in turn, each evicted before it comes again: how much may be added in the end.
    fn in_turn(prompts: u64, rounds: usize) -> Option<usize> {
        let mut recomputed = Recomputed::default();
        for number in (0..prompts).cycle().take(prompts as usize * rounds) {
            let hash = |at| BlockHash(xxhash_rust::xxh3::xxh3_64(&(number * 10 + at as u64).to_le_bytes()));
            let blocks: Vec<_> = (0..10).map(hash).collect();
            recomputed.room(WORKER, CAPACITY);
            recomputed.see((WORKER, POOL), &blocks, 10 * BLOCK_TOKENS, 0);
        }
        assert_eq!(recomputed.room(WorkerSlot(0), CAPACITY).all, None, "another worker");
        recomputed.room(WORKER, CAPACITY).all
    }

    #[test]
    fn what_comes_back_soon_bounds_what_is_added() {
        // 250 of a thousand tokens each, where there is room for 100.
        assert_eq!(in_turn(250, 3), Some(20_000));
        assert_eq!(in_turn(250, 1), None, "the first time is the first");
    }

    #[test]
    fn what_others_hold_is_not_lost() {
        for (copied, is_lost) in [(10, false), (0, true)] {
            let mut recomputed = Recomputed::default();
            let blocks: Vec<_> = (1..=10).map(|at| BlockHash(at << 40)).collect();
            for _ in 0..300 {
                recomputed.room(WORKER, CAPACITY);
                recomputed.see((WORKER, POOL), &blocks, 10 * BLOCK_TOKENS, copied);
            }
            assert!(recomputed.share(WORKER) > 0.9);
            assert_eq!(recomputed.lost_share(POOL) > 0.9, is_lost, "{}", recomputed.lost_share(POOL));
            assert_eq!(recomputed.lost_share(PoolNumber(1)), 0.0, "others are not short of memory");
        }
    }

    #[test]
    fn who_comes_after_a_worker_that_left_is_another() {
        let mut recomputed = Recomputed::default();
        for _ in 0..200 {
            recomputed.room(WORKER, CAPACITY);
            recomputed.see((WORKER, POOL), &[BlockHash(8)], BLOCK_TOKENS * 10, 0);
        }
        assert!(recomputed.room(WORKER, CAPACITY).all.is_some());
        recomputed.forget(WORKER);
        assert!(recomputed.share(WORKER) == 0.0 && recomputed.room(WORKER, CAPACITY).all.is_none());
        recomputed.forget(WorkerSlot(9));
    }

    #[test]
    fn what_comes_back_after_long_or_never_bounds_nothing() {
        assert_eq!(in_turn(350, 3), None);
        assert_eq!(in_turn(10_000, 1), None);
    }

    #[test]
    fn nothing_is_bounded_where_the_memory_is_not_known() {
        let mut recomputed = Recomputed::default();
        for _ in 0..10 {
            let room = recomputed.room(WORKER, Capacity { worker: 0, fleet: 0 });
            assert_eq!(room, CacheRoom::default());
            recomputed.see((WORKER, POOL), &[BlockHash(8)], 10, 0);
        }
        assert!(recomputed.places.is_empty());
    }

    #[test]
    fn large_fleets_are_sampled_so_that_what_is_soon_has_its_place() {
        let mut recomputed = Recomputed { tokens: 64_000, blocks: 1_000, ..Recomputed::default() };
        assert_eq!(recomputed.sample_bits(1e6), SAMPLE_BITS);
        let blocks = 1e9 / 64.0;
        let bits = recomputed.sample_bits(1e9);
        let kept = blocks / f64::from(1 << bits);
        assert!(kept <= PLACES as f64 / 2.0 && kept > PLACES as f64 / 8.0, "{bits}");
        recomputed.blocks = 0;
        assert_eq!(recomputed.sample_bits(1e9), SAMPLE_BITS);
    }
}
