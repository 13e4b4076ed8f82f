//! Whether a prompt is better computed by a worker that does nothing else, and its KV moved to where the request goes on.
//!
//! Both ways are costed as [`PrefixAware`] does, whichever policy then picks, except that a second counts the same whoever waits for it, before a
//! first token or, times [`Decider::with_decode_weight`], between two ([`PrefixAware::seconds`]): `prefill + handover + decode < whole`. `prefill` is the cheapest of the
//! workers that compute prompts. `decode` is the cheapest of those that generate, when the KV comes to it, which takes a tenth of what computing it
//! would; `whole` is the cheapest of them when it computes what it lacks itself, which those who decode there wait for. So a follow-up whose history is cached
//! where it was answered stays there, a long cold prompt does not, and the busier those that generate are, the shorter is a prompt that pays.
//!
//! How short a prompt is matters in no other way: each that an engine computes in a step of its own holds up all that decode there.
//!
//! Simulated in `bench/results/2026-11-23-split-fleets.md`, and beside other routers in `2026-11-26-head-to-head.md`. With the policy's own weights, a
//! fifth for who decodes, answers were slower than without prefill workers.

use std::time::Duration;

use rand::RngExt;

use super::candidates::{Candidates, Eligible, Sought};
use super::{Among, Decider, State};
use crate::fleet::FleetSnapshot;
use crate::policy::{Policy, PrefixAware};
use crate::prefix::PrefixHits;
use crate::request::{Leg, RequestView};

/// What it costs to ask two workers one after the other: another exchange, and a step that the decoding worker computes for the last token of the
/// prompt.
const HANDOVER_S: f64 = 0.01;

/// What it costs to compute a prompt where it goes on, and elsewhere; in seconds, of this request and all others.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SplitCosts {
    /// Tokens that the worker that generates would have to compute.
    pub new_tokens: usize,
    /// When it computes them.
    pub whole_s: f64,
    /// When another one does, there and where it goes on; `None` if there is nobody, or it is not worth it anyway.
    pub apart_s: Option<(f64, f64)>,
}

impl SplitCosts {
    /// Whether the prompt is better computed elsewhere.
    #[must_use]
    pub fn pays(&self) -> bool {
        self.apart_s.is_some_and(|(prefill_s, decode_s)| prefill_s + HANDOVER_S + decode_s < self.whole_s)
    }
}

impl Decider {
    /// Whether the request is better off if another worker than the one that generates computes its prompt. Without a policy that reads prompts
    /// nobody knows, and it is, as long as somebody `among` the workers does nothing else.
    #[must_use]
    pub fn splits(
        &self,
        fleet: &FleetSnapshot,
        request: &RequestView<'_>,
        among: Among<'_>,
        now: Duration,
    ) -> bool {
        if !self.reads_prefixes() {
            return Self::can_decide(fleet, &RequestView { leg: Leg::Prefill, ..*request }, among);
        }
        self.split_costs(fleet, request, among, now).is_some_and(|costs| costs.pays())
    }

    /// What [`Decider::splits`] goes by; `None` if the policy does not read prompts, or nobody is there who generates.
    #[must_use]
    pub fn split_costs(
        &self,
        fleet: &FleetSnapshot,
        request: &RequestView<'_>,
        among: Among<'_>,
        now: Duration,
    ) -> Option<SplitCosts> {
        if !self.reads_prefixes() {
            return None;
        }
        let state = self.lock();
        let hits = self.look_up(&state.index, request);
        let least = |leg| {
            let request = RequestView { leg, ..*request };
            self.least_cost(&state, fleet, (&request, &hits), (among, now))
        };
        let (whole_s, new_tokens) = least(Leg::Whole)?;
        let apart = || Some((least(Leg::Prefill)?.0, least(Leg::Decode)?.0));
        // Nothing costs less than nothing.
        let apart_s = if whole_s <= HANDOVER_S { None } else { apart() };
        Some(SplitCosts { new_tokens, whole_s, apart_s })
    }

    /// What the cheapest worker would cost, in seconds, and the tokens that it would have to compute; `None` if there is none.
    fn least_cost(
        &self,
        state: &State,
        fleet: &FleetSnapshot,
        (request, hits): (&RequestView<'_>, &PrefixHits),
        (among, now): (Among<'_>, Duration),
    ) -> Option<(f64, usize)> {
        let mut candidates = Candidates::default();
        let eligible = Eligible::new(fleet, request, among);
        let moment = self.moment(fleet, (now, request), &state.pools);
        let sought = Sought { request, eligible: &eligible, moment, hits };
        let mut rng = state.rng.clone();
        candidates.gather(fleet, &sought, PrefixAware.most_workers(), &mut || rng.random::<f64>());
        if candidates.list.is_empty() {
            return None;
        }
        let learned = self.known(state, &candidates, (request, hits), now);
        let ring = &|| fleet.ring();
        let costs = PrefixAware::seconds(request, &candidates.choice(ring, learned), self.decode_weight);
        let new_tokens = candidates.list.iter().map(|candidate| candidate.new_tokens(request));
        costs.into_iter().zip(new_tokens).min_by(|(one, _), (other, _)| one.total_cmp(other))
    }
}
