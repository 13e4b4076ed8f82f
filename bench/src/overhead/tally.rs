//! What has been counted so far: answers, chunks, errors by their text.
//!
//! Shared by all tasks of the generator; nothing is ever dropped from it. Next on the path: [`super::rig`].

use std::collections::BTreeMap;
use std::fmt::Display;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Distinct texts of errors that are kept apart; the rest are counted together.
const DISTINCT_ERRORS: usize = 20;

/// Counters of one part of the measurement.
#[derive(Debug, Default)]
pub struct Tally {
    requests: AtomicU64,
    chunks: AtomicU64,
    errors: Mutex<BTreeMap<String, u64>>,
}

/// The counters at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Good answers.
    pub requests: u64,
    /// Chunks of streams.
    pub chunks: u64,
}

impl Tally {
    /// One good answer more; how many there are now.
    pub fn add_request(&self) -> u64 {
        self.requests.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// One chunk more.
    pub fn add_chunk(&self) {
        self.chunks.fetch_add(1, Ordering::Relaxed);
    }

    /// One failure more.
    pub fn add_error(&self, error: &impl Display) {
        let mut errors = self.lock();
        let mut text = error.to_string();
        if errors.len() >= DISTINCT_ERRORS && !errors.contains_key(&text) {
            text = "other errors".to_owned();
        }
        *errors.entry(text).or_default() += 1;
    }

    /// The counters now.
    pub fn counts(&self) -> Counts {
        Counts {
            requests: self.requests.load(Ordering::Relaxed),
            chunks: self.chunks.load(Ordering::Relaxed),
        }
    }

    /// All errors by their text.
    pub fn errors(&self) -> BTreeMap<String, u64> {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, u64>> {
        self.errors.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Counts {
    /// What came since an earlier moment.
    #[must_use]
    pub fn since(self, earlier: Self) -> Self {
        Self { requests: self.requests - earlier.requests, chunks: self.chunks - earlier.chunks }
    }
}
