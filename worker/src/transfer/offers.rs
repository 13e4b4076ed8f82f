//! KV that other workers may fetch, each by its ticket, once, and for a while.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;

/// Who does not fetch within this does not any more; vLLM's lease.
pub(super) const LEASE: Duration = Duration::from_secs(30);

/// What is offered.
#[derive(Debug, Default)]
pub(super) struct Offers(Mutex<HashMap<u128, Bytes>>);

impl Offers {
    /// Offers KV until it is taken or its lease is over, which `lapsed` is told. Returns the ticket: who does not know it, gets nothing. Must be called
    /// within a tokio runtime.
    pub(super) fn offer(self: &Arc<Self>, kv: Bytes, lapsed: impl FnOnce() + Send + 'static) -> String {
        let ticket = rand::random();
        self.all().insert(ticket, kv);
        let offers = Arc::clone(self);
        tokio::spawn(async move {
            tokio::time::sleep(LEASE).await;
            if offers.all().remove(&ticket).is_some() {
                lapsed();
            }
        });
        format!("{ticket:032x}")
    }

    /// What is offered under that ticket, to whoever asks first.
    pub(super) fn take(&self, ticket: &str) -> Option<Bytes> {
        let ticket = u128::from_str_radix(ticket, 16).ok()?;
        self.all().remove(&ticket)
    }

    fn all(&self) -> MutexGuard<'_, HashMap<u128, Bytes>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_offer_is_taken_once_or_lapses() {
        let offers = Arc::new(Offers::default());
        let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
        let offer = |kv: &'static [u8]| {
            let tell = tell.clone();
            offers.offer(Bytes::from_static(kv), move || tell.send(kv).unwrap())
        };
        let (taken, forgotten) = (offer(b"taken"), offer(b"forgotten"));
        assert_eq!(offers.take(&taken).as_deref(), Some(&b"taken"[..]));
        for none in [taken.as_str(), "", "no number", "0"] {
            assert!(offers.take(none).is_none(), "{none}");
        }
        tokio::time::sleep(LEASE * 2).await;
        assert!(offers.take(&forgotten).is_none());
        assert_eq!((told.recv().await, told.try_recv().is_err()), (Some(&b"forgotten"[..]), true));
    }
}
