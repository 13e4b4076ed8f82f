//! Streams that break off are gone on with by another worker.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use serde_json::{Value, json};
use tokio::sync::Notify;

use crate::harness::*;

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
pub(crate) const MODEL: &str = "vllm-m";

fn event(id: &str, choice: &Value) -> String {
    json!({"id": id, "choices": [choice], "usage": null}).to_string()
}

fn delta(id: &str, delta: &Value) -> String {
    event(id, &json!({"index": 0, "delta": delta, "finish_reason": null}))
}

pub(crate) fn opening(id: &str) -> String {
    delta(id, &json!({"role": "assistant", "content": ""}))
}

pub(crate) fn content(id: &str, text: &str) -> String {
    delta(id, &json!({"content": text}))
}

pub(crate) fn stop(id: &str) -> String {
    event(id, &json!({"index": 0, "delta": {}, "finish_reason": "stop"}))
}

pub(crate) fn usage(id: &str, prompt: usize, completion: usize) -> String {
    json!({"id": id, "choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}})
        .to_string()
}

pub(crate) fn events(events: &[String]) -> Vec<u8> {
    let events = events.iter().map(|event| chunk(&format!("data: {event}\n\n")));
    events.fold(sse_head(), |all, event| all.into_iter().chain(event).collect())
}

fn text_event(id: &str, text: &str) -> String {
    event(id, &json!({"index": 0, "text": text, "finish_reason": null}))
}

pub(crate) fn whole(list: &[String]) -> Vec<Act> {
    vec![Act::Write(events(list)), Act::Write(chunk("data: [DONE]\n\n")), Act::Write(last_chunk())]
}

/// Breaks off after these events.
pub(crate) fn breaks(list: &[String]) -> Vec<Act> {
    vec![Act::Write(events(list)), Act::Close]
}

/// One breaks off, whichever is asked first; the other is asked for the rest, and answers so.
pub(crate) async fn pair(model: &'static [&'static str], first: Vec<Act>, rest: Vec<Act>) -> [MockWorker; 2] {
    let asked = AtomicUsize::new(0);
    let script = move |_: &Seen| match asked.fetch_add(1, Ordering::SeqCst) {
        0 => first.clone(),
        _ => rest.clone(),
    };
    let script = Arc::new(script);
    let (one, other) = (Arc::clone(&script), script);
    [
        MockWorker::start(model, move |seen| one(seen)).await,
        MockWorker::start(model, move |seen| other(seen)).await,
    ]
}

/// Requests that stay at these workers, three at each, as long as they are held: of a request that is alone at workers that die it is supposed that it kills
/// them. Their body is one that the mocks do not answer, and the router takes workers in turn.
pub(crate) async fn others(
    router: &Router,
    mocks: &[MockWorker],
    (path, body): (&'static str, String),
) -> tokio::task::JoinSet<()> {
    let mut others = tokio::task::JoinSet::new();
    let (address, count) = (router.address, 3 * mocks.len());
    for _ in 0..count {
        let body = body.clone();
        others.spawn(async move { drop(exchange(address, "POST", path, &[], body.as_bytes()).await) });
    }
    let come = || mocks.iter().map(|mock| mock.seen().len()).sum::<usize>();
    until("others are there", || async { come() == count }).await;
    others
}

fn seen(mocks: &[MockWorker; 2]) -> Vec<Value> {
    let all = mocks.iter().flat_map(MockWorker::seen);
    all.map(|request| serde_json::from_slice(&request.body).unwrap()).collect()
}

/// What the client read: its events, and whether it ended well.
pub(crate) fn told(reply: &Reply) -> (Vec<Value>, bool) {
    let text = reply.text();
    let data: Vec<_> = text.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).collect();
    let events =
        data.iter().filter(|data| **data != "[DONE]").map(|data| serde_json::from_str(data).unwrap());
    (events.collect(), reply.whole && data.last() == Some(&"[DONE]"))
}

pub(crate) fn text_of(events: &[Value]) -> String {
    let text = |event: &Value| {
        let choice = &event["choices"][0];
        choice["text"].as_str().or(choice["delta"]["content"].as_str()).unwrap_or_default().to_owned()
    };
    events.iter().map(text).collect()
}

pub(crate) fn question(extra: &Value) -> String {
    let mut body = json!({"model": MODEL, "stream": true, "messages": [{"role": "user", "content": "x"}]});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body.to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn who_has_begun_to_read_is_not_in_the_background_any_more() {
    let computes = Arc::new(Notify::new());
    let start = || {
        let computes = Arc::clone(&computes);
        MockWorker::start(&[MODEL], move |seen| {
            let body = String::from_utf8_lossy(&seen.body).into_owned();
            if body.contains("busy") {
                vec![Act::Wait(Arc::clone(&computes)), Act::Write(sse_reply(&["[DONE]"]))]
            } else if body.contains("given") {
                whole(&[text_event("b", " rest"), usage("b", 3, 1)])
            } else {
                breaks(&[text_event("a", " given")])
            }
        })
    };
    let mocks = [start().await, start().await];
    let router = Router::start(&[&workers(&[&mocks[0], &mocks[1]]), "--background-load=100%"]).await;
    let prompt = |text: &str| json!({"model": MODEL, "stream": true, "max_tokens": 9, "prompt": text});
    let (address, busy) = (router.address, prompt("busy").to_string());
    let busy =
        tokio::spawn(async move { exchange(address, "POST", COMPLETIONS, &[], busy.as_bytes()).await });
    until("one is busy", || async { mocks.iter().any(|mock| mock.seen().len() == 1) }).await;
    let mut flex = prompt("begin");
    flex["service_tier"] = "flex".into();
    let (events, is_whole) = told(&router.post(COMPLETIONS, &flex.to_string()).await);
    assert_eq!((text_of(&events).as_str(), is_whole), (" given rest", true));
    assert!(!busy.is_finished(), "nobody had time to spare for the rest");
    computes.notify_one();
    assert_eq!(busy.await.unwrap().status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chat_is_gone_on_with_and_its_client_sees_one_answer() {
    let beginning = breaks(&[opening("a"), content("a", "The"), content("a", " \"sky\"\n")]);
    let rest =
        whole(&[opening("b"), content("b", "is"), content("b", " blue"), stop("b"), usage("b", 12, 4)]);
    let mocks = pair(&[MODEL], beginning, rest).await;
    let router = Router::start(&[&workers(&[&mocks[0], &mocks[1]])]).await;
    let reply = router.post(CHAT, &question(&json!({"max_tokens": 20}))).await;
    let (events, is_whole) = told(&reply);
    assert!(is_whole, "{reply:?}");
    assert_eq!(text_of(&events), "The \"sky\"\nis blue");
    assert!(events.iter().all(|event| event["id"] == "a"), "{events:?}");
    let roles = events.iter().filter(|event| event["choices"][0]["delta"]["role"].is_string());
    assert_eq!(roles.count(), 1);
    assert_eq!(events.last().unwrap()["usage"], json!({"prompt_tokens": 10, "completion_tokens": 6}));
    let asked = seen(&mocks);
    // One engine is asked for the tokens as well, and does not tell them.
    let rest = asked.iter().rfind(|body| body["continue_final_message"] == true).unwrap();
    assert_eq!(rest["messages"][1], json!({"role": "assistant", "content": "The \"sky\"\n"}));
    assert_eq!((&rest["add_generation_prompt"], &rest["max_tokens"]), (&json!(false), &json!(18)));
    assert_eq!(router.metric("router_streams_continued_total").await, 1.0);
    assert_eq!(router.metric("router_errors_total{blame=\"worker\"}").await, 0.0);
    assert_eq!(router.metric("router_tokens_total{kind=\"completion\"}").await, 6.0);
    until("nothing is in flight", || async { router.metric("router_requests_in_flight").await == 0.0 }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_completion_is_gone_on_with_by_any_engine() {
    let mocks = pair(
        &["m"],
        breaks(&[text_event("a", " sky"), text_event("a", " is")]),
        whole(&[text_event("b", " blue")]),
    )
    .await;
    let router = Router::start(&[&workers(&[&mocks[0], &mocks[1]])]).await;
    let reply = router
        .post(
            COMPLETIONS,
            &json!({"model": "m", "prompt": "The", "stream": true, "max_tokens": 9}).to_string(),
        )
        .await;
    let (events, is_whole) = told(&reply);
    assert!(is_whole && text_of(&events) == " sky is blue", "{reply:?}");
    assert!(seen(&mocks).iter().any(|body| body["prompt"] == "The sky is"));
}

#[tokio::test(flavor = "multi_thread")]
async fn it_breaks_off_again_and_again() {
    let answers = |seen: &Seen| {
        let body: Value = serde_json::from_slice(&seen.body).unwrap();
        match body["messages"][1]["content"].as_str() {
            None => breaks(&[opening("a"), content("a", "one")]),
            Some("one") => breaks(&[opening("b"), content("b", " two")]),
            Some("one two") => whole(&[opening("c"), content("c", " three"), stop("c")]),
            Some(other) => panic!("{other}"),
        }
    };
    let mut mocks = Vec::new();
    for _ in 0..3 {
        mocks.push(MockWorker::start(&[MODEL], answers).await);
    }
    let router = Router::start(&[&workers(&mocks.iter().collect::<Vec<_>>())]).await;
    let mut clients = tokio::task::JoinSet::new();
    let address = router.address;
    for _ in 0..20 {
        clients.spawn(
            async move { exchange(address, "POST", CHAT, &[], question(&json!({})).as_bytes()).await },
        );
    }
    let mut finished = 0;
    for reply in clients.join_all().await {
        let (events, is_whole) = told(&reply);
        if is_whole {
            assert_eq!(text_of(&events), "one two three");
            finished += 1;
        } else {
            assert_eq!(events.last().unwrap()["error"]["code"], "worker_failed", "{reply:?}");
        }
    }
    assert!(finished > 0, "all were alone whenever a stream broke off");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_says_it_has_failed_is_not_believed_to_be_the_last() {
    let error = json!({"error": {"message": "EngineCore encountered an issue", "code": 500}}).to_string();
    // In one piece with the last of its text.
    let last = format!("data: {}\n\ndata: {error}\n\ndata: [DONE]\n\n", content("a", "The"));
    let fails = vec![Act::Write(events(&[opening("a")])), Act::Write(chunk(&last)), Act::Write(last_chunk())];
    let mocks = pair(&[MODEL], fails.clone(), whole(&[opening("b"), content("b", " sky"), stop("b")])).await;
    let router = Router::start(&[&workers(&[&mocks[0], &mocks[1]])]).await;
    let reply = router.post(CHAT, &question(&json!({}))).await;
    let (events, is_whole) = told(&reply);
    assert!(is_whole && text_of(&events) == "The sky", "{reply:?}");
    // Where nobody goes on, its own words are the end.
    let alone = MockWorker::start(&[MODEL], move |_| fails.clone()).await;
    let router = Router::start(&[&workers(&[&alone])]).await;
    let reply = router.post(CHAT, &question(&json!({}))).await;
    assert!(reply.text().contains(&error) && reply.text().ends_with("data: [DONE]\n\n"), "{reply:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_stands_still_is_gone_on_with() {
    let stands =
        vec![Act::Write(events(&[opening("a"), content("a", "The")])), Act::Wait(Arc::new(Notify::new()))];
    let mocks = pair(&[MODEL], stands, whole(&[content("b", " sky"), stop("b")])).await;
    let router = Router::start(&[&workers(&[&mocks[0], &mocks[1]]), "--idle-timeout=200ms"]).await;
    let (events, is_whole) = told(&router.post(CHAT, &question(&json!({}))).await);
    assert!(is_whole && text_of(&events) == "The sky", "{events:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_gone_on_with_ends_with_an_error() {
    let beginning = || breaks(&[opening("a"), content("a", "The")]);
    let rest = || whole(&[opening("b"), content("b", " sky"), stop("b")]);
    let refuses = || vec![Act::Write(json_reply(400, r#"{"error":{"message":"what?"}}"#))];
    let ended = || breaks(&[opening("a"), content("a", "The"), stop("a")]);
    let other = json!({"index": 1, "delta": {"content": "A"}, "finish_reason": null});
    let beside = breaks(&[opening("a"), content("a", "The"), stop("a"), event("a", &other)]);
    let late = json!({"error": {"message": "EngineCore encountered an issue", "code": 500}}).to_string();
    let fails_late = breaks(&[opening("a"), content("a", "The"), stop("a"), late]);
    let thinks = breaks(&[opening("a"), delta("a", &json!({"reasoning_content": "hm"}))]);
    for (why, body, first, rest, argument) in [
        ("it was not to be", json!({}), beginning(), rest(), "--continue-streams=off"),
        ("nobody knows how the engine draws", json!({"seed": 1}), beginning(), rest(), ""),
        ("the engine may not know how", json!({"model": "m"}), beginning(), rest(), ""),
        ("the other one refuses", json!({}), beginning(), refuses(), ""),
        ("half a thought", json!({}), thinks, rest(), ""),
        ("another choice has not begun", json!({"n": 2}), ended(), rest(), ""),
        ("another choice has not ended", json!({}), beside, rest(), ""),
        ("it fails behind its end", json!({}), fails_late, rest(), ""),
    ] {
        let models: &'static [&'static str] = if body["model"] == "m" { &["m"] } else { &[MODEL] };
        let mocks = pair(models, first, rest).await;
        let list = workers(&[&mocks[0], &mocks[1]]);
        let arguments: Vec<&str> =
            [list.as_str(), argument].into_iter().filter(|one| !one.is_empty()).collect();
        let router = Router::start(&arguments).await;
        let reply = router.post(CHAT, &question(&body)).await;
        let (events, _) = told(&reply);
        assert_eq!(events.last().unwrap()["error"]["code"], "worker_failed", "{why}: {reply:?}");
        assert!(!reply.whole && !reply.text().contains("[DONE]"), "{why}: {reply:?}");
        assert_eq!(router.metric("router_streams_continued_total").await, 0.0, "{why}");
        assert_eq!(router.metric("router_errors_total{blame=\"worker\"}").await, 1.0, "{why}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_breaks_off_behind_its_last_word_is_whole() {
    let all_given = breaks(&[opening("a"), content("a", "The sky"), stop("a")]);
    let mocks = pair(&[MODEL], all_given, whole(&[opening("b"), content("b", "!"), stop("b")])).await;
    let router = Router::start(&[&workers(&[&mocks[0], &mocks[1]])]).await;
    let reply = router.post(CHAT, &question(&json!({}))).await;
    let (events, is_whole) = told(&reply);
    assert!(is_whole && text_of(&events) == "The sky", "{reply:?}");
    assert_eq!(seen(&mocks).len(), 1, "nobody else was asked");
    assert_eq!(router.metric("router_errors_total{blame=\"worker\"}").await, 0.0);
    let broken: Vec<_> = (0..2)
        .map(|at| format!("router_worker_attempts_total{{outcome=\"broken\",worker=\"w{at}\"}}"))
        .collect();
    assert_eq!(router.metric(&broken[0]).await + router.metric(&broken[1]).await, 1.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_ends_without_saying_so_is_not_whole_where_its_worker_says_so_of_others() {
    // As behind a proxy that ends a body well whatever becomes of its origin; with the beginning of an event, or between two.
    let half = Bytes::from_static(b"data: {\"choices\":[{\"ind");
    for rest in [Bytes::new(), half] {
        let begins = move |seen: &Seen| {
            let body: Value = serde_json::from_slice(&seen.body).unwrap();
            if body["messages"][0]["content"] != "cut" {
                return whole(&[opening("a"), content("a", "all"), stop("a")]);
            }
            if body["messages"][1]["content"] == "The" {
                return whole(&[opening("b"), content("b", " sky"), stop("b")]);
            }
            let mut acts = vec![Act::Write(events(&[opening("a"), content("a", "The")]))];
            if !rest.is_empty() {
                acts.push(Act::Write(chunk(std::str::from_utf8(&rest).unwrap())));
            }
            acts.push(Act::Write(last_chunk()));
            acts
        };
        let mocks =
            [MockWorker::start(&[MODEL], begins.clone()).await, MockWorker::start(&[MODEL], begins).await];
        let router = Router::start(&[&workers(&[&mocks[0], &mocks[1]]), "--policy=round_robin"]).await;
        let ask = |text: &str| {
            let messages = json!([{"role": "user", "content": text}]);
            let body = question(&json!({ "messages": messages }));
            let router = &router;
            async move { router.post(CHAT, &body).await }
        };
        let unknown = ask("cut").await;
        assert!(unknown.whole && !unknown.text().contains("error"), "some may never say it: {unknown:?}");
        for _ in 0..2 {
            assert!(told(&ask("all").await).1);
        }
        let (events, is_whole) = told(&ask("cut").await);
        assert!(is_whole && text_of(&events) == "The sky", "{events:?}");
        assert_eq!(router.metric("router_streams_continued_total").await, 1.0);
    }
}

#[cfg(feature = "embedded")]
#[tokio::test(flavor = "multi_thread")]
async fn a_real_worker_goes_on_with_what_another_has_begun() {
    use tokio::io::AsyncWriteExt;

    use crate::grpc::{Served, router};

    for (path, body) in [
        (CHAT, json!({"messages": [{"role": "user", "content": "Tell me a story."}]})),
        (COMPLETIONS, json!({"prompt": "Once upon a time"})),
    ] {
        let (doomed, stays) = (Served::start().await, Served::start().await);
        let router = router(&[doomed.address, stays.address], &["--policy=round_robin"]).await;
        let mut body = body;
        let more = json!({"temperature": 0, "max_tokens": 400, "ignore_eos": true, "stream": true,
            "stream_options": {"include_usage": true}});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let (expected, is_whole) = told(&router.post(path, &body.to_string()).await);
        assert!(is_whole);
        // Each of them has one of these.
        let mut clients = Vec::new();
        for _ in 0..2 {
            let mut client = tokio::net::TcpStream::connect(router.address).await.unwrap();
            client.write_all(&request_bytes("POST", path, &[], body.to_string().as_bytes())).await.unwrap();
            clients.push(client);
        }
        for client in &clients {
            assert_eq!(client.peek(&mut [0]).await.unwrap(), 1, "it has begun");
        }
        drop(doomed);
        for mut client in clients {
            let reply = tokio::time::timeout(LIMIT, read_reply(&mut client)).await.unwrap();
            let (events, is_whole) = told(&reply);
            assert!(is_whole, "{reply:?}");
            // Not all of it is the same: a text that is read is not always cut into the tokens that it was written in.
            assert_eq!(text_of(&events)[..8], text_of(&expected)[..8]);
            let [usage, whole] = [&events, &expected].map(|events| &events.last().unwrap()["usage"]);
            assert_eq!(usage["completion_tokens"], whole["completion_tokens"]);
            let prompt_tokens = [usage, whole].map(|usage| usage["prompt_tokens"].as_u64().unwrap());
            assert!(prompt_tokens[0].abs_diff(prompt_tokens[1]) <= 8, "{prompt_tokens:?}");
        }
        assert_eq!(router.metric("router_streams_continued_total").await, 1.0);
    }
}
