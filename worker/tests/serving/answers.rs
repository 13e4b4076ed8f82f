//! What a worker answers when all is well.

use http::Method;
use serde_json::{Value, json};

use crate::{SHARED, chat, get, info_once, post, send, start, stream, text};

const CHAT: &str = "/v1/chat/completions";
const COMPLETION: &str = "/v1/completions";

fn content(answer: &Value) -> &str {
    answer["choices"][0]["message"]["content"].as_str().unwrap()
}

fn cached(answer: &Value) -> u64 {
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}

#[tokio::test]
async fn the_builtin_models_greedy_answer_is_pinned() {
    let (status, answer) = post(&SHARED, CHAT, &chat("Hello!", &json!({"max_tokens": 60}))).await;
    assert_eq!(status, 200);
    let expected =
        "\"I am not afraid of it, sir,\" said he, \"I have no doubt of the being a very good-natured man.";
    assert_eq!(content(&answer), expected);
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    assert_eq!(answer["usage"]["completion_tokens"], 31);
    assert_eq!(answer["model"], "builtin");
}

#[tokio::test]
async fn a_stream_says_what_a_whole_answer_says() {
    for (path, body) in [
        (CHAT, chat("How do you do?", &json!({}))),
        (COMPLETION, json!({"prompt": "It is a truth", "temperature": 0, "max_tokens": 20})),
    ] {
        let (_, whole) = post(&SHARED, path, &body).await;
        let mut streaming = body.clone();
        streaming["stream"] = json!(true);
        streaming["stream_options"] = json!({"include_usage": true});
        let objects = stream(&SHARED, path, &streaming).await;
        let choice = |object: &Value| object["choices"][0].clone();
        let piece = |object: &Value| {
            let choice = choice(object);
            choice["delta"]["content"].as_str().or(choice["text"].as_str()).unwrap_or_default().to_owned()
        };
        let streamed: String = objects.iter().map(piece).collect();
        let expected = choice(&whole);
        let expected = expected["message"]["content"].as_str().or(expected["text"].as_str()).unwrap();
        assert_eq!(streamed, expected);
        let (usage, rest) = objects.split_last().unwrap();
        assert_eq!(usage["choices"], json!([]));
        for count in ["prompt_tokens", "completion_tokens", "total_tokens"] {
            assert_eq!(usage["usage"][count], whole["usage"][count]);
        }
        assert_eq!(choice(rest.last().unwrap())["finish_reason"], "length");
        assert!(rest.iter().all(|object| object["id"] == usage["id"] && object["usage"].is_null()));
        if path == CHAT {
            assert_eq!(choice(&rest[0])["delta"]["role"], "assistant");
        }
    }
}

#[tokio::test]
async fn a_repeated_prompt_comes_from_the_cache_and_says_the_same() {
    let worker = start(|_| {});
    let body = chat(&"a long story that is told again ".repeat(20), &json!({}));
    let (_, first) = post(&worker, CHAT, &body).await;
    let (_, second) = post(&worker, CHAT, &body).await;
    assert_eq!(cached(&first), 0);
    let prompt_tokens = second["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!(cached(&second), (prompt_tokens - 1) / 16 * 16);
    assert_eq!(content(&first), content(&second));
    let (_, flushed) = post(&worker, "/flush_cache", &json!({})).await;
    assert!(flushed["flushed_blocks"].as_u64().unwrap() > 0);
    assert_eq!(cached(&post(&worker, CHAT, &body).await.1), 0);
}

#[tokio::test]
async fn of_a_repeated_prompt_of_a_thousand_tokens_only_the_end_is_computed() {
    let worker = start(|_| {});
    let prompt: Vec<u32> = (0..1_000).map(|position| 300 + position * 7 % 1_500).collect();
    let body = json!({"prompt": prompt, "temperature": 0, "max_tokens": 4, "ignore_eos": true});
    let mut texts = Vec::new();
    // 62 whole blocks of 16 are found; of what was generated the last token is drawn and never computed.
    for (found_tokens, computed_tokens) in [(0, 1_000 + 3), (992, 8 + 3)] {
        let before = get(&worker, "/server_info").await["computed_tokens"].as_u64().unwrap();
        let (status, answer) = post(&worker, COMPLETION, &body).await;
        assert_eq!((status, cached(&answer)), (200, found_tokens));
        let after = info_once(&worker, |info| info["requests_running"] == 0).await;
        assert_eq!(after["computed_tokens"].as_u64().unwrap() - before, computed_tokens);
        texts.push(answer["choices"][0]["text"].clone());
    }
    assert_eq!(texts[0], texts[1]);
}

#[tokio::test]
async fn many_at_once_get_what_each_gets_alone() {
    let worker = start(|config| {
        // Small steps and few places, so that chunks and batches mix.
        config.max_tokens_per_step = Some(40);
        config.max_running = Some(6);
    });
    let body = |n: usize| {
        let sampled = json!({"temperature": 0.8, "seed": n, "max_tokens": 12});
        chat(&format!("{n} {}", "words and words ".repeat(n % 7 * 5)), &sampled)
    };
    let mut alone = Vec::new();
    for n in 0..32 {
        alone.push(content(&post(&SHARED, CHAT, &body(n)).await.1).to_owned());
    }
    let asking = (0..32).map(|n| {
        let worker = worker.clone();
        tokio::spawn(async move { content(&post(&worker, CHAT, &body(n)).await.1).to_owned() })
    });
    let asking: Vec<_> = asking.collect();
    for (asked, alone) in asking.into_iter().zip(alone) {
        assert_eq!(asked.await.unwrap(), alone);
    }
}

#[tokio::test]
async fn token_ids_are_a_prompt_too() {
    let body = |prompt: Value| json!({"prompt": prompt, "temperature": 0, "max_tokens": 8});
    let (status, by_ids) = post(&SHARED, COMPLETION, &body(json!([300, 301, 302]))).await;
    assert_eq!(status, 200);
    assert_eq!(by_ids["usage"]["prompt_tokens"], 3);
    assert_eq!(
        post(&SHARED, COMPLETION, &body(json!([300, 301, 302]))).await.1["choices"],
        by_ids["choices"]
    );
}

#[tokio::test]
async fn stop_strings_and_limits_end_an_answer() {
    let (_, stopped) =
        post(&SHARED, CHAT, &chat("Hello!", &json!({"stop": [" sir"], "max_tokens": 60}))).await;
    assert_eq!(content(&stopped), "\"I am not afraid of it,");
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    let (_, cut) = post(&SHARED, CHAT, &chat("Hello!", &json!({"max_tokens": 3}))).await;
    assert_eq!(
        (cut["choices"][0]["finish_reason"].as_str(), &cut["usage"]["completion_tokens"]),
        (Some("length"), &json!(3))
    );
    let (_, on) = post(&SHARED, CHAT, &chat("Hello!", &json!({"max_tokens": 60, "ignore_eos": true}))).await;
    assert_eq!(on["usage"]["completion_tokens"], 60);
}

#[tokio::test]
async fn seeds_repeat_themselves_and_differ_from_each_other() {
    let body = |seed: u64| chat("Tell me of Bath.", &json!({"temperature": 1.5, "seed": seed}));
    let first = post(&SHARED, CHAT, &body(1)).await.1;
    assert_eq!(content(&first), content(&post(&SHARED, CHAT, &body(1)).await.1));
    assert_ne!(content(&first), content(&post(&SHARED, CHAT, &body(2)).await.1));
}

#[tokio::test]
async fn says_what_it_is() {
    assert_eq!(get(&SHARED, "/v1/models").await["data"][0]["id"], "builtin");
    assert_eq!(get(&SHARED, "/v1/models").await["data"][0]["max_model_len"], 8192);
    let info = get(&SHARED, "/server_info").await;
    assert_eq!((&info["model"], &info["block_tokens"]), (&json!("builtin"), &json!(16)));
    assert_eq!(send(&SHARED, Method::GET, "/health", "").await.status(), 200);
    let metrics = text(send(&SHARED, Method::GET, "/metrics", "").await).await;
    for name in
        ["num_requests_running", "kv_cache_usage_perc", "prefix_cache_hits_total", "prompt_tokens_total"]
    {
        assert!(metrics.contains(&format!("\nworker:{name} ")), "{name}");
    }
}

#[tokio::test]
async fn a_client_that_leaves_frees_its_blocks() {
    let worker = start(|_| {});
    let body = chat("Tell me everything.", &json!({"stream": true, "max_tokens": 8000, "ignore_eos": true}));
    let mut response = send(&worker, Method::POST, CHAT, body.to_string()).await;
    http_body_util::BodyExt::frame(response.body_mut()).await.unwrap().unwrap();
    info_once(&worker, |info| info["requests_running"] == 1).await;
    drop(response);
    info_once(&worker, |info| info["kv_blocks_used"] == 0).await;
}

#[tokio::test]
async fn requests_of_different_salts_share_nothing() {
    let worker = start(|_| {});
    let prompt: Vec<u32> = (300..400).collect();
    let cached = async |salt: Value| {
        let body = json!({"prompt": prompt, "max_tokens": 1, "temperature": 0, "cache_salt": salt});
        let (status, answer) = post(&worker, "/v1/completions", &body).await;
        assert_eq!(status, 200, "{answer}");
        answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
    };
    assert_eq!(cached(json!("a")).await, 0);
    assert_eq!(cached(json!("a")).await, 96, "its own it finds");
    assert_eq!(cached(json!("b")).await, 0);
    assert_eq!(cached(Value::Null).await, 0);
    assert_eq!(cached(Value::Null).await, 96);
}

#[tokio::test]
async fn choices_that_still_wait_for_their_prompt_go_with_their_client() {
    let worker = start(|config| {
        config.max_tokens_per_step = Some(16);
        config.max_running = Some(16);
    });
    let long = "a long story that is told again ".repeat(50);
    let body = chat(&long, &json!({"stream": true, "n": 4, "max_tokens": 1_000, "ignore_eos": true}));
    drop(send(&worker, Method::POST, CHAT, body.to_string()).await);
    let nothing_left = ["requests_running", "requests_waiting", "kv_blocks_used"];
    info_once(&worker, |info| nothing_left.iter().all(|count| info[count] == 0)).await;
    let metrics = text(send(&worker, Method::GET, "/metrics", "").await).await;
    assert!(metrics.contains("worker:request_success_total{finished_reason=\"abort\"} 4\n"), "{metrics}");
    let (status, _) = post(&worker, CHAT, &chat("Hello!", &json!({"n": 2}))).await;
    assert_eq!(status, 200, "others are served");
}

#[tokio::test]
async fn a_stopped_worker_says_so() {
    let worker = start(|_| {});
    worker.shutdown();
    let (status, answer) = post(&worker, CHAT, &chat("Hello!", &json!({}))).await;
    assert_eq!((status, &answer["error"]["code"]), (503, &json!("engine_failed")));
}
