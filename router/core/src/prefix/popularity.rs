//! How often a prefix is asked for: what a copy of it at one more worker is good for.
//!
//! A sample by hash, of bounded size. Several requests of one moment count once, since a burst of siblings is over when it has come. Knows no clock:
//! times come in. One for each pool of workers: what is asked of others takes nothing from a prefix's share. Used by the decider, which tells the
//! policy.

use std::time::Duration;

use roundhouse_types::BlockHash;

/// Prefixes that are remembered, one for each remainder of their hash.
const PLACES: usize = 1 << 12;
/// A request of this age counts 1/e.
const MEMORY_S: f64 = 10.0;
/// Requests that come closer together are of one moment.
const MOMENT_S: f64 = 0.25;

/// Requests that are expected soon for a prefix: as many as have come of late, besides one.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Followers {
    /// Of the prefix.
    pub blocks: usize,
    /// How many.
    pub requests: f64,
    /// Of all requests of late, those for it.
    pub share: f64,
}

/// Prefixes that were asked for of late.
#[derive(Debug, Default)]
pub struct Popularity {
    /// Empty until the first is remembered.
    places: Vec<Asked>,
    /// Requests, each worth less the older it is.
    all: f64,
    at_s: f64,
}

/// One prefix.
#[derive(Clone, Copy, Debug)]
struct Asked {
    prefix: BlockHash,
    /// Moments, each worth less the older it is.
    moments: f64,
    moment_s: f64,
    /// Requests, the same.
    weight: f64,
    at_s: f64,
}

fn fading(passed_s: f64) -> f64 {
    (-passed_s.max(0.0) / MEMORY_S).exp()
}

impl Asked {
    fn moments_at(&self, now_s: f64) -> f64 {
        self.moments * fading(now_s - self.moment_s)
    }
}

impl Popularity {
    /// Who is expected to come for what somebody holds of this path, its first `known` blocks.
    #[must_use]
    pub fn followers(&self, path: &[BlockHash], known: usize, now: Duration) -> Followers {
        let Some((blocks, prefix)) = prefix_of(path, known) else { return Followers::default() };
        let asked = self.places.get(place_of(prefix)).filter(|asked| asked.prefix == prefix);
        let Some(asked) = asked else { return Followers::default() };
        let now_s = now.as_secs_f64();
        let requests = (asked.moments_at(now_s) - 1.0).max(0.0);
        let share =
            asked.weight * fading(now_s - asked.at_s) / (self.all * fading(now_s - self.at_s)).max(1.0);
        Followers { blocks, requests, share: share.min(1.0) }
    }

    /// A request comes with that path.
    pub fn see(&mut self, path: &[BlockHash], known: usize, now: Duration) {
        let now_s = now.as_secs_f64();
        self.all = self.all * fading(now_s - self.at_s) + 1.0;
        self.at_s = now_s;
        let Some((_, prefix)) = prefix_of(path, known) else { return };
        if self.places.is_empty() {
            let none = Asked { prefix: BlockHash(0), moments: 0.0, moment_s: 0.0, weight: 0.0, at_s: 0.0 };
            self.places = vec![none; PLACES];
        }
        let asked = &mut self.places[place_of(prefix)];
        let moments = asked.moments_at(now_s);
        if asked.prefix != prefix {
            // One that is asked for often keeps its place.
            if moments <= 1.0 {
                *asked = Asked { prefix, moments: 1.0, moment_s: now_s, weight: 1.0, at_s: now_s };
            }
            return;
        }
        if now_s - asked.moment_s >= MOMENT_S {
            (asked.moments, asked.moment_s) = (moments + 1.0, now_s);
        }
        asked.weight = asked.weight * fading(now_s - asked.at_s) + 1.0;
        asked.at_s = now_s;
    }
}

/// What stands for the first `known` blocks: where their number doubled last, so that those who have more or less in common by chance meet.
fn prefix_of(path: &[BlockHash], known: usize) -> Option<(usize, BlockHash)> {
    let blocks = known.min(path.len()).checked_ilog2().map(|doubled| 1 << doubled)?;
    Some((blocks, *path.get(blocks - 1)?))
}

fn place_of(prefix: BlockHash) -> usize {
    prefix.0 as usize % PLACES
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(prompt: u64, blocks: u64) -> Vec<BlockHash> {
        (0..blocks)
            .map(|at| {
                BlockHash(xxhash_rust::xxh3::xxh3_64(&[prompt, at.min(16)].map(u64::to_le_bytes).concat()))
            })
            .collect()
    }

    /// Requests for `path`, one each `every_s`, of which somebody holds the first `known` blocks; and when the last came.
    fn asked(
        popularity: &mut Popularity,
        path: &[BlockHash],
        known: usize,
        count: u32,
        every_s: f64,
    ) -> Duration {
        let at = |number: u32| Duration::from_secs_f64(100.0 + every_s * f64::from(number));
        (0..count).for_each(|number| popularity.see(path, known, at(number)));
        at(count - 1)
    }

    #[test]
    fn what_has_been_asked_for_is_expected_to_be_asked_for() {
        let (mut popularity, prompt) = (Popularity::default(), path(1, 20));
        let now = asked(&mut popularity, &prompt, 20, 40, 0.5);
        let Followers { blocks, requests, share } = popularity.followers(&prompt, 18, now);
        assert_eq!(blocks, 16, "by where the number of blocks doubled last");
        assert!((15.0..18.0).contains(&requests), "{requests} of 20 in 10 s, most of them fading");
        assert!(share > 0.99);
        assert_eq!(
            popularity.followers(&prompt, 7, now),
            Followers::default(),
            "less of it is another prefix"
        );
        assert_eq!(popularity.followers(&path(2, 20), 20, now), Followers::default());
        assert!(popularity.followers(&prompt, 18, now + Duration::from_secs(60)).requests < 0.1);
    }

    #[test]
    fn a_burst_is_one_moment() {
        let (mut popularity, prompt) = (Popularity::default(), path(1, 20));
        let now = asked(&mut popularity, &prompt, 20, 50, 0.001);
        assert_eq!(popularity.followers(&prompt, 20, now).requests, 0.0);
    }

    #[test]
    fn others_requests_take_from_the_share() {
        let (mut popularity, prompt) = (Popularity::default(), path(1, 20));
        let mut now = Duration::ZERO;
        for number in 0..40 {
            now = Duration::from_millis(500 * number);
            popularity.see(&prompt, 20, now);
            (0..3).for_each(|_| popularity.see(&[], 0, now));
        }
        let share = popularity.followers(&prompt, 20, now).share;
        assert!((share - 0.25).abs() < 0.01, "{share}");
    }

    #[test]
    fn what_is_asked_for_often_keeps_its_place() {
        let (mut popularity, prompt) = (Popularity::default(), path(1, 20));
        let now = asked(&mut popularity, &prompt, 20, 40, 0.5);
        (0..3 * PLACES as u64).for_each(|other| popularity.see(&[BlockHash(other)], 1, now));
        assert!(popularity.followers(&prompt, 20, now).requests > 10.0);
    }
}
