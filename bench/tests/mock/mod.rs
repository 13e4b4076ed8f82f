//! An OpenAI-speaking server on loopback whose answers a test writes down.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http::{Request, Response, StatusCode};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::Barrier;

type Body = BoxBody<Bytes, std::io::Error>;

/// What a request gets.
#[derive(Clone)]
pub(crate) enum Reply {
    /// A whole stream: role, these texts, usage, `[DONE]`.
    Stream(Vec<&'static str>),
    /// These pieces as they stand, then the end of the body.
    Raw(Vec<String>),
    /// These pieces, then the connection breaks; without any, before the response.
    Break(Vec<String>),
    /// These pieces, then nothing ever.
    Hang(Vec<String>),
    /// A status and a body.
    Status(u16, &'static str),
}

/// A chat chunk with this text.
pub(crate) fn chunk(text: &str) -> String {
    format!("data: {}\n\n", json!({"choices": [{"index": 0, "delta": {"content": text}}]}))
}

/// One request as it came.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    /// Path.
    pub(crate) path: String,
    /// Body.
    pub(crate) body: Value,
    /// `x-session-id`.
    pub(crate) session: Option<String>,
    /// `x-tenant`.
    pub(crate) tenant: Option<String>,
}

struct Shared {
    reply: Box<dyn Fn(usize) -> Reply + Send + Sync>,
    seen: Mutex<Vec<Seen>>,
    connections: AtomicUsize,
    in_flight: AtomicUsize,
    most_in_flight: AtomicUsize,
    /// Holds every request until this many are in flight.
    barrier: Option<Barrier>,
    closes: bool,
}

/// The server; its thread ends with the process.
pub(crate) struct Mock {
    address: SocketAddr,
    shared: Arc<Shared>,
}

impl Mock {
    /// Answers the n-th generation request (from 0) with `reply(n)`.
    pub(crate) fn start(reply: impl Fn(usize) -> Reply + Send + Sync + 'static) -> Self {
        Self::with(reply, None, false)
    }

    /// As [`Mock::start`], but answers only when `count` requests are there together.
    pub(crate) fn in_groups_of(count: usize, reply: impl Fn(usize) -> Reply + Send + Sync + 'static) -> Self {
        Self::with(reply, Some(Barrier::new(count)), false)
    }

    /// As [`Mock::start`], but closes every connection after its answer.
    pub(crate) fn without_keep_alive(reply: impl Fn(usize) -> Reply + Send + Sync + 'static) -> Self {
        Self::with(reply, None, true)
    }

    fn with(
        reply: impl Fn(usize) -> Reply + Send + Sync + 'static,
        barrier: Option<Barrier>,
        closes: bool,
    ) -> Self {
        let shared = Arc::new(Shared {
            reply: Box::new(reply),
            seen: Mutex::default(),
            connections: AtomicUsize::new(0),
            in_flight: AtomicUsize::new(0),
            most_in_flight: AtomicUsize::new(0),
            barrier,
            closes,
        });
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let for_thread = Arc::clone(&shared);
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(accept(listener, for_thread));
        });
        Self { address, shared }
    }

    /// For `--base-url`.
    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// All generation requests so far.
    pub(crate) fn seen(&self) -> Vec<Seen> {
        self.shared.seen.lock().unwrap().clone()
    }

    /// Connections accepted so far.
    pub(crate) fn connections(&self) -> usize {
        self.shared.connections.load(Ordering::SeqCst)
    }

    /// Most generation requests at once.
    pub(crate) fn most_in_flight(&self) -> usize {
        self.shared.most_in_flight.load(Ordering::SeqCst)
    }
}

async fn accept(listener: std::net::TcpListener, shared: Arc<Shared>) {
    let listener = TcpListener::from_std(listener).unwrap();
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        shared.connections.fetch_add(1, Ordering::SeqCst);
        let shared = Arc::clone(&shared);
        tokio::spawn(async move {
            let keep_alive = !shared.closes;
            let service = service_fn(move |request| answer(request, Arc::clone(&shared)));
            let mut server = hyper::server::conn::http1::Builder::new();
            let _ = server.keep_alive(keep_alive).serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

async fn answer(request: Request<Incoming>, shared: Arc<Shared>) -> Result<Response<Body>, Infallible> {
    let path = request.uri().path().to_owned();
    if path == "/v1/models" {
        return Ok(Response::new(whole(&json!({"data": [{"id": "mock-model"}]}).to_string())));
    }
    let now = shared.in_flight.fetch_add(1, Ordering::SeqCst) + 1;
    shared.most_in_flight.fetch_max(now, Ordering::SeqCst);
    let header = |name| {
        request.headers().get(name).map(|value: &http::HeaderValue| value.to_str().unwrap().to_owned())
    };
    let (session, tenant) = (header("x-session-id"), header("x-tenant"));
    let bytes = request.into_body().collect().await.unwrap().to_bytes();
    let body: Value = serde_json::from_slice(&bytes).unwrap();
    let number = {
        let mut seen = shared.seen.lock().unwrap();
        seen.push(Seen { path, body, session, tenant });
        seen.len() - 1
    };
    if let Some(barrier) = &shared.barrier {
        barrier.wait().await;
    }
    let response = respond((shared.reply)(number), number);
    shared.in_flight.fetch_sub(1, Ordering::SeqCst);
    Ok(response)
}

fn respond(reply: Reply, number: usize) -> Response<Body> {
    let body = match reply {
        Reply::Stream(texts) => pieces(stream_of(&texts)).boxed(),
        Reply::Raw(parts) => pieces(parts).boxed(),
        Reply::Break(parts) => {
            let has_begun = !parts.is_empty();
            let breaks = stream::once(async move {
                if has_begun {
                    // Lets hyper write what came before: it drops its buffer with the connection.
                    tokio::task::yield_now().await;
                }
                Err(std::io::Error::other("broken"))
            });
            pieces(parts).chain(breaks).boxed()
        }
        Reply::Hang(parts) => pieces(parts).chain(stream::pending()).boxed(),
        Reply::Status(status, text) => {
            let mut response = Response::new(whole(text));
            *response.status_mut() = StatusCode::from_u16(status).unwrap();
            return response;
        }
    };
    let mut response = Response::new(BodyExt::boxed(StreamBody::new(SyncStream(Mutex::new(body)))));
    let worker = format!("w{}", number % 2);
    response.headers_mut().insert("x-router-worker", worker.parse().unwrap());
    response.headers_mut().insert("x-router-hit-tokens", "3".parse().unwrap());
    response
}

fn whole(text: &str) -> Body {
    Full::new(Bytes::copy_from_slice(text.as_bytes())).map_err(|never| match never {}).boxed()
}

type Piece = Result<Frame<Bytes>, std::io::Error>;

fn pieces(parts: Vec<String>) -> impl stream::Stream<Item = Piece> + Send + 'static {
    stream::iter(parts.into_iter().map(|part| Ok(Frame::data(Bytes::from(part)))))
}

/// `BoxBody` wants `Sync`; the lock is never contended.
struct SyncStream(Mutex<stream::BoxStream<'static, Piece>>);

impl stream::Stream for SyncStream {
    type Item = Piece;

    fn poll_next(
        self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Piece>> {
        self.get_mut().0.get_mut().unwrap().poll_next_unpin(context)
    }
}

/// A stream as vLLM sends it, with `": ping"` and CR LF thrown in.
fn stream_of(texts: &[&str]) -> Vec<String> {
    let role = format!(
        "data: {}\r\n\r\n: ping\n\n",
        json!({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    );
    let usage = json!({"choices": [], "usage": {"prompt_tokens": 8, "completion_tokens": texts.len(),
                       "prompt_tokens_details": {"cached_tokens": 4}}});
    let end = format!("data: {usage}\n\ndata: [DONE]\n\n");
    std::iter::once(role).chain(texts.iter().map(|text| chunk(text))).chain([end]).collect()
}
