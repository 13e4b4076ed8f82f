//! What the router itself knows to be in flight at each worker.
//!
//! Policies hold no counts: they are given these. A [`Lease`] is made under the decider's lock, together with the pick,
//! so that a burst of equal requests does not all see the same empty worker; dropping it gives everything back.

mod held;

use std::sync::Arc;
use std::time::Duration;

pub use self::held::HeldPrompt;
use self::held::HeldTokens;
use crate::prefix::index::InFlight;
use crate::speed::{Observation, Prefill, PrefillQueue, PrefillSpeed, QueueReading};
use crate::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use crate::sync::{Mutex, PoisonError};

/// Counters of one worker. Only leases change them.
#[derive(Debug, Default)]
pub struct WorkerLoad {
    requests: AtomicUsize,
    prefilling: AtomicUsize,
    prefill_tokens: AtomicUsize,
    context_tokens: AtomicUsize,
    /// What `held` amounts to.
    held_tokens: AtomicUsize,
    held: Mutex<HeldTokens>,
    /// Requests in flight on average, when the last one was reserved, and when that was.
    usual_bits: AtomicU64,
    usual_at_ns: AtomicU64,
    last_pick: AtomicU64,
    sent_tokens: AtomicU64,
    sent_us: AtomicU64,
    queue: Mutex<PrefillQueue>,
    /// What picks read of `queue`.
    shown: ShownQueue,
}

/// How long ago what was in flight counts half of what is: several times what most requests stay, and short beside the time in which
/// traffic changes.
const USUAL_S: f64 = 60.0;

/// A [`QueueReading`] that is read without the lock.
#[derive(Debug)]
struct ShownQueue {
    owed_bits: AtomicU64,
    head_bits: AtomicU64,
    since_ns: AtomicU64,
    ratio_bits: AtomicU64,
    behind: AtomicUsize,
    /// 0 or 1.
    tells_delay: AtomicUsize,
}

impl Default for ShownQueue {
    fn default() -> Self {
        let QueueReading { owed_s, head_s, ratio, .. } = QueueReading::default();
        Self {
            owed_bits: AtomicU64::new(owed_s.to_bits()),
            head_bits: AtomicU64::new(head_s.to_bits()),
            since_ns: AtomicU64::new(0),
            ratio_bits: AtomicU64::new(ratio.to_bits()),
            behind: AtomicUsize::new(0),
            tells_delay: AtomicUsize::new(0),
        }
    }
}

impl ShownQueue {
    fn show(&self, reading: &QueueReading) {
        let since_ns = u64::try_from(reading.since.as_nanos()).unwrap_or(u64::MAX);
        self.owed_bits.store(reading.owed_s.to_bits(), Ordering::Relaxed);
        self.head_bits.store(reading.head_s.to_bits(), Ordering::Relaxed);
        self.since_ns.store(since_ns, Ordering::Relaxed);
        self.ratio_bits.store(reading.ratio.to_bits(), Ordering::Relaxed);
        self.behind.store(reading.behind, Ordering::Relaxed);
        self.tells_delay.store(usize::from(reading.tells_delay), Ordering::Relaxed);
    }

    fn read(&self) -> QueueReading {
        let value = |bits: &AtomicU64| f64::from_bits(bits.load(Ordering::Relaxed));
        QueueReading {
            owed_s: value(&self.owed_bits),
            head_s: value(&self.head_bits),
            since: Duration::from_nanos(self.since_ns.load(Ordering::Relaxed)),
            ratio: value(&self.ratio_bits),
            behind: self.behind.load(Ordering::Relaxed),
            tells_delay: self.tells_delay.load(Ordering::Relaxed) > 0,
        }
    }
}

/// A reading of [`WorkerLoad`].
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct LoadReading {
    /// Requests in flight.
    pub requests: usize,
    /// Those of them without a first token.
    pub prefilling: usize,
    /// Uncached prompt tokens of requests without a first token.
    pub prefill_tokens: usize,
    /// Prompt tokens of all requests in flight: what their attention looks at.
    pub context_tokens: usize,
    /// The same, where what several of them share counts once: a lower bound of the KV they hold.
    pub held_tokens: usize,
    /// Number of the pick that chose this worker last; 0 for never.
    pub last_pick: u64,
    /// Uncached prompt tokens of all requests ever sent there.
    pub sent_tokens: u64,
    /// What these were expected to take, in microseconds.
    pub sent_us: u64,
    /// What requests without a first token will still take, in time.
    pub queue: QueueReading,
}

/// What a worker said of itself, in metrics or a load report; as old as the last one.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct ReportedLoad {
    /// Requests it works on.
    pub running: usize,
    /// Requests that wait in it.
    pub waiting: usize,
    /// Share of its KV cache that sequences hold, from 0 to 1.
    pub kv_usage: f64,
}

impl LoadReading {
    /// Requests that have their first token and are decoding.
    #[must_use]
    pub fn decoding(&self) -> usize {
        self.requests.saturating_sub(self.prefilling)
    }
}

impl WorkerLoad {
    /// Reads all counters; each is exact, the set of them may straddle a change.
    #[must_use]
    pub fn read(&self) -> LoadReading {
        LoadReading {
            requests: self.requests.load(Ordering::Relaxed),
            prefilling: self.prefilling.load(Ordering::Relaxed),
            prefill_tokens: self.prefill_tokens.load(Ordering::Relaxed),
            context_tokens: self.context_tokens.load(Ordering::Relaxed),
            held_tokens: self.held_tokens.load(Ordering::Relaxed),
            last_pick: self.last_pick.load(Ordering::Relaxed),
            sent_tokens: self.sent_tokens.load(Ordering::Relaxed),
            sent_us: self.sent_us.load(Ordering::Relaxed),
            queue: self.shown.read(),
        }
    }

    /// Others have prompts there `now`: how long this router's take says nothing of the worker's speed.
    pub(crate) fn is_shared(&self, now: Duration) {
        self.change(|queue| queue.shared(now));
    }

    /// Requests in flight on average over the last minute or so, as of `now`.
    #[must_use]
    pub fn usual_requests(&self, now: Duration) -> f64 {
        let before = f64::from_bits(self.usual_bits.load(Ordering::Relaxed));
        let at = Duration::from_nanos(self.usual_at_ns.load(Ordering::Relaxed));
        let passed_s = now.saturating_sub(at).as_secs_f64();
        let in_flight = self.requests.load(Ordering::Relaxed) as f64;
        before + (in_flight - before) * passed_s / (passed_s + USUAL_S)
    }

    /// Takes what has been in flight since the last request into the average. Picks are one after the other, so there is one writer.
    fn note_usual(&self, now: Duration) {
        let usual = self.usual_requests(now);
        self.usual_bits.store(usual.to_bits(), Ordering::Relaxed);
        self.usual_at_ns.store(u64::try_from(now.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    fn change_held(&self, change: impl FnOnce(&mut HeldTokens)) {
        // Nothing that holds it can panic half-way through a change.
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut held);
        self.held_tokens.store(held.tokens(), Ordering::Relaxed);
    }

    fn change<T>(&self, change: impl FnOnce(&mut PrefillQueue) -> T) -> T {
        // Nothing that holds it can panic half-way through a change.
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let result = change(&mut queue);
        self.shown.show(&queue.reading());
        result
    }
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
}

/// What one dispatched request occupies at its worker. Drop is release.
#[derive(Debug)]
pub struct Lease {
    load: Arc<WorkerLoad>,
    ticket: u64,
    context_tokens: usize,
    held: HeldPrompt,
    /// `None` once the first token has come.
    prefill_tokens: Option<usize>,
    /// Its path in the prefix tree.
    pub(crate) in_flight: Option<InFlight>,
}

impl Lease {
    /// Books a request.
    #[must_use]
    pub fn reserve(load: &Arc<WorkerLoad>, booking: Booking) -> Self {
        let Booking { pick, now, context_tokens, held, prefill, speed } = booking;
        load.note_usual(now);
        load.requests.fetch_add(1, Ordering::Relaxed);
        load.prefilling.fetch_add(1, Ordering::Relaxed);
        load.prefill_tokens.fetch_add(prefill.new_tokens, Ordering::Relaxed);
        load.context_tokens.fetch_add(context_tokens, Ordering::Relaxed);
        load.change_held(|all| all.add(&held));
        load.last_pick.store(pick, Ordering::Relaxed);
        let service_s = load.change(|queue| queue.push(pick, prefill, &speed, now));
        load.sent_tokens.fetch_add(prefill.new_tokens as u64, Ordering::Relaxed);
        let service_us = Duration::try_from_secs_f64(service_s).map_or(0, |service| service.as_micros());
        load.sent_us.fetch_add(u64::try_from(service_us).unwrap_or(0), Ordering::Relaxed);
        Self {
            load: Arc::clone(load),
            ticket: pick,
            context_tokens,
            held,
            prefill_tokens: Some(prefill.new_tokens),
            in_flight: None,
        }
    }

    /// The first token has come, or never will: the prefill is no longer owed. Teaches nothing.
    pub fn first_token(&mut self) {
        if self.release_prefill() {
            self.load.change(|queue| queue.remove(self.ticket));
        }
    }

    /// The first token has come `now`; `cached_tokens` of the prompt were cached, if the worker said so. Returns what that
    /// teaches of the worker's speed.
    pub fn first_token_at(
        &mut self,
        now: Duration,
        cached_tokens: Option<usize>,
        speed: &PrefillSpeed,
    ) -> Option<Observation> {
        let is_first = self.release_prefill();
        let ticket = self.ticket;
        is_first.then(|| self.load.change(|queue| queue.first_token(ticket, now, cached_tokens, speed)))?
    }

    /// The whole answer has come `now`, its first token among the rest. Returns how long it took.
    pub fn whole_answer_at(&mut self, now: Duration) -> Option<Observation> {
        let is_first = self.release_prefill();
        let ticket = self.ticket;
        is_first.then(|| self.load.change(|queue| queue.whole_answer(ticket, now)))?
    }

    /// Whether it was still owed.
    fn release_prefill(&mut self) -> bool {
        let Some(tokens) = self.prefill_tokens.take() else { return false };
        if let Some(in_flight) = &mut self.in_flight {
            in_flight.settle();
        }
        self.load.prefilling.fetch_sub(1, Ordering::Relaxed);
        self.load.prefill_tokens.fetch_sub(tokens, Ordering::Relaxed);
        true
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.first_token();
        self.load.requests.fetch_sub(1, Ordering::Relaxed);
        self.load.context_tokens.fetch_sub(self.context_tokens, Ordering::Relaxed);
        self.load.change_held(|all| all.remove(&self.held));
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
        Lease::reserve(load, Booking { pick, now, context_tokens, held, prefill, speed })
    }

    #[test]
    fn first_token_releases_the_prefill_and_drop_the_rest() {
        let load = Arc::new(WorkerLoad::default());
        let mut lease = reserve(&load, 100, 40, 1);
        let _other = reserve(&load, 10, 10, 2);
        assert_eq!(load.read().prefill_tokens, 50);
        assert_eq!(load.read().queue.owed_s, 0.75, "50 tokens and a step");
        lease.first_token();
        lease.first_token();
        let reading = load.read();
        assert_eq!((reading.prefill_tokens, reading.requests, reading.decoding()), (10, 2, 1));
        assert!((reading.queue.owed_s - 0.35).abs() < 1e-9);
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
        assert_eq!((reading.last_pick, reading.queue.owed_s), (7, 0.0));
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
            .map(|(at, lease)| lease.first_token_at(Duration::from_secs(at), None, &speed))
            .collect();
        // Each interval is known to be over when the next first token has come.
        let seconds: Vec<_> = seen.iter().map(|one| one.map(|observation| observation.seconds)).collect();
        assert_eq!(seconds, [None, Some(9.0), Some(1.0)]);
        assert_eq!(leases[0].first_token_at(Duration::from_secs(99), None, &speed), None, "told twice");
    }
}
