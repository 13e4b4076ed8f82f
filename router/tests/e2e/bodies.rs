//! Bodies however they come, and requests that wait in line.

use std::sync::Arc;

use crate::harness::*;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::sync::Notify;

const PATH: &str = "/v1/chat/completions";

async fn connect(router: &Router) -> TcpStream {
    let stream = TcpStream::connect(router.address).await.unwrap();
    stream.set_nodelay(true).unwrap();
    stream
}

fn chunked(body: &[u8], chunk_bytes: usize) -> Vec<u8> {
    let mut sent =
        format!("POST {PATH} HTTP/1.1\r\nhost: test\r\ntransfer-encoding: chunked\r\n\r\n").into_bytes();
    for part in body.chunks(chunk_bytes) {
        sent.extend([format!("{:x}\r\n", part.len()).as_bytes(), part, b"\r\n"].concat());
    }
    sent.extend(b"0\r\n\r\n");
    sent
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_may_come_byte_by_byte() {
    let worker = MockWorker::answering(&["m"], json_reply(200, "{}")).await;
    let router = Router::start(&[&workers(&[&worker])]).await;
    let body = chat("caf\u{e9} \"世界\" \n");
    let mut stream = connect(&router).await;
    for byte in request_bytes("POST", PATH, &[], body.as_bytes()) {
        stream.write_all(&[byte]).await.unwrap();
        stream.flush().await.unwrap();
    }
    assert_eq!(read_reply(&mut stream).await.status, 200);
    assert_eq!(worker.seen()[0].body, body.as_bytes());
}

#[tokio::test(flavor = "multi_thread")]
async fn chunks_are_read_however_small_and_go_on_as_one_body() {
    let worker = MockWorker::answering(&["m"], json_reply(200, "{}")).await;
    let router = Router::start(&[&workers(&[&worker])]).await;
    let story = "a story told twice ".repeat(40);
    let body = chat(&story);
    let mut stream = connect(&router).await;
    for (chunk_bytes, hit_at_least) in [(1, 0), (3, 100), (1_000, 100)] {
        stream.write_all(&chunked(body.as_bytes(), chunk_bytes)).await.unwrap();
        let reply = read_reply(&mut stream).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        let hit: usize = reply.header("x-router-hit-tokens").parse().unwrap();
        assert!(hit >= hit_at_least, "the same prompt however it is cut: {hit}");
    }
    for seen in worker.seen() {
        assert_eq!(seen.body, body.as_bytes());
        assert_eq!(seen.headers["content-length"], body.len().to_string());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_over_the_limit_is_refused_before_it_is_sent() {
    let worker = MockWorker::answering(&["m"], json_reply(200, "{}")).await;
    let router = Router::start(&[&workers(&[&worker]), "--max-body-bytes=10kB"]).await;
    let mut announced = connect(&router).await;
    let head = format!("POST {PATH} HTTP/1.1\r\nhost: test\r\ncontent-length: 10001\r\n\r\n");
    announced.write_all(head.as_bytes()).await.unwrap();
    let reply = read_reply(&mut announced).await;
    assert_eq!((reply.status, reply.header("connection")), (413, "close"));
    let mut unannounced = connect(&router).await;
    unannounced.write_all(&chunked(chat(&"x".repeat(10_000)).as_bytes(), 4_000)).await.unwrap();
    assert_eq!(read_reply(&mut unannounced).await.status, 413);
    assert!(worker.seen().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_body_goes_through_whole() {
    let worker = MockWorker::answering(&["m"], json_reply(200, "{}")).await;
    let router = Router::start(&[&workers(&[&worker])]).await;
    let body = chat(&"twenty megabytes \n".repeat((20 << 20) / 18));
    let reply = router.post(PATH, &body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert!(worker.seen()[0].body == body.as_bytes());
    let again = router.post(PATH, &body).await;
    let hit: usize = again.header("x-router-hit-tokens").parse().unwrap();
    assert!(hit > 2_000_000, "{hit}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_is_no_json_is_read_to_its_end_and_the_connection_goes_on() {
    let worker = MockWorker::answering(&["m"], json_reply(200, "{}")).await;
    let router = Router::start(&[&workers(&[&worker])]).await;
    let mut stream = connect(&router).await;
    let bad = format!("{{\"model\": oops{}", "x".repeat(3 << 20));
    stream.write_all(&chunked(bad.as_bytes(), 50_000)).await.unwrap();
    let reply = read_reply(&mut stream).await;
    assert_eq!(reply.status, 400);
    assert!(reply.error().0.contains("expected a value at line 1 column 11"), "{}", reply.error().0);
    stream.write_all(&request_bytes("POST", PATH, &[], chat("x").as_bytes())).await.unwrap();
    assert_eq!(read_reply(&mut stream).await.status, 200);
    assert_eq!(worker.seen().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_does_not_come_is_given_up() {
    let worker = MockWorker::answering(&["m"], json_reply(200, "{}")).await;
    let router = Router::start(&[&workers(&[&worker]), "--client-timeout=200ms"]).await;
    let mut stream = connect(&router).await;
    let head = format!("POST {PATH} HTTP/1.1\r\nhost: test\r\ncontent-length: 10\r\n\r\n{{");
    stream.write_all(head.as_bytes()).await.unwrap();
    let reply = read_reply(&mut stream).await;
    assert_eq!(reply.status, 408);
    assert!(reply.error().0.contains("0.2 s"), "{}", reply.error().0);
}

/// A worker that answers when it is told to, once for each time.
async fn patient_worker(go_on: &Arc<Notify>) -> MockWorker {
    let wait = Arc::clone(go_on);
    MockWorker::start(&["m"], move |_| vec![Act::Wait(Arc::clone(&wait)), Act::Write(json_reply(200, "{}"))])
        .await
}

async fn send(router: &Router, content: &str) -> TcpStream {
    let mut stream = connect(router).await;
    stream.write_all(&request_bytes("POST", PATH, &[], chat(content).as_bytes())).await.unwrap();
    stream
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_wait_in_line_for_a_place() {
    let go_on = Arc::new(Notify::new());
    let worker = patient_worker(&go_on).await;
    let router = Router::start(&[&workers(&[&worker]), "--max-in-flight=1", "--max-queue=2"]).await;
    let queued = |count: usize| {
        let router = &router;
        until("they wait", move || async move {
            router.get("/server_info").await.json()["requests_queued"] == count
        })
    };
    let mut first = send(&router, "first").await;
    until("the first is at the worker", || async { worker.seen().len() == 1 }).await;
    let mut second = send(&router, "second").await;
    queued(1).await;
    let mut third = send(&router, "third").await;
    queued(2).await;
    assert_eq!(router.metric("router_requests_queued").await, 2.0);
    let refused = router.post(PATH, &chat("fourth")).await;
    assert_eq!((refused.status, refused.header("retry-after")), (429, "1"));
    assert!(refused.error().0.contains("--max-queue"), "{}", refused.error().0);
    for stream in [&mut first, &mut second, &mut third] {
        go_on.notify_one();
        assert_eq!(read_reply(stream).await.status, 200);
    }
    queued(0).await;
    let order: Vec<_> =
        worker.seen().iter().map(|seen| String::from_utf8(seen.body.clone()).unwrap()).collect();
    assert_eq!(order, ["first", "second", "third"].map(chat));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wait_that_is_too_long_ends_in_a_429() {
    let go_on = Arc::new(Notify::new());
    let worker = patient_worker(&go_on).await;
    let fleet = workers(&[&worker]);
    let router =
        Router::start(&[&fleet, "--max-in-flight=1", "--max-queue=9", "--queue-timeout=100ms"]).await;
    let mut first = send(&router, "first").await;
    until("the first is at the worker", || async { worker.seen().len() == 1 }).await;
    let refused = router.post(PATH, &chat("second")).await;
    assert_eq!((refused.status, refused.header("retry-after")), (429, "1"));
    assert_eq!(refused.error().1, "router_overloaded");
    go_on.notify_one();
    assert_eq!(read_reply(&mut first).await.status, 200);
}
