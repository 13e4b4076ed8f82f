//! What goes wrong again and again is told when it begins, when it changes, and once a minute: a collector may be away for a night.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Between two lines that say the same.
const AGAIN_AFTER: Duration = Duration::from_secs(60);

/// What goes wrong at present, and when that was told.
#[derive(Debug, Default)]
pub(super) struct Trouble(Mutex<Option<(String, Instant)>>);

impl Trouble {
    /// Whether to tell of it `now`.
    pub(super) fn is_news(&self, why: &str, now: Instant) -> bool {
        let mut told = self.lock();
        let is_news =
            told.as_ref().is_none_or(|(before, since)| before != why || now >= *since + AGAIN_AFTER);
        if is_news {
            *told = Some((why.to_owned(), now));
        }
        is_news
    }

    /// It is over; whether there was any.
    pub(super) fn ends(&self) -> bool {
        self.lock().take().is_some()
    }

    fn lock(&self) -> MutexGuard<'_, Option<(String, Instant)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_is_told_once_a_minute() {
        let (trouble, now) = (Trouble::default(), Instant::now());
        assert!(!trouble.ends());
        assert!(trouble.is_news("away", now) && !trouble.is_news("away", now + AGAIN_AFTER / 2));
        assert!(trouble.is_news("no TLS", now) && trouble.is_news("no TLS", now + AGAIN_AFTER));
        assert!(trouble.ends() && !trouble.ends());
        assert!(trouble.is_news("no TLS", now));
    }
}
