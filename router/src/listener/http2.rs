//! One client's connection in HTTP/2: by prior knowledge, or agreed upon within TLS.
//!
//! The connection's frames are read and written on its own core; its streams run on all of them, since a client that sends
//! everything over one connection would otherwise have one core. Next: [`stages::accept`](crate::stages::accept), or
//! [`gateway`](crate::gateway).

use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;
use std::time::{Duration, Instant};

use http::{Request, Response, StatusCode, header};
use hyper::body::Incoming;
use hyper::rt::Executor;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};

use super::client_stream::ClientStream;
use super::connection::{Callers, Clients, drive_until};
use super::cores::OpenConnection;
use super::http2_body::{Http2Body, Http2Reply, Pieces, Stall};
use super::http2_writes::{Turns, gather};
use crate::answers::respond;
use crate::app::App;
use crate::error::error_body;
use crate::gateway;
use crate::stages::accept::serve as serve_request;
use crate::stages::relay::RelayBody;

/// What a client may send of one body before it is read: a long prompt in one go.
const STREAM_WINDOW_BYTES: u32 = 1 << 20;
/// The same of all bodies of a connection, and so what a connection may make us hold.
const CONNECTION_WINDOW_BYTES: u32 = 4 << 20;
/// The same of a gateway's connection, which carries many clients' bodies.
const GATEWAY_WINDOW_BYTES: u32 = 256 << 20;
/// What is held of a reply that its client does not take.
const SEND_BUFFER_BYTES: usize = 256 << 10;
/// How often a client is asked whether it is still there, and how long it may take to say so.
const PING_INTERVAL: Duration = Duration::from_secs(30);
const PING_TIMEOUT: Duration = Duration::from_secs(20);
/// Streams that a client may reset before they were begun. One that does so more often does nothing else (CVE-2023-44487).
const MAX_PENDING_RESETS: usize = 20;
/// Streams that may be reset for faults of the client's (RUSTSEC-2024-0003).
const MAX_ERROR_RESETS: usize = 256;
/// How long a client that is told to go may take to say that it has heard.
const GOODBYE: Duration = Duration::from_secs(2);

/// What one connection may ask for.
struct Limits {
    streams: u32,
    window_bytes: u32,
    pending_resets: usize,
    error_resets: Option<usize>,
}

impl Limits {
    fn of(clients: &Clients) -> Self {
        let settings = &clients.app.settings;
        match clients.callers {
            Callers::Clients => Self {
                streams: settings.max_http2_streams,
                window_bytes: CONNECTION_WINDOW_BYTES,
                pending_resets: MAX_PENDING_RESETS,
                error_resets: Some(MAX_ERROR_RESETS),
            },
            // It has all of its clients' requests on one connection or a few: that some of these leave at once is no fault, and bodies that wait in
            // line must not keep others' answers from coming.
            Callers::Gateways => Self {
                streams: u32::try_from(settings.max_in_flight).unwrap_or(u32::MAX),
                window_bytes: GATEWAY_WINDOW_BYTES,
                pending_resets: settings.max_in_flight,
                error_resets: None,
            },
        }
    }
}

/// Serves a connection to its end.
pub async fn serve(clients: &Arc<Clients>, stream: ClientStream, connection: OpenConnection) {
    let settings = &clients.app.settings;
    let closing = connection.closing().clone();
    let streams = Arc::new(Streams::new(connection, settings.client_timeout));
    let (clients_of_requests, streams_of_requests) = (Arc::clone(clients), Arc::clone(&streams));
    let service = service_fn(move |request: Request<Incoming>| {
        let clients = Arc::clone(&clients_of_requests);
        let pieces = streams_of_requests.begin();
        async move {
            let response = match clients.callers {
                // Boxed, since hyper moves a stream several times before it is polled.
                Callers::Clients => Box::pin(answer(&clients.app, request)).await.map(Http2Reply::Client),
                Callers::Gateways => gateway::answer(&clients.app, request).await.map(Http2Reply::Gateway),
            };
            Ok::<_, Infallible>(response.map(|body| Http2Body::new(body, pieces)))
        }
    });
    let limits = Limits::of(clients);
    let mut builder = http2::Builder::new(StreamExecutor(Arc::clone(&streams)));
    builder
        .timer(TokioTimer::new())
        .max_concurrent_streams(limits.streams)
        .max_header_list_size(u32::try_from(settings.max_header_bytes).unwrap_or(u32::MAX))
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(limits.window_bytes)
        .max_send_buf_size(SEND_BUFFER_BYTES)
        .max_pending_accept_reset_streams(limits.pending_resets)
        .max_local_error_reset_streams(limits.error_resets)
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT);
    let (side, outflow) = gather(stream);
    let mut connection = pin!(builder.serve_connection(TokioIo::new(side), service));
    let mut turns = Turns { connection: connection.as_mut(), outflow: &outflow };
    let mut outcome =
        drive_until(&mut turns, either(closing.begins(), streams.idle(settings.keep_alive_timeout))).await;
    if outcome.is_none() {
        turns.connection.as_mut().graceful_shutdown();
        outcome = drive_until(&mut turns, streams.ended()).await;
    }
    if let Some(Err(error)) = outcome {
        tracing::debug!(%error, "client connection ended");
    }
}

async fn either(one: impl Future<Output = ()>, other: impl Future<Output = ()>) {
    let (mut one, mut other) = (pin!(one), pin!(other));
    poll_fn(|cx| if one.as_mut().poll(cx).is_ready() { Poll::Ready(()) } else { other.as_mut().poll(cx) })
        .await;
}

/// One request. Headers of a connection are left out of the answer by hyper, `connection: close` of an error among them.
async fn answer(app: &Arc<App>, request: Request<Incoming>) -> Response<RelayBody> {
    // Whoever reads both must not read two hosts (RFC 9113, section 8.3.1).
    let authority = request.uri().authority().map(http::uri::Authority::as_str);
    let differs = |host: &http::HeaderValue| Some(host.as_bytes()) != authority.map(str::as_bytes);
    if authority.is_some() && request.headers().get_all(header::HOST).iter().any(differs) {
        app.metrics.listener.refused_head(StatusCode::BAD_REQUEST);
        let message = "malformed request: the host header is not the :authority";
        let body = error_body(message, "invalid_request_error", None, Some("malformed_request"));
        return respond(StatusCode::BAD_REQUEST, "application/json", body.to_vec());
    }
    serve_request(app, request).await
}

/// The streams of one connection.
struct Streams {
    connection: OpenConnection,
    /// A client may take nothing of a reply for so long.
    client_timeout: Duration,
    open: AtomicUsize,
    /// When the last one ended.
    idle_since: Mutex<Instant>,
    /// From the service, which hyper calls first, to the executor, which it calls next, for the same stream.
    begun: Mutex<Option<Arc<Pieces>>>,
}

impl Streams {
    fn new(connection: OpenConnection, client_timeout: Duration) -> Self {
        Self {
            connection,
            client_timeout,
            open: AtomicUsize::new(0),
            idle_since: Mutex::new(Instant::now()),
            begun: Mutex::default(),
        }
    }

    fn begin(&self) -> Arc<Pieces> {
        let pieces = Arc::<Pieces>::default();
        *self.begun.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&pieces));
        pieces
    }

    fn are_open(&self) -> bool {
        self.open.load(Ordering::Acquire) > 0
    }

    /// Resolves when there was no stream for `limit`.
    async fn idle(&self, limit: Duration) {
        loop {
            let since = *self.idle_since.lock().unwrap_or_else(PoisonError::into_inner);
            let left = if self.are_open() { limit } else { limit.saturating_sub(since.elapsed()) };
            if left.is_zero() {
                return;
            }
            tokio::time::sleep(left).await;
        }
    }

    /// Resolves some time after the last stream has ended.
    async fn ended(&self) {
        loop {
            tokio::time::sleep(GOODBYE).await;
            if !self.are_open() {
                return;
            }
        }
    }
}

/// Counts a stream until it ends, however it ends.
struct OpenStream(Arc<Streams>);

impl Drop for OpenStream {
    fn drop(&mut self) {
        *self.0.idle_since.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        self.0.open.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Gives each stream to a core.
#[derive(Clone)]
struct StreamExecutor(Arc<Streams>);

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for StreamExecutor {
    fn execute(&self, stream: F) {
        let Self(streams) = self;
        let begun = streams.begun.lock().unwrap_or_else(PoisonError::into_inner).take();
        let mut stall = Stall::new(begun.unwrap_or_default(), streams.client_timeout);
        streams.open.fetch_add(1, Ordering::AcqRel);
        let open = OpenStream(Arc::clone(streams));
        streams.connection.spawn_stream(async move {
            let mut stream = pin!(stream);
            let mut breaks_off = pin!(open.0.connection.closing().breaks_off());
            let mut is_told = false;
            // Cut off, it is dropped, and so reset.
            poll_fn(|cx| {
                // Only wakes the stream: its answer finds out by itself that it is to break off.
                is_told = is_told || breaks_off.as_mut().poll(cx).is_ready();
                if stream.as_mut().poll(cx).is_ready() { Poll::Ready(()) } else { stall.poll_exceeded(cx) }
            })
            .await;
        });
    }
}
