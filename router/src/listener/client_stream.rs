//! A client's socket, with a limit to how long it may refuse to take bytes, and a polite way to close it.
//!
//! While a write stands still hyper does not ask the relay for more, so no limit of the relay's own can fire: a client
//! that stops reading would hold its worker for ever. Knows no requests. Next: [`http1_stream`](super::http1_stream) or
//! [`http2`](super::http2).

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::time::{Sleep, timeout};

use super::socket::Socket;

/// How long a client that is still sending is listened to, so that it can read the answer: closing a socket with unread bytes
/// resets the connection, and a reset takes away what the client has not read yet.
const LINGER_TIME: Duration = Duration::from_secs(2);
/// How much of that is thrown away.
const LINGER_BYTES: usize = 16 << 20;

/// A socket whose writes fail once the other side has taken nothing for a while.
pub struct ClientStream {
    socket: Socket,
    limit: Duration,
    /// Set while a write stands still.
    stalled: Option<Pin<Box<Sleep>>>,
}

impl ClientStream {
    /// `socket`, whose other side may refuse bytes for `limit`.
    #[must_use]
    pub fn new(socket: Socket, limit: Duration) -> Self {
        Self { socket, limit, stalled: None }
    }

    /// Whether bytes wait for the other side.
    #[must_use]
    pub fn is_stalled(&self) -> bool {
        self.stalled.is_some()
    }

    /// Puts bytes back, to be read again before all others.
    pub fn unread(&mut self, bytes: Bytes) {
        self.socket.unread(bytes);
    }

    /// Says `last` and nothing more, then listens for a while to a client that has not finished.
    pub async fn close_after(mut self, last: &[u8]) {
        let said = async {
            self.socket.write_all(last).await?;
            self.socket.shutdown().await
        };
        if !matches!(timeout(LINGER_TIME, said).await, Ok(Ok(()))) {
            return;
        }
        let listen = async {
            let mut scrap = vec![0; 16 << 10];
            let mut left = LINGER_BYTES;
            while let Ok(count) = self.socket.read(&mut scrap).await {
                left = left.saturating_sub(count);
                if count == 0 || left == 0 {
                    break;
                }
            }
        };
        // However it ends, the connection has ended.
        let _ = timeout(LINGER_TIME, listen).await;
    }

    /// Ends the stall when `written` made progress; fails it when it has lasted for too long.
    fn limited<T>(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.stalled = None;
            return written;
        }
        let limit = self.limit;
        let timer = self.stalled.get_or_insert_with(|| Box::pin(tokio::time::sleep(limit)));
        timer.as_mut().poll(cx).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncRead for ClientStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_read(cx, buffer)
    }
}

impl AsyncWrite for ClientStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.socket).poll_write(cx, bytes);
        self.limited(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffers: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.socket).poll_write_vectored(cx, buffers);
        self.limited(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // TLS keeps what the socket did not take, and tells only here.
        let flushed = Pin::new(&mut self.socket).poll_flush(cx);
        self.limited(cx, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shut = Pin::new(&mut self.socket).poll_shutdown(cx);
        self.limited(cx, shut)
    }
}
