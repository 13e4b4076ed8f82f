//! What a worker answers to what it cannot do.

use http::Method;
use serde_json::{Value, json};
use worker::{KvBudget, Worker, WorkerConfig, model::ModelSource};

use crate::{SHARED, chat, post, send, start, text};

const CHAT: &str = "/v1/chat/completions";

#[tokio::test]
async fn errors_have_openais_shape_and_say_what_is_wrong() {
    let long = "word ".repeat(9_000);
    for (path, body, status, code, expected) in [
        (CHAT, chat("x", &json!({"model": "other"})), 404, "model_not_found", "\"builtin\""),
        (CHAT, chat(&long, &json!({})), 400, "context_length_exceeded", "8192"),
        (CHAT, chat("x", &json!({"max_tokens": 9_000})), 400, "context_length_exceeded", "9000"),
        (CHAT, chat("x", &json!({"temperature": -1})), 400, "invalid_value", "from 0 to 2"),
        (CHAT, chat("x", &json!({"logprobs": 5})), 400, "invalid_value", "true or false, not 5"),
        (CHAT, chat("x", &json!({"min_tokens": 30})), 400, "invalid_value", "max_tokens, which is 20"),
        (CHAT, chat("x", &json!({"stop_token_ids": [99_999]})), 400, "invalid_value", "99999"),
        (CHAT, chat("x", &json!({"guided_json": {}})), 400, "invalid_value", "not supported"),
        (
            "/v1/completions",
            json!({"prompt": "x", "echo": true, "logprobs": 1}),
            400,
            "invalid_value",
            "echo",
        ),
        ("/v1/completions", json!({"prompt": vec!["x"; 65], "n": 2}), 400, "invalid_value", "130 choices"),
        (CHAT, json!({"prompt": "x"}), 400, "invalid_value", "messages"),
        ("/v1/completions", json!({"prompt": [99_999]}), 400, "invalid_value", "vocabulary"),
        ("/v1/completions", json!({"prompt": ""}), 400, "invalid_value", "empty"),
        ("/v1/nothing", json!({}), 404, "", "/v1/nothing"),
    ] {
        let (got, answer) = post(&SHARED, path, &body).await;
        let error = &answer["error"];
        let message = error["message"].as_str().unwrap();
        assert_eq!(got, status, "{message}");
        assert_eq!(error["code"].as_str().unwrap_or_default(), code, "{message}");
        assert!(message.contains(expected), "{message:?} lacks {expected:?}");
    }
}

#[tokio::test]
async fn garbage_is_a_400_that_says_where() {
    for (body, place) in
        [("{\"messages\":\n [,", "line 2 column 3"), ("", "line 1 column 0"), ("[]", "line 1")]
    {
        let response = send(&SHARED, Method::POST, CHAT, body).await;
        assert_eq!(response.status(), 400);
        let answer: Value = serde_json::from_str(&text(response).await).unwrap();
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(message.contains(place), "{message}");
    }
}

#[tokio::test]
async fn wrong_methods_name_the_right_one() {
    let response = send(&SHARED, Method::GET, CHAT, "").await;
    assert_eq!((response.status().as_u16(), &response.headers()["allow"]), (405, &"POST".parse().unwrap()));
    let response = send(&SHARED, Method::POST, "/health", "").await;
    assert_eq!((response.status().as_u16(), &response.headers()["allow"]), (405, &"GET".parse().unwrap()));
}

#[tokio::test]
async fn a_full_queue_is_a_429_with_retry_after() {
    let worker = start(|config| {
        config.max_running = Some(1);
        config.max_waiting = 1;
    });
    let endless = chat("x", &json!({"stream": true, "max_tokens": 8_000, "ignore_eos": true})).to_string();
    let mut kept = Vec::new();
    let refused = loop {
        let response = send(&worker, Method::POST, CHAT, endless.clone()).await;
        if response.status() != 200 {
            break response;
        }
        kept.push(response);
        assert!(kept.len() < 10, "the queue has a bound");
    };
    assert_eq!(refused.status(), 429);
    assert_eq!(refused.headers()["retry-after"], "1");
}

#[tokio::test]
async fn request_ids_come_back() {
    let request =
        http::Request::get("/health").header("x-request-id", "mine").body(bytes::Bytes::new()).unwrap();
    assert_eq!(SHARED.handle(request).await.headers()["x-request-id"], "mine");
}

#[test]
fn configurations_that_do_not_fit_are_refused_with_what_would() {
    let refused = |change: fn(&mut WorkerConfig)| {
        let mut config = WorkerConfig::new(ModelSource::Builtin);
        change(&mut config);
        Worker::start(config).err().expect("refused").to_string()
    };
    assert!(refused(|config| config.kv = KvBudget::Blocks(10)).contains("512"));
    assert!(refused(|config| config.kv = KvBudget::Bytes(1_000)).contains("16.0 MiB"));
    let said = refused(|config| config.kv = KvBudget::Blocks(1 << 31));
    assert!(said.contains("65536.0 GiB") && said.contains("GiB is available"), "{said}");
    assert!(refused(|config| config.context_tokens = Some(9_000)).contains("8192"));
    assert!(refused(|config| config.max_running = Some(0)).contains("max-running"));
    let said = refused(|config| {
        (config.max_running, config.max_tokens_per_step) = (Some(64), Some(63));
    });
    assert!(said.contains("max-tokens-per-step 63") && said.contains("max-running, 64"), "{said}");
    assert!(refused(|config| config.model = ModelSource::Directory("/nowhere".into())).contains("/nowhere"));
}
