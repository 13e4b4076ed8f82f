//! What another router has decided, as it tells: booked here as if this one had.
//!
//! Routers in front of the same workers that tell each other what they send decide alike, but for what is on its way between them: each has the
//! ledger, the queues, the tree and the speeds that one router in front of all would have. Nothing of it needs a word from the workers.

use std::sync::Arc;
use std::time::Duration;

use roundhouse_types::RouterPlace;

use super::{Decider, State};
use crate::ledger::{Booking, HeldPrompt, Lease};
use crate::policy::Candidate;
use crate::pools::Part;
use crate::prefix::index::Basis;
use crate::prefix::recomputed::Capacity;
use crate::request::{Leg, RequestView};
use crate::worker::Worker;

/// Another router's request at a worker.
#[derive(Debug)]
pub struct Booked {
    /// Whose.
    pub worker: Arc<Worker>,
    /// What it occupies there, until dropped.
    pub lease: Lease,
    /// Prompt tokens that the worker is expected to find in its cache.
    pub hit_tokens: usize,
    /// What that expectation was built upon.
    pub basis: Basis,
}

/// How long it is taken to take until one router knows what another has done: what is collected, a way through a network, and a moment to book it.
const LATE: Duration = Duration::from_millis(5);

/// The routers that tell each other.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Others {
    /// This one's place among all of them.
    pub(super) place: RouterPlace,
}

impl Others {
    /// How many there are besides this one.
    pub(super) fn count(&self) -> u32 {
        self.place.count.saturating_sub(1)
    }

    /// For how long nothing is known of what others decide; `None` where there are none.
    pub(super) fn unseen_for(&self) -> Option<Duration> {
        (self.count() > 0).then_some(LATE)
    }
}

impl Decider {
    /// From now on so many other routers tell this one what they do. While a word is on its way several may decide the same of the same: each has a
    /// `place` of its own.
    pub fn is_told(&self, place: RouterPlace) {
        self.lock().others = Others { place };
    }

    /// Another router has sent a request to `worker`, or has it in line for it, if it may wait: from `now` on it is in flight there, until what is
    /// returned is dropped. What is sent is entered as held there. `None` if the worker has left.
    #[must_use]
    pub fn book(&self, worker: &Arc<Worker>, request: &RequestView<'_>, now: Duration) -> Option<Booked> {
        self.book_there(worker, request, now, true)
    }

    /// The same of one that has come before, and is told of once more: it was in line and has been decided anew, or whoever hears of it now has not
    /// heard it all.
    #[must_use]
    pub fn book_again(
        &self,
        worker: &Arc<Worker>,
        request: &RequestView<'_>,
        now: Duration,
    ) -> Option<Booked> {
        self.book_there(worker, request, now, false)
    }

    fn book_there(
        &self,
        worker: &Arc<Worker>,
        request: &RequestView<'_>,
        now: Duration,
        is_new: bool,
    ) -> Option<Booked> {
        let mut state = self.lock_for(worker)?;
        let State { index, recomputed, follow_ups, pools, picks, .. } = &mut *state;
        index.catch_up();
        let hits = self.look_up(index, request);
        let pool = worker.pool();
        let speed = pools.speed(pool);
        let mut there = Candidate::new(worker.slot);
        there.hit(request, hits.blocks(worker.slot), &speed);
        if is_new && request.leg != Leg::Decode {
            if !self.waits_for_spare(request) {
                pools.arrival(now, std::iter::once(Part { pool, of_candidates: 1.0, of_pool: 1.0 }));
            }
            pools.unseen(pool).told(now, LATE, request.blocks.last().copied());
            follow_ups.see(request.model, self.whole(request), hits.deepest());
            if !follow_ups.is_turn(self.whole(request), hits.deepest()) {
                pools.popularity_mut(pool).see(self.whole(request), hits.deepest(), now);
            }
        }
        *picks += 1;
        let tokens = worker.reports.kv_capacity_tokens().unwrap_or(0);
        let capacity = Capacity { worker: tokens, fleet: recomputed.fleet_tokens() };
        let prefill = there.prefill(request);
        let (background_tokens, taken_s) = self.note_time(pools, (worker, request, prefill), (is_new, now));
        let booking = Booking {
            pick: *picks,
            now,
            context_tokens: request.prompt_tokens,
            held: HeldPrompt::of(request),
            prefill,
            speed,
            room: recomputed.room(worker.slot, capacity),
            may_wait_since: request.may_wait_since,
            answer: request.answer,
            adapter: worker.adapter(request.model),
            siblings: worker.load.siblings(request, there.hit_blocks as usize, &speed),
            whose: request.precedence,
            background_tokens,
            taken_s,
            due_in_s: 0.0,
        };
        let mut lease = Lease::reserve_for_another(&worker.load, booking);
        let mut basis = Basis::default();
        // What is in line there is held nowhere yet, even if it would be sent at once from here.
        if self.reads_prefixes() && request.may_wait_since.is_none() {
            let new = (request.blocks_after(there.hit_blocks as usize), there.new_tokens(request));
            (basis, lease.in_flight) = self.enter((index, recomputed), worker, (request, &hits), new);
        }
        Some(Booked { worker: Arc::clone(worker), lease, hit_tokens: there.hit_tokens as usize, basis })
    }

    /// Another router's request that was in line has been sent `now`: enters the prompt as held by its worker.
    pub fn goes_elsewhere(&self, booked: &mut Booked, request: &RequestView<'_>, now: Duration) {
        let Booked { worker, lease, hit_tokens, basis } = booked;
        self.goes_to(worker, (lease, hit_tokens, basis), request, now);
    }
}
