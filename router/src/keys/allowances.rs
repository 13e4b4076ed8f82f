//! How much of what keys may ask for they have asked for of late.
//!
//! Each limit that goes by the minute is a bucket as large as that, which fills up again in a minute: who has asked for nothing may ask for all of it at once. Tokens are
//! counted when it is known how many there are, of a prompt once it is read and of an answer at its end, so that what is under way may take more than is left; the next one
//! waits until that is made up for. Knows no clock: readings come in.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dashmap::DashMap;
use http::{HeaderMap, HeaderName, HeaderValue};

use super::{Grant, KeyLimits};

/// Keys that are remembered; those that have asked for nothing of late are forgotten then.
const MOST_KEYS: usize = 65_536;
const TOKENS: &str = "tokens in a minute";
/// A limit, what is left of it, and when all of it is there again.
const REQUESTS_HEADERS: [HeaderName; 3] = [
    HeaderName::from_static("x-ratelimit-limit-requests"),
    HeaderName::from_static("x-ratelimit-remaining-requests"),
    HeaderName::from_static("x-ratelimit-reset-requests"),
];
const TOKENS_HEADERS: [HeaderName; 3] = [
    HeaderName::from_static("x-ratelimit-limit-tokens"),
    HeaderName::from_static("x-ratelimit-remaining-tokens"),
    HeaderName::from_static("x-ratelimit-reset-tokens"),
];
/// Nobody is told to come back later than that.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// Why a key may not ask for more at present.
#[derive(Clone, Copy, PartialEq, Debug, thiserror::Error)]
#[error("the API key may have {limit} {what}, and no more; come back in {} s", wait.as_secs_f64().ceil().max(1.0))]
pub struct Spent {
    limit: u32,
    what: &'static str,
    /// When there is something left again, most likely.
    pub wait: Duration,
}

/// What all keys have had.
#[derive(Debug, Default)]
pub struct Allowances {
    accounts: DashMap<u64, Arc<Account>>,
}

#[derive(Debug, Default)]
struct Account(Mutex<Had>);

#[derive(Debug, Default)]
struct Had {
    requests: Bucket,
    tokens: Bucket,
    in_flight: u32,
}

impl Account {
    fn lock(&self) -> MutexGuard<'_, Had> {
        // Nothing that holds it can panic half-way through a change.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What has been had and has not come back.
#[derive(Debug, Default)]
struct Bucket {
    had: f64,
    at: Duration,
}

impl Bucket {
    /// Whether `one` more fits into a minute's worth, if there is one; what was had without a limit does not count for a later one.
    fn look(
        &mut self,
        per_minute: Option<u32>,
        (what, one): (&'static str, f64),
        now: Duration,
    ) -> Result<(), Spent> {
        let Some(limit) = per_minute else {
            *self = Self::default();
            return Ok(());
        };
        let a_second = a_second(limit);
        self.give_back(a_second, now);
        let beyond_s = (self.had - (f64::from(limit) - one).max(0.0)) / a_second;
        if beyond_s <= 0.0 {
            return Ok(());
        }
        let wait = Duration::from_secs_f64(beyond_s.min(LONGEST_WAIT.as_secs_f64()));
        Err(Spent { limit, what, wait })
    }

    fn give_back(&mut self, a_second: f64, now: Duration) {
        let passed_s = now.saturating_sub(self.at).as_secs_f64();
        (self.had, self.at) = ((self.had - passed_s * a_second).max(0.0), self.at.max(now));
    }

    /// The limit, what is left of it, and how long it takes until all of it is there again, as OpenAI's headers say them.
    fn tell(
        &mut self,
        per_minute: Option<u32>,
        names: &[HeaderName; 3],
        now: Duration,
        headers: &mut HeaderMap,
    ) {
        let Some(limit) = per_minute else { return };
        let a_second = a_second(limit);
        self.give_back(a_second, now);
        let left = (f64::from(limit) - self.had).max(0.0) as u64;
        let [name_of_limit, name_of_left, name_of_reset] = names;
        headers.insert(name_of_limit, limit.into());
        headers.insert(name_of_left, left.into());
        let reset = duration_text(Duration::from_secs_f64(self.had / a_second));
        headers.insert(name_of_reset, HeaderValue::from_str(&reset).expect("digits and letters are a value"));
    }
}

fn a_second(per_minute: u32) -> f64 {
    f64::from(per_minute) / 60.0
}

/// As OpenAI writes them: 20ms, 12s, 6m0s; up to the next second from one on.
fn duration_text(duration: Duration) -> String {
    let seconds = duration.as_secs_f64().ceil() as u64;
    match (seconds / 60, seconds % 60) {
        (0, 0 | 1) => format!("{}ms", duration.as_millis()),
        (0, seconds) => format!("{seconds}s"),
        (minutes, seconds) => format!("{minutes}m{seconds}s"),
    }
}

impl Allowances {
    /// A request comes `now` with a key; `None` where that has no limits.
    ///
    /// # Errors
    /// [`Spent`].
    pub fn ask(&self, grant: &Grant, now: Duration) -> Result<Option<Allowance>, Spent> {
        let limits = grant.terms.limits;
        if limits == KeyLimits::default() {
            return Ok(None);
        }
        let account = self.account(grant.tenant, now);
        {
            let mut had = account.lock();
            let Had { requests, tokens, in_flight } = &mut *had;
            if let Some(limit) = limits.in_flight.filter(|limit| *in_flight >= *limit) {
                return Err(Spent { limit, what: "requests in flight", wait: Duration::from_secs(1) });
            }
            requests.look(limits.requests_per_minute, ("requests in a minute", 1.0), now)?;
            tokens.look(limits.tokens_per_minute, (TOKENS, 0.0), now)?;
            requests.had += 1.0;
            *in_flight += 1;
        }
        Ok(Some(Allowance { account, tokens_per_minute: limits.tokens_per_minute, counted: 0 }))
    }

    /// Puts into the headers of an answer what is left of what the key may have in a minute.
    pub fn tell(&self, grant: &Grant, now: Duration, headers: &mut HeaderMap) {
        let KeyLimits { requests_per_minute, tokens_per_minute, .. } = grant.terms.limits;
        if requests_per_minute.is_none() && tokens_per_minute.is_none() {
            return;
        }
        let account = self.account(grant.tenant, now);
        let mut had = account.lock();
        had.requests.tell(requests_per_minute, &REQUESTS_HEADERS, now, headers);
        had.tokens.tell(tokens_per_minute, &TOKENS_HEADERS, now, headers);
    }

    fn account(&self, tenant: u64, now: Duration) -> Arc<Account> {
        if let Some(known) = self.accounts.get(&tenant) {
            return Arc::clone(&known);
        }
        if self.accounts.len() >= MOST_KEYS {
            let is_busy = |account: &Account| {
                let had = account.lock();
                let is_late = |bucket: &Bucket| now < bucket.at + Duration::from_secs(60);
                had.in_flight > 0 || is_late(&had.requests) || is_late(&had.tokens)
            };
            self.accounts.retain(|_, account| is_busy(account));
        }
        Arc::clone(&self.accounts.entry(tenant).or_default())
    }
}

/// A request that has been allowed; dropped, it is over.
#[derive(Debug)]
pub struct Allowance {
    account: Arc<Account>,
    tokens_per_minute: Option<u32>,
    /// Tokens.
    counted: usize,
}

impl Allowance {
    /// Whether tokens count.
    #[must_use]
    pub fn counts_tokens(&self) -> bool {
        self.tokens_per_minute.is_some()
    }

    /// Its prompt has so many, as is known `now`; others that came with it may have had all that was left.
    ///
    /// # Errors
    /// [`Spent`].
    pub fn begin(&mut self, tokens: usize, now: Duration) -> Result<(), Spent> {
        self.account.lock().tokens.look(self.tokens_per_minute, (TOKENS, 0.0), now)?;
        self.count(tokens);
        Ok(())
    }

    /// It has so many more.
    pub fn count_more(&mut self, tokens: usize) {
        self.count(self.counted + tokens);
    }

    /// It has so many tokens, as far as is known.
    pub fn count(&mut self, tokens: usize) {
        if self.counts_tokens() {
            let mut had = self.account.lock();
            had.tokens.had = (had.tokens.had + tokens as f64 - self.counted as f64).max(0.0);
            self.counted = tokens;
        }
    }
}

impl Drop for Allowance {
    fn drop(&mut self) {
        self.account.lock().in_flight -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::Terms;

    fn grant(tenant: u64, limits: KeyLimits) -> Grant {
        Grant { tenant, terms: Terms { limits, ..Terms::default() } }
    }

    const NOTHING: KeyLimits =
        KeyLimits { requests_per_minute: None, tokens_per_minute: None, in_flight: None };
    const NOW: Duration = Duration::from_secs(1_000);

    fn after(seconds: u64) -> Duration {
        NOW + Duration::from_secs(seconds)
    }

    #[test]
    fn a_minutes_requests_come_back_one_by_one() {
        let (allowances, limits) =
            (Allowances::default(), KeyLimits { requests_per_minute: Some(3), ..NOTHING });
        let key = grant(1, limits);
        for _ in 0..3 {
            allowances.ask(&key, NOW).unwrap();
        }
        let spent = allowances.ask(&key, NOW).unwrap_err();
        assert_eq!((spent.limit, spent.wait), (3, Duration::from_secs(20)));
        assert!(allowances.ask(&grant(2, limits), NOW).is_ok(), "another key has its own");
        assert!(allowances.ask(&key, after(19)).is_err());
        allowances.ask(&key, after(20)).unwrap();
        assert!(allowances.ask(&key, after(20)).is_err());
        // However long nothing was asked for, it is a minute's.
        for _ in 0..3 {
            allowances.ask(&key, after(9_000)).unwrap();
        }
        assert!(allowances.ask(&key, after(9_000)).is_err());
    }

    #[test]
    fn tokens_are_counted_when_they_are_known_and_made_up_for() {
        let allowances = Allowances::default();
        let key = grant(1, KeyLimits { tokens_per_minute: Some(60), ..NOTHING });
        let mut first = allowances.ask(&key, NOW).unwrap().unwrap();
        first.count(50);
        let mut second = allowances.ask(&key, NOW).unwrap().unwrap();
        second.count(20);
        let spent = allowances.ask(&key, NOW).unwrap_err();
        assert_eq!((spent.what, spent.wait), (TOKENS, Duration::from_secs(10)));
        // Its prompt was shorter than it looked.
        second.count(5);
        assert!(allowances.ask(&key, NOW).is_ok());
        second.count(6_000);
        assert_eq!(allowances.ask(&key, NOW).unwrap_err().wait, LONGEST_WAIT);
        assert!(allowances.ask(&key, after(5_989)).is_err() && allowances.ask(&key, after(5_991)).is_ok());
    }

    #[test]
    fn those_that_come_together_do_not_all_get_what_is_left() {
        let allowances = Allowances::default();
        let key = grant(1, KeyLimits { tokens_per_minute: Some(60), ..NOTHING });
        let ask = || allowances.ask(&key, NOW).unwrap().unwrap();
        let (mut one, mut two) = (ask(), ask());
        one.begin(100, NOW).unwrap();
        assert_eq!(two.begin(1, NOW).unwrap_err().what, TOKENS);
    }

    #[test]
    fn what_was_had_without_a_limit_does_not_count_for_a_later_one() {
        let allowances = Allowances::default();
        let minute = |requests, tokens| KeyLimits {
            requests_per_minute: requests,
            tokens_per_minute: tokens,
            in_flight: None,
        };
        for _ in 0..100 {
            allowances.ask(&grant(1, minute(None, Some(1_000_000))), NOW).unwrap().unwrap().count(5);
        }
        for _ in 0..2 {
            allowances.ask(&grant(1, minute(Some(2), None)), NOW).unwrap().unwrap().count(5_000);
        }
        assert!(allowances.ask(&grant(1, minute(Some(2), None)), NOW).is_err());
        allowances.ask(&grant(1, minute(None, Some(10))), NOW).unwrap();
    }

    #[test]
    fn what_is_left_is_told_as_openai_tells_it() {
        let allowances = Allowances::default();
        let key = grant(
            1,
            KeyLimits { requests_per_minute: Some(3), tokens_per_minute: Some(6_000), in_flight: None },
        );
        let mut first = allowances.ask(&key, NOW).unwrap().unwrap();
        first.count(250);
        let told = |now| {
            let mut headers = HeaderMap::new();
            allowances.tell(&key, now, &mut headers);
            let text = |name: &HeaderName| headers[name].to_str().unwrap().to_owned();
            [REQUESTS_HEADERS.each_ref().map(text), TOKENS_HEADERS.each_ref().map(text)]
        };
        assert_eq!(told(NOW), [["3", "2", "20s"], ["6000", "5750", "3s"]]);
        assert_eq!(told(after(2)), [["3", "2", "18s"], ["6000", "5950", "500ms"]]);
        assert_eq!(told(after(60)), [["3", "3", "0ms"], ["6000", "6000", "0ms"]]);
        first.count(12_250);
        assert_eq!(told(after(60))[1], ["6000", "0", "2m0s"]);
        let mut headers = HeaderMap::new();
        allowances.tell(&grant(2, KeyLimits { in_flight: Some(1), ..NOTHING }), NOW, &mut headers);
        assert!(headers.is_empty());
    }

    #[test]
    fn those_in_flight_are_over_when_they_end() {
        let allowances = Allowances::default();
        let key = grant(1, KeyLimits { in_flight: Some(2), ..NOTHING });
        let (one, two) = (allowances.ask(&key, NOW).unwrap(), allowances.ask(&key, NOW).unwrap());
        assert_eq!(allowances.ask(&key, NOW).unwrap_err().what, "requests in flight");
        drop(one);
        assert!(allowances.ask(&key, NOW).is_ok());
        drop(two);
        assert!(allowances.ask(&grant(2, NOTHING), NOW).unwrap().is_none());
    }

    #[test]
    fn keys_that_ask_for_nothing_are_forgotten() {
        let allowances = Allowances::default();
        let limits = KeyLimits { requests_per_minute: Some(1), ..NOTHING };
        for tenant in 0..MOST_KEYS as u64 {
            allowances.ask(&grant(tenant, limits), NOW).unwrap();
        }
        allowances.ask(&grant(u64::MAX, limits), after(61)).unwrap();
        assert_eq!(allowances.accounts.len(), 1);
    }
}
