//! A client's HTTP/1 connection as hyper reads it: past the guard, and with limits to how long a head may take and how long
//! nothing may happen.
//!
//! hyper gets heads whole: it judges as it reads, and would answer half a bad head before the guard has seen the other half.
//!
//! When the guard refuses something, hyper is told that the stream has ended, but not before every answer to earlier requests
//! has gone out: an end of the stream in the middle of an answer would mean that the client has left. What the client is
//! told instead is said by [`http1`](super::http1), which gets the stream back. A fault within a body is told to hyper as an
//! error, since its request exists and is answered as any other.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};

use super::client_stream::ClientStream;
use super::guard::{HeadGuard, HeadLimits, Position, Refused, Violation};
use crate::turns::{LONG_BODY_BYTES, end_turn, turn_bytes};

/// What is read at once of a head that did not come in one piece.
const HEAD_PIECE_BYTES: usize = 2 << 10;
/// How much is read of what a client sends beyond what hyper takes while an answer goes out, to learn when it leaves. One that
/// sends still more is noticed when something is written to it.
const AHEAD_BYTES: usize = 16 << 10;
/// How much is read, to no purpose, from a client that has been refused while earlier answers still go out.
const SCRAP_BYTES: usize = 1 << 20;

/// What the stream and the service of one connection tell each other. HTTP/1 has one request at a time.
#[derive(Debug, Default)]
pub struct Exchange {
    begun: AtomicU64,
    ended: AtomicU64,
}

impl Exchange {
    /// A request begins; it ends when the guard is dropped.
    #[must_use]
    pub fn begin(self: &Arc<Self>) -> Busy {
        self.begun.fetch_add(1, Ordering::Relaxed);
        Busy(Arc::clone(self))
    }

    /// Whether a request has ever begun.
    #[must_use]
    pub fn has_begun(&self) -> bool {
        self.begun.load(Ordering::Relaxed) > 0
    }

    /// Requests that have begun.
    fn begun(&self) -> u64 {
        self.begun.load(Ordering::Relaxed)
    }

    fn is_busy(&self) -> bool {
        self.begun.load(Ordering::Relaxed) != self.ended.load(Ordering::Relaxed)
    }

    fn ended(&self) -> u64 {
        self.ended.load(Ordering::Relaxed)
    }
}

/// Held from the beginning of a request until hyper has taken all of its answer.
#[derive(Debug)]
pub struct Busy(Arc<Exchange>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.ended.fetch_add(1, Ordering::Relaxed);
    }
}

/// Time limits of a connection.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// For a head, from its first byte to its last; for the first byte of a connection as well.
    pub head: Duration,
    /// Between an answer and the next request.
    pub keep_alive: Duration,
}

/// Why nothing more is read.
#[derive(Debug)]
pub enum End {
    /// The client sent something that is no request.
    Refused(Violation),
    /// It speaks HTTP/2; these are the bytes that said so.
    Http2(Bytes),
    /// Nothing happened for too long.
    Idle,
    /// The client has ended its side.
    Client,
}

/// The stream.
pub struct Http1Stream {
    stream: ClientStream,
    guard: HeadGuard,
    exchange: Arc<Exchange>,
    limits: Limits,
    /// The beginning of a head; at most as long as a head may be.
    held: BytesMut,
    /// What was held, on its way to hyper.
    released: BytesMut,
    /// Read since nothing was there, or since others had their turn.
    turn_bytes: usize,
    /// What has come of the body that is being read.
    body_bytes: usize,
    /// When the head that is being read began.
    head_since: Option<Instant>,
    /// The answers that had ended when the connection was last seen idle for the first time, and when that was.
    idle_since: (u64, Instant),
    /// Fires at a limit, or before it; looked at again when it does.
    timer: Option<Pin<Box<Sleep>>>,
    end: Option<End>,
    /// hyper has been told of the end.
    told: bool,
    /// hyper has been woken to be told after so many answers. There may be more to come, if requests were sent together.
    woken_after: Option<u64>,
    scrap_bytes: usize,
}

impl Http1Stream {
    /// A new connection.
    #[must_use]
    pub fn new(stream: ClientStream, head: HeadLimits, limits: Limits, exchange: Arc<Exchange>) -> Self {
        Self {
            stream,
            guard: HeadGuard::new(head),
            exchange,
            limits,
            held: BytesMut::new(),
            released: BytesMut::new(),
            turn_bytes: 0,
            body_bytes: 0,
            head_since: None,
            idle_since: (0, Instant::now()),
            timer: None,
            end: None,
            told: false,
            woken_after: None,
            scrap_bytes: SCRAP_BYTES,
        }
    }

    /// The socket again, why hyper was told that it has ended (if it was), and whether the client may still be sending.
    #[must_use]
    pub fn into_parts(self) -> (ClientStream, Option<End>, Sending) {
        let sending = match &self.end {
            Some(End::Client | End::Idle) => Sending::Done,
            None if self.guard.position() == Position::Between => Sending::Done,
            _ => Sending::Perhaps,
        };
        (self.stream, self.end.filter(|_| self.told), sending)
    }

    /// Reads until there is something for hyper, or an end.
    fn poll_good(&mut self, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        while self.end.is_none() && buffer.filled().len() == before {
            let read = if self.held.is_empty() { self.poll_into(cx, buffer) } else { self.poll_held(cx) };
            match read {
                Poll::Ready(read) => read?,
                Poll::Pending => self.end = Some(std::task::ready!(self.poll_patience(cx))),
            }
            self.release(buffer);
        }
        Poll::Ready(Ok(()))
    }

    /// Reads into hyper's own buffer, and takes back the beginning of a head. Most heads come whole, and are copied nowhere.
    fn poll_into(&mut self, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.turn_bytes >= turn_bytes(self.body_bytes) {
            // hyper, and whoever reads a body, would go on as long as something is there.
            self.turn_bytes = 0;
            end_turn(cx);
            return Poll::Pending;
        }
        let before = buffer.filled().len();
        let read = if self.body_bytes <= LONG_BODY_BYTES {
            Pin::new(&mut self.stream).poll_read(cx, buffer)
        } else {
            self.poll_turn(cx, buffer)
        };
        let come = &buffer.filled()[before..];
        self.turn_bytes = if read.is_ready() { self.turn_bytes + come.len() } else { 0 };
        std::task::ready!(read)?;
        if come.is_empty() {
            self.end = Some(End::Client);
            return Poll::Ready(Ok(()));
        }
        let verdict = self.guard.push(come);
        let good = verdict.unwrap_or_else(|refused| refused.good_bytes);
        self.held.extend_from_slice(&come[good..]);
        self.body_bytes = if self.guard.position() == Position::Body { self.body_bytes + good } else { 0 };
        buffer.set_filled(before + good);
        self.judged(verdict);
        Poll::Ready(Ok(()))
    }

    /// Reads at most a turn's bytes: hyper offers room for more.
    fn poll_turn(&mut self, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let room = buffer.remaining().min(turn_bytes(self.body_bytes) - self.turn_bytes);
        let mut part = ReadBuf::new(buffer.initialize_unfilled_to(room));
        std::task::ready!(Pin::new(&mut self.stream).poll_read(cx, &mut part))?;
        let count = part.filled().len();
        buffer.advance(count);
        Poll::Ready(Ok(()))
    }

    /// Reads more of a head that has begun.
    fn poll_held(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut piece = [0; HEAD_PIECE_BYTES];
        let mut piece = ReadBuf::new(&mut piece);
        std::task::ready!(Pin::new(&mut self.stream).poll_read(cx, &mut piece))?;
        if piece.filled().is_empty() {
            self.end = Some(End::Client);
            return Poll::Ready(Ok(()));
        }
        let known = self.held.len();
        self.held.extend_from_slice(piece.filled());
        let verdict = self.guard.push(piece.filled());
        match verdict.unwrap_or_else(|refused| refused.good_bytes) {
            0 => {}
            good => self.released.unsplit(self.held.split_to(known + good)),
        }
        self.judged(verdict);
        Poll::Ready(Ok(()))
    }

    fn judged(&mut self, verdict: Result<usize, Refused>) {
        match verdict.map_err(|refused| refused.violation) {
            Ok(_) if self.held.is_empty() => self.head_since = None,
            Ok(_) => self.head_since = self.head_since.or_else(|| Some(Instant::now())),
            Err(Violation::Http2Preface) => {
                self.end = Some(End::Http2(std::mem::take(&mut self.held).freeze()));
            }
            Err(violation) => self.end = Some(End::Refused(violation)),
        }
    }

    /// Gives hyper what was held and is good.
    fn release(&mut self, buffer: &mut ReadBuf<'_>) {
        if self.released.is_empty() {
            return;
        }
        let count = self.released.len().min(buffer.remaining());
        buffer.put_slice(&self.released[..count]);
        self.released.advance(count);
    }

    /// Nothing has come. Ends the wait if it has been too long.
    fn poll_patience(&mut self, cx: &mut Context<'_>) -> Poll<End> {
        loop {
            let (deadline, end) = match self.guard.position() {
                // Where a body is awaited its reader has a limit, and where an answer is under way its worker.
                Position::Body => return Poll::Pending,
                _ if self.exchange.is_busy() => return Poll::Pending,
                Position::Head => {
                    let since = *self.head_since.get_or_insert_with(Instant::now);
                    (since + self.limits.head, End::Refused(Violation::HeadTimeout))
                }
                Position::Between => {
                    let (ended, since) = self.idle_since;
                    let limit = if ended == 0 { self.limits.head } else { self.limits.keep_alive };
                    (since + limit, End::Idle)
                }
            };
            let timer = self.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(deadline)));
            if timer.deadline() > deadline {
                timer.as_mut().reset(deadline);
            }
            std::task::ready!(timer.as_mut().poll(cx));
            if Instant::now() >= deadline {
                return Poll::Ready(end);
            }
            timer.as_mut().reset(deadline);
        }
    }

    /// What hyper reads once there is an end.
    fn poll_end(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Some(End::Refused(violation)) = &self.end
            && violation.is_in_body()
        {
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, *violation)));
        }
        if (self.exchange.is_busy() || self.stream.is_stalled()) && self.poll_scrap(cx).is_pending() {
            return Poll::Pending;
        }
        self.told = true;
        Poll::Ready(Ok(()))
    }

    /// Throws away what a refused client still sends, to learn when it leaves.
    fn poll_scrap(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let mut scrap = [0; 1_024];
        while self.scrap_bytes > 0 {
            let mut buffer = ReadBuf::new(&mut scrap);
            match std::task::ready!(Pin::new(&mut self.stream).poll_read(cx, &mut buffer)) {
                Ok(()) if !buffer.filled().is_empty() => {
                    self.scrap_bytes = self.scrap_bytes.saturating_sub(buffer.filled().len());
                }
                _ => {
                    self.end = Some(End::Client);
                    return Poll::Ready(());
                }
            }
        }
        Poll::Pending
    }

    /// hyper asks for nothing while an answer goes out and it has something of the next request. Reads on for it, up to a
    /// limit, since that is how one learns that the client has left.
    fn watch(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        while self.exchange.is_busy() && self.hyper_has_more() {
            let read = match self.end {
                Some(End::Client) => return Err(io::ErrorKind::ConnectionAborted.into()),
                Some(_) => self.poll_scrap(cx).map(Ok),
                None if self.held.len() + self.released.len() >= AHEAD_BYTES => return Ok(()),
                None => self.poll_held(cx),
            };
            match read {
                Poll::Ready(read) => read?,
                Poll::Pending => return Ok(()),
            }
        }
        Ok(())
    }

    /// Whether hyper was given more than the request that is being answered.
    fn hyper_has_more(&self) -> bool {
        let (come, begun) = (self.guard.messages(), self.exchange.begun());
        come > begun || (come == begun && self.guard.position() == Position::Body)
    }

    /// hyper has written what it had. Perhaps an answer has ended, and nothing else will tell.
    fn after_writing(&mut self, cx: &mut Context<'_>) {
        if self.exchange.is_busy() {
            return;
        }
        let ended = self.exchange.ended();
        if self.end.is_some() {
            if !self.told && self.woken_after.replace(ended) != Some(ended) {
                cx.waker().wake_by_ref();
            }
            return;
        }
        if self.idle_since.0 != ended && self.guard.position() == Position::Between {
            self.idle_since = (ended, Instant::now());
            if let Poll::Ready(end) = self.poll_patience(cx) {
                self.end = Some(end);
                cx.waker().wake_by_ref();
            }
        }
    }
}

/// Whether a client may still be sending what nobody will read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sending {
    /// Its last message was read to its end.
    Done,
    /// There may be more.
    Perhaps,
}

impl AsyncRead for Http1Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let before = buffer.filled().len();
        this.release(buffer);
        if this.end.is_none() && buffer.filled().len() == before {
            std::task::ready!(this.poll_good(cx, buffer))?;
        }
        if buffer.filled().len() > before || matches!(this.end, Some(End::Client)) {
            return Poll::Ready(Ok(()));
        }
        this.poll_end(cx)
    }
}

impl AsyncWrite for Http1Stream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffers: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, buffers)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(cx);
        if flushed.is_ready() {
            self.after_writing(cx);
            self.watch(cx)?;
        }
        flushed
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.told && matches!(self.end, Some(End::Refused(_) | End::Http2(_))) {
            // There is something to say yet.
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
