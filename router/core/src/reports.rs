//! What a worker says of itself: its load, the size of its cache, and how well the router knows what is in that.
//!
//! Written by whoever follows the worker's streams, read with every pick, without a lock. Absence means that the worker says
//! nothing, which is the main case. Next: the decider hands all of it to the policy as values.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use roundhouse_types::{RouterPlace, WorkerLoad};

use crate::ledger::{LoadReading, Sent, averaged as averaged_of_late};
use crate::load_table::RowHandle;

/// How far what the tree knows of a worker can be trusted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CacheTrust {
    /// By the router's own routes.
    Learned,
    /// Its cache events were followed until a moment ago, and are being caught up with.
    Stale,
    /// Its cache events come in order.
    Exact,
    /// So do those of an engine that nobody here wrote, and what they say is heeded; but not all that the tree knows hangs on blocks that they name.
    Followed,
}

impl CacheTrust {
    /// In the order of their numbers.
    const ALL: [Self; 4] = [Self::Learned, Self::Stale, Self::Exact, Self::Followed];

    /// For operators.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Learned => "learned",
            Self::Stale => "stale",
            Self::Exact => "exact",
            Self::Followed => "followed",
        }
    }
}

/// What an engine that nobody here wrote says of its load, when it is asked: counts, and nothing of its queue's tokens.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct EngineLoad {
    /// Requests that take part in its steps.
    pub running: usize,
    /// Requests that wait in it.
    pub waiting: usize,
    /// KV that its requests hold, in tokens; 0 if that is not known.
    pub kv_used_tokens: usize,
    /// KV that none of them holds, in tokens; 0 if that is not known.
    pub kv_free_tokens: usize,
    /// What it had to compute of a prompt, on average of late, in tokens.
    pub uncached_tokens: f64,
}

/// Where what is known of a worker's queue comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum QueueSource {
    /// The worker told its tokens, several times a second: it knows better than the router's ledger where others send requests too.
    #[default]
    Told,
    /// It was asked a while ago and told counts: the ledger knows the router's own requests better, and others' come to that.
    Counted,
}

/// What a worker said of its load last. Small, since each pick makes one for each candidate.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct LoadReport {
    /// What its queue is known by.
    pub queue: QueueSource,
    /// Requests that take part in its steps.
    pub running: u32,
    /// Requests that wait in it.
    pub waiting: u32,
    /// Tokens that it has still to compute before the last of all these has its first token.
    pub waiting_uncached_tokens: u32,
    /// KV that its requests hold, in tokens.
    pub kv_used_tokens: u32,
    /// KV that none of them holds, cached blocks included, in tokens.
    pub kv_free_tokens: u32,
    /// Prompt tokens a second that it computed of late; 0 if it has not said.
    pub prefill_tokens_per_second: f32,
    /// Tokens a second that it generated of late, over all sequences; 0 if it has not said.
    pub decode_tokens_per_second: f32,
    /// How old the report is, in milliseconds.
    pub age_ms: u32,
    /// What of it was not this router's when the report came.
    pub others: OthersLoad,
    /// Requests of others there on average, over the last minute or so.
    pub usual_others: f32,
    /// All that this router has ever sent there by now.
    pub sent: Sent,
    /// This router's place among those that follow the worker's load.
    pub place: RouterPlace,
}

/// What others than this router have at a worker: what it reported beyond this router's own ledger.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct OthersLoad {
    /// Requests there.
    pub requests: u32,
    /// Those of them that wait.
    pub waiting: u32,
    /// Tokens to compute before the last of them has its first token.
    pub uncached_tokens: u32,
    /// What all that this router had ever sent there was expected to take, in microseconds: what it sent later is not in the report.
    pub sent_us: u64,
}

impl OthersLoad {
    /// What of a `report` is beyond the router's `own` part, as the ledger has it when the report comes; `sent` is all that it ever
    /// sent there.
    #[must_use]
    pub fn beside(own: &LoadReading, sent: Sent, report: &LoadReport) -> Self {
        // Each sequence that decodes has one token to compute, which nobody waits for.
        let own_tokens = own.prefill_tokens.saturating_add(report.running);
        Self {
            requests: report.running.saturating_add(report.waiting).saturating_sub(own.requests),
            waiting: report.waiting.saturating_sub(own.prefilling),
            uncached_tokens: report.waiting_uncached_tokens.saturating_sub(own_tokens),
            sent_us: sent.us,
        }
    }
}

impl LoadReport {
    /// Share of its KV that requests hold, from 0 to 1.
    #[must_use]
    pub fn kv_usage(&self) -> f64 {
        let (used, free) = (f64::from(self.kv_used_tokens), f64::from(self.kv_free_tokens));
        if used > 0.0 { used / (used + free) } else { 0.0 }
    }
}

/// Everything that one worker said last.
#[derive(Debug, Default)]
pub struct Reports {
    /// Holds the size of its cache, and whether it tells its load.
    row: RowHandle,
    trust: AtomicU8,
    /// Endpoints, as bits, whose replies have ever told cached tokens.
    tell_cached: AtomicU32,
    /// Two numbers a word. The set of them may straddle a change, each of them does not.
    requests: AtomicU64,
    kv: AtomicU64,
    speeds: AtomicU64,
    /// To compute: in all, and others'.
    waiting_tokens: AtomicU64,
    others: AtomicU64,
    usual_others_bits: AtomicU32,
    sent_us: AtomicU64,
    /// Rank and count of routers; 0 while it has not said.
    place: AtomicU64,
    is_counted: AtomicBool,
    /// Others' requests and those of them that wait, on average, where they are counted.
    mean_requests_bits: AtomicU32,
    mean_waiting_bits: AtomicU32,
    /// Nanoseconds on the clock of picks.
    at: AtomicU64,
}

/// Seconds, of the average of what an engine that is asked told: a share that was there for so long counts half.
const COUNTED_S: f64 = 20.0;

/// The average in `bits`, of which `share` is now `value`.
#[expect(clippy::cast_possible_truncation, reason = "a count, to seven digits")]
fn averaged(bits: &AtomicU32, value: f64, share: f64) -> f64 {
    let before = f64::from(f32::from_bits(bits.load(Ordering::Relaxed)));
    let after = before + share * (value - before);
    bits.store((after as f32).to_bits(), Ordering::Relaxed);
    after
}

fn pair(high: u32, low: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

#[expect(clippy::cast_possible_truncation, reason = "takes a pair of numbers apart")]
fn unpair(both: u64) -> (u32, u32) {
    ((both >> 32) as u32, both as u32)
}

impl Reports {
    /// What the worker says that has this row.
    pub(crate) fn at(row: RowHandle) -> Self {
        Self { row, ..Self::default() }
    }

    /// How far what the tree knows of it can be trusted.
    #[must_use]
    pub fn trust(&self) -> CacheTrust {
        CacheTrust::ALL[usize::from(self.trust.load(Ordering::Relaxed))]
    }

    /// Says how far it can be trusted now.
    pub fn set_trust(&self, trust: CacheTrust) {
        self.trust.store(trust as u8, Ordering::Relaxed);
    }

    /// What its KV cache has room for, in tokens; `None` while it has not said.
    #[must_use]
    pub fn kv_capacity_tokens(&self) -> Option<usize> {
        let tokens = self.row.kv_capacity_tokens.load(Ordering::Relaxed);
        (tokens > 0).then_some(tokens as usize)
    }

    /// It says what its KV cache has room for.
    pub fn set_kv_capacity(&self, tokens: Option<usize>) {
        let tokens = u32::try_from(tokens.unwrap_or(0)).unwrap_or(u32::MAX);
        self.row.kv_capacity_tokens.store(tokens, Ordering::Relaxed);
    }

    /// Its load, as it said last, with its age at `now`; without what this router has sent.
    #[must_use]
    #[inline]
    pub fn load(&self, now: Duration) -> Option<LoadReport> {
        if self.row.tells_load.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let at = self.at.load(Ordering::Relaxed);
        let (running, waiting) = unpair(self.requests.load(Ordering::Relaxed));
        let (kv_used_tokens, kv_free_tokens) = unpair(self.kv.load(Ordering::Relaxed));
        let (prefill, decode) = unpair(self.speeds.load(Ordering::Relaxed));
        let (waiting_uncached_tokens, uncached_tokens) = unpair(self.waiting_tokens.load(Ordering::Relaxed));
        let (others_requests, others_waiting) = unpair(self.others.load(Ordering::Relaxed));
        let age = now.saturating_sub(Duration::from_nanos(at));
        let is_counted = self.is_counted.load(Ordering::Relaxed);
        Some(LoadReport {
            queue: if is_counted { QueueSource::Counted } else { QueueSource::Told },
            running,
            waiting,
            waiting_uncached_tokens,
            kv_used_tokens,
            kv_free_tokens,
            prefill_tokens_per_second: f32::from_bits(prefill),
            decode_tokens_per_second: f32::from_bits(decode),
            age_ms: u32::try_from(age.as_millis()).unwrap_or(u32::MAX),
            others: OthersLoad {
                requests: others_requests,
                waiting: others_waiting,
                uncached_tokens,
                sent_us: self.sent_us.load(Ordering::Relaxed),
            },
            usual_others: f32::from_bits(self.usual_others_bits.load(Ordering::Relaxed)),
            sent: Sent::default(),
            place: self.place(),
        })
    }

    /// Which of the routers that follow its load this one is.
    #[must_use]
    pub fn place(&self) -> RouterPlace {
        let (rank, count) = unpair(self.place.load(Ordering::Relaxed));
        if rank < count { RouterPlace { rank, count } } else { RouterPlace::ALONE }
    }

    /// It says which of the routers that follow its load this one is.
    pub fn set_place(&self, place: RouterPlace) {
        self.place.store(pair(place.rank, place.count), Ordering::Relaxed);
    }

    /// It says what its load is `now`, by the clock of picks; of that, `own` is the router's, which ever sent there what is `sent`. Returns what is not.
    pub(crate) fn set_load(
        &self,
        load: &WorkerLoad,
        (own, sent): (&LoadReading, Sent),
        now: Duration,
    ) -> OthersLoad {
        let count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        #[expect(clippy::cast_possible_truncation, reason = "tokens a second")]
        let speed = |speed: Option<f64>| (speed.unwrap_or(0.0) as f32).to_bits();
        let requests = pair(count(load.running_requests), count(load.waiting_requests));
        let kv = pair(count(load.kv_used_tokens), count(load.kv_free_tokens));
        let speeds = pair(speed(load.prefill_tokens_per_second), speed(load.decode_tokens_per_second));
        self.requests.store(requests, Ordering::Relaxed);
        self.kv.store(kv, Ordering::Relaxed);
        self.speeds.store(speeds, Ordering::Relaxed);
        let report = LoadReport {
            running: count(load.running_requests),
            waiting: count(load.waiting_requests),
            waiting_uncached_tokens: count(load.waiting_uncached_tokens),
            ..LoadReport::default()
        };
        self.is_counted.store(false, Ordering::Relaxed);
        let others = OthersLoad::beside(own, sent, &report);
        self.note(&report, others, now);
        others
    }

    /// The engine has told what its load is `now`; of that, `own` is the router's. What others have there is taken as it was on average over the
    /// last answers: between two of them it changes as much as all else does, and routers that follow the same old count all go the same way.
    pub(crate) fn set_counts(&self, load: &EngineLoad, own: &LoadReading, now: Duration) {
        let count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        let (running, waiting) = (count(load.running), count(load.waiting));
        self.requests.store(pair(running, waiting), Ordering::Relaxed);
        self.kv.store(pair(count(load.kv_used_tokens), count(load.kv_free_tokens)), Ordering::Relaxed);
        self.speeds.store(0, Ordering::Relaxed);
        self.is_counted.store(true, Ordering::Relaxed);
        let report = LoadReport { running, waiting, ..LoadReport::default() };
        let others = OthersLoad::beside(own, Sent::default(), &report);
        // This router's own may wait there once more, after their first tokens.
        let waiting_others = others.waiting.min(others.requests);
        let share = self.newest_share(now);
        let requests = averaged(&self.mean_requests_bits, f64::from(others.requests), share);
        let waiting = averaged(&self.mean_waiting_bits, f64::from(waiting_others), share);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "counts and an estimate")]
        let (requests, waiting, tokens) =
            (requests.round() as u32, waiting.round() as u32, (waiting * load.uncached_tokens) as u32);
        let waiting_uncached_tokens = own.prefill_tokens.saturating_add(tokens);
        let others = OthersLoad { requests, waiting, uncached_tokens: tokens, ..others };
        self.note(&LoadReport { waiting_uncached_tokens, ..report }, others, now);
    }

    /// How much of the average of what an engine told is what it tells `now`.
    fn newest_share(&self, now: Duration) -> f64 {
        if self.row.tells_load.load(Ordering::Relaxed) == 0 {
            return 1.0;
        }
        let at = Duration::from_nanos(self.at.load(Ordering::Relaxed));
        let passed_s = now.saturating_sub(at).as_secs_f64();
        passed_s / (passed_s + COUNTED_S)
    }

    fn note(&self, report: &LoadReport, others: OthersLoad, now: Duration) {
        self.note_usual_others(now);
        self.waiting_tokens
            .store(pair(report.waiting_uncached_tokens, others.uncached_tokens), Ordering::Relaxed);
        self.sent_us.store(others.sent_us, Ordering::Relaxed);
        self.others.store(pair(others.requests, others.waiting), Ordering::Relaxed);
        let at = u64::try_from(now.as_nanos()).unwrap_or(u64::MAX);
        self.at.store(at, Ordering::Relaxed);
        self.row.tells_load.store(1, Ordering::Relaxed);
    }

    /// Takes what others have had there since the report before into the average.
    fn note_usual_others(&self, now: Duration) {
        let (requests, _) = unpair(self.others.load(Ordering::Relaxed));
        let at = Duration::from_nanos(self.at.load(Ordering::Relaxed));
        let before = f64::from(f32::from_bits(self.usual_others_bits.load(Ordering::Relaxed)));
        #[expect(clippy::cast_possible_truncation, reason = "a count, to seven digits")]
        let usual =
            averaged_of_late(before, f64::from(requests), now.saturating_sub(at).as_secs_f64()) as f32;
        self.usual_others_bits.store(usual.to_bits(), Ordering::Relaxed);
    }

    /// It says nothing of its load any more.
    pub fn forget_load(&self) {
        self.row.tells_load.store(0, Ordering::Relaxed);
        // Nor is what others had there last what they have had since.
        self.others.store(0, Ordering::Relaxed);
        self.usual_others_bits.store(0, Ordering::Relaxed);
        self.set_place(RouterPlace::ALONE);
    }

    /// A reply of the endpoint of that number told its usage, and in it `cached_tokens`, if that was there. Returns what was
    /// cached, if that can be known: engines leave it out when it is 0, so that it is 0 wherever it was told before, and
    /// unknown where it never was.
    pub fn cached_tokens(&self, endpoint: u32, cached_tokens: Option<u32>) -> Option<u32> {
        let bit = bit(endpoint);
        if cached_tokens.is_some() {
            self.tell_cached.fetch_or(bit, Ordering::Relaxed);
            return cached_tokens;
        }
        (self.tell_cached.load(Ordering::Relaxed) & bit != 0).then_some(0)
    }
}

/// Of a set of endpoints, the one of that number; none, if there are too many.
pub(crate) fn bit(endpoint: u32) -> u32 {
    1u32.checked_shl(endpoint).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loads_are_read_as_they_were_told_and_grow_old() {
        let reports = Reports::default();
        assert_eq!(reports.load(Duration::from_secs(1)), None);
        let load = WorkerLoad {
            running_requests: 1,
            waiting_requests: 2,
            waiting_uncached_tokens: usize::MAX,
            kv_used_tokens: 100,
            kv_free_tokens: 300,
            prefill_tokens_per_second: Some(1_500.0),
            decode_tokens_per_second: None,
            retractions: 7,
        };
        let own = LoadReading { requests: 1, prefilling: 2, prefill_tokens: 10, ..LoadReading::default() };
        let sent = Sent { tokens: 5, us: 77 };
        reports.set_load(&load, (&own, sent), Duration::from_secs(1));
        reports.set_place(RouterPlace { rank: 1, count: 3 });
        let read = reports.load(Duration::from_millis(1_250)).unwrap();
        let expected = LoadReport {
            queue: QueueSource::Told,
            running: 1,
            waiting: 2,
            waiting_uncached_tokens: u32::MAX,
            kv_used_tokens: 100,
            kv_free_tokens: 300,
            prefill_tokens_per_second: 1_500.0,
            decode_tokens_per_second: 0.0,
            age_ms: 250,
            others: OthersLoad { requests: 2, waiting: 0, uncached_tokens: u32::MAX - 11, sent_us: 77 },
            usual_others: 0.0,
            sent: Sent::default(),
            place: RouterPlace { rank: 1, count: 3 },
        };
        assert_eq!((read, read.kv_usage()), (expected, 0.25));
        reports.set_load(&load, (&own, sent), Duration::from_secs(61));
        let usual = reports.load(Duration::from_secs(61)).unwrap().usual_others;
        assert!((usual - 1.0).abs() < 1e-6, "two of others for a minute, and none before: {usual}");
        reports.forget_load();
        assert_eq!(reports.load(Duration::from_secs(62)), None);
    }

    #[test]
    fn counts_of_engines_are_averaged_and_what_is_the_routers_is_left_out() {
        let reports = Reports::default();
        let load = |running, waiting| EngineLoad {
            running,
            waiting,
            kv_used_tokens: 60,
            kv_free_tokens: 40,
            uncached_tokens: 100.0,
        };
        let own = LoadReading { requests: 3, prefilling: 1, prefill_tokens: 7, ..LoadReading::default() };
        let at = |seconds| Duration::from_secs(seconds);
        // The first count is all that is known.
        reports.set_counts(&load(8, 3), &own, at(100));
        let read = reports.load(at(101)).unwrap();
        let others = OthersLoad { requests: 8, waiting: 2, uncached_tokens: 200, sent_us: 0 };
        assert_eq!((read.queue, read.others, read.age_ms), (QueueSource::Counted, others, 1_000));
        assert_eq!(
            (read.running, read.waiting, read.waiting_uncached_tokens, read.kv_usage()),
            (8, 3, 207, 0.6)
        );
        // Twenty seconds without others: half of them are left.
        reports.set_counts(&load(2, 0), &own, at(120));
        let read = reports.load(at(120)).unwrap();
        assert_eq!((read.others.requests, read.others.waiting, read.others.uncached_tokens), (4, 1, 100));
        // What it said before it was gone is not what it would say.
        reports.forget_load();
        reports.set_counts(&load(3, 0), &own, at(125));
        assert_eq!(reports.load(at(125)).unwrap().others, OthersLoad::default());
        // Its own have been retracted: there is nobody else, whatever waits.
        reports.set_counts(&load(0, 3), &LoadReading { requests: 3, ..LoadReading::default() }, at(125));
        assert_eq!(reports.load(at(125)).unwrap().others, OthersLoad::default());
        // Nobody knows what others had there while it said nothing.
        reports.set_counts(&load(40, 0), &own, at(126));
        reports.forget_load();
        reports.set_counts(&load(3, 0), &own, at(1_026));
        assert_eq!(reports.load(at(1_026)).unwrap().usual_others, 0.0);
        // A worker that tells by itself is believed.
        reports.set_load(&WorkerLoad::default(), (&own, Sent::default()), at(1_027));
        assert_eq!(reports.load(at(1_027)).unwrap().queue, QueueSource::Told);
    }

    #[test]
    fn silence_is_zero_only_where_it_was_not_silent_before() {
        let reports = Reports::default();
        assert_eq!(reports.cached_tokens(0, None), None);
        assert_eq!(reports.cached_tokens(0, Some(5)), Some(5));
        assert_eq!(reports.cached_tokens(0, None), Some(0));
        assert_eq!(reports.cached_tokens(1, None), None, "another endpoint");
    }

    #[test]
    fn trust_is_what_was_set_last() {
        let reports = Reports::default();
        for trust in CacheTrust::ALL {
            reports.set_trust(trust);
            assert_eq!(reports.trust(), trust);
        }
    }
}
