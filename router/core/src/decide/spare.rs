//! What requests take of their workers' time, and who has some to spare for one in the background: see [`spare`](crate::spare), which counts it.

use std::time::Duration;

use smallvec::SmallVec;

use super::candidates::Candidates;
use super::{Among, Decider, answer_tokens};
use crate::fleet::FleetSnapshot;
use crate::policy::PickError;
use crate::pools::{Part, Pools};
use crate::request::{Leg, RequestView};
use crate::spare::{answer_s, prompt_s};
use crate::speed::Prefill;
use crate::worker::Worker;

impl Decider {
    /// What a request takes of its worker's time is noted, unless it was before. Returns how many tokens it will have there, if it is in the background,
    /// and what was noted, in seconds.
    pub(super) fn note_time(
        &self,
        pools: &mut Pools,
        (worker, request, prefill): (&Worker, &RequestView<'_>, Prefill),
        (is_new, now): (bool, Duration),
    ) -> (Option<usize>, f64) {
        let (pool, is_background) = (worker.pool(), self.waits_for_spare(request));
        let answer_tokens = answer_tokens(request, pools, pool);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "an estimate")]
        let tokens = is_background.then_some(request.prompt_tokens + answer_tokens as usize);
        if !is_new {
            return (tokens, 0.0);
        }
        let speed = pools.speed(pool);
        let usual_s = match request.leg {
            Leg::Whole | Leg::Prefill => {
                prompt_s(&speed, prefill) + answer_s(&speed, request.prompt_tokens, answer_tokens)
            }
            Leg::Decode => answer_s(&speed, request.prompt_tokens, answer_tokens),
        };
        let taken_s = usual_s * f64::from(worker.load.queue().ratio);
        let spare = pools.spare(pool, request.leg.role());
        if is_background {
            spare.give(taken_s);
        } else {
            spare.take(taken_s, now.as_secs_f64());
        }
        (tokens, taken_s)
    }

    /// Of the candidates for a request in the background keeps who has time and memory to spare.
    pub(super) fn keep_spare(
        &self,
        fleet: &FleetSnapshot,
        request: &RequestView<'_>,
        (candidates, pools): (&mut Candidates, &mut Pools),
        (among, now): (Among<'_>, Duration),
    ) -> Result<(), PickError> {
        let load = self.background_load.unwrap_or(1.0);
        // The time of those where it may not go is the pool's too.
        let left_out = match among {
            Among::Untried(tried) => tried.len(),
            Among::Anyone => 0,
        };
        let all = candidates.workers() + left_out as f64;
        let parts: SmallVec<[Part; 1]> = candidates.parts().collect();
        for Part { pool, of_candidates, of_pool } in parts {
            let workers = of_candidates * all / of_pool.max(f64::MIN_POSITIVE);
            if !pools.spare(pool, request.leg.role()).is_there(load, workers, now.as_secs_f64()) {
                candidates.leave_out(pool);
            }
        }
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "an estimate")]
        let answer_tokens = |pool| answer_tokens(request, pools, pool) as usize;
        candidates.keep_spare(fleet, request, answer_tokens);
        if candidates.list.is_empty() { Err(PickError::NoneSpare) } else { Ok(()) }
    }
}
