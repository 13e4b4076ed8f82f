//! Who goes first where requests wait, and who waits until nobody else does.

use std::sync::Arc;

use serde_json::json;
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use crate::harness::*;
use crate::keys::TestFile;
use crate::line::{self, IN_LINE};

const IN_BACKGROUND: &str = "router_requests_in_background";
const PATH: &str = "/v1/completions";

/// One that waits in line or in the background.
struct One {
    name: &'static str,
    headers: Vec<(&'static str, &'static str)>,
    tier: Option<&'static str>,
}

fn one(name: &'static str, headers: &[(&'static str, &'static str)]) -> One {
    One { name, headers: headers.to_vec(), tier: None }
}

fn send(router: &Router, One { name, headers, tier }: One, words: usize) -> JoinHandle<Reply> {
    let (address, prompt) = (router.address, format!("{name} ").repeat(words));
    let mut body = json!({"model": "m", "stream": true, "prompt": prompt});
    if let Some(tier) = tier {
        body["service_tier"] = tier.into();
    }
    let body = body.to_string();
    tokio::spawn(async move { exchange(address, "POST", PATH, &headers, body.as_bytes()).await })
}

/// The names of those whose prompts a worker has seen since, in order.
fn names(worker: &MockWorker, before: usize) -> Vec<String> {
    let name = |body: &[u8]| {
        let body: serde_json::Value = serde_json::from_slice(body).unwrap();
        body["prompt"].as_str().unwrap().split(' ').next().unwrap().to_owned()
    };
    worker.seen()[before..].iter().map(|seen| name(&seen.body)).collect()
}

/// In which order a worker that has enough to compute gets those who wait for it.
async fn order(requests: Vec<One>, more: &[&str]) -> Vec<String> {
    let computes = Arc::new(Notify::new());
    let worker = line::worker(&computes).await;
    let all = workers(&[&worker]);
    let router = Router::start(&[&[all.as_str()], more].concat()).await;
    until("it is up", || async { router.get("/readyz").await.status == 200 }).await;
    let key = requests[0].headers.iter().find(|(name, _)| *name == "authorization").copied();
    let headers: Vec<_> = key.into_iter().collect();
    for number in 0..40 {
        let name = one("s", &headers);
        assert_eq!(send(&router, name, 10 * (number % 20)).await.unwrap().status, 200);
    }
    let before = worker.seen().len();
    let mut sent = Vec::new();
    for (name, there) in [("first", 1), ("second", 2)] {
        sent.push(send(&router, one(name, &headers), 200_000));
        until("it is there", || async { worker.seen().len() == before + there }).await;
    }
    let waiting = requests.len();
    for (request, in_line) in requests.into_iter().zip(1..) {
        sent.push(send(&router, request, 200_000));
        until("it is in line", || async { router.metric(IN_LINE).await == f64::from(in_line) }).await;
    }
    // One at a time: two that go at once reach the worker in any order.
    for there in 1..=waiting {
        computes.notify_one();
        until("the next is there", || async { worker.seen().len() >= before + 2 + there }).await;
    }
    until("all are answered", || async {
        computes.notify_one();
        sent.iter().all(JoinHandle::is_finished)
    })
    .await;
    for one in sent {
        assert_eq!(one.await.unwrap().status, 200);
    }
    names(&worker, before + 2)
}

#[tokio::test(flavor = "multi_thread")]
async fn higher_priorities_go_first_in_line() {
    let tier = |name, tier| One { name, headers: Vec::new(), tier: Some(tier) };
    let requests = vec![
        one("usual", &[]),
        one("low", &[("x-request-priority", "-5")]),
        tier("tier", "priority"),
        one("high", &[("x-request-priority", "7")]),
    ];
    let order = order(requests, &["--background-load=off"]).await;
    assert_eq!(order, ["high", "tier", "usual", "low"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn tenants_go_in_turn_in_line() {
    let flood = [("x-tenant", "flood")];
    let requests =
        vec![one("a", &flood), one("b", &flood), one("c", &flood), one("other", &[("x-tenant", "other")])];
    let order = order(requests, &["--tenant-header=x-tenant"]).await;
    assert!(order[..2].contains(&"other".to_owned()), "{order:?}");
    assert_eq!(order.len(), 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_says_how_important_its_requests_are_at_most() {
    let keys = TestFile::new("sk-app priority=5\nsk-other\n");
    let (app, other) = (("authorization", "Bearer sk-app"), ("authorization", "Bearer sk-other"));
    let requests =
        vec![one("other", &[other, ("x-request-priority", "9")]), one("usual", &[other]), one("app", &[app])];
    let order = order(requests, &[&keys.flag("api-key-file")]).await;
    // The others are equals, whose order goes by what their prompts are thought to take.
    assert_eq!((order[0].as_str(), order.len()), ("app", 3), "{order:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn engines_are_told_what_clients_may_say() {
    let worker = MockWorker::answering(&["m"], json_reply(200, "{}")).await;
    let keys = TestFile::new("sk-app priority=5\nsk-other\n");
    let router = Router::start(&[
        &workers(&[&worker]),
        &keys.flag("api-key-file"),
        "--engine-priority=lower-first",
        "--background-load=off",
    ])
    .await;
    until("it is up", || async { router.get("/readyz").await.status == 200 }).await;
    let body = r#"{"model":"m","prompt":"a","priority":-99}"#;
    let told = async |path: &str, headers: &[(&str, &str)]| {
        let reply = exchange(router.address, "POST", path, headers, body.as_bytes()).await;
        assert_eq!(reply.status, 200);
        let body: serde_json::Value = serde_json::from_slice(&worker.seen().pop().unwrap().body).unwrap();
        body["priority"].clone()
    };
    let app = ("authorization", "Bearer sk-app");
    assert_eq!(told(PATH, &[app]).await, -5);
    assert_eq!(told(PATH, &[app, ("x-request-priority", "-2")]).await, 2);
    assert_eq!(told(PATH, &[("authorization", "Bearer sk-other"), ("x-request-priority", "3")]).await, 0);
    assert_eq!(told(PATH, &[app, ("content-encoding", "identity")]).await, -5);
    assert_eq!(told("/v1/embeddings", &[app]).await, -99, "as it came");
}

/// A worker that computes when told, and a router that has seen nothing of it yet.
async fn one_worker(more: &[&str]) -> (Arc<Notify>, MockWorker, Router) {
    let computes = Arc::new(Notify::new());
    let worker = line::worker(&computes).await;
    let router = Router::start(&[&[workers(&[&worker]).as_str()], more].concat()).await;
    until("it is up", || async { router.get("/readyz").await.status == 200 }).await;
    (computes, worker, router)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_background_waits_until_nobody_else_does() {
    let (computes, worker, router) = one_worker(&["--background-load=100%"]).await;
    let busy = send(&router, one("busy", &[]), 2_000);
    until("it is there", || async { worker.seen().len() == 1 }).await;
    let tier = One { name: "flex", headers: Vec::new(), tier: Some("flex") };
    let waiting = [send(&router, tier, 10), send(&router, one("low", &[("x-request-priority", "-2")]), 10)];
    until("they wait", || async { router.metric(IN_BACKGROUND).await == 2.0 }).await;
    // Others pass.
    assert_eq!(send(&router, one("usual", &[]), 10).await.unwrap().status, 200);
    assert_eq!(names(&worker, 0), ["busy", "usual"]);
    assert_eq!(router.metric(IN_LINE).await, 0.0, "they are in nobody's line");
    computes.notify_one();
    assert_eq!(busy.await.unwrap().status, 200);
    for one in waiting {
        assert_eq!(one.await.unwrap().status, 200);
    }
    assert_eq!(names(&worker, 2), ["flex", "low"], "a higher priority first");
    assert_eq!(router.metric(IN_BACKGROUND).await, 0.0);
    assert_eq!(router.metric("router_background_seconds_count").await, 2.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_the_background_wakes_the_next_one() {
    let (computes, worker, router) = one_worker(&["--background-load=100%"]).await;
    let busy = send(&router, one("busy", &[]), 2_000);
    until("it is there", || async { worker.seen().len() == 1 }).await;
    let low = || one("low", &[("x-request-priority", "-1")]);
    let first = send(&router, low(), 10);
    until("it waits", || async { router.metric(IN_BACKGROUND).await == 1.0 }).await;
    let second = send(&router, low(), 11);
    until("both wait", || async { router.metric(IN_BACKGROUND).await == 2.0 }).await;
    first.abort();
    until("one has left", || async { router.metric(IN_BACKGROUND).await == 1.0 }).await;
    computes.notify_one();
    assert_eq!(busy.await.unwrap().status, 200);
    assert_eq!(second.await.unwrap().status, 200);
    assert_eq!(worker.seen().len(), 2, "what nobody waits for is not sent");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_background_is_bounded_and_its_waits_have_an_end() {
    let (computes, worker, router) =
        one_worker(&["--max-background=1", "--model-timeouts=hurried total=1s"]).await;
    let busy = send(&router, one("busy", &[]), 2_000);
    until("it is there", || async { worker.seen().len() == 1 }).await;
    let low = || one("low", &[("x-request-priority", "-1")]);
    let waits = send(&router, low(), 10);
    until("it waits", || async { router.metric(IN_BACKGROUND).await == 1.0 }).await;
    let refused = send(&router, low(), 10).await.unwrap();
    let (message, code) = refused.error();
    assert_eq!(
        (refused.status, code.as_str(), refused.header("retry-after")),
        (429, "router_overloaded", "1")
    );
    assert!(message.contains("--max-background"), "{message}");
    waits.abort();
    until("it has left", || async { router.metric(IN_BACKGROUND).await == 0.0 }).await;
    let hurried = line::prompt("low", 10).replace("\"m\"", "\"hurried\"");
    let headers = [("x-request-priority", "-1")];
    let late = exchange(router.address, "POST", PATH, &headers, hurried.as_bytes()).await;
    let (message, code) = late.error();
    assert_eq!((late.status, code.as_str(), late.header("retry-after")), (503, "no_worker_available", "1"));
    assert!(message.contains("within 1 s (--request-timeout)"), "{message}");
    computes.notify_one();
    assert_eq!(busy.await.unwrap().status, 200);
    assert_eq!(worker.seen().len(), 1, "nothing of it was sent");
}

#[tokio::test(flavor = "multi_thread")]
async fn who_cannot_be_served_does_not_wait_in_the_background() {
    let (_computes, _worker, router) = one_worker(&[]).await;
    let unknown = line::prompt("low", 10).replace("\"m\"", "\"nobody's\"");
    let headers = [("x-request-priority", "-1")];
    let reply = exchange(router.address, "POST", PATH, &headers, unknown.as_bytes()).await;
    assert_eq!((reply.status, reply.error().1.as_str()), (404, "model_not_found"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_header_that_says_no_priority_is_told() {
    let (_computes, worker, router) = one_worker(&[]).await;
    let reply = send(&router, one("odd", &[("x-request-priority", "urgent")]), 1).await.unwrap();
    let (message, _) = reply.error();
    assert_eq!((reply.status, reply.json()["error"]["type"].as_str()), (400, Some("invalid_request_error")));
    assert!(message.contains("x-request-priority") && message.contains("from -10 to 10"), "{message}");
    assert!(worker.seen().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_asks_why_is_told_of_the_priority() {
    let (_computes, _worker, router) = one_worker(&[]).await;
    let body = json!({"model": "m", "prompt": "x", "service_tier": "flex"}).to_string();
    let told = router.admin("POST", "/explain", &body).await.json();
    assert_eq!((&told["priority"], &told["waits_for_spare_time"]), (&json!(-1), &json!(true)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_dies_takes_nothing_of_the_background_along() {
    let computes = Arc::new(Notify::new());
    let (first, second) = (line::worker(&computes).await, line::worker(&computes).await);
    let router =
        Router::start(&[&workers(&[&first, &second]), "--background-load=100%", "--probe-interval=100ms"])
            .await;
    until("it is up", || async { router.get("/readyz").await.status == 200 }).await;
    let low = || one("low", &[("x-request-priority", "-1")]);
    let sent: Vec<_> = (0..6).map(|number| send(&router, low(), 2_000 + number)).collect();
    until("each computes one", || async { first.seen().len() + second.seen().len() >= 2 }).await;
    first.kill().await;
    until("all are answered", || async {
        computes.notify_one();
        sent.iter().all(JoinHandle::is_finished)
    })
    .await;
    for one in sent {
        assert_eq!(one.await.unwrap().status, 200);
    }
}
