//! The generations that run, by the ids of their requests, so that they can be ended from outside.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures_util::future::{AbortHandle, AbortRegistration};

/// What can be aborted, by the request's id; of each its number.
type ById = HashMap<Arc<str>, Vec<(u64, AbortHandle)>>;

/// All generations that came over gRPC and have an id. As many as the engine lets in.
#[derive(Debug, Default)]
pub(super) struct Running {
    by_id: Mutex<ById>,
}

/// A place among those that run; dropping it leaves.
#[derive(Debug)]
pub(super) struct Place {
    running: Arc<Running>,
    id: Arc<str>,
    number: u64,
}

impl Running {
    /// Enters a generation. The registration makes a future or stream that ends when it is aborted.
    pub(super) fn enter(self: &Arc<Self>, id: &Arc<str>) -> (Place, AbortRegistration) {
        let (handle, registration) = AbortHandle::new_pair();
        let mut by_id = self.lock();
        let alike = by_id.entry(Arc::clone(id)).or_default();
        // Clients may use an id twice.
        let number = alike.last().map_or(0, |(number, _)| number + 1);
        alike.push((number, handle));
        (Place { running: Arc::clone(self), id: Arc::clone(id), number }, registration)
    }

    /// Ends all generations of that id. Returns how many.
    pub(super) fn abort(&self, id: &str) -> usize {
        let aborted = self.lock().remove(id).unwrap_or_default();
        aborted.iter().for_each(|(_, handle)| handle.abort());
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
            alike.retain(|(number, _)| *number != self.number);
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
        let (first, _registration) = running.enter(&id);
        let (second, _other) = running.enter(&id);
        drop(first);
        assert_eq!(running.abort("b"), 0);
        assert_eq!(running.abort("a"), 1);
        drop(second);
        assert_eq!(running.abort("a"), 0);
        assert!(running.lock().is_empty());
    }
}
