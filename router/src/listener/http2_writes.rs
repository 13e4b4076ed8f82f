//! What an HTTP/2 connection writes, in few pieces.
//!
//! hyper writes nearly every frame by itself. But streams of one connection have something to say one after the other, whenever their core has been
//! woken, and a `send` costs more than what it carries. So what hyper writes waits until the connection's turn is over, and leaves together.

use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// So much waits at most; a client that takes nothing holds up hyper beyond.
const MOST_BYTES: usize = 64 << 10;
/// What is as long as this goes out as it is, since a copy would cost as much as a `send` saves.
const LONG_BYTES: usize = 8 << 10;

struct Gathered<S> {
    stream: S,
    waits: BytesMut,
    failed: Option<io::ErrorKind>,
}

/// hyper's side of a connection.
pub(super) struct Gathering<S>(Arc<Mutex<Gathered<S>>>);

/// The other side: what sends what waits.
pub(super) struct Outflow<S>(Arc<Mutex<Gathered<S>>>);

/// Both sides of `stream`.
pub(super) fn gather<S>(stream: S) -> (Gathering<S>, Outflow<S>) {
    let gathered = Arc::new(Mutex::new(Gathered { stream, waits: BytesMut::new(), failed: None }));
    (Gathering(Arc::clone(&gathered)), Outflow(gathered))
}

impl<S: AsyncRead + AsyncWrite + Unpin> Gathered<S> {
    /// Sends what waits.
    fn poll_out(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.waits.is_empty() {
            let written = ready!(Pin::new(&mut self.stream).poll_write(cx, &self.waits))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.waits.advance(written);
        }
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    /// Makes room for `bytes` more, or has nothing wait.
    fn poll_room(&mut self, cx: &mut Context<'_>, bytes: usize) -> Poll<io::Result<()>> {
        if bytes < LONG_BYTES && self.waits.len() < MOST_BYTES {
            Poll::Ready(Ok(()))
        } else {
            self.poll_out(cx)
        }
    }
}

fn locked<S>(gathered: &Mutex<Gathered<S>>) -> MutexGuard<'_, Gathered<S>> {
    // Both sides are polled by one task.
    gathered.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for Gathering<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let mut gathered = locked(&self.0);
        if let Some(kind) = gathered.failed {
            return Poll::Ready(Err(kind.into()));
        }
        Pin::new(&mut gathered.stream).poll_read(cx, buffer)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Gathering<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let mut gathered = locked(&self.0);
        ready!(gathered.poll_room(cx, bytes.len()))?;
        if bytes.len() >= LONG_BYTES {
            return Pin::new(&mut gathered.stream).poll_write(cx, bytes);
        }
        gathered.waits.extend_from_slice(bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffers: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let mut gathered = locked(&self.0);
        let length = buffers.iter().map(|buffer| buffer.len()).sum();
        ready!(gathered.poll_room(cx, length))?;
        if length >= LONG_BYTES {
            return Pin::new(&mut gathered.stream).poll_write_vectored(cx, buffers);
        }
        for buffer in buffers {
            gathered.waits.extend_from_slice(buffer);
        }
        Poll::Ready(Ok(length))
    }

    fn is_write_vectored(&self) -> bool {
        locked(&self.0).stream.is_write_vectored()
    }

    /// Says so, and sends later.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut gathered = locked(&self.0);
        ready!(gathered.poll_out(cx))?;
        Pin::new(&mut gathered.stream).poll_shutdown(cx)
    }
}

/// A connection whose turns end with sending what it has written.
pub(super) struct Turns<'a, C, S> {
    pub(super) connection: Pin<&'a mut C>,
    pub(super) outflow: &'a Outflow<S>,
}

impl<C: Future, S: AsyncRead + AsyncWrite + Unpin> Future for Turns<'_, C, S> {
    type Output = C::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<C::Output> {
        let ended = self.connection.as_mut().poll(cx);
        let mut gathered = locked(&self.outflow.0);
        if ended.is_pending()
            && gathered.failed.is_none()
            && let Poll::Ready(Err(error)) = gathered.poll_out(cx)
        {
            // hyper hears of it when it reads.
            gathered.failed = Some(error.kind());
            cx.waker().wake_by_ref();
        }
        ended
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::*;

    /// Takes `room` bytes, and remembers what came together.
    #[derive(Default)]
    struct Wire {
        writes: Vec<Vec<u8>>,
        room: usize,
        breaks: bool,
    }

    impl AsyncRead for Wire {
        fn poll_read(self: Pin<&mut Self>, _: &mut Context<'_>, _: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
            Poll::Pending
        }
    }

    impl AsyncWrite for Wire {
        fn poll_write(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
            bytes: &[u8],
        ) -> Poll<io::Result<usize>> {
            if self.breaks {
                return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
            }
            let taken = bytes.len().min(self.room);
            if taken == 0 {
                return Poll::Pending;
            }
            self.room -= taken;
            self.writes.push(bytes[..taken].to_vec());
            Poll::Ready(Ok(taken))
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    fn write(side: &mut Gathering<Wire>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(side).poll_write(&mut Context::from_waker(Waker::noop()), bytes)
    }

    fn end_turn(outflow: &Outflow<Wire>) {
        let mut connection = std::pin::pin!(std::future::pending::<()>());
        let mut turns = Turns { connection: connection.as_mut(), outflow };
        assert!(Pin::new(&mut turns).poll(&mut Context::from_waker(Waker::noop())).is_pending());
    }

    #[test]
    fn what_is_written_in_one_turn_leaves_together_and_in_order() {
        let (mut side, outflow) = gather(Wire { room: 1 << 20, ..Wire::default() });
        for piece in [b"one ", b"two "] {
            assert!(matches!(write(&mut side, piece), Poll::Ready(Ok(4))));
        }
        assert!(locked(&outflow.0).stream.writes.is_empty());
        let long = vec![b'x'; LONG_BYTES];
        assert!(matches!(write(&mut side, &long), Poll::Ready(Ok(LONG_BYTES))));
        assert!(matches!(write(&mut side, b"three"), Poll::Ready(Ok(5))));
        end_turn(&outflow);
        assert_eq!(locked(&outflow.0).stream.writes, [b"one two ".to_vec(), long, b"three".to_vec()]);
    }

    #[test]
    fn a_client_that_takes_nothing_holds_up_what_is_written() {
        let (mut side, outflow) = gather(Wire { room: 3, ..Wire::default() });
        let piece = vec![b'x'; LONG_BYTES - 1];
        let mut taken = 0;
        while let Poll::Ready(Ok(count)) = write(&mut side, &piece) {
            taken += count;
        }
        assert!((MOST_BYTES..MOST_BYTES + LONG_BYTES).contains(&taken), "{taken}");
        locked(&outflow.0).stream.room = usize::MAX;
        end_turn(&outflow);
        let sent: usize = locked(&outflow.0).stream.writes.iter().map(Vec::len).sum();
        assert_eq!(sent, taken);
    }

    #[test]
    fn a_connection_that_breaks_is_heard_of_when_it_is_read() {
        let (mut side, outflow) = gather(Wire { breaks: true, ..Wire::default() });
        assert!(write(&mut side, b"x").is_ready());
        end_turn(&outflow);
        let mut room = [0; 8];
        let read = Pin::new(&mut side)
            .poll_read(&mut Context::from_waker(Waker::noop()), &mut ReadBuf::new(&mut room));
        assert!(matches!(read, Poll::Ready(Err(error)) if error.kind() == io::ErrorKind::BrokenPipe));
    }
}
