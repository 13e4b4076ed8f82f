//! From a request to a reserved worker, in one step under one lock.

mod candidates;
pub mod demand;
mod nobody;
mod spare;
mod split;
mod told;

use nobody::why_nobody;
pub use split::SplitCosts;
pub use told::Booked;
use told::Others;

use std::sync::Arc;
use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use roundhouse_types::BlockHash;

use crate::adapters::AdapterOutlook;
use crate::fleet::FleetSnapshot;
use crate::health::Trial;
use crate::ledger::{Booking, HeldPrompt, Lease};
use crate::models::PoolNumber;
use crate::policy::{Candidate, PickError, Policy};
use crate::pools::Pools;
use crate::prefix::feed::CacheChange;
use crate::prefix::follow_ups::FollowUps;
use crate::prefix::index::{Basis, Comparison, InFlight};
use crate::prefix::popularity::Followers;
use crate::prefix::recomputed::Recomputed;
use crate::prefix::tree::{KeptBlocks, TreeLimits, WorkerTells};
use crate::prefix::{Path, PrefixHits, PrefixIndex};
use crate::reports::{CacheTrust, Reports};
use crate::request::{Answer, Leg, PromptUse, RequestView};
use crate::speed::{PrefillSpeed, Siblings};
use crate::sync::{Mutex, MutexGuard, lock_soon};
use crate::worker::{Worker, WorkerSlot};
use candidates::{Candidates, Eligible, Learned, Moment, Sought};

/// Blocks that are forgotten at a time: some 200 µs in which nobody else can pick.
const FORGET_BLOCKS: usize = 512;
/// Of what is computed, what has been evicted everywhere a short time before, from which on no more copies are made of what many ask for.
const MUCH_LOST: f64 = 0.2;
/// Paths that are put back at a time.
const PUT_BACK_PATHS: usize = 16;

/// Makes decisions. Pick, reservation and the entry in the tree happen together, so that of two requests at once the
/// second sees the first.
pub struct Decider {
    policy: Box<dyn Policy>,
    /// What engines keep in their hosts' memory, in times what their KV caches hold.
    host_caches: f64,
    /// See [`Decider::with_decode_weight`].
    decode_weight: f64,
    /// See [`Decider::with_background_load`].
    background_load: Option<f64>,
    state: Mutex<State>,
}

/// Not in the line of memory with the lock, which whoever waits for it takes from whoever has it.
#[repr(align(128))]
struct State {
    index: PrefixIndex,
    recomputed: Recomputed,
    follow_ups: FollowUps,
    pools: Pools,
    others: Others,
    picks: u64,
    rng: SmallRng,
    candidates: Candidates,
}

/// A worker, reserved.
#[derive(Debug)]
pub struct Decided {
    /// Who gets the request.
    pub worker: Arc<Worker>,
    /// What it occupies there, until dropped.
    pub lease: Lease,
    /// What its outcome says of the worker's health.
    pub trial: Trial,
    /// Prompt tokens that the worker is expected to find in its cache.
    pub hit_tokens: usize,
    /// What that expectation was built upon: blocks of the prompt that the tree knew the worker to hold before this request.
    pub basis: Basis,
}

/// Adds to candidates what workers have reported, given the fleet's speed as learned.
pub type Learn<'a> = dyn FnMut(&mut [Candidate], &PrefillSpeed) + 'a;

/// Who asks for a worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Asks {
    /// A request that comes.
    First,
    /// One that is in line.
    Again,
    /// One in the background, for time to spare.
    ForSpare,
}

/// Which workers may be picked.
#[derive(Clone, Copy, Debug)]
pub enum Among<'a> {
    /// Usable ones that have not been tried; where none is left, and most are down by their probes alone, those of them.
    Untried(&'a [WorkerSlot]),
    /// All that an operator has not taken out, even if they are down: each has been tried, and one that refused a
    /// connection a moment ago may listen again.
    Anyone,
}

/// Why a request would go where: an answer to `POST /explain`.
#[derive(Debug)]
pub struct Explanation {
    /// The policy's name.
    pub policy: &'static str,
    /// Index of the pick in `candidates`.
    pub picked: usize,
    /// Turns that are expected to follow in its session.
    pub later_turns: f64,
    /// Tokens its answer is expected to have.
    pub answer_tokens: f64,
    /// Who is expected to come for the same prefix.
    pub followers: Followers,
    /// Everyone who could have been picked.
    pub candidates: Vec<Explained>,
}

/// One of those who could have been picked.
#[derive(Debug)]
pub struct Explained {
    /// Which worker.
    pub worker: Arc<Worker>,
    /// As it stands.
    pub candidate: Candidate,
    /// What the request's adapter would meet.
    pub adapter: AdapterOutlook,
    /// In the policy's unit.
    pub cost: f64,
}

impl Decider {
    /// A decider for `policy` with an empty tree. `seed` drives the policies that draw lots.
    #[must_use]
    pub fn new(policy: Box<dyn Policy>, limits: TreeLimits, seed: u64) -> Self {
        let rng = SmallRng::seed_from_u64(seed);
        let state = State {
            index: PrefixIndex::new(limits),
            recomputed: Recomputed::default(),
            follow_ups: FollowUps::default(),
            pools: Pools::default(),
            others: Others::default(),
            picks: 0,
            rng,
            candidates: Candidates::default(),
        };
        Self { policy, host_caches: 0.0, decode_weight: 1.0, background_load: None, state: Mutex::new(state) }
    }

    /// The same where engines keep what their KV caches evict in their hosts' memory, `times` as much as the caches hold: it is still found there.
    #[must_use]
    pub fn with_host_caches(self, times: f64) -> Self {
        Self { host_caches: times, ..self }
    }

    /// The same where, for [`Decider::splits`], a second that somebody who decodes waits counts `weight` times one before a first token.
    #[must_use]
    pub fn with_decode_weight(self, weight: f64) -> Self {
        Self { decode_weight: weight, ..self }
    }

    /// The same where requests with a priority below zero get what time others leave, up to this part of all that workers have, from 0 to 1. `None` where
    /// they are requests like others, of a low priority.
    #[must_use]
    pub fn with_background_load(self, background_load: Option<f64>) -> Self {
        Self { background_load, ..self }
    }

    /// Whether a request is for [`Decider::decide_spare`].
    #[must_use]
    pub fn waits_for_spare(&self, request: &RequestView<'_>) -> bool {
        self.background_load.is_some() && request.precedence.priority.is_background()
    }

    /// The policy that decides.
    #[must_use]
    pub fn policy(&self) -> &dyn Policy {
        &*self.policy
    }

    /// Picks a worker `among` those that may serve the request, reserves it, and enters the prompt as held there. `now`
    /// is a reading of the clock by which outcomes are reported to [`Trial`].
    ///
    /// # Errors
    /// [`PickError`] when nobody is left.
    pub fn decide(
        &self,
        fleet: &FleetSnapshot,
        request: &RequestView<'_>,
        among: Among<'_>,
        now: Duration,
    ) -> Result<Decided, PickError> {
        self.decide_knowing(fleet, request, among, now, &mut |_, _| {})
    }

    /// As [`Decider::decide`], when more is known of the workers than what this router did: `learn` adds to the candidates
    /// what workers have reported, before the policy sees them.
    ///
    /// # Errors
    /// As [`Decider::decide`].
    pub fn decide_knowing(
        &self,
        fleet: &FleetSnapshot,
        request: &RequestView<'_>,
        among: Among<'_>,
        now: Duration,
        learn: &mut Learn<'_>,
    ) -> Result<Decided, PickError> {
        self.place(fleet, request, (among, now), Asks::First, learn)
    }

    /// Picks a worker that has time to spare for a background request.
    ///
    /// # Errors
    /// [`PickError::NoneSpare`] while there is none, and as [`Decider::decide`].
    pub fn decide_spare(
        &self,
        fleet: &FleetSnapshot,
        request: &RequestView<'_>,
        among: Among<'_>,
        now: Duration,
    ) -> Result<Decided, PickError> {
        self.decide_spare_knowing(fleet, request, among, now, &mut |_, _| {})
    }

    /// As [`Decider::decide_spare`], with what [`Decider::decide_knowing`] is told.
    ///
    /// # Errors
    /// As [`Decider::decide_spare`].
    pub fn decide_spare_knowing(
        &self,
        fleet: &FleetSnapshot,
        request: &RequestView<'_>,
        among: Among<'_>,
        now: Duration,
        learn: &mut Learn<'_>,
    ) -> Result<Decided, PickError> {
        self.place(fleet, request, (among, now), Asks::ForSpare, learn)
    }

    /// Decides once more of a request that is in line, for it may be better off elsewhere by now. `before` is what was decided.
    ///
    /// # Errors
    /// As [`Decider::decide`].
    pub fn decide_again(
        &self,
        fleet: &FleetSnapshot,
        request: &RequestView<'_>,
        (before, among): (Decided, Among<'_>),
        now: Duration,
    ) -> Result<Decided, PickError> {
        self.decide_again_knowing(fleet, request, (before, among), now, &mut |_, _| {})
    }

    /// As [`Decider::decide_again`], with what [`Decider::decide_knowing`] is told.
    ///
    /// # Errors
    /// As [`Decider::decide`].
    pub fn decide_again_knowing(
        &self,
        fleet: &FleetSnapshot,
        request: &RequestView<'_>,
        (before, among): (Decided, Among<'_>),
        now: Duration,
        learn: &mut Learn<'_>,
    ) -> Result<Decided, PickError> {
        let Decided { mut lease, .. } = before;
        let taken_s = lease.take_taken_s();
        drop(lease);
        let mut decided = self.place(fleet, request, (among, now), Asks::Again, learn)?;
        decided.lease.note_taken_s(taken_s);
        Ok(decided)
    }

    /// A request that was in line is sent `now`: enters the prompt as held by its worker.
    pub fn goes(&self, decided: &mut Decided, request: &RequestView<'_>, now: Duration) {
        let Decided { worker, lease, hit_tokens, basis, .. } = decided;
        self.goes_to(worker, (lease, hit_tokens, basis), request, now);
    }

    fn goes_to(
        &self,
        worker: &Worker,
        (lease, hit_tokens, basis): (&mut Lease, &mut usize, &mut Basis),
        request: &RequestView<'_>,
        now: Duration,
    ) {
        lease.goes(now);
        if self.reads_prefixes() {
            let mut state = self.lock();
            if worker.has_left() {
                // What it is given now would be found in the cache of the next one with its slot.
                return;
            }
            let State { index, recomputed, .. } = &mut *state;
            index.catch_up();
            let hits = index.hits(request.blocks);
            let hit_blocks = hits.blocks(worker.slot);
            *hit_tokens = request.covered_tokens(hit_blocks);
            let new_tokens = request.prompt_tokens.saturating_sub(*hit_tokens);
            let new = (request.blocks_after(hit_blocks), new_tokens);
            (*basis, lease.in_flight) = self.enter((index, recomputed), worker, (request, &hits), new);
        }
    }

    /// A worker is sent a prompt, and has to compute of it so many `new` blocks and tokens.
    fn enter(
        &self,
        (index, recomputed): (&mut PrefixIndex, &mut Recomputed),
        worker: &Worker,
        (request, hits): (&RequestView<'_>, &PrefixHits),
        (new_blocks, new_tokens): (&[BlockHash], usize),
    ) -> (Basis, Option<InFlight>) {
        if request.leg != Leg::Decode {
            let copied = hits.deepest().saturating_sub(request.blocks.len() - new_blocks.len());
            recomputed.see((worker.slot, worker.pool()), new_blocks, new_tokens, copied);
        }
        index.enter(worker.slot, (request.path(), hits), self.tells(&worker.reports, request))
    }

    fn place(
        &self,
        fleet: &FleetSnapshot,
        request: &RequestView<'_>,
        (among, now): (Among<'_>, Duration),
        asks: Asks,
        learn: &mut Learn<'_>,
    ) -> Result<Decided, PickError> {
        let mut eligible = Eligible::new(fleet, request, among);
        let mut counts = asks == Asks::First;
        loop {
            let mut state = self.lock();
            let State { index, recomputed, follow_ups, pools, others, picks, rng, candidates } = &mut *state;
            index.catch_up();
            let hits = self.look_up(index, request);
            let moment = self.moment(fleet, (now, request), pools);
            let adapter = moment.adapter;
            let sought = Sought { request, eligible: &eligible, moment, hits: &hits };
            candidates.gather(fleet, &sought, self.policy.most_workers(), &mut || rng.random::<f64>());
            if candidates.list.is_empty() {
                drop(state);
                eligible = eligible.with_suspects(fleet).ok_or_else(|| why_nobody(fleet, request))?;
                continue;
            }
            if std::mem::take(&mut counts) && request.leg != Leg::Decode {
                pools.arrival(now, candidates.parts());
            }
            self.add_what_is_asked_for(fleet, request, (index, candidates));
            let (speed, pool) = (candidates.speed(), candidates.pool());
            learn(&mut candidates.list, &speed);
            let arrivals_per_s = pools.arrivals_per_s(candidates.parts());
            if asks == Asks::ForSpare {
                self.keep_spare(fleet, request, (candidates, pools), (among, now))?;
            }
            let whole = self.whole(request);
            let learned = Learned {
                arrivals_per_s,
                later_turns: match request.leg {
                    Leg::Decode => follow_ups.later_turns(request.model, whole, hits.deepest()),
                    Leg::Whole | Leg::Prefill => follow_ups.see(request.model, whole, hits.deepest()),
                },
                answer_tokens: answer_tokens(request, pools, pool),
                followers: followers((pools, recomputed), pool, (whole, &hits), now),
                unseen: match candidates.unseen_for().max(others.unseen_for()) {
                    Some(age) => pools.unseen(pool).at(now, age, request.blocks.last().copied()),
                    None => pools.mean_unseen(pool),
                },
                others: *others,
                speed,
            };
            if asks != Asks::Again && !follow_ups.is_turn(whole, hits.deepest()) {
                pools.popularity_mut(pool).see(whole, hits.deepest(), now);
            }
            let ring = &|| fleet.ring();
            let choice = candidates.choice(ring, learned);
            let picked = choice.candidates[self.policy.pick(request, &choice, rng)];
            let worker = &fleet.workers()[picked.place as usize];
            let Some(trial) = candidates.begin_trial(worker, now) else {
                // Another request has just become the probe of this worker's breaker: it is no candidate any more.
                continue;
            };
            pools.unseen(pool).picked(picked.own_s);
            *picks += 1;
            let may_wait_since =
                request.may_wait_since.filter(|_| self.policy.binds_late() && asks != Asks::ForSpare);
            let speed = if picked.pool == pool { speed } else { pools.speed(picked.pool) };
            let prefill = picked.prefill(request);
            let (background_tokens, taken_s) =
                self.note_time(pools, (worker, request, prefill), (asks != Asks::Again, now));
            let booking = Booking {
                pick: *picks,
                now,
                context_tokens: request.prompt_tokens,
                held: HeldPrompt::of(request),
                prefill,
                speed,
                room: recomputed.room(picked.slot, candidates.capacity(&picked)),
                may_wait_since,
                answer: request.answer,
                adapter,
                siblings: match may_wait_since {
                    Some(_) => worker.load.siblings(request, picked.hit_blocks as usize, &speed),
                    None => Siblings::default(),
                },
                whose: request.precedence,
                background_tokens,
                taken_s,
                due_in_s: picked.queued_s + picked.own_s,
            };
            let mut lease = Lease::reserve(&worker.load, booking);
            let hit_tokens = picked.hit_tokens as usize;
            // What waits in line is nowhere yet, and goes elsewhere maybe.
            let basis = if self.reads_prefixes() && !lease.waits() {
                let new_blocks = request.blocks_after(picked.hit_blocks as usize);
                let new = (new_blocks, picked.new_tokens(request));
                let entered = self.enter((index, recomputed), worker, (request, &hits), new);
                lease.in_flight = entered.1;
                entered.0
            } else {
                Basis::default()
            };
            return Ok(Decided { worker: Arc::clone(worker), lease, trial, hit_tokens, basis });
        }
    }

    /// Of the workers that could be picked for a request, and of these where `may_serve`, those with the fewest requests; who fails at present comes last.
    #[must_use]
    pub fn least_busy(
        fleet: &FleetSnapshot,
        request: &RequestView<'_>,
        may_serve: impl Fn(&Arc<Worker>) -> bool,
        (most, now): (usize, Duration),
    ) -> Vec<Arc<Worker>> {
        let eligible = Eligible::new(fleet, request, Among::Untried(&[]));
        let rows = fleet.rows(0..fleet.count()).filter(|row| eligible.has(fleet, *row));
        let mut workers: Vec<_> =
            rows.map(|row| fleet.worker(row)).filter(|worker| may_serve(worker)).collect();
        workers.sort_by_cached_key(|worker| {
            (worker.health.standing(now, &mut || 1.0), worker.load.read().requests)
        });
        workers.into_iter().take(most).cloned().collect()
    }

    /// Whether [`Decider::decide`] would find somebody.
    #[must_use]
    pub fn can_decide(fleet: &FleetSnapshot, request: &RequestView<'_>, among: Among<'_>) -> bool {
        let eligible = Eligible::new(fleet, request, among);
        eligible.has_any(fleet)
            || eligible.with_suspects(fleet).is_some_and(|eligible| eligible.has_any(fleet))
    }

    /// What would be decided, and why, of the whole fleet; changes nothing. A worker that has just come back is a candidate like any other,
    /// while [`Decider::decide`] leaves it out for most requests.
    ///
    /// # Errors
    /// As [`Decider::decide`].
    pub fn explain(
        &self,
        fleet: &FleetSnapshot,
        request: &RequestView<'_>,
        now: Duration,
    ) -> Result<Explanation, PickError> {
        let mut candidates = Candidates::default();
        let state = self.lock();
        let hits = self.look_up(&state.index, request);
        let mut eligible = Eligible::new(fleet, request, Among::Untried(&[]));
        if !eligible.has_any(fleet) {
            eligible = eligible.with_suspects(fleet).ok_or_else(|| why_nobody(fleet, request))?;
        }
        let moment = self.moment(fleet, (now, request), &state.pools);
        let sought = Sought { request, eligible: &eligible, moment, hits: &hits };
        candidates.gather(fleet, &sought, u32::MAX, &mut || 0.0);
        if candidates.list.is_empty() {
            drop(state);
            return Err(why_nobody(fleet, request));
        }
        self.add_what_is_asked_for(fleet, request, (&state.index, &mut candidates));
        let ring = &|| fleet.ring();
        let learned = self.known(&state, &candidates, (request, &hits), now);
        let choice = candidates.choice(ring, learned);
        let costs = self.policy.costs(request, &choice);
        let picked = self.policy.pick(request, &choice, &mut state.rng.clone());
        let explained = |(at, cost)| {
            let candidate: Candidate = choice.candidates[at];
            let worker = Arc::clone(&fleet.workers()[candidate.place as usize]);
            Explained { worker, candidate, adapter: choice.adapter(at), cost }
        };
        Ok(Explanation {
            policy: self.policy.name(),
            picked,
            later_turns: learned.later_turns,
            answer_tokens: learned.answer_tokens,
            followers: learned.followers,
            candidates: costs.into_iter().enumerate().map(explained).collect(),
        })
    }

    /// What has been learned that a choice among `candidates` goes by, for one that changes nothing.
    fn known(
        &self,
        state: &State,
        candidates: &Candidates,
        (request, hits): (&RequestView<'_>, &PrefixHits),
        now: Duration,
    ) -> Learned {
        Learned {
            arrivals_per_s: state.pools.arrivals_per_s(candidates.parts()),
            later_turns: state.follow_ups.later_turns(request.model, self.whole(request), hits.deepest()),
            answer_tokens: answer_tokens(request, &state.pools, candidates.pool()),
            followers: followers(
                (&state.pools, &state.recomputed),
                candidates.pool(),
                (self.whole(request), hits),
                now,
            ),
            unseen: state.pools.mean_unseen(candidates.pool()),
            others: state.others,
            speed: candidates.speed(),
        }
    }

    /// An attempt failed before its first byte: the worker does not hold what was entered for it, nor has it taken any of its time. The lease pins that no
    /// more.
    pub fn take_back(&self, lease: &mut Lease, worker: &Worker, path: &[BlockHash], basis: Basis) {
        lease.failed();
        let Some(mut state) = self.lock_for(worker) else { return };
        let spare = state.pools.spare(lease.pool(), worker.spec.role);
        let taken_s = lease.take_taken_s();
        if lease.is_background() {
            spare.give_back(taken_s);
        } else {
            spare.take_back(taken_s);
        }
        if self.reads_prefixes() {
            state.index.take_back(lease.in_flight.take(), worker.slot, path, basis.known_blocks);
        }
    }

    /// A reply says how much of its prompt `worker` found in its cache: what the tree knows of that worker is corrected by it,
    /// unless the worker's own events tell. Returns how many blocks were forgotten.
    pub fn compare(&self, worker: &Worker, basis: Basis, comparison: Comparison) -> usize {
        if !self.reads_prefixes() || worker.reports.trust() == CacheTrust::Exact {
            return 0;
        }
        self.lock_for(worker).map_or(0, |mut state| state.index.compare(worker.slot, basis, comparison))
    }

    /// A worker has left the fleet. From now on nobody picks it, not even from an older snapshot, and nothing that is still told of it touches
    /// its slot, which the next worker may have once this returns.
    pub fn retire(&self, worker: &Worker) {
        // Before the lock is taken: who has it finds out, or has entered what is forgotten here.
        worker.leave();
        self.forget_slot(worker.slot, || Some(self.lock()));
    }

    /// A worker has gone down or restarted: its cache is gone. Takes time proportional to what it held, in slices between which others
    /// pick.
    pub fn forget(&self, worker: &Worker) {
        self.forget_slot(worker.slot, || self.lock_for(worker));
    }

    fn forget_slot<'a>(&'a self, slot: WorkerSlot, lock: impl Fn() -> Option<MutexGuard<'a, State>>) {
        let slices = lock().map_or(0, |state| state.index.tree().worker_blocks(slot) / FORGET_BLOCKS);
        for _ in 0..slices {
            let forgotten = lock().map_or(0, |mut state| state.index.forget_oldest(slot, FORGET_BLOCKS));
            if forgotten < FORGET_BLOCKS {
                break;
            }
        }
        if let Some(mut state) = lock() {
            state.index.forget(slot);
            state.recomputed.forget(slot);
        }
    }

    /// Adds to `kept` what `worker` is taken to hold. Returns the ends of its paths, the one that was used longest ago first.
    #[must_use]
    pub fn keep(&self, worker: &Worker, kept: &mut KeptBlocks) -> Vec<u32> {
        self.lock_for(worker).map(|state| state.index.keep(worker.slot, kept)).unwrap_or_default()
    }

    /// A router before this one has left what `worker` held: its paths, the one that was used longest ago first. Others pick in between.
    pub fn put_back(&self, worker: &Worker, kept: &KeptBlocks, ends: &[u32]) {
        if !self.reads_prefixes() {
            return;
        }
        for few in ends.chunks(PUT_BACK_PATHS) {
            let Some(mut state) = self.lock_for(worker) else { return };
            state.index.put_back(worker.slot, kept, few);
        }
    }

    /// A worker's own events say what they say of its cache.
    pub fn apply(&self, worker: &Worker, change: &CacheChange) {
        let (slot, Some(mut state)) = (worker.slot, self.lock_for(worker)) else { return };
        let State { index, recomputed, .. } = &mut *state;
        match change {
            CacheChange::Routed { path, cut } => {
                index.catch_up();
                let hits = index.hits(path);
                // No capacity: its events tell what it holds.
                let tells = WorkerTells { capacity: None, blocks: true };
                index.enter(slot, (Path::new(path, *cut), &hits), tells);
            }
            CacheChange::Gone(blocks) => index.withdraw(slot, blocks),
            CacheChange::Settled { path, held } => index.take_back(None, slot, path, *held),
            CacheChange::Cleared => index.clear(slot),
            CacheChange::Restarted => {
                index.forget(slot);
                recomputed.forget(slot);
            }
        }
    }

    /// Forgets what has not been used since the tree's clock stood at `clock`, a reading of [`Decider::tree_clock`].
    pub fn forget_unused_since(&self, clock: u32) {
        self.lock().index.forget_unused_since(clock);
    }

    /// The tree's clock: how many routes have been entered, wrapping.
    #[must_use]
    pub fn tree_clock(&self) -> u32 {
        self.lock().index.tree().clock()
    }

    /// Blocks held in the tree, over all workers.
    #[must_use]
    pub fn tree_blocks(&self) -> usize {
        self.lock().index.tree().held_blocks()
    }

    /// How much of what a worker computed of late had been computed a short time before, as [`Recomputed::share`].
    #[must_use]
    pub fn recomputed_share(&self, slot: WorkerSlot) -> f64 {
        self.lock().recomputed.share(slot)
    }

    /// The prompt's blocks, if all of them are there.
    fn whole<'r>(&self, request: &RequestView<'r>) -> &'r [BlockHash] {
        if self.reads_prefixes() { request.blocks } else { &[] }
    }

    fn look_up(&self, index: &PrefixIndex, request: &RequestView<'_>) -> PrefixHits {
        if self.reads_prefixes() { index.hits(request.blocks) } else { PrefixHits::default() }
    }

    fn moment<'a>(
        &self,
        fleet: &FleetSnapshot,
        (now, request): (Duration, &RequestView<'_>),
        pools: &'a Pools,
    ) -> Moment<'a> {
        let adapter = fleet.adapter(request.model);
        Moment::new(now, (request, adapter), self.reads_prefixes().then_some(pools))
    }

    /// Adds to the candidates what only some policies go by.
    fn add_what_is_asked_for(
        &self,
        fleet: &FleetSnapshot,
        request: &RequestView<'_>,
        (index, candidates): (&PrefixIndex, &mut Candidates),
    ) {
        if self.policy.counts_shared() {
            candidates.add_shared(fleet, &HeldPrompt::of(request));
        }
        if self.policy.wants_tree_sizes() {
            for candidate in &mut candidates.list {
                let blocks = index.tree().worker_blocks(candidate.slot);
                candidate.tree_blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
            }
        }
    }

    /// A worker's first token for a request has come `now`: its prefill is no longer owed, and what it took is learned from.
    pub fn first_token(&self, lease: &mut Lease, now: Duration) {
        let (pools, pool) = (&mut self.lock().pools, lease.pool());
        if let Some(observation) = lease.first_token_at(now, &pools.speed(pool)) {
            pools.learn(pool, &observation);
        }
    }

    /// By how many seconds a first token that comes `now` is later than was expected when the worker was picked, negative if earlier; `None`
    /// where nothing was, by policies that do not go by hits.
    #[must_use]
    pub fn late_s(&self, lease: &Lease, now: Duration) -> Option<f64> {
        self.reads_prefixes().then(|| lease.late_s(now))
    }

    /// A worker's whole answer to a request has come `now`, not as a stream: its prefill is no longer owed, and took no longer.
    pub fn whole_answer(&self, lease: &mut Lease, now: Duration) {
        if let Some(answer) = lease.whole_answer_at(now) {
            self.lock().pools.learn_whole(lease.pool(), &answer);
        }
    }

    /// A worker's answer has ended, after so many tokens.
    pub fn answered(&self, worker: &Worker, tokens: usize) {
        self.lock().pools.answered(worker.pool(), tokens);
    }

    /// How fast workers like this one compute prompts, as learned so far.
    #[must_use]
    pub fn prefill_speed(&self, worker: &Worker) -> PrefillSpeed {
        self.lock().pools.speed(worker.pool())
    }

    /// Whether the policy goes by hits, so that there are any.
    #[must_use]
    pub fn reads_prefixes(&self) -> bool {
        self.policy.prompt_use() == PromptUse::Whole
    }

    /// What the tree is to know of a worker's cache. One that tells what it evicts needs no bound.
    fn tells(&self, reports: &Reports, request: &RequestView<'_>) -> WorkerTells {
        let trust = reports.trust();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "saturates, which is no bound"
        )]
        let in_host = |tokens: usize| (tokens as f64 * self.host_caches) as usize;
        let with_host = |tokens: usize| tokens.saturating_add(in_host(tokens));
        let tokens = reports.kv_capacity_tokens().filter(|_| trust != CacheTrust::Exact).map(with_host);
        WorkerTells {
            capacity: tokens.map(|tokens| request.size_of(tokens)),
            blocks: trust != CacheTrust::Learned,
        }
    }

    /// To change what is known of a worker; `None` if its slot is not its own any more.
    fn lock_for(&self, worker: &Worker) -> Option<MutexGuard<'_, State>> {
        let state = self.lock();
        (!worker.has_left()).then_some(state)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic while it was held left a tree that is at worst out of date.
        lock_soon(&self.state)
    }
}

/// What a request will add to the memory of a worker of that pool, besides its prompt. One that only computes prompts keeps no answers.
fn answer_tokens(request: &RequestView<'_>, pools: &Pools, pool: PoolNumber) -> f64 {
    match request.leg {
        Leg::Whole | Leg::Decode if request.answer != Answer::Nothing => pools.answer_tokens(pool),
        Leg::Whole | Leg::Decode | Leg::Prefill => 0.0,
    }
}

/// Who is expected to come for what somebody holds of a prompt. Nobody that counts where memory is short: what a copy evicts is asked for as well.
fn followers(
    (pools, recomputed): (&Pools, &Recomputed),
    pool: PoolNumber,
    (path, hits): (&[BlockHash], &PrefixHits),
    now: Duration,
) -> Followers {
    let popularity = pools.popularity(pool).filter(|_| recomputed.lost_share(pool) <= MUCH_LOST);
    popularity.map(|popularity| popularity.followers(path, hits.deepest(), now)).unwrap_or_default()
}

#[cfg(test)]
mod tests;
