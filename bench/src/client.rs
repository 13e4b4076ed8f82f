//! An HTTP/1 client for one server, lean enough not to be what is measured: an own pool of kept-alive connections over
//! [`crate::wire`], request heads written once for the run, one thread.
//!
//! Must not know datasets or schedules. [`crate::run`] gives it bodies and gets [`exchange::Exchange`]s.

pub mod connections;
pub mod exchange;
pub mod target;

use std::io::IoSlice;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use http::HeaderMap;
use http::header::{
    ACCEPT, AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE, HOST, HeaderName, HeaderValue, TRANSFER_ENCODING,
};
use serde::Deserialize;

use crate::args::values::time;
use crate::args::{Api, ServeArgs};
use crate::wire::message::Progress;
use crate::wire::socket::ReadError;
use connections::Connections;
use target::Target;

/// Most bytes of an answer that is read as a whole (model lists, errors, answers without a stream).
const WHOLE_ANSWER_LIMIT_BYTES: usize = 64 << 20;
/// Longest wait for the requests around a run (model list, cache flush).
const CONTROL_TIMEOUT: Duration = Duration::from_secs(30);

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// No connection.
    #[error("cannot connect to {authority}")]
    Connect {
        /// Host and port.
        authority: String,
        /// What the system says.
        #[source]
        source: std::io::Error,
    },
    /// The request could not be written.
    #[error("request not sent")]
    NotSent(#[source] std::io::Error),
    /// The connection broke before a response came.
    #[error("no response")]
    NoResponse(#[source] ReadError),
    /// The connection broke within the response, or it is not HTTP.
    #[error("response cut off")]
    CutOff(#[source] ReadError),
    /// An answer that was to be read whole and does not end.
    #[error("an answer is larger than {WHOLE_ANSWER_LIMIT_BYTES} bytes")]
    AnswerTooLarge,
    /// A status other than 200.
    #[error("HTTP {status}: {message}")]
    Status {
        /// The status code.
        status: u16,
        /// The error's message, or the start of the body.
        message: String,
    },
    /// An error event in the stream.
    #[error("error in the stream: {0}")]
    ErrorEvent(String),
    /// An event that is no chunk.
    #[error("malformed chunk")]
    Malformed(#[source] serde_json::Error),
    /// An event without end.
    #[error(transparent)]
    EventTooLarge(#[from] crate::sse::EventTooLarge),
    /// The stream closed in good order but too early.
    #[error("stream ended without [DONE] or a finish_reason")]
    Unfinished,
    /// `--timeout`.
    #[error("no complete answer within {} s", .0.as_secs_f64())]
    TimedOut(Duration),
}

/// A client for one server.
#[derive(Debug)]
pub struct Client {
    connections: Connections,
    target: Target,
    /// What all request heads have in common: the headers, without the body's length.
    headers: Vec<u8>,
    /// Head of a chat completion up to the headers of the single request.
    chat_head: Vec<u8>,
    /// The same of a completion.
    completion_head: Vec<u8>,
    timeout: Duration,
}

#[derive(Deserialize)]
struct ModelList {
    data: Vec<Model>,
}

#[derive(Deserialize)]
struct Model {
    id: String,
}

impl Client {
    /// Resolves the server's name, once for the run, and prepares the heads of all requests.
    ///
    /// # Errors
    /// A URL that is not understood, a name that does not resolve, a header that is none.
    pub async fn new(args: &ServeArgs) -> anyhow::Result<Self> {
        let target: Target = args.base_url().parse()?;
        let resolved = tokio::net::lookup_host((target.host.as_str(), target.port)).await;
        let addresses: Vec<_> =
            resolved.with_context(|| format!("cannot resolve {}", target.host))?.collect();
        let connections = Connections::new(addresses, target.authority.clone());
        let headers = lines_of(&headers(args, &target)?);
        let head = |api| head("POST", target.uri(path_of(api)).path(), &headers);
        let (chat_head, completion_head) = (head(Api::Chat), head(Api::Completions));
        let timeout = time(args.target.timeout).context("--timeout must be from 0 to 1e9 seconds")?;
        Ok(Self { connections, target, headers, chat_head, completion_head, timeout })
    }

    /// The ids of `/v1/models`.
    ///
    /// # Errors
    /// No server, or an answer that is no model list.
    pub async fn models(&self) -> anyhow::Result<Vec<String>> {
        let answer = self.control("GET", "/v1/models").await?;
        let list: ModelList = serde_json::from_slice(&answer).context("/v1/models is not a model list")?;
        Ok(list.data.into_iter().map(|model| model.id).collect())
    }

    /// Empties the server's prefix cache.
    ///
    /// # Errors
    /// A server that cannot be reached or does not know `/flush_cache`.
    pub async fn flush_cache(&self) -> anyhow::Result<()> {
        self.control("POST", "/flush_cache").await.map(drop)
    }

    async fn control(&self, method: &str, path: &str) -> anyhow::Result<Vec<u8>> {
        let url = format!("http://{}{path}", self.target.authority);
        match tokio::time::timeout(CONTROL_TIMEOUT, self.ask(method, path)).await {
            Ok(answer) => answer.with_context(|| format!("{url} did not answer as expected")),
            Err(_) => bail!("{url} did not answer within {} s", CONTROL_TIMEOUT.as_secs()),
        }
    }

    async fn ask(&self, method: &str, path: &str) -> Result<Vec<u8>, RequestError> {
        let mut request = head(method, self.target.uri(path).path(), &self.headers);
        request.extend_from_slice(b"content-length: 0\r\n\r\n");
        let mut connection = self.connections.take().await?;
        connection.send([IoSlice::new(&request)]).await.map_err(RequestError::NotSent)?;
        let mut body = Vec::new();
        loop {
            let read = connection.read_some(|_, piece| body.extend_from_slice(piece)).await;
            if read.map_err(exchange::read_error)? == Progress::Complete {
                break;
            }
            if body.len() > WHOLE_ANSWER_LIMIT_BYTES {
                return Err(RequestError::AnswerTooLarge);
            }
        }
        let status = connection.status();
        self.connections.give_back(connection);
        if (200..300).contains(&status) { Ok(body) } else { Err(exchange::status_error(status, &body)) }
    }
}

/// The path of an endpoint.
pub fn path_of(api: Api) -> &'static str {
    match api {
        Api::Chat => "/v1/chat/completions",
        Api::Completions => "/v1/completions",
    }
}

/// A request's head without its end.
fn head(method: &str, path: &str, headers: &[u8]) -> Vec<u8> {
    [format!("{method} {path} HTTP/1.1\r\n").as_bytes(), headers].concat()
}

fn lines_of(headers: &HeaderMap) -> Vec<u8> {
    let line = |(name, value): (&HeaderName, &HeaderValue)| {
        [name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"].concat()
    };
    headers.iter().flat_map(line).collect()
}

fn headers(args: &ServeArgs, target: &Target) -> anyhow::Result<HeaderMap> {
    let mut headers = HeaderMap::new();
    let value = |text: &str| HeaderValue::from_str(text);
    headers.insert(HOST, value(&target.authority)?);
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(ACCEPT, HeaderValue::from_static("text/event-stream, application/json"));
    // As both originals do.
    if let Ok(key) = std::env::var("OPENAI_API_KEY") {
        let mut bearer = value(&format!("Bearer {key}")).context("OPENAI_API_KEY is not a header value")?;
        bearer.set_sensitive(true);
        headers.insert(AUTHORIZATION, bearer);
    }
    for (name, text) in &args.target.headers {
        let header = || format!("--header {name}:{text} is not a header");
        let name: HeaderName = name.parse().with_context(header)?;
        let frames = name == CONTENT_LENGTH || name == TRANSFER_ENCODING;
        ensure!(!frames, "--header {name}: the benchmark frames its requests itself");
        headers.insert(name, value(text).with_context(header)?);
    }
    Ok(headers)
}
