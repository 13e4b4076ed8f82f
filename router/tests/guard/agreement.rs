//! What the guard and hyper make of the same bytes must be the same. Used by a test beside it, and by the fuzz target `head`.

use std::convert::Infallible;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Request, Response, Version, header};
use http_body_util::{BodyExt, Empty};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use router::listener::guard::{HeadGuard, HeadLimits, Violation};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

const LIMITS: HeadLimits = HeadLimits { max_head_bytes: 4_096 };

/// What the guard says of `bytes` that come in `pieces`: how many messages came whole, how many bytes are good, and what was
/// wrong with the next.
fn judge<'a>(pieces: impl Iterator<Item = &'a [u8]>) -> (u64, usize, Option<Violation>) {
    let mut guard = HeadGuard::new(LIMITS);
    let (mut before, mut good) = (0, 0);
    for piece in pieces {
        match guard.push(piece) {
            Ok(0) => {}
            Ok(of_piece) => good = before + of_piece,
            Err(refused) => {
                good = if refused.good_bytes == 0 { good } else { before + refused.good_bytes };
                return (guard.messages(), good, Some(refused.violation));
            }
        }
        before += piece.len();
    }
    (guard.messages(), good, None)
}

/// Pieces of the given lengths, and a last one with the rest.
fn cut<'a>(mut bytes: &'a [u8], lengths: &'a [usize]) -> impl Iterator<Item = &'a [u8]> {
    lengths.iter().copied().chain([usize::MAX]).map(move |length| {
        let (piece, rest) = bytes.split_at(length.min(bytes.len()));
        bytes = rest;
        piece
    })
}

/// Judges `bytes` whole, in pieces of `lengths` and by hyper, and panics where the three differ.
pub(crate) fn check(bytes: &[u8], lengths: &[usize]) {
    let whole = judge(std::iter::once(bytes));
    let (messages, _, violation) = judge(cut(bytes, lengths));
    assert_eq!((messages, violation), (whole.0, whole.2), "the verdict depends on cuts");
    let (messages, good, _) = whole;
    let (of_hyper, kept_alive) = by_hyper(&bytes[..good]);
    // A client that asks for the end of the connection is not read any further, by hyper.
    assert!(
        of_hyper == messages || (!kept_alive && of_hyper < messages),
        "hyper read {of_hyper}, the guard {messages}"
    );
}

/// How many requests hyper reads whole, and whether none of them asks for the end of the connection.
fn by_hyper(bytes: &[u8]) -> (u64, bool) {
    let (whole, kept_alive) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(true)));
    let (count, keep) = (Arc::clone(&whole), Arc::clone(&kept_alive));
    let service = service_fn(move |request: Request<Incoming>| {
        let (count, keep) = (Arc::clone(&count), Arc::clone(&keep));
        async move {
            if request.version() == Version::HTTP_10 || request.headers().contains_key(header::CONNECTION) {
                keep.store(false, Ordering::Relaxed);
            }
            if request.into_body().collect().await.is_ok() {
                count.fetch_add(1, Ordering::Relaxed);
            }
            Ok::<_, Infallible>(Response::new(Empty::<Bytes>::new()))
        }
    });
    let connection = http1::Builder::new()
        .half_close(true)
        .serve_connection(TokioIo::new(Canned(Bytes::copy_from_slice(bytes))), service);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .expect("a runtime without drivers needs nothing");
    // It ends with an error where the bytes end within a request.
    let _ = runtime.block_on(connection);
    (whole.load(Ordering::Relaxed), kept_alive.load(Ordering::Relaxed))
}

/// Bytes to read, and a hole to write into.
struct Canned(Bytes);

impl AsyncRead for Canned {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let count = self.0.len().min(buffer.remaining());
        buffer.put_slice(&self.0.split_to(count));
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Canned {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
