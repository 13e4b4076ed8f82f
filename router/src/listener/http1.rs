//! One client's connection in HTTP/1.
//!
//! Next: [`stages::accept`](crate::stages::accept), with each request.

use std::convert::Infallible;
use std::future::{Future as _, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Request, header};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;

use super::client_stream::ClientStream;
use super::connection::drive_until;
use super::cores::Closing;
use super::guard::HeadLimits;
use super::http1_stream::{Busy, End, Exchange, Http1Stream, Limits, Sending};
use super::refusal;
use crate::app::App;
use crate::stages::accept::serve as serve_request;
use crate::stages::relay::RelayBody;
use crate::transport::TransportError;

/// What hyper keeps of a head and of what comes after it.
const READ_BUFFER_BYTES: usize = 128 << 10;
/// How long a connection that was accepted a moment before the listener closed may take to send its first request.
const FIRST_REQUEST_WAIT: Duration = Duration::from_secs(1);

/// Serves a connection to its end. Returns it if the client turns out to speak HTTP/2.
pub async fn serve(app: &Arc<App>, stream: ClientStream, closing: &Closing) -> Option<ClientStream> {
    let exchange = Arc::new(Exchange::default());
    let settings = &app.settings;
    let head = HeadLimits { max_head_bytes: settings.max_header_bytes };
    let limits = Limits { head: settings.client_timeout, keep_alive: settings.keep_alive_timeout };
    let stream = Http1Stream::new(stream, head, limits, Arc::clone(&exchange));
    let (app_of_requests, exchange_of_requests) = (Arc::clone(app), Arc::clone(&exchange));
    let service = service_fn(move |request: Request<Incoming>| {
        let (app, busy) = (Arc::clone(&app_of_requests), exchange_of_requests.begin());
        async move {
            // Boxed, since hyper keeps the room of a request's way here for as long as the connection lives: most of that time it only relays.
            let mut response = Box::pin(serve_request(&app, request)).await;
            if app.is_draining() {
                // So that the client has left by the time that connections are closed, and no request of its own crosses that.
                response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
            }
            Ok::<_, Infallible>(response.map(|body| Http1Body { body, _busy: busy }))
        }
    });
    let mut connection = http1::Builder::new()
        // The guard counts the bytes of heads.
        .max_buf_size(READ_BUFFER_BYTES.max(2 * settings.max_header_bytes))
        .serve_connection(TokioIo::new(stream), service);
    let outcome = match drive_until(&mut connection, closing.begins()).await {
        Some(outcome) => outcome,
        None => match drive_until(&mut connection, first_request(&exchange)).await {
            Some(outcome) => outcome,
            None => {
                Pin::new(&mut connection).graceful_shutdown();
                match drive_until(&mut connection, closing.breaks_off()).await {
                    Some(outcome) => outcome,
                    // Its answer is asked for once more, and finds that it is to break off.
                    None => (&mut connection).await,
                }
            }
        },
    };
    if let Err(error) = outcome {
        tracing::debug!(%error, "client connection ended");
    }
    let parts = connection.into_parts();
    end(app, parts.io.into_inner(), parts.read_buf).await
}

/// Ends a connection that hyper has done with.
async fn end(app: &App, stream: Http1Stream, unread: Bytes) -> Option<ClientStream> {
    let (mut stream, end, sending) = stream.into_parts();
    match end {
        Some(End::Http2(preface)) => {
            stream.unread(preface);
            stream.unread(unread);
            return Some(stream);
        }
        Some(End::Refused(violation)) => {
            app.metrics.listener.refused_head(refusal::status(violation));
            tracing::debug!(%violation, "client refused");
            stream.close_after(&refusal::answer(violation)).await;
        }
        _ if sending == Sending::Perhaps => stream.close_after(b"").await,
        _ => {}
    }
    None
}

/// Resolves with the first request of a connection, or when it has been awaited for long enough.
async fn first_request(exchange: &Exchange) {
    let mut limit = pin!(tokio::time::sleep(FIRST_REQUEST_WAIT));
    poll_fn(|cx| if exchange.has_begun() { Poll::Ready(()) } else { limit.as_mut().poll(cx) }).await;
}

/// The body of an answer; while it exists, the connection is busy.
struct Http1Body {
    body: RelayBody,
    _busy: Busy,
}

impl Body for Http1Body {
    type Data = Bytes;
    type Error = TransportError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, TransportError>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
