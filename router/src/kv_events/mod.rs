//! Follows what workers say of themselves: our own over gRPC, cache events, load, and the size of their caches; engines that publish their cache
//! events over ZeroMQ, these.
//!
//! A task for each of these workers. What requests go to the worker is told to it beforehand, since events name requests
//! ([`CacheFeed`](router_core::prefix::feed::CacheFeed) says what for): our own worker's by their id, an engine's by the session that the request says it
//! is of ([`naming`]), which is the client's, or else the id again. Knows no policies. Next: the worker's
//! [`Reports`](router_core::Reports) and the decider's tree.

mod events;
mod load;
mod naming;
mod over_grpc;
mod over_zmq;
mod tell;

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use http::HeaderValue;
use router_core::prefix::Cut;
use router_core::prefix::feed::{CacheFeed, FollowedPath, Listener, PromptUsage};
use router_core::{Decider, Worker};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::watch;

use self::events::EventFollower;
pub use self::naming::ToSay;
use self::naming::{in_body, in_header};
use self::over_grpc::GrpcEvents;
use self::over_zmq::ZmqEvents;
pub use self::over_zmq::{
    NamedIn, PATH as VLLMS_EVENTS_PATH, SGLANGS_PATH as SGLANGS_EVENTS_PATH, ServerInfo,
    Source as EngineEvents,
};
use self::tell::Teller;
use crate::back_off::BackOff;
use crate::stages::parse::Reading;
use crate::transport::{GrpcTransport, TransportError, WorkerRequest};

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
    sender: UnboundedSender<Told>,
    unheard: Arc<AtomicUsize>,
    listens: Arc<AtomicBool>,
    /// Of an engine: where to say where it publishes.
    engine: Option<watch::Sender<Option<EngineEvents>>>,
}

/// What the task hears.
struct Hearing {
    receiver: UnboundedReceiver<Told>,
    unheard: Arc<AtomicUsize>,
    /// Who tells other routers of it, by way of the worker.
    teller: Option<Teller>,
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
        if let Some(teller) = &self.teller {
            teller.tell(&told);
        }
        told
    }
}

/// One request at a worker that is followed. Dropping it says that it is over.
pub struct Followed {
    sender: UnboundedSender<Told>,
    id: Arc<str>,
    usage: Option<PromptUsage>,
    to_say: Option<ToSay>,
}

impl Followed {
    /// What the request is to say besides, so that the engine names it as it was told of.
    #[must_use]
    pub fn to_say(&mut self) -> Option<ToSay> {
        self.to_say.take()
    }

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
    pub fn of_ours(
        worker: Arc<Worker>,
        (grpc, listener): (GrpcTransport, Listener),
        decider: (Arc<Decider>, Instant),
    ) -> (Self, impl Future<Output = ()> + Send + use<>) {
        let (follower, receiver) = Self::new(None);
        let (unheard, listens) = (Arc::clone(&follower.unheard), Arc::clone(&follower.listens));
        let (grpc, started) = (Arc::new(grpc), decider.1);
        let following = async move {
            let (teller, told) = Teller::new(Arc::clone(&worker), listener);
            let hearing = Hearing { receiver, unheard, teller: Some(teller) };
            let events = GrpcEvents::new(Arc::clone(&worker), Arc::clone(&grpc));
            let events = (events, CacheFeed::new(listener));
            let events = EventFollower::new(Arc::clone(&worker), events, listens, decider);
            tokio::join!(
                events.run(hearing),
                load::run(&worker, &grpc, started, listener.router),
                tell::run(&worker, &grpc, told),
            );
        };
        (follower, following)
    }

    /// Follows an engine once it has [said](Self::offer) where it publishes, and tells `decider`, whose clock began at `started`. The future never
    /// ends.
    pub fn of_engine(
        worker: Arc<Worker>,
        decider: (Arc<Decider>, Instant),
    ) -> (Self, impl Future<Output = ()> + Send + use<>) {
        let (engine, sources) = watch::channel(None);
        let (follower, receiver) = Self::new(Some(engine));
        let (unheard, listens) = (Arc::clone(&follower.unheard), Arc::clone(&follower.listens));
        let events = (ZmqEvents::new(sources), CacheFeed::of_engine());
        let events = EventFollower::new(worker, events, listens, decider);
        (follower, events.run(Hearing { receiver, unheard, teller: None }))
    }

    fn new(engine: Option<watch::Sender<Option<EngineEvents>>>) -> (Self, UnboundedReceiver<Told>) {
        let (sender, receiver) = unbounded_channel();
        let (unheard, listens) = (Arc::default(), Arc::default());
        (Self { sender, unheard, listens, engine }, receiver)
    }

    /// Whether the worker is an engine that nobody here wrote.
    #[must_use]
    pub fn is_of_engine(&self) -> bool {
        self.engine.is_some()
    }

    /// Where a request says its name to an engine; `None` for our own workers.
    fn named_in(&self) -> Option<NamedIn> {
        let told = self.engine.as_ref()?.borrow();
        Some(told.as_ref().map_or(NamedIn::Header, |source| source.named_in))
    }

    /// The engine has come up, and says that it publishes its cache events there, or not at all.
    pub fn offer(&self, events: Option<EngineEvents>) {
        if let Some(engine) = &self.engine {
            engine.send_replace(events);
        }
    }

    /// A request with that id and prompt is about to be sent to the worker. `None` if nothing would come of following it.
    pub async fn follow(
        &self,
        id: &HeaderValue,
        request: &WorkerRequest,
        reading: &Reading,
    ) -> Option<Followed> {
        if reading.blocks.is_empty() || !self.listens.load(Ordering::Relaxed) {
            return None;
        }
        let (id, to_say) = match self.named_in() {
            None => (id.to_str().ok()?.into(), None),
            Some(NamedIn::Header) => in_header(id, request)?,
            // Boxed, since a request's future should be small.
            Some(NamedIn::Body) => Box::pin(in_body(id, request)).await?,
        };
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
        Some(Followed { sender: self.sender.clone(), id, usage: None, to_say })
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
