//! Prompts that one worker computes and another goes on with: what either is told, and what is left when one of them fails.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Value, json};
use tokio::sync::Notify;

use crate::harness::*;

const CHAT: &str = "/v1/chat/completions";
/// What a prefill worker says, with a number that no float holds and a name that nobody knows.
const PARAMS: &str = r#"{"remote_block_ids": [[3, 5]], "remote_engine_id":"e", "x":18446744073709551615}"#;

pub(crate) fn prefilled() -> Vec<u8> {
    let usage = r#"{"prompt_tokens":40,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":16}}"#;
    json_reply(200, &format!(r#"{{"choices":[],"kv_transfer_params":{PARAMS},"usage":{usage}}}"#))
}

pub(crate) fn generated() -> Vec<u8> {
    sse_reply(&[r#"{"choices":[{"delta":{"content":"hello"}}]}"#])
}

fn body(seen: &Seen) -> Value {
    serde_json::from_slice(&seen.body).unwrap()
}

/// A router in front of workers that generate, and of others that compute prompts for them.
pub(crate) async fn router(generate: &[&MockWorker], prefill: &[&MockWorker], more: &[&str]) -> Router {
    let prefill_list = workers(prefill).replace("--workers", "--prefill");
    let all = workers(generate);
    let arguments = [&[all.as_str(), prefill_list.as_str()], more].concat();
    let router = Router::start(&arguments).await;
    let count = (generate.len() + prefill.len()) as f64;
    until("all are up", || async {
        let metrics = router.admin("GET", "/metrics", "").await.text();
        let up = metrics.lines().filter(|line| line.starts_with("router_worker_up{") && line.ends_with(" 1"));
        up.count() as f64 == count
    })
    .await;
    router
}

/// Splits whatever it can.
const ALWAYS: &str = "--policy=round_robin";

#[tokio::test(flavor = "multi_thread")]
async fn what_a_client_makes_up_about_kv_reaches_no_engine() {
    let prefill = MockWorker::answering(&["m"], prefilled()).await;
    let generate = MockWorker::answering(&["m"], generated()).await;
    let router = router(&[&generate], &[&prefill], &[ALWAYS]).await;
    // Of two answers the prompt is not computed elsewhere.
    let sent = r#"{"model":"m","n":2,"kv_transfer_params":{"do_remote_prefill":true},"bootstrap_room":1,"messages":[{"role":"user","content":"hi"}]}"#;
    let left = json!({"model": "m", "n": 2, "messages": [{"role": "user", "content": "hi"}]});
    for headers in [&[][..], &[("content-encoding", "identity")]] {
        assert_eq!(exchange(router.address, "POST", CHAT, headers, sent.as_bytes()).await.status, 200);
        let seen = generate.seen();
        assert_eq!(body(seen.iter().rfind(|seen| seen.path == CHAT).unwrap()), left, "{headers:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_computes_the_prompt_and_the_other_is_told_where_it_is() {
    let prefill = MockWorker::answering(&["m"], prefilled()).await;
    let generate = MockWorker::answering(&["m"], generated()).await;
    let router = router(&[&generate], &[&prefill], &[ALWAYS]).await;
    let sent = r#"{"model":"m","stream":true,"max_tokens":50,"stream_options":{"include_usage":true},"messages":[{"role":"user","content":"hi"}]}"#;
    let reply = exchange(
        router.address,
        "POST",
        CHAT,
        &[("accept-encoding", "gzip"), ("x-request-id", "r1")],
        sent.as_bytes(),
    )
    .await;
    assert_eq!((reply.status, reply.text().contains("hello")), (200, true));
    assert_eq!((reply.header("x-router-worker"), reply.header("x-router-prefill-worker")), ("w0", "p0"));
    let (first, second) = (&prefill.seen()[0], &generate.seen()[0]);
    for leg in [first, second] {
        assert_eq!((leg.path.as_str(), leg.headers["x-request-id"].as_str()), (CHAT, "r1"));
    }
    assert_eq!(body(first)["kv_transfer_params"]["do_remote_decode"], true);
    let asked: Vec<_> =
        ["stream", "max_tokens", "stream_options"].map(|name| body(first)[name].clone()).into();
    assert_eq!(asked, [json!(false), json!(1), Value::Null]);
    assert!(!first.headers.contains_key("accept-encoding") && second.headers.contains_key("accept-encoding"));
    let told = format!(r#"{{"kv_transfer_params":{PARAMS},{}"#, &sent[1..]);
    assert_eq!(String::from_utf8_lossy(&second.body), told);
    assert_eq!(router.metric("router_split_attempts_total").await, 1.0);
    assert_eq!(router.metric("router_retries_total").await, 0.0);
    assert_eq!(
        router.metric("router_cached_tokens_total{source=\"reported\"}").await,
        16.0,
        "the prefill worker's"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn without_anything_to_fetch_the_other_computes_the_prompt_itself() {
    let prefill = MockWorker::answering(&["m"], json_reply(200, r#"{"kv_transfer_params":null}"#)).await;
    let generate = MockWorker::answering(&["m"], generated()).await;
    let router = router(&[&generate], &[&prefill], &[ALWAYS]).await;
    let reply = router.post(CHAT, &chat("hi")).await;
    assert_eq!((reply.status, reply.header("x-router-prefill-worker")), (200, ""));
    assert_eq!(generate.seen()[0].body, chat("hi").as_bytes());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_two_cannot_serve_goes_to_one() {
    let prefill = MockWorker::answering(&["m"], prefilled()).await;
    let generate = MockWorker::answering(&["m"], generated()).await;
    let router = router(&[&generate], &[&prefill], &[ALWAYS]).await;
    let several = json!({"model": "m", "n": 2, "messages": []}).to_string();
    for (path, sent) in [(CHAT, several), ("/v1/embeddings", json!({"model": "m", "input": "x"}).to_string())]
    {
        assert_eq!(router.post(path, &sent).await.status, 200);
        assert_eq!(generate.seen().pop().unwrap().body, sent.as_bytes());
    }
    assert!(prefill.seen().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn prefill_workers_that_fail_are_done_without() {
    let busy = MockWorker::answering(&["m"], json_reply(503, "{}")).await;
    let dies = MockWorker::start(&["m"], |_| vec![Act::Reset]).await;
    let cut_off = MockWorker::start(&["m"], |_| {
        let whole = prefilled();
        vec![Act::Write(whole[..whole.len() - 9].to_vec()), Act::Close]
    })
    .await;
    let generate = MockWorker::answering(&["m"], generated()).await;
    for failing in [&busy, &dies, &cut_off] {
        let router = router(&[&generate], &[failing], &[ALWAYS]).await;
        let reply = router.post(CHAT, &chat("hi")).await;
        assert_eq!((reply.status, reply.header("x-router-prefill-worker")), (200, ""), "{}", reply.text());
        assert_eq!(failing.seen().len(), 1);
        assert_eq!(generate.seen().pop().unwrap().body, chat("hi").as_bytes());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_waits_for_a_prefill_worker_that_dies_is_served_without() {
    let never = Arc::new(Notify::new());
    let prefill = MockWorker::start(&["m"], move |_| vec![Act::Wait(Arc::clone(&never))]).await;
    let generate = MockWorker::answering(&["m"], generated()).await;
    let router = router(&[&generate], &[&prefill], &[ALWAYS, "--probe-interval=100ms"]).await;
    let address = router.address;
    let send = |headers: &'static [(&str, &str)]| {
        tokio::spawn(
            async move { exchange(address, "POST", CHAT, headers, chat("a story").as_bytes()).await },
        )
    };
    let usual = send(&[]);
    until("it is there", || async { prefill.seen().len() == 1 }).await;
    let waits = send(&[("x-request-priority", "-1")]);
    until("it waits", || async { router.metric("router_requests_in_background").await == 1.0 }).await;
    prefill.kill().await;
    for reply in [usual, waits] {
        let reply = reply.await.unwrap();
        assert_eq!((reply.status, reply.header("x-router-prefill-worker")), (200, ""), "{}", reply.text());
    }
    assert_eq!(generate.seen().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn however_many_prefill_workers_fail_a_request_is_lost_with_none() {
    let mocks = [(); 5].map(|()| MockWorker::answering(&["m"], json_reply(500, "{}")));
    let [a, b, c, d, e] = mocks;
    let (a, b, c, d, e) = tokio::join!(a, b, c, d, e);
    let generate = MockWorker::answering(&["m"], generated()).await;
    let all = [&a, &b, &c, &d, &e];
    let router = router(&[&generate], &all, &[ALWAYS, "--max-retries=1"]).await;
    for _ in 0..5 {
        assert_eq!(router.post(CHAT, &chat("hi")).await.status, 200);
    }
    assert_eq!(all.iter().map(|mock| mock.seen().len()).sum::<usize>(), 5, "one each");
    assert_eq!(generate.seen().len(), 5);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_dies_before_it_generates_costs_another_attempt_and_no_more() {
    let prefill = MockWorker::answering(&["m"], prefilled()).await;
    let dies = MockWorker::start(&["m"], |_| vec![Act::Reset]).await;
    let generate = MockWorker::answering(&["m"], generated()).await;
    let router = router(&[&dies, &generate], &[&prefill], &[ALWAYS]).await;
    for _ in 0..4 {
        let reply = router.post(CHAT, &chat("hi")).await;
        assert_eq!((reply.status, reply.header("x-router-worker")), (200, "w1"));
    }
    assert!(!dies.seen().is_empty());
    let told = format!(r#"{{"kv_transfer_params":{PARAMS}"#);
    assert!(generate.seen().iter().all(|seen| seen.body.starts_with(told.as_bytes())));
    assert_eq!(
        prefill.seen().len(),
        4 + dies.seen().len(),
        "what one attempt fetched is not offered to the next"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_prefill_worker_refuses_is_refused() {
    let prefill = MockWorker::answering(&["m"], json_reply(400, r#"{"error":{"message":"too long"}}"#)).await;
    let generate = MockWorker::answering(&["m"], generated()).await;
    let router = router(&[&generate], &[&prefill], &[ALWAYS]).await;
    let reply = router.post(CHAT, &chat("hi")).await;
    assert_eq!((reply.status, reply.error().0.as_str()), (400, "too long"));
    assert!(generate.seen().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_while_its_prompt_is_computed_cancels_that() {
    let left = Arc::new(Notify::new());
    let told = Arc::clone(&left);
    let prefill = MockWorker::start(&["m"], move |_| vec![Act::TellWhenClosed(Arc::clone(&told))]).await;
    let generate = MockWorker::answering(&["m"], generated()).await;
    let router = router(&[&generate], &[&prefill], &[ALWAYS]).await;
    let asked = tokio::spawn({
        let address = router.address;
        async move { exchange(address, "POST", CHAT, &[], chat("hi").as_bytes()).await }
    });
    until("it is there", || async { prefill.seen().len() == 1 }).await;
    asked.abort();
    tokio::time::timeout(LIMIT, left.notified()).await.expect("the prefill was cancelled");
    until("nothing is held", || async { router.metric("router_in_flight_requests").await == 0.0 }).await;
    let workers = router.admin("GET", "/workers", "").await.json();
    assert!(
        workers["workers"].as_array().unwrap().iter().all(|worker| worker["requests_in_flight"] == 0),
        "{workers}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn sglangs_two_are_asked_at_once_and_know_the_same_room() {
    let begun = Arc::new(Notify::new());
    let (waits, begins) = (Arc::clone(&begun), Arc::clone(&begun));
    // Neither could answer if the other were not asked meanwhile.
    let prefill = MockWorker::start(&["m"], move |_| {
        begins.notify_one();
        vec![Act::Write(prefilled())]
    })
    .await;
    let generate =
        MockWorker::start(&["m"], move |_| vec![Act::Wait(Arc::clone(&waits)), Act::Write(generated())])
            .await;
    let bootstrap = format!("--prefill={}?bootstrap_port=7001", prefill.address);
    let arguments = [&workers(&[&generate]), bootstrap.as_str(), "--prefill-protocol=sglang"];
    let router = Router::start(&arguments).await;
    let mut rooms = Vec::new();
    for number in 1..=3 {
        until("it serves", || async { router.post(CHAT, &chat("hi")).await.status == 200 }).await;
        until("both were asked", || async {
            prefill.seen().len() == number && generate.seen().len() == number
        })
        .await;
        let (one, other) = (body(&prefill.seen()[number - 1]), body(&generate.seen()[number - 1]));
        assert_eq!((&one["stream"], &other["stream"]), (&json!(false), &json!(true)));
        for name in ["bootstrap_host", "bootstrap_port", "bootstrap_room", "messages"] {
            assert_eq!(one[name], other[name]);
        }
        assert_eq!((&one["bootstrap_host"], &one["bootstrap_port"]), (&json!("127.0.0.1"), &json!(7001)));
        rooms.push(one["bootstrap_room"].as_u64().unwrap());
    }
    rooms.dedup();
    assert_eq!((rooms.len(), rooms.iter().all(|room| *room < 1 << 63)), (3, true));
    until("what was found cached is learned from", || async {
        router.metric("router_prefix_prediction_error_tokens_count{direction=\"under\"}").await >= 1.0
    })
    .await;
    until("nothing is held", || async {
        let workers = router.admin("GET", "/workers", "").await.json();
        workers["workers"].as_array().unwrap().iter().all(|worker| worker["requests_in_flight"] == 0)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn of_sglangs_two_one_that_fails_ends_the_other_and_both_are_asked_anew() {
    let (cancelled, computed) = (Arc::new(AtomicUsize::new(0)), Arc::new(Notify::new()));
    let fails = MockWorker::answering(&["m"], json_reply(500, "{}")).await;
    let computes = Arc::clone(&computed);
    let prefill = MockWorker::start(&["m"], move |_| {
        computes.notify_one();
        vec![Act::Write(generated())]
    })
    .await;
    let (asked, lets_go) = (AtomicUsize::new(0), Arc::clone(&cancelled));
    let generate = MockWorker::start(&["m"], move |_| match asked.fetch_add(1, Ordering::SeqCst) {
        // It would wait for ever for one whose prefill has failed.
        0 => vec![Act::CountWhenClosed(Arc::clone(&lets_go))],
        _ => vec![Act::Wait(Arc::clone(&computed)), Act::Write(generated())],
    })
    .await;
    let router = router(&[&generate], &[&fails, &prefill], &["--prefill-protocol=sglang", ALWAYS]).await;
    let reply = router.post(CHAT, &chat("hi")).await;
    assert_eq!((reply.status, reply.header("x-router-prefill-worker")), (200, "p1"), "{}", reply.text());
    until("the first was let go", || async { cancelled.load(Ordering::SeqCst) == 1 }).await;
    let rooms: Vec<_> = generate.seen().iter().map(|seen| body(seen)["bootstrap_room"].as_u64()).collect();
    assert!(rooms.len() == 2 && rooms[0] != rooms[1], "{rooms:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_prefill_sglangs_engines_cannot_serve() {
    let generate = MockWorker::answering(&["m"], generated()).await;
    let gone = MockWorker::answering(&["m"], generated()).await;
    let router = router(&[&generate], &[&gone], &["--prefill-protocol=sglang"]).await;
    gone.kill().await;
    let reply = router.post(CHAT, &chat("hi")).await;
    assert_eq!(reply.status, 503, "{}", reply.text());
    assert!(generate.seen().iter().all(|seen| seen.body != chat("hi").as_bytes()));
    until("it says so", || async { router.get("/readyz").await.text() == "no usable prefill worker\n" })
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_prompt_goes_elsewhere_once_many_would_wait_for_it() {
    let prefill = MockWorker::answering(&["m"], prefilled()).await;
    let first_piece =
        [sse_head(), chunk("data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n")].concat();
    let never = Arc::new(Notify::new());
    let generate = MockWorker::start(&["m"], move |seen| {
        if seen.body.len() < 1_000 {
            vec![Act::Write(first_piece.clone()), Act::Wait(Arc::clone(&never))]
        } else {
            vec![Act::Write(generated())]
        }
    })
    .await;
    let router = router(&[&generate], &[&prefill], &[]).await;
    let long = chat(&"many words ".repeat(20_000));
    let explained = router.admin("POST", "/explain", &long).await.json();
    assert!(explained["prefill"].is_null(), "nobody would wait for it: {explained}");
    let costs = &explained["split"];
    let cost = |name: &str| costs[name].as_f64().unwrap();
    assert_eq!(costs["pays"], false);
    assert!(cost("whole_s") < cost("prefill_s") + cost("decode_s") + 0.01, "{costs}");
    let mut streams = Vec::new();
    for number in 0..40 {
        let address = router.address;
        let short = chat(&format!("{number}"));
        streams
            .push(tokio::spawn(async move { exchange(address, "POST", CHAT, &[], short.as_bytes()).await }));
    }
    until("all decode", || async {
        let workers = router.admin("GET", "/workers", "").await.json();
        workers["workers"][0]["requests_in_flight"] == 40 && workers["workers"][0]["prefilling"] == 0
    })
    .await;
    let explained = router.admin("POST", "/explain", &long).await.json();
    assert_eq!((&explained["worker"], &explained["prefill"]["worker"]), (&json!("w0"), &json!("p0")));
    assert_eq!(explained["split"]["pays"], true);
    let reply = router.post(CHAT, &long).await;
    assert_eq!((reply.status, reply.header("x-router-prefill-worker")), (200, "p0"));
    streams.iter().for_each(tokio::task::JoinHandle::abort);
}

#[tokio::test(flavor = "multi_thread")]
async fn prefill_workers_come_and_go() {
    let generate = MockWorker::answering(&["m"], generated()).await;
    let prefill = MockWorker::answering(&["m"], prefilled()).await;
    let router = Router::start(&[&workers(&[&generate]), ALWAYS]).await;
    until("it serves", || async { router.post(CHAT, &chat("hi")).await.status == 200 }).await;
    let new = json!({"url": format!("http://{}", prefill.address), "role": "prefill"}).to_string();
    let added = router.admin("POST", "/workers", &new).await;
    assert_eq!((added.status, added.json()["id"].as_str()), (201, Some("p0")));
    until("it computes", || async {
        router.post(CHAT, &chat("hi")).await.header("x-router-prefill-worker") == "p0"
    })
    .await;
    assert_eq!(router.admin("GET", "/workers", "").await.json()["workers"][1]["role"], "prefill");
    router.admin("DELETE", "/workers/p0", "").await;
    let reply = router.post(CHAT, &chat("hi")).await;
    assert_eq!((reply.status, reply.header("x-router-prefill-worker")), (200, ""));
}
