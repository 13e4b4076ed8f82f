//! Where requests go, seen from outside.

use std::collections::HashMap;
use std::net::SocketAddr;

use crate::harness::*;

async fn fleet(count: usize) -> Vec<MockWorker> {
    let mut mocks = Vec::new();
    for _ in 0..count {
        mocks.push(MockWorker::answering(&["m"], json_reply(200, "{}")).await);
    }
    mocks
}

async fn start(mocks: &[MockWorker], policy: &str) -> Router {
    let mocks: Vec<_> = mocks.iter().collect();
    Router::start(&[&workers(&mocks), &format!("--policy={policy}")]).await
}

async fn worker_of(router: &Router, body: &str) -> String {
    let reply = router.post("/v1/chat/completions", body).await;
    assert_eq!(reply.status, 200);
    reply.header("x-router-worker").to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn prefix_aware_brings_a_conversation_back_and_spreads_new_ones() {
    let mocks = fleet(4).await;
    let router = start(&mocks, "prefix_aware").await;
    let mut home = HashMap::new();
    for turn in 0..3 {
        for talk in 0..8 {
            let history = format!("talk {talk}: {}", "and so on ".repeat(100 + 50 * turn));
            let reply = router.post("/v1/chat/completions", &chat(&history)).await;
            let worker = reply.header("x-router-worker").to_owned();
            let hit: usize = reply.header("x-router-hit-tokens").parse().unwrap();
            if turn > 0 {
                assert_eq!(home[&talk], worker, "turn {turn} of talk {talk}");
                assert!(hit > 200, "predicted {hit}");
            }
            home.insert(talk, worker);
        }
    }
    let mut load: HashMap<&str, usize> = HashMap::new();
    home.values().for_each(|worker| *load.entry(worker).or_default() += 1);
    assert!(load.len() == 4 && load.values().all(|talks| *talks == 2), "{load:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn round_robin_takes_turns() {
    let mocks = fleet(3).await;
    let router = start(&mocks, "round_robin").await;
    for _ in 0..9 {
        worker_of(&router, &chat("same")).await;
    }
    assert!(mocks.iter().all(|mock| mock.seen().len() == 3));
}

#[tokio::test(flavor = "multi_thread")]
async fn consistent_hash_follows_the_session() {
    let mocks = fleet(4).await;
    let router = start(&mocks, "consistent_hash").await;
    let mut homes = HashMap::new();
    for round in 0..3 {
        for session in ["a", "b", "c", "d", "e", "f"] {
            let body = chat(&format!("{round}{session}"));
            let headers = [("x-session-id", session)];
            let reply =
                exchange(router.address, "POST", "/v1/chat/completions", &headers, body.as_bytes()).await;
            let worker = reply.header("x-router-worker").to_owned();
            assert_eq!(*homes.entry(session).or_insert_with(|| worker.clone()), worker);
        }
    }
    let mut used: Vec<_> = homes.values().collect();
    used.sort_unstable();
    used.dedup();
    assert!(used.len() > 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn explain_says_who_and_why() {
    let mocks = fleet(3).await;
    let router = start(&mocks, "prefix_aware").await;
    let body = chat(&"a long shared story ".repeat(100));
    let home = worker_of(&router, &body).await;
    let explained = router.admin("POST", "/explain", &body).await.json();
    assert_eq!(explained["worker"], home.as_str());
    assert_eq!(explained["policy"], "prefix_aware");
    assert!(explained["why"].as_str().unwrap().contains(&home));
    assert_eq!(explained["later_turns_expected"], 0.0, "nobody has come back yet");
    let candidates = explained["candidates"].as_array().unwrap();
    assert_eq!(candidates.len(), 3);
    let cost = |candidate: &serde_json::Value| candidate["cost"].as_f64().unwrap();
    let chosen = candidates.iter().find(|candidate| candidate["worker"] == home.as_str()).unwrap();
    assert!(chosen["hit_tokens"].as_u64().unwrap() > 400);
    assert!(candidates.iter().all(|other| cost(other) >= cost(chosen)));
    assert_eq!(router.admin("POST", "/explain", "{").await.status, 400);
    let answer_tokens =
        || async { router.admin("POST", "/explain", &body).await.json()["answer_tokens_expected"].as_f64() };
    until("how long answers are is known", || async { answer_tokens().await > Some(0.0) }).await;
    let total: usize = mocks.iter().map(|mock| mock.seen().len()).sum();
    assert_eq!(total, 1, "explaining sends nothing");
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_come_and_go_while_it_runs() {
    let mocks = fleet(2).await;
    let router = start(&mocks[..1], "round_robin").await;
    let new = format!("{{\"url\": \"http://{}\", \"id\": \"late\"}}", mocks[1].address);
    assert_eq!(router.admin("POST", "/workers", &new).await.status, 201);
    assert_eq!(router.admin("POST", "/workers", &new).await.status, 409);
    let twice = router.admin("POST", "/workers", &new.replace("late", "later")).await;
    assert!(twice.status == 409 && twice.error().0.contains("late is at http://"), "{twice:?}");
    until("it is up", || async { router.metric("router_worker_up{worker=\"late\"}").await == 1.0 }).await;
    let used: Vec<_> = [worker_of(&router, &chat("a")).await, worker_of(&router, &chat("b")).await].into();
    assert!(used.contains(&"late".to_owned()));
    assert_eq!(router.admin("DELETE", "/workers/w0", "").await.status, 200);
    assert_eq!(router.admin("DELETE", "/workers/w0", "").await.status, 404);
    for _ in 0..3 {
        assert_eq!(worker_of(&router, &chat("c")).await, "late");
    }
    let listed = router.admin("GET", "/workers", "").await.json();
    assert_eq!(listed["workers"].as_array().unwrap().len(), 1);
    for (bad, expected) in [("{", "url"), ("{\"url\": \"ftp://a\"}", "scheme"), ("{\"uri\": \"a\"}", "uri")] {
        let reply = router.admin("POST", "/workers", bad).await;
        assert_eq!(reply.status, 400);
        assert!(reply.error().0.contains(expected), "{}", reply.text());
    }
    assert_eq!(router.admin("GET", "/nothing", "").await.status, 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_metrics_listener_shows_metrics_alone() {
    let mocks = fleet(1).await;
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let router = Router::start(&[&workers(&[&mocks[0]]), &format!("--metrics-listen={free}")]).await;
    assert_eq!(exchange(free, "GET", "/metrics", &[], b"").await.status, 200);
    assert_eq!(exchange(free, "GET", "/workers", &[], b"").await.status, 404);
    drop(router);
}

#[tokio::test(flavor = "multi_thread")]
async fn route_headers_can_be_left_out() {
    let mocks = fleet(1).await;
    let router = Router::start(&[&workers(&[&mocks[0]]), "--route-headers=off"]).await;
    let reply = router.post("/v1/chat/completions", &chat("x")).await;
    assert!(!reply.headers.contains_key("x-router-worker"));
    assert!(!reply.headers.contains_key("x-router-hit-tokens"));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_passes_is_recorded_as_a_trace_without_text() {
    let mocks = fleet(2).await;
    let path = std::env::temp_dir().join(format!("roundhouse-e2e-record-{}.jsonl", std::process::id()));
    let record = format!("--record={}", path.display());
    let router = Router::start(&[&workers(&[&mocks[0], &mocks[1]]), "--policy=round_robin", &record]).await;
    let story = "a secret story ".repeat(300);
    for ending in ["and a", "and b"] {
        assert_eq!(router.post("/v1/chat/completions", &chat(&format!("{story}{ending}"))).await.status, 200);
    }
    assert_eq!(router.post("/v1/chat/completions", "{").await.status, 400);
    assert_eq!(router.post("/tokenize", "{\"prompt\": \"x\"}").await.status, 200);
    router.stopped().await;
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert!(!text.contains("secret"), "{text}");
    let lines: Vec<serde_json::Value> =
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 2, "an error and what is not generated are not in it: {text}");
    for key in ["timestamp", "input_length", "output_length"] {
        assert!(lines[0][key].is_u64(), "{key}: {text}");
    }
    let blocks = |line: usize| lines[line]["hash_ids"].as_array().unwrap().clone();
    let shared = blocks(0).iter().zip(&blocks(1)).take_while(|(one, two)| one == two).count();
    assert!(shared >= 1, "both begin alike: {text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_added_at_once_are_all_there() {
    let worker = MockWorker::start(&["m"], |_| vec![Act::Close]).await;
    let router = Router::start(&[&workers(&[&worker])]).await;
    let adding = (1..=8).map(|port| {
        let admin = router.admin;
        tokio::spawn(async move {
            let body = format!(r#"{{"url": "http://127.0.0.1:{port}"}}"#);
            exchange(admin, "POST", "/workers", &[], body.as_bytes()).await
        })
    });
    let mut ids = Vec::new();
    for added in adding.collect::<Vec<_>>() {
        let added = added.await.unwrap();
        assert_eq!(added.status, 201, "{}", added.text());
        ids.push(added.json()["id"].as_str().unwrap().to_owned());
    }
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), 8);
    let listed = router.admin("GET", "/workers", "").await.json();
    assert_eq!(listed["workers"].as_array().unwrap().len(), 9);
    let gone = router.admin("DELETE", "/workers/w0", "").await;
    assert_eq!((gone.status, router.admin("DELETE", "/workers/w0", "").await.status), (200, 404));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_that_a_worker_may_bring_is_not_unknown() {
    let worker = MockWorker::start(&["m"], |_| vec![Act::Close]).await;
    let elsewhere = bind(SocketAddr::from(([127, 0, 0, 1], 0))).await.local_addr().unwrap();
    let router = Router::start(&[&format!("--workers={},{elsewhere}", worker.address)]).await;
    until("the first is up", || async {
        router.admin("GET", "/workers", "").await.json()["workers"][0]["models"][0] == "m"
    })
    .await;
    let reply = router.post("/v1/chat/completions", r#"{"model": "other", "messages": []}"#).await;
    assert_eq!((reply.status, reply.header("retry-after").is_empty()), (503, false), "{}", reply.text());
    router.admin("DELETE", "/workers/w1", "").await;
    let reply = router.post("/v1/chat/completions", r#"{"model": "other", "messages": []}"#).await;
    assert_eq!(reply.status, 404, "{}", reply.text());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_router_answers_itself_has_the_requests_id() {
    let worker = MockWorker::start(&["m"], |_| vec![Act::Close]).await;
    let router = Router::start(&[&workers(&[&worker])]).await;
    for (path, body) in
        [("/v1/chat/completions", "{"), ("/nowhere", ""), ("/v1/chat/completions", r#"{"model": "m"}"#)]
    {
        let reply =
            exchange(router.address, "POST", path, &[("x-request-id", "mine")], body.as_bytes()).await;
        assert!(reply.status >= 400);
        assert_eq!(reply.header("x-request-id"), "mine", "{path}");
    }
    assert!(!router.get("/v1/models").await.header("x-request-id").is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn forms_go_to_workers_that_list_their_model() {
    let one = MockWorker::answering(&["chat"], json_reply(200, "{}")).await;
    let two = MockWorker::answering(&["whisper"], json_reply(200, "{}")).await;
    let router = Router::start(&[&workers(&[&one, &two]), "--policy=round_robin"]).await;
    let form = |model: &str| {
        let file = "content-disposition: form-data; name=\"file\"; filename=\"a.wav\"";
        let named = format!("--xyz\r\ncontent-disposition: form-data; name=\"model\"\r\n\r\n{model}\r\n");
        format!("--xyz\r\n{file}\r\n\r\n{}\r\n{named}--xyz--\r\n", "sound".repeat(50_000))
    };
    let kind = [("content-type", "multipart/form-data; boundary=xyz")];
    let path = "/v1/audio/transcriptions";
    for _ in 0..4 {
        let body = form("whisper");
        let reply = exchange(router.address, "POST", path, &kind, body.as_bytes()).await;
        assert_eq!((reply.status, reply.header("x-router-worker")), (200, "w1"));
        assert_eq!(two.seen().last().unwrap().body, body.as_bytes(), "as it came");
    }
    let unknown = exchange(router.address, "POST", path, &kind, form("other").as_bytes()).await;
    assert_eq!((unknown.status, unknown.error().1.as_str()), (404, "model_not_found"));
    assert!(one.seen().is_empty());
    assert_eq!(router.metric("router_worker_models_known{worker=\"w0\"}").await, 1.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn where_workers_differ_a_request_has_to_name_its_model() {
    let one = MockWorker::answering(&["a", "adapter"], json_reply(200, "{}")).await;
    let two = MockWorker::answering(&["b"], json_reply(200, "{}")).await;
    let router = Router::start(&[&workers(&[&one, &two])]).await;
    for (path, body) in [("/v1/chat/completions", r#"{"messages":[]}"#), ("/generate", r#"{"text":"x"}"#)] {
        let reply = router.post(path, body).await;
        let (message, code) = reply.error();
        assert_eq!((reply.status, code.as_str()), (400, "model_required"), "{path}");
        assert!(message.contains("a, adapter, b"), "{message}");
        assert_eq!(reply.json()["error"]["param"], "model");
    }
    assert_eq!(router.admin("POST", "/explain", r#"{"messages":[]}"#).await.status, 400);
    assert!(one.seen().is_empty() && two.seen().is_empty());
    assert_eq!(router.post("/v1/something", "no JSON").await.status, 200, "nobody knows what it names");
    // All begin with the same model: that is what a request without one means, whatever adapters there are.
    let more = MockWorker::answering(&["b", "adapter"], json_reply(200, "{}")).await;
    let router = Router::start(&[&workers(&[&two, &more])]).await;
    assert_eq!(router.post("/v1/chat/completions", r#"{"messages":[]}"#).await.status, 200);
}
