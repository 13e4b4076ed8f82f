//! How much of what keys may ask for they have asked for of late.
//!
//! Each limit that goes by the minute is a bucket as large as that, which fills up again in a minute: who has asked for nothing may ask for all of it at once. Tokens are
//! counted once it is known how many there were, so that a request may take more than is left; the next one waits until that is made up for. Knows no clock: readings come in.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dashmap::DashMap;

use super::{Grant, KeyLimits};

/// Keys that are remembered; those that have asked for nothing of late are forgotten then.
const MOST_KEYS: usize = 65_536;
/// Nobody is told to come back later than that.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// Why a key may not ask for more at present.
#[derive(Clone, Copy, PartialEq, Debug, thiserror::Error)]
#[error("the API key may have {limit} {what}, and has had them; come back in {} s", wait.as_secs_f64().ceil())]
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
    fn refill(&mut self, per_minute: u32, now: Duration) {
        let passed_s = now.saturating_sub(self.at).as_secs_f64();
        self.had = (self.had - passed_s * f64::from(per_minute) / 60.0).max(0.0);
        self.at = self.at.max(now);
    }

    /// How long it takes until no more than so much has been had; `None` if that is so.
    fn wait(&self, per_minute: u32, most: f64) -> Option<Duration> {
        let beyond = (self.had - most) * 60.0 / f64::from(per_minute);
        (beyond > 0.0).then(|| Duration::from_secs_f64(beyond.min(LONGEST_WAIT.as_secs_f64())))
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
            // One more must fit whole; of tokens nobody knows yet how many there will be.
            for (bucket, limit, what, one) in [
                (&mut *requests, limits.requests_per_minute, "requests in a minute", 1.0),
                (&mut *tokens, limits.tokens_per_minute, "tokens in a minute", 0.0),
            ] {
                let Some(limit) = limit else { continue };
                bucket.refill(limit, now);
                if let Some(wait) = bucket.wait(limit, (f64::from(limit) - one).max(0.0)) {
                    return Err(Spent { limit, what, wait });
                }
            }
            requests.had += 1.0;
            *in_flight += 1;
        }
        Ok(Some(Allowance { account, counted: 0 }))
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
    /// Tokens.
    counted: usize,
}

impl Allowance {
    /// It has so many more.
    pub fn count_more(&mut self, tokens: usize) {
        self.count(self.counted + tokens);
    }

    /// It has so many tokens, as far as is known.
    pub fn count(&mut self, tokens: usize) {
        let mut had = self.account.lock();
        had.tokens.had = (had.tokens.had + tokens as f64 - self.counted as f64).max(0.0);
        self.counted = tokens;
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
        assert_eq!((spent.what, spent.wait), ("tokens in a minute", Duration::from_secs(10)));
        // Its prompt was shorter than it looked.
        second.count(5);
        assert!(allowances.ask(&key, NOW).is_ok());
        second.count(6_000);
        assert_eq!(allowances.ask(&key, NOW).unwrap_err().wait, LONGEST_WAIT);
        assert!(allowances.ask(&key, after(5_989)).is_err() && allowances.ask(&key, after(5_991)).is_ok());
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
