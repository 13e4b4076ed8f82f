//! What the router makes of failures: whom it avoids, whom it asks again, and what it shows of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::Notify;

use crate::harness::*;

const CHAT: &str = "/v1/chat/completions";
const OK: &str = r#"{"ok":true}"#;

fn with_retry_after(status: u16, value: &str) -> Vec<u8> {
    format!("HTTP/1.1 {status} X\r\nretry-after: {value}\r\ncontent-length: 2\r\n\r\n{{}}").into_bytes()
}

async fn state(router: &Router, at: usize) -> serde_json::Value {
    router.admin("GET", "/workers", "").await.json()["workers"][at].clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_busy_worker_is_left_alone_for_as_long_as_it_says() {
    for status in [429, 503] {
        let busy = MockWorker::answering(&["m"], with_retry_after(status, "30")).await;
        let good = MockWorker::answering(&["m"], json_reply(200, OK)).await;
        let router = Router::start(&[&workers(&[&busy, &good]), "--policy=round_robin"]).await;
        for _ in 0..20 {
            assert_eq!(router.post(CHAT, &chat("x")).await.status, 200);
        }
        assert_eq!(busy.seen().len(), 1, "{status}");
        let left = state(&router, 0).await["cooling_s"].as_f64().unwrap();
        assert!(left > 0.0 && left <= 30.0, "{left}");
        assert_eq!(state(&router, 1).await["cooling_s"], 0.0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_worker_is_asked_again_when_there_is_no_other() {
    let worker = MockWorker::answering(&["m"], json_reply(200, OK)).await;
    let router = Router::start(&[&workers(&[&worker]), "--max-retries=5"]).await;
    worker.kill().await;
    let failed = "router_worker_attempts_total{outcome=\"failed\",worker=\"w0\"}";
    // A probe may find out before a request does; then there is nobody to ask.
    let reply = router.post(CHAT, &chat("x")).await;
    assert_eq!((reply.status, reply.error().1.as_str()), (503, "no_worker_available"));
    assert!(!reply.header("retry-after").is_empty());
    let attempts = router.metric(failed).await;
    assert!(attempts == 6.0 || attempts == 0.0 && reply.error().0.contains("down"), "{attempts} {reply:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_tells_more_than_a_dead_worker() {
    let sick = MockWorker::answering(&["m"], json_reply(503, "{\"sick\":1}")).await;
    let dead = MockWorker::answering(&["m"], json_reply(200, OK)).await;
    let router = Router::start(&[&workers(&[&sick, &dead]), "--policy=round_robin"]).await;
    dead.kill().await;
    for _ in 0..4 {
        let reply = router.post(CHAT, &chat("x")).await;
        assert_eq!((reply.status, reply.text().as_str()), (503, "{\"sick\":1}"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_used_up_budget_relays_the_failure() {
    let one = MockWorker::answering(&["m"], json_reply(503, "{\"worker\":1}")).await;
    let two = MockWorker::answering(&["m"], json_reply(503, "{\"worker\":1}")).await;
    let router = Router::start(&[&workers(&[&one, &two]), "--retry-budget=0%"]).await;
    let address = router.address;
    until("it is used up", || async {
        let mut clients = tokio::task::JoinSet::new();
        for _ in 0..50 {
            clients.spawn(async move { exchange(address, "POST", CHAT, &[], chat("x").as_bytes()).await });
        }
        for reply in clients.join_all().await {
            assert_eq!((reply.status, reply.text().as_str()), (503, "{\"worker\":1}"));
        }
        router.metric("router_retries_refused_total").await > 0.0
    })
    .await;
    let retries = router.metric("router_retries_total").await;
    assert!(retries >= 100.0, "the floor was there: {retries}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_third_500_is_not_asked_for() {
    let mut mocks = Vec::new();
    for _ in 0..4 {
        mocks.push(MockWorker::answering(&["m"], json_reply(500, "{}")).await);
    }
    let router = Router::start(&[&workers(&mocks.iter().collect::<Vec<_>>())]).await;
    assert_eq!(router.post(CHAT, &chat("x")).await.status, 500);
    assert_eq!(mocks.iter().map(|mock| mock.seen().len()).sum::<usize>(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_two_workers_have_died_of_is_not_given_to_a_third() {
    for acts in [vec![Act::Close], vec![Act::Reset], vec![Act::Write(sse_head()), Act::Close]] {
        let mut mocks = Vec::new();
        for _ in 0..4 {
            let acts = acts.clone();
            mocks.push(MockWorker::start(&["m"], move |_| acts.clone()).await);
        }
        let router = Router::start(&[&workers(&mocks.iter().collect::<Vec<_>>())]).await;
        let reply = router.post(CHAT, &chat("x")).await;
        assert_eq!((reply.status, reply.error().1.as_str()), (502, "worker_failed"));
        assert_eq!(mocks.iter().map(|mock| mock.seen().len()).sum::<usize>(), 2);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_was_at_two_workers_that_died_among_others_is_given_to_a_third() {
    let (mut mocks, mut ends) = (Vec::new(), Vec::new());
    for last in [Act::Close, Act::Close, Act::Write(json_reply(200, OK))] {
        let end = Arc::new(Notify::new());
        let acts = vec![Act::Wait(Arc::clone(&end)), last];
        mocks.push(MockWorker::start(&["m"], move |_| acts.clone()).await);
        ends.push(end);
    }
    let router = Router::start(&[&workers(&mocks.iter().collect::<Vec<_>>()), "--policy=round_robin"]).await;
    let address = router.address;
    let mut clients = tokio::task::JoinSet::new();
    for _ in 0..12 {
        clients.spawn(async move { exchange(address, "POST", CHAT, &[], chat("x").as_bytes()).await });
    }
    let seen = || mocks.iter().map(|mock| mock.seen().len()).collect::<Vec<_>>();
    until("all are there", || async { seen().iter().sum::<usize>() == 12 }).await;
    let at_first = seen()[0];
    ends[0].notify_waiters();
    until("they have gone on", || async { seen().iter().sum::<usize>() == 12 + at_first }).await;
    let at_second = seen()[1];
    assert!(
        at_first > 1 && at_second > 12 - at_first - seen()[2],
        "some are at their second one: {:?}",
        seen()
    );
    until("all are at the third, whatever died before", || async {
        ends[..2].iter().for_each(|end| end.notify_waiters());
        seen()[2] == 12
    })
    .await;
    ends[2].notify_waiters();
    for reply in clients.join_all().await {
        assert_eq!(reply.status, 200, "{}", reply.text());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_died_and_came_back_is_another() {
    let ends = [0, 1].map(|_| Arc::new(Notify::new()));
    let holds = |at: usize| {
        let acts = vec![Act::Wait(Arc::clone(&ends[at])), Act::Close];
        move |_: &Seen| acts.clone()
    };
    let first = MockWorker::start(&["m"], holds(0)).await;
    let second = MockWorker::start(&["m"], holds(1)).await;
    let router = Router::start(&[&workers(&[&first, &second]), "--policy=round_robin"]).await;
    let address = router.address;
    let mut clients = tokio::task::JoinSet::new();
    for _ in 0..8 {
        clients.spawn(async move { exchange(address, "POST", CHAT, &[], chat("x").as_bytes()).await });
    }
    until("all are there", || async { first.seen().len() + second.seen().len() == 8 }).await;
    let place = first.address;
    drop(first);
    until("all are at the second", || async { second.seen().len() == 8 }).await;
    until("the first is down", || async { state(&router, 0).await["up"] == false }).await;
    let back = MockWorker::start_at(place, &["m"], |_| vec![Act::Write(json_reply(200, OK))]).await;
    until("it is back", || async { state(&router, 0).await["up"] == true }).await;
    ends[1].notify_waiters();
    for reply in clients.join_all().await {
        assert_eq!(reply.status, 200, "{}", reply.text());
    }
    assert_eq!(back.seen().len(), 8);
}

#[tokio::test(flavor = "multi_thread")]
async fn time_limits_are_those_of_the_model() {
    let silent = |_: &Seen| vec![Act::Wait(Arc::new(Notify::new()))];
    let worker = MockWorker::start(&["m", "n"], silent).await;
    let other = MockWorker::start(&["m", "n"], silent).await;
    let limits = "--model-timeouts=n first-byte=500ms,m total=500ms";
    let router = Router::start(&[&workers(&[&worker, &other]), limits]).await;
    for (model, expected) in [("n", "no first byte within 0.5 s"), ("m", "not answered within 0.5 s")] {
        let reply = router.post(CHAT, &chat("x").replace("\"m\"", &format!("\"{model}\""))).await;
        assert_eq!((reply.status, reply.error().1.as_str()), (504, "worker_timeout"));
        assert!(reply.error().0.contains(expected), "{}", reply.error().0);
    }
    assert_eq!(router.metric("router_retries_total").await, 0.0, "neither was asked for elsewhere");
}

#[tokio::test(flavor = "multi_thread")]
async fn health_is_asked_for_where_the_operator_says() {
    let worker = MockWorker::answering(&["m"], json_reply(200, OK)).await;
    let list = workers(&[&worker]);
    let ready = Router::start(&[&list, "--probe-path=/well?deep=1"]).await;
    assert_eq!(ready.get("/readyz").await.status, 200);
    let unready = Router::start(&[&list, "--probe-path=/unwell"]).await;
    assert_eq!(unready.get("/readyz").await.status, 503);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_comes_back_begins_with_a_small_share() {
    let script = |_: &Seen| vec![Act::Write(json_reply(200, OK))];
    let (back, other) = (MockWorker::start(&["m"], script).await, MockWorker::start(&["m"], script).await);
    let address = back.address;
    // So long that its share does not grow while the test looks.
    let arguments = ["--slow-start=24h", "--policy=round_robin"];
    let router = Router::start(&[&[workers(&[&back, &other]).as_str()], &arguments[..]].concat()).await;
    assert_eq!(state(&router, 0).await["warming_share"], 1.0, "at the router's start all are alike");
    drop(back);
    until("it is out", || async {
        router.post(CHAT, &chat("x")).await;
        state(&router, 0).await["up"] == false
    })
    .await;
    let back = MockWorker::start_at(address, &["m"], script).await;
    until("it is back", || async { state(&router, 0).await["up"] == true }).await;
    let share = state(&router, 0).await["warming_share"].as_f64().unwrap();
    assert!((0.1..0.11).contains(&share), "{share}");
    for _ in 0..200 {
        assert_eq!(router.post(CHAT, &chat("x")).await.status, 200);
    }
    // 20 expected of 200; 60 would be nine standard deviations off, and half would be 100.
    assert!((1..60).contains(&back.seen().len()), "{}", back.seen().len());
    drop(other);
    assert_eq!(router.post(CHAT, &chat("x")).await.status, 200, "there is nobody else");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_breaker_opens_and_a_probe_closes_it() {
    let well = Arc::new(AtomicBool::new(false));
    let healed = Arc::clone(&well);
    let sick = MockWorker::start(&["m"], move |_| {
        let status = if well.load(Ordering::SeqCst) { 200 } else { 503 };
        vec![Act::Write(json_reply(status, OK))]
    })
    .await;
    let good = MockWorker::answering(&["m"], json_reply(200, OK)).await;
    let router = Router::start(&[&workers(&[&sick, &good]), "--policy=round_robin"]).await;
    for _ in 0..20 {
        assert_eq!(router.post(CHAT, &chat("x")).await.status, 200);
    }
    assert_ne!(state(&router, 0).await["breaker"], "closed");
    assert_eq!(state(&router, 0).await["usable"], true, "its health probes pass");
    let asked = sick.seen().len();
    healed.store(true, Ordering::SeqCst);
    until("it gets requests again", || async {
        assert_eq!(router.post(CHAT, &chat("x")).await.status, 200);
        state(&router, 0).await["breaker"] == "closed"
    })
    .await;
    assert!(sick.seen().len() > asked);
}

/// A stream of tokens that goes on for longer than a test.
fn tokens() -> Vec<Act> {
    let token = [Act::Write(chunk("data: {}\n\n")), Act::Take(Duration::from_millis(10))];
    let head = vec![Act::Write(sse_head())];
    head.into_iter().chain(token.into_iter().cycle().take(10_000)).collect()
}

/// A request whose reply nobody waits for, until dropped.
fn in_the_background(router: &Router, body: String) -> tokio::task::JoinHandle<Reply> {
    let address = router.address;
    tokio::spawn(async move { exchange(address, "POST", CHAT, &[], body.as_bytes()).await })
}

#[tokio::test(flavor = "multi_thread")]
async fn probes_that_are_late_take_nobody_out_whose_tokens_come() {
    let worker = MockWorker::start(&["m"], |_| tokens()).await;
    // Two late ones take out whoever says nothing for a second.
    let arguments = [&workers(&[&worker]), "--probe-interval=100ms", "--probe-timeout=1s"];
    let router = Router::start(&arguments).await;
    let stream = in_the_background(&router, chat("x"));
    until("it streams", || async {
        router.metric("router_worker_prefill_tokens{worker=\"w0\"}").await == 0.0 && !worker.seen().is_empty()
    })
    .await;
    worker.hang(true);
    until("many have gone unanswered", || async { worker.unanswered() >= 30 }).await;
    assert_eq!(state(&router, 0).await["up"], true);
    stream.abort();
    until("it is out, once its tokens have ended", || async { state(&router, 0).await["up"] == false }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_that_all_fail_their_probes_serve_on_and_are_not_forgotten() {
    let one = MockWorker::answering(&["m"], json_reply(200, OK)).await;
    let two = MockWorker::answering(&["m"], json_reply(200, OK)).await;
    let arguments = [&workers(&[&one, &two]), "--probe-interval=50ms", "--probe-timeout=200ms"];
    let router = Router::start(&arguments).await;
    let prompt = chat(&"a long story ".repeat(100));
    let home = router.post(CHAT, &prompt).await.header("x-router-worker").to_owned();
    one.hang(true);
    two.hang(true);
    let all_down = async || {
        let states = [state(&router, 0).await, state(&router, 1).await];
        states.iter().all(|state| state["up"] == false && state["down_by_probes_alone"] == true)
    };
    until("both are down", all_down).await;
    let reply = router.post(CHAT, &prompt).await;
    assert_eq!((reply.status, reply.header("x-router-worker")), (200, home.as_str()));
    assert!(reply.header("x-router-hit-tokens").parse::<usize>().unwrap() > 200);
    assert_eq!(router.get("/readyz").await.status, 200);
    assert_eq!(router.get("/v1/models").await.json()["data"][0]["id"], "m");
    let (at, other) = if home == "w0" { (0, two) } else { (1, one) };
    other.hang(false);
    until("one is back", || async { state(&router, 1 - at).await["up"] == true }).await;
    assert_ne!(router.post(CHAT, &prompt).await.header("x-router-worker"), home, "it comes first");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_hangs_while_its_probes_pass_is_left_alone() {
    let hangs = MockWorker::start(&["m"], |_| vec![Act::Wait(Arc::new(Notify::new()))]).await;
    let good = MockWorker::answering(&["m"], json_reply(200, OK)).await;
    let arguments = [&workers(&[&hangs, &good]), "--policy=round_robin", "--request-timeout=200ms"];
    let router = Router::start(&arguments).await;
    until("its breaker has opened", || async {
        router.post(CHAT, &chat("x")).await;
        state(&router, 0).await["breaker"] != "closed"
    })
    .await;
    assert_eq!(state(&router, 0).await["up"], true);
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_ask_too_much_are_no_failures_of_a_worker_that_answers_others() {
    let script = |seen: &Seen| match find(&seen.body, b"too much") {
        Some(_) => vec![Act::Wait(Arc::new(Notify::new()))],
        None => tokens(),
    };
    let worker = MockWorker::start(&["m", "n"], script).await;
    let router = Router::start(&[&workers(&[&worker]), "--model-timeouts=n total=100ms"]).await;
    let stream = in_the_background(&router, chat("x"));
    let prefilling = "router_worker_prefill_tokens{worker=\"w0\"}";
    until("it streams", || async { router.metric(prefilling).await == 0.0 && !worker.seen().is_empty() })
        .await;
    for _ in 0..10 {
        let reply = router.post(CHAT, &chat("too much").replace("\"m\"", "\"n\"")).await;
        assert_eq!(reply.status, 504);
    }
    assert_eq!(state(&router, 0).await["breaker"], "closed");
    stream.abort();
}
