//! KV that other workers may fetch, each by its ticket, once, and for a while: to ask for it, and again to take it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;

use crate::body::ChunkSource;

/// Who does not fetch within this does not any more; vLLM's lease.
pub(super) const LEASE: Duration = Duration::from_secs(30);

/// Bytes that are given to a connection at a time.
const PIECE_BYTES: usize = 1 << 20;

/// Whether a text may be a ticket. Others are not asked for: it goes into a path.
pub(super) fn is_ticket(text: &str) -> bool {
    text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// KV on its way to a connection. Whoever does not take it does not keep its memory for ever.
pub(crate) struct Outgoing(Arc<Mutex<Bytes>>);

impl Outgoing {
    /// Must be called within a tokio runtime.
    pub(super) fn new(kv: Bytes) -> Self {
        let left = Arc::new(Mutex::new(kv));
        let late = Arc::downgrade(&left);
        tokio::spawn(async move {
            tokio::time::sleep(LEASE).await;
            if let Some(left) = late.upgrade() {
                // Whoever fetches sees that less has come than it asked for.
                std::mem::take(&mut *left.lock().unwrap_or_else(PoisonError::into_inner));
            }
        });
        Self(left)
    }
}

impl ChunkSource for Outgoing {
    fn poll_chunk(&mut self, _: &mut Context<'_>) -> Poll<Option<Bytes>> {
        let mut left = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let piece_bytes = left.len().min(PIECE_BYTES);
        Poll::Ready((piece_bytes > 0).then(|| left.split_to(piece_bytes)))
    }
}

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
        let ticket = is_ticket(ticket).then(|| u128::from_str_radix(ticket, 16).ok())??;
        self.all().remove(&ticket)
    }

    fn all(&self) -> MutexGuard<'_, HashMap<u128, Bytes>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transfer::room::Room;

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
        for none in [taken.as_str(), "", "no number", "0", "../../x?y=000000000000000000000000"] {
            assert!(offers.take(none).is_none(), "{none}");
        }
        tokio::time::sleep(LEASE * 2).await;
        assert!(offers.take(&forgotten).is_none());
        assert_eq!((told.recv().await, told.try_recv().is_err()), (Some(&b"forgotten"[..]), true));
    }

    #[tokio::test(start_paused = true)]
    async fn what_nobody_takes_of_an_answer_is_let_go() {
        let room = Room::new(4 * PIECE_BYTES);
        let hold = || room.take(2 * PIECE_BYTES).unwrap().hold(vec![0; 2 * PIECE_BYTES]);
        let next = |outgoing: &mut Outgoing| {
            let mut context = Context::from_waker(std::task::Waker::noop());
            let Poll::Ready(piece) = outgoing.poll_chunk(&mut context) else { panic!("it waits for nobody") };
            piece.map(|piece| piece.len())
        };
        let (mut taken, mut left) = (Outgoing::new(hold()), Outgoing::new(hold()));
        assert_eq!(
            [next(&mut taken), next(&mut taken), next(&mut taken)],
            [Some(PIECE_BYTES), Some(PIECE_BYTES), None]
        );
        assert_eq!((next(&mut left), room.used_bytes()), (Some(PIECE_BYTES), 2 * PIECE_BYTES));
        tokio::time::sleep(LEASE * 2).await;
        assert_eq!((next(&mut left), room.used_bytes()), (None, 0));
    }
}
