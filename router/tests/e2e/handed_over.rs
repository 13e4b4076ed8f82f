//! Prompts that one of our own workers computes and another goes on from: real ones, with the built-in model.
#![cfg(feature = "embedded")]

use std::net::SocketAddr;

use serde_json::{Value, json};
use worker::config::KvTransfer;

use crate::grpc::Served;
use crate::harness::*;

const COMPLETIONS: &str = "/v1/completions";

/// A worker that hands prompts over, reached where it is called.
async fn served() -> Served {
    let anywhere = SocketAddr::from(([127, 0, 0, 1], 0));
    Served::start_with(anywhere, |config| {
        config.kv_transfer = KvTransfer::On { reach: None, memory_bytes: None };
    })
    .await
}

async fn router(scheme: &str, generate: &Served, prefill: &Served) -> Router {
    let workers = format!("--workers=d0={scheme}{}", generate.address);
    let prefill = format!("--prefill=p0={scheme}{}", prefill.address);
    let router = Router::start(&[&workers, &prefill, "--policy=round_robin"]).await;
    until("both are up", || async {
        let listed = router.admin("GET", "/workers", "").await.json();
        listed["workers"].as_array().unwrap().iter().all(|worker| worker["up"] == true)
    })
    .await;
    router
}

fn completion(number: usize) -> String {
    let prompt = format!("tale {number}. ").repeat(20);
    json!({"prompt": prompt, "temperature": 0, "max_tokens": 12, "ignore_eos": true}).to_string()
}

/// What is said, and by whom the prompt was computed.
async fn answer(router: &Router, number: usize) -> (Value, String) {
    let reply = router.post(COMPLETIONS, &completion(number)).await;
    assert_eq!(reply.status, 200, "{reply:?}");
    (reply.json()["choices"].take(), reply.header("x-router-prefill-worker").to_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_is_computed_once_whatever_the_router_speaks() {
    let alone = Served::start().await;
    let alone = Router::start(&[&format!("--workers={}", alone.address)]).await;
    until("it is up", || async { alone.get("/readyz").await.status == 200 }).await;
    for scheme in ["http://", "grpc://", "h2c://"] {
        let (generate, prefill) = (served().await, served().await);
        let router = router(scheme, &generate, &prefill).await;
        for number in 0..3 {
            let (choices, computed_by) = answer(&router, number).await;
            let want = answer(&alone, number).await.0;
            assert_eq!((choices, computed_by.as_str()), (want, "p0"), "{scheme}");
        }
        // The last token of the prompt, and all but the last of the answer.
        let generated = || async { generate.info().await["computed_tokens"] == 3 * 12 };
        until("only what follows is computed there", generated).await;
        assert_eq!(generate.info().await["kv_transfer"]["held_bytes"], 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_prefill_workers_end_loses_nothing() {
    let (generate, prefill) = (served().await, served().await);
    let router = router("http://", &generate, &prefill).await;
    let before = answer(&router, 0).await;
    assert_eq!(before.1, "p0");
    drop(prefill);
    for number in 0..5 {
        let (choices, computed_by) = answer(&router, number).await;
        assert!(number > 0 || choices == before.0);
        assert_eq!(computed_by, "");
    }
}
