//! One HTTP/1.1 connection to a worker, driven by whoever waits for its answer.
//!
//! hyper's connection is a future that somebody must poll. A task for each would cost two hand-overs between tasks for a
//! request and for each piece of its answer; polled by the request itself it costs none, its memory is freed with it, and
//! dropping the request closes it. Knows no pools of its own: see [`pool`](super::pool).

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use bytes::Bytes;
use http::{Request, Response};
use http_body::{Body, Frame};
use hyper::body::Incoming;
use hyper::client::conn::http1::{Builder, Connection, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::task::unconstrained;

use super::pool::{Counts, Pool};
use super::signal::Signal;
use super::socket::{Socket, Stream};
use crate::payload::PayloadBody;
use crate::transport::TransportError;

/// What hyper reads ahead at most.
const MAX_BUFFER_BYTES: usize = 64 << 10;
/// A response's head, or its trailers; engines send a few hundred bytes. hyper refuses more than 100 header lines by itself.
const MAX_HEAD_BYTES: usize = 64 << 10;
/// How often the two halves of a connection are polled in turn before others of the thread come first.
const MAX_ROUNDS: usize = 4;

/// A connection.
pub(super) struct Link {
    sender: SendRequest<PayloadBody>,
    /// `None` once it has ended.
    connection: Option<Connection<TokioIo<Socket>, PayloadBody>>,
    signal: Arc<Signal>,
    waker: Waker,
    counts: Arc<Counts>,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Idle { since: Instant },
    Busy,
}

/// Why an exchange brought no answer.
pub(super) enum Failed {
    /// The connection had ended before anything was written: here is the request again.
    Unsent(Box<Request<PayloadBody>>, hyper::Error),
    /// It ended after that, before the first byte of an answer.
    Silent(hyper::Error),
    /// It ended in the middle of the answer's head, or that was none.
    Broken(hyper::Error),
}

impl Link {
    /// Speaks HTTP/1.1 over `stream`.
    pub(super) async fn open(stream: Stream, counts: Arc<Counts>) -> Result<Box<Self>, TransportError> {
        let signal = Arc::new(Signal::default());
        let socket = TokioIo::new(Socket::new(stream, Arc::clone(&signal)));
        let (sender, connection) = Builder::new()
            .max_buf_size(MAX_BUFFER_BYTES)
            .max_header_size(MAX_HEAD_BYTES)
            // Long bodies are written from where they lie.
            .writev(true)
            .handshake(socket)
            .await
            .map_err(TransportError::Broken)?;
        let waker = Waker::from(Arc::clone(&signal));
        counts.opened();
        let state = State::Idle { since: Instant::now() };
        Ok(Box::new(Self { sender, connection: Some(connection), signal, waker, counts, state }))
    }

    /// Sends `request` and waits for the head of its answer. Dropping the future closes the connection.
    pub(super) async fn exchange(
        mut self: Box<Self>,
        request: Request<PayloadBody>,
        pool: Arc<Pool>,
    ) -> Result<Response<LinkBody>, Failed> {
        self.set(State::Busy);
        self.signal.listen();
        let sender = &mut self.sender;
        let sent = self.signal.quietly(|| sender.try_send_request(request));
        // Unconstrained: a spent budget would otherwise say `Pending` to a waker that nobody hears.
        let mut answer = pin!(unconstrained(sent));
        let answer = poll_fn(|cx| self.poll(cx, |quiet| answer.as_mut().poll(quiet))).await;
        match answer {
            Ok(response) => Ok(response.map(|incoming| LinkBody { incoming, link: Some(self), pool })),
            Err(mut error) => Err(match error.take_message() {
                Some(request) => Failed::Unsent(Box::new(request), error.into_error()),
                None if self.signal.has_heard() => Failed::Broken(error.into_error()),
                None => Failed::Silent(error.into_error()),
            }),
        }
    }

    /// Polls the connection and what comes out of it, until neither gets further.
    ///
    /// `ask` is given a waker that does nothing: only the connection can make it ready, and is always polled before it.
    fn poll<T>(&mut self, cx: &mut Context<'_>, mut ask: impl FnMut(&mut Context<'_>) -> Poll<T>) -> Poll<T> {
        self.signal.follow(cx.waker());
        for _ in 0..MAX_ROUNDS {
            self.advance();
            let answer = self.signal.quietly(|| ask(&mut Context::from_waker(Waker::noop())));
            if answer.is_ready() || !self.signal.take_nudge() {
                return answer;
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Reads and writes what can be.
    fn advance(&mut self) {
        let Some(connection) = &mut self.connection else { return };
        self.signal.take_nudge();
        if let Poll::Ready(outcome) = Pin::new(connection).poll(&mut Context::from_waker(&self.waker)) {
            if let Err(error) = outcome {
                tracing::debug!(%error, "connection to worker ended");
            }
            self.connection = None;
        }
    }

    /// Whether it can take another request, now that an exchange is over. It cannot if the worker has said so, has closed
    /// it or sent more than its answer, or if the request was never sent to its end.
    fn settles(&mut self) -> bool {
        self.signal.unfollow();
        if !self.sender.is_ready() {
            self.advance();
        }
        self.set(State::Idle { since: Instant::now() });
        self.connection.is_some() && self.sender.is_ready()
    }

    /// Whether it may be kept any longer: open, and idle since `earliest` or later.
    pub(super) fn keeps(&mut self, earliest: Option<Instant>) -> bool {
        self.advance();
        let State::Idle { since } = self.state else { return false };
        self.connection.is_some() && earliest.is_none_or(|earliest| since >= earliest)
    }

    /// Since when it is idle, at the latest.
    pub(super) fn is_older_than(&self, earliest: Option<Instant>) -> bool {
        matches!((self.state, earliest), (State::Idle { since }, Some(earliest)) if since < earliest)
    }

    fn set(&mut self, state: State) {
        match (self.state, state) {
            (State::Idle { .. }, State::Busy) => self.counts.took_up(),
            (State::Busy, State::Idle { .. }) => self.counts.laid_down(),
            _ => {}
        }
        self.state = state;
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        if self.state == State::Busy {
            self.counts.laid_down();
        }
        self.counts.closed();
    }
}

/// A body that gives its connection back when it has been read to its end; dropped earlier, it closes the connection,
/// which is how an engine learns that nobody waits any more.
pub struct LinkBody {
    incoming: Incoming,
    link: Option<Box<Link>>,
    pool: Arc<Pool>,
}

impl LinkBody {
    fn poll_incoming(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let incoming = &mut self.incoming;
        let mut ask = |cx: &mut Context<'_>| {
            pin!(unconstrained(poll_fn(|cx| Pin::new(&mut *incoming).poll_frame(cx)))).poll(cx)
        };
        let Some(link) = &mut self.link else { return ask(cx) };
        // What has come with the piece before is there already.
        let ready = link.signal.quietly(|| ask(&mut Context::from_waker(Waker::noop())));
        if ready.is_ready() { ready } else { link.poll(cx, ask) }
    }

    fn give_back(&mut self) {
        if let Some(mut link) = self.link.take()
            && link.settles()
        {
            self.pool.put(link);
        }
    }
}

impl Body for LinkBody {
    type Data = Bytes;
    type Error = TransportError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, TransportError>>> {
        let frame = self.poll_incoming(cx);
        if matches!(frame, Poll::Ready(None)) || self.incoming.is_end_stream() {
            self.give_back();
        }
        frame.map_err(TransportError::Broken)
    }

    fn is_end_stream(&self) -> bool {
        self.incoming.is_end_stream()
    }
}

impl Drop for LinkBody {
    fn drop(&mut self) {
        // A body that was empty from the start is never polled.
        if self.incoming.is_end_stream() {
            self.give_back();
        }
    }
}
