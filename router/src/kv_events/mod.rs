//! Follows what our own workers say of themselves: cache events, load, and the size of their caches.
//!
//! A task for each worker that speaks gRPC; others are never asked. What requests go to the worker is told to it beforehand, since
//! events name requests by their id ([`CacheFeed`](router_core::prefix::feed::CacheFeed) says what for). Knows no policies. Next:
//! the worker's [`Reports`](router_core::Reports) and the decider's tree.

mod events;
mod load;
mod tell;

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use http::HeaderValue;
use router_core::prefix::Cut;
use router_core::prefix::feed::{FollowedPath, Listener, PromptUsage};
use router_core::{CacheTrust, Decider, Worker};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use self::events::EventFollower;
use self::tell::Teller;
use crate::back_off::BackOff;
use crate::stages::parse::Reading;
use crate::transport::{GrpcTransport, TransportError};

/// A stream that broke is asked for again after this, then after twice as long, and so on.
const FIRST_BACK_OFF: Duration = Duration::from_millis(100);
/// The longest of these waits: a worker that comes back is followed within it.
const LONGEST_BACK_OFF: Duration = Duration::from_secs(5);
/// Until a worker that does not offer a stream is asked again; it may have been replaced by one that does.
const UNOFFERED_PAUSE: Duration = Duration::from_secs(60);
/// Requests told of that the task has not heard of yet. Beyond, requests are not followed: their entries stay as they were made.
const MAX_UNHEARD: usize = 16_384;

/// What is told of requests.
enum Told {
    Dispatched(Arc<str>, FollowedPath),
    Ended(Arc<str>, Option<PromptUsage>),
}

/// Where requests are told of; clones are the same.
#[derive(Clone)]
pub struct Follower {
    worker: Arc<Worker>,
    sender: UnboundedSender<Told>,
    unheard: Arc<AtomicUsize>,
}

/// What the task hears.
struct Hearing {
    receiver: UnboundedReceiver<Told>,
    unheard: Arc<AtomicUsize>,
    /// Who tells other routers of it.
    teller: Teller,
}

impl Hearing {
    async fn next(&mut self) -> Option<Told> {
        let told = self.receiver.recv().await?;
        Some(self.heard(told))
    }

    fn try_next(&mut self) -> Option<Told> {
        let told = self.receiver.try_recv().ok()?;
        Some(self.heard(told))
    }

    fn heard(&self, told: Told) -> Told {
        if matches!(told, Told::Dispatched(..)) {
            self.unheard.fetch_sub(1, Ordering::Relaxed);
        }
        self.teller.tell(&told);
        told
    }
}

/// One request at a worker that is followed. Dropping it says that it is over.
pub struct Followed {
    sender: UnboundedSender<Told>,
    id: Arc<str>,
    usage: Option<PromptUsage>,
}

impl Followed {
    /// The reply has said this of its prompt.
    pub fn used(&mut self, usage: PromptUsage) {
        self.usage = Some(usage);
    }
}

impl Drop for Followed {
    fn drop(&mut self) {
        // If nobody hears it, the worker has left.
        let _ = self.sender.send(Told::Ended(Arc::clone(&self.id), self.usage));
    }
}

impl Follower {
    /// Follows `worker` by way of `grpc` as `listener`, and tells `decider`, whose clock began at `started`. The future never ends.
    pub fn new(
        worker: Arc<Worker>,
        (grpc, listener): (GrpcTransport, Listener),
        decider: Arc<Decider>,
        started: Instant,
    ) -> (Self, impl Future<Output = ()> + Send + use<>) {
        let (sender, receiver) = unbounded_channel();
        let unheard = Arc::new(AtomicUsize::new(0));
        let follower = Self { worker: Arc::clone(&worker), sender, unheard: Arc::clone(&unheard) };
        let grpc = Arc::new(grpc);
        let following = async move {
            let (teller, told) = Teller::new(Arc::clone(&worker), listener);
            let hearing = Hearing { receiver, unheard, teller };
            let events =
                EventFollower::new((Arc::clone(&worker), listener), Arc::clone(&grpc), decider, started);
            tokio::join!(
                events.run(hearing),
                load::run(&worker, &grpc, started, listener.router),
                tell::run(&worker, &grpc, told),
            );
        };
        (follower, following)
    }

    /// A request with that id and prompt is about to be sent to the worker. `None` if nothing would come of following it.
    #[must_use]
    pub fn follow(&self, id: &HeaderValue, reading: &Reading) -> Option<Followed> {
        if reading.blocks.is_empty() || self.worker.reports.trust() == CacheTrust::Learned {
            return None;
        }
        let id: Arc<str> = id.to_str().ok()?.into();
        if self.unheard.fetch_add(1, Ordering::Relaxed) >= MAX_UNHEARD {
            self.unheard.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        let path = FollowedPath {
            hashes: reading.blocks.as_slice().into(),
            cut: Cut::Bytes(reading.opening),
            size: reading.prompt_bytes,
            tokens: reading.prompt_tokens,
        };
        self.sender.send(Told::Dispatched(Arc::clone(&id), path)).ok()?;
        Some(Followed { sender: self.sender.clone(), id, usage: None })
    }
}

/// The waits before a stream is asked for again.
fn back_off() -> BackOff {
    BackOff::between(FIRST_BACK_OFF, LONGEST_BACK_OFF)
}

/// Whether a worker says that it does not offer what it was asked for, and will not.
fn is_not_offered(error: &TransportError) -> bool {
    // FAILED_PRECONDITION, UNIMPLEMENTED.
    const NOT_OFFERED: [&str; 2] = ["9", "12"];
    let TransportError::Broken(crate::transport::Broken::Grpc { code, .. }) = error else { return false };
    NOT_OFFERED.contains(&code.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_worker_that_will_never_offer_it_is_left_alone() {
        let status = |code: &str| {
            let (code, message) = (code.to_owned(), String::new());
            TransportError::Broken(crate::transport::Broken::Grpc { code, message })
        };
        assert!(is_not_offered(&status("9")) && is_not_offered(&status("12")));
        assert!(!is_not_offered(&status("14")) && !is_not_offered(&TransportError::Left));
    }
}
