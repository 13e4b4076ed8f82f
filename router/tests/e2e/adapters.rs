//! Requests for adapters, before engines that say for how many of them they have places.

use std::sync::Arc;

use serde_json::{Value, json};
use tokio::sync::Notify;

use crate::harness::*;
use crate::line::IN_LINE;

const MODELS: &[&str] = &["base", "lora-one", "lora-two", "lora-three"];

/// An engine with a place for one adapter, that answers with one when it is told to.
async fn engine(answers: &Arc<Notify>) -> MockWorker {
    let answers = Arc::clone(answers);
    MockWorker::start(MODELS, move |seen| {
        let reply = Act::Write(sse_reply(&["{}", "[DONE]"]));
        let is_base = model(seen) == "base";
        if is_base { vec![reply] } else { vec![Act::Wait(Arc::clone(&answers)), reply] }
    })
    .await
}

fn model(seen: &Seen) -> String {
    let body: Value = serde_json::from_slice(&seen.body).unwrap();
    body["model"].as_str().unwrap().to_owned()
}

fn models(engine: &MockWorker) -> Vec<String> {
    engine.seen().iter().map(model).collect()
}

fn body(model: &str) -> String {
    json!({"model": model, "stream": true, "prompt": format!("a prompt for {model}")}).to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn go_where_theirs_has_a_place_and_wait_in_the_router_for_one() {
    let answers = [(); 2].map(|()| Arc::new(Notify::new()));
    let engines = [engine(&answers[0]).await, engine(&answers[1]).await];
    let router = Router::start(&[&workers(&[&engines[0], &engines[1]]), "--engine-load=100ms"]).await;
    until("both have said", || async {
        let listed = router.admin("GET", "/workers", "").await.json();
        (0..2).all(|number| listed["workers"][number]["adapter_places"] == 1)
    })
    .await;
    let address = router.address;
    let ask = |model: &str| {
        let body = body(model);
        tokio::spawn(async move { exchange(address, "POST", "/v1/completions", &[], body.as_bytes()).await })
    };
    let mut asked = Vec::new();
    for (number, model) in ["lora-one", "lora-two", "lora-two", "lora-two"].into_iter().enumerate() {
        asked.push(ask(model));
        let sent = || engines.iter().map(|engine| engine.seen().len()).sum::<usize>();
        until("it is there", || async { sent() == number + 1 }).await;
    }
    let one = usize::from(models(&engines[0]).len() > 1);
    assert_eq!(models(&engines[one]), ["lora-one"]);
    assert_eq!(models(&engines[1 - one]), ["lora-two"; 3], "though the other one has less to do");
    let explained = router.admin("POST", "/explain", &body("lora-three")).await.json();
    assert_eq!(explained["worker"], format!("w{one}"));
    let mut waits_for: Vec<_> =
        (0..2).map(|at| explained["candidates"][at]["adapter_waits_for"].as_u64()).collect();
    waits_for.sort_unstable();
    assert_eq!(waits_for, [Some(1), Some(3)]);
    asked.push(ask("lora-three"));
    until("it is in line", || async { router.metric(IN_LINE).await == 1.0 }).await;
    assert_eq!(router.post("/v1/completions", &body("base")).await.status, 200);
    answers[one].notify_one();
    until("it has the place", || async { models(&engines[one]).contains(&"lora-three".to_owned()) }).await;
    until("all are answered", || async {
        answers.iter().for_each(|answers| answers.notify_waiters());
        asked.iter().all(tokio::task::JoinHandle::is_finished)
    })
    .await;
    for one in asked {
        assert_eq!(one.await.unwrap().status, 200);
    }
}
