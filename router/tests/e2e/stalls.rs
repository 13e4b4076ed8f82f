//! Engines that hang while their servers answer probes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use crate::continuing::{MODEL, content, events, opening, question, stop, text_of, told, whole};
use crate::harness::*;

const CHAT: &str = "/v1/chat/completions";
const OK: &str = r#"{"ok":true}"#;
const FLAGS: [&str; 3] = ["--policy=round_robin", "--stall-timeout=200ms", "--probe-interval=20ms"];

/// A worker whose engine the test can hang.
struct Engine {
    mock: MockWorker,
    hangs: Arc<AtomicBool>,
    /// Questions of one token that have come.
    asked: Arc<AtomicUsize>,
}

/// How an engine that hangs answers: what it would not, if it did.
struct Hanging {
    stream: Vec<Act>,
    whole: Vec<Act>,
    question: Vec<Act>,
}

/// It does not at all, but for a stream's beginning.
fn hanging() -> Hanging {
    let beginning = vec![Act::Write(events(&[opening("a"), content("a", "The")]))];
    Hanging { stream: [beginning, never()].concat(), whole: never(), question: never() }
}

fn never() -> Vec<Act> {
    vec![Act::Wait(Arc::new(Notify::new()))]
}

fn ok() -> Vec<Act> {
    vec![Act::Write(json_reply(200, OK))]
}

/// What goes on with a stream that has begun.
fn rest(id: &str) -> Vec<Act> {
    whole(&[content(id, " sky"), stop(id)])
}

impl Engine {
    async fn start(models: &'static [&'static str], hanging: Hanging) -> Self {
        let (hangs, asked) = (Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
        let (flag, count) = (Arc::clone(&hangs), Arc::clone(&asked));
        let mock = MockWorker::start(models, move |seen| {
            let body: Value = serde_json::from_slice(&seen.body).unwrap();
            let (streams, hangs) = (body["stream"] == true, flag.load(Ordering::SeqCst));
            if seen.path == "/v1/completions" {
                assert_eq!((&body["model"], &body["max_tokens"]), (&json!(MODEL), &json!(1)));
                count.fetch_add(1, Ordering::SeqCst);
                return if hangs { hanging.question.clone() } else { ok() };
            }
            match (hangs, streams) {
                (true, true) => hanging.stream.clone(),
                (true, false) => hanging.whole.clone(),
                (false, true) => rest("b"),
                (false, false) => ok(),
            }
        })
        .await;
        Self { mock, hangs, asked }
    }

    /// From now on, or no longer.
    fn hang(&self, hangs: bool) {
        self.hangs.store(hangs, Ordering::SeqCst);
    }

    fn asked(&self) -> usize {
        self.asked.load(Ordering::SeqCst)
    }
}

/// Two engines, the first of which hangs so, behind a router of which each has answered once.
async fn behind(
    models: &'static [&'static str],
    hanging_so: Hanging,
    flags: &[&str],
) -> (Engine, Engine, Router) {
    let (first, second) = (Engine::start(models, hanging_so).await, Engine::start(&[MODEL], hanging()).await);
    let router = Router::start(&[&[&*workers(&[&first.mock, &second.mock])], flags].concat()).await;
    for worker in ["w0", "w1"] {
        let reply = router.post(CHAT, &chat_with(MODEL)).await;
        assert_eq!((reply.status, reply.header("x-router-worker")), (200, worker));
    }
    first.hang(true);
    (first, second, router)
}

fn chat_with(model: &str) -> String {
    json!({"model": model, "messages": [{"role": "user", "content": "x"}]}).to_string()
}

fn ask(router: &Router, body: String) -> JoinHandle<Reply> {
    let address = router.address;
    tokio::spawn(async move { exchange(address, "POST", CHAT, &[], body.as_bytes()).await })
}

/// Asks the first worker; the second has its turn before the next one does.
async fn ask_first(router: &Router, first: &Engine, body: String) -> JoinHandle<Reply> {
    let before = first.mock.seen().len();
    let asks = ask(router, body);
    until("it is there", || async { first.mock.seen().len() > before }).await;
    assert_eq!(router.post(CHAT, &chat_with(MODEL)).await.header("x-router-worker"), "w1");
    asks
}

/// How often the first worker was found to stand still, and whether it does.
async fn stalls(router: &Router) -> (u64, bool) {
    let told = router.admin("GET", "/workers", "").await.json();
    let first = &told["workers"][0];
    let is_now = first["stands_still"].as_bool().unwrap();
    assert!(!(first["usable"].as_bool().unwrap() && is_now), "{first}");
    (first["stalls"].as_u64().unwrap(), is_now)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_stands_still_loses_its_requests_to_others_and_comes_back_when_it_generates() {
    let resumes = Arc::new(Notify::new());
    let question_waits = [vec![Act::Wait(Arc::clone(&resumes))], ok()].concat();
    let hanging_so = Hanging { question: question_waits, ..hanging() };
    let (first, _second, router) = behind(&[MODEL], hanging_so, &FLAGS).await;
    let stream = ask_first(&router, &first, question(&json!({}))).await;
    let answer = ask_first(&router, &first, chat_with(MODEL)).await.await.unwrap();
    assert_eq!((answer.status, answer.header("x-router-worker")), (200, "w1"), "{answer:?}");
    let (events, is_whole) = told(&stream.await.unwrap());
    assert!(is_whole && text_of(&events) == "The sky", "{events:?}");
    assert_eq!(stalls(&router).await, (1, true));
    assert_eq!(router.metric("router_worker_stands_still{worker=\"w0\"}").await, 1.0);
    for _ in 0..4 {
        assert_eq!(router.post(CHAT, &chat_with(MODEL)).await.header("x-router-worker"), "w1");
    }
    first.hang(false);
    until("it generates again", || async {
        resumes.notify_waiters();
        router.metric("router_worker_up{worker=\"w0\"}").await == 1.0
    })
    .await;
    assert_eq!(stalls(&router).await, (1, false));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_answers_the_question_or_counts_on_has_only_much_to_do() {
    let answers = Hanging { question: ok(), ..hanging() };
    for (why, models, hanging_so) in
        [("it answers", &[MODEL][..], answers), ("it counts on", &[MODEL, "lora-counts-on"], hanging())]
    {
        let computed = Arc::new(Notify::new());
        let computes = [vec![Act::Wait(Arc::clone(&computed))], ok()].concat();
        let (first, second, router) = behind(models, Hanging { whole: computes, ..hanging_so }, &FLAGS).await;
        // A stream that is silent as well, as one is while a call of a tool is put together.
        let stream = ask_first(&router, &first, question(&json!({}))).await;
        let answer = ask_first(&router, &first, chat_with(MODEL)).await;
        until("it was asked again and again", || async { first.asked() >= 4 }).await;
        computed.notify_one();
        assert_eq!(answer.await.unwrap().header("x-router-worker"), "w0", "{why}");
        assert_eq!(stalls(&router).await, (0, false), "{why}");
        assert!(!stream.is_finished() && second.asked() == 0, "{why}: it had nothing to do");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_counts_no_more_hangs_though_no_stream_shows_it_nor_a_question_can_be_asked() {
    let refuses = Hanging { question: vec![Act::Write(json_reply(404, "{}"))], ..hanging() };
    for hanging_so in [hanging(), refuses] {
        let (first, _second, router) = behind(&[MODEL, "lora-counts"], hanging_so, &FLAGS).await;
        let answer = ask_first(&router, &first, chat_with(MODEL)).await.await.unwrap();
        assert_eq!((answer.status, answer.header("x-router-worker")), (200, "w1"), "{answer:?}");
        assert_eq!(stalls(&router).await.0, 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_cannot_be_asked_is_tried_after_a_while() {
    let refuses = Hanging { question: vec![Act::Write(json_reply(404, "{}"))], ..hanging() };
    let (first, _second, router) = behind(&[MODEL, "lora-counts"], refuses, &FLAGS).await;
    ask_first(&router, &first, chat_with(MODEL)).await.await.unwrap();
    until("it is up again", || async { router.metric("router_worker_up{worker=\"w0\"}").await == 1.0 }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_nobody_else_can_have_waits_for_its_worker() {
    let goes_on = Arc::new(Notify::new());
    let beginning = vec![Act::Write(events(&[opening("a"), content("a", "The")]))];
    let sky = vec![Act::Write(chunk(&format!("data: {}\n\n", content("a", " sky"))))];
    let waits = vec![Act::Wait(Arc::clone(&goes_on))];
    let stream = [beginning, waits.clone(), sky, rest("a").split_off(1)].concat();
    let hanging_so = Hanging { stream, whole: [waits, ok()].concat(), ..hanging() };
    let (first, second, router) = behind(&[MODEL, "lora-own"], hanging_so, &FLAGS).await;
    // Another engine would draw otherwise; and another has no such adapter.
    let stream = ask_first(&router, &first, question(&json!({"seed": 1}))).await;
    let of_adapter = ask(&router, chat_with("lora-own"));
    until("it is found", || async { stalls(&router).await == (1, true) }).await;
    let before = second.mock.seen().len();
    goes_on.notify_waiters();
    let of_adapter = of_adapter.await.unwrap();
    assert_eq!((of_adapter.status, of_adapter.header("x-router-worker")), (200, "w0"));
    let reply = stream.await.unwrap();
    let (events, is_whole) = told(&reply);
    assert!(is_whole && text_of(&events) == "The sky", "{reply:?}");
    assert_eq!((reply.header("x-router-worker"), second.mock.seen().len()), ("w0", before));
    until("it was heard", || async { router.metric("router_worker_up{worker=\"w0\"}").await == 1.0 }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_had_nobody_else_to_go_to_leaves_when_there_is_somebody() {
    let (first, second, router) = behind(&[MODEL], hanging(), &FLAGS).await;
    let stream = ask_first(&router, &first, question(&json!({}))).await;
    stream.await.unwrap();
    assert_eq!(stalls(&router).await, (1, true));
    let address = second.mock.address;
    second.mock.kill().await;
    // One that hangs, it is said, is better than nobody.
    let before = first.mock.seen().len();
    let asks = ask(&router, chat_with(MODEL));
    until("it is there", || async { first.mock.seen().len() > before }).await;
    let _back = MockWorker::start_at(address, &[MODEL], |_| ok()).await;
    let reply = asks.await.unwrap();
    assert_eq!((reply.status, reply.header("x-router-worker")), (200, "w1"), "{reply:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn where_all_stand_still_all_are_waited_for() {
    let flags = ["--policy=round_robin", "--stall-timeout=1s", "--probe-interval=20ms"];
    let (first, second, router) = behind(&[MODEL], hanging(), &flags).await;
    second.hang(true);
    let asks = [(); 2].map(|()| ask(&router, question(&json!({}))));
    until("both were asked", || async { first.asked() > 0 && second.asked() > 0 }).await;
    // Long enough for a wrong judgement; a right one takes no time.
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(stalls(&router).await, (0, false));
    second.hang(false);
    assert!(asks.iter().all(|asks| !asks.is_finished()));
}
