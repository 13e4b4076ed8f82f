//! Two workers, of which one computes the prompt and the other goes on from there: the same tokens as from one alone, and what is computed where.

use std::time::Duration;

use bytes::Bytes;
use http::{Method, StatusCode};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use worker::config::KvTransfer;
use worker::transfer::Reach;
use worker::{BackendChoice, Worker, WorkerConfig, serve};

use crate::{get, info_once, post, send, start, text};

const COMPLETION: &str = "/v1/completions";
const KV: &str = "kv_transfer_params";

/// Reached at that port of this host, with so much memory for KV on its way.
fn on(port: u16, memory_bytes: Option<u64>) -> KvTransfer {
    let reach = Reach { host: "127.0.0.1".to_owned(), port: Some(port) };
    KvTransfer::On { reach: Some(reach), memory_bytes }
}

/// A worker whose KV can be fetched.
async fn served(change: impl FnOnce(&mut WorkerConfig)) -> Worker {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let worker = start(|config| {
        config.kv_transfer = on(port, None);
        change(config);
    });
    let serving = worker.clone();
    tokio::spawn(async move {
        serve::serve(&serving, listener, Duration::ZERO, std::future::pending()).await;
    });
    worker
}

/// A worker that can fetch.
fn fetching(change: impl FnOnce(&mut WorkerConfig)) -> Worker {
    start(|config| {
        config.kv_transfer = on(1, None);
        change(config);
    })
}

/// Tokens that the model has, a prompt of so many.
fn prompt(tokens: usize) -> Vec<u32> {
    (0..tokens as u32).map(|token| 300 + token * 7 % 200).collect()
}

fn with(body: &Value, change: &Value) -> Value {
    let mut body = body.clone();
    body.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
    body
}

/// What the first leg says of where the KV is.
async fn computed(worker: &Worker, body: &Value) -> Value {
    let first_leg = json!({"max_tokens": 1, KV: {"do_remote_decode": true, "do_remote_prefill": false}});
    let (status, reply) = post(worker, COMPLETION, &with(body, &first_leg)).await;
    assert_eq!(status, 200, "{reply}");
    reply.get(KV).expect("it is said, if only that there is none").clone()
}

async fn answered(worker: &Worker, body: &Value) -> Value {
    let (status, mut reply) = post(worker, COMPLETION, body).await;
    assert_eq!(status, 200, "{reply}");
    reply["choices"][0].take()
}

/// Tokens that it has computed in all.
async fn computed_tokens(worker: &Worker) -> u64 {
    let info = info_once(worker, |info| info["requests_running"] == 0).await;
    info["computed_tokens"].as_u64().unwrap()
}

async fn held_bytes(worker: &Worker) -> u64 {
    get(worker, "/server_info").await["kv_transfer"]["held_bytes"].as_u64().unwrap()
}

#[tokio::test]
async fn who_fetches_says_what_it_would_say_alone_and_computes_the_last_token() {
    let (first, second, alone) = (served(|_| {}).await, fetching(|_| {}), start(|_| {}));
    let mut before = 0;
    // Around the edges of blocks, and a token alone: of that there is nothing to hand over.
    for (tokens, sampling) in [
        (100, json!({"temperature": 0})),
        (2, json!({"temperature": 0})),
        (16, json!({"temperature": 0, "logprobs": 3})),
        (17, json!({"temperature": 0.8, "seed": 5})),
        (33, json!({"temperature": 0, "cache_salt": "of one"})),
    ] {
        let prompt = prompt(tokens + before).split_off(before);
        before += tokens;
        let body = with(&json!({"prompt": prompt, "max_tokens": 12, "ignore_eos": true}), &sampling);
        let params = computed(&first, &body).await;
        assert_eq!(params["remote_num_tokens"], tokens - 1, "{params}");
        let computed_before = computed_tokens(&second).await;
        let got = answered(&second, &with(&body, &json!({KV: params}))).await;
        assert_eq!(got, answered(&alone, &body).await, "{tokens} tokens");
        assert_eq!(computed_tokens(&second).await - computed_before, 12, "{tokens} tokens");
        assert_eq!(held_bytes(&first).await + held_bytes(&second).await, 0);
    }
    assert_eq!(computed(&first, &json!({"prompt": [300]})).await, Value::Null);
}

#[tokio::test]
async fn what_its_own_cache_holds_is_not_fetched_and_what_came_is_cached() {
    let (first, second) = (served(|_| {}).await, fetching(|_| {}));
    let fetched_bytes = async || {
        let metrics = text(send(&second, Method::GET, "/metrics", "").await).await;
        let line = metrics.lines().find(|line| line.contains("kv_transfer_bytes_total{way=\"fetched\"}"));
        line.unwrap().rsplit(' ').next().unwrap().parse::<u64>().unwrap()
    };
    let turn = |tokens: usize| json!({"prompt": prompt(tokens), "max_tokens": 4, "temperature": 0, "ignore_eos": true});
    let go_on = async |body: &Value| {
        let params = computed(&first, body).await;
        post(&second, COMPLETION, &with(body, &json!({KV: params}))).await.1
    };
    go_on(&turn(80)).await;
    let of_five_blocks = fetched_bytes().await;
    let reply = go_on(&turn(120)).await;
    // 119 tokens are eight blocks, of which five are there.
    assert_eq!(fetched_bytes().await, of_five_blocks / 5 * 8);
    assert_eq!(reply["usage"]["prompt_tokens_details"]["cached_tokens"], 80);
    let reply = post(&second, COMPLETION, &turn(120)).await.1;
    assert_eq!(reply["usage"]["prompt_tokens_details"]["cached_tokens"], 112);
}

#[tokio::test]
async fn without_the_kv_the_prompt_is_computed_and_nobody_is_refused() {
    let first = served(|_| {}).await;
    let alone = start(|_| {});
    let body = json!({"prompt": prompt(90), "max_tokens": 8, "temperature": 0, "ignore_eos": true});
    let want = answered(&alone, &body).await;
    let of = |change: Value| {
        let (first, body) = (first.clone(), body.clone());
        async move { with(&computed(&first, &body).await, &change) }
    };
    let taken = of(json!({})).await;
    let path = format!("/kv_transfer/{}", taken["remote_request_id"].as_str().unwrap());
    assert_eq!(send(&first, Method::HEAD, &path, "").await.status(), StatusCode::METHOD_NOT_ALLOWED);
    assert_eq!(send(&first, Method::GET, &path, "").await.status(), StatusCode::OK);
    assert_eq!(send(&first, Method::GET, &path, "").await.status(), StatusCode::NOT_FOUND, "once");
    let another = json!({"prompt": prompt(91), "temperature": 0});
    let another = computed(&first, &another).await;
    let cases = [
        ("taken", taken),
        ("nobody listens", of(json!({"remote_port": 1})).await),
        ("no such host", of(json!({"remote_host": "nowhere.invalid"})).await),
        ("another model's", of(json!({"remote_kv_format": "cpu-f32/1x1x1/16/0"})).await),
        ("another prompt's", another),
        ("a path", of(json!({"remote_request_id": "../v1/models"})).await),
        ("more tokens than there are", of(json!({"remote_num_tokens": u64::MAX})).await),
        ("vLLM's", json!({"do_remote_prefill": true, "remote_block_ids": [[1, 2]]})),
    ];
    let tight = fetching(|config| config.kv_transfer = on(1, Some(10)));
    let params = of(json!({})).await;
    let got = answered(&tight, &with(&body, &json!({KV: params}))).await;
    assert_eq!(got, want, "no room");
    for (what, params) in cases {
        let second = fetching(|_| {});
        let got = answered(&second, &with(&body, &json!({KV: params}))).await;
        assert_eq!(got, want, "{what}");
        assert_eq!(computed_tokens(&second).await, 90 + 7, "{what}");
        let metrics = text(send(&second, Method::GET, "/metrics", "").await).await;
        assert!(metrics.contains("kv_transfers_total{outcome=\"failed\"} 1"), "{what}");
    }
}

/// Answers a GET with `head` and these bytes, and closes.
async fn other_worker(head: &'static str, bytes: Vec<u8>) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut asked = [0; 1_024];
        let _ = stream.read(&mut asked).await;
        let _ = stream.write_all(head.as_bytes()).await;
        let _ = stream.write_all(&bytes).await;
    });
    port
}

#[tokio::test]
async fn kv_that_comes_in_part_or_in_excess_is_not_used() {
    let (first, alone) = (served(|_| {}).await, start(|_| {}));
    let body = json!({"prompt": prompt(90), "max_tokens": 8, "temperature": 0, "ignore_eos": true});
    let want = answered(&alone, &body).await;
    let params = computed(&first, &body).await;
    let path = format!("/kv_transfer/{}", params["remote_request_id"].as_str().unwrap());
    let kv =
        send(&first, Method::GET, &path, "").await.into_body().collect().await.unwrap().to_bytes().to_vec();
    let less = kv[..kv.len() - 1].to_vec();
    let closing = "HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n";
    for (head, bytes, is_used) in [
        (closing, kv.clone(), true),
        (closing, less.clone(), false),
        (closing, [&kv[..], b"x"].concat(), false),
        ("HTTP/1.1 200 OK\r\ncontent-length: 1000000000\r\n\r\n", less, false),
        ("HTTP/1.1 500 Internal Server Error\r\ncontent-length: 0\r\n\r\n", vec![], false),
        ("no HTTP\r\n\r\n", vec![], false),
        ("", vec![], false),
    ] {
        let params = with(&params, &json!({"remote_port": other_worker(head, bytes).await}));
        let second = fetching(|_| {});
        assert_eq!(answered(&second, &with(&body, &json!({KV: params}))).await, want, "{head:?}");
        let computed = if is_used { 8 } else { 90 + 7 };
        assert_eq!((computed_tokens(&second).await, held_bytes(&second).await), (computed, 0), "{head:?}");
    }
}

#[tokio::test]
async fn nothing_is_offered_where_nobody_could_use_it() {
    let worker = served(|_| {}).await;
    let off = start(|_| {});
    let asked = json!({"prompt": prompt(40), "max_tokens": 1, KV: {"do_remote_decode": true}});
    let (_, reply) = post(&off, COMPLETION, &asked).await;
    assert_eq!(reply.get(KV), None, "it does not hand over");
    for (change, what) in [
        (json!({"n": 2}), "two answers"),
        (json!({"prompt": [prompt(40), prompt(30)]}), "two prompts"),
        (json!({KV: null}), "nobody asked"),
    ] {
        let (status, reply) = post(&worker, COMPLETION, &with(&asked, &change)).await;
        assert_eq!((status, reply.get(KV)), (200, None), "{what}");
    }
    let tight = start(|config| config.kv_transfer = on(1, Some(10)));
    assert_eq!(post(&tight, COMPLETION, &asked).await.1[KV], Value::Null, "no room");
    let unreachable = start(|config| {
        config.kv_transfer = KvTransfer::On { reach: None, memory_bytes: None };
    });
    assert_eq!(post(&unreachable, COMPLETION, &asked).await.1[KV], Value::Null, "it came by no network");
    assert_eq!(held_bytes(&worker).await, 0);
    for wrong in [json!("x"), json!({"do_remote_decode": true, "do_remote_prefill": true})] {
        let (status, reply) = post(&worker, COMPLETION, &with(&asked, &json!({KV: wrong}))).await;
        assert_eq!((status, &reply["error"]["param"]), (400, &json!(KV)));
    }
}

#[tokio::test]
async fn simulated_engines_hand_prompts_over_that_have_no_kv() {
    let preset = worker_core::timing::preset("qwen3-8b").unwrap();
    let simulated = |config: &mut WorkerConfig| {
        config.backend = BackendChoice::Timing(preset);
        config.max_tokens_per_step = Some(preset.max_tokens_per_step);
        config.time_scale = 0.001;
    };
    let (first, second) = (served(simulated).await, fetching(simulated));
    let body = json!({"prompt": prompt(600), "max_tokens": 5, "temperature": 0, "ignore_eos": true});
    let params = computed(&first, &body).await;
    answered(&second, &with(&body, &json!({KV: params}))).await;
    assert_eq!((computed_tokens(&first).await, computed_tokens(&second).await), (600, 5));
    let real = fetching(|_| {});
    let params = computed(&first, &body).await;
    answered(&real, &with(&body, &json!({KV: params}))).await;
    assert_eq!(computed_tokens(&real).await, 604, "what is simulated is of no use to a model");
}

#[tokio::test]
async fn tickets_are_for_who_has_been_told() {
    let worker = served(|_| {}).await;
    let params = computed(&worker, &json!({"prompt": prompt(40)})).await;
    for path in ["/kv_transfer/", "/kv_transfer/0", "/kv_transfer/x?from_block=-1", "/kv_transfer"] {
        assert_eq!(send(&worker, Method::GET, path, Bytes::new()).await.status(), 404, "{path}");
    }
    let path = format!(
        "/kv_transfer/{}?from_block=1000000000000000000",
        params["remote_request_id"].as_str().unwrap()
    );
    assert_eq!(send(&worker, Method::POST, &path, "").await.status(), 405);
    let response = send(&worker, Method::GET, &path, "").await;
    assert_eq!(
        (response.status(), text(response).await.len()),
        (StatusCode::OK, 0),
        "there are not so many blocks"
    );
}
