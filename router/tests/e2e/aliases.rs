//! Names that stand for models.

use std::collections::{HashMap, HashSet};

use serde_json::{Value, json};

use crate::harness::*;

const CHAT: &str = "/v1/chat/completions";

fn as_json(seen: &Seen) -> Value {
    serde_json::from_slice(&seen.body).unwrap()
}

fn said(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_stands_for_a_model() {
    let mock = MockWorker::answering(&["org/llama"], json_reply(200, "{}")).await;
    let router = Router::start(&[&workers(&[&mock]), "--model-aliases=gpt org/llama"]).await;
    let question = "Wer ist \u{1f3a9} Mr. Darcy? ".repeat(200);
    let asked = |model: &str| json!({"temperature": 0.5, "model": model, "messages": [said("user", &question)], "stop": ["model"]});
    let first = router.post(CHAT, &asked("gpt").to_string()).await;
    assert_eq!((first.status, first.header("x-router-hit-tokens")), (200, "0"));
    let second = router.post(CHAT, &asked("org/llama").to_string()).await;
    assert_ne!(second.header("x-router-hit-tokens"), "0", "what is cached for one is cached for the other");
    // The last one counts, whatever it is written like; none of them goes on.
    let odd = br#"{"model": "x", "prompt": "a", "mod\u0065l": "gpt"}"#;
    let oddly = router.post("/v1/completions", std::str::from_utf8(odd).unwrap()).await;
    assert_eq!(oddly.status, 200);
    let tokenized = router.post("/tokenize", r#"{"prompt": "a", "model": "gpt"}"#).await;
    assert_eq!(tokenized.status, 200);
    let seen: Vec<Value> = mock.seen().iter().map(as_json).collect();
    let prompt = json!({"prompt": "a", "model": "org/llama"});
    assert!(seen == [asked("org/llama"), asked("org/llama"), prompt.clone(), prompt], "{seen:.500?}");

    let listed = exchange(router.address, "GET", "/v1/models", &[], b"").await.json();
    let ids: Vec<_> = listed["data"].as_array().unwrap().iter().map(|entry| entry["id"].clone()).collect();
    assert_eq!(ids, ["org/llama", "gpt"]);
    let one = exchange(router.address, "GET", "/v1/models/gpt", &[], b"").await.json();
    assert_eq!((&one["id"], &one["root"]), (&json!("gpt"), &json!("org/llama")));
    let explained = router.admin("POST", "/explain", &asked("gpt").to_string()).await.json();
    assert_eq!(explained["model"], "org/llama");
    let unknown = router.post(CHAT, &asked("gpt-5").to_string()).await;
    assert_eq!(unknown.status, 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn models_that_share_a_name_keep_their_conversations() {
    let (one, two) = (
        MockWorker::answering(&["v1"], json_reply(200, "{}")).await,
        MockWorker::answering(&["v2"], json_reply(200, "{}")).await,
    );
    let router = Router::start(&[&workers(&[&one, &two]), "--model-aliases=chat v1=50 v2=50"]).await;
    let ask = async |headers: &[(&str, &str)], messages: Value| {
        let body = json!({"model": "chat", "messages": messages}).to_string();
        let reply = exchange(router.address, "POST", CHAT, headers, body.as_bytes()).await;
        assert_eq!(reply.status, 200);
        reply.header("x-router-worker").to_owned()
    };
    let mut homes = HashMap::new();
    for turn in 0..3 {
        for talk in 0..24 {
            let mut messages = vec![said("system", "Be brief."), said("user", &format!("Question {talk}"))];
            for later in 0..turn {
                messages.extend([said("assistant", "So it is."), said("user", &format!("And {later}?"))]);
            }
            let worker = ask(&[], messages.into()).await;
            assert_eq!(*homes.entry(talk).or_insert_with(|| worker.clone()), worker, "turn {turn} of {talk}");
        }
    }
    assert_eq!(homes.values().collect::<HashSet<_>>().len(), 2);
    // Who names the session says what belongs together, and so does who says for whom it is.
    let mut used = HashSet::new();
    for session in 0..12 {
        let name = format!("s{session}");
        let mut workers = HashSet::new();
        for turn in 0..6 {
            let messages = json!([said("user", &format!("{turn}"))]);
            workers.insert(ask(&[("x-session-id", &name)], messages.clone()).await);
            let body = json!({"model": "chat", "messages": messages, "user": name}).to_string();
            workers.insert(router.post(CHAT, &body).await.header("x-router-worker").to_owned());
        }
        assert_eq!(workers.len(), 1);
        used.extend(workers);
    }
    assert_eq!(used.len(), 2);
    let models: HashSet<String> =
        two.seen().iter().map(|seen| as_json(seen)["model"].as_str().unwrap().to_owned()).collect();
    assert_eq!(models, HashSet::from(["v2".to_owned()]));
}

#[tokio::test(flavor = "multi_thread")]
async fn another_model_takes_over_where_one_cannot_be_reached() {
    let main = MockWorker::answering(&["main"], json_reply(200, "{}")).await;
    let spare = MockWorker::answering(&["spare"], json_reply(200, "{}")).await;
    let router = Router::start(&[
        &workers(&[&main, &spare]),
        "--model-aliases=safe main=1 spare=0",
        "--max-retries=1",
    ])
    .await;
    let ask = async || router.post(CHAT, &json!({"model": "safe", "messages": []}).to_string()).await;
    for _ in 0..4 {
        assert_eq!(ask().await.header("x-router-worker"), "w0");
    }
    let address = main.address;
    main.kill().await;
    until("the other one answers", || async { ask().await.status == 200 }).await;
    assert_eq!(ask().await.header("x-router-worker"), "w1");
    assert!(spare.seen().iter().all(|seen| as_json(seen)["model"] == "spare"));
    let again = MockWorker::start_at(address, &["main"], |_| vec![Act::Write(json_reply(200, "{}"))]).await;
    until("the first one answers again", || async { ask().await.header("x-router-worker") == "w0" }).await;
    drop(again);
    // Names are an operator's: whoever asks for a model gets that or nothing.
    let main = async || router.post(CHAT, &json!({"model": "main", "messages": []}).to_string()).await;
    until("nobody has it", async || main().await.status == 503).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_without_its_prefill_workers_is_not_served_where_engines_need_them() {
    let decode = MockWorker::answering(&["main"], json_reply(200, "{}")).await;
    let spare = MockWorker::answering(&["spare"], json_reply(200, "{}")).await;
    let prefill = MockWorker::answering(&["spare"], json_reply(200, "{}")).await;
    let router = Router::start(&[
        &workers(&[&decode, &spare]),
        &format!("--prefill={}", prefill.address),
        "--prefill-protocol=sglang",
        "--model-aliases=safe main=1 spare=0",
    ])
    .await;
    let asked = json!({"model": "safe", "messages": []}).to_string();
    // While workers have said nothing yet, who is meant is not known.
    until("the spare one answers", || async { router.post(CHAT, &asked).await.status == 200 }).await;
    assert_eq!(router.post(CHAT, &asked).await.header("x-router-worker"), "w1");
}
