//! By way of a gateway: a proxy in front of the router that asks it where a request is to go, sends it there itself, and shows it the answer as it passes.
//!
//! The stages see an attempt like any other: a handover goes out where a request would, and what the gateway says of the answer is the answer. Their
//! other side is the [conversation](crate::gateway) with the gateway, in the same task: it polls the stages when something has come and reads on when something has
//! been taken, so nobody is woken here.

use std::collections::{HashSet, VecDeque};
use std::fmt;
use std::future::{Future, poll_fn};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{HeaderMap, Response};
use http_body::{Body, Frame, SizeHint};
use router_core::{Worker, WorkerSlot};

use super::{TransportError, UpstreamBody, WorkerRequest};
use crate::payload::Payload;

/// What a gateway is to send, and where.
#[derive(Clone, Debug)]
pub struct Handover {
    /// The worker; behind it those that are as good where it cannot be used, in their order.
    pub to: Vec<SocketAddr>,
    /// Headers as the worker is to get them, but for those of the connection.
    pub headers: HeaderMap,
    /// Body.
    pub body: Payload,
}

/// A future of what a gateway is to send.
pub type HandingOver<'a> = Pin<Box<dyn Future<Output = Result<Handover, TransportError>> + Send + 'a>>;

/// A body that a gateway shows, piece by piece: the request's, or the answer's. Cheap to clone; all clones are one.
#[derive(Clone, Debug, Default)]
pub struct ShownBody(Arc<Mutex<Shown>>);

#[derive(Debug, Default)]
struct Shown {
    pieces: VecDeque<Bytes>,
    is_whole: bool,
    /// What is to come of a length that was announced.
    announced_bytes: u64,
}

impl ShownBody {
    /// A body of which nothing has come, and so much will.
    #[must_use]
    pub fn of_length(announced_bytes: u64) -> Self {
        Self(Arc::new(Mutex::new(Shown { announced_bytes, ..Shown::default() })))
    }

    /// A piece of it has come.
    pub fn push(&self, piece: Bytes) {
        let mut shown = locked(&self.0);
        shown.announced_bytes = shown.announced_bytes.saturating_sub(piece.len() as u64);
        if !piece.is_empty() {
            shown.pieces.push_back(piece);
        }
    }

    /// It is whole.
    pub fn end(&self) {
        locked(&self.0).is_whole = true;
    }

    /// Whether pieces wait for somebody to take them.
    #[must_use]
    pub fn has_pieces(&self) -> bool {
        !locked(&self.0).pieces.is_empty()
    }
}

impl Body for ShownBody {
    type Data = Bytes;
    type Error = TransportError;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, TransportError>>> {
        let mut shown = locked(&self.0);
        match shown.pieces.pop_front() {
            Some(piece) => Poll::Ready(Some(Ok(Frame::data(piece)))),
            None if shown.is_whole => Poll::Ready(None),
            None => Poll::Pending,
        }
    }

    fn is_end_stream(&self) -> bool {
        let shown = locked(&self.0);
        shown.pieces.is_empty() && shown.is_whole
    }

    fn size_hint(&self) -> SizeHint {
        let shown = locked(&self.0);
        let here: usize = shown.pieces.iter().map(Bytes::len).sum();
        let mut hint = SizeHint::new();
        hint.set_lower(here as u64 + if shown.is_whole { 0 } else { shown.announced_bytes });
        hint
    }
}

/// The gateway that has asked about a request, as the stages see it.
#[derive(Clone, Default)]
pub struct Gateway(Arc<Mutex<Passing>>);

/// What passes between a conversation and the stages.
#[derive(Default)]
struct Passing {
    /// Workers that it may be sent to; none where it may be any.
    subset: Option<HashSet<SocketAddr>>,
    /// Who else might serve the request.
    others: Vec<(WorkerSlot, Handover)>,
    handover: Option<Handover>,
    /// There is one handover for each request: a gateway does not ask again.
    has_gone: bool,
    /// Where it was sent first.
    picked: Option<SocketAddr>,
    answer: Option<Response<ShownBody>>,
    /// Whose answer it is, if not of whoever was picked.
    went_on_to: Option<Arc<Worker>>,
}

/// Where a worker is, if that is no name.
fn place(worker: &Worker) -> Option<SocketAddr> {
    let address = &worker.spec.address;
    address.split_once("://").map_or(&address[..], |(_, place)| place).parse().ok()
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing that holds one can panic half-way through a change.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl fmt::Debug for Gateway {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gateway").field("has_gone", &self.has_gone()).finish_non_exhaustive()
    }
}

impl Gateway {
    /// A gateway that can reach the workers of `subset`, or any.
    #[must_use]
    pub fn new(subset: Option<HashSet<SocketAddr>>) -> Self {
        Self(Arc::new(Mutex::new(Passing { subset, ..Passing::default() })))
    }

    /// Those of `workers` that the gateway does not send to; none where it sends to any. One whose address is a name is none that it has been told of.
    pub fn beyond<'a>(&self, workers: impl Iterator<Item = &'a Arc<Worker>>) -> Vec<WorkerSlot> {
        let passing = locked(&self.0);
        let Some(subset) = &passing.subset else { return Vec::new() };
        let is_beyond = |worker: &&Arc<Worker>| place(worker).is_none_or(|place| !subset.contains(&place));
        workers.filter(is_beyond).map(|worker| worker.slot).collect()
    }

    /// Whether it sends only to some.
    #[must_use]
    pub fn has_subset(&self) -> bool {
        locked(&self.0).subset.is_some()
    }

    /// Whether it has been told where the request goes.
    #[must_use]
    pub fn has_gone(&self) -> bool {
        locked(&self.0).has_gone
    }

    /// Who may serve the request if whoever is picked cannot: those of them count that are to get the same.
    pub fn offer(&self, others: Vec<(WorkerSlot, Handover)>) {
        locked(&self.0).others = others;
    }

    /// Who has served the request in place of whoever was picked; told once. The next one to ask for the answer gets it.
    #[must_use]
    pub fn go_on(&self) -> Option<Arc<Worker>> {
        locked(&self.0).went_on_to.take()
    }

    /// The answer of whoever has served, if nobody has taken it.
    #[must_use]
    pub fn take_answer(&self) -> Option<Response<UpstreamBody>> {
        Some(locked(&self.0).answer.take()?.map(UpstreamBody::Gateway))
    }

    /// Has the gateway send a request as `handover` says, and waits for the head of the answer. If the gateway has gone on to another worker, this fails,
    /// and once it is asked for that worker it has its answer.
    ///
    /// # Errors
    /// When it has sent one already, or somebody else has answered.
    pub async fn send(
        &self,
        request: &WorkerRequest,
        mut handover: Handover,
    ) -> Result<Response<UpstreamBody>, TransportError> {
        {
            let mut passing = locked(&self.0);
            if std::mem::replace(&mut passing.has_gone, true) {
                drop(passing);
                let twice = TransportError::Gateway { what: "does not send a request twice" };
                return self.take_answer().ok_or(twice);
            }
            passing.picked = handover.to.first().copied();
            passing.others.retain(|(_, other)| other.headers == handover.headers);
            handover.to.extend(passing.others.iter().flat_map(|(_, other)| &other.to));
            passing.handover = Some(handover);
        }
        request.sets_out();
        poll_fn(|_| if locked(&self.0).answer.is_some() { Poll::Ready(()) } else { Poll::Pending }).await;
        if locked(&self.0).went_on_to.is_some() {
            return Err(TransportError::PassedOver);
        }
        self.take_answer().ok_or(TransportError::Gateway { what: "has no answer" })
    }

    /// What the gateway has not been told yet.
    #[must_use]
    pub fn take_handover(&self) -> Option<Handover> {
        locked(&self.0).handover.take()
    }

    /// A worker's answer has begun: that of `served_by`, if the gateway tells. An address that none of `workers` has is the picked one's by another name: there may
    /// be a tunnel on the way.
    pub fn answered(
        &self,
        answer: Response<ShownBody>,
        served_by: Option<SocketAddr>,
        workers: &[Arc<Worker>],
    ) {
        let mut passing = locked(&self.0);
        passing.answer = Some(answer);
        let Some(elsewhere) = served_by.filter(|served_by| Some(*served_by) != passing.picked) else {
            return;
        };
        let offered = passing.others.iter().find(|(_, other)| other.to.contains(&elsewhere));
        let is_it = |worker: &&Arc<Worker>| match offered {
            Some((slot, _)) => worker.slot == *slot,
            None => place(worker) == Some(elsewhere),
        };
        passing.went_on_to = workers.iter().find(is_it).cloned();
    }
}
