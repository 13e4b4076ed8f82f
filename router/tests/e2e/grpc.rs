//! Workers over gRPC: real ones with the built-in model, and one whose every answer the test decides.
#![cfg(feature = "embedded")]

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use prost::Message;
use roundhouse_wire::v1::generate_reply::Event;
use roundhouse_wire::v1::generate_request::Input;
use roundhouse_wire::v1::{GenerateReply, GenerateRequest, Header, HttpHead};
use router::keys::WorkerKeys;
use router::transport::{Connector, Transport, TransportError, WorkerRequest};
use router_core::{WorkerId, WorkerSpec};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};
use worker::model::ModelSource;
use worker::{Worker, WorkerConfig};

use crate::harness::*;

/// A real worker; dropping it closes all its connections at once, as if it had been killed.
pub(crate) struct Served {
    worker: Worker,
    pub(crate) address: SocketAddr,
    task: JoinHandle<()>,
}

impl Drop for Served {
    fn drop(&mut self) {
        self.task.abort();
        self.worker.shutdown();
    }
}

impl Served {
    pub(crate) async fn start() -> Self {
        Self::start_with(SocketAddr::from(([127, 0, 0, 1], 0)), |_| {}).await
    }

    /// One that listens there, changed from the default by `change`.
    pub(crate) async fn start_with(address: SocketAddr, change: impl Fn(&mut WorkerConfig)) -> Self {
        Self::listen(started(change).await, address).await
    }

    /// A worker that has started, and listens there from now on.
    pub(crate) async fn listen(worker: Worker, address: SocketAddr) -> Self {
        let listener = bind(address).await;
        let address = listener.local_addr().unwrap();
        let serving = worker.clone();
        let task = tokio::spawn(async move {
            worker::serve::serve(&serving, listener, Duration::ZERO, std::future::pending()).await;
        });
        Self { worker, address, task }
    }

    pub(crate) async fn info(&self) -> Value {
        let request = http::Request::get("/server_info").body(Bytes::new()).unwrap();
        let body = self.worker.handle(request).await.into_body().collect().await.unwrap().to_bytes();
        serde_json::from_slice(&body).unwrap()
    }
}

/// A worker that does not listen yet, changed from the default by `change`.
pub(crate) async fn started(change: impl Fn(&mut WorkerConfig)) -> Worker {
    let mut config = WorkerConfig::new(ModelSource::Builtin);
    config.threads = 1;
    change(&mut config);
    tokio::task::spawn_blocking(|| Worker::start(config).unwrap()).await.unwrap()
}

pub(crate) async fn router(workers: &[SocketAddr], arguments: &[&str]) -> Router {
    let list: Vec<_> = workers.iter().map(|address| format!("grpc://{address}")).collect();
    let list = format!("--workers={}", list.join(","));
    let router = Router::start(&[&[list.as_str()][..], arguments].concat()).await;
    until("all are up", || async {
        let listed = router.admin("GET", "/workers", "").await.json();
        listed["workers"].as_array().unwrap().iter().all(|worker| worker["up"] == true)
    })
    .await;
    router
}

fn completion(extra: &Value) -> String {
    let mut body = json!({"model": "builtin", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 12, "ignore_eos": true});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body.to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_are_answered_over_grpc_as_over_http() {
    let served = Served::start().await;
    let over_grpc = router(&[served.address], &[]).await;
    let over_http = Router::start(&[&format!("--workers=http://{}", served.address)]).await;
    until("it is up", || async { over_http.get("/readyz").await.status == 200 }).await;
    let models = over_grpc.get("/v1/models").await.json();
    assert_eq!(models["data"][0]["id"], "builtin", "{models}");
    let own = |reply: &Reply| {
        let mut object = reply.json();
        for key in ["id", "created"] {
            object.as_object_mut().unwrap().remove(key);
        }
        object
    };
    // Once beforehand, so that both find the same in the cache.
    over_http.post("/v1/completions", &completion(&json!({}))).await;
    for extra in [json!({}), json!({"temperature": 9}), json!({"prompt": 5})] {
        let (ours, theirs) = (
            over_grpc.post("/v1/completions", &completion(&extra)).await,
            over_http.post("/v1/completions", &completion(&extra)).await,
        );
        assert_eq!((ours.status, own(&ours)), (theirs.status, own(&theirs)));
        assert_eq!(ours.header("content-length"), theirs.header("content-length"));
        assert!(ours.whole);
    }
    let streamed = completion(&json!({"stream": true, "stream_options": {"include_usage": true}}));
    let reply = over_grpc.post("/v1/completions", &streamed).await;
    assert_eq!((reply.status, reply.header("content-type")), (200, "text/event-stream; charset=utf-8"));
    assert!(reply.whole && reply.text().ends_with("data: [DONE]\n\n"), "{}", reply.text());
    // A prompt that does not fit into one frame of either protocol.
    let long = completion(&json!({"prompt": "word ".repeat(100_000)}));
    let refused = over_grpc.post("/v1/completions", &long).await;
    assert_eq!((refused.status, refused.error().1.as_str()), (400, "context_length_exceeded"));
    // Usage is read from the worker's words, whichever way they came.
    until("24 tokens are counted", || async {
        over_grpc.metric("router_tokens_total{kind=\"completion\"}").await == 24.0
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_ends_the_generation() {
    let served = Served::start().await;
    let router = router(&[served.address], &[]).await;
    let body = completion(&json!({"stream": true, "max_tokens": 400, "ignore_eos": true}));
    let mut client = TcpStream::connect(router.address).await.unwrap();
    client.write_all(&request_bytes("POST", "/v1/completions", &[], body.as_bytes())).await.unwrap();
    let mut begun = Vec::new();
    while find(&begun, b"data: ").is_none() {
        assert!(tokio::time::timeout(LIMIT, client.read_buf(&mut begun)).await.unwrap().unwrap() > 0);
    }
    drop(client);
    until("nothing runs", || async { served.info().await["requests_running"] == 0 }).await;
    let metrics = http::Request::get("/metrics").body(Bytes::new()).unwrap();
    let metrics = served.worker.handle(metrics).await.into_body().collect().await.unwrap().to_bytes();
    let metrics = String::from_utf8(metrics.to_vec()).unwrap();
    let aborted = metrics.lines().find(|line| line.contains("\"abort\"")).unwrap_or_default();
    assert!(aborted.ends_with(" 1"), "it was cancelled, and did not end by itself: {aborted:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_go_on_elsewhere_when_a_worker_is_killed() {
    let (doomed, stays) = (Served::start().await, Served::start().await);
    let router = router(&[doomed.address, stays.address], &["--policy=round_robin"]).await;
    for _ in 0..4 {
        assert_eq!(router.post("/v1/completions", &completion(&json!({}))).await.status, 200);
    }
    drop(doomed);
    for _ in 0..10 {
        let reply = router.post("/v1/completions", &completion(&json!({"stream": true}))).await;
        assert!(reply.status == 200 && reply.text().ends_with("data: [DONE]\n\n"), "{reply:?}");
    }
    until("it is out", || async {
        let listed = router.admin("GET", "/workers", "").await.json();
        listed["workers"][0]["up"] == false && listed["workers"][1]["up"] == true
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_whose_worker_is_killed_ends_with_an_error() {
    let served = Served::start().await;
    let router = router(&[served.address], &[]).await;
    let body = completion(&json!({"stream": true, "max_tokens": 400, "ignore_eos": true}));
    let mut client = TcpStream::connect(router.address).await.unwrap();
    client.write_all(&request_bytes("POST", "/v1/completions", &[], body.as_bytes())).await.unwrap();
    let mut all = Vec::new();
    while find(&all, b"data: ").is_none() {
        assert!(tokio::time::timeout(LIMIT, client.read_buf(&mut all)).await.unwrap().unwrap() > 0);
    }
    drop(served);
    // It may come to say itself that it is gone: then the reply ends whole, and its connection stays open.
    while !all.ends_with(b"\r\n0\r\n\r\n") {
        if tokio::time::timeout(LIMIT, client.read_buf(&mut all)).await.unwrap().unwrap() == 0 {
            break;
        }
    }
    let text = String::from_utf8(all).unwrap();
    assert!(text.contains("\"error\"") && !text.contains("[DONE]"), "{text}");
}

/// What a scripted worker does with a call.
#[derive(Clone)]
enum Do {
    /// Answers with these messages, and this status at the end.
    Reply(Vec<Event>, &'static str),
    /// Says nothing, and counts.
    Hang(Arc<AtomicUsize>),
}

/// A gRPC worker that does to POSTs what the test says. It answers probes by itself.
struct Scripted {
    address: SocketAddr,
    task: JoinHandle<()>,
}

impl Drop for Scripted {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Scripted {
    async fn start(script: Do) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let task = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let script = script.clone();
                let service = service_fn(move |request| answer(script.clone(), request));
                let connection = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                    .serve_connection(TokioIo::new(stream), service);
                connections.spawn(connection);
            }
        });
        Self { address, task }
    }
}

type Frames = futures_util::stream::Iter<std::vec::IntoIter<Result<Frame<Bytes>, Infallible>>>;

async fn answer(
    script: Do,
    request: http::Request<Incoming>,
) -> Result<http::Response<StreamBody<Frames>>, Infallible> {
    let response = http::Response::builder().header("content-type", "application/grpc");
    if request.uri().path() != "/roundhouse.worker.v1.Worker/Generate" {
        // It does not tell of itself.
        let frames = StreamBody::new(futures_util::stream::iter(Vec::new()));
        return Ok(response.header("grpc-status", "12").body(frames).unwrap());
    }
    assert_eq!(request.headers()["te"], "trailers");
    assert_eq!(request.headers()["content-type"], "application/grpc");
    let body = request.into_body().collect().await.unwrap().to_bytes();
    let Some(Input::Http(call)) = GenerateRequest::decode(body.slice(5..)).unwrap().input else {
        panic!("not an HTTP call")
    };
    let (events, status) = match (call.method.as_str(), script) {
        ("GET", _) => {
            let models = json!({"object": "list", "data": [{"id": "builtin"}]});
            (vec![head(200), Event::Body(models.to_string().into())], "0")
        }
        (_, Do::Reply(events, status)) => (events, status),
        (_, Do::Hang(count)) => {
            count.fetch_add(1, Ordering::SeqCst);
            std::future::pending().await
        }
    };
    let framed = |event| {
        let message = GenerateReply { event: Some(event) }.encode_to_vec();
        let length = u32::try_from(message.len()).unwrap().to_be_bytes();
        Ok(Frame::data([&[0][..], &length, &message].concat().into()))
    };
    let mut trailers = http::HeaderMap::new();
    trailers.insert("grpc-status", status.parse().unwrap());
    let mut frames: Vec<_> = events.into_iter().map(framed).collect();
    frames.push(Ok(Frame::trailers(trailers)));
    Ok(response.body(StreamBody::new(futures_util::stream::iter(frames))).unwrap())
}

fn head(status: u32) -> Event {
    let header = Header { name: "content-type".into(), value: "application/json".into() };
    Event::Head(HttpHead { status, headers: vec![header] })
}

#[tokio::test(flavor = "multi_thread")]
async fn those_who_waited_at_a_worker_that_died_are_answered_by_another() {
    let waiting = Arc::new(AtomicUsize::new(0));
    let dies = Scripted::start(Do::Hang(Arc::clone(&waiting))).await;
    let lives = Scripted::start(Do::Reply(vec![head(200), Event::Body("{}".into())], "0")).await;
    let router = Arc::new(router(&[dies.address, lives.address], &["--policy=round_robin"]).await);
    let mut requests = JoinSet::new();
    for _ in 0..20 {
        let router = Arc::clone(&router);
        requests.spawn(async move { router.post("/v1/completions", &completion(&json!({}))).await });
    }
    until("ten wait", || async { waiting.load(Ordering::SeqCst) == 10 }).await;
    drop(dies);
    while let Some(reply) = requests.join_next().await {
        let reply = reply.unwrap();
        assert_eq!((reply.status, reply.text().as_str()), (200, "{}"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn statuses_mean_what_they_mean_over_http() {
    let busy = Scripted::start(Do::Reply(vec![head(429), Event::Body("{}".into())], "0")).await;
    let unwell = Scripted::start(Do::Reply(Vec::new(), "13")).await;
    let good = Scripted::start(Do::Reply(vec![head(200), Event::Body("{}".into())], "0")).await;
    for first in [&busy, &unwell] {
        let both = router(&[first.address, good.address], &["--policy=round_robin"]).await;
        for _ in 0..4 {
            assert_eq!(both.post("/v1/completions", &completion(&json!({}))).await.status, 200);
        }
    }
    let alone = router(&[unwell.address], &["--max-retries=0"]).await;
    let reply = alone.post("/v1/completions", &completion(&json!({}))).await;
    assert_eq!(reply.status, 502);
    assert!(reply.error().0.contains("gRPC status 13"), "{reply:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_is_not_as_long_as_it_says_is_no_answer() {
    for (length, expected) in [("5", "shorter"), ("1", "longer")] {
        let mut replies = vec![head(200), Event::Body("{}".into())];
        if let Event::Head(head) = &mut replies[0] {
            head.headers.push(Header { name: "content-length".into(), value: length.into() });
        }
        let worker = Scripted::start(Do::Reply(replies, "0")).await;
        let mut request = WorkerRequest::get(http::uri::PathAndQuery::from_static("/v1/completions"));
        request.method = http::Method::POST;
        let way = way(worker.address);
        let answer = tokio::time::timeout(LIMIT, way.send(&request)).await.unwrap().unwrap();
        let error = answer.into_body().collect().await.err().unwrap().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

fn way(address: SocketAddr) -> Arc<dyn Transport> {
    let connector = Connector::new(Duration::from_secs(5), Vec::new(), WorkerKeys::default());
    let address = format!("grpc://{address}");
    connector.way(&WorkerSpec::new(WorkerId::new("w0"), address)).unwrap()
}

async fn failure(address: SocketAddr) -> TransportError {
    let way = way(address);
    let request = WorkerRequest::get(http::uri::PathAndQuery::from_static("/health"));
    let answer = tokio::time::timeout(LIMIT, way.send(&request)).await.expect("it fails in time");
    answer.err().expect("it fails")
}

#[tokio::test(flavor = "multi_thread")]
async fn what_does_not_speak_our_grpc_is_told_apart() {
    // Bound, so that nobody else listens there meanwhile.
    let nobody = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    nobody.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    let error = failure(nobody.local_addr().unwrap().as_socket().unwrap()).await;
    assert!(error.is_unreachable(), "{error}");
    let http1 = MockWorker::answering(&["m"], json_reply(200, "{}")).await;
    let error = failure(http1.address).await;
    assert!(!error.is_unreachable() && !error.is_timeout(), "{error}");
    // HTTP/2, but not gRPC.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let task = tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let service = service_fn(|_: http::Request<Incoming>| async {
            Ok::<_, Infallible>(http::Response::new(http_body_util::Full::new(Bytes::from_static(b"hello"))))
        });
        let builder = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
        let _ = builder.serve_connection(TokioIo::new(stream), service).await;
    });
    let error = failure(address).await.to_string();
    assert!(error.contains("is it a Roundhouse worker?"), "{error}");
    task.abort();
}
