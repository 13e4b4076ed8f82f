//! Stage 5: run the route. One attempt after another, each on another worker, until a first byte has come.
//!
//! A reply counts as begun with the first piece of its body, not with its head: engines send the head of a stream at
//! once and may still die before the first token, and until then nothing has gone to the client.
//!
//! Next: [`relay`](super::relay).

use std::sync::Arc;

use bytes::Bytes;
use http::header::{self, HeaderName};
use http::{HeaderValue, Request, Response, StatusCode, Uri};
use http_body_util::BodyExt;
use router_core::{Lease, Worker, WorkerSlot};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, timeout_at};

use super::parse::{Parsed, Reading};
use super::pick::{Picked, pick};
use super::record::Recorder;
use crate::app::App;
use crate::error::RequestError;
use crate::hop_by_hop;
use crate::payload::Payload;
use crate::transport::{TransportError, UpstreamBody};

/// Header that names a request on its whole way.
pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// An answer that has begun.
pub struct Dispatched {
    /// The answer.
    pub begun: Begun,
    /// When the request as a whole runs out of time.
    pub deadline: Instant,
    /// What was read of the request.
    pub reading: Reading,
    /// Its place among the requests in flight.
    pub permit: OwnedSemaphorePermit,
}

/// One worker's answer, with its first piece.
pub struct Begun {
    /// Who answers.
    pub worker: Arc<Worker>,
    /// What the request occupies there.
    pub lease: Lease,
    /// Prompt tokens that were expected in its cache.
    pub hit_tokens: usize,
    /// Head, and the rest of the body.
    pub response: Response<UpstreamBody>,
    /// The first piece of the body; `None` if it is empty.
    pub first: Option<Bytes>,
}

/// Finds a worker that answers.
///
/// # Errors
/// When none could be picked, or every attempt failed.
pub async fn dispatch(
    app: &App,
    parsed: Parsed,
    recorder: &mut Recorder,
) -> Result<Dispatched, RequestError> {
    let deadline = Instant::now() + app.settings.request_timeout;
    let mut tried: Vec<WorkerSlot> = Vec::new();
    let mut last: Option<Result<Begun, RequestError>> = None;
    let begun = loop {
        let picked = match pick(app, &parsed, &tried) {
            Ok(picked) => picked,
            // Nobody is left: what the last one said is the answer, if one was asked at all.
            Err(error) => break last.unwrap_or(Err(error.into()))?,
        };
        tried.push(picked.decided.worker.slot);
        let outcome = attempt(app, &parsed, picked, deadline, recorder).await;
        if tried.len() > app.settings.max_retries || !may_do_better_elsewhere(&outcome, tried.len()) {
            break outcome?;
        }
        last = Some(outcome);
    };
    Ok(Dispatched { begun, deadline, reading: parsed.reading, permit: parsed.permit })
}

/// Whether another worker may succeed where this one did not. A 500 may be the request's own fault, so it gets one more
/// try and no third.
fn may_do_better_elsewhere(outcome: &Result<Begun, RequestError>, attempts: usize) -> bool {
    match outcome {
        Ok(begun) => match begun.response.status() {
            StatusCode::TOO_MANY_REQUESTS
            | StatusCode::BAD_GATEWAY
            | StatusCode::SERVICE_UNAVAILABLE
            | StatusCode::GATEWAY_TIMEOUT => true,
            StatusCode::INTERNAL_SERVER_ERROR => attempts == 1,
            _ => false,
        },
        Err(RequestError::Worker { source, .. }) => !matches!(source, TransportError::Total { .. }),
        Err(_) => false,
    }
}

/// One attempt: send, and wait for the head and the first piece of the answer.
async fn attempt(
    app: &App,
    parsed: &Parsed,
    picked: Picked,
    deadline: Instant,
    recorder: &mut Recorder,
) -> Result<Begun, RequestError> {
    let Picked { decided, upstream } = picked;
    recorder.attempt(&decided.worker, decided.hit_tokens);
    let exchange = async {
        let upstream = upstream.as_ref().ok_or(TransportError::Left)?;
        let response = upstream.transport.send(outgoing(parsed)).await?;
        first_piece(response).await
    };
    let limit = app.settings.request_timeout;
    let outcome = timeout_at(deadline, exchange).await.unwrap_or(Err(TransportError::Total { limit }));
    match outcome {
        Ok((response, first)) => {
            let mut begun = Begun {
                worker: decided.worker,
                lease: decided.lease,
                hit_tokens: decided.hit_tokens,
                response,
                first,
            };
            if begun.response.status().is_success() {
                begun.lease.first_token();
            } else {
                app.decider.take_back(begun.worker.slot, &parsed.reading.blocks, decided.known_blocks);
            }
            recorder.attempt_answered(&begun.worker, begun.response.status());
            Ok(begun)
        }
        Err(source) => {
            app.decider.take_back(decided.worker.slot, &parsed.reading.blocks, decided.known_blocks);
            recorder.attempt_failed(&decided.worker, &source);
            if source.is_unreachable() {
                app.fleet.report_unreachable(&decided.worker, &app.decider);
            }
            Err(RequestError::Worker { worker: decided.worker.id().clone(), source })
        }
    }
}

/// Waits until the reply has begun in earnest.
async fn first_piece(
    response: Response<UpstreamBody>,
) -> Result<(Response<UpstreamBody>, Option<Bytes>), TransportError> {
    let (head, mut body) = response.into_parts();
    let mut first = None;
    while first.is_none() {
        let Some(frame) = body.frame().await else { break };
        first = frame?.into_data().ok().filter(|data| !data.is_empty());
    }
    Ok((Response::from_parts(head, body), first))
}

/// The client's request as a worker gets it: same method, path, headers and bytes, less what belongs to the connection.
fn outgoing(parsed: &Parsed) -> Request<Payload> {
    let mut request = Request::new(parsed.body.clone());
    *request.method_mut() = parsed.head.method.clone();
    let path = parsed.head.uri.path_and_query().cloned();
    *request.uri_mut() = path.map_or_else(Uri::default, Uri::from);
    *request.headers_mut() = parsed.head.headers.clone();
    let headers = request.headers_mut();
    hop_by_hop::strip(headers);
    headers.remove(header::HOST);
    headers.remove(header::EXPECT);
    headers.insert(header::CONTENT_LENGTH, HeaderValue::from(parsed.body.len()));
    request
}
