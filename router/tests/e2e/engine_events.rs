//! Cache events over ZeroMQ, as vLLM publishes them: real workers that speak HTTP and are not asked for anything of ours. And as SGLang does, which a mock
//! plays.
#![cfg(feature = "embedded")]

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, Ordering};

use roundhouse_zmtp::{Socket, Traffic, handshake, message};
use serde_json::json;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use worker::config::{KvBudget, KvEventRecording};
use worker::kv_events::zmq::{Publisher, ZmqConfig};

use crate::following::{hit_tokens, prompt, send, trusts, worker};
use crate::grpc::{Served, started};
use crate::harness::*;

const ANYWHERE: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 0);

/// Whether an engine replays what was missed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Replay {
    Yes,
    No,
}

/// An engine whose cache events are published. Dropping it is killing it.
struct Engine {
    served: Served,
    publishing: JoinHandle<()>,
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.publishing.abort();
    }
}

impl Engine {
    async fn start(address: SocketAddr, blocks: usize, replay: Replay) -> Self {
        let worker = started(|config| {
            config.kv_events = KvEventRecording::On;
            config.kv = KvBudget::Blocks(blocks);
            config.context_tokens = Some(512);
        })
        .await;
        let any = || "tcp://127.0.0.1:0".parse().unwrap();
        let replay = (replay == Replay::Yes).then(any);
        let config = ZmqConfig { publish: any(), replay, topic: "kv".into() };
        // Before it listens, as engines do.
        let publisher = Publisher::bind(worker.kv_log().unwrap(), &config).await.unwrap();
        let publishing = tokio::spawn(publisher.run());
        Self { served: Served::listen(worker, address).await, publishing }
    }

    async fn router(&self, arguments: &[&str]) -> Router {
        let list = format!("--workers=http://{}", self.served.address);
        let router =
            Router::start(&[&[list.as_str(), "--probe-interval-down=50ms"][..], arguments].concat()).await;
        until("it is up", || async { worker(&router).await["up"] == true }).await;
        router
    }

    /// What others than the router send.
    async fn send(&self, path: &str, body: &str) -> Reply {
        let reply = exchange(self.served.address, "POST", path, &[], body.as_bytes()).await;
        assert_eq!(reply.status, 200, "{reply:?}");
        reply
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_others_evict_from_an_engine_is_expected_there_no_more() {
    let engine = Engine::start(ANYWHERE, 40, Replay::Yes).await;
    let router = engine.router(&[]).await;
    trusts(&router, "stale").await;
    send(&router, 0).await;
    // Its events say whose they are.
    trusts(&router, "followed").await;
    send(&router, 1).await;
    assert!(hit_tokens(&router, 1).await > 0);
    for number in 100..140 {
        engine.send("/v1/completions", &prompt(number)).await;
    }
    until("both are gone", || async { hit_tokens(&router, 0).await + hit_tokens(&router, 1).await == 0 })
        .await;
    send(&router, 2).await;
    until("the end of a prompt that fills no block is taken back", || async {
        router.metric("router_prefix_tree_blocks").await < 12.0
    })
    .await;
    assert!(hit_tokens(&router, 2).await > 0);
    engine.send("/flush_cache", "").await;
    until("nothing is there", || async { hit_tokens(&router, 2).await == 0 }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_comes_back_is_another_one() {
    let engine = Engine::start(ANYWHERE, 400, Replay::Yes).await;
    let address = engine.served.address;
    let router = engine.router(&[]).await;
    trusts(&router, "stale").await;
    send(&router, 0).await;
    trusts(&router, "followed").await;
    drop(engine);
    until("it is down", || async { worker(&router).await["up"] == false }).await;
    let _engine = Engine::start(address, 400, Replay::Yes).await;
    until("it is up", || async { worker(&router).await["up"] == true }).await;
    assert_eq!(hit_tokens(&router, 0).await, 0);
    // Where it publishes now is not where it did.
    let number = AtomicU32::new(1);
    until("it is followed", || async {
        send(&router, number.fetch_add(1, Ordering::Relaxed)).await;
        worker(&router).await["cache_trust"] == "followed"
    })
    .await;
    // Of the one that was on its way when the first batch came, more may have been told before.
    let last = number.load(Ordering::Relaxed);
    send(&router, last).await;
    assert!(hit_tokens(&router, last).await > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn of_an_engine_that_was_there_before_what_happens_is_known_and_its_size() {
    let engine = Engine::start(ANYWHERE, 40, Replay::No).await;
    for number in 0..3 {
        engine.send("/v1/completions", &prompt(number)).await;
    }
    let router = engine.router(&[]).await;
    trusts(&router, "stale").await;
    // The first batch that it hears of is in the middle.
    let number = AtomicU32::new(3);
    until("it is heard", || async {
        send(&router, 0).await;
        send(&router, number.fetch_add(1, Ordering::Relaxed)).await;
        worker(&router).await["cache_trust"] == "followed"
    })
    .await;
    // Of the one that was on its way when the first batch came, more may have been told before.
    let last = number.load(Ordering::Relaxed);
    send(&router, last).await;
    assert!(hit_tokens(&router, last).await > 0);
    for number in 100..140 {
        engine.send("/v1/completions", &prompt(number)).await;
    }
    until("it is gone", || async { hit_tokens(&router, last).await == 0 }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clients_own_name_of_its_session_is_the_one_that_counts() {
    let engine = Engine::start(ANYWHERE, 40, Replay::Yes).await;
    let router = engine.router(&[]).await;
    trusts(&router, "stale").await;
    for number in 0..2 {
        let headers = [("content-type", "application/json"), ("x-session-id", "ann's")];
        let (path, body) = ("/v1/completions", prompt(number));
        let reply = exchange(router.address, "POST", path, &headers, body.as_bytes()).await;
        assert_eq!(reply.status, 200);
        // Whatever comes before it is over, or before what is told of it, would be taken for another one of the same session.
        let ended = "router_requests_total{endpoint=\"completions\",status=\"200\"}";
        until("it is over", || async { router.metric(ended).await >= f64::from(number + 1) }).await;
        trusts(&router, "followed").await;
    }
    for number in 100..140 {
        engine.send("/v1/completions", &prompt(number)).await;
    }
    until("both are gone", || async { hit_tokens(&router, 0).await + hit_tokens(&router, 1).await == 0 })
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn engines_are_followed_only_if_that_is_wanted() {
    let engine = Engine::start(ANYWHERE, 40, Replay::Yes).await;
    let router = engine.router(&["--engine-events=off"]).await;
    send(&router, 0).await;
    assert!(hit_tokens(&router, 0).await > 0);
    assert_eq!(worker(&router).await["cache_trust"], "learned");
}

#[tokio::test(flavor = "multi_thread")]
async fn only_engines_that_are_followed_get_another_header() {
    let mock = MockWorker::answering(&["m"], json_reply(200, "{}")).await;
    let router = Router::start(&[&workers(&[&mock])]).await;
    until("it is up", || async { worker(&router).await["up"] == true }).await;
    let body = json!({"model": "m", "prompt": "x".repeat(500)}).to_string();
    assert_eq!(router.post("/v1/completions", &body).await.status, 200);
    let seen = mock.seen();
    let request = seen.iter().find(|seen| seen.path == "/v1/completions").unwrap();
    assert!(!request.headers.contains_key("x-session-id"), "{request:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_engine_did_before_says_nothing_of_what_a_router_has_left() {
    let engine = Engine::start(ANYWHERE, 400, Replay::Yes).await;
    engine.send("/v1/completions", &prompt(0)).await;
    engine.send("/flush_cache", "").await;
    let file = std::env::temp_dir().join(format!("roundhouse-state-events-{}", std::process::id()));
    let flag = format!("--prefix-state-file={}", file.display());
    let router = engine.router(&[&flag]).await;
    send(&router, 1).await;
    router.stopped().await;
    let router = engine.router(&[&flag]).await;
    until("it is known", || async { hit_tokens(&router, 1).await > 0 }).await;
    let number = AtomicU32::new(2);
    until("the engine is followed", || async {
        send(&router, number.fetch_add(1, Ordering::Relaxed)).await;
        worker(&router).await["cache_trust"] == "followed"
    })
    .await;
    assert!(hit_tokens(&router, 1).await > 0, "its cache was emptied before");
    router.stopped().await;
    std::fs::remove_file(&file).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn sglang_is_told_a_requests_name_in_its_body() {
    let listener = TcpListener::bind(ANYWHERE).await.unwrap();
    let model: &str = format!("sglang-publishes-{}", listener.local_addr().unwrap().port()).leak();
    let generated = json!({"usage": {"prompt_tokens": 150, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}});
    let mock = MockWorker::answering(vec![model].leak(), json_reply(200, &generated.to_string())).await;
    let router = Router::start(&[&workers(&[&mock]), "--probe-interval-down=50ms"]).await;
    let (mut stream, _) = listener.accept().await.unwrap();
    let mut inbox = handshake(&mut stream, Socket::Pub).await.unwrap();
    let subscribed = inbox.receive(&mut stream, 100).await.unwrap();
    assert_eq!(subscribed, Traffic::Message(vec![vec![1]]));
    trusts(&router, "stale").await;
    let body = json!({"model": model, "prompt": "once upon a time, ".repeat(30), "max_tokens": 1});
    let reply = router.post("/v1/completions", &body.to_string()).await;
    assert_eq!(reply.status, 200, "{reply:?}");
    let told: serde_json::Value =
        serde_json::from_slice(&mock.seen().iter().find(|seen| seen.path == "/v1/completions").unwrap().body)
            .unwrap();
    let name = told["session_id"].as_str().unwrap();
    assert_eq!(name, reply.header("x-request-id"));
    // As SGLang 0.5.23 writes it.
    let stored = json!({"type": "BlockStored", "block_hashes": [-5, 6, 7], "parent_block_hash": null, "token_ids": [], "block_size": 16,
        "lora_id": null, "medium": "GPU", "session_id": name});
    let batch = rmp_serde::to_vec_named(&json!([1.5, [stored], null])).unwrap();
    stream.write_all(&message(&[b"", &0_u64.to_be_bytes(), &batch])).await.unwrap();
    trusts(&router, "followed").await;
    let own =
        json!({"model": model, "prompt": "once upon a time, ".repeat(30), "session_id": "ann's"}).to_string();
    assert_eq!(router.post("/v1/completions", &own).await.status, 200);
    assert_eq!(mock.seen().pop().unwrap().body, own.as_bytes(), "a client's own stays");
}
