//! A worker on a port, and a gRPC client that is a plain HTTP/2 connection.

use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use http::{Request, Response, Uri};
use hyper::body::Incoming;
use hyper::client::conn::http2::SendRequest;
use hyper_util::rt::{TokioExecutor, TokioIo};
use roundhouse_wire::v1::generate_request::Input;
use roundhouse_wire::v1::worker_client::WorkerClient;
use roundhouse_wire::v1::{GenerateReply, GenerateRequest, HttpCall, Prompt, Sampling, Tokens, prompt};
use serde_json::Value;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tonic::Streaming;
use tonic::codegen::Service;
use worker::model::ModelSource;
use worker::{KvEventRecording, Worker, WorkerConfig, serve};

/// No wait of a test is longer; reaching it is a failure.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

pub(crate) async fn in_time<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(LIMIT, what).await.expect("it happens in time")
}

/// A worker that serves until it is dropped.
pub(crate) struct Served {
    pub(crate) worker: Worker,
    pub(crate) address: SocketAddr,
    task: JoinHandle<()>,
}

impl Drop for Served {
    fn drop(&mut self) {
        self.task.abort();
        self.worker.shutdown();
    }
}

pub(crate) async fn serve_worker() -> Served {
    let mut config = WorkerConfig::new(ModelSource::Builtin);
    config.kv_events = KvEventRecording::On;
    config.threads = 1;
    serve_with(config).await
}

pub(crate) async fn serve_with(config: WorkerConfig) -> Served {
    serve_until(config, Duration::ZERO, std::future::pending()).await
}

/// Serves until `stop`, and then for at most `grace`.
pub(crate) async fn serve_until(
    config: WorkerConfig,
    grace: Duration,
    stop: impl Future<Output = ()> + Send + 'static,
) -> Served {
    let worker = tokio::task::spawn_blocking(|| Worker::start(config).unwrap()).await.unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let serving = worker.clone();
    let task = tokio::spawn(async move {
        serve::serve(&serving, listener, grace, stop).await;
    });
    Served { worker, address, task }
}

/// HTTP/2 to one address, as tonic's generated clients use it.
#[derive(Clone)]
pub(crate) struct Channel {
    sender: SendRequest<tonic::body::Body>,
}

impl Service<Request<tonic::body::Body>> for Channel {
    type Response = Response<Incoming>;
    type Error = hyper::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Incoming>, hyper::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), hyper::Error>> {
        self.sender.poll_ready(cx)
    }

    fn call(&mut self, request: Request<tonic::body::Body>) -> Self::Future {
        Box::pin(self.sender.send_request(request))
    }
}

pub(crate) type Client = WorkerClient<Channel>;

impl Served {
    /// Waits until it serves no more.
    pub(crate) async fn ended(&mut self) {
        (&mut self.task).await.unwrap();
    }

    pub(crate) async fn client(&self) -> Client {
        let stream = TcpStream::connect(self.address).await.unwrap();
        let handshake = hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream));
        let (sender, connection) = handshake.await.unwrap();
        tokio::spawn(connection);
        let origin: Uri = format!("http://{}", self.address).parse().unwrap();
        WorkerClient::with_origin(Channel { sender }, origin)
    }

    /// One HTTP/1 exchange: status and body.
    pub(crate) async fn http1(&self, method: &str, path: &str, body: &Value) -> (u16, Value) {
        let stream = TcpStream::connect(self.address).await.unwrap();
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let request = Request::builder().method(method).uri(path).header("host", "w");
        let response = in_time(sender.send_request(request.body(body).unwrap())).await.unwrap();
        let status = response.status().as_u16();
        let body = in_time(http_body_util::BodyExt::collect(response.into_body())).await.unwrap().to_bytes();
        (status, serde_json::from_slice(&body).unwrap_or_else(|_| String::from_utf8_lossy(&body).into()))
    }
}

pub(crate) fn http_call(method: &str, path: &str, body: &Value) -> GenerateRequest {
    let body = if body.is_null() { String::new() } else { body.to_string() };
    let call = HttpCall { method: method.into(), path: path.into(), headers: Vec::new(), body: body.into() };
    GenerateRequest { request_id: String::new(), input: Some(Input::Http(call)) }
}

/// Greedy, and on past the end of a turn: as long as was asked for.
pub(crate) fn tokens(id: &str, ids: Vec<u32>, max_tokens: u32) -> GenerateRequest {
    let prompt = Prompt {
        content: Some(prompt::Content::Tokens(Tokens { ids })),
        max_tokens: Some(max_tokens),
        ignore_eos: true,
        sampling: Some(Sampling { temperature: Some(0.0), ..Default::default() }),
        ..Default::default()
    };
    GenerateRequest { request_id: id.into(), input: Some(Input::Prompt(prompt)) }
}

pub(crate) async fn all<T>(mut stream: Streaming<T>) -> Vec<T> {
    let mut replies = Vec::new();
    while let Some(reply) = in_time(stream.message()).await.unwrap() {
        replies.push(reply);
    }
    replies
}

pub(crate) async fn generate(client: &mut Client, request: GenerateRequest) -> Vec<GenerateReply> {
    all(in_time(client.generate(request)).await.unwrap().into_inner()).await
}
