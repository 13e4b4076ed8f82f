//! Whatever comes in, the worker answers, and says whose fault it is. The same checks are fuzz targets (`worker/fuzz`).
#![expect(clippy::unwrap_used, reason = "in a test a panic is the report")]

#[path = "bad_input/check.rs"]
mod check;

use std::sync::LazyLock;

use http::Request;
use proptest::prelude::*;
use serde_json::{Map, Value};
use worker::config::KvTransfer;
use worker::{Worker, WorkerConfig, model::ModelSource};

static WORKER: LazyLock<Worker> = LazyLock::new(|| {
    let mut config = WorkerConfig::new(ModelSource::Builtin);
    config.kv_transfer = KvTransfer::On { reach: None, memory_bytes: Some(1 << 20) };
    Worker::start(config).unwrap()
});

const KEYS: &[&str] = &[
    "messages",
    "role",
    "content",
    "tools",
    "tool_calls",
    "function",
    "name",
    "arguments",
    "parameters",
    "type",
    "text",
    "prompt",
    "tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "n",
    "best_of",
    "stop",
    "stop_token_ids",
    "logprobs",
    "top_logprobs",
    "logit_bias",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "min_tokens",
    "echo",
    "priority",
    "stream",
    "stream_options",
    "include_usage",
    "ignore_eos",
    "chat_template_kwargs",
    "enable_thinking",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "return_token_strs",
    "kv_transfer_params",
    "do_remote_decode",
    "do_remote_prefill",
    "remote_host",
    "remote_port",
    "remote_request_id",
    "remote_num_tokens",
    "remote_kv_format",
    "remote_prompt_digest",
];

/// JSON of the words that requests are made of.
fn json_value() -> impl Strategy<Value = Value> {
    let text = prop_oneof![
        "\\PC{0,8}",
        prop::sample::select(&["user", "system", "assistant", "tool", "text", "<|im_end|>"][..])
            .prop_map(str::to_owned)
    ];
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        (-3i64..200).prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        (-2.0f64..2.0).prop_map(Value::from),
        text.prop_map(Value::from),
    ];
    leaf.prop_recursive(5, 40, 5, |inner| {
        let object =
            prop::collection::vec((prop::sample::select(KEYS), inner.clone()), 0..5).prop_map(|fields| {
                fields.into_iter().map(|(key, value)| (key.to_owned(), value)).collect::<Map<_, _>>()
            });
        prop_oneof![prop::collection::vec(inner, 0..4).prop_map(Value::from), object.prop_map(Value::from)]
    })
}

fn message() -> impl Strategy<Value = Value> {
    let role = prop::sample::select(&["user", "system", "assistant", "tool"][..]);
    (role, json_value(), json_value()).prop_map(
        |(role, content, calls)| serde_json::json!({ "role": role, "content": content, "tool_calls": calls }),
    )
}

/// A body that is nearly right: messages and a prompt, and a few other fields of any kind.
fn body() -> impl Strategy<Value = Map<String, Value>> {
    let messages = prop_oneof![prop::collection::vec(message(), 0..4).prop_map(Value::from), json_value()];
    let prompt = prop_oneof!["\\PC{0,20}".prop_map(Value::from), json_value()];
    let fields = prop::collection::vec((prop::sample::select(KEYS), json_value()), 0..4);
    (messages, prompt, fields).prop_map(|(messages, prompt, fields)| {
        let mut body: Map<_, _> = fields.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
        body.insert("messages".to_owned(), messages);
        body.insert("prompt".to_owned(), prompt);
        body
    })
}

#[test]
fn long_bodies_are_not_repeated_in_what_is_said_of_them() {
    let long = "é\"\n".repeat(3_000);
    for body in [
        serde_json::json!(long),
        serde_json::json!({ "messages": [{ "role": "user", "content": "x" }], "prompt": "x", "logit_bias": { &long: 1 } }),
        serde_json::json!({ "messages": [{ "role": "user", "content": "x" }], "prompt": "x", "best_of": long }),
        serde_json::json!({ "messages": long, "prompt": { &long: long }, "tokens": long }),
        serde_json::json!({ "model": [long], "stop": { &long: long }, "suffix": long }),
    ] {
        check::request(body.to_string().as_bytes());
    }
}

proptest! {
    #[test]
    fn any_bytes_are_a_request_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        check::request(&bytes);
        check::chat_template(&bytes);
    }

    #[test]
    fn any_json_is_a_request_or_refused(body in body()) {
        let body = Value::Object(body).to_string();
        check::request(body.as_bytes());
        check::chat_template(body.as_bytes());
    }

    #[test]
    fn a_worker_answers_anything_and_blames_itself_for_none_of_it(mut body in body()) {
        // Answers are not what this is about.
        body.insert("max_tokens".to_owned(), 2.into());
        let n = body.get("n").and_then(Value::as_u64).filter(|n| *n > 4);
        body.retain(|key, _| key != "n" || n.is_none());
        let body = bytes::Bytes::from(Value::Object(body).to_string());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        for path in ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"] {
            let request = Request::post(path).body(body.clone()).unwrap();
            let (status, answer) = runtime.block_on(async {
                let response = WORKER.handle(request).await;
                let status = response.status().as_u16();
                (status, http_body_util::BodyExt::collect(response.into_body()).await.unwrap().to_bytes())
            });
            let answer = String::from_utf8_lossy(&answer);
            prop_assert!(matches!(status, 200 | 400), "{path}: {status} {answer}");
            prop_assert!(!answer.contains("engine_failed"), "{path}: {answer}");
        }
    }
}
