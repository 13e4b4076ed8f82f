//! A client's socket, plain or under TLS, with bytes before it that were read already.
//!
//! Knows no HTTP. Next: [`client_stream`](super::client_stream), which limits how long it may stand still.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Buf, Bytes};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;

use crate::gathered::poll_write_gathered;

/// What carries the bytes.
enum Carrier {
    Plain(TcpStream),
    /// Boxed, since it is ten times as large as the other.
    Tls(Box<TlsStream<TcpStream>>),
}

/// A socket.
pub struct Socket {
    carrier: Carrier,
    /// Read before anything else.
    before: Bytes,
}

impl From<TcpStream> for Socket {
    fn from(stream: TcpStream) -> Self {
        Self { carrier: Carrier::Plain(stream), before: Bytes::new() }
    }
}

impl From<TlsStream<TcpStream>> for Socket {
    fn from(stream: TlsStream<TcpStream>) -> Self {
        Self { carrier: Carrier::Tls(Box::new(stream)), before: Bytes::new() }
    }
}

impl Socket {
    /// Puts bytes back, to be read again before all others.
    pub fn unread(&mut self, bytes: Bytes) {
        self.before =
            if self.before.is_empty() { bytes } else { [bytes, self.before.clone()].concat().into() };
    }

    /// The protocol agreed upon within TLS is HTTP/2.
    #[must_use]
    pub fn agreed_on_http2(&self) -> bool {
        match &self.carrier {
            Carrier::Plain(_) => false,
            Carrier::Tls(stream) => stream.get_ref().1.alpn_protocol() == Some(b"h2"),
        }
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if !self.before.is_empty() {
            let count = self.before.len().min(buffer.remaining());
            buffer.put_slice(&self.before[..count]);
            self.before.advance(count);
            return Poll::Ready(Ok(()));
        }
        match &mut self.carrier {
            Carrier::Plain(stream) => Pin::new(stream).poll_read(cx, buffer),
            Carrier::Tls(stream) => Pin::new(stream).poll_read(cx, buffer),
        }
    }
}

impl AsyncWrite for Socket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match &mut self.carrier {
            Carrier::Plain(stream) => Pin::new(stream).poll_write(cx, bytes),
            Carrier::Tls(stream) => Pin::new(stream).poll_write(cx, bytes),
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffers: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match &mut self.carrier {
            Carrier::Plain(stream) => poll_write_gathered(stream, cx, buffers),
            Carrier::Tls(stream) => Pin::new(stream).poll_write_vectored(cx, buffers),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match &self.carrier {
            Carrier::Plain(stream) => stream.is_write_vectored(),
            Carrier::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.carrier {
            Carrier::Plain(stream) => Pin::new(stream).poll_flush(cx),
            Carrier::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.carrier {
            Carrier::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Carrier::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}
