//! Workers that fail, clients that leave, routers that stop.

use std::sync::Arc;
use std::time::Duration;

use crate::harness::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::Notify;

const OK: &str = r#"{"ok":true}"#;

/// Sends ten requests to one failing and one good worker, and expects the good one's answer each time.
async fn saves_every_request(what: &str, bad: MockWorker) {
    let good = MockWorker::answering(&["m"], json_reply(200, OK)).await;
    let router = Router::start(&[&workers(&[&bad, &good]), "--policy=round_robin"]).await;
    for _ in 0..10 {
        let reply = router.post("/v1/chat/completions", &chat("x")).await;
        assert_eq!((reply.status, reply.text().as_str()), (200, OK), "{what}");
    }
    assert!(!bad.seen().is_empty(), "{what}: the failing worker was asked");
    assert!(router.metric("router_retries_total").await >= 1.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn retries_elsewhere_what_failed_before_its_first_byte() {
    for status in [429, 500, 502, 503, 504] {
        saves_every_request(
            &status.to_string(),
            MockWorker::answering(&["m"], json_reply(status, "{}")).await,
        )
        .await;
    }
    saves_every_request("closes", MockWorker::start(&["m"], |_| vec![Act::Close]).await).await;
    let head_then_close = |_: &Seen| vec![Act::Write(sse_head()), Act::Close];
    saves_every_request("dies after the head", MockWorker::start(&["m"], head_then_close).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn half_a_document_and_a_stream_of_nothing_are_no_answers() {
    let whole = json_reply(200, r#"{"choices":[{"text":"half of it"}]}"#);
    let half = whole[..whole.len() - 9].to_vec();
    let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n";
    let in_chunks = [head.as_bytes(), &chunk(r#"{"choices":"#), &chunk("[")].concat();
    let no_stream = [sse_head(), last_chunk()].concat();
    for (what, reply) in [("half", half), ("in chunks", in_chunks), ("no stream", no_stream)] {
        let answers = |reply: &[u8]| {
            let acts = vec![Act::Write(reply.to_vec()), Act::Close];
            MockWorker::start(&["m"], move |_| acts.clone())
        };
        saves_every_request(what, answers(&reply).await).await;
        let alone = answers(&reply).await;
        let router = Router::start(&[&workers(&[&alone])]).await;
        let reply = router.post("/v1/chat/completions", &chat("x")).await;
        assert_eq!((reply.status, reply.error().1.as_str()), (502, "worker_failed"), "{what}: {reply:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_document_that_stands_still_is_asked_for_elsewhere() {
    let half = || {
        let half = json_reply(200, OK)[..75].to_vec();
        vec![Act::Write(half), Act::Wait(Arc::new(Notify::new()))]
    };
    let bad = MockWorker::start(&["m"], move |_| half()).await;
    let good = MockWorker::answering(&["m"], json_reply(200, OK)).await;
    let list = workers(&[&bad, &good]);
    let router = Router::start(&[&list, "--policy=round_robin", "--idle-timeout=100ms"]).await;
    for _ in 0..2 {
        let reply = router.post("/v1/chat/completions", &chat("x")).await;
        assert_eq!((reply.status, reply.text().as_str()), (200, OK));
    }
    assert!(!bad.seen().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_document_too_long_to_be_kept_goes_on_as_it_comes() {
    let long = "x".repeat(400_000);
    let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n";
    let reply = [head.as_bytes(), &chunk(&long), &chunk(&long), &last_chunk()].concat();
    let worker = MockWorker::answering(&["m"], reply).await;
    let router = Router::start(&[&workers(&[&worker])]).await;
    let reply = router.post("/v1/chat/completions", &chat("x")).await;
    assert!(reply.whole && reply.body.len() == 800_000, "{}", reply.body.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_worker_costs_nobody_an_answer() {
    let bad = MockWorker::answering(&["m"], json_reply(200, OK)).await;
    let good = MockWorker::answering(&["m"], json_reply(200, OK)).await;
    let router = Router::start(&[&workers(&[&bad, &good]), "--policy=round_robin"]).await;
    drop(bad);
    for _ in 0..10 {
        assert_eq!(router.post("/v1/chat/completions", &chat("x")).await.status, 200);
    }
    until("the dead worker is out", || async {
        router.metric("router_worker_up{worker=\"w0\"}").await == 0.0
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn when_all_fail_alike_the_workers_own_answer_is_given() {
    let body = r#"{"error":{"message":"busy"}}"#;
    let one = MockWorker::answering(&["m"], json_reply(429, body)).await;
    let two = MockWorker::answering(&["m"], json_reply(429, body)).await;
    let router = Router::start(&[&workers(&[&one, &two])]).await;
    let reply = router.post("/v1/chat/completions", &chat("x")).await;
    assert_eq!((reply.status, reply.text().as_str()), (429, body));
    assert_eq!(one.seen().len() + two.seen().len(), 2, "each was asked once");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_begins_with_a_refusal_is_refused() {
    let error = r#"{"error":{"object":"error","message":"The request queue is full.","type":"SERVICE_UNAVAILABLE","code":503}}"#;
    let full = MockWorker::answering(&["m"], sse_reply(&[error])).await;
    let other = MockWorker::answering(&["m"], json_reply(200, "{}")).await;
    let router =
        Router::start(&[&workers(&[&full, &other]), "--policy=round_robin", "--retry-budget=off"]).await;
    // A seed is one of the things with which nobody goes on.
    let body = r#"{"model":"m","stream":true,"seed":3,"messages":[{"role":"user","content":"x"}]}"#;
    for _ in 0..4 {
        let reply = router.post("/v1/chat/completions", body).await;
        assert_eq!((reply.status, reply.header("x-router-worker")), (200, "w1"), "{reply:?}");
    }
    assert!(!full.seen().is_empty());
    let alone = Router::start(&[&workers(&[&full])]).await;
    let reply = alone.post("/v1/chat/completions", body).await;
    assert_eq!((reply.status, reply.header("content-type")), (503, "application/json"), "{reply:?}");
    assert_eq!(reply.text(), error);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_begins_with_a_refusal_is_refused() {
    let error =
        r#"{"type":"error","error":{"type":"overloaded_error","message":"The request queue is full."}}"#;
    let opening = "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{}}\n\n";
    let full =
        [sse_head(), chunk(&format!("{opening}event: error\ndata: {error}\n\n")), last_chunk()].concat();
    let full = MockWorker::answering(&["m"], full).await;
    let other = MockWorker::answering(&["m"], json_reply(200, "{}")).await;
    let router =
        Router::start(&[&workers(&[&full, &other]), "--policy=round_robin", "--retry-budget=off"]).await;
    let body = r#"{"model":"m","stream":true,"max_tokens":9,"messages":[{"role":"user","content":"x"}]}"#;
    for _ in 0..4 {
        let reply = router.post("/v1/messages", body).await;
        assert_eq!((reply.status, reply.header("x-router-worker")), (200, "w1"), "{reply:?}");
    }
    assert!(!full.seen().is_empty());
    let alone = Router::start(&[&workers(&[&full])]).await;
    let reply = alone.post("/v1/messages", body).await;
    assert_eq!((reply.status, reply.text().as_str()), (503, error), "{reply:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_that_is_the_clients_is_not_retried() {
    let one = MockWorker::answering(&["m"], json_reply(400, "{}")).await;
    let two = MockWorker::answering(&["m"], json_reply(400, "{}")).await;
    let router = Router::start(&[&workers(&[&one, &two])]).await;
    assert_eq!(router.post("/v1/chat/completions", &chat("x")).await.status, 400);
    assert_eq!(one.seen().len() + two.seen().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failure_without_an_alternative_is_a_502() {
    let worker = MockWorker::start(&["m"], |_| vec![Act::Close]).await;
    let router = Router::start(&[&workers(&[&worker])]).await;
    let reply = router.post("/v1/chat/completions", &chat("x")).await;
    assert_eq!(reply.status, 502);
    let (message, code) = reply.error();
    assert!(message.contains("w0"), "{message}");
    assert_eq!(code, "worker_failed");
    assert_eq!(router.metric("router_errors_total{blame=\"worker\"}").await, 1.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_worker_is_a_504() {
    let worker = MockWorker::start(&["m"], |_| vec![Act::Wait(Arc::new(Notify::new()))]).await;
    let router = Router::start(&[&workers(&[&worker]), "--request-timeout=200ms"]).await;
    let reply = router.post("/v1/chat/completions", &chat("x")).await;
    assert_eq!((reply.status, reply.error().1.as_str()), (504, "worker_timeout"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broken_stream_says_so_and_is_not_done() {
    let worker = MockWorker::start(&["m"], |_| {
        vec![Act::Write(sse_head()), Act::Write(chunk("data: {\"a\":1}\n\n")), Act::Close]
    })
    .await;
    let router = Router::start(&[&workers(&[&worker])]).await;
    let reply = router.post("/v1/chat/completions", &chat("x")).await;
    let text = reply.text();
    let events: Vec<_> = text.split("\n\n").filter(|event| !event.is_empty()).collect();
    assert_eq!(events.len(), 2, "{text}");
    assert_eq!(events[0], "data: {\"a\":1}");
    let error: serde_json::Value = serde_json::from_str(events[1].strip_prefix("data: ").unwrap()).unwrap();
    assert_eq!(error["error"]["code"], "worker_failed");
    assert!(!reply.whole, "the connection is closed without the end of the body");
    assert!(!text.contains("[DONE]"));
}

#[tokio::test(flavor = "multi_thread")]
async fn of_an_event_that_breaks_off_in_the_middle_nothing_is_seen() {
    for half in ["data: {\"choices\":[{\"de", "data: 2\n", "da"] {
        let worker = MockWorker::start(&["m"], move |_| {
            vec![
                Act::Write(sse_head()),
                Act::Write(chunk("data: 1\n\n")),
                Act::Write(chunk(half)),
                Act::Close,
            ]
        })
        .await;
        let router = Router::start(&[&workers(&[&worker])]).await;
        let reply = router.post("/v1/chat/completions", &chat("x")).await;
        let text = reply.text();
        let (first, error) = text.split_once("\n\n").unwrap();
        assert_eq!(first, "data: 1", "{half:?}");
        let error: serde_json::Value =
            serde_json::from_str(error.trim_end().strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(error["error"]["code"], "worker_failed");
        assert!(!reply.whole);
    }
}

/// Reads until `what` has come.
async fn read_until(client: &mut TcpStream, what: &[u8]) -> Vec<u8> {
    let mut raw = Vec::new();
    let reading = async {
        while find(&raw, what).is_none() {
            assert!(client.read_buf(&mut raw).await.unwrap() > 0, "closed: {raw:?}");
        }
    };
    tokio::time::timeout(LIMIT, reading).await.expect("it came in time");
    raw
}

#[tokio::test(flavor = "multi_thread")]
async fn a_compressed_stream_goes_on_as_it_comes_and_nothing_is_put_into_it() {
    let seen = Arc::new(Notify::new());
    let waits = Arc::clone(&seen);
    let head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-encoding: br\r\n\
                 transfer-encoding: chunked\r\n\r\n";
    let worker = MockWorker::start(&["m"], move |_| {
        vec![
            Act::Write(head.to_vec()),
            Act::Write(chunk("no end of an event")),
            Act::Wait(Arc::clone(&waits)),
            Act::Close,
        ]
    })
    .await;
    let router = Router::start(&[&workers(&[&worker])]).await;
    let mut client = TcpStream::connect(router.address).await.unwrap();
    let request = request_bytes("POST", "/v1/chat/completions", &[], chat("x").as_bytes());
    client.write_all(&request).await.unwrap();
    read_until(&mut client, b"no end of an event").await;
    seen.notify_one();
    let mut rest = Vec::new();
    // It may be a reset as well.
    let _ = client.read_to_end(&mut rest).await;
    assert!(find(&rest, b"error").is_none() && find(&rest, b"0\r\n\r\n").is_none(), "{rest:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn at_the_end_of_the_grace_period_clients_hear_why() {
    let worker = MockWorker::start(&["m"], |request| {
        let never = Act::Wait(Arc::new(Notify::new()));
        if find(&request.body, b"unanswered").is_some() {
            return vec![never];
        }
        vec![Act::Write(sse_head()), Act::Write(chunk("data: 1\n\ndata: half")), never]
    })
    .await;
    let mut router = Router::start(&[&workers(&[&worker]), "--grace-period=100ms"]).await;
    let mut streams = TcpStream::connect(router.address).await.unwrap();
    let mut waits = TcpStream::connect(router.address).await.unwrap();
    for (client, content) in [(&mut streams, "x"), (&mut waits, "unanswered")] {
        let request = request_bytes("POST", "/v1/chat/completions", &[], chat(content).as_bytes());
        client.write_all(&request).await.unwrap();
    }
    read_until(&mut streams, b"data: 1\n\n").await;
    until("both are there", || async { worker.seen().len() == 2 }).await;
    router.stop();
    let mut rest = Vec::new();
    let ended = tokio::time::timeout(LIMIT, streams.read_to_end(&mut rest)).await;
    ended.expect("it is closed").unwrap();
    let text = String::from_utf8(rest).unwrap();
    assert!(text.contains("the router is shutting down") && text.contains("router_shutting_down"), "{text}");
    assert!(!text.contains("half") && !text.contains("[DONE]") && !text.contains("0\r\n\r\n"), "{text}");
    let answer = tokio::time::timeout(LIMIT, read_reply(&mut waits)).await.unwrap();
    assert_eq!((answer.status, answer.error().1.as_str()), (503, "router_shutting_down"));
    router.stopped().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_is_behind_when_a_stream_breaks_loses_nothing_of_it() {
    const EVENTS: usize = 600;
    let events =
        (0..EVENTS).flat_map(|_| chunk(&format!("data: {}\n\n", "x".repeat(16 << 10)))).collect::<Vec<_>>();
    let worker = MockWorker::start(&["m"], move |_| {
        vec![Act::Write(sse_head()), Act::Write(events.clone()), Act::Close]
    })
    .await;
    let router = Router::start(&[&workers(&[&worker])]).await;
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(16 << 10).unwrap();
    let mut client = socket.connect(router.address).await.unwrap();
    let request = request_bytes("POST", "/v1/chat/completions", &[], chat("x").as_bytes());
    client.write_all(&request).await.unwrap();
    let (mut all, mut sip) = (Vec::new(), vec![0; 16 << 10]);
    loop {
        // Slower than the router is.
        tokio::time::sleep(Duration::from_millis(1)).await;
        match tokio::time::timeout(LIMIT, client.read(&mut sip)).await.unwrap() {
            Ok(count) if count > 0 => all.extend_from_slice(&sip[..count]),
            _ => break,
        }
    }
    let text = String::from_utf8(all).unwrap();
    assert_eq!(text.matches("data: x").count(), EVENTS);
    assert!(text.contains("worker_failed") && !text.contains("[DONE]"));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_last_words_of_a_stream_pass_even_if_they_are_no_whole_event() {
    let worker = MockWorker::start(&["m"], |_| {
        vec![Act::Write(sse_head()), Act::Write(chunk("data: 1\n\ndata: 2\n")), Act::Write(last_chunk())]
    })
    .await;
    let router = Router::start(&[&workers(&[&worker])]).await;
    let reply = router.post("/v1/chat/completions", &chat("x")).await;
    assert!(reply.whole && reply.text() == "data: 1\n\ndata: 2\n", "{}", reply.text());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_sips_is_held_to_the_total_limit() {
    let flood: Vec<u8> =
        (0..2_000).flat_map(|_| chunk(&format!("data: {}\n\n", "x".repeat(32 << 10)))).collect();
    let worker =
        MockWorker::start(&["m"], move |_| vec![Act::Write(sse_head()), Act::Write(flood.clone())]).await;
    let router = Router::start(&[&workers(&[&worker]), "--request-timeout=300ms"]).await;
    let mut client = TcpStream::connect(router.address).await.unwrap();
    let request = request_bytes("POST", "/v1/chat/completions", &[], chat("x").as_bytes());
    client.write_all(&request).await.unwrap();
    until("it streams", || async { !worker.seen().is_empty() }).await;
    let sipping = tokio::spawn(async move {
        let mut sip = [0; 8_192];
        while client.read(&mut sip).await.is_ok_and(|count| count > 0) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    until("its place is free again", || async { router.metric("router_requests_in_flight").await == 0.0 })
        .await;
    sipping.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_stands_still_is_broken_off() {
    let worker = MockWorker::start(&["m"], |_| {
        let wait = Act::Wait(Arc::new(Notify::new()));
        vec![Act::Write(sse_head()), Act::Write(chunk("data: 1\n\n")), wait]
    })
    .await;
    let router = Router::start(&[&workers(&[&worker]), "--idle-timeout=200ms"]).await;
    let reply = router.post("/v1/chat/completions", &chat("x")).await;
    assert!(reply.text().contains("worker_timeout"), "{}", reply.text());
    assert!(!reply.whole);
}

/// A client that leaves after `read_first` (or at once) is noticed by the worker.
async fn leaving_cancels(acts: Vec<Act>, closed: Arc<Notify>, read_first: &[u8]) {
    let worker = MockWorker::start(&["m"], move |_| acts.clone()).await;
    let router = Router::start(&[&workers(&[&worker])]).await;
    let mut client = TcpStream::connect(router.address).await.unwrap();
    let request = request_bytes("POST", "/v1/chat/completions", &[], chat("x").as_bytes());
    client.write_all(&request).await.unwrap();
    let mut raw = Vec::new();
    while find(&raw, read_first).is_none() {
        client.read_buf(&mut raw).await.unwrap();
    }
    until("the worker got the request", || async { !worker.seen().is_empty() }).await;
    drop(client);
    tokio::time::timeout(LIMIT, closed.notified()).await.expect("the worker's connection is closed");
    until("nothing is in flight", || async { router.metric("router_requests_in_flight").await == 0.0 }).await;
    let status = "router_requests_total{endpoint=\"chat\",status=\"499\"}";
    until("it is recorded", || async { router.metric(status).await == 1.0 }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_cancels_the_worker() {
    let closed = Arc::new(Notify::new());
    let tell = Act::TellWhenClosed(Arc::clone(&closed));
    let streaming = vec![Act::Write(sse_head()), Act::Write(chunk("data: one\n\n")), tell];
    leaving_cancels(streaming, closed, b"one").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_before_the_head_cancels_the_worker() {
    let closed = Arc::new(Notify::new());
    leaving_cancels(vec![Act::TellWhenClosed(Arc::clone(&closed))], closed, b"").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_comes_back_serves_again() {
    let worker = MockWorker::answering(&["m"], json_reply(200, OK)).await;
    let address = worker.address;
    let router = Router::start(&[&workers(&[&worker])]).await;
    drop(worker);
    until("it is out", || async { router.get("/readyz").await.status == 503 }).await;
    let listener = tokio::net::TcpListener::bind(address).await.unwrap();
    let serving = tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let reply = json_reply(200, OK);
            stream.read_buf(&mut Vec::with_capacity(10_000)).await.unwrap();
            stream.write_all(&reply).await.unwrap();
        }
    });
    until("it is back", || async { router.get("/readyz").await.status == 200 }).await;
    assert_eq!(router.post("/v1/chat/completions", &chat("x")).await.status, 200);
    serving.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn stopping_lets_streams_finish() {
    let go_on = Arc::new(Notify::new());
    let wait = Arc::clone(&go_on);
    let worker = MockWorker::start(&["m"], move |_| {
        let end = [chunk("data: two\n\n"), b"0\r\n\r\n".to_vec()].concat();
        vec![
            Act::Write(sse_head()),
            Act::Write(chunk("data: one\n\n")),
            Act::Wait(Arc::clone(&wait)),
            Act::Write(end),
        ]
    })
    .await;
    let mut router = Router::start(&[&workers(&[&worker])]).await;
    let address = router.address;
    let stream = tokio::spawn(async move {
        exchange(address, "POST", "/v1/chat/completions", &[], chat("x").as_bytes()).await
    });
    until("it streams", || async { !worker.seen().is_empty() }).await;
    router.stop();
    until("nobody listens", || async { TcpStream::connect(address).await.is_err() }).await;
    go_on.notify_one();
    let reply = stream.await.unwrap();
    assert!(reply.whole && reply.text().ends_with("data: two\n\n"), "{}", reply.text());
    router.stopped().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_stops_reading_does_not_hold_its_worker_for_ever() {
    // More than the sockets on the way can hold.
    let flood = chunk(&"x".repeat(64 << 20));
    let worker =
        MockWorker::start(&["m"], move |_| vec![Act::Write(sse_head()), Act::Write(flood.clone())]).await;
    let router = Router::start(&[&workers(&[&worker]), "--client-timeout=300ms"]).await;
    let mut client = TcpStream::connect(router.address).await.unwrap();
    let request = request_bytes("POST", "/v1/chat/completions", &[], chat("x").as_bytes());
    client.write_all(&request).await.unwrap();
    until("it streams", || async { !worker.seen().is_empty() }).await;
    until("its place is free again", || async { router.metric("router_requests_in_flight").await == 0.0 })
        .await;
    drop(client);
}
