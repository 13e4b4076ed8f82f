//! HTTP/2 as a client sees it: hyper's own, and one that shows every byte.

use std::sync::Arc;

use crate::harness::*;
use bytes::Bytes;
use http::{HeaderMap, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http2::SendRequest;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Notify;

const OK: &str = r#"{"ok":true}"#;
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const CHAT: &str = "/v1/chat/completions";

pub(crate) type Client = SendRequest<Full<Bytes>>;

/// Speaks HTTP/2 over `stream`.
pub(crate) async fn over(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) -> Client {
    let (client, connection) = hyper::client::conn::http2::Builder::new(TokioExecutor::new())
        .max_header_list_size(1 << 20)
        .handshake(TokioIo::new(stream))
        .await
        .unwrap();
    tokio::spawn(connection);
    client
}

async fn connect(router: &Router) -> Client {
    over(TcpStream::connect(router.address).await.unwrap()).await
}

pub(crate) fn request(method: &str, path: &str, body: &str) -> Request<Full<Bytes>> {
    let uri = format!("http://test{path}");
    Request::builder().method(method).uri(uri).body(Full::from(body.to_owned())).unwrap()
}

pub(crate) async fn ask(
    client: &mut Client,
    request: Request<Full<Bytes>>,
) -> (StatusCode, HeaderMap, Bytes) {
    client.ready().await.unwrap();
    let asked = async {
        let (head, body) = client.send_request(request).await.unwrap().into_parts();
        (head.status, head.headers, body.collect().await.unwrap().to_bytes())
    };
    tokio::time::timeout(LIMIT, asked).await.expect("the answer came in time")
}

/// The next piece of data, or whether the body has ended well.
async fn piece(body: &mut Incoming) -> Result<Bytes, bool> {
    let frame = tokio::time::timeout(LIMIT, body.frame()).await.expect("the next piece came in time");
    match frame {
        Some(Ok(frame)) => Ok(frame.into_data().unwrap_or_default()),
        Some(Err(_)) => Err(false),
        None => Err(true),
    }
}

/// A stream that has begun and goes on once told.
async fn streaming_worker(go_on: &Arc<Notify>) -> MockWorker {
    let go_on = Arc::clone(go_on);
    MockWorker::start(&["m"], move |_| {
        vec![
            Act::Write(sse_head()),
            Act::Write(chunk("data: one\n\n")),
            Act::Wait(Arc::clone(&go_on)),
            Act::Write(chunk("data: two\n\n")),
            Act::Write(b"0\r\n\r\n".to_vec()),
        ]
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn at_the_end_of_the_grace_period_clients_hear_why() {
    let worker = streaming_worker(&Arc::default()).await;
    let mut router = Router::start(&[&workers(&[&worker]), "--grace-period=100ms"]).await;
    let mut client = connect(&router).await;
    let mut body = client.send_request(request("POST", CHAT, &chat("x"))).await.unwrap().into_body();
    assert_eq!(piece(&mut body).await.unwrap(), "data: one\n\n");
    router.stop();
    let last = piece(&mut body).await.unwrap();
    assert!(find(&last, b"router_shutting_down").is_some(), "{last:?}");
    assert_eq!(piece(&mut body).await, Err(false), "it is reset");
    router.stopped().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_and_answers_are_those_of_http1() {
    let worker = MockWorker::answering(&["m"], json_reply(200, OK)).await;
    let router = Router::start(&[&workers(&[&worker]), "--max-body-bytes=300kB"]).await;
    let mut client = connect(&router).await;
    let body = chat(&"x".repeat(200_000));
    let (status, headers, reply) = ask(&mut client, request("POST", &format!("{CHAT}?a=b"), &body)).await;
    assert_eq!((status, &reply[..]), (StatusCode::OK, OK.as_bytes()));
    assert_eq!(headers["x-router-worker"], "w0");
    let seen = worker.seen().pop().unwrap();
    assert_eq!((seen.path.as_str(), &seen.body[..]), ("/v1/chat/completions?a=b", body.as_bytes()));
    assert_eq!(seen.headers["host"], worker.address.to_string());
    assert_eq!(ask(&mut client, request("GET", "/livez", "")).await.0, StatusCode::OK);
    // What closes the connection in HTTP/1 ends the stream here, and no more.
    for (path, body, status) in [
        (CHAT, "{", StatusCode::BAD_REQUEST),
        (CHAT, "", StatusCode::BAD_REQUEST),
        ("/nowhere", "{}", StatusCode::NOT_FOUND),
        (CHAT, &"x".repeat(400_000), StatusCode::PAYLOAD_TOO_LARGE),
        (CHAT, &chat("x"), StatusCode::OK),
    ] {
        let (given, headers, _) = ask(&mut client, request("POST", path, body)).await;
        assert_eq!(given, status, "{path}");
        for name in ["connection", "keep-alive", "transfer-encoding"] {
            assert!(!headers.contains_key(name), "{path}: {name}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn headers_of_a_workers_connection_stay_behind() {
    let reply = b"HTTP/1.1 200 X\r\nconnection: keep-alive, x-hop\r\nkeep-alive: timeout=5\r\nx-hop: 1\r\nx-kept: 2\r\ncontent-length: 2\r\n\r\n{}";
    let worker = MockWorker::answering(&["m"], reply.to_vec()).await;
    let router = Router::start(&[&workers(&[&worker])]).await;
    let (_, headers, _) = ask(&mut connect(&router).await, request("POST", CHAT, &chat("x"))).await;
    assert_eq!(headers["x-kept"], "2");
    for name in ["connection", "keep-alive", "x-hop"] {
        assert!(!headers.contains_key(name), "{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_is_not_the_authority_is_refused() {
    let worker = MockWorker::answering(&["m"], json_reply(200, OK)).await;
    let router = Router::start(&[&workers(&[&worker])]).await;
    let mut client = connect(&router).await;
    for (host, status) in [("test", StatusCode::OK), ("other", StatusCode::BAD_REQUEST)] {
        let mut asked = request("POST", CHAT, &chat("x"));
        asked.headers_mut().insert("host", host.parse().unwrap());
        assert_eq!(ask(&mut client, asked).await.0, status, "{host}");
    }
    assert_eq!(worker.seen().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_streams_of_one_connection_are_spread_over_all_cores() {
    let worker = streaming_worker(&Arc::new(Notify::new())).await;
    let router = Router::start(&[&workers(&[&worker])]).await;
    let mut client = connect(&router).await;
    let mut open = Vec::new();
    for _ in 0..64 {
        client.ready().await.unwrap();
        let mut body = client.send_request(request("POST", CHAT, &chat("x"))).await.unwrap().into_body();
        assert_eq!(piece(&mut body).await.unwrap(), "data: one\n\n");
        open.push(body);
    }
    let on = async |metric: &str| {
        let core = async |core| router.metric(&format!("{metric}{{core=\"{core}\"}}")).await;
        (core(0).await, core(1).await)
    };
    let (one, other) = on("router_core_streams").await;
    assert_eq!(one + other, 64.0);
    assert!(one.max(other) <= 1.5 * one.min(other), "{one} and {other}");
    let (one, other) = on("router_core_streams_total").await;
    // The connection itself was one until it said what it speaks.
    assert_eq!(one + other, 65.0);
    drop(open);
    until("nothing is in flight", || async { router.metric("router_requests_in_flight").await == 0.0 }).await;
    until("no stream is open", || async { on("router_core_streams").await == (0.0, 0.0) }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broken_stream_says_so_and_is_reset() {
    let worker = MockWorker::start(&["m"], |_| {
        vec![Act::Write(sse_head()), Act::Write(chunk("data: {\"a\":1}\n\n")), Act::Close]
    })
    .await;
    let router = Router::start(&[&workers(&[&worker])]).await;
    let mut client = connect(&router).await;
    for _ in 0..20 {
        client.ready().await.unwrap();
        let mut body = client.send_request(request("POST", CHAT, &chat("x"))).await.unwrap().into_body();
        let mut text = Vec::new();
        let ended_well = loop {
            match piece(&mut body).await {
                Ok(data) => text.extend_from_slice(&data),
                Err(well) => break well,
            }
        };
        let text = String::from_utf8(text).unwrap();
        assert!(text.starts_with("data: {\"a\":1}\n\ndata: {\"error\":"), "{text}");
        assert!(text.contains("worker_failed") && text.ends_with("\n\n"), "{text}");
        assert!(!ended_well, "the stream is reset, not ended");
    }
    let (status, _, _) = ask(&mut client, request("GET", "/livez", "")).await;
    assert_eq!(status, StatusCode::OK, "the connection goes on");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_opens_no_window_does_not_hold_its_worker_for_ever() {
    let flood = chunk(&"x".repeat(64 << 20));
    let worker =
        MockWorker::start(&["m"], move |_| vec![Act::Write(sse_head()), Act::Write(flood.clone())]).await;
    let router = Router::start(&[&workers(&[&worker]), "--client-timeout=300ms"]).await;
    let mut client = connect(&router).await;
    let unread = client.send_request(request("POST", CHAT, &chat("x"))).await.unwrap();
    until("it streams", || async { router.metric("router_requests_in_flight").await == 1.0 }).await;
    until("its place is free again", || async { router.metric("router_requests_in_flight").await == 0.0 })
        .await;
    assert_eq!(ask(&mut client, request("GET", "/livez", "")).await.0, StatusCode::OK);
    drop(unread);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_resets_a_stream_cancels_the_worker() {
    let closed = Arc::new(Notify::new());
    let tell = Arc::clone(&closed);
    let worker = MockWorker::start(&["m"], move |_| {
        vec![
            Act::Write(sse_head()),
            Act::Write(chunk("data: one\n\n")),
            Act::TellWhenClosed(Arc::clone(&tell)),
        ]
    })
    .await;
    let router = Router::start(&[&workers(&[&worker])]).await;
    let mut client = connect(&router).await;
    let mut body = client.send_request(request("POST", CHAT, &chat("x"))).await.unwrap().into_body();
    piece(&mut body).await.unwrap();
    drop(body);
    tokio::time::timeout(LIMIT, closed.notified()).await.expect("the worker's connection is closed");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_lets_streams_finish_and_closes_the_connection() {
    let go_on = Arc::new(Notify::new());
    let worker = streaming_worker(&go_on).await;
    let mut router = Router::start(&[&workers(&[&worker])]).await;
    let address = router.address;
    let mut client = connect(&router).await;
    let mut idle = connect(&router).await;
    assert_eq!(ask(&mut idle, request("GET", "/livez", "")).await.0, StatusCode::OK);
    let mut body = client.send_request(request("POST", CHAT, &chat("x"))).await.unwrap().into_body();
    piece(&mut body).await.unwrap();
    router.stop();
    until("nobody listens", || async { TcpStream::connect(address).await.is_err() }).await;
    until("the idle connection is closed", || async { idle.is_closed() }).await;
    go_on.notify_one();
    let mut rest = Vec::new();
    let ended_well = loop {
        match piece(&mut body).await {
            Ok(data) => rest.extend_from_slice(&data),
            Err(well) => break well,
        }
    };
    assert!(ended_well && rest == b"data: two\n\n", "{rest:?}");
    router.stopped().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_without_streams_is_closed() {
    let worker = MockWorker::answering(&["m"], json_reply(200, OK)).await;
    let router = Router::start(&[&workers(&[&worker]), "--keep-alive-timeout=200ms"]).await;
    let client = connect(&router).await;
    until("it is closed", || async { client.is_closed() }).await;
    until("it is not counted", || async { router.metric("router_connections ").await == 0.0 }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_preface_may_come_in_pieces() {
    let worker = MockWorker::answering(&["m"], json_reply(200, OK)).await;
    let router = Router::start(&[&workers(&[&worker])]).await;
    for cut in 1..PREFACE.len() {
        let mut stream = TcpStream::connect(router.address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        stream.write_all(&PREFACE[..cut]).await.unwrap();
        // Another connection's whole exchange lies between the pieces.
        assert_eq!(router.get("/livez").await.status, 200);
        let rest = [&PREFACE[cut..], &frame(SETTINGS, 0, 0, b"")].concat();
        stream.write_all(&rest).await.unwrap();
        let mut head = [0; 9];
        stream.read_exact(&mut head).await.unwrap();
        assert_eq!(head[3], SETTINGS, "cut at {cut}");
    }
}

const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const GOAWAY: u8 = 7;
const CONTINUATION: u8 = 9;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// `GET /livez` in HPACK.
const GET_LIVEZ: &[u8] = b"\x82\x86\x04\x06/livez\x01\x04test";

/// Writes as much of `bytes` as the router takes, reads until it closes, and says with which code it said goodbye.
async fn goodbye(router: &Router, bytes: Vec<u8>) -> Option<u32> {
    let stream = TcpStream::connect(router.address).await.unwrap();
    let (mut reader, mut writer) = stream.into_split();
    let writing = tokio::spawn(async move {
        // The router may close before it has seen everything.
        let _ = writer.write_all(&bytes).await;
        writer
    });
    let mut raw = Vec::new();
    let reading = async { while reader.read_buf(&mut raw).await.is_ok_and(|count| count > 0) {} };
    tokio::time::timeout(LIMIT, reading).await.expect("the router closes the connection");
    drop(writing.await);
    let mut frames = raw.as_slice();
    while let [a, b, c, kind, _, _, _, _, _, rest @ ..] = frames {
        let (payload, later) = rest.split_at_checked(u32::from_be_bytes([0, *a, *b, *c]) as usize)?;
        if *kind == GOAWAY {
            return Some(u32::from_be_bytes(payload[4..8].try_into().unwrap()));
        }
        frames = later;
    }
    None
}

fn opening() -> Vec<u8> {
    [PREFACE, &frame(SETTINGS, 0, 0, b"")].concat()
}

#[tokio::test(flavor = "multi_thread")]
async fn floods_end_their_own_connection_and_no_other() {
    let worker = MockWorker::answering(&["m"], json_reply(200, OK)).await;
    let router = Router::start(&[&workers(&[&worker])]).await;
    let mut bystander = connect(&router).await;
    let mut resets = opening();
    for stream in (1..40_000).step_by(2) {
        resets.extend(frame(HEADERS, END_STREAM | END_HEADERS, stream, GET_LIVEZ));
        resets.extend(frame(RST_STREAM, 0, stream, &8_u32.to_be_bytes()));
    }
    let mut continuations = [opening(), frame(HEADERS, END_STREAM, 1, GET_LIVEZ)].concat();
    for _ in 0..5_000 {
        // A literal field with a short name and value, again and again.
        continuations.extend(frame(CONTINUATION, 0, 1, &b"\x00\x01x\x01y".repeat(100)));
    }
    let mut empty = [opening(), frame(HEADERS, END_STREAM, 1, GET_LIVEZ)].concat();
    for _ in 0..100_000 {
        empty.extend(frame(CONTINUATION, 0, 1, b""));
    }
    let nonsense = [opening(), frame(HEADERS, END_STREAM | END_HEADERS, 2, GET_LIVEZ)].concat();
    for (name, bytes) in [
        ("resets", resets),
        ("continuations", continuations),
        ("empty continuations", empty),
        ("nonsense", nonsense),
    ] {
        let code = goodbye(&router, bytes).await;
        assert!(code.is_none_or(|code| code != 0), "{name}: {code:?}");
        assert_eq!(ask(&mut bystander, request("GET", "/livez", "")).await.0, StatusCode::OK, "{name}");
        assert_eq!(router.post(CHAT, &chat("x")).await.status, 200, "{name}");
    }
    until("no stream is left", || async {
        let streams = async |core| router.metric(&format!("router_core_streams{{core=\"{core}\"}}")).await;
        streams(0).await + streams(1).await == 0.0
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_list_of_headers_is_refused() {
    let worker = MockWorker::answering(&["m"], json_reply(200, OK)).await;
    let router = Router::start(&[&workers(&[&worker])]).await;
    let mut client = connect(&router).await;
    let mut long = request("POST", CHAT, &chat("x"));
    long.headers_mut().insert("x-long", "y".repeat(100_000).parse().unwrap());
    assert_eq!(ask(&mut client, long).await.0, StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE);
    assert_eq!(ask(&mut client, request("POST", CHAT, &chat("x"))).await.0, StatusCode::OK);
    assert_eq!(worker.seen().len(), 1);
}
