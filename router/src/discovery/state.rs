//! What is known of the sources themselves: whether they have said what their workers are, and how they do.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use prometheus::IntCounter;
use serde_json::{Value, json};

use super::DiscoveryError;

/// How long the router is not ready for want of a source that has said nothing yet. After that it serves with the workers that it has: a
/// source that fails for ever must not take all others with it.
const PATIENCE: Duration = Duration::from_secs(30);

/// One source.
pub struct SourceState {
    /// What it is called.
    pub name: Arc<str>,
    began: Instant,
    is_known: AtomicBool,
    /// When something was heard of it last, in milliseconds since it began.
    heard_ms: AtomicU64,
    workers: AtomicUsize,
    failures: IntCounter,
    /// The last failure, if nothing was heard since.
    failure: Mutex<Option<String>>,
}

impl SourceState {
    /// A source of which nothing is known; `failures` counts.
    #[must_use]
    pub fn new(name: Arc<str>, failures: IntCounter) -> Self {
        Self {
            name,
            began: Instant::now(),
            is_known: AtomicBool::new(false),
            heard_ms: AtomicU64::new(0),
            workers: AtomicUsize::new(0),
            failures,
            failure: Mutex::default(),
        }
    }

    /// It has said that it has so many workers, or that they are the same. Returns whether it had failed before.
    pub(super) fn hear(&self, workers: usize) -> bool {
        let now = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.heard_ms.store(now, Ordering::Relaxed);
        self.workers.store(workers, Ordering::Relaxed);
        self.is_known.store(true, Ordering::Relaxed);
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).take().is_some()
    }

    pub(super) fn fail(&self, error: &DiscoveryError) {
        self.failures.inc();
        *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error.to_string());
    }

    /// Whether it has ever said what its workers are.
    #[must_use]
    pub fn is_known(&self) -> bool {
        self.is_known.load(Ordering::Relaxed)
    }

    /// How many workers it has said it has.
    #[must_use]
    pub fn workers(&self) -> usize {
        self.workers.load(Ordering::Relaxed)
    }

    /// How long ago something was heard of it; since it began, if nothing was.
    #[must_use]
    pub fn age(&self) -> Duration {
        self.began.elapsed().saturating_sub(Duration::from_millis(self.heard_ms.load(Ordering::Relaxed)))
    }

    /// What operators are told.
    #[must_use]
    pub fn told(&self) -> Value {
        json!({
            "name": &*self.name,
            "known": self.is_known(),
            "workers": self.workers(),
            "age_s": self.age().as_secs_f64(),
            "failures": self.failures.get(),
            "failure": *self.failure.lock().unwrap_or_else(PoisonError::into_inner),
        })
    }
}

/// The first source that is to say what its workers are before the router counts as ready, `elapsed` after it was started.
#[must_use]
pub fn awaited(sources: &[Arc<SourceState>], elapsed: Duration) -> Option<&str> {
    let unknown = sources.iter().find(|source| !source.is_known());
    unknown.filter(|_| elapsed < PATIENCE).map(|source| &*source.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(name: &str) -> Arc<SourceState> {
        Arc::new(SourceState::new(name.into(), IntCounter::new("failures", "Failures.").unwrap()))
    }

    #[test]
    fn sources_are_awaited_until_they_have_said_something_but_not_for_ever() {
        let sources = [source("k8s://a"), source("k8s://b")];
        assert_eq!(awaited(&sources, Duration::ZERO), Some("k8s://a"));
        sources[0].hear(0);
        sources[1].fail(&DiscoveryError::Ended);
        assert_eq!(awaited(&sources, Duration::ZERO), Some("k8s://b"));
        assert_eq!(awaited(&sources, PATIENCE), None);
        sources[1].hear(2);
        assert_eq!(awaited(&sources, Duration::ZERO), None);
        assert_eq!(awaited(&[], Duration::ZERO), None);
    }

    #[test]
    fn a_failure_is_told_until_something_is_heard() {
        let source = source("k8s://a");
        assert!(!source.hear(3));
        source.fail(&DiscoveryError::Ended);
        let told = source.told();
        assert_eq!(
            (&told["workers"], &told["failures"], &told["known"]),
            (&json!(3), &json!(1), &json!(true))
        );
        assert!(told["failure"].is_string());
        assert!(source.hear(3) && source.told()["failure"].is_null());
    }
}
