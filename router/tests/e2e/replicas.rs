//! Routers in front of the same workers that tell each other what they do, over real sockets.

use std::path::PathBuf;
use std::sync::Arc;

use serde_json::{Value, json};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::sync::Notify;

use crate::harness::*;
use crate::line;

/// A file with a seed that routers share; gone when dropped.
struct Seed(PathBuf);

impl Seed {
    fn new(name: &str, text: &str) -> Self {
        let path = std::env::temp_dir().join(format!("roundhouse-replicas-{}-{name}", std::process::id()));
        std::fs::write(&path, text).unwrap();
        Self(path)
    }

    fn argument(&self) -> String {
        format!("--prefix-seed-file={}", self.0.display())
    }
}

impl Drop for Seed {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// So many ports of loopback where nobody listens.
fn free_ports(count: usize) -> Vec<u16> {
    let listeners: Vec<_> = (0..count).map(|_| std::net::TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    listeners.iter().map(|listener| listener.local_addr().unwrap().port()).collect()
}

/// A router that listens for others at `port`, where all are said to be at `ports`.
async fn replica(mocks: &[&MockWorker], seed: &Seed, (port, ports): (u16, &[u16]), more: &[&str]) -> Router {
    let all: Vec<_> = ports.iter().map(|port| format!("127.0.0.1:{port}")).collect();
    let (workers, listen) = (workers(mocks), format!("--replica-listen=127.0.0.1:{port}"));
    let (replicas, seed) = (format!("--replicas={}", all.join(",")), seed.argument());
    let arguments = [&workers, &listen, &replicas, &seed].map(String::as_str);
    Router::start(&[&arguments[..], more].concat()).await
}

async fn state(router: &Router) -> Value {
    router.admin("GET", "/replicas", "").await.json()
}

/// Waits until each of them tells and hears all others.
async fn all_know_each_other(routers: &[&Router]) {
    for router in routers {
        let others = routers.len() - 1;
        until("all know each other", || async {
            let state = state(router).await;
            let told =
                state["told"].as_array().unwrap().iter().filter(|way| way["is_connected"] == true).count();
            (told, state["heard"].as_array().unwrap().len()) == (others, others)
        })
        .await;
    }
}

async fn at_worker(router: &Router, number: usize, key: &str) -> Value {
    router.admin("GET", "/workers", "").await.json()["workers"][number][key].clone()
}

fn tale(text: &str) -> String {
    chat(&text.repeat(100))
}

async fn hit_tokens(router: &Router, text: &str) -> Vec<u64> {
    let explained = router.admin("POST", "/explain", &tale(text)).await.json();
    explained["candidates"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| one["hit_tokens"].as_u64().unwrap())
        .collect()
}

/// A worker that streams, and keeps streams open until told; and what tells it.
async fn holding() -> (MockWorker, Arc<Notify>) {
    let goes_on = Arc::new(Notify::new());
    let waits = Arc::clone(&goes_on);
    let worker = MockWorker::start(&["m"], move |_| {
        vec![
            Act::Write(sse_head()),
            Act::Write(chunk("data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n")),
            Act::Wait(Arc::clone(&waits)),
            Act::Write(chunk("data: [DONE]\n\n")),
            Act::Write(last_chunk()),
        ]
    });
    (worker.await, goes_on)
}

#[tokio::test(flavor = "multi_thread")]
async fn what_one_sends_is_in_flight_and_cached_for_the_other() {
    let (worker, goes_on) = holding().await;
    let (seed, ports) = (Seed::new("in-flight", "a seed of sixteen bytes or more"), free_ports(2));
    let one = replica(&[&worker], &seed, (ports[0], &ports), &[]).await;
    let other = replica(&[&worker], &seed, (ports[1], &ports), &[]).await;
    all_know_each_other(&[&one, &other]).await;
    let ranks = (state(&one).await["router_rank"].clone(), state(&other).await["router_rank"].clone());
    assert!(ranks == (json!(0), json!(1)) || ranks == (json!(1), json!(0)), "{ranks:?}");
    assert_eq!(hit_tokens(&other, "a tale").await, [0]);
    let client = tokio::spawn({
        let address = one.address;
        async move { exchange(address, "POST", "/v1/chat/completions", &[], tale("a tale").as_bytes()).await }
    });
    until("it is told", || async { at_worker(&other, 0, "replica_requests_in_flight").await == 1 }).await;
    assert_eq!(at_worker(&other, 0, "requests_in_flight").await, 0, "of its own it has none");
    assert_eq!(other.metric("router_worker_requests_in_flight{worker=\"w0\"}").await, 0.0);
    assert_eq!(other.metric("router_worker_replica_requests{worker=\"w0\"}").await, 1.0);
    assert_eq!(other.metric("router_replicas{direction=\"heard\"}").await, 1.0);
    until("it has begun", || async { at_worker(&other, 0, "prefilling").await == 0 }).await;
    assert!(hit_tokens(&other, "a tale").await[0] > 100);
    goes_on.notify_one();
    assert_eq!(client.await.unwrap().status, 200);
    until("it is over", || async { at_worker(&other, 0, "replica_requests_in_flight").await == 0 }).await;
    assert!(hit_tokens(&other, "a tale").await[0] > 100, "it is cached all the same");
}

#[tokio::test(flavor = "multi_thread")]
async fn one_decides_by_what_the_other_has_in_flight() {
    let ((busy, goes_on), idle) = (holding().await, holding().await.0);
    let (seed, ports) = (Seed::new("decides", "a seed of sixteen bytes or more"), free_ports(2));
    let policy = ["--policy=least_load"];
    let one = replica(&[&busy], &seed, (ports[0], &ports), &policy).await;
    let other = replica(&[&busy, &idle], &seed, (ports[1], &ports), &policy).await;
    all_know_each_other(&[&one, &other]).await;
    let client = tokio::spawn({
        let address = one.address;
        async move { exchange(address, "POST", "/v1/chat/completions", &[], tale("a tale").as_bytes()).await }
    });
    until("it is told", || async { at_worker(&other, 0, "replica_requests_in_flight").await == 1 }).await;
    for _ in 0..4 {
        let explained = other.admin("POST", "/explain", &tale("another")).await.json();
        assert_eq!(explained["worker"], "w1", "{explained}");
    }
    goes_on.notify_one();
    client.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_comes_later_is_told_what_is_in_flight_and_whoever_goes_takes_it_along() {
    let (worker, goes_on) = holding().await;
    let (seed, ports) = (Seed::new("later", "a seed of sixteen bytes or more"), free_ports(2));
    let mut one = replica(&[&worker], &seed, (ports[0], &ports), &["--grace-period=100ms"]).await;
    let client = tokio::spawn({
        let address = one.address;
        async move { exchange(address, "POST", "/v1/chat/completions", &[], tale("a tale").as_bytes()).await }
    });
    until("it is in flight", || async { at_worker(&one, 0, "requests_in_flight").await == 1 }).await;
    let other = replica(&[&worker], &seed, (ports[1], &ports), &[]).await;
    until("it is told", || async { at_worker(&other, 0, "replica_requests_in_flight").await == 1 }).await;
    until("it has begun", || async { at_worker(&other, 0, "prefilling").await == 0 }).await;
    assert!(hit_tokens(&other, "a tale").await[0] > 100);
    // One that is cut off before its requests are over: nobody says that they are.
    one.stop();
    one.stopped().await;
    until("it takes them along", || async { at_worker(&other, 0, "replica_requests_in_flight").await == 0 })
        .await;
    until("it is alone", || async { state(&other).await["routers"] == 1 }).await;
    goes_on.notify_one();
    let _ = client.await;
    let again = replica(&[&worker], &seed, (ports[0], &ports), &[]).await;
    all_know_each_other(&[&again, &other]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_with_two_addresses_is_told_at_one_of_them() {
    let (worker, goes_on) = holding().await;
    let (seed, ports) = (Seed::new("twice", "a seed of sixteen bytes or more"), free_ports(2));
    let one = replica(&[&worker], &seed, (ports[0], &ports), &[]).await;
    let twice = format!("--replicas=127.0.0.1:{0},localhost:{0}", ports[0]);
    let listen = format!("--replica-listen=127.0.0.1:{}", ports[1]);
    let other = Router::start(&[&workers(&[&worker]), &listen, &twice, &seed.argument()]).await;
    all_know_each_other(&[&one, &other]).await;
    let from = state(&one).await["heard"][0]["from"].clone();
    // Each would take the other's place several times in that time.
    for _ in 0..20 {
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        assert_eq!(state(&one).await["heard"][0]["from"], from);
    }
    goes_on.notify_one();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_failed_at_a_worker_is_not_expected_there_by_others() {
    let failing = MockWorker::answering(&["m"], json_reply(500, "{}")).await;
    let well = MockWorker::answering(&["m"], json_reply(200, r#"{"usage":{"prompt_tokens":200}}"#)).await;
    let (seed, ports) = (Seed::new("failed", "a seed of sixteen bytes or more"), free_ports(2));
    let one = replica(&[&failing, &well], &seed, (ports[0], &ports), &["--max-retries=3"]).await;
    let other = replica(&[&failing, &well], &seed, (ports[1], &ports), &[]).await;
    all_know_each_other(&[&one, &other]).await;
    for number in 0..8 {
        assert_eq!(one.post("/v1/chat/completions", &tale(&format!("tale {number}"))).await.status, 200);
    }
    assert!(!failing.seen().is_empty(), "it was asked");
    for number in 0..8 {
        let text = format!("tale {number}");
        until("it is expected where it went well", || async { hit_tokens(&other, &text).await[1] > 100 })
            .await;
        assert_eq!(hit_tokens(&other, &text).await[0], 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_one_has_sent_the_other_waits_for_in_line() {
    let computes = Arc::new(Notify::new());
    let worker = line::worker(&computes).await;
    let (seed, ports) = (Seed::new("line", "a seed of sixteen bytes or more"), free_ports(2));
    let one = replica(&[&worker], &seed, (ports[0], &ports), &[]).await;
    let other = replica(&[&worker], &seed, (ports[1], &ports), &[]).await;
    all_know_each_other(&[&one, &other]).await;
    line::has_seen_first_tokens(&one, &[&worker]).await;
    let before = worker.seen().len();
    let there = line::send_long(&one, &["one", "two"]);
    until("they are told", || async { at_worker(&other, 0, "replica_requests_in_flight").await == 2 }).await;
    let waiting = line::send_long(&other, &["three"]);
    for router in [&one, &other] {
        until("it is in line", || async { router.metric(line::IN_LINE).await == 1.0 }).await;
    }
    assert_eq!(worker.seen().len(), before + 2, "the worker has enough to compute, whoever sent it");
    computes.notify_one();
    until("it goes", || async { worker.seen().len() == before + 3 }).await;
    for router in [&one, &other] {
        until("nobody is in line", || async { router.metric(line::IN_LINE).await == 0.0 }).await;
    }
    until("all are done", || async {
        computes.notify_waiters();
        there.iter().chain(&waiting).all(tokio::task::JoinHandle::is_finished)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn strangers_and_garbage_are_not_heard() {
    let worker = MockWorker::answering(&["m"], json_reply(200, "{}")).await;
    let (seed, ports) = (Seed::new("known", "a seed of sixteen bytes or more"), free_ports(2));
    let strange = Seed::new("strange", "another seed of sixteen bytes");
    let one = replica(&[&worker], &seed, (ports[0], &ports), &[]).await;
    let stranger = replica(&[&worker], &strange, (ports[1], &ports), &[]).await;
    for garbage in [&b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"[..], &[0xff; 64], &[1, 0, 0, 0, 0xff], b""] {
        let mut stream = TcpStream::connect(("127.0.0.1", ports[0])).await.unwrap();
        stream.write_all(garbage).await.unwrap();
        stream.shutdown().await.unwrap();
        // It hangs up in its turn.
        let mut rest = Vec::new();
        let _ = tokio::time::timeout(LIMIT, tokio::io::AsyncReadExt::read_to_end(&mut stream, &mut rest))
            .await
            .unwrap();
    }
    assert_eq!(stranger.post("/v1/chat/completions", &tale("a tale")).await.status, 200);
    assert_eq!(one.post("/v1/chat/completions", &tale("a tale")).await.status, 200);
    for router in [&one, &stranger] {
        let state = state(router).await;
        assert_eq!((&state["routers"], &state["heard"]), (&json!(1), &json!([])), "{state}");
        assert!(state["told"].as_array().unwrap().iter().all(|way| way["is_connected"] == false), "{state}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn many_requests_through_three_routers_leave_nothing_booked() {
    let body = r#"{"usage":{"prompt_tokens":300,"prompt_tokens_details":{"cached_tokens":0}}}"#;
    let mocks = [
        MockWorker::answering(&["m"], json_reply(200, body)).await,
        MockWorker::answering(&["m"], json_reply(200, body)).await,
    ];
    let (seed, ports) = (Seed::new("three", "a seed of sixteen bytes or more"), free_ports(3));
    let both = [&mocks[0], &mocks[1]];
    let routers = [
        replica(&both, &seed, (ports[0], &ports), &[]).await,
        replica(&both, &seed, (ports[1], &ports), &[]).await,
        replica(&both, &seed, (ports[2], &ports), &[]).await,
    ];
    all_know_each_other(&[&routers[0], &routers[1], &routers[2]]).await;
    let mut clients = tokio::task::JoinSet::new();
    for number in 0..150 {
        let address = routers[number % 3].address;
        clients.spawn(async move {
            let body = tale(&format!("tale {}", number % 40));
            exchange(address, "POST", "/v1/chat/completions", &[], body.as_bytes()).await.status
        });
    }
    while let Some(status) = clients.join_next().await {
        assert_eq!(status.unwrap(), 200);
    }
    for router in &routers {
        for worker in 0..2 {
            until("nothing is booked", || async {
                at_worker(router, worker, "replica_requests_in_flight").await == 0
            })
            .await;
        }
        assert_eq!(router.metric("router_worker_prefill_tokens{worker=\"w0\"}").await, 0.0);
    }
}
