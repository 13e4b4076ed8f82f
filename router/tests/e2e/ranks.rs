//! Data-parallel ranks behind one address, each a worker of its own: what they are told, and what the end of one means for the others.

use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Value, json};

use crate::harness::*;
use crate::kubernetes::{Api, slice_of};

const CHAT: &str = "/v1/chat/completions";
const DP_RANK: &str = "x-data-parallel-rank";

fn answer() -> Vec<u8> {
    sse_reply(&[r#"{"choices":[{"delta":{"content":"hello"}}]}"#])
}

/// How a mock is named with its ranks.
fn with_ranks(mock: &MockWorker, options: &str) -> String {
    format!("{}?{options}", mock.address)
}

async fn listed(router: &Router) -> Vec<Value> {
    router.admin("GET", "/workers", "").await.json()["workers"].as_array().unwrap().clone()
}

/// Ids of those that requests may go to.
async fn usable(router: &Router) -> Vec<String> {
    let workers = listed(router).await.into_iter().filter(|worker| worker["usable"] == true);
    workers.map(|worker| worker["id"].as_str().unwrap().to_owned()).collect()
}

async fn until_usable(router: &Router, ids: &[&str]) {
    until(&format!("{ids:?} are usable"), || async { usable(router).await == ids }).await;
}

async fn start(arguments: &[&str], ids: &[&str]) -> Router {
    let router = Router::start(arguments).await;
    until_usable(&router, ids).await;
    router
}

fn rank_of(seen: &Seen) -> &str {
    &seen.headers[DP_RANK]
}

#[tokio::test(flavor = "multi_thread")]
async fn each_rank_is_a_worker_and_is_told_by_a_header() {
    let engine = MockWorker::answering(&["m"], answer()).await;
    let workers = format!("--workers=a={}", with_ranks(&engine, "dp=3"));
    let router = start(&[&workers, "--policy=round_robin"], &["a-dp0", "a-dp1", "a-dp2"]).await;
    let sent = chat("hi");
    // No client says where it goes, nor keeps the router from saying so.
    let own =
        [(DP_RANK, "7"), ("connection", "x-data-parallel-rank, x-own"), ("x-own", "1"), ("x-else", "2")];
    let mut used = Vec::new();
    for _ in 0..3 {
        let reply = exchange(router.address, "POST", CHAT, &own, sent.as_bytes()).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        let seen = engine.seen().pop().unwrap();
        assert_eq!(reply.header("x-router-worker"), format!("a-dp{}", rank_of(&seen)));
        assert_eq!((seen.body, seen.headers["x-else"].as_str()), (sent.clone().into_bytes(), "2"));
        assert!(!seen.headers.contains_key("x-own"));
        used.push(reply.header("x-router-worker").to_owned());
    }
    used.sort_unstable();
    assert_eq!(used, ["a-dp0", "a-dp1", "a-dp2"]);
    assert_eq!(router.metric("router_worker_up{worker=\"a-dp2\"}").await, 1.0);
    let explained = router.admin("POST", "/explain", &sent).await.json();
    assert_eq!(explained["candidates"].as_array().unwrap().len(), 3);
    let ranks: Vec<_> = listed(&router).await.iter().map(|worker| worker["dp_rank"].clone()).collect();
    assert_eq!(ranks, [0, 1, 2]);
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_has_no_ranks_gets_what_the_client_says() {
    let engine = MockWorker::answering(&["m"], answer()).await;
    let router = start(&[&workers(&[&engine])], &["w0"]).await;
    exchange(router.address, "POST", CHAT, &[(DP_RANK, "7")], chat("hi").as_bytes()).await;
    assert_eq!(rank_of(&engine.seen()[0]), "7");
    assert_eq!(listed(&router).await[0]["dp_rank"], Value::Null);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conversation_stays_at_the_rank_that_has_it_cached() {
    let engine = MockWorker::answering(&["m"], answer()).await;
    let router = start(
        &[&format!("--workers={}", with_ranks(&engine, "dp=4"))],
        &["w0-dp0", "w0-dp1", "w0-dp2", "w0-dp3"],
    )
    .await;
    let mut history = "a long story, ".repeat(1_000);
    for turn in 0..5 {
        history += &format!("and so on {turn} ").repeat(20);
        assert_eq!(router.post(CHAT, &chat(&history)).await.status, 200);
    }
    let seen = engine.seen();
    assert!(seen.iter().all(|turn| rank_of(turn) == rank_of(&seen[0])));
}

#[tokio::test(flavor = "multi_thread")]
async fn on_sglangs_own_path_a_field_tells_the_rank_as_well() {
    let engine = MockWorker::answering(&["m"], json_reply(200, "{}")).await;
    let router = start(&[&format!("--workers={}", with_ranks(&engine, "dp=2"))], &["w0-dp0", "w0-dp1"]).await;
    router.post("/generate", &json!({"text": "hi"}).to_string()).await;
    let seen = engine.seen().pop().unwrap();
    let told: Value = serde_json::from_slice(&seen.body).unwrap();
    assert_eq!(told["routed_dp_rank"].to_string(), rank_of(&seen));
    router.post(CHAT, &chat("hi")).await;
    assert_eq!(engine.seen().pop().unwrap().body, chat("hi").as_bytes(), "elsewhere the header does");
}

#[tokio::test(flavor = "multi_thread")]
async fn where_a_field_tells_the_rank_it_stands_in_every_object_that_is_not_compressed() {
    let engine = MockWorker::answering(&["m"], json_reply(200, "{}")).await;
    for (field, other) in [("routed_dp_rank", "data_parallel_rank"), ("data_parallel_rank", "routed_dp_rank")]
    {
        let workers = format!("--workers={}", with_ranks(&engine, &format!("dp=2&dp_by={field}")));
        let router = start(&[&workers], &["w0-dp0", "w0-dp1"]).await;
        let sent = json!({"text": "hi", "routed_dp_rank": 9, "data_parallel_rank": 9}).to_string();
        router.post("/generate", &sent).await;
        let seen = engine.seen().pop().unwrap();
        let body: Value = serde_json::from_slice(&seen.body).unwrap();
        assert_eq!(body[field].to_string(), rank_of(&seen));
        assert_eq!((&body["text"], body.get(other)), (&json!("hi"), None));
        for (kind, sent) in [
            (("content-encoding", "gzip"), "\u{1f}no JSON"),
            (("content-type", "application/json"), "[1]"),
            (("content-type", "multipart/form-data; boundary=xyz"), "--xyz--"),
        ] {
            exchange(router.address, "POST", "/v1/something", &[kind], sent.as_bytes()).await;
            let seen = engine.seen().pop().unwrap();
            assert_eq!(seen.body, sent.as_bytes());
            assert!(["0", "1"].contains(&rank_of(&seen)));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_fails_at_a_rank_is_tried_again_at_another_address() {
    for failure in [Act::Reset, Act::Write(json_reply(500, "{}")), Act::Write(json_reply(503, "{}"))] {
        let fails = MockWorker::start(&["m"], move |_| vec![failure.clone()]).await;
        check_goes_elsewhere(&fails).await;
    }
}

async fn check_goes_elsewhere(fails: &MockWorker) {
    let well = MockWorker::answering(&["m"], answer()).await;
    let workers = format!("--workers=a={},b={}", with_ranks(fails, "dp=6"), well.address);
    let arguments = [workers.as_str(), "--policy=round_robin", "--max-retries=1"];
    let ids = ["a-dp0", "a-dp1", "a-dp2", "a-dp3", "a-dp4", "a-dp5", "b"];
    let router = start(&arguments, &ids).await;
    for _ in 0..7 {
        let reply = router.post(CHAT, &chat("hi")).await;
        assert_eq!((reply.status, reply.header("x-router-worker")), (200, "b"), "{}", reply.text());
    }
    assert!(!fails.seen().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn where_there_is_no_other_address_another_rank_is_tried() {
    let asked = AtomicUsize::new(0);
    let engine = MockWorker::start(&["m"], move |_| match asked.fetch_add(1, Ordering::SeqCst) {
        0 => vec![Act::Reset],
        _ => vec![Act::Write(answer())],
    })
    .await;
    let router = start(&[&format!("--workers={}", with_ranks(&engine, "dp=2"))], &["w0-dp0", "w0-dp1"]).await;
    assert_eq!(router.post(CHAT, &chat("hi")).await.status, 200);
    let seen = engine.seen();
    assert!(seen.len() == 2 && rank_of(&seen[0]) != rank_of(&seen[1]));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_has_ended_costs_no_request_however_many_ranks_it_had() {
    let gone = MockWorker::answering(&["m"], answer()).await;
    let well = MockWorker::answering(&["m"], answer()).await;
    let workers = format!("--workers=a={},b={}", with_ranks(&gone, "dp=3"), well.address);
    let arguments = [workers.as_str(), "--policy=round_robin", "--max-retries=1"];
    let router = start(&arguments, &["a-dp0", "a-dp1", "a-dp2", "b"]).await;
    gone.kill().await;
    for _ in 0..4 {
        assert_eq!(router.post(CHAT, &chat("hi")).await.status, 200);
    }
    until_usable(&router, &["b"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn operators_add_drain_and_remove_all_ranks_of_an_address_or_one() {
    let (first, engine) =
        (MockWorker::answering(&["m"], answer()).await, MockWorker::answering(&["m"], answer()).await);
    let router = start(&[&workers(&[&first])], &["w0"]).await;
    let new = json!({"url": format!("http://{}?dp=2", engine.address), "id": "a"}).to_string();
    let added = router.admin("POST", "/workers", &new).await;
    assert_eq!((added.status, &added.json()["ranks"][1]["id"]), (201, &json!("a-dp1")));
    assert_eq!(router.admin("POST", "/workers", &new).await.status, 409);
    let one = json!({"url": "http://127.0.0.1:1", "id": "a"}).to_string();
    assert_eq!(router.admin("POST", "/workers", &one).await.status, 409, "it would be meant with the ranks");
    until_usable(&router, &["w0", "a-dp0", "a-dp1"]).await;
    let drained = router.admin("POST", "/workers/a/drain", "").await;
    assert_eq!((drained.status, drained.json()["ranks"].as_array().unwrap().len()), (200, 2));
    assert_eq!(usable(&router).await, ["w0"]);
    let undrained = router.admin("POST", "/workers/a-dp1/undrain", "").await;
    assert_eq!((undrained.status, &undrained.json()["id"]), (200, &json!("a-dp1")));
    assert_eq!(usable(&router).await, ["w0", "a-dp1"]);
    let twice = json!({"url": format!("http://{}?dp=1", engine.address)}).to_string();
    assert_eq!(router.admin("POST", "/workers", &twice).await.status, 409, "that rank is there");
    let nameless = |port: u16| json!({"url": format!("http://127.0.0.1:{port}?dp=1")}).to_string();
    assert_eq!(router.admin("POST", "/workers", &nameless(1)).await.json()["ranks"][0]["id"], "w1-dp0");
    assert_eq!(router.admin("POST", "/workers", &nameless(2)).await.json()["id"], "w2");
    assert_eq!(router.admin("DELETE", "/workers/a", "").await.status, 200);
    let ids: Vec<_> = listed(&router).await.iter().map(|worker| worker["id"].clone()).collect();
    assert_eq!(ids, ["w0", "w1-dp0", "w2-dp0"]);
    let wrong = router.admin("POST", "/workers", r#"{"url": "grpc://a?dp=2"}"#).await;
    assert_eq!((wrong.status, wrong.error().0.contains("engines over HTTP")), (400, true));
}

#[tokio::test(flavor = "multi_thread")]
async fn each_rank_has_the_cache_that_the_engine_tells_of_it() {
    let engine = MockWorker::answering(&["tells-ranks"], answer()).await;
    let workers = format!("--workers={}", with_ranks(&engine, "dp=2"));
    let router = start(&[&workers], &["w0-dp0", "w0-dp1"]).await;
    until("they have told", || async {
        let sizes = listed(&router).await;
        sizes.iter().map(|worker| worker["kv_capacity_tokens"].as_u64()).eq([Some(8_000), Some(9_600)])
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ranks_of_pods_are_found_and_leave_together() {
    let (api, engine) = (Api::start().await, MockWorker::answering(&["m"], answer()).await);
    api.put("workers", "one", slice_of("vllm-0", engine.address));
    let flags = api.flags();
    let arguments: Vec<_> =
        flags.iter().map(String::as_str).chain(["--workers=k8s://workers?dp=2"]).collect();
    let router = Router::start(&arguments).await;
    until_usable(&router, &["vllm-0-dp0", "vllm-0-dp1"]).await;
    let reply = router.post(CHAT, &chat("hi")).await;
    assert_eq!(reply.header("x-router-worker"), format!("vllm-0-dp{}", rank_of(&engine.seen()[0])));
    assert_eq!(listed(&router).await[1]["source"], "k8s://workers");
    assert_eq!(router.metric("router_discovery_workers{source=\"k8s://workers\"}").await, 2.0);
    api.take("workers", "one");
    until_usable(&router, &[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn both_of_vllms_legs_are_told_their_ranks() {
    let prefilled = r#"{"choices":[],"kv_transfer_params":{"remote_engine_id":"e_dp1"}}"#;
    let prefill = MockWorker::answering(&["m"], json_reply(200, prefilled)).await;
    let generate = MockWorker::answering(&["m"], answer()).await;
    let workers = format!("--workers=d={}", with_ranks(&generate, "dp=1"));
    let apart = format!("--prefill=p={}", with_ranks(&prefill, "dp=2"));
    let ids = ["d-dp0", "p-dp0", "p-dp1"];
    let router = start(&[&workers, &apart, "--policy=round_robin"], &ids).await;
    let reply = router.post(CHAT, &chat("hi")).await;
    let (first, second) = (prefill.seen().remove(0), generate.seen().remove(0));
    assert_eq!(reply.header("x-router-prefill-worker"), format!("p-dp{}", rank_of(&first)));
    assert_eq!((reply.header("x-router-worker"), rank_of(&second)), ("d-dp0", "0"));
}

#[tokio::test(flavor = "multi_thread")]
async fn both_of_sglangs_legs_are_told_their_ranks_and_the_other_one_where_the_prompt_is() {
    let prefill = MockWorker::answering(&["m"], answer()).await;
    let generate = MockWorker::answering(&["m"], answer()).await;
    let workers = format!("--workers=d={}", with_ranks(&generate, "dp=2"));
    let apart = format!("--prefill=p={}", with_ranks(&prefill, "bootstrap_port=7001&dp=2"));
    let arguments = [&workers, &apart, "--prefill-protocol=sglang", "--policy=round_robin"];
    let router = start(&arguments, &["d-dp0", "d-dp1", "p-dp0", "p-dp1"]).await;
    for number in 1..=3 {
        assert_eq!(router.post(CHAT, &chat("hi")).await.status, 200);
        until("both were asked", || async {
            prefill.seen().len() == number && generate.seen().len() == number
        })
        .await;
        let (first, second) = (&prefill.seen()[number - 1], &generate.seen()[number - 1]);
        let body = |seen: &Seen| serde_json::from_slice::<Value>(&seen.body).unwrap();
        assert_eq!(body(first)["routed_dp_rank"].to_string(), rank_of(first));
        assert_eq!(body(second)["routed_dp_rank"].to_string(), rank_of(second));
        assert_eq!(body(second)["disagg_prefill_dp_rank"].to_string(), rank_of(first));
        assert_eq!(body(first).get("disagg_prefill_dp_rank"), None);
        assert_eq!(
            (&body(first)["bootstrap_port"], &body(second)["bootstrap_port"]),
            (&json!(7001), &json!(7001))
        );
    }
}
