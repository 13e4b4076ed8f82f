//! Workers that come and go by themselves: pods of a Kubernetes Service, and addresses of a name.

use std::net::SocketAddr;
use std::sync::Arc;

use router::app::App;
use router::config::Cli;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::sync::Notify;

use crate::harness::*;
use crate::kubernetes::{Api, End, TOKEN, pod, slice, slice_of};

const CHAT: &str = "/v1/chat/completions";
const SERVICE: &str = "workers";

fn answer() -> Vec<u8> {
    sse_reply(&[r#"{"choices":[{"delta":{"content":"hello"}}]}"#])
}

async fn worker() -> MockWorker {
    MockWorker::answering(&["m"], answer()).await
}

/// A router that is told nothing but where to find workers.
async fn follow(api: &Api, arguments: &[&str]) -> Router {
    let flags = api.flags();
    let all: Vec<_> = flags.iter().map(String::as_str).chain(arguments.iter().copied()).collect();
    Router::start(&all).await
}

/// Ids of the workers that requests may go to, sorted.
async fn usable(router: &Router) -> Vec<String> {
    let listed = router.admin("GET", "/workers", "").await.json();
    let workers = listed["workers"].as_array().unwrap().iter().filter(|worker| worker["usable"] == true);
    let mut ids: Vec<_> = workers.map(|worker| worker["id"].as_str().unwrap().to_owned()).collect();
    ids.sort_unstable();
    ids
}

async fn until_usable(router: &Router, ids: &[&str]) {
    until(&format!("{ids:?} are usable"), || async { usable(router).await == ids }).await;
}

async fn state_of(router: &Router, id: &str) -> Value {
    let listed = router.admin("GET", "/workers", "").await.json();
    listed["workers"]
        .as_array()
        .unwrap()
        .iter()
        .find(|worker| worker["id"] == id)
        .cloned()
        .unwrap_or_default()
}

async fn failures(router: &Router) -> f64 {
    router.metric("router_discovery_failures_total").await
}

/// Whom a request went to.
async fn asked(router: &Router) -> String {
    let reply = router.post(CHAT, &chat("hi")).await;
    assert_eq!((reply.status, reply.whole), (200, true), "{}", reply.text());
    reply.header("x-router-worker").to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn where_all_are_replaced_at_once_requests_wait_for_the_first_probes() {
    let (api, old, new) = (Api::start().await, worker().await, worker().await);
    api.put(SERVICE, "one", slice_of("vllm-0", old.address));
    let router = follow(&api, &["--workers=k8s://workers", "--probe-interval-down=50ms"]).await;
    until_usable(&router, &["vllm-0"]).await;
    new.hang(true);
    api.put(SERVICE, "one", slice_of("vllm-1", new.address));
    until("it is replaced", || async { state_of(&router, "vllm-0").await.is_null() && new.unanswered() > 0 })
        .await;
    let address = router.address;
    let early =
        tokio::spawn(async move { exchange(address, "POST", CHAT, &[], chat("hi").as_bytes()).await });
    until("it waits", || async { router.metric("router_requests_in_flight").await == 1.0 }).await;
    assert!(new.seen().is_empty());
    new.hang(false);
    let reply = early.await.unwrap();
    assert_eq!((reply.status, reply.header("x-router-worker")), (200, "vllm-1"), "{}", reply.text());
    // One that cannot be connected to is judged at once.
    new.kill().await;
    until("it is known to be gone", || async { usable(&router).await.is_empty() }).await;
    assert_eq!(router.post(CHAT, &chat("hi")).await.status, 503);
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_of_a_service_are_found_and_served() {
    let (api, one, two) = (Api::start().await, worker().await, worker().await);
    api.put(SERVICE, "one", slice_of("vllm-0", one.address));
    api.put(SERVICE, "two", slice_of("vllm-1", two.address));
    api.put("others", "three", slice_of("elsewhere-0", two.address));
    let router = follow(&api, &["--workers=k8s://workers", "--policy=round_robin"]).await;
    until_usable(&router, &["vllm-0", "vllm-1"]).await;
    let mut used = [asked(&router).await, asked(&router).await];
    used.sort_unstable();
    assert_eq!(used, ["vllm-0", "vllm-1"]);
    assert_eq!(state_of(&router, "vllm-0").await["source"], "k8s://workers");
    assert_eq!(router.metric("router_discovery_workers{source=\"k8s://workers\"}").await, 2.0);
    assert_eq!((failures(&router).await, router.get("/readyz").await.status), (0.0, 200));
    let (path, token) = api.asked()[0].clone();
    assert!(
        path.ends_with("/namespaces/ml/endpointslices?labelSelector=kubernetes.io%2Fservice-name%3Dworkers")
    );
    assert_eq!(token, TOKEN);
}

/// A worker that begins a stream, and goes on with it when it is told to.
async fn streaming() -> (MockWorker, Arc<Notify>) {
    let signal = Arc::new(Notify::new());
    let waits = Arc::clone(&signal);
    let worker = MockWorker::start(&["m"], move |_| {
        let rest = [chunk("data: 2\n\ndata: [DONE]\n\n"), last_chunk()].concat();
        vec![
            Act::Write([sse_head(), chunk("data: 1\n\n")].concat()),
            Act::Wait(Arc::clone(&waits)),
            Act::Write(rest),
        ]
    })
    .await;
    (worker, signal)
}

/// A stream that has begun.
async fn begin_stream(router: &Router, worker: &MockWorker) -> TcpStream {
    let mut stream = TcpStream::connect(router.address).await.unwrap();
    stream.write_all(&request_bytes("POST", CHAT, &[], chat("hi").as_bytes())).await.unwrap();
    until("it has begun", || async { worker.seen().len() == 1 }).await;
    let requests = || async { router.metric("router_requests_in_flight").await == 1.0 };
    until("it is in flight", requests).await;
    stream
}

/// A pod that streams, and another that came meanwhile.
struct Streaming {
    api: Api,
    router: Router,
    /// Named `a`, with the stream.
    one: MockWorker,
    /// Named `b`.
    two: MockWorker,
    /// Has the stream go on.
    signal: Arc<Notify>,
    stream: TcpStream,
}

async fn streaming_beside_another() -> Streaming {
    let (api, (one, signal), two) = (Api::start().await, streaming().await, worker().await);
    api.put(SERVICE, "one", slice_of("a", one.address));
    let router = follow(&api, &["--workers=k8s://workers"]).await;
    until_usable(&router, &["a"]).await;
    let stream = begin_stream(&router, &one).await;
    api.put(SERVICE, "two", slice_of("b", two.address));
    Streaming { api, router, one, two, signal, stream }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_is_gone_ends_its_stream_itself_and_another_takes_over() {
    let Streaming { api, router, one: _one, two: _two, signal, mut stream } =
        streaming_beside_another().await;
    until_usable(&router, &["a", "b"]).await;
    api.take(SERVICE, "one");
    until("it has left", || async { state_of(&router, "a").await.is_null() }).await;
    assert_eq!(asked(&router).await, "b");
    signal.notify_one();
    let reply = read_reply(&mut stream).await;
    assert!(reply.whole && reply.text().ends_with("data: 2\n\ndata: [DONE]\n\n"), "{}", reply.text());
    assert_eq!((api.counts().0, failures(&router).await), (1, 0.0), "events alone told of it");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_terminates_keeps_its_streams_and_gets_nothing_new() {
    let Streaming { api, router, one, two: _two, signal, mut stream } = streaming_beside_another().await;
    // Where a Service publishes addresses that are not ready, those that terminate are said to be ready.
    let leaving = json!({"ready": true, "serving": true, "terminating": true});
    api.put(SERVICE, "one", slice(one.address.port(), &[pod("a", "127.0.0.1", &leaving)]));
    until_usable(&router, &["b"]).await;
    let state = state_of(&router, "a").await;
    assert_eq!(
        (&state["draining"], &state["up"], &state["requests_in_flight"]),
        (&json!(true), &json!(true), &json!(1))
    );
    for _ in 0..3 {
        assert_eq!(asked(&router).await, "b");
    }
    // An operator cannot bring it back.
    assert_eq!(router.admin("POST", "/workers/a/undrain", "").await.status, 200);
    assert_eq!(usable(&router).await, ["b"]);
    signal.notify_one();
    assert!(read_reply(&mut stream).await.whole);
    api.take(SERVICE, "one");
    until("it has left", || async { state_of(&router, "a").await.is_null() }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_is_not_ready_gets_nothing_new_while_another_is() {
    let (api, one, two) = (Api::start().await, worker().await, worker().await);
    let of = |mock: &MockWorker, name: &str, ready: bool| {
        slice(mock.address.port(), &[pod(name, "127.0.0.1", &json!({"ready": ready}))])
    };
    api.put(SERVICE, "one", of(&one, "a", false));
    api.put(SERVICE, "two", of(&two, "b", true));
    let router = follow(&api, &["--workers=k8s://workers"]).await;
    until_usable(&router, &["b"]).await;
    api.put(SERVICE, "one", of(&one, "a", true));
    until_usable(&router, &["a", "b"]).await;
    api.put(SERVICE, "two", of(&two, "b", false));
    until_usable(&router, &["a"]).await;
    api.put(SERVICE, "one", of(&one, "a", false));
    until_usable(&router, &["a", "b"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_version_that_is_too_old_is_listed_anew() {
    let (api, one, two, three) = (Api::start().await, worker().await, worker().await, worker().await);
    api.put(SERVICE, "one", slice_of("a", one.address));
    let router = follow(&api, &["--workers=k8s://workers"]).await;
    until("it watches", || async { api.counts() == (1, 1) }).await;
    // Said in a watch that is running.
    api.put_unseen((SERVICE, "two"), slice_of("b", two.address), None);
    until_usable(&router, &["a", "b"]).await;
    until("it watches again", || async { api.counts() == (2, 2) }).await;
    // Said when a watch is to go on: one that has said something may have ended for any reason.
    api.bookmark(SERVICE);
    api.put(SERVICE, "one", slice_of("c", one.address));
    until_usable(&router, &["b", "c"]).await;
    api.put_unseen((SERVICE, "three"), slice_of("d", three.address), Some(End::Clean));
    until_usable(&router, &["b", "c", "d"]).await;
    assert_eq!((api.counts().0, failures(&router).await), (3, 0.0), "that is no failure");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watch_that_breaks_in_the_middle_of_a_line_goes_on_where_it_was() {
    let (api, one, two) = (Api::start().await, worker().await, worker().await);
    api.put(SERVICE, "one", slice_of("a", one.address));
    let router = follow(&api, &["--workers=k8s://workers"]).await;
    until("it watches", || async { api.counts() == (1, 1) }).await;
    api.put(SERVICE, "one", slice_of("b", one.address));
    until_usable(&router, &["b"]).await;
    let half = br#"{"type":"DELETED","object":{"metadata":{"name":"one","resourceVer"#.to_vec();
    for end in [End::Cut(half), End::Clean] {
        let (_, watches) = api.counts();
        api.end_watches(end);
        until("it watches again", || async { api.counts().1 > watches }).await;
        // Each watch must have said something, or the next failure is one.
        api.put(SERVICE, "two", slice_of(&format!("c{watches}"), two.address));
        until_usable(&router, &["b", &format!("c{watches}")]).await;
    }
    assert_eq!((api.counts().0, failures(&router).await), (1, 0.0), "nothing had to be listed");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_understood_is_listed_anew() {
    let (api, one) = (Api::start().await, worker().await);
    api.put(SERVICE, "one", slice_of("a", one.address));
    let router = follow(&api, &["--workers=k8s://workers"]).await;
    until_usable(&router, &["a"]).await;
    let error =
        json!({"type": "ERROR", "object": {"kind": "Status", "code": 500, "message": "etcd is slow"}});
    for line in [error.to_string().as_str(), "<html>", r#"{"type": "ADDED", "object": {"metadata": 5}}"#] {
        let (lists, watches) = api.counts();
        until("it watches", || async { api.counts().1 >= watches.max(1) }).await;
        let before = failures(&router).await;
        api.say(SERVICE, line);
        until("it fails", || async { failures(&router).await > before }).await;
        until("it lists", || async { api.counts().0 > lists }).await;
        until("it watches again", || async { api.counts().1 > watches }).await;
        assert_eq!(asked(&router).await, "a");
    }
    api.say(SERVICE, r#"{"type": "FUTURE", "object": {}}"#);
    api.put(SERVICE, "one", slice_of("b", one.address));
    until_usable(&router, &["b"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn while_the_api_is_gone_what_was_known_serves_on() {
    let (mut api, one, two) = (Api::start().await, worker().await, worker().await);
    api.put(SERVICE, "one", slice_of("a", one.address));
    let router = follow(&api, &["--workers=k8s://workers"]).await;
    until_usable(&router, &["a"]).await;
    api.stop();
    until("it fails", || async { failures(&router).await >= 3.0 }).await;
    assert_eq!((asked(&router).await.as_str(), router.get("/readyz").await.status), ("a", 200));
    let listed = router.admin("GET", "/workers", "").await.json();
    let failure = listed["sources"][0]["failure"].as_str().unwrap();
    assert!(failure.contains(&api.address.to_string()), "{failure}");
    // An operator's change does not lose what was found.
    let named = format!(r#"{{"url": "http://{}", "id": "named"}}"#, two.address);
    assert_eq!(router.admin("POST", "/workers", &named).await.status, 201);
    until_usable(&router, &["a", "named"]).await;
    assert_eq!(router.admin("DELETE", "/workers/named", "").await.status, 200);
    api.take(SERVICE, "one");
    api.put(SERVICE, "two", slice_of("b", two.address));
    assert_eq!(usable(&router).await, ["a"]);
    api.start_again().await;
    until_usable(&router, &["b"]).await;
    assert!(router.admin("GET", "/workers", "").await.json()["sources"][0]["failure"].is_null());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_router_starts_without_the_api_and_is_ready_once_it_has_been_heard() {
    let (mut api, one) = (Api::start().await, worker().await);
    api.put(SERVICE, "one", slice_of("a", one.address));
    api.stop();
    until("nobody listens", || async { TcpStream::connect(api.address).await.is_err() }).await;
    let router = follow(&api, &["--workers=k8s://workers"]).await;
    let ready = router.get("/readyz").await;
    assert_eq!(
        (ready.status, ready.text().contains("k8s://workers are not known")),
        (503, true),
        "{}",
        ready.text()
    );
    assert_eq!(router.get("/livez").await.status, 200);
    let reply = router.post(CHAT, &chat("hi")).await;
    assert_eq!((reply.status, reply.header("retry-after")), (503, "1"));
    api.start_again().await;
    until("it is ready", || async { router.get("/readyz").await.status == 200 }).await;
    assert_eq!(asked(&router).await, "a");
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_are_read_anew_and_told_to_nobody() {
    let (api, one, two) = (Api::start().await, worker().await, worker().await);
    api.put(SERVICE, "one", slice_of("a", one.address));
    let router = follow(&api, &["--workers=k8s://workers"]).await;
    until_usable(&router, &["a"]).await;
    api.expect_token("the-second-token");
    api.end_watches(End::Clean);
    until("it is refused", || async { failures(&router).await >= 2.0 }).await;
    let shown =
        [router.admin("GET", "/workers", "").await.text(), router.admin("GET", "/metrics", "").await.text()];
    assert!(shown[0].contains("401: Unauthorized"), "{}", shown[0]);
    assert!(shown.iter().all(|text| !text.contains(TOKEN)));
    assert_eq!(asked(&router).await, "a");
    assert!(one.seen().iter().all(|seen| !format!("{seen:?}").contains(TOKEN)), "workers are not shown it");
    api.put(SERVICE, "two", slice_of("b", two.address));
    std::fs::write(api.credentials.join("token"), "the-second-token\n").unwrap();
    until_usable(&router, &["a", "b"]).await;
    assert!(api.asked().iter().any(|(_, token)| token == "the-second-token"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_that_is_scaled_to_nothing_has_no_workers_and_comes_back() {
    let (api, one) = (Api::start().await, worker().await);
    api.put(SERVICE, "one", slice_of("a", one.address));
    let router = follow(&api, &["--workers=k8s://workers"]).await;
    until_usable(&router, &["a"]).await;
    api.put(SERVICE, "one", json!({"addressType": "IPv4", "ports": null, "endpoints": null}));
    until("it has left", || async { state_of(&router, "a").await.is_null() }).await;
    let (reply, ready) = (router.post(CHAT, &chat("hi")).await, router.get("/readyz").await);
    assert_eq!((reply.status, reply.header("retry-after").is_empty(), ready.status), (503, false, 503));
    api.put(SERVICE, "one", slice_of("a", one.address));
    until_usable(&router, &["a"]).await;
    assert_eq!((asked(&router).await.as_str(), router.get("/readyz").await.status), ("a", 200));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_comes_back_elsewhere_under_its_name_is_another_worker() {
    let (api, one, two) = (Api::start().await, worker().await, worker().await);
    api.put(SERVICE, "one", slice_of("vllm-0", one.address));
    let router = follow(&api, &["--workers=k8s://workers"]).await;
    until_usable(&router, &["vllm-0"]).await;
    assert_eq!(asked(&router).await, "vllm-0");
    api.put(SERVICE, "one", slice_of("vllm-0", two.address));
    let address = json!(format!("http://{}", two.address));
    until("it has moved", || async { state_of(&router, "vllm-0").await["address"] == address }).await;
    until_usable(&router, &["vllm-0"]).await;
    assert_eq!(asked(&router).await, "vllm-0");
    assert_eq!((one.seen().len(), two.seen().len()), (1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_port_is_the_one_that_was_named() {
    let (api, one) = (Api::start().await, worker().await);
    let port = one.address.port();
    let mut several = slice(port, &[pod("a", "127.0.0.1", &json!({}))]);
    several["ports"] = json!([{"name": "metrics", "port": 9}, {"name": "api", "port": port}]);
    api.put(SERVICE, "one", several);
    for (source, expected) in [
        ("k8s://workers:api".to_owned(), &["a"][..]),
        (format!("k8s://ml/workers:{port}"), &["a"]),
        ("k8s://workers".to_owned(), &[]),
    ] {
        let router = follow(&api, &[&format!("--workers=x={source}")]).await;
        let ids: Vec<_> = expected.iter().map(|id| format!("x-{id}")).collect();
        until_usable(&router, &ids.iter().map(String::as_str).collect::<Vec<_>>()).await;
        until("it is known", || async {
            router.admin("GET", "/workers", "").await.json()["sources"][0]["known"] == true
        })
        .await;
        assert_eq!(router.metric("router_discovery_workers").await as usize, expected.len());
    }
}

fn prefilled() -> Vec<u8> {
    json_reply(200, r#"{"choices":[],"kv_transfer_params":{"remote_engine_id":"e"}}"#)
}

#[tokio::test(flavor = "multi_thread")]
async fn those_that_compute_prompts_are_found_as_well() {
    let (api, decode) = (Api::start().await, worker().await);
    let prefill = MockWorker::answering(&["m"], prefilled()).await;
    api.put("decode", "one", slice_of("decode-0", decode.address));
    let router =
        follow(&api, &["--workers=k8s://decode", "--prefill=k8s://prefill", "--policy=round_robin"]).await;
    until_usable(&router, &["decode-0"]).await;
    let reply = router.post(CHAT, &chat("hi")).await;
    assert_eq!((reply.status, reply.header("x-router-prefill-worker")), (200, ""), "it does without");
    api.put("prefill", "two", slice_of("prefill-0", prefill.address));
    until_usable(&router, &["decode-0", "prefill-0"]).await;
    let reply = router.post(CHAT, &chat("hi")).await;
    assert_eq!((reply.status, reply.header("x-router-prefill-worker")), (200, "prefill-0"));
    assert_eq!(state_of(&router, "prefill-0").await["role"], "prefill");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_compute_prompts_is_not_asked_to_while_nobody_is_there_who_can() {
    let (api, decode) = (Api::start().await, worker().await);
    let prefill = MockWorker::answering(&["m"], json_reply(200, "{}")).await;
    api.put("decode", "one", slice_of("decode-0", decode.address));
    let sglang =
        ["--workers=k8s://decode", "--prefill=k8s://prefill?bootstrap_port=7", "--prefill-protocol=sglang"];
    let router = follow(&api, &sglang).await;
    until_usable(&router, &["decode-0"]).await;
    let (reply, ready) = (router.post(CHAT, &chat("hi")).await, router.get("/readyz").await);
    assert_eq!((reply.status, ready.status, decode.seen().len()), (503, 503, 0), "{}", reply.text());
    api.put("prefill", "two", slice_of("prefill-0", prefill.address));
    until_usable(&router, &["decode-0", "prefill-0"]).await;
    assert_eq!((asked(&router).await.as_str(), router.get("/readyz").await.status), ("decode-0", 200));
    assert!(String::from_utf8(decode.seen()[0].body.clone()).unwrap().contains(r#""bootstrap_port":7"#));
}

#[tokio::test(flavor = "multi_thread")]
async fn operators_drain_what_is_found_and_cannot_take_it_out_of_the_fleet() {
    let (api, one, two) = (Api::start().await, worker().await, worker().await);
    api.put(SERVICE, "one", slice_of("a", one.address));
    let named = format!("--workers=fixed={},k8s://workers", two.address);
    let router = follow(&api, &[&named]).await;
    until_usable(&router, &["a", "fixed"]).await;
    let refused = router.admin("DELETE", "/workers/a", "").await;
    assert_eq!(
        (refused.status, refused.error().0.contains("k8s://workers")),
        (409, true),
        "{}",
        refused.text()
    );
    let known = router.admin("POST", "/workers", r#"{"url": "http://127.0.0.1:9", "id": "a"}"#).await;
    assert_eq!(known.status, 409);
    assert_eq!(router.admin("POST", "/workers/a/drain", "").await.status, 200);
    // What a source says later does not undo it.
    api.put(SERVICE, "two", slice(9, &[pod("b", "127.0.0.1", &json!({"ready": true}))]));
    until("it has come", || async { !state_of(&router, "b").await.is_null() }).await;
    assert_eq!(usable(&router).await, ["fixed"]);
    assert_eq!(router.admin("POST", "/workers/a/undrain", "").await.status, 200);
    assert_eq!(usable(&router).await, ["a", "fixed"]);
    assert!(state_of(&router, "fixed").await["source"].is_null());
    assert_eq!(router.admin("DELETE", "/workers/fixed", "").await.status, 200);
    assert_eq!(usable(&router).await, ["a"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn addresses_of_a_name_are_workers() {
    let one = worker().await;
    let source = format!("dns://localhost:{}", one.address.port());
    let router = Router::start(&[&format!("--workers={source}")]).await;
    let id = format!("127.0.0.1-{}", one.address.port());
    until_usable(&router, &[&id]).await;
    assert_eq!(asked(&router).await, id);
    assert_eq!(state_of(&router, &id).await["source"], source);
    let nowhere = Router::start(&["--workers=dns://no-such-host.invalid:80"]).await;
    assert_eq!(nowhere.get("/readyz").await.status, 503);
    until("it fails", || async { failures(&nowhere).await >= 1.0 }).await;
}

#[tokio::test]
async fn a_router_that_cannot_know_the_namespace_does_not_start() {
    let arguments = [
        "--workers=k8s://workers",
        "--kubernetes-api=https://127.0.0.1:9",
        "--kubernetes-credentials=/nowhere",
    ];
    let config = Cli::configure(&arguments.map(str::to_owned), None).unwrap();
    let error = App::build(&config).err().unwrap().to_string();
    assert!(error.contains("/nowhere/namespace") && error.contains("k8s://NAMESPACE/workers"), "{error}");
}

/// Two pods of one slice have one port, and addresses of their own.
#[tokio::test(flavor = "multi_thread")]
async fn a_slice_has_many_pods() {
    let one = worker().await;
    let port = one.address.port();
    let two = MockWorker::start_at(SocketAddr::from(([127, 0, 0, 2], port)), &["m"], |_| {
        vec![Act::Write(answer())]
    });
    let (api, two) = (Api::start().await, two.await);
    let ready = || json!({"ready": true});
    api.put(SERVICE, "one", slice(port, &[pod("a", "127.0.0.1", &ready()), pod("b", "127.0.0.2", &ready())]));
    let router = follow(&api, &["--workers=k8s://workers", "--policy=round_robin"]).await;
    until_usable(&router, &["a", "b"]).await;
    for _ in 0..2 {
        asked(&router).await;
    }
    assert_eq!((one.seen().len(), two.seen().len()), (1, 1));
}

#[cfg(feature = "embedded")]
#[tokio::test(flavor = "multi_thread")]
async fn workers_that_are_found_may_speak_grpc() {
    let anywhere = SocketAddr::from(([127, 0, 0, 1], 0));
    let served = crate::grpc::Served::start_with(anywhere, |config| {
        config.kv_events = worker::config::KvEventRecording::On;
    })
    .await;
    let api = Api::start().await;
    api.put(SERVICE, "one", slice_of("worker-0", served.address));
    let router = follow(&api, &["--workers=k8s+grpc://workers"]).await;
    until_usable(&router, &["worker-0"]).await;
    let address = format!("grpc://{}", served.address);
    assert_eq!(state_of(&router, "worker-0").await["address"], address);
    let body = r#"{"model": "builtin", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}"#;
    let reply = router.post(CHAT, body).await;
    assert_eq!((reply.status, reply.header("x-router-worker")), (200, "worker-0"), "{}", reply.text());
    until("its cache is followed", || async {
        state_of(&router, "worker-0").await["cache_trust"] != "learned"
    })
    .await;
}
