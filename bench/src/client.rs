//! An HTTP/1 client for one server, lean enough not to be what is measured: hyper, an own pool of kept-alive
//! connections, one thread.
//!
//! Must not know datasets or schedules. [`crate::run`] gives it bodies and gets [`exchange::Exchange`]s.

pub mod connections;
pub mod exchange;
pub mod target;

use std::time::Duration;

use anyhow::{Context, bail};
use bytes::Bytes;
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST, HeaderName, HeaderValue};
use http::{HeaderMap, Method, Request};
use http_body_util::{BodyExt, Full, Limited};
use serde::Deserialize;

use crate::args::{Api, ServeArgs};
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
    /// The connection broke before a response came.
    #[error("no response")]
    NoResponse(#[source] hyper::Error),
    /// The connection broke within the response.
    #[error("response cut off")]
    CutOff(#[source] Box<dyn std::error::Error + Send + Sync>),
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
    headers: HeaderMap,
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
    /// Resolves the server's name, once for the run, and prepares the headers of every request.
    ///
    /// # Errors
    /// A URL that is not understood, a name that does not resolve, a header that is none.
    pub async fn new(args: &ServeArgs) -> anyhow::Result<Self> {
        let target: Target = args.base_url().parse()?;
        let resolved = tokio::net::lookup_host((target.host.as_str(), target.port)).await;
        let addresses: Vec<_> =
            resolved.with_context(|| format!("cannot resolve {}", target.host))?.collect();
        let connections = Connections::new(addresses, target.authority.clone());
        let headers = headers(args, &target)?;
        Ok(Self { connections, target, headers, timeout: Duration::from_secs_f64(args.target.timeout) })
    }

    /// The ids of `/v1/models`.
    ///
    /// # Errors
    /// No server, or an answer that is no model list.
    pub async fn models(&self) -> anyhow::Result<Vec<String>> {
        let answer = self.control(Method::GET, "/v1/models").await?;
        let list: ModelList = serde_json::from_slice(&answer).context("/v1/models is not a model list")?;
        Ok(list.data.into_iter().map(|model| model.id).collect())
    }

    /// Empties the server's prefix cache.
    ///
    /// # Errors
    /// A server that cannot be reached or does not know `/flush_cache`.
    pub async fn flush_cache(&self) -> anyhow::Result<()> {
        self.control(Method::POST, "/flush_cache").await.map(drop)
    }

    async fn control(&self, method: Method, path: &str) -> anyhow::Result<Bytes> {
        let request = self.request(method, path, Bytes::new());
        let answer = async {
            let (sender, response) = self.connections.send(request).await?;
            let status = response.status();
            let body = Limited::new(response.into_body(), WHOLE_ANSWER_LIMIT_BYTES).collect().await;
            let body = body.map_err(RequestError::CutOff)?.to_bytes();
            self.connections.give_back(sender);
            if status.is_success() { Ok(body) } else { Err(exchange::status_error(status, &body)) }
        };
        let url = format!("http://{}{path}", self.target.authority);
        match tokio::time::timeout(CONTROL_TIMEOUT, answer).await {
            Ok(answer) => answer.with_context(|| format!("{url} did not answer as expected")),
            Err(_) => bail!("{url} did not answer within {} s", CONTROL_TIMEOUT.as_secs()),
        }
    }

    fn request(&self, method: Method, path: &str, body: Bytes) -> Request<Full<Bytes>> {
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = method;
        *request.uri_mut() = self.target.uri(path);
        *request.headers_mut() = self.headers.clone();
        request
    }
}

/// The path of an endpoint.
pub fn path_of(api: Api) -> &'static str {
    match api {
        Api::Chat => "/v1/chat/completions",
        Api::Completions => "/v1/completions",
    }
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
        headers.insert(name, value(text).with_context(header)?);
    }
    Ok(headers)
}
