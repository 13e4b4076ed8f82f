//! Why a worker cannot start, and why a request is not served.
//!
//! The only file here that knows HTTP statuses of failures.

use http::{HeaderValue, Response, StatusCode, header};
use serde_json::json;

use crate::body::WorkerBody;

/// Why a worker did not start.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// The model cannot be loaded.
    #[error(transparent)]
    Model(#[from] crate::model::ModelError),
    /// Its tokenizer cannot be read.
    #[error(transparent)]
    Tokenizer(#[from] roundhouse_text::TokenizerError),
    /// Its chat template cannot be read.
    #[error(transparent)]
    Template(#[from] roundhouse_text::TemplateError),
    /// The backend cannot be set up.
    #[error(transparent)]
    Backend(#[from] worker_core::step::BackendError),
    /// There is no KV pool of that size.
    #[error(transparent)]
    KvSize(#[from] crate::KvSizeError),
    /// The configuration does not fit the model.
    #[error("{0}")]
    Config(String),
    /// The system has no thread for the engine.
    #[error("cannot start the engine thread")]
    Thread(#[source] std::io::Error),
}

/// Why a request is not served.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// Its body is no JSON object.
    #[error("request body is not valid JSON: {0}")]
    Json(#[source] serde_json::Error),
    /// A parameter is missing, has the wrong type, or a value that makes no sense.
    #[error("{message}")]
    Parameter {
        /// Which.
        parameter: &'static str,
        /// What is wrong, and what would be right.
        message: String,
    },
    /// The model asked for is not this one.
    #[error("model {asked:?} is not served here; this worker serves {served:?}")]
    UnknownModel {
        /// What was asked for.
        asked: String,
        /// What there is.
        served: String,
    },
    /// Prompt and answer do not fit.
    #[error(
        "the context length is {context_tokens} tokens, but the request needs {needed_tokens}: {prompt_tokens} of the \
         prompt and {max_tokens} to generate; shorten the prompt or lower max_tokens"
    )]
    TooLong {
        /// The parameter with the prompt.
        parameter: &'static str,
        /// What there is.
        context_tokens: usize,
        /// Prompt and answer.
        needed_tokens: usize,
        /// The prompt.
        prompt_tokens: usize,
        /// The answer.
        max_tokens: usize,
    },
    /// A text has more bytes than a whole context of the longest token.
    #[error(
        "the context length is {context_tokens} tokens, which is at most {most_bytes} bytes of text, but the text has \
         {text_bytes} bytes; shorten it"
    )]
    TextTooLong {
        /// The parameter with the text.
        parameter: &'static str,
        /// What there is.
        context_tokens: usize,
        /// The most that could fit.
        most_bytes: usize,
        /// The text's length.
        text_bytes: usize,
    },
    /// The beginning of a text alone is far beyond the context.
    #[error(
        "the context length is {context_tokens} tokens, but of the {text_bytes} bytes of the text the first \
         {counted_bytes} are some {counted_tokens} tokens already; shorten it"
    )]
    TextOverflows {
        /// The parameter with the text.
        parameter: &'static str,
        /// What there is.
        context_tokens: usize,
        /// The text's length.
        text_bytes: usize,
        /// The length of what was tokenized.
        counted_bytes: usize,
        /// What that gave.
        counted_tokens: usize,
    },
    /// Prompt and answer fit the context and not the KV pool.
    #[error(
        "the request needs KV for {needed_tokens} tokens, prompt and max_tokens together, but the whole pool holds \
         {pool_tokens}; shorten the prompt or lower max_tokens"
    )]
    OutOfKv {
        /// Prompt and answer, without the last token, which is never computed.
        needed_tokens: usize,
        /// What there is.
        pool_tokens: usize,
    },
    /// The conversation cannot be rendered.
    #[error("messages do not fit the model's chat template: {0}")]
    Template(#[source] roundhouse_text::TemplateError),
    /// The body is larger than allowed.
    #[error("request body is larger than {limit_bytes} bytes")]
    BodyTooLarge {
        /// The limit.
        limit_bytes: usize,
    },
    /// The body did not come whole, or in time.
    #[error("request body did not arrive: {0}")]
    Body(String),
    /// Nothing is at this path.
    #[error("no such endpoint: {path}")]
    NotFound {
        /// The path.
        path: String,
    },
    /// The path takes another method.
    #[error("{path} takes {allowed}")]
    MethodNotAllowed {
        /// The path.
        path: String,
        /// The method.
        allowed: &'static str,
    },
    /// Too many requests wait.
    #[error("{waiting} requests wait already, the most that --max-waiting allows; try again later")]
    Busy {
        /// How many.
        waiting: usize,
    },
    /// Too many texts wait to be tokenized.
    #[error("{waiting} texts wait to be tokenized already; try again later")]
    TextsWait {
        /// How many.
        waiting: usize,
    },
    /// The engine failed or has stopped.
    #[error("the engine failed: {0}")]
    Engine(String),
    /// The engine's thread has ended, and nothing will be generated any more.
    #[error("the engine has ended; the worker must be started anew")]
    EngineEnded,
}

impl RequestError {
    /// The status that the client gets.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        match self {
            Self::Json(_)
            | Self::Parameter { .. }
            | Self::TooLong { .. }
            | Self::TextTooLong { .. }
            | Self::TextOverflows { .. }
            | Self::OutOfKv { .. }
            | Self::Template(_)
            | Self::Body(_) => StatusCode::BAD_REQUEST,
            Self::UnknownModel { .. } | Self::NotFound { .. } => StatusCode::NOT_FOUND,
            Self::BodyTooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            Self::MethodNotAllowed { .. } => StatusCode::METHOD_NOT_ALLOWED,
            Self::Busy { .. } | Self::TextsWait { .. } => StatusCode::TOO_MANY_REQUESTS,
            Self::Engine(_) => StatusCode::INTERNAL_SERVER_ERROR,
            Self::EngineEnded => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    /// OpenAI's `type`, `param` and `code`.
    fn kind(&self) -> (&'static str, Option<&'static str>, Option<&'static str>) {
        match self {
            Self::Parameter { parameter, .. } => {
                ("invalid_request_error", Some(parameter), Some("invalid_value"))
            }
            Self::UnknownModel { .. } => ("invalid_request_error", Some("model"), Some("model_not_found")),
            Self::TooLong { parameter, .. }
            | Self::TextTooLong { parameter, .. }
            | Self::TextOverflows { parameter, .. } => {
                ("invalid_request_error", Some(parameter), Some("context_length_exceeded"))
            }
            Self::OutOfKv { .. } => ("invalid_request_error", None, Some("kv_capacity_exceeded")),
            Self::Template(_) => ("invalid_request_error", Some("messages"), None),
            Self::Busy { .. } | Self::TextsWait { .. } => ("rate_limit_error", None, Some("queue_full")),
            Self::Engine(_) | Self::EngineEnded => ("server_error", None, Some("engine_failed")),
            _ => ("invalid_request_error", None, None),
        }
    }

    /// The error's body, in OpenAI's shape.
    #[must_use]
    pub fn body(&self) -> String {
        let (kind, param, code) = self.kind();
        json!({ "error": { "message": self.to_string(), "type": kind, "param": param, "code": code } })
            .to_string()
    }

    /// The same as a gRPC status.
    #[must_use]
    pub fn grpc(&self) -> tonic::Status {
        let code = match self.status() {
            StatusCode::NOT_FOUND => tonic::Code::NotFound,
            StatusCode::TOO_MANY_REQUESTS => tonic::Code::ResourceExhausted,
            StatusCode::INTERNAL_SERVER_ERROR => tonic::Code::Internal,
            StatusCode::SERVICE_UNAVAILABLE => tonic::Code::Unavailable,
            _ => tonic::Code::InvalidArgument,
        };
        tonic::Status::new(code, self.to_string())
    }

    /// The answer to the client.
    #[must_use]
    pub fn response(&self) -> Response<WorkerBody> {
        let mut response = Response::new(WorkerBody::whole(self.body()));
        *response.status_mut() = self.status();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        match self {
            Self::Busy { .. } | Self::TextsWait { .. } => {
                headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
            }
            Self::MethodNotAllowed { allowed, .. } => {
                headers.insert(header::ALLOW, HeaderValue::from_static(allowed));
            }
            Self::BodyTooLarge { .. } | Self::Body(_) => {
                headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
            }
            _ => {}
        }
        response
    }
}
