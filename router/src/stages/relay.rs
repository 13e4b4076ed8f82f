//! Stage 6: the worker's answer → the client, piece by piece.
//!
//! hyper asks for the next piece when the client's socket has taken the last one, so a slow client slows its worker's
//! stream and nothing piles up here. A client that leaves drops the body, and with it the request at the worker.
//! A stream that breaks off is [gone on with](super::continuing) by another worker, or ends with an error event. Next: [`record`](super::record), which sees every piece go by.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Response};
use http_body::{Body, Frame, SizeHint};
use router_core::{Lease, Worker};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, Sleep};

use super::continuing::{self, Continuing, GoesOn, Record, Stop, Stopped};
use super::dispatch::{Begun, Dispatched};
use super::exchange::is_event_stream;
use super::keep_alive::{Early, Next};
use super::record::{Outcome, Recorder};
use crate::app::App;
use crate::config::Switch;
use crate::error::{SHUTTING_DOWN, error_event};
use crate::hop_by_hop;
use crate::openai::bounds;
use crate::openai::events::WholeEvents;
use crate::routes::Endpoint;
use crate::stall::Watch;
use crate::transport::{TransportError, UpstreamBody};

/// Reply header: the id of the worker that answered.
pub const ROUTER_WORKER: HeaderName = HeaderName::from_static("x-router-worker");
/// Reply header: the id of the worker that computed the prompt, if it was another.
pub const ROUTER_PREFILL_WORKER: HeaderName = HeaderName::from_static("x-router-prefill-worker");
/// Reply header: prompt tokens that the router expected in that worker's cache.
pub const ROUTER_HIT_TOKENS: HeaderName = HeaderName::from_static("x-router-hit-tokens");

/// The body of every reply of the router.
pub enum RelayBody {
    /// Whole, and ours.
    Full(Option<Bytes>),
    /// A worker's.
    Stream(Box<RelayStream>),
    /// One that has begun before a worker's.
    Early(Box<Early>),
}

impl RelayBody {
    /// A whole body.
    pub fn full(bytes: impl Into<Bytes>) -> Self {
        Self::Full(Some(bytes.into()).filter(|bytes| !bytes.is_empty()))
    }

    /// Whether it is what a gateway shows, and has already.
    #[must_use]
    pub fn is_at_gateway(&self) -> bool {
        matches!(self, Self::Stream(stream) if matches!(stream.upstream, UpstreamBody::Gateway(_)))
    }
}

/// A worker's reply on its way.
pub struct RelayStream {
    upstream: UpstreamBody,
    first: Option<Bytes>,
    state: State,
    /// Of a reply that is a stream of server-sent events as they are, in which an error can be said.
    events: Option<WholeEvents>,
    /// Of one that another worker could go on with.
    continuing: Option<Box<Continuing>>,
    /// Why no more is to be expected of this worker.
    stop: Option<Stop>,
    /// In place of the rest, what the worker has said of its failure.
    said: Option<Bytes>,
    /// The stream has said that it is over; what comes after that is of no use to anybody.
    is_over: bool,
    limits: Limits,
    /// Away while somebody is looked for who goes on.
    record: Option<Record>,
    /// Held for what it releases when dropped.
    lease: Option<Lease>,
    /// The same.
    _permit: OwnedSemaphorePermit,
}

enum State {
    Flowing,
    /// It has broken off, and somebody is looked for who goes on.
    Continuing(Pin<Box<dyn Future<Output = continuing::Outcome> + Send>>),
    /// The error event is out; the connection is closed once it has been flushed.
    Broken(TransportError),
    Flushing(TransportError),
    Ended,
}

/// How long after a stream's last event a worker may take to end its answer: engines do in the same moment.
const AFTER_DONE: Duration = Duration::from_secs(1);

/// Time limits of a reply. The timer is made when there is something to wait for, and not moved with each piece: it is
/// looked at again when it fires.
struct Limits {
    timer: Option<Pin<Box<Sleep>>>,
    /// Whom the timer wakes: nothing has to be said to it again while this is the same task.
    wakes: Option<Waker>,
    idle: Duration,
    total: Duration,
    deadline: Instant,
    last_piece: Instant,
    /// Over whether the worker stands still, where that would show.
    stall: Option<Watch>,
}

impl Limits {
    fn new(idle: Duration, total: Duration, deadline: Instant) -> Self {
        Self { timer: None, wakes: None, idle, total, deadline, last_piece: Instant::now(), stall: None }
    }

    /// Another piece is waited for, of a worker that is watched over so.
    fn begin(&mut self, stall: Option<Watch>) {
        (self.last_piece, self.stall, self.wakes) = (Instant::now(), stall, None);
    }

    /// From now on no longer than that.
    fn ends_within(&mut self, idle: Duration) {
        (self.idle, self.timer, self.wakes) = (self.idle.min(idle), None, None);
    }

    /// Whether the reply has taken too long as a whole. Looked at with each piece too: with a client that is slow there may always be
    /// a next one, and nothing to wait for.
    fn total_exceeded(&self, now: Instant) -> Option<TransportError> {
        (now >= self.deadline).then_some(TransportError::Total { limit: self.total })
    }

    fn poll_exceeded(&mut self, cx: &mut Context<'_>) -> Poll<TransportError> {
        let next = |last_piece: Instant| self.deadline.min(last_piece + self.idle);
        let timer =
            self.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(next(self.last_piece))));
        let is_over = timer.is_elapsed() || self.stall.as_ref().is_some_and(Watch::is_over);
        if !is_over && self.wakes.as_ref().is_some_and(|wakes| wakes.will_wake(cx.waker())) {
            return Poll::Pending;
        }
        self.wakes = Some(cx.waker().clone());
        if let Some(stall) = &mut self.stall
            && Pin::new(&mut *stall).poll(cx).is_ready()
        {
            // Who stays is told again.
            stall.begin_anew();
            self.wakes = None;
            return Poll::Ready(TransportError::Stalled { silence: stall.silence() });
        }
        loop {
            std::task::ready!(timer.as_mut().poll(cx));
            let now = Instant::now();
            if now >= self.deadline {
                return Poll::Ready(TransportError::Total { limit: self.total });
            }
            if now >= self.last_piece + self.idle {
                return Poll::Ready(TransportError::Idle { limit: self.idle });
            }
            timer.as_mut().reset(next(self.last_piece));
        }
    }
}

/// A watch over `worker`, with whom a stream has begun; `None` if it has left.
pub(super) fn watch(app: &App, worker: &Arc<Worker>) -> Option<Watch> {
    app.fleet.roster().upstream(worker).map(|upstream| upstream.stalls.watch())
}

/// Turns a dispatched request into the client's response.
#[must_use]
pub fn relay(app: &App, dispatched: Dispatched, mut recorder: Recorder) -> Response<RelayBody> {
    let Dispatched { begun, limits, deadline, reading, continuing, permit } = dispatched;
    let Begun { worker, prefill_worker, lease, hit_tokens, response, first } = begun;
    let (mut head, upstream) = response.into_parts();
    hop_by_hop::strip(&mut head.headers);
    if app.settings.route_headers == Switch::On {
        if let Ok(id) = HeaderValue::from_str(worker.id().as_str()) {
            head.headers.insert(ROUTER_WORKER, id);
        }
        if let Some(id) = prefill_worker.and_then(|worker| HeaderValue::from_str(worker.id().as_str()).ok()) {
            head.headers.insert(ROUTER_PREFILL_WORKER, id);
        }
        head.headers.insert(ROUTER_HIT_TOKENS, HeaderValue::from(hit_tokens));
    }
    let events = is_event_stream(&head.headers).then(WholeEvents::default);
    recorder.answered(head.status);
    let mut time_limits = Limits::new(limits.idle, limits.total, deadline);
    time_limits.begin(events.as_ref().and_then(|_| watch(app, &worker)));
    let stream = RelayStream {
        upstream,
        first,
        state: State::Flowing,
        events,
        continuing,
        stop: None,
        said: None,
        is_over: false,
        limits: time_limits,
        record: Some(Record { recorder, reading }),
        lease,
        _permit: permit,
    };
    Response::from_parts(head, RelayBody::Stream(Box::new(stream)))
}

impl RelayStream {
    fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, TransportError>>> {
        if let Some(first) = self.first.take() {
            let whole = self.pass(first, Instant::now());
            if !whole.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(whole))));
            }
        }
        match std::mem::replace(&mut self.state, State::Ended) {
            State::Flowing => {
                self.state = State::Flowing;
                match self.poll_upstream(cx) {
                    // Somebody is looked for who goes on.
                    Poll::Ready(None) if matches!(self.state, State::Continuing(_)) => self.poll_piece(cx),
                    piece => piece,
                }
            }
            State::Continuing(mut finding) => match finding.as_mut().poll(cx) {
                Poll::Ready(outcome) => match self.went_on(outcome) {
                    Some(piece) => Poll::Ready(Some(piece)),
                    None => self.poll_piece(cx),
                },
                Poll::Pending => {
                    self.state = State::Continuing(finding);
                    Poll::Pending
                }
            },
            State::Broken(error) => {
                // Once more around, so that hyper writes out the error event before it learns of the end.
                self.state = State::Flushing(error);
                cx.waker().wake_by_ref();
                Poll::Pending
            }
            State::Flushing(error) => Poll::Ready(Some(Err(error))),
            State::Ended => Poll::Ready(None),
        }
    }

    fn poll_upstream(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, TransportError>>> {
        if self.record.as_ref().is_some_and(|record| record.recorder.is_cut_off()) {
            return Poll::Ready(Some(self.break_off(TransportError::ShuttingDown)));
        }
        loop {
            if let Some(stop) = self.stop.take() {
                return Poll::Ready(self.stopped(stop));
            }
            match Pin::new(&mut self.upstream).poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) => {
                    if let Some(passed) = self.frame(frame) {
                        return Poll::Ready(Some(passed));
                    }
                }
                Poll::Ready(None) => {
                    let rest = self.rest();
                    if self.is_unfinished(&rest) {
                        return Poll::Ready(self.stopped(Stop::Broke(TransportError::Unfinished)));
                    }
                    self.finish();
                    return Poll::Ready((!rest.is_empty()).then(|| Ok(Frame::data(rest))));
                }
                Poll::Ready(Some(Err(error))) => return Poll::Ready(self.stopped(Stop::Broke(error))),
                Poll::Pending => {
                    let error = std::task::ready!(self.limits.poll_exceeded(cx));
                    // Who cannot be gone on with waits for the worker, as long as its limits allow.
                    if matches!(error, TransportError::Stalled { .. }) && !self.can_go_on(&error) {
                        continue;
                    }
                    return Poll::Ready(self.stopped(Stop::Broke(error)));
                }
            }
        }
    }

    /// What of a frame goes on; `None` if nothing does yet.
    fn frame(&mut self, frame: Frame<Bytes>) -> Option<Result<Frame<Bytes>, TransportError>> {
        let now = Instant::now();
        self.limits.last_piece = now;
        if let Some(error) = self.limits.total_exceeded(now) {
            return Some(self.break_off(error));
        }
        let is_last = self.upstream.is_end_stream();
        let frame = match frame.into_data() {
            Ok(piece) => {
                let mut whole = self.pass(piece, now);
                if self.stop.is_some() {
                    return (!whole.is_empty()).then(|| Ok(Frame::data(whole)));
                }
                if is_last {
                    let rest = self.rest();
                    if self.is_unfinished(&rest) {
                        return (!whole.is_empty()).then(|| Ok(Frame::data(whole)));
                    }
                    if !rest.is_empty() {
                        whole = [whole, rest].concat().into();
                    }
                }
                if whole.is_empty() && !is_last {
                    return None;
                }
                Frame::data(whole)
            }
            Err(trailers) => trailers,
        };
        if is_last {
            self.finish();
        }
        Some(Ok(frame))
    }

    /// Takes note of a piece that came `now`, and gives what of it can go on.
    fn pass(&mut self, piece: Bytes, now: Instant) -> Bytes {
        let Some(Record { recorder, .. }) = &mut self.record else { return piece };
        let changes = self.continuing.as_ref().is_some_and(|continuing| continuing.changes());
        if !changes {
            recorder.piece(&piece, now.into_std());
        }
        let whole = match &mut self.events {
            Some(events) => events.pass(piece),
            None => return piece,
        };
        let Some(continuing) = &mut self.continuing else {
            self.note_end(&whole);
            return whole;
        };
        let (whole, stop) = continuing.pass(whole);
        self.stop = stop;
        if changes && !whole.is_empty() {
            recorder.piece(&whole, now.into_std());
        }
        self.note_end(&whole);
        whole
    }

    /// What goes on to the client may say that the stream is over.
    fn note_end(&mut self, whole: &[u8]) {
        if bounds::is_last(whole) {
            self.is_over = true;
            self.limits.ends_within(AFTER_DONE);
        }
    }

    fn rest(&mut self) -> Bytes {
        self.events.as_mut().map(WholeEvents::rest).unwrap_or_default()
    }

    /// Whether a stream that ends with `rest` is not whole, though its worker ended it as if it were: a proxy before an engine that died does.
    fn is_unfinished(&self, rest: &[u8]) -> bool {
        let Some(Record { recorder, .. }) = &self.record else { return false };
        let endpoint = recorder.endpoint();
        let lacks_its_end = match &self.continuing {
            Some(continuing) => continuing.is_unfinished(rest),
            None => matches!(endpoint, Endpoint::Messages | Endpoint::Responses) && !bounds::is_last(rest),
        };
        let is_to_have_one = self.continuing.as_ref().is_some_and(|continuing| continuing.has_an_end())
            || recorder.worker().is_some_and(|worker| worker.says_ends(endpoint as u32));
        !self.is_over && self.events.is_some() && lacks_its_end && is_to_have_one
    }

    fn finish(&mut self) {
        if self.is_over
            && let Some(Record { recorder, .. }) = &self.record
            && let Some(worker) = recorder.worker()
        {
            worker.hear_end(recorder.endpoint() as u32);
        }
        self.state = State::Ended;
        self.end(Outcome::Complete);
    }

    fn end(&mut self, outcome: Outcome<'_>) {
        if let Some(Record { recorder, reading }) = &mut self.record {
            recorder.finish(outcome, reading);
        }
    }

    /// The rest will not come from this worker. `None` if somebody is looked for who goes on.
    fn stopped(&mut self, stop: Stop) -> Option<Result<Frame<Bytes>, TransportError>> {
        if self.is_over {
            self.finish();
            return None;
        }
        let error = match stop {
            Stop::Broke(error) => Some(error),
            Stop::Failed(says) => {
                self.said = Some(says);
                Some(TransportError::EngineFailed)
            }
            Stop::ThoughtIsOver => None,
        };
        let can_go_on = error.as_ref().is_none_or(|error| self.can_go_on(error));
        let Some(continuing) = self.continuing.take_if(|_| can_go_on) else {
            // It is there where a thought is over: that came by way of it.
            return error.map(|error| self.break_off(error));
        };
        let record = self.record.take()?;
        let stopped = Stopped { lease: self.lease.take(), error };
        self.state = State::Continuing(Box::pin(continuing.go_on(stopped, record)));
        None
    }

    /// Whether another worker may be asked for the rest.
    fn can_go_on(&self, error: &TransportError) -> bool {
        self.continuing.as_ref().is_some_and(|continuing| continuing.can_go_on(error))
    }

    /// Somebody goes on, or nobody does. Returns what the client gets of it at once.
    fn went_on(
        &mut self,
        continuing::Outcome { record, result }: continuing::Outcome,
    ) -> Option<Result<Frame<Bytes>, TransportError>> {
        self.record = Some(record);
        let said = self.said.take();
        match result {
            Ok(GoesOn::By(begun, continuing)) => {
                let Begun { worker, response, first, lease, .. } = *begun;
                (self.upstream, self.first, self.lease) = (response.into_body(), first, lease);
                self.events = Some(WholeEvents::default());
                self.limits.begin(continuing.watch(&worker));
                self.continuing = Some(continuing);
                self.state = State::Flowing;
                None
            }
            Ok(GoesOn::Here(lease, continuing)) => {
                (self.lease, self.continuing) = (lease.map(|lease| *lease), Some(continuing));
                self.state = State::Flowing;
                None
            }
            Ok(GoesOn::NotAtAll(last)) => {
                self.finish();
                Some(Ok(Frame::data(last)))
            }
            Err(error) => match said {
                // Its own words say more.
                Some(said) => {
                    self.state = State::Flowing;
                    // What follows is the end of something else, where the words were changed.
                    if bounds::is_last(&said) {
                        self.end(Outcome::Broken(&error));
                        self.state = State::Ended;
                    }
                    Some(Ok(Frame::data(said)))
                }
                None => Some(self.break_off(error)),
            },
        }
    }

    /// The rest will not come: says so in the stream if it is one, never with `[DONE]`, and closes the connection.
    fn break_off(&mut self, error: TransportError) -> Result<Frame<Bytes>, TransportError> {
        let is_ours = matches!(error, TransportError::ShuttingDown);
        self.end(if is_ours { Outcome::CutOff } else { Outcome::Broken(&error) });
        if self.events.is_none() {
            self.state = State::Ended;
            return Err(error);
        }
        let (message, code) = match &error {
            _ if is_ours => (error.to_string(), SHUTTING_DOWN),
            error => {
                let code = if error.is_timeout() { "worker_timeout" } else { "worker_failed" };
                (format!("the worker's stream broke: {}", error.for_clients()), code)
            }
        };
        let endpoint = self.record.as_ref().map_or(Endpoint::Unknown, |record| record.recorder.endpoint());
        self.state = State::Broken(error);
        Ok(Frame::data(error_event(endpoint, &message, ("server_error", code))))
    }
}

impl Drop for RelayStream {
    fn drop(&mut self) {
        if self.first.is_none() && self.upstream.is_end_stream() {
            // hyper does not ask for more than the announced length.
            self.finish();
        }
    }
}

impl Body for RelayBody {
    type Data = Bytes;
    type Error = TransportError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, TransportError>>> {
        match self.get_mut() {
            Self::Full(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Self::Stream(stream) => stream.poll_piece(cx),
            this @ Self::Early(_) => {
                let Self::Early(early) = &mut *this else { return Poll::Ready(None) };
                match std::task::ready!(early.poll_next(cx)) {
                    Next::Piece(piece) => Poll::Ready(Some(Ok(Frame::data(piece)))),
                    Next::End => Poll::Ready(None),
                    Next::Begins(body) => {
                        *this = body;
                        Pin::new(this).poll_frame(cx)
                    }
                }
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Full(bytes) => bytes.is_none(),
            Self::Stream(stream) => stream.first.is_none() && matches!(stream.state, State::Ended),
            Self::Early(early) => early.is_over(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Full(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            Self::Stream(_) | Self::Early(_) => SizeHint::default(),
        }
    }
}
