//! Workers that tell of themselves: real ones, with the built-in model.
#![cfg(feature = "embedded")]

use std::net::SocketAddr;

use serde_json::{Value, json};
use worker::WorkerConfig;
use worker::config::{KvBudget, KvEventRecording};

use crate::grpc::{Served, router};
use crate::harness::*;

const ANYWHERE: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 0);

/// One whose cache holds `blocks`, and who tells of it.
async fn telling(address: SocketAddr, blocks: usize) -> Served {
    Served::start_with(address, |config: &mut WorkerConfig| {
        config.kv_events = KvEventRecording::On;
        config.kv = KvBudget::Blocks(blocks);
        config.context_tokens = Some(config.context_tokens.unwrap_or(512).min(512));
    })
    .await
}

pub(crate) fn prompt(number: u32) -> String {
    json!({"model": "builtin", "prompt": format!("tale {number}. ").repeat(20), "max_tokens": 1}).to_string()
}

pub(crate) async fn worker(router: &Router) -> Value {
    router.admin("GET", "/workers", "").await.json()["workers"][0].clone()
}

pub(crate) async fn trusts(router: &Router, trust: &str) {
    until(trust, || async { worker(router).await["cache_trust"] == trust }).await;
}

pub(crate) async fn hit_tokens(router: &Router, number: u32) -> u64 {
    let explained = router.admin("POST", "/explain", &prompt(number)).await.json();
    explained["candidates"][0]["hit_tokens"].as_u64().unwrap()
}

pub(crate) async fn send(router: &Router, number: u32) {
    let reply = router.post("/v1/completions", &prompt(number)).await;
    assert_eq!(reply.status, 200, "{reply:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_worker_evicts_is_expected_there_no_more() {
    let served = telling(ANYWHERE, 40).await;
    let router = router(&[served.address], &[]).await;
    trusts(&router, "exact").await;
    send(&router, 0).await;
    assert!(hit_tokens(&router, 0).await > 0);
    for number in 1..40 {
        send(&router, number).await;
    }
    until("the first is gone", || async { hit_tokens(&router, 0).await == 0 }).await;
    // The last one is there, and its entry has outlived the time after which what no event tells of is taken back.
    let last = hit_tokens(&router, 39).await;
    assert!(last > 0);
    send(&router, 39).await;
    let error = "router_prefix_prediction_error_tokens_count{direction=\"over\"}";
    until("all are compared", || async { router.metric(error).await >= 1.0 }).await;
    assert_eq!(router.metric("router_worker_cache_trust{worker=\"w0\"}").await, 2.0);
    assert_eq!(router.metric("router_prefix_corrected_blocks_total").await, 0.0, "events tell, not replies");
}

#[tokio::test(flavor = "multi_thread")]
async fn entries_are_settled_by_what_is_in_the_cache() {
    let served = telling(ANYWHERE, 400).await;
    let router = router(&[served.address], &[]).await;
    trusts(&router, "exact").await;
    send(&router, 0).await;
    let entered = router.metric("router_prefix_tree_blocks").await;
    // The end of a prompt that fills no block of the worker's is not in its cache, nor is anything that was refused.
    let refused = json!({"model": "builtin", "prompt": "x".repeat(600), "temperature": -1}).to_string();
    assert_eq!(router.post("/v1/completions", &refused).await.status, 400);
    until("they settle", || async { router.metric("router_prefix_tree_blocks").await <= entered }).await;
    let before = hit_tokens(&router, 0).await;
    send(&router, 0).await;
    assert!(before > 0 && hit_tokens(&router, 0).await >= before);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_restarts_is_forgotten_and_followed_anew() {
    let served = telling(ANYWHERE, 400).await;
    let address = served.address;
    let router = router(&[address], &["--probe-interval-down=50ms"]).await;
    trusts(&router, "exact").await;
    send(&router, 0).await;
    assert!(hit_tokens(&router, 0).await > 0);
    drop(served);
    until("the stream is lost", || async { worker(&router).await["cache_trust"] != "exact" }).await;
    let served = telling(address, 100).await;
    trusts(&router, "exact").await;
    until("it is up", || async { worker(&router).await["up"] == true }).await;
    assert_eq!(hit_tokens(&router, 0).await, 0);
    let capacity = worker(&router).await["kv_capacity_tokens"].as_u64().unwrap();
    let info = served.info().await;
    assert_eq!(capacity, 100 * info["block_tokens"].as_u64().unwrap());
    send(&router, 0).await;
    assert!(hit_tokens(&router, 0).await > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn its_load_is_known_and_forgotten_when_it_is_gone() {
    let served = telling(ANYWHERE, 400).await;
    let router = router(&[served.address], &[]).await;
    until("it has reported", || async { worker(&router).await["reported"]["running"] == 0 }).await;
    let reported = worker(&router).await["reported"].clone();
    let free = reported["kv_free_tokens"].as_u64().unwrap();
    assert_eq!(free, worker(&router).await["kv_capacity_tokens"].as_u64().unwrap());
    let streamed =
        json!({"model": "builtin", "prompt": "Once", "max_tokens": 400, "ignore_eos": true, "stream": true});
    let body = streamed.to_string();
    let request = router.post("/v1/completions", &body);
    let seen = until("it runs", || async { worker(&router).await["reported"]["running"] == 1 });
    let (reply, ()) = tokio::join!(request, seen);
    assert_eq!(reply.status, 200);
    until("it is idle", || async { worker(&router).await["reported"]["running"] == 0 }).await;
    drop(served);
    until("nothing is known", || async { worker(&router).await["reported"].is_null() }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn routers_of_the_same_worker_know_their_places() {
    let served = telling(ANYWHERE, 400).await;
    let place = async |router: &Router| {
        let reported = worker(router).await["reported"].clone();
        (reported["router_rank"].as_u64(), reported["routers"].as_u64())
    };
    let one = router(&[served.address], &[]).await;
    until("it is alone", || async { place(&one).await == (Some(0), Some(1)) }).await;
    let two = router(&[served.address], &[]).await;
    until("they are two", || async {
        let (one, two) = (place(&one).await, place(&two).await);
        (one.1, two.1) == (Some(2), Some(2)) && one.0 != two.0
    })
    .await;
    drop(two);
    until("it is alone again", || async { place(&one).await == (Some(0), Some(1)) }).await;
}

/// A file with a seed, which is read when a router starts.
fn seed_file(seed: &str) -> std::path::PathBuf {
    let path = std::env::temp_dir().join(format!("roundhouse-seed-{}-{}", std::process::id(), seed.len()));
    std::fs::write(&path, seed).unwrap();
    path
}

/// Two routers of one worker, each with the seed in that file.
async fn two_routers(served: &Served, seeds: [&str; 2]) -> [Router; 2] {
    let mut routers = Vec::new();
    for seed in seeds {
        let flag = format!("--prefix-seed-file={}", seed_file(seed).display());
        routers.push(router(&[served.address], &[&flag]).await);
    }
    for router in &routers {
        trusts(router, "exact").await;
        until("they know of each other", || async { worker(router).await["reported"]["routers"] == 2 }).await;
    }
    routers.try_into().ok().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn routers_with_one_seed_see_what_the_others_left_in_a_cache() {
    let served = telling(ANYWHERE, 40).await;
    let [one, other] = two_routers(&served, ["sixteen bytes of seed"; 2]).await;
    send(&one, 0).await;
    assert!(hit_tokens(&one, 0).await > 0);
    until("the other has heard", || async { hit_tokens(&other, 0).await > 0 }).await;
    let blocks = async |router: &Router| router.metric("router_prefix_tree_blocks").await;
    until("both know the same", || async { blocks(&one).await == blocks(&other).await }).await;
    // It is settled for both by the same events, and goes for both when it is evicted.
    for number in 1..40 {
        send(&one, number).await;
    }
    until("the first is gone", || async { hit_tokens(&other, 0).await == 0 }).await;
    until("the last is there", || async { hit_tokens(&other, 39).await > 0 }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn routers_with_seeds_of_their_own_do_not_mistake_each_others_prompts() {
    let served = telling(ANYWHERE, 400).await;
    let [one, other] = two_routers(&served, ["sixteen bytes of seed", "sixteen bytes of another"]).await;
    send(&one, 0).await;
    send(&other, 1).await;
    until("its own is there", || async { hit_tokens(&other, 1).await > 0 }).await;
    let blocks = other.metric("router_prefix_tree_blocks").await;
    assert_eq!((hit_tokens(&other, 0).await, hit_tokens(&one, 1).await), (0, 0));
    assert_eq!(one.metric("router_prefix_tree_blocks").await, blocks, "each has one prompt");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_without_events_is_learned_of() {
    let served = Served::start_with(ANYWHERE, |_| {}).await;
    let router = router(&[served.address], &[]).await;
    until("it has reported", || async { worker(&router).await["reported"]["running"] == 0 }).await;
    send(&router, 0).await;
    let expected = hit_tokens(&router, 0).await;
    assert!(expected > 0);
    assert_eq!(worker(&router).await["cache_trust"], "learned");
}
