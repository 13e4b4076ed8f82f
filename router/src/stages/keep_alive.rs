//! Streams whose answers are long in coming begin before them: with comments, so that whatever stands between client and router, and gives up on
//! connections that are silent, does not.
//!
//! What is said then can no longer have a status: a failure is an event. Only with `--stream-keep-alive`. Between [`accept`](super::accept) and
//! [`relay`](super::relay).

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::header::{ACCEPT_ENCODING, CONTENT_TYPE};
use http::{HeaderValue, Response, StatusCode};
use http_body::Body;
use serde_json::Value;
use tokio::time::{Instant, Sleep, sleep, timeout};

use super::accept::unless_cut_off;
use super::dispatch::{Dispatched, dispatch};
use super::exchange::is_event_stream;
use super::parse::Parsed;
use super::record::Recorder;
use super::relay::{RelayBody, relay};
use crate::app::App;
use crate::error::{RequestError, error_event};
use crate::openai::members::Members;
use crate::routes::Endpoint;
use crate::transport::Gateway;

/// A line that readers of events pass over (HTML Living Standard, 9.2.6), and the end of an event that is none.
const COMMENT: &[u8] = b": waiting\n\n";
/// Of an answer that is no stream, what is read: an error is shorter.
const MOST_BYTES: usize = 64 << 10;

/// Whether the answer to a request is to be a stream that may begin before there is one.
pub(super) async fn is_for(parsed: &Parsed, endpoint: Endpoint) -> bool {
    // A gateway is told who answers before anything else.
    endpoint.is_generation()
        && parsed.head.extensions.get::<Gateway>().is_none()
        && Members::of(&parsed.body).await.is_some_and(|body| body.is("stream", b"true"))
}

/// The answer; its beginning alone, if more is not there within `every`.
pub(super) async fn answer(
    app: &Arc<App>,
    mut parsed: Parsed,
    recorder: Recorder,
    every: Duration,
) -> Response<RelayBody> {
    // What the client would be told of a coding would be told too late.
    parsed.head.headers.remove(ACCEPT_ENCODING);
    let endpoint = recorder.endpoint();
    let mut dispatching: Dispatching = Box::pin(dispatched(Arc::clone(app), parsed, recorder));
    match timeout(every, dispatching.as_mut()).await {
        Ok((Ok(dispatched), recorder)) => relay(app, dispatched, recorder),
        Ok((Err(error), mut recorder)) => {
            recorder.fail(&error);
            error.response_at(endpoint)
        }
        Err(_) => {
            let timer = Box::pin(sleep(Duration::ZERO));
            let waiting =
                Early { app: Arc::clone(app), endpoint, every, timer, state: State::Waiting(dispatching) };
            let mut response = Response::new(RelayBody::Early(Box::new(waiting)));
            response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
            response
        }
    }
}

type Dispatching = Pin<Box<dyn Future<Output = (Result<Dispatched, RequestError>, Recorder)> + Send>>;

async fn dispatched(
    app: Arc<App>,
    parsed: Parsed,
    mut recorder: Recorder,
) -> (Result<Dispatched, RequestError>, Recorder) {
    let dispatched = unless_cut_off(&app, pin!(dispatch(&app, parsed, &mut recorder))).await;
    (dispatched, recorder)
}

/// The body of a stream that has begun before its answer.
pub struct Early {
    app: Arc<App>,
    endpoint: Endpoint,
    every: Duration,
    /// Of the next comment.
    timer: Pin<Box<Sleep>>,
    state: State,
}

enum State {
    /// For a worker.
    Waiting(Dispatching),
    /// For the rest of an answer that is no stream.
    Reading(StatusCode, RelayBody, Vec<u8>),
    /// It is all said.
    Ended,
}

/// What becomes of such a body next.
pub(super) enum Next {
    /// A piece of it.
    Piece(Bytes),
    /// The answer is there, and is a stream.
    Begins(RelayBody),
    /// Nothing more.
    End,
}

impl Early {
    /// Whether there is nothing more to come.
    pub(super) fn is_over(&self) -> bool {
        matches!(self.state, State::Ended)
    }

    /// What comes next.
    pub(super) fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Next> {
        loop {
            match &mut self.state {
                State::Waiting(dispatching) => {
                    let Poll::Ready((dispatched, mut recorder)) = dispatching.as_mut().poll(cx) else {
                        ready!(self.timer.as_mut().poll(cx));
                        self.timer.as_mut().reset(Instant::now() + self.every);
                        return Poll::Ready(Next::Piece(Bytes::from_static(COMMENT)));
                    };
                    let dispatched = match dispatched {
                        Ok(dispatched) => dispatched,
                        Err(error) => {
                            recorder.fail(&error);
                            self.state = State::Ended;
                            return Poll::Ready(Next::Piece(error.event_at(self.endpoint)));
                        }
                    };
                    let (head, body) = relay(&self.app, dispatched, recorder).into_parts();
                    if head.status.is_success() && is_event_stream(&head.headers) {
                        return Poll::Ready(Next::Begins(body));
                    }
                    self.state = State::Reading(head.status, body, Vec::new());
                }
                State::Reading(status, body, kept) => {
                    let frame = ready!(Pin::new(&mut *body).poll_frame(cx));
                    let data = frame.and_then(Result::ok).and_then(|frame| frame.into_data().ok());
                    if let Some(data) = data.filter(|data| kept.len() + data.len() <= MOST_BYTES) {
                        kept.extend_from_slice(&data);
                        continue;
                    }
                    let event = no_stream(self.endpoint, *status, kept);
                    self.state = State::Ended;
                    return Poll::Ready(Next::Piece(event));
                }
                State::Ended => return Poll::Ready(Next::End),
            }
        }
    }
}

/// What a worker has answered in place of a stream, as an event: its own words, if it says what is wrong.
fn no_stream(endpoint: Endpoint, status: StatusCode, body: &[u8]) -> Bytes {
    let said: Value = serde_json::from_slice(body).unwrap_or_default();
    let error = if said["error"].is_object() { &said["error"] } else { &said };
    let kind = error["type"].as_str().unwrap_or(match status.is_client_error() {
        true => "invalid_request_error",
        false => "server_error",
    });
    let code = error["code"].as_str().unwrap_or("worker_failed");
    match error["message"].as_str() {
        Some(message) => error_event(endpoint, message, (kind, code)),
        None => error_event(endpoint, &format!("the worker answered {status}, and no stream"), (kind, code)),
    }
}
