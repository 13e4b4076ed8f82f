//! A router that is replaced leaves what it knows to the next one.

use serde_json::json;

use crate::harness::*;

fn prompt(number: u32) -> String {
    json!({"model": "m", "prompt": format!("tale {number}. ").repeat(100), "max_tokens": 1}).to_string()
}

async fn holder(router: &Router, number: u32) -> Option<String> {
    let explained = router.admin("POST", "/explain", &prompt(number)).await.json();
    let candidates = explained["candidates"].as_array().unwrap();
    let holds = candidates.iter().find(|candidate| candidate["hit_tokens"].as_u64().unwrap() > 0);
    holds.map(|candidate| candidate["worker"].as_str().unwrap().to_owned())
}

async fn started(mocks: &[&MockWorker], arguments: &[&str]) -> Router {
    let router = Router::start(&[&[workers(mocks).as_str()][..], arguments].concat()).await;
    until("they are up", || async {
        let listed = router.admin("GET", "/workers", "").await.json();
        listed["workers"].as_array().unwrap().iter().all(|worker| worker["up"] == true)
    })
    .await;
    router
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_router_sends_prompts_to_where_they_are_cached() {
    let answer = || json_reply(200, r#"{"choices": []}"#);
    let (one, two) =
        (MockWorker::answering(&["m"], answer()).await, MockWorker::answering(&["m"], answer()).await);
    let file = std::env::temp_dir().join(format!("roundhouse-state-{}", std::process::id()));
    let flag = format!("--prefix-state-file={}", file.display());
    let router = started(&[&one, &two], &[&flag]).await;
    let mut homes = Vec::new();
    for number in 0..8 {
        let reply = router.post("/v1/completions", &prompt(number)).await;
        homes.push(reply.header("x-router-worker").to_owned());
        assert_eq!(holder(&router, number).await.as_ref(), homes.last());
    }
    assert!(homes.iter().any(|home| *home != homes[0]), "both have some");
    router.stopped().await;
    assert!(file.exists());
    // Started the other way round, each is still known by its address.
    let router = started(&[&two, &one], &[&flag]).await;
    let other = |home: &str| if home == "w0" { "w1" } else { "w0" };
    for (number, home) in (0..).zip(&homes) {
        until("it is known", || async { holder(&router, number).await.is_some() }).await;
        assert_eq!(holder(&router, number).await.unwrap(), other(home));
        let reply = router.post("/v1/completions", &prompt(number)).await;
        assert_eq!(reply.header("x-router-worker"), other(home));
    }
    assert!(!file.exists(), "what it holds is old by now");
    router.stopped().await;
    // Without the flag nothing is known, nor with the file of a router whose hashes mean something else.
    let router = started(&[&one, &two], &[]).await;
    assert_eq!(holder(&router, 0).await, None);
    let seeds = std::env::temp_dir().join(format!("roundhouse-state-seed-{}", std::process::id()));
    std::fs::write(&seeds, "sixteen bytes of seed").unwrap();
    let seed = format!("--prefix-seed-file={}", seeds.display());
    let router = started(&[&one, &two], &[&flag, &seed]).await;
    assert_eq!(holder(&router, 0).await, None);
    std::fs::remove_file(&seeds).unwrap();
    router.stopped().await;
    std::fs::remove_file(&file).unwrap();
}
