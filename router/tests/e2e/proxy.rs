//! What goes through the router, and what comes back.

use crate::harness::*;

const REPLY: &str =
    r#"{"choices":[{"message":{"content":"hi"}}],"usage":{"prompt_tokens":9,"completion_tokens":2}}"#;

#[tokio::test(flavor = "multi_thread")]
async fn bytes_and_headers_go_on_unchanged() {
    let worker = MockWorker::answering(&["m"], json_reply(200, REPLY)).await;
    let router = Router::start(&[&workers(&[&worker])]).await;
    // Odd spacing, unknown fields and key order must survive.
    let body = "{ \"zeta\":1,\"model\" : \"m\",\n\t\"messages\":[{\"x\":[],\"role\":\"user\",\"content\":\"\\u00e9\"}] }";
    let headers = [
        ("content-type", "application/json"),
        ("Authorization", "Bearer secret"),
        ("X-Custom", "kept"),
        ("connection", "keep-alive, x-hop"),
        ("x-hop", "dropped"),
    ];
    let reply = exchange(router.address, "POST", "/v1/chat/completions?a=b", &headers, body.as_bytes()).await;
    assert_eq!((reply.status, reply.text().as_str()), (200, REPLY));
    assert_eq!(reply.header("x-router-worker"), "w0");
    assert_eq!(reply.header("x-router-hit-tokens"), "0");
    let seen = &worker.seen()[0];
    assert_eq!(seen.body, body.as_bytes());
    assert_eq!(seen.path, "/v1/chat/completions?a=b");
    assert_eq!(seen.headers["authorization"], "Bearer secret");
    assert_eq!(seen.headers["x-custom"], "kept");
    assert_eq!(seen.headers["host"], worker.address.to_string());
    assert_eq!(seen.headers["x-request-id"], reply.header("x-request-id"));
    assert!(!seen.headers.contains_key("x-hop"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_given_request_id_is_kept() {
    let worker = MockWorker::answering(&["m"], json_reply(200, REPLY)).await;
    let router = Router::start(&[&workers(&[&worker])]).await;
    let headers = [("x-request-id", "mine")];
    let reply = exchange(router.address, "POST", "/v1/completions", &headers, b"{\"prompt\":\"a\"}").await;
    assert_eq!(reply.header("x-request-id"), "mine");
    assert_eq!(worker.seen()[0].headers["x-request-id"], "mine");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_goes_through_whole_and_is_counted() {
    let usage = r#"{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":4}}}"#;
    let worker = MockWorker::answering(&["m"], sse_reply(&[r#"{"a":1}"#, usage])).await;
    let router = Router::start(&[&workers(&[&worker])]).await;
    let reply = router.post("/v1/chat/completions", &chat("hello")).await;
    assert!(reply.whole);
    assert_eq!(reply.header("content-type"), "text/event-stream");
    assert_eq!(reply.text(), format!("data: {{\"a\":1}}\n\ndata: {usage}\n\ndata: [DONE]\n\n"));
    assert_eq!(router.metric("router_tokens_total{kind=\"prompt\"}").await, 7.0);
    assert_eq!(router.metric("router_cached_tokens_total{source=\"reported\"}").await, 4.0);
    assert_eq!(router.metric("router_ttft_seconds_count").await, 1.0);
    assert_eq!(router.metric("router_requests_total{endpoint=\"chat\",status=\"200\"}").await, 1.0);
    assert_eq!(router.metric("router_requests_in_flight").await, 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_has_said_that_it_is_over_is_over_whatever_its_worker_does() {
    let never = std::sync::Arc::new(tokio::sync::Notify::new());
    for hangs in [false, true] {
        let never = std::sync::Arc::clone(&never);
        let worker = MockWorker::start(&["m"], move |_| {
            let pieces = [Act::Write(sse_head()), Act::Write(chunk("data: one\n\ndata: [DONE]\n\n"))];
            let end = if hangs { Act::Wait(std::sync::Arc::clone(&never)) } else { Act::Reset };
            pieces.into_iter().chain([end]).collect()
        })
        .await;
        let router = Router::start(&[&workers(&[&worker]), "--idle-timeout=1h"]).await;
        let reply = router.post("/v1/chat/completions", &chat("hello")).await;
        assert!(reply.whole, "hangs: {hangs}");
        assert_eq!(reply.text(), "data: one\n\ndata: [DONE]\n\n");
        assert_eq!(router.metric("router_requests_in_flight").await, 0.0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pieces_arrive_while_the_worker_still_thinks() {
    let go_on = std::sync::Arc::new(tokio::sync::Notify::new());
    let wait = std::sync::Arc::clone(&go_on);
    let worker = MockWorker::start(&["m"], move |_| {
        let end = [chunk("data: two\n\n"), b"0\r\n\r\n".to_vec()].concat();
        vec![
            Act::Write(sse_head()),
            Act::Write(chunk("data: one\n\n")),
            Act::Wait(std::sync::Arc::clone(&wait)),
            Act::Write(end),
        ]
    })
    .await;
    let router = Router::start(&[&workers(&[&worker])]).await;
    let mut stream = tokio::net::TcpStream::connect(router.address).await.unwrap();
    let request = request_bytes("POST", "/v1/chat/completions", &[], chat("x").as_bytes());
    tokio::io::AsyncWriteExt::write_all(&mut stream, &request).await.unwrap();
    let mut raw = Vec::new();
    while find(&raw, b"one").is_none() {
        tokio::io::AsyncReadExt::read_buf(&mut stream, &mut raw).await.unwrap();
    }
    assert!(find(&raw, b"two").is_none());
    go_on.notify_one();
    while find(&raw, b"two").is_none() {
        tokio::io::AsyncReadExt::read_buf(&mut stream, &mut raw).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn other_endpoints_pass_as_they_came() {
    let worker = MockWorker::answering(&["m"], json_reply(200, "{}")).await;
    let router = Router::start(&[&workers(&[&worker])]).await;
    for (path, body) in [
        ("/v1/embeddings", "{\"input\": \"a\"}"),
        ("/v1/audio/transcriptions", "--boundary\r\nnot json"),
        ("/generate", "{\"text\": \"a\"}"),
        ("/tokenize", "{\"prompt\": \"a\"}"),
        ("/detokenize", "{\"tokens\": [1]}"),
        ("/v1/responses", ""),
    ] {
        assert_eq!(router.post(path, body).await.status, 200, "{path}");
        let seen = worker.seen().pop().unwrap();
        assert_eq!((seen.path.as_str(), seen.body.as_slice()), (path, body.as_bytes()));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_have_openais_shape_and_the_right_status() {
    let worker = MockWorker::answering(&["m", "n"], json_reply(200, REPLY)).await;
    let router = Router::start(&[&workers(&[&worker]), "--max-body-bytes=10kB"]).await;
    let chat_path = "/v1/chat/completions";
    let large = chat(&"x".repeat(20_000));
    for (method, path, body, status, expected) in [
        ("POST", chat_path, "{\"model\":\n \"m\",}", 400, "line 2 column 6"),
        ("POST", chat_path, "", 400, "line 1 column 0"),
        ("POST", chat_path, "[]", 400, "not an array"),
        ("POST", chat_path, "{\"model\":\"other\"}", 404, "known models: m, n"),
        ("POST", chat_path, large.as_str(), 413, "10000 bytes"),
        ("GET", chat_path, "", 405, "takes POST"),
        ("POST", "/v1/models", "", 405, "takes GET"),
        ("POST", "/nowhere", "{}", 404, "/nowhere"),
        ("GET", "/", "", 404, "no such endpoint"),
        ("POST", "/v1/load_lora_adapter", "{}", 403, "ask each engine itself"),
        ("POST", "/v1/unload_lora_adapter", "{}", 403, "ask each engine itself"),
    ] {
        let reply = exchange(router.address, method, path, &[], body.as_bytes()).await;
        let (message, _) = reply.error();
        assert_eq!(reply.status, status, "{method} {path}: {message}");
        assert!(message.contains(expected), "{message:?} lacks {expected:?}");
        assert!(reply.json()["error"]["type"].is_string());
    }
    assert!(worker.seen().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn lists_the_union_of_models() {
    let one = MockWorker::answering(&["a", "b"], json_reply(200, REPLY)).await;
    let two = MockWorker::answering(&["b", "c"], json_reply(200, REPLY)).await;
    let router = Router::start(&[&workers(&[&one, &two])]).await;
    let listed = router.get("/v1/models").await.json();
    let ids: Vec<_> =
        listed["data"].as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["a", "b", "c"]);
    assert_eq!(router.get("/v1/models/c").await.json()["id"], "c");
    assert_eq!(router.get("/v1/models/z").await.status, 404);
    assert_eq!(router.get("/get_model_info").await.json()["model_path"], "a");
    let info = router.get("/server_info").await;
    assert_eq!(info.json()["workers"].as_array().unwrap().len(), 2);
    assert!(!info.text().contains("127.0.0.1"), "addresses are not for clients");
}

#[tokio::test(flavor = "multi_thread")]
async fn probes_tell_alive_from_ready() {
    let worker = MockWorker::answering(&["m"], json_reply(200, REPLY)).await;
    let router = Router::start(&[&workers(&[&worker])]).await;
    for path in ["/livez", "/readyz", "/health"] {
        assert_eq!(router.get(path).await.status, 200, "{path}");
    }
    let alone = Router::start(&["--workers=127.0.0.1:9"]).await;
    assert_eq!(alone.get("/livez").await.status, 200);
    for path in ["/readyz", "/health"] {
        assert_eq!(alone.get(path).await.status, 503, "{path}");
    }
    let reply = alone.post("/v1/chat/completions", &chat("x")).await;
    assert_eq!((reply.status, reply.header("retry-after")), (503, "1"));
    assert_eq!(reply.error().1, "no_worker_available");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_serves_one_request_after_another() {
    let worker = MockWorker::answering(&["m"], json_reply(200, REPLY)).await;
    let router = Router::start(&[&workers(&[&worker])]).await;
    let mut stream = tokio::net::TcpStream::connect(router.address).await.unwrap();
    for body in [chat("one"), "{bad".to_owned(), chat("two")] {
        let request = request_bytes("POST", "/v1/chat/completions", &[], body.as_bytes());
        tokio::io::AsyncWriteExt::write_all(&mut stream, &request).await.unwrap();
        let expected = if body.starts_with("{bad") { 400 } else { 200 };
        assert_eq!(read_reply(&mut stream).await.status, expected);
    }
    assert_eq!(worker.seen().len(), 2);
}
