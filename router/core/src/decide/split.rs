//! Whether a prompt is better computed by a worker that does nothing else, and its KV moved to where the request goes on.
//!
//! Both ways are costed as [`PrefixAware`] does, whichever policy then picks: `prefill + decode < whole`. `prefill` is the cheapest of the
//! workers that compute prompts. `decode` is the cheapest of those that generate, when the KV comes to it, which takes a tenth of what computing it
//! would; `whole` is the same worker's cost when it computes what it lacks itself, which those who decode there wait for. So a follow-up whose history is cached
//! where it was answered stays there, a long cold prompt does not, and the busier those that generate are, the shorter is a prompt that pays.

use std::time::Duration;

use rand::RngExt;

use super::candidates::{Candidates, Eligible, Sought};
use super::{Among, Decider, State};
use crate::fleet::FleetSnapshot;
use crate::policy::{Policy, PrefixAware};
use crate::prefix::PrefixHits;
use crate::request::{Leg, RequestView};

/// What an engine computes in a step beside those that decode without their noticing: less is not worth another worker.
const LEAST_TOKENS: usize = 256;
/// What it costs to ask two workers one after the other: another exchange, and a step that the decoding worker computes for the last token of the
/// prompt.
const HANDOVER_S: f64 = 0.01;

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
        let on = |leg| RequestView { leg, ..*request };
        if !self.reads_prefixes() {
            return Self::can_decide(fleet, &on(Leg::Prefill), among);
        }
        let state = self.lock();
        let hits = self.look_up(&state.index, request);
        let least = |leg| self.least_cost(&state, fleet, (&on(leg), &hits), (among, now));
        let Some((whole_s, new_tokens)) = least(Leg::Whole) else { return false };
        if new_tokens < LEAST_TOKENS {
            return false;
        }
        match (least(Leg::Prefill), least(Leg::Decode)) {
            (Some((prefill_s, _)), Some((decode_s, _))) => prefill_s + HANDOVER_S + decode_s < whole_s,
            _ => false,
        }
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
        let moment = self.moment(now, request, &state.pools);
        let sought = Sought { request, eligible: &eligible, moment, hits };
        let mut rng = state.rng.clone();
        candidates.gather(fleet, &sought, PrefixAware.most_workers(), &mut || rng.random::<f64>());
        if candidates.list.is_empty() {
            return None;
        }
        let learned = self.known(state, &candidates, (request, hits));
        let ring = &|| fleet.ring();
        let costs = PrefixAware::seconds(request, &candidates.choice(ring, learned));
        let new_tokens = candidates.list.iter().map(|candidate| candidate.new_tokens(request));
        costs.into_iter().zip(new_tokens).min_by(|(one, _), (other, _)| one.total_cmp(other))
    }
}
