//! One HTTP/1.1 connection to a worker, driven by whoever waits for its answer.
//!
//! The codec is our own: a general client hands requests and pieces of answers from task to task through channels, which costs
//! more than all the rest of a request's way to its worker. Here whoever waits reads and writes the socket itself, what
//! comes is handed on as it lies in the piece that was read, and a connection that waits holds no buffer. Dropping the request
//! closes the connection. Knows no pools of its own: see [`pool`](super::pool).

use std::cell::RefCell;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};
use std::time::Instant;

use bytes::Bytes;
use http::Response;
use http_body::{Body, Frame};
use tokio::io::{AsyncRead, ReadBuf};

use super::framing::{Framing, KeepAlive};
use super::incoming::{Heard, IncomingBody, IncomingHead};
use super::outgoing::Outgoing;
use super::pool::{Counts, Pool};
use super::reply_head::ReplyHead;
use super::socket::Stream;
use crate::transport::{Broken, TransportError};

/// What is read at once.
const PIECE_BYTES: usize = 64 << 10;

thread_local! {
    /// Where a thread reads into. What came is then copied into a piece of its own size: a hundred bytes for a token, against
    /// thousands that each waiting connection would hold otherwise.
    static READ: RefCell<Box<[u8]>> = RefCell::new(vec![0; PIECE_BYTES].into_boxed_slice());
}

/// A connection.
pub(super) struct Link {
    stream: Stream,
    outgoing: Outgoing,
    counts: Arc<Counts>,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Idle {
        since: Instant,
    },
    /// With a request; until then it was idle.
    Busy {
        idle_since: Instant,
    },
}

/// Why an exchange brought no answer.
pub(super) enum Failed {
    /// The connection had ended before anything was written.
    Unsent(Broken),
    /// It ended after that, before the first byte of an answer. Until the request it was idle.
    Silent { broken: Broken, idle_since: Instant },
    /// It ended in the middle of the answer's head, or that was none.
    Broken(Broken),
    /// The head leaves open where its body ends.
    Ambiguous(&'static str),
}

impl Link {
    /// Speaks HTTP/1.1 over `stream`.
    pub(super) fn open(stream: Stream, counts: Arc<Counts>) -> Box<Self> {
        counts.opened();
        let state = State::Idle { since: Instant::now() };
        Box::new(Self { stream, outgoing: Outgoing::default(), counts, state })
    }

    /// Sends what `write` makes of a request, and waits for the head of its answer; `bodiless` is whether that has no body
    /// whatever it says, as with HEAD. Dropping the future closes the connection.
    pub(super) async fn exchange(
        mut self: Box<Self>,
        write: impl FnOnce(&mut Outgoing),
        bodiless: Bodiless,
        pool: Arc<Pool>,
    ) -> Result<Response<LinkBody>, Failed> {
        self.take_up();
        if !self.is_quiet() {
            return Err(Failed::Unsent(Broken::Closed));
        }
        write(&mut self.outgoing);
        let mut incoming = IncomingHead::default();
        let (head, rest) = poll_fn(|cx| self.poll_head(cx, &mut incoming)).await?;
        let ReplyHead { response, framing, keep_alive } = head;
        let framing = if bodiless == Bodiless::Yes { Framing::Done } else { framing };
        let incoming = IncomingBody::new(framing, rest);
        let mut body = LinkBody { incoming, keep_alive, link: Some(self), pool };
        if body.is_end_stream() {
            body.give_back();
        }
        Ok(response.map(|()| body))
    }

    /// Whether nothing has come since its last exchange: neither an end nor a byte that nobody has asked for. The socket
    /// itself is asked only if something has happened there.
    fn is_quiet(&mut self) -> bool {
        self.poll_receive(&mut Context::from_waker(Waker::noop()), |_| ()).is_pending()
    }

    /// The head of the answer, and what came along with it.
    fn poll_head(
        &mut self,
        cx: &mut Context<'_>,
        incoming: &mut IncomingHead,
    ) -> Poll<Result<(ReplyHead, Bytes), Failed>> {
        loop {
            self.outgoing.poll_send(&mut self.stream, cx);
            let piece = match ready!(self.poll_receive(cx, Bytes::copy_from_slice)) {
                Ok(piece) if piece.is_empty() => {
                    let broken = incoming.end();
                    return Poll::Ready(Err(self.broke(incoming, broken)));
                }
                Ok(piece) => piece,
                Err(error) => return Poll::Ready(Err(self.broke(incoming, Broken::Io(error)))),
            };
            if let Some(whole) = incoming.push(piece)? {
                return Poll::Ready(Ok(whole));
            }
        }
    }

    /// What it means that the connection broke before an answer.
    fn broke(&self, incoming: &IncomingHead, broken: Broken) -> Failed {
        match (incoming.heard(), self.state) {
            (Heard::Nothing, _) if self.outgoing.is_untouched() => Failed::Unsent(broken),
            (Heard::Nothing, State::Busy { idle_since }) => Failed::Silent { broken, idle_since },
            _ => Failed::Broken(broken),
        }
    }

    /// What `take` makes of what comes next, which is empty once the worker has ended its side.
    fn poll_receive<T>(
        &mut self,
        cx: &mut Context<'_>,
        take: impl FnOnce(&[u8]) -> T,
    ) -> Poll<io::Result<T>> {
        READ.with_borrow_mut(|space| {
            let mut buffer = ReadBuf::new(space);
            ready!(Pin::new(&mut self.stream).poll_read(cx, &mut buffer))?;
            Poll::Ready(Ok(take(buffer.filled())))
        })
    }

    /// Whether it may be kept any longer: open, and idle since `earliest` or later.
    pub(super) fn keeps(&mut self, earliest: Option<Instant>) -> bool {
        !self.is_older_than(earliest) && self.is_quiet()
    }

    /// Since when it is idle, at the latest.
    pub(super) fn is_older_than(&self, earliest: Option<Instant>) -> bool {
        matches!((self.state, earliest), (State::Idle { since }, Some(earliest)) if since < earliest)
    }

    /// Whether it has been idle since that moment, or for longer.
    pub(super) fn has_idled_since(&self, moment: Instant) -> bool {
        matches!(self.state, State::Idle { since } if since <= moment)
    }

    fn take_up(&mut self) {
        if let State::Idle { since } = self.state {
            self.counts.took_up();
            self.state = State::Busy { idle_since: since };
        }
    }

    fn lay_down(&mut self) {
        if let State::Busy { .. } = self.state {
            self.counts.laid_down();
            self.state = State::Idle { since: Instant::now() };
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        if let State::Busy { .. } = self.state {
            self.counts.laid_down();
        }
        self.counts.closed();
    }
}

/// Whether an answer has no body, whatever its head says.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Bodiless {
    /// The request was a HEAD.
    Yes,
    /// It was any other.
    No,
}

/// A body that gives its connection back when it has been read to its end; dropped earlier, it closes the connection,
/// which is how an engine learns that nobody waits any more.
pub struct LinkBody {
    incoming: IncomingBody,
    keep_alive: KeepAlive,
    link: Option<Box<Link>>,
    pool: Arc<Pool>,
}

impl LinkBody {
    fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Broken>>> {
        loop {
            match self.incoming.next() {
                Ok(None) if self.incoming.is_over() => return Poll::Ready(None),
                Ok(None) => {}
                Ok(Some(piece)) => return Poll::Ready(Some(Ok(piece))),
                Err(broken) => return Poll::Ready(Some(Err(broken))),
            }
            let Some(link) = &mut self.link else { return Poll::Ready(None) };
            // A long request may still be on its way.
            link.outgoing.poll_send(&mut link.stream, cx);
            let incoming = &mut self.incoming;
            match ready!(link.poll_receive(cx, |come| incoming.push(come))).map_err(Broken::Io).flatten() {
                Ok(None) => {}
                Ok(Some(piece)) => return Poll::Ready(Some(Ok(piece))),
                Err(broken) => return Poll::Ready(Some(Err(broken))),
            }
        }
    }

    /// Hands the connection on, if it can take another request: it cannot if the worker has said so, has closed it or sent
    /// more than its answer, or if the request was never sent to its end.
    fn give_back(&mut self) {
        let Some(mut link) = self.link.take() else { return };
        if self.keep_alive == KeepAlive::Yes && self.incoming.surplus().is_empty() && link.outgoing.is_over()
        {
            link.lay_down();
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
        let piece = ready!(self.poll_piece(cx));
        if matches!(piece, Some(Err(_))) {
            self.incoming.give_up();
            self.link = None;
        } else if self.incoming.is_over() {
            self.give_back();
        }
        Poll::Ready(piece.map(|piece| piece.map(Frame::data).map_err(TransportError::Broken)))
    }

    fn is_end_stream(&self) -> bool {
        self.incoming.is_over()
    }
}
