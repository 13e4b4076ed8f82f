//! What workers report of their caches against what the router expected there.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use serde_json::json;

use crate::harness::*;

const OVER: &str = "router_prefix_prediction_error_tokens_count{direction=\"over\"}";
const UNDER: &str = "router_prefix_prediction_error_tokens_count{direction=\"under\"}";
const CORRECTED: &str = "router_prefix_corrected_blocks_total";

fn prompt(number: u32) -> String {
    json!({"model": "m", "prompt": format!("{number} ").repeat(2_000)}).to_string()
}

fn usage(details: &serde_json::Value) -> Vec<u8> {
    let usage = json!({"prompt_tokens": 1_000, "completion_tokens": 1, "prompt_tokens_details": details});
    json_reply(200, &json!({"choices": [], "usage": usage}).to_string())
}

/// Sends a prompt, and waits until `compared` replies have been compared.
async fn send(router: &Router, number: u32, compared: f64) {
    assert_eq!(router.post("/v1/completions", &prompt(number)).await.status, 200);
    until("it is compared", || async { router.metric(OVER).await + router.metric(UNDER).await == compared })
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_lost_what_was_expected_has_lost_what_is_older_too() {
    let cached = Arc::new(AtomicU32::new(0));
    let told = Arc::clone(&cached);
    let worker = MockWorker::start(&["m"], move |_| {
        let cached_tokens = told.load(Ordering::SeqCst);
        // As engines do: nothing is said of nothing.
        let details = if cached_tokens > 0 { json!({"cached_tokens": cached_tokens}) } else { json!(null) };
        vec![Act::Write(usage(&details))]
    })
    .await;
    let router = Router::start(&[&workers(&[&worker])]).await;
    until("it is up", || async { router.get("/readyz").await.status == 200 }).await;
    let hit_tokens = |number: u32| {
        let router = &router;
        async move {
            let explained = router.admin("POST", "/explain", &prompt(number)).await.json();
            explained["candidates"][0]["hit_tokens"].as_u64().unwrap()
        }
    };
    // Not known to report yet: silence says nothing.
    for number in [0, 1, 2, 0] {
        assert_eq!(router.post("/v1/completions", &prompt(number)).await.status, 200);
    }
    assert_eq!((router.metric(OVER).await, router.metric(UNDER).await), (0.0, 0.0));
    cached.store(900, Ordering::SeqCst);
    send(&router, 1, 1.0).await;
    assert_eq!(router.metric(CORRECTED).await, 0.0);
    assert!(hit_tokens(2).await > 900);
    // From now on silence is zero: 2 was evicted. 0 and 1 have been used since.
    cached.store(0, Ordering::SeqCst);
    send(&router, 2, 2.0).await;
    assert_eq!(router.metric(CORRECTED).await, 0.0, "nothing was older");
    send(&router, 1, 3.0).await;
    let corrected = router.metric(CORRECTED).await;
    assert!(corrected > 0.0);
    assert_eq!(hit_tokens(0).await, 0, "used before 1, which has been evicted");
    assert!(hit_tokens(1).await > 900 && hit_tokens(2).await > 900, "computed anew since, or used later");
    let sum = "router_prefix_prediction_error_tokens_sum{direction=\"over\"}";
    assert!(router.metric(sum).await > 1_800.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_never_reports_is_never_corrected() {
    let worker = MockWorker::answering(&["m"], usage(&json!(null))).await;
    let router = Router::start(&[&workers(&[&worker])]).await;
    until("it is up", || async { router.get("/readyz").await.status == 200 }).await;
    for _ in 0..3 {
        assert_eq!(router.post("/v1/completions", &prompt(0)).await.status, 200);
    }
    let tokens = "router_tokens_total{kind=\"prompt\"}";
    until("all are recorded", || async { router.metric(tokens).await == 3_000.0 }).await;
    for metric in [OVER, UNDER, CORRECTED] {
        assert_eq!(router.metric(metric).await, 0.0, "{metric}");
    }
    assert!(router.metric("router_prefix_tree_blocks").await > 30.0);
}

/// When first tokens were expected, against when they came: of streams alone, and by policies that expect anything.
#[tokio::test(flavor = "multi_thread")]
async fn first_tokens_are_compared_with_what_was_expected() {
    let worker = MockWorker::start(&["m"], |_| {
        vec![Act::Take(Duration::from_secs(1)), Act::Write(sse_reply(&[r#"{"a":1}"#]))]
    })
    .await;
    let late = "router_ttft_prediction_error_seconds_count{direction=\"late\"}";
    let early = "router_ttft_prediction_error_seconds_count{direction=\"early\"}";
    for (policy, compared) in [("prefix_aware", 1.0), ("round_robin", 0.0)] {
        let router = Router::start(&[&workers(&[&worker]), "--policy", policy]).await;
        until("it is up", || async { router.get("/readyz").await.status == 200 }).await;
        let explained = router.admin("POST", "/explain", &chat("hello")).await.json();
        let expected_s = explained["candidates"][0]["first_token_in_s"].as_f64();
        assert_eq!(expected_s.is_some(), compared > 0.0, "{explained}");
        assert!(expected_s.is_none_or(|expected_s| (0.0..1.0).contains(&expected_s)), "{explained}");
        assert!(router.post("/v1/chat/completions", &chat("hello")).await.whole);
        assert_eq!((router.metric(late).await, router.metric(early).await), (compared, 0.0), "{policy}");
    }
}
