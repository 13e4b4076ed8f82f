//! `--stream-keep-alive`: streams begin before their answers.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Notify;

use crate::harness::*;

const CHAT: &str = "/v1/chat/completions";
const WAITING: &str = ": waiting\n\n";
const STREAM: &str = r#"{"model":"m","stream":true,"messages":[{"role":"user","content":"x"}]}"#;

/// A worker that takes as long as the test does, and then does the rest.
async fn slow(then: Vec<Act>) -> (MockWorker, Arc<Notify>) {
    let computes = Arc::new(Notify::new());
    let waits = Arc::clone(&computes);
    let script = move |_: &Seen| std::iter::once(Act::Wait(Arc::clone(&waits))).chain(then.clone()).collect();
    (MockWorker::start(&["m"], script).await, computes)
}

async fn router(mock: &MockWorker) -> Router {
    Router::start(&[&workers(&[mock]), "--stream-keep-alive=20ms", "--max-retries=0"]).await
}

/// A client that has read some comments, and nothing else.
async fn waiting(router: &Router, path: &str, body: &str) -> TcpStream {
    let mut client = TcpStream::connect(router.address).await.unwrap();
    client.write_all(&request_bytes("POST", path, &[], body.as_bytes())).await.unwrap();
    until("it waits", || async {
        let mut said = vec![0; 4096];
        let length = client.peek(&mut said).await.unwrap();
        String::from_utf8_lossy(&said[..length]).matches(WAITING.trim_end()).count() >= 3
    })
    .await;
    client
}

async fn end(mut client: TcpStream) -> Reply {
    tokio::time::timeout(LIMIT, read_reply(&mut client)).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_begins_before_its_answer() {
    let (mock, computes) = slow(vec![Act::Write(sse_reply(&["one", "two"]))]).await;
    let router = router(&mock).await;
    let client = waiting(&router, CHAT, STREAM).await;
    computes.notify_one();
    let reply = end(client).await;
    assert!(reply.whole && reply.status == 200, "{reply:?}");
    assert_eq!(reply.headers["content-type"], "text/event-stream");
    assert!(reply.headers.contains_key("x-request-id"));
    let text = reply.text();
    let answer = text.trim_start_matches(WAITING);
    assert_eq!(answer, "data: one\n\ndata: two\n\ndata: [DONE]\n\n", "{text}");
    assert!(text.len() > answer.len());
    until("nothing is in flight", || async { router.metric("router_requests_in_flight").await == 0.0 }).await;
    let ended = "router_requests_total{endpoint=\"chat\",status=\"200\"}";
    assert_eq!(router.metric(ended).await, 1.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failure_after_that_is_an_event() {
    let too_long = r#"{"error":{"message":"too long","type":"BadRequestError","code":400}}"#;
    for (path, then, name, said) in [
        (CHAT, vec![Act::Write(json_reply(400, too_long))], "", "too long"),
        ("/v1/messages", vec![Act::Write(json_reply(400, too_long))], "event: error\n", "too long"),
        (CHAT, vec![Act::Write(json_reply(200, "{}"))], "", "and no stream"),
        (CHAT, vec![Act::Close], "", "connection broke"),
    ] {
        let (mock, computes) = slow(then).await;
        let router = router(&mock).await;
        let client = waiting(&router, path, STREAM).await;
        computes.notify_one();
        let reply = end(client).await;
        let text = reply.text();
        let event = text.trim_start_matches(WAITING).strip_prefix(name).unwrap_or_else(|| panic!("{text}"));
        let event: serde_json::Value =
            serde_json::from_str(event.strip_prefix("data: ").unwrap_or_else(|| panic!("{text}"))).unwrap();
        let message = event["error"]["message"].as_str().unwrap();
        assert!(reply.whole && message.contains(said), "{text}");
        until("nothing is in flight", || async { router.metric("router_requests_in_flight").await == 0.0 })
            .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_fails_before_that_and_what_is_no_stream_has_a_status() {
    let (mock, computes) = slow(vec![Act::Write(json_reply(400, "{}"))]).await;
    let router = router(&mock).await;
    let other = STREAM.replace("\"m\"", "\"other\"");
    until("its models are known", || async { router.post(CHAT, &other).await.status == 404 }).await;
    let mut client = TcpStream::connect(router.address).await.unwrap();
    let body = STREAM.replace("true", "false");
    client.write_all(&request_bytes("POST", CHAT, &[], body.as_bytes())).await.unwrap();
    let early = tokio::time::timeout(std::time::Duration::from_millis(200), client.read_u8()).await;
    assert!(early.is_err(), "a document has one status");
    computes.notify_one();
    assert_eq!(end(client).await.status, 400);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_while_it_waits_is_noticed() {
    let left = Arc::new(AtomicUsize::new(0));
    let counts = Arc::clone(&left);
    let mock = MockWorker::start(&["m"], move |_| vec![Act::CountWhenClosed(Arc::clone(&counts))]).await;
    let router = router(&mock).await;
    drop(waiting(&router, CHAT, STREAM).await);
    until("it is cancelled", || async { left.load(Ordering::SeqCst) == 1 }).await;
    until("nothing is in flight", || async { router.metric("router_requests_in_flight").await == 0.0 }).await;
}
