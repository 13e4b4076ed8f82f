//! Requests that wait in the router while their worker has enough to compute.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tokio::sync::Notify;

use crate::harness::*;

pub(crate) const IN_LINE: &str = "router_worker_requests_in_line";

pub(crate) fn prompt(name: &str, words: usize) -> String {
    json!({"model": "m", "stream": true, "prompt": format!("{name} ").repeat(words)}).to_string()
}

/// One that computes long prompts when the test says so, each when told once, and short ones in a time that goes by their length.
pub(crate) async fn worker(computes: &Arc<Notify>) -> MockWorker {
    let computes = Arc::clone(computes);
    MockWorker::start(&["m", "hurried"], move |seen| {
        let (length, reply) = (seen.body.len(), Act::Write(sse_reply(&["[DONE]"])));
        let first = if length < 1_000 {
            Act::Take(Duration::from_micros(50 * length as u64))
        } else {
            Act::Wait(Arc::clone(&computes))
        };
        vec![first, reply]
    })
    .await
}

/// A router in front of them that has seen first tokens of each.
async fn router(workers_there: &[&MockWorker], more: &[&str]) -> Router {
    let all = workers(workers_there);
    let arguments = [&[all.as_str()], more].concat();
    let router = Router::start(&arguments).await;
    until("it is up", || async { router.get("/readyz").await.status == 200 }).await;
    has_seen_first_tokens(&router, workers_there).await;
    router
}

/// Sends short prompts until each of the workers has shown some first tokens.
pub(crate) async fn has_seen_first_tokens(router: &Router, workers_there: &[&MockWorker]) {
    let has_told = |worker: &&MockWorker| worker.seen().len() >= 20;
    for number in 0..1_000 {
        if workers_there.iter().all(has_told) {
            break;
        }
        let short = prompt(&number.to_string(), 10 * (number % 20));
        assert_eq!(router.post("/v1/completions", &short).await.status, 200);
    }
    assert!(workers_there.iter().all(has_told), "each has had its share");
}

/// Sends long prompts, one after the other, each once the one before is in flight.
pub(crate) fn send_long<'a>(router: &'a Router, names: &'a [&str]) -> Vec<tokio::task::JoinHandle<Reply>> {
    let address = router.address;
    names
        .iter()
        .map(|name| {
            let body = prompt(name, 200_000);
            tokio::spawn(
                async move { exchange(address, "POST", "/v1/completions", &[], body.as_bytes()).await },
            )
        })
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_gets_the_next_prompt_when_it_has_computed_one() {
    let computes = Arc::new(Notify::new());
    let worker = worker(&computes).await;
    let router = router(&[&worker], &[]).await;
    let before = worker.seen().len();
    let sent = send_long(&router, &["one", "two", "three", "four"]);
    until("two are in line", || async { router.metric(IN_LINE).await == 2.0 }).await;
    until("two are there", || async { worker.seen().len() == before + 2 }).await;
    computes.notify_one();
    // Or both: what the first took, which is chance here, tells how much the others owe.
    until("another is there", || async { worker.seen().len() >= before + 3 }).await;
    computes.notify_one();
    until("all are there", || async { worker.seen().len() == before + 4 }).await;
    until("and wait", || async {
        computes.notify_waiters();
        sent.iter().all(tokio::task::JoinHandle::is_finished)
    })
    .await;
    for one in sent {
        assert_eq!(one.await.unwrap().status, 200);
    }
    assert_eq!(router.metric("router_line_seconds_count").await, 2.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn who_waits_for_a_worker_that_dies_goes_to_another() {
    let computes = Arc::new(Notify::new());
    let (first, second) = (worker(&computes).await, worker(&computes).await);
    let router = router(&[&first, &second], &["--probe-interval=100ms"]).await;
    let before = second.seen().len();
    let sent = send_long(&router, &["one", "two", "three", "four", "five", "six"]);
    let in_line = || async {
        let text = router.admin("GET", "/metrics", "").await.text();
        let lines = text.lines().filter(|line| line.starts_with(IN_LINE));
        lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum::<f64>()
    };
    until("two are in line", || async { in_line().await == 2.0 }).await;
    first.kill().await;
    let done = || sent.iter().all(tokio::task::JoinHandle::is_finished);
    until("all are done", || async {
        computes.notify_waiters();
        done()
    })
    .await;
    for one in sent {
        assert_eq!(one.await.unwrap().status, 200);
    }
    assert_eq!(second.seen().len() - before, 6, "its own, those that the other had, and those in line");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_loses_its_place_in_line() {
    let computes = Arc::new(Notify::new());
    let worker = worker(&computes).await;
    let router = router(&[&worker], &[]).await;
    let before = worker.seen().len();
    let there = send_long(&router, &["one", "two"]);
    until("two are there", || async { worker.seen().len() == before + 2 }).await;
    let in_line = send_long(&router, &["three"]);
    until("one is in line", || async { router.metric(IN_LINE).await == 1.0 }).await;
    in_line.iter().for_each(tokio::task::JoinHandle::abort);
    until("nobody is in line", || async { router.metric(IN_LINE).await == 0.0 }).await;
    there.iter().for_each(tokio::task::JoinHandle::abort);
    until("nothing is in flight", || async { router.metric("router_requests_in_flight").await == 0.0 }).await;
    assert_eq!(worker.seen().len(), before + 2, "what nobody waits for is not sent");
    assert_eq!(router.metric("router_line_seconds_count").await, 1.0, "but has waited");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wait_in_line_has_an_end() {
    let computes = Arc::new(Notify::new());
    let worker = worker(&computes).await;
    let router = router(&[&worker], &["--model-timeouts=hurried total=1s"]).await;
    let before = worker.seen().len();
    let sent = send_long(&router, &["one", "two"]);
    until("they are there", || async { worker.seen().len() == before + 2 }).await;
    let hurried = prompt("three", 200_000).replace("\"m\"", "\"hurried\"");
    let refused = router.post("/v1/completions", &hurried).await;
    assert_eq!((refused.status, refused.header("retry-after")), (503, "1"));
    let (message, code) = refused.error();
    assert!(message.contains("within 1 s (--request-timeout)") && code == "no_worker_available", "{message}");
    assert_eq!(worker.seen().len(), before + 2, "nothing was sent anywhere");
    assert!(router.metric("router_line_seconds_sum").await >= 0.9, "a wait for nothing is one too");
    sent.iter().for_each(tokio::task::JoinHandle::abort);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_late_binding_all_are_sent_at_once() {
    let computes = Arc::new(Notify::new());
    let worker = worker(&computes).await;
    let router = router(&[&worker], &["--late-binding=off"]).await;
    let before = worker.seen().len();
    let sent = send_long(&router, &["one", "two", "three", "four"]);
    until("all are there", || async { worker.seen().len() == before + 4 }).await;
    sent.iter().for_each(tokio::task::JoinHandle::abort);
}
