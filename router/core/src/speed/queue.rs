//! What one worker owes: requests without a first token, in the order they were sent there, and those that wait in line to be sent.

use std::collections::VecDeque;
use std::task::Waker;
use std::time::Duration;

use smallvec::SmallVec;

use super::additions::{Additions, CacheRoom};
use super::line::{Line, Memory, due_s};
use super::ratio::Ratio;
use super::siblings::Siblings;
use super::silent::Silent;
use super::{Observation, Prefill, PrefillSpeed};
use crate::adapters::{Adapter, AdapterOutlook, AdapterPlaces};
use crate::load_table::Row;
use crate::precedence::Precedence;
use crate::request::{Answer, RequestView};
use crate::sync::atomic::{AtomicU32, Ordering};

/// First tokens that come closer together than this were drawn in one step.
const SAME_STEP: Duration = Duration::from_millis(3);
/// A prompt that finds no other waiting is taken to be in a step after so long: those that decode have one first.
const DECODE_STEP: Duration = Duration::from_millis(50);
/// Requests remembered; whoever has more waiting knows what one more means.
pub(super) const MOST_REQUESTS: usize = 4_096;

/// Of those that were sent so many are looked at, the last ones, for what a prompt shares with them.
const MOST_SIBLINGS: usize = 64;
/// So many streams in a row, and requests without a first token are not answers that come whole.
const TELLING_STREAMS: u32 = 16;

/// A worker that owes more than so many steps has enough to compute until it is sent something again: one that is being computed, and one that
/// can follow. With one, short prompts, of which a step takes many, waited longer; with more, long ones that were sent already kept shorter ones waiting.
const ENOUGH_STEPS: f64 = 2.0;
/// What engines take into a step.
const STEP: Prefill = Prefill { new_tokens: 8_192, cached_tokens: 0 };
/// What is enough for a slow worker, in seconds; and for any where memory is short, and long prompts are those whose sessions were evicted.
const ENOUGH_S: f64 = 4.0;
/// So many requests wait at the worker in any case: one to be computed, and another when that is done.
const LEAST_SENT: usize = 2;
/// A request waits for room in the cache so many times as long as its own prefill takes, and then goes as soon as its worker has too little to
/// compute, room or not.
const MOST_WAIT: f64 = 8.0;
/// How long after it is due a request waits in line for a place for its adapter until one of those that have places gives way. Shorter, and
/// adapters that have next to no requests in common would run one after the other; longer, and those with few requests would starve.
const PATIENCE_S: f64 = 30.0;
/// First tokens less whole answers of late that say when a worker has room; as many more are remembered.
const TELLING_FIRST_TOKENS: u32 = 16;

/// All that was ever sent to a worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Sent {
    /// Uncached prompt tokens.
    pub tokens: u64,
    /// What these were expected to take, in microseconds.
    pub us: u64,
}

impl Sent {
    fn add(&mut self, prefill: Prefill, service_s: f64) {
        let service_us = Duration::try_from_secs_f64(service_s).map_or(0, |service| service.as_micros());
        self.tokens += prefill.new_tokens as u64;
        self.us += u64::try_from(service_us).unwrap_or(0);
    }
}

/// One request in the queue.
#[derive(Clone, Copy, Debug)]
pub(super) struct Waiting {
    pub(super) ticket: u64,
    pub(super) sent: Duration,
    pub(super) prefill: Prefill,
    pub(super) service_s: f64,
    /// To the worker's cache, in tokens, as far as that counts.
    pub(super) adds: usize,
    /// Whether one that was sent after it has its first token: it has been computed too, and will tell with its whole answer.
    pub(super) is_past: bool,
    /// Whether its first token will be seen.
    pub(super) answer: Answer,
    /// What it is computed with, besides the model.
    pub(super) adapter: Option<Adapter>,
    /// What of its prompt others have too.
    pub(super) siblings: Siblings,
    /// Whether it is in the step that is being computed, or has been in one.
    pub(super) has_begun: bool,
    /// What it waits by.
    pub(super) whose: Precedence,
}

/// What a request asks of a worker.
#[derive(Clone, Copy, Debug)]
pub struct Asked {
    /// Of its prompt.
    pub prefill: Prefill,
    /// Whether its first token will be seen.
    pub answer: Answer,
    /// What it is computed with, besides the model.
    pub adapter: Option<Adapter>,
    /// What of its prompt others have too.
    pub siblings: Siblings,
    /// What it waits by.
    pub whose: Precedence,
}

/// What ended with first tokens of one step.
#[derive(Clone, Copy, Debug)]
struct Step {
    at: Duration,
    seconds: f64,
    new_tokens: f64,
    pairs: f64,
    /// Whether the worker computed for others as well.
    is_shared: bool,
}

/// A worker's queue as the router knows it, and the worker's ratio to the fleet's speed.
#[derive(Debug, Default)]
pub struct PrefillQueue {
    waiting: VecDeque<Waiting>,
    owed_s: f64,
    /// How many of these have not been computed, as far as others' first tokens tell, and what they take.
    ahead: (usize, f64),
    /// Those that wait in the router.
    line: Line,
    additions: Additions,
    places: AdapterPlaces,
    /// When a request came last.
    asked_s: f64,
    sent: Sent,
    /// First tokens less whole answers of late.
    first_tokens: u32,
    /// What the step takes that is being computed, whatever is in it.
    fixed_s: f64,
    /// What a step takes that is full of prompts.
    step_s: f64,
    /// When the head began, as far as can be told.
    since: Duration,
    /// When the interval began that the next first token ends.
    step_since: Duration,
    /// Those that have been computed without anybody seeing it.
    silent: Silent,
    /// When others were last known to have prompts there.
    shared: Option<Duration>,
    /// Requests that have come since; another would be computed in one step with them.
    behind: usize,
    step: Option<Step>,
    ratio: Ratio,
    /// Streams that have begun since a whole answer came.
    streams: u32,
}

/// What a pick reads of a queue.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct QueueReading {
    /// Service of all that wait, in seconds, and the fixed part of a step.
    pub owed_s: f32,
    /// Of it, that of those in line.
    pub line_s: f32,
    /// The same of the first of them.
    pub head_s: f32,
    /// When the first of them began, in seconds on the clock of picks.
    pub since_s: f64,
    /// Times the fleet's.
    pub ratio: f32,
    /// Whether some have come since then, with whom another would be computed in one step.
    pub joins_step: bool,
    /// Whether a head that should have been done long ago says that something holds the worker up.
    pub tells_delay: bool,
    /// From when on the first of them counts as computed, on the same clock; `None` where its first token will tell.
    pub lapses_s: Option<f64>,
}

impl Default for QueueReading {
    fn default() -> Self {
        Self {
            owed_s: 0.0,
            line_s: 0.0,
            head_s: 0.0,
            since_s: 0.0,
            ratio: 1.0,
            joins_step: false,
            tells_delay: false,
            lapses_s: None,
        }
    }
}

impl QueueReading {
    /// Reads what picks may see of a queue; each number is exact, the set of them may straddle a change.
    pub(crate) fn of(row: &Row) -> Self {
        let value = |bits: &AtomicU32| f32::from_bits(bits.load(Ordering::Relaxed));
        Self {
            owed_s: value(&row.owed_bits),
            line_s: value(&row.line_bits),
            head_s: value(&row.head_bits),
            since_s: f64::from_bits(row.since_bits.load(Ordering::Relaxed)),
            ratio: 1.0 + value(&row.ratio_less_one_bits),
            joins_step: row.joins_step.load(Ordering::Relaxed) > 0,
            tells_delay: row.tells_delay.load(Ordering::Relaxed) > 0,
            lapses_s: lapses_s(row),
        }
    }

    /// Shows it to picks.
    pub(crate) fn show(&self, row: &Row) {
        row.owed_bits.store(self.owed_s.to_bits(), Ordering::Relaxed);
        row.line_bits.store(self.line_s.to_bits(), Ordering::Relaxed);
        row.head_bits.store(self.head_s.to_bits(), Ordering::Relaxed);
        row.since_bits.store(self.since_s.to_bits(), Ordering::Relaxed);
        row.ratio_less_one_bits.store((self.ratio - 1.0).to_bits(), Ordering::Relaxed);
        row.joins_step.store(self.joins_step.into(), Ordering::Relaxed);
        row.tells_delay.store(self.tells_delay.into(), Ordering::Relaxed);
        let lapses_s = self.lapses_s.map_or(0.0, |at_s| at_s.max(f64::MIN_POSITIVE));
        row.lapses_bits.store(lapses_s.to_bits(), Ordering::Relaxed);
    }

    /// Service that is still owed at `now_s`, in seconds: what the first request has had of its own does not count. If it should have been
    /// done by now, something holds the worker up, such as memory that others have; what has lasted so long is taken to last as long again.
    #[must_use]
    #[inline]
    pub fn left_s(&self, now_s: f64) -> f64 {
        if self.owed_s == 0.0 {
            return 0.0;
        }
        let (owed_s, head_s) = (f64::from(self.owed_s), f64::from(self.head_s));
        let elapsed_s = (now_s - self.since_s).max(0.0);
        let left_s = (owed_s - elapsed_s.min(head_s)).max(0.0);
        let is_held_up = self.tells_delay && head_s > 0.0;
        if is_held_up { left_s + (elapsed_s - head_s).max(0.0) } else { left_s }
    }
}

/// From when on the first of a row's requests counts as computed, if nobody will see it.
#[inline]
pub(crate) fn lapses_s(row: &Row) -> Option<f64> {
    Some(f64::from_bits(row.lapses_bits.load(Ordering::Relaxed))).filter(|at_s| *at_s > 0.0)
}

impl PrefillQueue {
    /// As a pick reads it.
    #[must_use]
    pub fn reading(&self) -> QueueReading {
        #[expect(clippy::cast_possible_truncation, reason = "seconds, to seven digits")]
        let short = |value: f64| value as f32;
        let ratio = short(self.ratio.value());
        let since_s = self.since.as_secs_f64();
        match self.waiting.front() {
            Some(head) => QueueReading {
                owed_s: short(self.owed_s + self.line.owed_s() + self.fixed_s),
                line_s: short(self.line.owed_s()),
                head_s: short(head.service_s + self.fixed_s),
                since_s,
                ratio,
                joins_step: self.behind > 0,
                tells_delay: self.streams >= TELLING_STREAMS,
                lapses_s: self.lapses_s(),
            },
            None => QueueReading { since_s, ratio, ..QueueReading::default() },
        }
    }

    /// Others have prompts there `now`.
    pub fn shared(&mut self, now: Duration) {
        self.shared = Some(now);
    }

    /// A request is sent to the worker; `speed` is the fleet's.
    pub fn push(&mut self, ticket: u64, asked: Asked, speed: &PrefillSpeed, now: Duration) {
        let one = self.expected(ticket, asked, speed, now);
        self.send(one);
    }

    /// The same, unless the worker has enough to compute, or no place for its adapter: then the request, which came at `arrived_s`, gets into line.
    /// Returns whether it did.
    pub fn push_or_wait(
        &mut self,
        ticket: u64,
        (asked, arrived_s): (Asked, f64),
        speed: &PrefillSpeed,
        now: Duration,
    ) -> bool {
        let one = self.expected(ticket, asked, speed, now);
        let has_waited = now.as_secs_f64() - arrived_s > MOST_WAIT * one.service_s;
        let fits = self.line.len() == 0 && self.additions.fit(one.adds, 0);
        let is_long = self.waiting.len() + self.line.len() >= MOST_REQUESTS;
        let may_run = self.may_go(&one, self.gives_way());
        let may_pass = has_waited && self.line.is_turn_of(one.whose);
        let goes = is_long || may_run && self.has_room() && (fits || may_pass);
        if goes {
            self.send(one);
        } else {
            self.line.enter(due_s(arrived_s, one.service_s, self.additions.memory()), one);
        }
        !goes
    }

    fn expected(
        &mut self,
        ticket: u64,
        Asked { prefill, answer, adapter, siblings, whose }: Asked,
        speed: &PrefillSpeed,
        now: Duration,
    ) -> Waiting {
        self.lapse(now);
        self.asked_s = now.as_secs_f64();
        let ratio = self.ratio.value();
        self.fixed_s = speed.fixed_s * ratio;
        // By its tokens, or by its pairs if these are all that seems to take time.
        self.step_s = (speed.token_s * STEP.new_tokens as f64).max(speed.pair_s * STEP.pairs()) * ratio;
        let service_s = speed.seconds(prefill) * ratio;
        let adds = prefill.new_tokens.min(self.additions.room.each);
        Waiting {
            ticket,
            sent: now,
            prefill,
            service_s,
            adds,
            is_past: false,
            answer,
            adapter,
            siblings,
            has_begun: false,
            whose,
        }
    }

    fn send(&mut self, one: Waiting) {
        self.line.charge(&one);
        self.places.enter(one.adapter);
        self.sent.add(one.prefill, one.service_s);
        if self.waiting.is_empty() {
            (self.since, self.step_since) = (one.sent, one.sent);
            self.silent.begin_step();
            self.behind = 0;
        } else {
            self.behind += 1;
        }
        if self.waiting.len() < MOST_REQUESTS {
            self.owed_s += one.service_s;
            self.ahead = (self.ahead.0 + 1, self.ahead.1 + one.service_s);
            self.waiting.push_back(one);
        }
    }

    /// Whether the worker should be sent more, so that it never waits for work. One that does not say when it has begun gets everything.
    #[must_use]
    pub fn has_room(&self) -> bool {
        let (count, owed_s) = self.ahead;
        self.first_tokens < TELLING_FIRST_TOKENS || count < LEAST_SENT || owed_s <= self.enough_s()
    }

    fn enough_s(&self) -> f64 {
        match self.additions.memory() {
            Memory::Enough => ENOUGH_S.min(ENOUGH_STEPS * self.step_s),
            Memory::Short => ENOUGH_S,
        }
    }

    /// What requests that come from now on may add to the cache.
    pub fn may_add(&mut self, room: CacheRoom) {
        self.additions.room = room;
    }

    /// Whether one more that computes so many tokens has room in the cache, beside those that were sent.
    #[must_use]
    pub fn fits(&self, new_tokens: usize) -> bool {
        self.additions.fit(new_tokens.min(self.additions.room.each), self.line.adds())
    }

    /// A request that has been sent, or is in line, adds so much, until it is [over](Self::over).
    pub fn adds(&mut self, tokens: usize) {
        self.additions.tokens += tokens;
    }

    /// A request is over: what it added can be evicted, and its adapter's place may be another's. To be said before it is [removed](Self::remove).
    pub fn over(&mut self, ticket: u64, tokens: usize, adapter: Option<Adapter>) {
        self.additions.tokens = self.additions.tokens.saturating_sub(tokens);
        if adapter.is_some() && !self.line.has(ticket) {
            self.places.leave(adapter);
        }
    }

    /// The worker says for how many adapters it has places; 0 for any number.
    pub fn set_adapter_places(&mut self, count: usize) {
        self.places.set_count(count);
    }

    /// What a request for `adapter` meets.
    #[must_use]
    pub fn adapter_outlook(&self, adapter: Adapter) -> AdapterOutlook {
        let waits = !self.may_run(Some(adapter), self.gives_way());
        let before = || self.line.adapters_but(adapter, |other| !self.places.has_place(other));
        self.places.outlook(adapter, waits.then(before))
    }

    /// Who gets nothing more until another adapter has its place, which has waited for long: nobody's requests would ever end otherwise.
    fn gives_way(&self) -> Option<Adapter> {
        let first_to_end = self.places.first_to_end()?;
        let waits = |adapter| !self.places.has_place(adapter);
        self.line.is_overdue(self.asked_s - PATIENCE_S, waits).then_some(first_to_end)
    }

    fn may_run(&self, adapter: Option<Adapter>, gives_way: Option<Adapter>) -> bool {
        adapter.is_none_or(|adapter| gives_way != Some(adapter) && self.places.has_place(adapter))
    }

    /// Whether one may be sent: its adapter may run, and no sibling is about to compute what it would compute as well in the same step.
    fn may_go(&self, one: &Waiting, gives_way: Option<Adapter>) -> bool {
        let is_before = |other: &Waiting| {
            !other.has_begun
                && !other.is_past
                && other.answer == Answer::Streamed
                && one.siblings.awaits(&other.siblings)
        };
        let tells = self.first_tokens >= TELLING_FIRST_TOKENS;
        self.may_run(one.adapter, gives_way)
            && !(tells && self.waiting.iter().rev().take(MOST_SIBLINGS).any(is_before))
    }

    /// Of what a prompt shares with those that were sent and are not computed yet, which is worth waiting for so that it is found in the cache.
    #[must_use]
    pub fn siblings(&self, request: &RequestView<'_>, hit_blocks: usize, speed: &PrefillSpeed) -> Siblings {
        let sent = self.waiting.iter().rev().take(MOST_SIBLINGS).filter(|one| !one.has_begun);
        Siblings::of(request, hit_blocks, sent.map(|one| &one.siblings), speed)
    }

    /// Whether the first of those that were sent found no other waiting, and is not in a step yet as far as is known.
    fn is_about_to_begin(&self) -> bool {
        self.waiting.front().is_some_and(|first| !first.has_begun && first.sent == self.step_since)
    }

    /// After how long at most a request in line is worth another decision, because a sibling may have begun.
    #[must_use]
    pub fn begins_after(&self) -> Option<Duration> {
        self.is_about_to_begin().then_some(DECODE_STEP)
    }

    /// Those that were sent before the step that begins `at`, as far as they fit into it, are being computed from now on. One that takes several steps
    /// has not begun before its first token: siblings would be in its last step, and compute what it computes there.
    fn begin(&mut self, at: Duration) {
        let mut tokens = 0;
        for one in self.waiting.iter_mut().take_while(|one| one.sent < at) {
            tokens += one.prefill.new_tokens;
            if tokens > STEP.new_tokens {
                return;
            }
            one.has_begun = true;
        }
    }

    /// Sends as many of those in line as there is room for: those to be woken.
    pub fn call(&mut self) -> SmallVec<[Waker; 2]> {
        let mut called = SmallVec::new();
        while self.line.len() > 0 && self.has_room() {
            let (gives_way, in_line) = (self.gives_way(), self.line.adds());
            let fits = |tokens| self.additions.fit(tokens, in_line);
            let Some(at) = self.line.next(fits, |one| self.may_go(one, gives_way)) else { break };
            let (one, waker) = self.line.take(at);
            // When it goes is told by itself, in a moment.
            self.send(Waiting { sent: self.since.max(one.sent), ..one });
            called.extend(waker);
        }
        called
    }

    /// Whether a request is in line; `waker` is woken when it is sent.
    pub fn waits(&mut self, ticket: u64, waker: &Waker) -> bool {
        self.line.waits(ticket, waker)
    }

    /// One that was called goes `now`; or another router's, which was not called here.
    pub fn goes(&mut self, ticket: u64, now: Duration) {
        if let Some(one) = self.line.leave(ticket) {
            self.send(one);
        }
        let Some(at) = self.waiting.iter().position(|waiting| waiting.ticket == ticket) else { return };
        self.waiting[at].sent = now;
        if at == 0 {
            self.since = self.since.max(now);
            self.step_since = self.step_since.max(now);
        }
    }

    /// For how long the worker may generate nothing for anybody: while it computes the longest prompt that waits there, or a step full of them, which it
    /// may have computed before and evicted.
    #[must_use]
    pub fn silence_s(&self) -> f64 {
        let longest_s = self.waiting.iter().map(|waiting| waiting.service_s).fold(self.step_s, f64::max);
        longest_s + self.fixed_s
    }

    /// Requests in line.
    #[must_use]
    pub fn in_line(&self) -> usize {
        self.line.len()
    }

    /// Uncached tokens of those.
    #[must_use]
    pub fn tokens_in_line(&self) -> usize {
        self.line.new_tokens()
    }

    /// All that was ever sent to the worker; who is in line was not.
    #[must_use]
    pub fn sent(&self) -> Sent {
        self.sent
    }

    /// What those in line take, in seconds, who go after one of `whose` that came at `arrived_s` and takes `own_s`.
    #[must_use]
    pub fn behind_s(&self, whose: Precedence, arrived_s: f64, own_s: f64) -> f64 {
        self.line.behind_s(whose, due_s(arrived_s, own_s, self.additions.memory()), own_s)
    }

    /// A request waits no more, for whatever reason.
    pub fn remove(&mut self, ticket: u64) -> Option<Prefill> {
        self.take(ticket).map(|waiting| waiting.prefill)
    }

    fn take(&mut self, ticket: u64) -> Option<Waiting> {
        match self.place(ticket) {
            Some(at) => self.take_at(at),
            None => self.silent.leave(ticket).or_else(|| self.line.leave(ticket)),
        }
    }

    fn place(&self, ticket: u64) -> Option<usize> {
        self.waiting.iter().position(|waiting| waiting.ticket == ticket)
    }

    fn take_at(&mut self, at: usize) -> Option<Waiting> {
        let waiting = self.waiting.remove(at)?;
        let is_last = self.waiting.is_empty();
        self.owed_s = if is_last { 0.0 } else { (self.owed_s - waiting.service_s).max(0.0) };
        if waiting.sent >= self.since {
            self.behind = self.behind.saturating_sub(1);
        }
        if !waiting.is_past {
            self.passes(waiting.service_s);
        }
        Some(waiting)
    }

    /// One of those ahead, which takes `service_s`, has been computed or has left.
    fn passes(&mut self, service_s: f64) {
        let (count, owed_s) = (self.ahead.0.saturating_sub(1), self.ahead.1 - service_s);
        self.ahead = (count, if count == 0 { 0.0 } else { owed_s.max(0.0) });
    }

    /// An answer of `ticket` has begun: engines compute in the order of arrival, so who was sent before that request has been computed as well.
    fn pass_before(&mut self, ticket: u64) {
        let Some(end) = self.place(ticket) else { return };
        let mut at = 0;
        for _ in 0..end {
            if self.lapses(at) {
                self.is_computed(at);
                continue;
            }
            if !std::mem::replace(&mut self.waiting[at].is_past, true) {
                self.passes(self.waiting[at].service_s);
            }
            at += 1;
        }
    }

    /// Takes those that should have been computed by `now` to be so, one after the other, as far as nobody will see it: their answers come
    /// whole, and with most of them most of the time is output. If it was too soon, the worker is thought to have less to do by what is left
    /// of their prefill, and they count as requests that run there in any case.
    pub fn lapse(&mut self, now: Duration) {
        if self.is_about_to_begin() && now >= self.step_since + DECODE_STEP {
            self.waiting[0].has_begun = true;
        }
        let before = self.since;
        while self.lapses_s().is_some_and(|at_s| at_s <= now.as_secs_f64()) {
            // The fixed part is paid once for what is computed together.
            let service = Duration::try_from_secs_f64(self.waiting[0].service_s).unwrap_or_default();
            let next_sent = self.waiting.get(1).map_or(Duration::ZERO, |next| next.sent);
            self.since = (self.since + service).max(next_sent);
            self.is_computed(0);
        }
        if self.since != before {
            self.behind = self.waiting.iter().skip(1).filter(|one| one.sent >= self.since).count();
        }
    }

    /// When the head counts as computed without a first token.
    fn lapses_s(&self) -> Option<f64> {
        let head = self.waiting.front().filter(|_| self.lapses(0))?;
        Some(self.since.as_secs_f64() + head.service_s + self.fixed_s)
    }

    fn lapses(&self, at: usize) -> bool {
        self.waiting[at].answer != Answer::Streamed && self.silent.has_room()
    }

    fn is_computed(&mut self, at: usize) {
        if let Some(one) = self.take_at(at) {
            self.silent.enter(one);
        }
    }

    /// Those without a first token that have been found to be computed, and were not asked for yet: how many, and their uncached tokens.
    pub fn take_computed(&mut self) -> (usize, usize) {
        self.silent.take_news()
    }

    /// Whether a request without a first token was found to be computed.
    #[must_use]
    pub fn has_computed(&self, ticket: u64) -> bool {
        self.silent.has(ticket)
    }

    /// A request's whole answer comes `now`, its first token with its last. Returns how long it took, from being sent on, which its prefill
    /// did not exceed.
    pub fn whole_answer(&mut self, ticket: u64, now: Duration) -> Option<Observation> {
        self.pass_before(ticket);
        if let Some(at) = self.place(ticket) {
            self.silent.is_in_step(self.waiting[at].prefill);
        }
        let Waiting { sent, prefill, .. } = self.take(ticket)?;
        self.streams = 0;
        self.first_tokens = self.first_tokens.saturating_sub(1);
        Some(Observation {
            seconds: now.saturating_sub(sent).as_secs_f64(),
            new_tokens: prefill.new_tokens as f64,
            pairs: prefill.pairs(),
            ratio: self.ratio.value(),
        })
    }

    /// A request's first token comes `now`. Returns what the step before that one's teaches, which is over once this begins.
    pub fn first_token(&mut self, ticket: u64, now: Duration, speed: &PrefillSpeed) -> Option<Observation> {
        if self.silent.leave(ticket).is_some() {
            // It streams after all. What it took is in an interval already.
            return None;
        }
        self.pass_before(ticket);
        let prefill = self.remove(ticket)?;
        self.streams = self.streams.saturating_add(1);
        self.first_tokens = (self.first_tokens + 1).min(2 * TELLING_FIRST_TOKENS);
        let (silent_tokens, silent_pairs) = self.silent.begin_step();
        let new_tokens = prefill.new_tokens as f64 + silent_tokens;
        let pairs = prefill.pairs() + silent_pairs;
        if let Some(step) = self.step.as_mut().filter(|step| now.saturating_sub(step.at) < SAME_STEP) {
            step.new_tokens += new_tokens;
            step.pairs += pairs;
            let at = step.at;
            self.begin(at);
            return None;
        }
        self.begin(now);
        let seconds = now.saturating_sub(self.step_since).as_secs_f64();
        let is_shared = self.shared.is_some_and(|shared| shared >= self.step_since);
        (self.since, self.step_since) = (now, now);
        self.behind = 0;
        let step = Step { at: now, seconds, new_tokens, pairs, is_shared };
        let Step { seconds, new_tokens, pairs, .. } =
            self.step.replace(step).filter(|step| !step.is_shared)?;
        let observation = Observation { seconds, new_tokens, pairs, ratio: self.ratio.value() };
        self.ratio.see(&observation, speed);
        Some(observation)
    }
}
