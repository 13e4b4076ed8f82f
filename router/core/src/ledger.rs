//! What the router itself knows to be in flight at each worker.
//!
//! Policies hold no counts: they are given these. A [`Lease`] is made under the decider's lock, together with the pick,
//! so that a burst of equal requests does not all see the same empty worker; dropping it gives everything back.

mod held;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

pub use self::held::HeldPrompt;
use self::held::HeldTokens;
use crate::adapters::{Adapter, AdapterOutlook};
use crate::load_table::{Row, RowHandle};
use crate::models::PoolNumber;
use crate::precedence::Precedence;
use crate::prefix::index::InFlight;
use crate::request::{Answer, RequestView};
pub use crate::speed::Sent;
use crate::speed::{
    Asked, CacheRoom, Observation, Prefill, PrefillQueue, PrefillSpeed, QueueReading, Siblings, lapses_s,
};
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use crate::sync::{Mutex, PoisonError};
use crate::telling::{Beginning, Told, Word};

/// Counters of one worker. Only leases change them; what picks read of them is in the worker's row.
#[derive(Debug, Default)]
pub struct WorkerLoad {
    row: RowHandle,
    sent_tokens: AtomicU64,
    sent_us: AtomicU64,
    queue: Mutex<PrefillQueue>,
    held: Mutex<HeldTokens>,
    /// Requests in flight that other routers have told of.
    others: AtomicU32,
    background: Background,
}

/// What of a worker's load is in the background.
#[derive(Debug, Default)]
struct Background {
    requests: AtomicU32,
    /// Of their prompts, and of their answers as long as these are expected to be.
    tokens: AtomicU32,
}

/// What background requests may hold of a worker's memory, unless there is one alone: what others have cached there is not to go.
const BACKGROUND_MEMORY: f64 = 0.25;
/// Background requests at a worker whose memory is not known.
const MOST_IN_BACKGROUND: u32 = 32;

/// How long ago what was in flight counts half of what is: several times what most requests stay, and short beside the time in which
/// traffic changes.
const USUAL_S: f64 = 60.0;

/// A reading of [`WorkerLoad`].
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct LoadReading {
    /// Requests in flight.
    pub requests: u32,
    /// Those of them without a first token.
    pub prefilling: u32,
    /// Uncached prompt tokens of requests without a first token.
    pub prefill_tokens: u32,
    /// Prompt tokens of all requests in flight: what their attention looks at.
    pub context_tokens: u32,
    /// The same, where what several of them share counts once: a lower bound of the KV they hold.
    pub held_tokens: u32,
    /// Number of the pick that chose this worker last; 0 for never.
    pub last_pick: u64,
}

impl LoadReading {
    /// Requests that have their first token and are decoding.
    #[must_use]
    pub fn decoding(&self) -> u32 {
        self.requests.saturating_sub(self.prefilling)
    }

    /// Reads the counters of a row; each is exact, the set of them may straddle a change.
    pub(crate) fn of(row: &Row) -> Self {
        Self {
            requests: row.requests.load(Ordering::Relaxed),
            prefilling: row.prefilling.load(Ordering::Relaxed),
            prefill_tokens: row.prefill_tokens.load(Ordering::Relaxed),
            context_tokens: row.context_tokens.load(Ordering::Relaxed),
            held_tokens: row.held_tokens.load(Ordering::Relaxed),
            last_pick: row.last_pick.load(Ordering::Relaxed),
        }
    }
}

impl WorkerLoad {
    /// The load of the worker that has this row.
    pub(crate) fn at(row: RowHandle) -> Self {
        Self { row, ..Self::default() }
    }

    /// Reads all counters.
    #[must_use]
    pub fn read(&self) -> LoadReading {
        LoadReading::of(&self.row)
    }

    /// What requests without a first token will still take, in time.
    #[must_use]
    pub fn queue(&self) -> QueueReading {
        QueueReading::of(&self.row)
    }

    /// Reads all counters, those in line left out: what the worker itself has been sent.
    pub(crate) fn read_sent(&self) -> LoadReading {
        let all = self.read();
        let (in_line, tokens) = self.look(|queue| (count(queue.in_line()), count(queue.tokens_in_line())));
        LoadReading {
            requests: all.requests.saturating_sub(in_line),
            prefilling: all.prefilling.saturating_sub(in_line),
            prefill_tokens: all.prefill_tokens.saturating_sub(tokens),
            ..all
        }
    }

    /// Requests in flight there that other routers have told of.
    #[must_use]
    pub fn others(&self) -> usize {
        self.others.load(Ordering::Relaxed) as usize
    }

    /// Whether a background request may come that will have so many `tokens` there, `new_tokens` of them to be computed: nobody waits for a first token, and
    /// there is memory, of which the worker has `kv_capacity_tokens`, if it has said.
    pub(crate) fn has_spare(
        &self,
        tokens: usize,
        new_tokens: usize,
        kv_capacity_tokens: Option<usize>,
    ) -> bool {
        let held = self.background.tokens.load(Ordering::Relaxed) as usize + tokens;
        let has_memory = || match kv_capacity_tokens {
            Some(capacity) => held as f64 <= BACKGROUND_MEMORY * capacity as f64 || self.in_background() == 0,
            None => self.in_background() < MOST_IN_BACKGROUND as usize,
        };
        self.read().prefilling == 0 && has_memory() && self.look(|queue| queue.fits(new_tokens))
    }

    /// Background requests there.
    #[must_use]
    pub fn in_background(&self) -> usize {
        self.background.requests.load(Ordering::Relaxed) as usize
    }

    /// This router's own requests in flight.
    #[must_use]
    pub fn own(&self) -> usize {
        (self.row.requests.load(Ordering::Relaxed) as usize).saturating_sub(self.others())
    }

    /// All that was ever sent there.
    #[must_use]
    pub fn sent(&self) -> Sent {
        Sent { tokens: self.sent_tokens.load(Ordering::Relaxed), us: self.sent_us.load(Ordering::Relaxed) }
    }

    /// Others have prompts there `now`: how long this router's take says nothing of the worker's speed.
    pub(crate) fn is_shared(&self, now: Duration) {
        self.change(|queue| queue.shared(now));
    }

    /// Requests in flight on average over the last minute or so, as of `now`.
    #[must_use]
    pub fn usual_requests(&self, now: Duration) -> f64 {
        usual_requests(&self.row, now.as_secs_f64())
    }

    /// Takes what has been in flight since the last request into the average. Picks are one after the other, so there is one writer.
    fn note_usual(&self, now: Duration) {
        #[expect(clippy::cast_possible_truncation, reason = "a count, to seven digits")]
        let usual = self.usual_requests(now) as f32;
        self.row.usual_bits.store(usual.to_bits(), Ordering::Relaxed);
        self.row.usual_at_bits.store(now.as_secs_f64().to_bits(), Ordering::Relaxed);
    }

    fn change_held(&self, change: impl FnOnce(&mut HeldTokens)) {
        // Nothing that holds it can panic half-way through a change.
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut held);
        self.row.held_tokens.store(count(held.tokens()), Ordering::Relaxed);
    }

    /// Of a prompt, tokens that requests in flight there have too.
    pub(crate) fn shared_tokens(&self, prompt: &HeldPrompt) -> u32 {
        // Nothing that holds it can panic half-way through a change.
        count(self.held.lock().unwrap_or_else(PoisonError::into_inner).shared(prompt))
    }

    /// Requests in line for this worker.
    #[must_use]
    pub fn in_line(&self) -> usize {
        self.look(PrefillQueue::in_line)
    }

    /// For how long the worker is expected to generate nothing for anybody, at most, while it computes prompts.
    #[must_use]
    pub fn silence(&self) -> Duration {
        Duration::try_from_secs_f64(self.look(PrefillQueue::silence_s)).unwrap_or_default()
    }

    /// How long a request waits in line for this worker before it is decided anew.
    #[must_use]
    pub fn reconsider_after(&self) -> Duration {
        let (in_line, begins_after) = self.look(|queue| (queue.in_line(), queue.begins_after()));
        // Nobody waits so little for long, however long the line is: whoever is decided for this worker first finds that the sibling has begun.
        begins_after.unwrap_or_else(|| RECONSIDERED_AFTER.saturating_mul(1 + count(in_line) / LONG_LINE))
    }

    /// It says for how many adapters it has places; 0 for any number.
    pub fn set_adapter_places(&self, count: usize) {
        self.row.adapter_places.store(self::count(count), Ordering::Relaxed);
        self.change(|queue| queue.set_adapter_places(count));
    }

    /// For how many adapters it has places, if it has said.
    #[must_use]
    pub fn adapter_places(&self) -> Option<usize> {
        Some(self.row.adapter_places.load(Ordering::Relaxed) as usize).filter(|places| *places > 0)
    }

    /// What a request for `adapter` meets there.
    pub(crate) fn adapter_outlook(&self, adapter: Adapter) -> AdapterOutlook {
        self.look(|queue| queue.adapter_outlook(adapter))
    }

    /// What those in line take, in seconds, who go after one of `whose` that came at `arrived_s` and takes `own_s` here.
    pub(crate) fn behind_s(&self, whose: Precedence, arrived_s: f64, own_s: f64) -> f64 {
        self.look(|queue| queue.behind_s(whose, arrived_s, own_s))
    }

    /// What a prompt shares with those that are about to be computed there, if it has `hit_blocks` of it.
    pub(crate) fn siblings(
        &self,
        request: &RequestView<'_>,
        hit_blocks: usize,
        speed: &PrefillSpeed,
    ) -> Siblings {
        self.look(|queue| queue.siblings(request, hit_blocks, speed))
    }

    fn look<T>(&self, look: impl FnOnce(&PrefillQueue) -> T) -> T {
        // Nothing that holds it can panic half-way through a change.
        look(&self.queue.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Takes requests whose first tokens nobody will see to be computed, as far as that is to be expected by `now`.
    pub fn lapse(&self, now: Duration) {
        if lapses_s(&self.row).is_some_and(|at_s| at_s <= now.as_secs_f64()) {
            self.change(|queue| queue.lapse(now));
        }
    }

    fn change<T>(&self, change: impl FnOnce(&mut PrefillQueue) -> T) -> T {
        // Nothing that holds it can panic half-way through a change.
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let result = change(&mut queue);
        let called = queue.call();
        let (computed, tokens) = queue.take_computed();
        if computed > 0 {
            self.row.prefilling.fetch_sub(count(computed), Ordering::Relaxed);
            self.row.prefill_tokens.fetch_sub(count(tokens), Ordering::Relaxed);
        }
        queue.reading().show(&self.row);
        let sent = queue.sent();
        self.sent_tokens.store(sent.tokens, Ordering::Relaxed);
        self.sent_us.store(sent.us, Ordering::Relaxed);
        drop(queue);
        called.into_iter().for_each(Waker::wake);
        result
    }
}

/// Requests in flight at the worker of a row on average over the last minute or so, as of `now_s`.
#[inline]
pub(crate) fn usual_requests(row: &Row, now_s: f64) -> f64 {
    let before = f64::from(f32::from_bits(row.usual_bits.load(Ordering::Relaxed)));
    let at_s = f64::from_bits(row.usual_at_bits.load(Ordering::Relaxed));
    let passed_s = (now_s - at_s).max(0.0);
    averaged(before, f64::from(row.requests.load(Ordering::Relaxed)), passed_s)
}

/// An average that was `before`, once there has been `value` for `passed_s`.
#[inline]
pub(crate) fn averaged(before: f64, value: f64, passed_s: f64) -> f64 {
    before + (value - before) * passed_s / (passed_s + USUAL_S)
}

/// As a row counts: no worker has as much in flight as it takes to reach the end.
fn count(tokens: usize) -> u32 {
    u32::try_from(tokens).unwrap_or(u32::MAX)
}

/// What a request will occupy at its worker.
#[derive(Clone, PartialEq, Debug)]
pub struct Booking {
    /// Number of the pick.
    pub pick: u64,
    /// When it was picked.
    pub now: Duration,
    /// All tokens of the prompt.
    pub context_tokens: usize,
    /// The same, to be counted once where it shares them.
    pub held: HeldPrompt,
    /// What of it must be computed.
    pub prefill: Prefill,
    /// How fast the fleet computes that.
    pub speed: PrefillSpeed,
    /// What requests at the worker may add to its KV cache.
    pub room: CacheRoom,
    /// When the request came, if it may wait in line until its worker has room.
    pub may_wait_since: Option<Duration>,
    /// Whether its first token will be seen.
    pub answer: Answer,
    /// What it is computed with, besides the model.
    pub adapter: Option<Adapter>,
    /// What of its prompt others have too.
    pub siblings: Siblings,
    /// What it waits by.
    pub whose: Precedence,
    /// If it is for time that nobody else needs, the tokens it will have with its answer.
    pub background_tokens: Option<usize>,
    /// What it takes of its worker's time, in seconds, if that is noted.
    pub taken_s: f64,
    /// In how many seconds its first token is due: what waits before it at the worker, and its own prompt.
    pub due_in_s: f64,
}

/// How long a request in line waits before it is decided anew: often beside what a prompt takes, and seldom beside what a decision does.
const RECONSIDERED_AFTER: Duration = Duration::from_millis(500);
/// Where so many are in line each waits twice as long, since a place there costs a walk along it: a worker's line is good for 128 decisions a
/// second at most.
const LONG_LINE: u32 = 64;

/// Ready once a request that is in line is to be sent to its worker. The place in line is the lease's.
#[derive(Debug)]
#[must_use = "a request in line is not to be sent yet"]
pub struct Turn {
    load: Arc<WorkerLoad>,
    ticket: u64,
}

impl Future for Turn {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let waits = self.load.change(|queue| queue.waits(self.ticket, cx.waker()));
        if waits { Poll::Pending } else { Poll::Ready(()) }
    }
}

/// What one dispatched request occupies at its worker. Drop is release.
#[derive(Debug)]
pub struct Lease {
    load: Arc<WorkerLoad>,
    ticket: u64,
    context_tokens: u32,
    held: HeldPrompt,
    /// To the worker's cache.
    adds: usize,
    /// `None` once the first token has come.
    prefill_tokens: Option<u32>,
    /// Whether it was put in line.
    waits: bool,
    adapter: Option<Adapter>,
    /// Its path in the prefix tree.
    pub(crate) in_flight: Option<InFlight>,
    /// Other routers, of it. Most requests are told of to nobody, and a lease is moved often.
    told: Option<Box<Told>>,
    /// Whether it is another router's.
    is_others: bool,
    /// If it is in the background.
    background_tokens: Option<u32>,
    /// Of its worker's time, in seconds, as it was noted.
    taken_s: f32,
    /// When its first token is due.
    due_s: f64,
}

impl Lease {
    /// Books a request.
    #[must_use]
    pub fn reserve(load: &Arc<WorkerLoad>, booking: Booking) -> Self {
        let Booking {
            pick,
            now,
            context_tokens,
            held,
            prefill,
            speed,
            room,
            may_wait_since,
            answer,
            adapter,
            siblings,
            whose,
            background_tokens,
            taken_s,
            due_in_s,
        } = booking;
        let background_tokens = background_tokens.map(count);
        let asked = Asked { prefill, answer, adapter, siblings, whose };
        load.note_usual(now);
        let row = &*load.row;
        let (context_tokens, prefill_tokens) = (count(context_tokens), count(prefill.new_tokens));
        row.requests.fetch_add(1, Ordering::Relaxed);
        row.prefilling.fetch_add(1, Ordering::Relaxed);
        row.prefill_tokens.fetch_add(prefill_tokens, Ordering::Relaxed);
        row.context_tokens.fetch_add(context_tokens, Ordering::Relaxed);
        load.change_held(|all| all.add(&held));
        row.last_pick.store(pick, Ordering::Relaxed);
        if let Some(tokens) = background_tokens {
            load.background.requests.fetch_add(1, Ordering::Relaxed);
            load.background.tokens.fetch_add(tokens, Ordering::Relaxed);
        }
        let adds = prefill.new_tokens.min(room.each);
        let waits = load.change(|queue| {
            queue.may_add(room);
            let waits = match may_wait_since {
                Some(since) => queue.push_or_wait(pick, (asked, since.as_secs_f64()), &speed, now),
                None => {
                    queue.push(pick, asked, &speed, now);
                    false
                }
            };
            queue.adds(adds);
            waits
        });
        Self {
            load: Arc::clone(load),
            ticket: pick,
            context_tokens,
            held,
            adds,
            prefill_tokens: Some(prefill_tokens),
            waits,
            adapter,
            in_flight: None,
            told: None,
            is_others: false,
            background_tokens,
            #[expect(clippy::cast_possible_truncation, reason = "seconds, to seven digits")]
            taken_s: taken_s as f32,
            due_s: now.as_secs_f64() + due_in_s,
        }
    }

    /// How many seconds after it was due its first token came, if that was `now`; negative if before.
    #[must_use]
    pub fn late_s(&self, now: Duration) -> f64 {
        now.as_secs_f64() - self.due_s
    }

    /// Books a request that another router has told of.
    #[must_use]
    pub fn reserve_for_another(load: &Arc<WorkerLoad>, booking: Booking) -> Self {
        load.others.fetch_add(1, Ordering::Relaxed);
        let mut lease = Self::reserve(load, booking);
        lease.is_others = true;
        lease
    }

    /// From now on others are told what becomes of it.
    pub fn tell(&mut self, told: Told) {
        self.told = Some(Box::new(told));
    }

    /// Its number, if others are told of it.
    #[must_use]
    pub fn told(&self) -> Option<u64> {
        self.told.as_ref().map(|told| told.request())
    }

    fn say(&self, word: Word) {
        if let Some(told) = &self.told {
            told.tell(word);
        }
    }

    /// It came to nothing at its worker.
    pub(crate) fn failed(&self) {
        self.say(Word::Failed);
    }

    /// Whether it is in the background.
    pub(crate) fn is_background(&self) -> bool {
        self.background_tokens.is_some()
    }

    /// So much was noted of it before it was decided anew.
    pub(crate) fn note_taken_s(&mut self, taken_s: f64) {
        #[expect(clippy::cast_possible_truncation, reason = "seconds, to seven digits")]
        let taken_s = taken_s as f32;
        self.taken_s = taken_s;
    }

    /// What was noted of it, which is noted no more.
    pub(crate) fn take_taken_s(&mut self) -> f64 {
        std::mem::take(&mut self.taken_s).into()
    }

    /// Which pool its worker belongs to.
    pub(crate) fn pool(&self) -> PoolNumber {
        self.load.row.pool()
    }

    /// What a request in line waits for; `None` if it is to be sent at once.
    #[must_use]
    pub fn turn(&self) -> Option<Turn> {
        self.waits.then(|| Turn { load: Arc::clone(&self.load), ticket: self.ticket })
    }

    /// Whether the request was put in line.
    #[must_use]
    pub fn waits(&self) -> bool {
        self.waits
    }

    /// A request that was in line is sent `now`.
    pub(crate) fn goes(&mut self, now: Duration) {
        self.waits = false;
        self.say(Word::Goes);
        self.load.change(|queue| queue.goes(self.ticket, now));
    }

    /// The first token has come, or never will: the prefill is no longer owed. Teaches nothing.
    pub fn first_token(&mut self) {
        self.begins(Beginning::Other);
        self.release_prefill(PrefillQueue::remove);
    }

    /// The first token has come `now`. Returns what that teaches of the worker's speed.
    pub fn first_token_at(&mut self, now: Duration, speed: &PrefillSpeed) -> Option<Observation> {
        self.begins(Beginning::FirstToken);
        self.release_prefill(|queue, ticket| queue.first_token(ticket, now, speed))?
    }

    /// The whole answer has come `now`, its first token among the rest. Returns how long it took.
    pub fn whole_answer_at(&mut self, now: Duration) -> Option<Observation> {
        self.begins(Beginning::WholeAnswer);
        self.release_prefill(|queue, ticket| queue.whole_answer(ticket, now))?
    }

    fn begins(&self, beginning: Beginning) {
        if self.prefill_tokens.is_some() {
            self.say(Word::Begun(beginning));
        }
    }

    /// Does what there is to do with its place in the queue; `None` if the prefill is owed no more.
    fn release_prefill<T>(&mut self, release: impl FnOnce(&mut PrefillQueue, u64) -> T) -> Option<T> {
        let (tokens, ticket) = (self.prefill_tokens.take()?, self.ticket);
        if let Some(in_flight) = &mut self.in_flight {
            in_flight.settle();
        }
        let (released, is_counted) = self.load.change(|queue| {
            let is_counted = !queue.has_computed(ticket);
            (release(queue, ticket), is_counted)
        });
        if is_counted {
            self.load.row.prefilling.fetch_sub(1, Ordering::Relaxed);
            self.load.row.prefill_tokens.fetch_sub(tokens, Ordering::Relaxed);
        }
        Some(released)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let (ticket, adds, adapter) = (self.ticket, self.adds, self.adapter);
        let released = self.release_prefill(|queue, ticket| {
            queue.over(ticket, adds, adapter);
            queue.remove(ticket);
        });
        if released.is_none() {
            self.load.change(|queue| queue.over(ticket, adds, adapter));
        }
        self.load.row.requests.fetch_sub(1, Ordering::Relaxed);
        self.load.row.context_tokens.fetch_sub(self.context_tokens, Ordering::Relaxed);
        self.load.change_held(|all| all.remove(&self.held));
        if self.is_others {
            self.load.others.fetch_sub(1, Ordering::Relaxed);
        }
        if let Some(held) = self.background_tokens {
            let Background { requests, tokens } = &self.load.background;
            requests.fetch_sub(1, Ordering::Relaxed);
            tokens.fetch_sub(held, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reserve(load: &Arc<WorkerLoad>, context_tokens: usize, new_tokens: usize, pick: u64) -> Lease {
        let prefill = Prefill { new_tokens, cached_tokens: context_tokens - new_tokens };
        let now = Duration::from_secs(pick);
        let speed = PrefillSpeed { fixed_s: 0.25, token_s: 0.01, pair_s: 0.0, surprise: 0.0 };
        let held = HeldPrompt::default();
        Lease::reserve(
            load,
            Booking {
                pick,
                now,
                context_tokens,
                held,
                prefill,
                speed,
                room: CacheRoom::default(),
                may_wait_since: None,
                answer: Answer::Streamed,
                adapter: None,
                siblings: Siblings::default(),
                whose: Precedence::default(),
                background_tokens: None,
                taken_s: 0.0,
                due_in_s: 0.0,
            },
        )
    }

    #[test]
    fn first_token_releases_the_prefill_and_drop_the_rest() {
        let load = Arc::new(WorkerLoad::default());
        let mut lease = reserve(&load, 100, 40, 1);
        let _other = reserve(&load, 10, 10, 2);
        assert_eq!(load.read().prefill_tokens, 50);
        assert_eq!(load.queue().owed_s, 0.75, "50 tokens and a step");
        lease.first_token();
        lease.first_token();
        let reading = load.read();
        assert_eq!((reading.prefill_tokens, reading.requests, reading.decoding()), (10, 2, 1));
        assert!((load.queue().owed_s - 0.35).abs() < 1e-6);
        drop(lease);
        let reading = load.read();
        assert_eq!((reading.requests, reading.context_tokens, reading.prefilling), (1, 10, 1));
    }

    #[test]
    fn a_lease_dropped_early_gives_everything_back() {
        let load = Arc::new(WorkerLoad::default());
        drop(reserve(&load, 100, 40, 7));
        let reading = load.read();
        assert_eq!(
            (reading.requests, reading.prefilling, reading.prefill_tokens, reading.context_tokens),
            (0, 0, 0, 0)
        );
        assert_eq!((reading.last_pick, load.queue().owed_s), (7, 0.0));
    }

    #[test]
    fn what_is_usually_in_flight_follows_what_is() {
        let load = Arc::new(WorkerLoad::default());
        let leases: Vec<_> = (1..=4).map(|pick| reserve(&load, 100, 40, pick)).collect();
        let usual = |at_s| load.usual_requests(Duration::from_secs(at_s));
        assert!(usual(5) < 0.5, "a moment says little: {}", usual(5));
        assert!((usual(64) - 2.0).abs() < 0.1, "half of it after a minute: {}", usual(64));
        assert!(usual(100_000) > 3.9);
        let _fifth = reserve(&load, 100, 40, 600);
        let before = usual(600);
        drop(leases);
        assert_eq!(usual(600), before);
        assert!(usual(700) < before / 2.0 + 1.0);
    }

    #[test]
    fn times_of_first_tokens_teach_how_long_prefills_take() {
        let load = Arc::new(WorkerLoad::default());
        let speed = PrefillSpeed::default();
        let mut leases: Vec<_> = (1..=3).map(|pick| reserve(&load, 100, 40, pick)).collect();
        let seen: Vec<_> = (10..)
            .zip(&mut leases)
            .map(|(at, lease)| lease.first_token_at(Duration::from_secs(at), &speed))
            .collect();
        // Each interval is known to be over when the next first token has come.
        let seconds: Vec<_> = seen.iter().map(|one| one.map(|observation| observation.seconds)).collect();
        assert_eq!(seconds, [None, Some(9.0), Some(1.0)]);
        assert_eq!(leases[0].first_token_at(Duration::from_secs(99), &speed), None, "told twice");
    }
}
