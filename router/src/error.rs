//! What can go wrong with a request, whose fault it is, and what the client is told.
//!
//! The only file that knows HTTP statuses of failures.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use router_core::{PickError, WorkerId};
use serde_json::{Value, json};

use crate::body_memory::BodyMemoryFull;
use crate::keys::Unauthorized;
use crate::keys::allowances::Spent;
use crate::openai::scan::{BodyError, SyntaxError};
use crate::precedence::BadPriority;
use crate::routes::Endpoint;
use crate::stages::relay::RelayBody;
use crate::transport::TransportError;

/// Whose fault a failure is; a label of `router_errors_total`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Blame {
    /// The client sent something wrong, or left.
    Client,
    /// The router could not do its part.
    Router,
    /// A worker failed.
    Worker,
}

impl Blame {
    /// The label's value.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Router => "router",
            Self::Worker => "worker",
        }
    }
}

/// OpenAI's `code` of answers that end with the router, whether they had begun or not.
pub const SHUTTING_DOWN: &str = "router_shutting_down";

/// Why a request was not answered by a worker.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// The body is not JSON.
    #[error("request body is not valid JSON: {0}")]
    BadJson(#[source] SyntaxError),
    /// The body is JSON, but no object.
    #[error("request body must be a JSON object, not {found}")]
    NotAnObject {
        /// What it is.
        found: &'static str,
    },
    /// The object has more members than any request.
    #[error("request body has more than {most} members; no API takes so many")]
    TooManyMembers {
        /// As many may be there.
        most: usize,
    },
    /// The body is larger than allowed.
    #[error(
        "request body is larger than the limit of {limit_bytes} bytes; raise --max-body-bytes to allow more"
    )]
    BodyTooLarge {
        /// The limit.
        limit_bytes: usize,
    },
    /// The body did not come in time.
    #[error("request body did not arrive within {} s", limit.as_secs_f64())]
    BodyTimeout {
        /// The limit.
        limit: Duration,
    },
    /// The client's connection broke while its body was read.
    #[error("request body could not be read: {0}")]
    BodyBroken(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The client may not come in.
    #[error(transparent)]
    Unauthorized(#[from] Unauthorized),
    /// Its key has asked for as much as it may.
    #[error(transparent)]
    Spent(#[from] Spent),
    /// Nothing is served at this path.
    #[error(
        "no such endpoint: {path}; this router serves POST /v1/… and what engines compute at paths of their own (/generate, \
         /tokenize, /rerank, /score, …), GET /v1/models and /health"
    )]
    NotFound {
        /// The path asked for.
        path: String,
    },
    /// It would change one engine, whichever is picked.
    #[error("{path} changes an engine, and is not routed: ask each engine itself")]
    NotRouted {
        /// The path asked for.
        path: String,
    },
    /// The path exists, with another method.
    #[error("{path} takes {allowed}, not {method}")]
    MethodNotAllowed {
        /// The path.
        path: String,
        /// The method that came.
        method: String,
        /// What it takes.
        allowed: &'static str,
    },
    /// More requests are in flight than allowed, and as many wait.
    #[error(
        "the router has reached its limit of {limit} requests in flight (--max-in-flight) and {queue} waiting \
         (--max-queue)"
    )]
    Overloaded {
        /// The limit of requests in flight.
        limit: usize,
        /// The limit of those that wait.
        queue: usize,
    },
    /// No place became free in time.
    #[error("no place among the requests in flight became free within {} s (--queue-timeout)", limit.as_secs_f64())]
    QueueTimeout {
        /// The limit.
        limit: Duration,
    },
    /// A header says what is no priority.
    #[error(transparent)]
    BadPriority(#[from] BadPriority),
    /// It asks for several answers, where the engines give one.
    #[error(
        "n must be 1: where SGLang's engines compute prompts and answers apart, they answer a request once; send it as often as you want answers"
    )]
    AnsweredOnce,
    /// As many wait in the background as may.
    #[error(
        "as many requests wait in the background as may, {limit} (--max-background), or bodies hold a quarter of --max-body-memory"
    )]
    TooManyInBackground {
        /// The limit.
        limit: usize,
    },
    /// Nobody had time to spare for it in time; nothing was processed anywhere.
    #[error("no worker had time to spare for a request in the background within {} s (--request-timeout)", limit.as_secs_f64())]
    NoSpare {
        /// The limit.
        limit: Duration,
    },
    /// All bodies together are as large as they may be.
    #[error(transparent)]
    BodyMemoryFull(#[from] BodyMemoryFull),
    /// It names no model, and workers would take it for different ones.
    #[error("the request names no model, and several are served here: {}", known.join(", "))]
    ModelNotNamed {
        /// What there is, sorted.
        known: Vec<String>,
    },
    /// No worker can take it.
    #[error(transparent)]
    Pick(#[from] PickError),
    /// No worker had room for it in time; nothing was processed anywhere.
    #[error("all workers have enough to compute, and none had room for the request within {} s (--request-timeout)", limit.as_secs_f64())]
    NoRoom {
        /// The limit.
        limit: Duration,
    },
    /// The time that answers had after the router was told to stop is over.
    #[error("the router is shutting down")]
    ShuttingDown,
    /// No worker could be reached; nothing was processed anywhere.
    #[error("no worker can be reached: {attempts} attempts, the last one at {worker}: {}", source.for_clients())]
    Unreachable {
        /// How often it was tried.
        attempts: usize,
        /// The worker of the last attempt.
        worker: WorkerId,
        /// What happened there.
        source: TransportError,
    },
    /// Every attempt failed; the last one like this.
    #[error("worker {worker} failed: {}", source.for_clients())]
    Worker {
        /// The worker of the last attempt.
        worker: WorkerId,
        /// What happened there.
        source: TransportError,
    },
}

impl From<BodyError> for RequestError {
    fn from(error: BodyError) -> Self {
        match error {
            BodyError::Syntax(error) => Self::BadJson(error),
            BodyError::NotAnObject { found } => Self::NotAnObject { found },
            BodyError::TooManyMembers { most } => Self::TooManyMembers { most },
        }
    }
}

impl RequestError {
    /// The status that the client gets.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        match self {
            Self::BadJson(_)
            | Self::NotAnObject { .. }
            | Self::TooManyMembers { .. }
            | Self::BodyBroken(_)
            | Self::BadPriority(_)
            | Self::AnsweredOnce
            | Self::ModelNotNamed { .. } => StatusCode::BAD_REQUEST,
            Self::BodyTooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            Self::BodyTimeout { .. } => StatusCode::REQUEST_TIMEOUT,
            Self::NotFound { .. } | Self::Pick(PickError::UnknownModel { .. }) => StatusCode::NOT_FOUND,
            Self::NotRouted { .. } => StatusCode::FORBIDDEN,
            Self::MethodNotAllowed { .. } => StatusCode::METHOD_NOT_ALLOWED,
            Self::Unauthorized(_) => StatusCode::UNAUTHORIZED,
            Self::Spent(_)
            | Self::Overloaded { .. }
            | Self::QueueTimeout { .. }
            | Self::TooManyInBackground { .. }
            | Self::BodyMemoryFull(_) => StatusCode::TOO_MANY_REQUESTS,
            Self::Pick(_)
            | Self::NoRoom { .. }
            | Self::NoSpare { .. }
            | Self::Unreachable { .. }
            | Self::ShuttingDown => StatusCode::SERVICE_UNAVAILABLE,
            Self::Worker { source, .. } if source.is_timeout() => StatusCode::GATEWAY_TIMEOUT,
            Self::Worker { .. } => StatusCode::BAD_GATEWAY,
        }
    }

    /// Whose fault it is.
    #[must_use]
    pub fn blame(&self) -> Blame {
        match self {
            Self::Overloaded { .. }
            | Self::QueueTimeout { .. }
            | Self::TooManyInBackground { .. }
            | Self::NoSpare { .. }
            | Self::BodyMemoryFull(_)
            | Self::ShuttingDown => Blame::Router,
            Self::Pick(PickError::UnknownModel { .. }) => Blame::Client,
            Self::Worker { .. } | Self::Unreachable { .. } | Self::Pick(_) | Self::NoRoom { .. } => {
                Blame::Worker
            }
            _ => Blame::Client,
        }
    }

    /// OpenAI's `code`, if it has one.
    #[must_use]
    pub fn code(&self) -> Option<&'static str> {
        self.kind().1
    }

    /// OpenAI's `type` and `code`.
    fn kind(&self) -> (&'static str, Option<&'static str>) {
        match self {
            Self::Pick(PickError::UnknownModel { .. }) => ("invalid_request_error", Some("model_not_found")),
            Self::ModelNotNamed { .. } => ("invalid_request_error", Some("model_required")),
            Self::Unauthorized(_) => ("invalid_request_error", Some("invalid_api_key")),
            Self::Spent(_) => ("rate_limit_error", Some("rate_limit_exceeded")),
            Self::Overloaded { .. }
            | Self::QueueTimeout { .. }
            | Self::TooManyInBackground { .. }
            | Self::BodyMemoryFull(_) => ("rate_limit_error", Some("router_overloaded")),
            Self::Pick(_) | Self::NoRoom { .. } | Self::NoSpare { .. } | Self::Unreachable { .. } => {
                ("service_unavailable_error", Some("no_worker_available"))
            }
            Self::ShuttingDown => ("server_error", Some(SHUTTING_DOWN)),
            Self::Worker { source, .. } if source.is_timeout() => ("server_error", Some("worker_timeout")),
            Self::Worker { .. } => ("server_error", Some("worker_failed")),
            _ => ("invalid_request_error", None),
        }
    }

    /// Seconds after which trying again makes sense.
    fn retry_after(&self) -> Option<HeaderValue> {
        match self {
            Self::Pick(PickError::UnknownModel { .. }) => None,
            Self::Spent(Spent { wait, .. }) => {
                Some(HeaderValue::from(wait.as_secs_f64().ceil().max(1.0) as u64))
            }
            Self::Overloaded { .. }
            | Self::QueueTimeout { .. }
            | Self::BodyMemoryFull(_)
            | Self::Pick(_)
            | Self::NoRoom { .. }
            | Self::TooManyInBackground { .. }
            | Self::NoSpare { .. }
            | Self::ShuttingDown
            | Self::Unreachable { .. } => Some(HeaderValue::from_static("1")),
            _ => None,
        }
    }

    /// The answer to the client, in OpenAI's shape.
    #[must_use]
    pub fn response(&self) -> Response<RelayBody> {
        self.response_at(Endpoint::Unknown)
    }

    /// The same, as clients of `endpoint` read it.
    #[must_use]
    pub fn response_at(&self, endpoint: Endpoint) -> Response<RelayBody> {
        let (kind, code) = self.kind();
        let is_about_model =
            matches!(self, Self::Pick(PickError::UnknownModel { .. }) | Self::ModelNotNamed { .. });
        let param = is_about_model.then_some("model");
        let mut body = error_value(&self.to_string(), kind, param, code);
        if endpoint == Endpoint::Messages {
            body["type"] = "error".into();
        }
        let mut response = Response::new(RelayBody::full(body.to_string()));
        *response.status_mut() = self.status();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(seconds) = self.retry_after() {
            headers.insert(header::RETRY_AFTER, seconds);
        }
        if let Self::Unauthorized(_) = self {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if let Self::MethodNotAllowed { allowed, .. } = self {
            headers.insert(header::ALLOW, HeaderValue::from_static(allowed));
        }
        let is_unread = matches!(
            self,
            Self::BodyTooLarge { .. }
                | Self::BodyTimeout { .. }
                | Self::BodyBroken(_)
                | Self::BodyMemoryFull(_)
        );
        if is_unread {
            // What is left of the body would be read as the next request.
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }

    /// The same in a stream that has begun.
    #[must_use]
    pub fn event_at(&self, endpoint: Endpoint) -> Bytes {
        let (kind, code) = self.kind();
        error_event(endpoint, &self.to_string(), (kind, code.unwrap_or("invalid_request")))
    }
}

/// An error body in OpenAI's shape.
#[must_use]
pub fn error_body(message: &str, kind: &str, param: Option<&str>, code: Option<&str>) -> Bytes {
    error_value(message, kind, param, code).to_string().into()
}

fn error_value(message: &str, kind: &str, param: Option<&str>, code: Option<&str>) -> Value {
    json!({ "error": { "message": message, "type": kind, "param": param, "code": code } })
}

/// The last event of a stream of `endpoint` that breaks off. Where events have names it has one too, and says its type in the data as
/// they do; the error itself is in OpenAI's shape everywhere.
#[must_use]
pub fn error_event(endpoint: Endpoint, message: &str, (kind, code): (&str, &str)) -> Bytes {
    let mut data = error_value(message, kind, None, Some(code));
    let name = match endpoint {
        Endpoint::Messages => "event: error\n",
        Endpoint::Responses => {
            (data["code"], data["message"], data["param"]) = (code.into(), message.into(), Value::Null);
            "event: error\n"
        }
        _ => "",
    };
    if !name.is_empty() {
        data["type"] = "error".into();
    }
    format!("{name}data: {data}\n\n").into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_and_retry_after() {
        let down =
            RequestError::from(PickError::NoneUsable { prefill: false, down: 2, draining: 0, total: 2 });
        assert_eq!(down.response().status(), StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(down.response().headers()[header::RETRY_AFTER], "1");
        let unknown =
            RequestError::from(PickError::UnknownModel { model: "x".into(), known: vec!["y".into()] });
        assert_eq!(unknown.status(), StatusCode::NOT_FOUND);
        assert_eq!(unknown.blame(), Blame::Client);
        let model_down = RequestError::from(PickError::ModelDown { model: "m".into() });
        let source = TransportError::ConnectTimeout { limit: Duration::from_secs(1) };
        let unreachable = RequestError::Unreachable { attempts: 4, worker: WorkerId::new("w"), source };
        for error in [model_down, unreachable] {
            assert_eq!(error.status(), StatusCode::SERVICE_UNAVAILABLE);
            assert_eq!(error.blame(), Blame::Worker);
            assert!(error.response().headers().contains_key(header::RETRY_AFTER));
            assert_eq!(error.kind().1, Some("no_worker_available"));
        }
        let source = TransportError::ConnectTimeout { limit: Duration::from_secs(1) };
        let timeout = RequestError::Worker { worker: WorkerId::new("w"), source };
        assert_eq!(timeout.status(), StatusCode::GATEWAY_TIMEOUT);
        assert_eq!(timeout.blame(), Blame::Worker);
    }

    #[test]
    fn a_body_that_was_not_read_closes_the_connection() {
        let too_large = RequestError::BodyTooLarge { limit_bytes: 5 };
        assert_eq!(too_large.response().headers()[header::CONNECTION], "close");
        let full = RequestError::from(BodyMemoryFull { limit_bytes: 5 }).response();
        assert_eq!(
            (full.status(), &full.headers()[header::RETRY_AFTER]),
            (StatusCode::TOO_MANY_REQUESTS, &HeaderValue::from_static("1"))
        );
        assert_eq!(full.headers()[header::CONNECTION], "close");
    }

    #[test]
    fn errors_are_told_as_clients_of_an_endpoint_read_them() {
        let read = |event: &Bytes| {
            let text = std::str::from_utf8(event).unwrap().strip_suffix("\n\n").unwrap().to_owned();
            let (name, data) = text.split_once("data: ").unwrap();
            (name.to_owned(), serde_json::from_str::<Value>(data).unwrap())
        };
        let error = json!({ "message": "m", "type": "server_error", "param": null, "code": "c" });
        for (endpoint, name, data) in [
            (Endpoint::Chat, "", json!({ "error": error })),
            (Endpoint::Messages, "event: error\n", json!({ "type": "error", "error": error })),
            (
                Endpoint::Responses,
                "event: error\n",
                json!({ "type": "error", "code": "c", "message": "m", "param": null, "error": error }),
            ),
        ] {
            assert_eq!(read(&error_event(endpoint, "m", ("server_error", "c"))), (name.to_owned(), data));
        }
    }

    #[test]
    fn error_bodies_have_the_four_fields() {
        let body: serde_json::Value = serde_json::from_slice(&error_body("m", "t", None, Some("c"))).unwrap();
        assert_eq!(body, json!({ "error": { "message": "m", "type": "t", "param": null, "code": "c" } }));
    }
}
