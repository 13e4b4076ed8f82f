//! Workers that are alike, and what is learned of them together: how fast they compute prompts, how often requests come to them.
//!
//! A worker belongs with those that name the same model first. Engines list the model that they were started with before its adapters (vLLM and
//! SGLang do), and what they compute with is that model: requests for any adapter wait in the same queue and tell of the same speed. The whole
//! list would be the wrong key, since adapters are loaded and unloaded while an engine runs, here and not there; and so would be the model that a
//! request names, since one engine's speed would be learned once for each of its adapters. Neither what clients send nor how many models come
//! and go makes it grow. Used by the decider.

use std::time::Duration;

use crate::answer_lengths::AnswerLengths;
use crate::models::{MOST_POOLS, PoolNumber};
use crate::prefix::popularity::Popularity;
use crate::spare::SpareTime;
use crate::speed::{Observation, PrefillSpeed, Speeds};
use crate::unseen::UnseenPicks;
use crate::worker::Role;

/// What part of a pool is meant.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Part {
    pub(crate) pool: PoolNumber,
    /// Of the candidates of a pick, how many are of this pool: from 0 to 1.
    pub(crate) of_candidates: f64,
    /// Of the pool's workers, how many are candidates: from 0 to 1. Fewer than all are where an adapter is not loaded everywhere.
    pub(crate) of_pool: f64,
}

/// One pool.
#[derive(Debug, Default)]
struct Pool {
    speeds: Speeds,
    answers: AnswerLengths,
    popularity: Popularity,
    unseen: UnseenPicks,
    /// Of those that generate, and of those that compute prompts for others.
    spare: [SpareTime; 2],
}

/// All pools.
#[derive(Debug, Default)]
pub(crate) struct Pools {
    /// By number, as far as they have been seen.
    pools: Vec<Pool>,
    last_arrival: Duration,
}

impl Pools {
    /// How fast workers of a pool compute prompts, as known now.
    pub(crate) fn speed(&self, pool: PoolNumber) -> PrefillSpeed {
        self.pools.get(pool.index()).map_or_else(PrefillSpeed::default, |pool| pool.speeds.prefill())
    }

    /// Learns from an interval.
    pub(crate) fn learn(&mut self, pool: PoolNumber, observation: &Observation) {
        self.of(pool).speeds.learn(observation);
    }

    /// Learns from a whole answer.
    pub(crate) fn learn_whole(&mut self, pool: PoolNumber, answer: &Observation) {
        self.of(pool).speeds.learn_whole(answer);
    }

    /// Which prefixes are asked for there, as far as anything has been.
    pub(crate) fn popularity(&self, pool: PoolNumber) -> Option<&Popularity> {
        self.pools.get(pool.index()).map(|pool| &pool.popularity)
    }

    /// The same, to be told of a request.
    pub(crate) fn popularity_mut(&mut self, pool: PoolNumber) -> &mut Popularity {
        &mut self.of(pool).popularity
    }

    /// An answer has ended that had so many tokens.
    pub(crate) fn answered(&mut self, pool: PoolNumber, tokens: usize) {
        self.of(pool).answers.see(tokens);
    }

    /// Tokens of an answer, on average of late; 0 if there was none.
    pub(crate) fn answer_tokens(&self, pool: PoolNumber) -> f64 {
        self.pools.get(pool.index()).map_or(0.0, |pool| pool.answers.mean_tokens())
    }

    /// A request comes `now` for one of these.
    pub(crate) fn arrival(&mut self, now: Duration, parts: impl Iterator<Item = Part>) {
        self.last_arrival = self.last_arrival.max(now);
        parts.for_each(|part| self.of(part.pool).speeds.arrival(now, part.of_candidates));
    }

    /// Requests a second of late that come to these, as of the last that came at all.
    pub(crate) fn arrivals_per_s(&self, parts: impl Iterator<Item = Part>) -> f64 {
        let rate = |part: Part| {
            let pool = self.pools.get(part.pool.index());
            pool.map_or(0.0, |pool| part.of_pool * pool.speeds.arrivals_per_s(self.last_arrival))
        };
        parts.map(rate).sum()
    }

    /// What other routers may have decided for a pool.
    pub(crate) fn unseen(&mut self, pool: PoolNumber) -> &mut UnseenPicks {
        &mut self.of(pool).unseen
    }

    /// The same as at the last pick.
    pub(crate) fn mean_unseen(&self, pool: PoolNumber) -> crate::unseen::Unseen {
        self.pools.get(pool.index()).map(|pool| pool.unseen.mean()).unwrap_or_default()
    }

    /// What others leave of the time of a pool's workers in a role.
    pub(crate) fn spare(&mut self, pool: PoolNumber, role: Role) -> &mut SpareTime {
        &mut self.of(pool).spare[usize::from(role == Role::Prefill)]
    }

    fn of(&mut self, pool: PoolNumber) -> &mut Pool {
        let at = pool.index().min(MOST_POOLS - 1);
        if at >= self.pools.len() {
            self.pools.resize_with(at + 1, Pool::default);
        }
        &mut self.pools[at]
    }
}
