//! Of which models it is known that an engine goes on with a message that has begun.
//!
//! Nearly all do: their templates are cut off behind the message's text. Some models have renderers of their own in vLLM (`DeepSeek` V3.2 and V4), which write the turn's end behind it
//! whatever they are told. Knows nothing of how that is found out.

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A fleet serves a few models; adapters may be many.
const MOST_MODELS: usize = 1_024;

/// Those models.
#[derive(Debug, Default)]
pub struct Templates {
    go_on: Mutex<HashSet<Box<str>>>,
}

impl Templates {
    /// Whether it is known of `model`.
    #[must_use]
    pub fn go_on(&self, model: &str) -> bool {
        self.lock().contains(model)
    }

    /// It is from now on.
    pub fn note(&self, model: &str) {
        let mut known = self.lock();
        if known.len() >= MOST_MODELS {
            known.clear();
        }
        known.insert(model.into());
    }

    fn lock(&self) -> MutexGuard<'_, HashSet<Box<str>>> {
        self.go_on.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
