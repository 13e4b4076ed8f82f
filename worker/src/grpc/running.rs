//! The generations that run, by the ids of their requests, so that they can be ended from outside.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures_util::future::{AbortHandle, AbortRegistration};

use crate::engine::AbortFlag;

/// What can be aborted, by the request's id.
type ById = HashMap<Arc<str>, Vec<Entry>>;

/// What ends a generation.
#[derive(Debug)]
struct Entry {
    number: u64,
    /// Ends the reply, which says why; it may be that nobody reads it now.
    reply: AbortHandle,
    /// Ends the generation, whether anybody reads or not.
    generation: AbortFlag,
}

/// All generations that came over gRPC and have an id. As many as the engine lets in.
#[derive(Debug, Default)]
pub(super) struct Running {
    by_id: Mutex<ById>,
    /// Numbers are never given out again: whoever was aborted leaves after others may have come by the same id.
    next_number: AtomicU64,
}

/// A place among those that run; dropping it leaves.
#[derive(Debug)]
pub(super) struct Place {
    running: Arc<Running>,
    id: Arc<str>,
    number: u64,
}

impl Running {
    /// Enters a generation, which ends when `generation` is raised. The registration makes a future or stream that ends when it
    /// is aborted.
    pub(super) fn enter(
        self: &Arc<Self>,
        id: &Arc<str>,
        generation: AbortFlag,
    ) -> (Place, AbortRegistration) {
        let (reply, registration) = AbortHandle::new_pair();
        let number = self.next_number.fetch_add(1, Ordering::Relaxed);
        // Clients may use an id twice.
        self.lock().entry(Arc::clone(id)).or_default().push(Entry { number, reply, generation });
        (Place { running: Arc::clone(self), id: Arc::clone(id), number }, registration)
    }

    /// Ends all generations of that id. Returns how many.
    pub(super) fn abort(&self, id: &str) -> usize {
        let aborted = self.lock().remove(id).unwrap_or_default();
        for Entry { reply, generation, .. } in &aborted {
            // The reply first: it is to end as aborted, and not because its generation has.
            reply.abort();
            generation.raise();
        }
        aborted.len()
    }

    fn lock(&self) -> MutexGuard<'_, ById> {
        self.by_id.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut by_id = self.running.lock();
        if let Some(alike) = by_id.get_mut(&self.id) {
            alike.retain(|entry| entry.number != self.number);
            if alike.is_empty() {
                by_id.remove(&self.id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_leaves_is_forgotten_and_whoever_is_aborted_hears_of_it() {
        let running = Arc::<Running>::default();
        let id: Arc<str> = "a".into();
        let (first, _registration) = running.enter(&id, AbortFlag::default());
        let (second, _other) = running.enter(&id, AbortFlag::default());
        drop(first);
        assert_eq!(running.abort("b"), 0);
        assert_eq!(running.abort("a"), 1);
        drop(second);
        assert_eq!(running.abort("a"), 0);
        assert!(running.lock().is_empty());
    }

    #[test]
    fn whoever_leaves_after_an_abort_takes_nobody_of_the_same_id_along() {
        let running = Arc::<Running>::default();
        let id: Arc<str> = "a".into();
        let (aborted, _registration) = running.enter(&id, AbortFlag::default());
        assert_eq!(running.abort("a"), 1);
        let (_later, _other) = running.enter(&id, AbortFlag::default());
        drop(aborted);
        assert_eq!(running.abort("a"), 1, "the later one can still be aborted");
    }
}
