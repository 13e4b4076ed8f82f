//! One HTTP/2 connection to a worker, and the streams on it.
//!
//! The connection runs in a task of its own, since no single request owns it. It ends when nobody holds it any more.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::uri::{self, PathAndQuery};
use http::{Request, Response, Uri};
use http_body::{Body, Frame};
use hyper::body::Incoming;
use hyper::client::conn::http2::{Builder, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};

use super::pool::Counts;
use super::socket::Stream;
use crate::payload::PayloadBody;
use crate::transport::{Broken, TransportError};

/// Streams on one connection, if the worker allows as many: few enough that their windows fit into the connection's.
const MAX_STREAMS: usize = 256;
/// What one stream may have on the way before its client has taken it: a slow client holds no more than this.
const STREAM_WINDOW_BYTES: u32 = 128 << 10;
/// Room for all streams' windows, so that slow clients do not stop the others' streams.
const CONNECTION_WINDOW_BYTES: u32 = STREAM_WINDOW_BYTES * 256;
/// A response's head, as with HTTP/1.
const MAX_HEAD_BYTES: u32 = 64 << 10;
/// A worker that vanished without a word is noticed within twice this, while requests wait for it.
const PING_INTERVAL: Duration = Duration::from_secs(10);
/// A connection that had no stream in so many sweeps, one a second, is closed.
const IDLE_SWEEPS: usize = 60;

/// A connection; clones share it.
#[derive(Clone)]
pub(super) struct Mux {
    sender: SendRequest<PayloadBody>,
    load: Arc<Load>,
}

/// What is known of a connection while it is shared.
struct Load {
    streams: AtomicUsize,
    /// What the worker allows.
    limit: AtomicUsize,
    /// Sweeps since it last had a stream.
    idle_sweeps: AtomicUsize,
    counts: Arc<Counts>,
}

/// Why a stream brought no answer.
pub(super) enum Failed {
    /// The worker has not processed it.
    Refused(hyper::Error),
    /// It may have.
    Broken(hyper::Error),
}

impl Mux {
    /// Speaks HTTP/2 over `stream`.
    pub(super) async fn open(stream: Stream, counts: Arc<Counts>) -> Result<Self, TransportError> {
        let (sender, mut connection) = Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .keep_alive_interval(PING_INTERVAL)
            .keep_alive_timeout(PING_INTERVAL)
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .max_header_list_size(MAX_HEAD_BYTES)
            .handshake(TokioIo::new(stream))
            .await
            .map_err(|error| TransportError::Unsent(Broken::Http2(error)))?;
        counts.opened();
        let load = Arc::new(Load {
            streams: AtomicUsize::new(0),
            limit: AtomicUsize::new(MAX_STREAMS),
            idle_sweeps: AtomicUsize::new(0),
            counts: Arc::clone(&counts),
        });
        let known = Arc::clone(&load);
        let open = Open(counts);
        // Ends when the last sender is dropped and the last stream over, or when the worker closes.
        tokio::spawn(async move {
            let _open = open;
            let outcome = std::future::poll_fn(|cx| {
                let outcome = Pin::new(&mut connection).poll(cx);
                let allowed = connection.current_max_send_streams().clamp(1, MAX_STREAMS);
                known.limit.store(allowed, Ordering::Relaxed);
                outcome
            });
            if let Err(error) = outcome.await {
                tracing::debug!(%error, "connection to worker ended");
            }
        });
        Ok(Self { sender, load })
    }

    /// Sends `request`, whose URI is absolute, and waits for the head of its answer. Dropping the future, or the body, resets
    /// the stream and leaves the others alone.
    pub(super) async fn exchange(
        mut self,
        request: Request<PayloadBody>,
    ) -> Result<Response<MuxBody>, Failed> {
        let stream = self.begin();
        match self.sender.try_send_request(request).await {
            Ok(response) => Ok(response.map(|incoming| MuxBody { incoming, _stream: stream })),
            Err(mut error) => {
                let unsent = error.take_message().is_some();
                let error = error.into_error();
                Err(if unsent || says_unprocessed(&error) {
                    Failed::Refused(error)
                } else {
                    Failed::Broken(error)
                })
            }
        }
    }

    /// Counts a stream, until dropped.
    fn begin(&self) -> StreamOf {
        if self.load.streams.fetch_add(1, Ordering::Relaxed) == 0 {
            self.load.counts.took_up();
            self.load.idle_sweeps.store(0, Ordering::Relaxed);
        }
        StreamOf(Arc::clone(&self.load))
    }

    /// Streams on it.
    pub(super) fn streams(&self) -> usize {
        self.load.streams.load(Ordering::Relaxed)
    }

    /// Whether another stream would have to wait.
    pub(super) fn is_full(&self) -> bool {
        self.streams() >= self.load.limit.load(Ordering::Relaxed)
    }

    /// Whether it takes requests: it does not after a GOAWAY.
    pub(super) fn is_open(&self) -> bool {
        !self.sender.is_closed()
    }

    /// Whether it may be kept any longer; asked by each sweep.
    pub(super) fn keeps(&self) -> bool {
        if self.streams() > 0 {
            self.load.idle_sweeps.store(0, Ordering::Relaxed);
        }
        self.is_open() && self.load.idle_sweeps.fetch_add(1, Ordering::Relaxed) < IDLE_SWEEPS
    }

    /// Whether it is the same connection as `other`.
    pub(super) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.load, &other.load)
    }
}

/// Whether the worker says that it has not processed the request: the stream was refused, or came after the last one that
/// a worker on its way out will still answer.
fn says_unprocessed(error: &hyper::Error) -> bool {
    let cause = std::error::Error::source(error).and_then(|cause| cause.downcast_ref::<h2::Error>());
    cause.is_some_and(|cause| {
        cause.is_remote()
            && (cause.reason() == Some(h2::Reason::REFUSED_STREAM)
                || (cause.is_go_away() && cause.reason() == Some(h2::Reason::NO_ERROR)))
    })
}

/// `path` at `origin`: HTTP/2 carries scheme and authority beside the path.
pub(super) fn absolute(origin: &uri::Parts, path: &PathAndQuery) -> Uri {
    let mut parts = uri::Parts::default();
    parts.scheme.clone_from(&origin.scheme);
    parts.authority.clone_from(&origin.authority);
    parts.path_and_query = Some(path.clone());
    Uri::from_parts(parts).unwrap_or_else(|_| Uri::from(path.clone()))
}

/// Counts a connection until its task ends.
struct Open(Arc<Counts>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.closed();
    }
}

/// Counts a stream until it ends.
struct StreamOf(Arc<Load>);

impl Drop for StreamOf {
    fn drop(&mut self) {
        if self.0.streams.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.0.counts.laid_down();
        }
    }
}

/// The body of one stream; dropped before its end, it resets the stream.
pub struct MuxBody {
    incoming: Incoming,
    _stream: StreamOf,
}

impl Body for MuxBody {
    type Data = Bytes;
    type Error = TransportError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, TransportError>>> {
        Pin::new(&mut self.incoming)
            .poll_frame(cx)
            .map_err(|error| TransportError::Broken(Broken::Http2(error)))
    }

    fn is_end_stream(&self) -> bool {
        self.incoming.is_end_stream()
    }
}
