//! The workers that may serve a request, as they stand: made of the table's rows, in one walk under the decider's lock.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use roundhouse_types::RouterPlace;

use super::Among;
use super::told::Others;
use crate::adapters::{Adapter, AdapterOutlook};
use crate::fleet::{FleetSnapshot, Member, Ring};
use crate::health::{Standing, Trial};
use crate::ledger::{HeldPrompt, LoadReading, usual_requests};
use crate::models::{MOST_POOLS, PoolNumber, Serving};
use crate::policy::{Candidate, Choice};
use crate::pools::{Part, Pools};
use crate::precedence::Precedence;
use crate::prefix::PrefixHits;
use crate::prefix::popularity::Followers;
use crate::prefix::recomputed::Capacity;
use crate::reports::{LoadReport, QueueSource};
use crate::request::{Leg, RequestView};
use crate::speed::{Prefill, PrefillSpeed, QueueReading, lapses_s};
use crate::sync::atomic::Ordering;
use crate::unseen::Unseen;
use crate::worker::{Role, Worker, is_draining, is_prefill, is_suspect, is_up, is_usable};

/// What it takes to move the KV of a token to another worker, in times what it takes to compute it: an 8B model's 144 KiB at 25 GB/s are 6 µs,
/// where its prefill takes 60.
const TRANSFER_SHARE: f64 = 0.1;

/// Of all there are, those whose standing is the best: so a worker whose breaker is open, or that is busy, is a candidate only if all are
/// like it. Kept between picks, for its room.
#[derive(Default)]
pub(super) struct Candidates {
    /// Indices of those for whom requests wait in line.
    with_lines: Vec<usize>,
    pub(super) list: Vec<Candidate>,
    /// What each of them said of its load last; empty where none says anything.
    reports: Vec<Option<LoadReport>>,
    /// What the request's adapter meets at each of them; empty where it is for none.
    outlooks: Vec<AdapterOutlook>,
    /// Of the prompt, tokens that requests in flight at each of them have too; empty where nobody asks.
    shared_tokens: Vec<u32>,
    standing: Rank,
    totals: Totals,
    /// What the caches of those have room for who were candidates and are none any more.
    left_out_tokens: u64,
    /// Of the fleet that was looked at.
    share: f64,
    /// Workers of that fleet.
    workers: u32,
    /// The first candidate's, by which all prompts are measured.
    usual: Option<Usual>,
    /// Usable workers of each pool that do not serve the model.
    elsewhere: Elsewhere,
    /// So many are in fleet order, in two parts: whoever is in the second comes first in the fleet.
    in_order: usize,
    /// Where the second begins, at the latest.
    turn: usize,
}

/// Of all candidates together.
#[derive(Clone, Copy, Debug, Default)]
struct Totals {
    requests: u64,
    prefilling: u64,
    busy: u64,
    context_tokens: u64,
    /// Pools that they are of, as bits.
    pools: u64,
}

impl Totals {
    #[inline]
    fn add(&mut self, one: &Candidate) {
        self.requests += u64::from(one.load.requests);
        self.prefilling += u64::from(one.load.prefilling);
        self.busy += u64::from(one.load.prefilling > 0);
        self.context_tokens += u64::from(one.load.context_tokens);
        self.pools |= 1 << (one.pool.index() % MOST_POOLS);
    }
}

/// What a pick goes by before any policy; the best first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
#[repr(u8)]
enum Rank {
    Ready,
    Warming,
    Cooling,
    Open,
    #[default]
    Down,
}

impl From<Standing> for Rank {
    fn from(standing: Standing) -> Self {
        match standing {
            Standing::Ready => Self::Ready,
            Standing::Warming => Self::Warming,
            Standing::Cooling => Self::Cooling,
            Standing::Open => Self::Open,
        }
    }
}

/// Of a worker of which there is something special.
#[cold]
fn rank(worker: &Worker, now: Duration, draw: &mut dyn FnMut() -> f64) -> Rank {
    if worker.is_up() { worker.health.standing(now, draw).into() } else { Rank::Down }
}

/// What is the same for all candidates of a pick.
pub(super) struct Moment<'a> {
    pub(super) now: Duration,
    /// How fast workers compute prompts; `None` for policies that do not go by time.
    pools: Option<&'a Pools>,
    now_s: f64,
    /// When the request came.
    arrived_s: f64,
    whose: Precedence,
    now_ms: u64,
    /// The whole prompt, with nothing cached.
    cold: Prefill,
    /// What the request is computed with, besides the model.
    pub(super) adapter: Option<Adapter>,
}

/// How fast workers of a pool compute prompts.
#[derive(Clone, Copy)]
struct Usual {
    pool: PoolNumber,
    speed: PrefillSpeed,
    /// What the whole prompt takes, with nothing cached.
    cold_s: f64,
}

impl<'a> Moment<'a> {
    pub(super) fn new(
        now: Duration,
        (request, adapter): (&RequestView<'_>, Option<Adapter>),
        pools: Option<&'a Pools>,
    ) -> Self {
        Self {
            adapter,
            now,
            pools,
            now_s: now.as_secs_f64(),
            arrived_s: request.may_wait_since.unwrap_or(now).as_secs_f64(),
            whose: request.precedence,
            now_ms: u64::try_from(now.as_millis()).unwrap_or(u64::MAX),
            cold: Prefill { new_tokens: request.prompt_tokens.max(1), cached_tokens: 0 },
        }
    }

    fn usual(&self, pool: PoolNumber) -> Usual {
        let speed = self.pools.map_or_else(PrefillSpeed::default, |pools| pools.speed(pool));
        Usual { pool, speed, cold_s: speed.seconds(self.cold) }
    }
}

/// Workers by their pools.
struct Elsewhere([u16; MOST_POOLS]);

impl Default for Elsewhere {
    fn default() -> Self {
        Self([0; MOST_POOLS])
    }
}

impl Candidates {
    /// Gathers those that may be picked, with what each holds of the prompt; none if nobody may. In a large fleet it stops once there are
    /// `most`, and adds as many of those that hold most.
    pub(super) fn gather(
        &mut self,
        fleet: &FleetSnapshot,
        sought: &Sought<'_>,
        most: u32,
        draw: &mut dyn FnMut() -> f64,
    ) {
        self.clear(Rank::Down);
        (self.usual, self.elsewhere) = (None, Elsewhere::default());
        let count = fleet.count();
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a place in the fleet")]
        let first = if most < count { (draw() * f64::from(count)) as u32 % count } else { 0 };
        let mut looked_at = self.gather_from(fleet, sought, (first..count, most), draw);
        self.turn = self.list.len();
        looked_at += self.gather_from(fleet, sought, (0..first, most), draw);
        self.in_order = self.list.len();
        self.share = f64::from(looked_at) / f64::from(count.max(1));
        self.workers = count;
        self.look_up(fleet, sought, most, draw);
        if sought.request.leg == Leg::Decode {
            self.take_over();
        }
        self.pass_by(fleet, &sought.moment);
        if !self.reports.is_empty() {
            self.reports.resize(self.list.len(), None);
        }
        self.outlooks.clear();
        if let Some(adapter) = sought.moment.adapter {
            let outlook = |one: &Candidate| {
                let load = &fleet.workers()[one.place as usize].load;
                load.adapter_places().map_or_else(AdapterOutlook::default, |_| load.adapter_outlook(adapter))
            };
            self.outlooks.extend(self.list.iter().map(outlook));
        }
    }

    /// Adds what each has in use of the prompt already.
    pub(super) fn add_shared(&mut self, fleet: &FleetSnapshot, prompt: &HeldPrompt) {
        let shared = |one: &Candidate| fleet.workers()[one.place as usize].load.shared_tokens(prompt);
        self.shared_tokens.clear();
        self.shared_tokens.extend(self.list.iter().map(shared));
    }

    /// Of those gathered keeps who has time and memory to spare, and a place for its adapter, for a request whose answer has at a worker of a pool so many
    /// tokens; nobody who is known to have prompts of others.
    pub(super) fn keep_spare(
        &mut self,
        fleet: &FleetSnapshot,
        request: &RequestView<'_>,
        answer_tokens: impl Fn(PoolNumber) -> usize,
    ) {
        let others_wait = |at: usize| {
            let report = self.reports.get(at).and_then(Option::as_ref);
            report.is_some_and(|report| report.others.waiting > 0)
        };
        let has_place = |at: usize| self.outlooks.get(at).is_none_or(|outlook| outlook.waits_for == 0);
        let has_spare = |(at, one): (usize, &Candidate)| {
            let capacity = Some(one.kv_capacity_tokens as usize).filter(|tokens| *tokens > 0);
            let load = &fleet.workers()[one.place as usize].load;
            let tokens = request.prompt_tokens + answer_tokens(one.pool);
            has_place(at) && !others_wait(at) && load.has_spare(tokens, one.new_tokens(request), capacity)
        };
        let kept: Vec<bool> = self.list.iter().enumerate().map(has_spare).collect();
        self.keep(&kept);
    }

    /// How many workers the candidates stand for, in all of the fleet.
    pub(super) fn workers(&self) -> f64 {
        self.in_order as f64 / self.share.max(f64::MIN_POSITIVE)
    }

    /// Leaves out all of a pool.
    pub(super) fn leave_out(&mut self, pool: PoolNumber) {
        let kept: Vec<bool> = self.list.iter().map(|one| one.pool != pool).collect();
        self.keep(&kept);
    }

    /// From here on nobody else is a candidate. How many workers they stand for is that of all that were gathered still, and nobody is found by his place
    /// any more.
    fn keep(&mut self, kept: &[bool]) {
        let left_out = self.list.iter().zip(kept).filter(|(_, kept)| !**kept);
        self.left_out_tokens += left_out.map(|(one, _)| u64::from(one.kv_capacity_tokens)).sum::<u64>();
        keep(&mut self.list, kept);
        keep(&mut self.reports, kept);
        keep(&mut self.outlooks, kept);
        keep(&mut self.shared_tokens, kept);
        self.totals = Totals::default();
        self.list.iter().for_each(|one| self.totals.add(one));
    }

    /// Returns how many workers it has looked at.
    fn gather_from(
        &mut self,
        fleet: &FleetSnapshot,
        sought: &Sought<'_>,
        (places, most): (Range<u32>, u32),
        draw: &mut dyn FnMut() -> f64,
    ) -> u32 {
        let mut looked_at = 0;
        for row in fleet.rows(places) {
            if self.list.len() >= most as usize && self.standing == Rank::Ready {
                break;
            }
            looked_at += 1;
            self.consider(fleet, row, sought, draw);
        }
        looked_at
    }

    #[inline]
    fn consider(
        &mut self,
        fleet: &FleetSnapshot,
        row: Member<'_>,
        Sought { eligible, moment, .. }: &Sought<'_>,
        draw: &mut dyn FnMut() -> f64,
    ) {
        if !eligible.may_be_picked(row) {
            return;
        }
        if !eligible.serves(fleet, row) {
            let others = &mut self.elsewhere.0[row.load.pool().index() % MOST_POOLS];
            *others = others.saturating_add(1);
            return;
        }
        let is_well = is_up(row.load.state.load(Ordering::Relaxed))
            && moment.now_ms >= row.load.ordinary_from_ms.load(Ordering::Relaxed);
        let rank = if is_well { Rank::Ready } else { rank(fleet.worker(row), moment.now, draw) };
        if rank < self.standing {
            self.clear(rank);
        }
        if rank == self.standing {
            self.add(fleet, row, moment);
        }
    }

    /// Adds what candidates hold of the prompt; and as candidates those who hold something and were not looked at: the deepest come first, and
    /// who is left out of those that hold less may be looked at by the next pick.
    fn look_up(
        &mut self,
        fleet: &FleetSnapshot,
        sought: &Sought<'_>,
        most: u32,
        draw: &mut dyn FnMut() -> f64,
    ) {
        let Sought { request, moment, hits, .. } = sought;
        if moment.pools.is_none() {
            return;
        }
        for (slot, blocks) in hits.iter() {
            let Some(place) = fleet.place(slot) else { continue };
            let known = self.find(place).or_else(|| {
                let before = self.list.len();
                if self.share < 1.0 && before - self.in_order < most as usize {
                    fleet.rows(place..place + 1).for_each(|row| self.consider(fleet, row, sought, draw));
                }
                (self.list.len() > before).then_some(before)
            });
            if let Some(at) = known {
                let speed = self.speed();
                self.list[at].hit(request, blocks, &speed);
            }
        }
    }

    /// The prompt is not computed there, but comes from another worker.
    fn take_over(&mut self) {
        for candidate in &mut self.list {
            candidate.own_s *= TRANSFER_SHARE;
            candidate.joins_step = true;
        }
    }

    /// Who goes after this request does not make it wait.
    fn pass_by(&mut self, fleet: &FleetSnapshot, moment: &Moment<'_>) {
        for at in self.with_lines.drain(..) {
            let candidate = &mut self.list[at];
            let load = &fleet.workers()[candidate.place as usize].load;
            let behind_s = load.behind_s(moment.whose, moment.arrived_s, candidate.own_s);
            candidate.queued_s = (candidate.queued_s - behind_s).max(0.0);
            candidate.line_s = (candidate.line_s - behind_s).max(0.0);
        }
    }

    fn clear(&mut self, standing: Rank) {
        self.list.clear();
        self.with_lines.clear();
        self.reports.clear();
        (self.standing, self.totals, self.left_out_tokens) = (standing, Totals::default(), 0);
    }

    #[inline]
    fn add(&mut self, fleet: &FleetSnapshot, row: Member<'_>, moment: &Moment<'_>) {
        if lapses_s(row.load).is_some_and(|at_s| at_s <= moment.now_s) {
            fleet.worker(row).load.lapse(moment.now);
        }
        let pool = row.load.pool();
        let load = LoadReading::of(row.load);
        let mut candidate = Candidate {
            place: row.place,
            by_address: row.by_address,
            pool,
            load,
            kv_capacity_tokens: row.load.kv_capacity_tokens.load(Ordering::Relaxed),
            ..Candidate::new(row.slot)
        };
        let usual = *self.usual.get_or_insert_with(|| moment.usual(pool));
        if moment.pools.is_some() {
            let queue = QueueReading::of(row.load);
            candidate.ratio = queue.ratio * unlike(&usual, pool, moment);
            candidate.joins_step = queue.joins_step;
            #[expect(clippy::cast_possible_truncation, reason = "a count, to seven digits")]
            let in_flight = usual_requests(row.load, moment.now_s) as f32;
            candidate.usual_requests = in_flight;
            candidate.queued_s = queue.left_s(moment.now_s);
            candidate.own_s = f64::from(candidate.ratio) * usual.cold_s;
            if queue.line_s > 0.0 {
                candidate.line_s = queue.line_s.into();
                self.with_lines.push(self.list.len());
            }
        }
        if row.load.tells_load.load(Ordering::Relaxed) > 0 {
            self.read_report(fleet.worker(row), moment.now);
        }
        self.totals.add(&candidate);
        self.list.push(candidate);
    }

    #[cold]
    fn read_report(&mut self, worker: &Worker, now: Duration) {
        self.reports.resize(self.list.len(), None);
        let mut report = worker.reports.load(now);
        if let Some(report) = &mut report {
            report.sent = worker.load.sent();
        }
        self.reports.push(report);
    }

    /// Where in the list the worker at that place of the fleet stands. In a small fleet most are at their own place.
    fn find(&self, place: u32) -> Option<usize> {
        let found = self.list.get(place as usize).filter(|candidate| candidate.place == place);
        if found.is_some() {
            return Some(place as usize);
        }
        let (gathered, turn) = (&self.list[..self.in_order], self.turn.min(self.in_order));
        let search = |part: &[Candidate]| part.binary_search_by_key(&place, |candidate| candidate.place).ok();
        search(&gathered[..turn]).or_else(|| Some(turn + search(&gathered[turn..])?))
    }

    /// How fast the first candidate and those like it compute prompts, by which the ratios of all are measured.
    pub(super) fn speed(&self) -> PrefillSpeed {
        self.usual.map_or_else(PrefillSpeed::default, |usual| usual.speed)
    }

    /// The pool of the first candidate, which is that of all, unless a request can go to workers of several kinds.
    pub(super) fn pool(&self) -> PoolNumber {
        self.usual.map(|usual| usual.pool).unwrap_or_default()
    }

    /// The pools that the candidates are of.
    pub(super) fn parts(&self) -> impl Iterator<Item = Part> {
        let all = self.list.len() as f64;
        let is_one = self.totals.pools.count_ones() == 1;
        let mut left = self.totals.pools;
        let present = std::iter::from_fn(move || {
            let number = u8::try_from(left.trailing_zeros()).ok().filter(|_| left != 0)?;
            left &= left - 1;
            Some(PoolNumber(number))
        });
        present.map(move |pool| {
            let of_pool = self.list.iter().filter(|one| one.pool == pool);
            let here = if is_one { all } else { of_pool.count() as f64 };
            let elsewhere = f64::from(self.elsewhere.0[pool.index() % MOST_POOLS]);
            Part { pool, of_candidates: here / all, of_pool: here / (here + elsewhere) }
        })
    }

    /// What a policy chooses from.
    pub(super) fn choice<'a>(
        &'a self,
        ring: &'a dyn Fn() -> &'a Ring,
        Learned { arrivals_per_s, later_turns, answer_tokens, followers, unseen, others, speed }: Learned,
    ) -> Choice<'a> {
        Choice {
            candidates: &self.list,
            reports: &self.reports,
            outlooks: &self.outlooks,
            shared_tokens: &self.shared_tokens,
            requests: self.totals.requests,
            prefilling: self.totals.prefilling,
            busy: self.totals.busy,
            context_tokens: self.totals.context_tokens,
            share: self.share,
            workers: self.workers,
            router_place: if others.count() > 0 { others.place } else { self.router_place() },
            told_by: others.count(),
            ring,
            arrivals_per_s,
            later_turns,
            answer_tokens,
            followers,
            unseen,
            speed,
        }
    }

    /// Begins an attempt at a candidate; `None` if only a probe may go there, and one is on its way.
    pub(super) fn begin_trial(&self, worker: &Arc<Worker>, now: Duration) -> Option<Trial> {
        match self.standing {
            Rank::Ready | Rank::Warming => Trial::begin(&worker.health, now),
            // There is nobody better.
            _ => Some(Trial::begin_anyway(&worker.health, now)),
        }
    }

    /// What the cache of one has room for, and those of all.
    pub(super) fn capacity(&self, one: &Candidate) -> Capacity {
        let worker = one.kv_capacity_tokens as usize;
        if worker == 0 {
            return Capacity { worker, fleet: 0 };
        }
        let seen: u64 = self.list.iter().map(|candidate| u64::from(candidate.kv_capacity_tokens)).sum();
        let seen = seen + self.left_out_tokens;
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "an estimate")]
        let fleet = (seen as f64 / self.share.max(f64::MIN_POSITIVE)) as usize;
        Capacity { worker, fleet }
    }

    /// This router's place among those that share these workers: where some of them come or go, that among the most.
    fn router_place(&self) -> RouterPlace {
        let places = self.reports.iter().flatten().map(|report| report.place);
        places.max_by_key(|place| place.count).unwrap_or_default()
    }

    /// For how long nothing is known of what other routers decide, where workers report their load: the age of the oldest report from one that is busy.
    /// One that is idle would tell at once of a request, and else tells nothing for long. `None` where none reports anything.
    pub(super) fn unseen_for(&self) -> Option<Duration> {
        if self.reports.is_empty() {
            return None;
        }
        // Who is asked only says how much others have there, and these may not be routers.
        let told = self.reports.iter().flatten().filter(|report| report.queue == QueueSource::Told);
        let busy = told.filter(|report| report.running + report.waiting > 0);
        Some(Duration::from_millis(busy.map(|report| report.age_ms).max().unwrap_or(0).into()))
    }
}

/// Of a list that is empty, or has an element for each of `kept`, keeps those that are.
fn keep<T>(list: &mut Vec<T>, kept: &[bool]) {
    let mut kept = kept.iter();
    list.retain(|_| kept.next().is_some_and(|kept| *kept));
}

/// How many times longer the prompt takes in a pool than in the usual one.
#[inline]
fn unlike(usual: &Usual, pool: PoolNumber, moment: &Moment<'_>) -> f32 {
    if pool == usual.pool {
        return 1.0;
    }
    #[expect(clippy::cast_possible_truncation, reason = "a ratio, to seven digits")]
    let times = (moment.usual(pool).cold_s / usual.cold_s) as f32;
    times
}

/// What a decider knows by itself, of all workers.
#[derive(Clone, Copy)]
pub(super) struct Learned {
    pub(super) arrivals_per_s: f64,
    pub(super) later_turns: f64,
    pub(super) answer_tokens: f64,
    pub(super) followers: Followers,
    pub(super) unseen: Unseen,
    pub(super) others: Others,
    pub(super) speed: PrefillSpeed,
}

/// What a pick is for.
pub(super) struct Sought<'a> {
    pub(super) request: &'a RequestView<'a>,
    pub(super) eligible: &'a Eligible<'a>,
    pub(super) moment: Moment<'a>,
    pub(super) hits: &'a PrefixHits,
}

/// Who may get a request at all.
pub(super) struct Eligible<'a> {
    among: Among<'a>,
    role: Role,
    serving: Serving<'a>,
    suspects: Suspects,
}

/// Workers that are down by their probes alone.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Suspects {
    /// Get nothing.
    Out,
    /// Are asked, since nobody else is left.
    In,
}

impl<'a> Eligible<'a> {
    pub(super) fn new(fleet: &FleetSnapshot, request: &RequestView<'a>, among: Among<'a>) -> Self {
        let (role, serving) = (request.leg.role(), fleet.serving(request.model));
        Self { among, role, serving, suspects: Suspects::Out }
    }

    /// The same with those that are down by their probes alone, where these are more than half of who serves the request: it is more
    /// likely that probes are late in a fleet that has much to do than that most of it has failed at once. `None` if they are fewer,
    /// or are asked already. Who cannot be connected to is not counted: of it more is known than what probes say, and until one
    /// passes it has no model to serve.
    #[cold]
    pub(super) fn with_suspects(&self, fleet: &FleetSnapshot) -> Option<Self> {
        let (mut up, mut suspect) = (0, 0);
        for row in fleet.rows(0..fleet.count()).filter(|row| self.serves(fleet, *row)) {
            let state = row.load.state.load(Ordering::Relaxed);
            if !self.is_in_role(state) {
                continue;
            }
            up += u32::from(is_usable(state));
            suspect += u32::from(is_suspect(state));
        }
        let most = suspect > up && self.suspects == Suspects::Out;
        most.then_some(Self { suspects: Suspects::In, ..*self })
    }

    #[inline]
    pub(super) fn has(&self, fleet: &FleetSnapshot, row: Member<'_>) -> bool {
        self.may_be_picked(row) && self.serves(fleet, row)
    }

    #[inline]
    fn may_be_picked(&self, row: Member<'_>) -> bool {
        let state = row.load.state.load(Ordering::Relaxed);
        if !self.is_in_role(state) {
            return false;
        }
        let may_be_asked = |state| is_usable(state) || self.suspects == Suspects::In && is_suspect(state);
        match self.among {
            Among::Untried(tried) => may_be_asked(state) && !tried.contains(&row.slot),
            Among::Anyone => !is_draining(state),
        }
    }

    #[inline]
    fn is_in_role(&self, state: u8) -> bool {
        is_prefill(state) == (self.role == Role::Prefill)
    }

    /// Whether there is somebody.
    pub(super) fn has_any(&self, fleet: &FleetSnapshot) -> bool {
        fleet.rows(0..fleet.count()).any(|row| self.has(fleet, row))
    }

    fn serves(&self, fleet: &FleetSnapshot, row: Member<'_>) -> bool {
        let has = |bits: u32| row.load.models.load(Ordering::Relaxed) & bits != 0;
        match self.serving {
            Serving::Anyone => true,
            Serving::Bit(bit) => has(bit),
            Serving::Listed(bits, model) => has(bits) && lists(fleet.worker(row), model),
            Serving::Untold(bits) => has(bits) && has_told_nothing(fleet.worker(row)),
        }
    }
}

#[cold]
fn lists(worker: &Worker, model: &str) -> bool {
    worker.lists(model)
}

#[cold]
fn has_told_nothing(worker: &Worker) -> bool {
    worker.models().is_none()
}
