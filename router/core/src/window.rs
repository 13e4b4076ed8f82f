//! Two counters over the last ten seconds, written by all cores without a lock.
//!
//! Times are readings of the router's own clock, counted from its start.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// How far back a [`Window`] remembers: this second and the nine before it.
pub const WINDOW: Duration = Duration::from_secs(BUCKETS as u64);

const BUCKETS: usize = 10;
/// A bucket is `second (24 bits) | ordinary (20 bits) | marked (20 bits)`, so that one load reads it whole.
const COUNT_BITS: u32 = 20;
const MAX_COUNT: u64 = (1 << COUNT_BITS) - 1;
const SECOND_BITS: u32 = 64 - 2 * COUNT_BITS;

/// Counts ordinary and marked events of the last [`WINDOW`], in buckets of a second each.
#[derive(Debug, Default)]
pub struct Window {
    buckets: [AtomicU64; BUCKETS],
}

/// A reading of a [`Window`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counts {
    /// Events that are as they should be: successes, requests.
    pub ordinary: u64,
    /// Events that are not: failures, retries.
    pub marked: u64,
}

impl Window {
    /// One ordinary event.
    pub fn add_ordinary(&self, now: Duration) {
        self.add(now, COUNT_BITS);
    }

    /// One marked event.
    pub fn add_marked(&self, now: Duration) {
        self.add(now, 0);
    }

    /// What has been counted in the last [`WINDOW`].
    #[must_use]
    pub fn read(&self, now: Duration) -> Counts {
        let second = second_of(now);
        let mut counts = Counts::default();
        for bucket in &self.buckets {
            let bucket = bucket.load(Ordering::Relaxed);
            let age = second.wrapping_sub(bucket >> (2 * COUNT_BITS)) & ((1 << SECOND_BITS) - 1);
            if age < BUCKETS as u64 {
                counts.ordinary += bucket >> COUNT_BITS & MAX_COUNT;
                counts.marked += bucket & MAX_COUNT;
            }
        }
        counts
    }

    /// Forgets everything.
    pub fn clear(&self) {
        self.buckets.iter().for_each(|bucket| bucket.store(0, Ordering::Relaxed));
    }

    fn add(&self, now: Duration, shift: u32) {
        let second = second_of(now);
        #[expect(clippy::cast_possible_truncation, reason = "a remainder of the number of buckets")]
        let bucket = &self.buckets[(now.as_secs() % BUCKETS as u64) as usize];
        let mut old = bucket.load(Ordering::Relaxed);
        loop {
            let same_second = old >> (2 * COUNT_BITS) == second;
            if same_second && old >> shift & MAX_COUNT < MAX_COUNT - u64::from(u16::MAX) {
                // Far from its end: no other core can carry it over before this lands.
                bucket.fetch_add(1 << shift, Ordering::Relaxed);
                return;
            }
            if same_second {
                return;
            }
            let fresh = second << (2 * COUNT_BITS) | 1 << shift;
            match bucket.compare_exchange_weak(old, fresh, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return,
                Err(newer) => old = newer,
            }
        }
    }
}

fn second_of(now: Duration) -> u64 {
    now.as_secs() & ((1 << SECOND_BITS) - 1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn counts_what_a_list_of_events_would(
            events in prop::collection::vec((0u64..4_000, any::<bool>()), 0..200),
            start_s in 0u64..100_000_000,
        ) {
            let window = Window::default();
            let mut now = Duration::from_secs(start_s);
            let mut list = Vec::new();
            for (wait_ms, marked) in events {
                now += Duration::from_millis(wait_ms);
                if marked { window.add_marked(now) } else { window.add_ordinary(now) }
                list.push((now.as_secs(), marked));
                let recent = list.iter().filter(|(second, _)| second + BUCKETS as u64 > now.as_secs());
                let marked = recent.clone().filter(|(_, marked)| *marked).count() as u64;
                let expected = Counts { ordinary: recent.count() as u64 - marked, marked };
                prop_assert_eq!(window.read(now), expected);
            }
            window.clear();
            prop_assert_eq!(window.read(now + WINDOW), Counts::default());
        }
    }

    #[test]
    fn a_full_bucket_stays_full() {
        let window = Window::default();
        for _ in 0..=MAX_COUNT {
            window.add_marked(Duration::ZERO);
        }
        let counts = window.read(Duration::ZERO);
        assert_eq!(counts.ordinary, 0);
        assert!(counts.marked > 900_000, "{counts:?}");
    }
}
