//! Engines that others use as well: the router asks them how many requests they have.

use serde_json::{Value, json};

use crate::harness::*;

const ASKS: &str = "--engine-load=100ms";

async fn others(router: &Router) -> Vec<Value> {
    let listed = router.admin("GET", "/workers", "").await.json();
    let workers = listed["workers"].as_array().unwrap();
    workers.iter().map(|worker| worker["reported"]["others"]["requests"].clone()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_others_use_gets_less() {
    let answer = || json_reply(200, "{}");
    let busy = MockWorker::answering(&["m", "has-others"], answer()).await;
    let quiet = MockWorker::answering(&["m"], answer()).await;
    let router = Router::start(&[&workers(&[&busy, &quiet]), ASKS]).await;
    until("it has told", || async { others(&router).await == [json!(36), Value::Null] }).await;
    assert_eq!(router.metric("router_worker_others_requests{worker=\"w0\"}").await, 36.0);
    let listed = router.admin("GET", "/workers", "").await.json();
    assert_eq!(listed["workers"][0]["reported"]["others"]["uncached_tokens"], 6_000);
    for number in 0..8 {
        let prompt = json!({"model": "m", "prompt": format!("{number} and something")}).to_string();
        assert_eq!(router.post("/v1/completions", &prompt).await.header("x-router-worker"), "w1");
    }
    assert_eq!((busy.seen().len(), quiet.seen().len()), (0, 8));
}

#[tokio::test(flavor = "multi_thread")]
async fn sglang_is_asked_where_it_tells_its_load() {
    let engine = MockWorker::answering(&["sglang-has-others"], json_reply(200, "{}")).await;
    let router = Router::start(&[&workers(&[&engine]), ASKS]).await;
    until("it has told", || async { others(&router).await == [json!(7)] }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ranks_are_asked_at_once_and_nobody_is_if_it_is_off() {
    let answer = || json_reply(200, "{}");
    let engine = MockWorker::answering(&["m", "has-others-at-one"], answer()).await;
    let ranks = format!("--workers=http://{}?dp=2", engine.address);
    let router = Router::start(&[&ranks, ASKS]).await;
    until("both have told", || async { others(&router).await == [json!(0), json!(21)] }).await;
    let alone = Router::start(&[&ranks, "--engine-load=off"]).await;
    until("it is up", || async { alone.get("/readyz").await.status == 200 }).await;
    tokio::time::sleep(std::time::Duration::from_millis(300)).await;
    assert_eq!(others(&alone).await, [Value::Null, Value::Null]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_engine_said_is_forgotten_when_it_is_gone() {
    let engine = MockWorker::answering(&["m", "has-others"], json_reply(200, "{}")).await;
    let router = Router::start(&[&workers(&[&engine]), ASKS]).await;
    until("it has told", || async { others(&router).await == [json!(36)] }).await;
    engine.kill().await;
    until("nothing is known of it", || async { others(&router).await == [Value::Null] }).await;
}
