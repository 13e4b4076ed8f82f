//! A worker's socket, plain or TLS, as hyper reads and writes it.

use std::io::{self, ErrorKind, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

use super::signal::Signal;

/// A connected stream of bytes.
pub(super) enum Stream {
    /// As it is.
    Plain(TcpStream),
    /// Encrypted; boxed, since it is some thousand bytes large.
    Tls(Box<TlsStream<TcpStream>>),
}

macro_rules! on_either {
    ($stream:expr, $inner:ident => $call:expr) => {
        match $stream {
            Stream::Plain($inner) => $call,
            Stream::Tls($inner) => $call,
        }
    };
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        on_either!(self.get_mut(), inner => Pin::new(inner).poll_read(cx, buffer))
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        on_either!(self.get_mut(), inner => Pin::new(inner).poll_write(cx, bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffers: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        on_either!(self.get_mut(), inner => Pin::new(inner).poll_write_vectored(cx, buffers))
    }

    fn is_write_vectored(&self) -> bool {
        on_either!(self, inner => inner.is_write_vectored())
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        on_either!(self.get_mut(), inner => Pin::new(inner).poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        on_either!(self.get_mut(), inner => Pin::new(inner).poll_shutdown(cx))
    }
}

/// The socket of an HTTP/1 exchange.
///
/// A worker that answers early, a 413 in the middle of a long body say, and closes, makes our next write fail while its
/// answer is still to be read. hyper would give up on the failed write; so such a failure is kept back, the write stands
/// still, and reading brings the answer, or the same failure.
pub(super) struct Socket {
    stream: Stream,
    signal: Arc<Signal>,
    writable: bool,
}

impl Socket {
    /// `stream`, which tells `signal` when something comes.
    pub(super) fn new(stream: Stream, signal: Arc<Signal>) -> Self {
        Self { stream, signal, writable: true }
    }

    fn held_back<T>(&mut self, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        use ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset};
        match written {
            Poll::Ready(Err(error))
                if matches!(error.kind(), BrokenPipe | ConnectionAborted | ConnectionReset) =>
            {
                self.writable = false;
                Poll::Pending
            }
            other => other,
        }
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buffer);
        if buffer.filled().len() > before {
            self.signal.hear();
        }
        read
    }
}

impl AsyncWrite for Socket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if !self.writable {
            return Poll::Pending;
        }
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.held_back(written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffers: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if !self.writable {
            return Poll::Pending;
        }
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, buffers);
        self.held_back(written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.writable {
            return Poll::Pending;
        }
        let flushed = Pin::new(&mut self.stream).poll_flush(cx);
        self.held_back(flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
