//! The body of an answer over HTTP/2, which knows what of it has left the process.
//!
//! hyper asks for the next piece before the last one is written, and has no word for "written". Two things need it: a
//! client that opens no window must not hold its worker for ever, and a stream that breaks must not be reset before the error
//! event has gone out, since a reset takes back what still waits. So the pieces are counted until they are dropped.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Buf, Bytes};
use futures_util::task::AtomicWaker;
use http_body::{Body, Frame, SizeHint};
use tokio::time::{Instant, Sleep};

use crate::gateway::GatewayBody;
use crate::stages::relay::RelayBody;
use crate::transport::TransportError;

/// The pieces of one stream.
#[derive(Debug, Default)]
pub struct Pieces {
    given: AtomicU64,
    written: AtomicU64,
    /// The stream's task, while it waits for all to be written.
    waits: AtomicWaker,
}

impl Pieces {
    fn all_written(&self) -> bool {
        self.given.load(Ordering::Acquire) == self.written.load(Ordering::Acquire)
    }

    fn poll_all_written(&self, cx: &Context<'_>) -> Poll<()> {
        self.waits.register(cx.waker());
        if self.all_written() { Poll::Ready(()) } else { Poll::Pending }
    }
}

/// A piece; dropped once it has been written.
#[derive(Debug)]
pub struct Piece {
    bytes: Bytes,
    of: Arc<Pieces>,
}

impl Buf for Piece {
    fn remaining(&self) -> usize {
        self.bytes.remaining()
    }

    fn chunk(&self) -> &[u8] {
        self.bytes.chunk()
    }

    fn advance(&mut self, count: usize) {
        self.bytes.advance(count);
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        self.of.written.fetch_add(1, Ordering::AcqRel);
        self.of.waits.wake();
    }
}

/// What a body has to say.
pub enum Http2Reply {
    /// An answer to a client.
    Client(RelayBody),
    /// An answer to a gateway's call.
    Gateway(GatewayBody),
}

/// The body.
pub struct Http2Body {
    body: Http2Reply,
    pieces: Arc<Pieces>,
    /// What broke it, until everything before that has been written.
    broken: Option<TransportError>,
}

impl Http2Body {
    /// `body`, whose pieces are counted in `pieces`.
    #[must_use]
    pub fn new(body: Http2Reply, pieces: Arc<Pieces>) -> Self {
        Self { body, pieces, broken: None }
    }

    fn piece(&self, bytes: Bytes) -> Piece {
        self.pieces.given.fetch_add(1, Ordering::AcqRel);
        Piece { bytes, of: Arc::clone(&self.pieces) }
    }
}

impl Body for Http2Body {
    type Data = Piece;
    type Error = TransportError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Piece>, TransportError>>> {
        if self.broken.is_none() {
            let frame = match &mut self.body {
                Http2Reply::Client(body) => Pin::new(body).poll_frame(cx),
                Http2Reply::Gateway(body) => Pin::new(body).poll_frame(cx),
            };
            match std::task::ready!(frame) {
                None => return Poll::Ready(None),
                Some(Ok(frame)) => return Poll::Ready(Some(Ok(frame.map_data(|bytes| self.piece(bytes))))),
                Some(Err(error)) => self.broken = Some(error),
            }
        }
        std::task::ready!(self.pieces.poll_all_written(cx));
        Poll::Ready(self.broken.take().map(Err))
    }

    fn is_end_stream(&self) -> bool {
        self.broken.is_none()
            && match &self.body {
                Http2Reply::Client(body) => body.is_end_stream(),
                Http2Reply::Gateway(body) => body.is_end_stream(),
            }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.body {
            Http2Reply::Client(body) => body.size_hint(),
            Http2Reply::Gateway(body) => body.size_hint(),
        }
    }
}

/// Watches whether a client takes what it is given.
#[derive(Debug)]
pub struct Stall {
    pieces: Arc<Pieces>,
    limit: Duration,
    /// Set once something waits, with what had been written when it was.
    timer: Option<(Pin<Box<Sleep>>, u64)>,
}

impl Stall {
    /// For a client that may take nothing for `limit`, and up to twice as long: the clock is not read for each piece.
    #[must_use]
    pub fn new(pieces: Arc<Pieces>, limit: Duration) -> Self {
        Self { pieces, limit, timer: None }
    }

    /// Resolves when pieces have waited for too long, and none was written.
    pub fn poll_exceeded(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.timer.is_none() && self.pieces.all_written() {
            return Poll::Pending;
        }
        let (pieces, limit) = (&self.pieces, self.limit);
        let written = || pieces.written.load(Ordering::Acquire);
        let (timer, before) =
            self.timer.get_or_insert_with(|| (Box::pin(tokio::time::sleep(limit)), written()));
        while timer.as_mut().poll(cx).is_ready() {
            if pieces.all_written() {
                self.timer = None;
                return Poll::Pending;
            }
            if std::mem::replace(before, written()) == *before {
                return Poll::Ready(());
            }
            timer.as_mut().reset(Instant::now() + limit);
        }
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::*;

    fn next(body: &mut Http2Body) -> Poll<Option<Result<Frame<Piece>, TransportError>>> {
        Pin::new(body).poll_frame(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn an_error_waits_for_what_was_given_before_it() {
        let mut body = Http2Body::new(Http2Reply::Client(RelayBody::full("event")), Arc::default());
        let Poll::Ready(Some(Ok(piece))) = next(&mut body) else { panic!("no piece") };
        body.broken = Some(TransportError::Left);
        assert!(next(&mut body).is_pending());
        drop(piece);
        assert!(matches!(next(&mut body), Poll::Ready(Some(Err(TransportError::Left)))));
    }

    #[tokio::test]
    async fn a_client_that_takes_nothing_is_noticed() {
        let pieces = Arc::<Pieces>::default();
        let body = Http2Body::new(Http2Reply::Client(RelayBody::full("x")), Arc::clone(&pieces));
        let mut stall = Stall::new(Arc::clone(&pieces), Duration::from_millis(5));
        assert!(stall.poll_exceeded(&mut Context::from_waker(Waker::noop())).is_pending());
        assert!(stall.timer.is_none(), "nothing is waited for");
        let waiting = [body.piece(Bytes::from_static(b"x")), body.piece(Bytes::from_static(b"y"))];
        std::future::poll_fn(|cx| stall.poll_exceeded(cx)).await;
        drop(waiting);
    }
}
