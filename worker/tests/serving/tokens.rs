//! `/tokenize`, `/detokenize`, and what `/metrics` counts.

use http::Method;
use serde_json::{Value, json};

use crate::{SHARED, chat, post, send, start, text};

async fn tokenize(body: &Value) -> Value {
    let (status, answer) = post(&SHARED, "/tokenize", body).await;
    assert_eq!(status, 200, "{answer}");
    answer
}

#[tokio::test]
async fn text_goes_to_tokens_and_back() {
    let written = "Zwölf Boxkämpfer — <|im_end|>\n 12 + 3";
    let answer = tokenize(&json!({"model": "builtin", "prompt": written, "return_token_strs": true})).await;
    let tokens = answer["tokens"].as_array().unwrap();
    assert_eq!(
        (answer["count"].as_u64().unwrap(), &answer["max_model_len"]),
        (tokens.len() as u64, &json!(8192))
    );
    assert_eq!(answer["token_strs"].as_array().unwrap().len(), tokens.len());
    let (status, back) = post(&SHARED, "/detokenize", &json!({"tokens": tokens})).await;
    assert_eq!((status, &back["prompt"]), (200, &json!(written)));
    assert_eq!(tokenize(&json!({"prompt": ""})).await["tokens"], json!([]));
    assert_eq!(tokenize(&json!({"prompt": "x"})).await["token_strs"], Value::Null);
}

#[tokio::test]
async fn a_conversation_is_tokenized_as_it_would_be_generated_from() {
    let body = chat("Hello!", &json!({}));
    let tokens = tokenize(&json!({"messages": body["messages"]})).await;
    let (_, answer) = post(&SHARED, "/v1/chat/completions", &body).await;
    assert_eq!(tokens["count"], answer["usage"]["prompt_tokens"]);
    let open = tokenize(&json!({"messages": body["messages"], "add_generation_prompt": false})).await;
    assert!(open["count"].as_u64() < tokens["count"].as_u64());
    let by_ids = json!({"prompt": tokens["tokens"], "temperature": 0, "max_tokens": 20});
    let (_, completed) = post(&SHARED, "/v1/completions", &by_ids).await;
    assert_eq!(completed["choices"][0]["text"], answer["choices"][0]["message"]["content"]);
}

#[tokio::test]
async fn an_answer_is_gone_on_with_where_it_stopped() {
    let answer = async |extra: &Value| {
        let (status, answer) = post(&SHARED, "/v1/chat/completions", &chat("Hello!", extra)).await;
        assert_eq!(status, 200, "{answer}");
        answer["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
    };
    let whole = answer(&json!({"max_tokens": 24})).await;
    let begun = answer(&json!({"max_tokens": 10})).await;
    let messages = json!([{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": begun}]);
    let goes_on = json!({
        "messages": messages,
        "add_generation_prompt": false,
        "continue_final_message": true,
        "max_tokens": 14,
    });
    assert_eq!(begun.clone() + &answer(&goes_on).await, whole);
    let tokens = async |messages: &Value, ending: &Value| {
        let mut body = ending.clone();
        body["messages"] = messages.clone();
        tokenize(&body).await["count"].as_u64().unwrap()
    };
    let question = json!([messages[0]]);
    assert_eq!(tokens(&messages, &goes_on).await, tokens(&question, &json!({})).await + 10);
}

#[tokio::test]
async fn a_long_text_is_no_obstacle() {
    let long = "word ".repeat(50_000);
    assert!(tokenize(&json!({"prompt": long})).await["count"].as_u64().unwrap() > 8192);
}

#[tokio::test]
async fn a_text_of_many_megabytes_is_refused_before_it_is_tokenized() {
    let long = "word ".repeat(4 << 20);
    let messages = json!([{"role": "user", "content": long}]);
    for (path, body, parameter) in [
        ("/v1/completions", json!({"prompt": long}), "prompt"),
        ("/v1/completions", json!({"prompt": ["x", long]}), "prompt"),
        ("/v1/chat/completions", json!({"messages": messages}), "messages"),
    ] {
        let (status, answer) = post(&SHARED, path, &body).await;
        let error = &answer["error"];
        assert_eq!(
            (status, &error["param"], &error["code"]),
            (400, &json!(parameter), &json!("context_length_exceeded"))
        );
        let message = error["message"].as_str().unwrap();
        assert!(message.contains("8192 tokens") && message.contains("209715"), "{message}");
    }
    for (path, body) in [
        ("/tokenize", json!({"prompt": long})),
        ("/tokenize", json!({"messages": messages})),
        ("/detokenize", json!({"tokens": vec![5; 2 << 20]})),
    ] {
        let (status, answer) = post(&SHARED, path, &body).await;
        let message = answer["error"]["message"].as_str().unwrap();
        assert_eq!(status, 400, "{message}");
        assert!(message.contains("at most 1048576"), "{message}");
    }
}

#[tokio::test]
async fn what_is_wrong_is_named() {
    for (path, body, parameter) in [
        ("/tokenize", json!({"prompt": 5}), "prompt"),
        ("/tokenize", json!({}), "prompt"),
        ("/tokenize", json!({"messages": []}), "messages"),
        ("/tokenize", json!({"prompt": "x", "add_special_tokens": 1}), "add_special_tokens"),
        ("/detokenize", json!({"tokens": [99_999]}), "tokens"),
        ("/detokenize", json!({"tokens": "x"}), "tokens"),
        ("/detokenize", json!({}), "tokens"),
    ] {
        let (status, answer) = post(&SHARED, path, &body).await;
        assert_eq!((status, &answer["error"]["param"]), (400, &json!(parameter)), "{path} {body}: {answer}");
    }
    assert_eq!(post(&SHARED, "/tokenize", &json!({"model": "other", "prompt": "x"})).await.0, 404);
}

#[tokio::test]
async fn metrics_count_what_was_done_under_vllms_names() {
    let worker = start(|_| {});
    let (_, cut) = post(&worker, "/v1/chat/completions", &chat("Hello!", &json!({"max_tokens": 5}))).await;
    post(&worker, "/v1/chat/completions", &chat("Hello!", &json!({"max_tokens": 60}))).await;
    let prompt_tokens = cut["usage"]["prompt_tokens"].as_u64().unwrap();
    let metrics = text(send(&worker, Method::GET, "/metrics", "").await).await;
    for line in [
        format!("worker:prompt_tokens_total {}", 2 * prompt_tokens),
        "worker:generation_tokens_total 36".to_owned(),
        "worker:request_success_total{finished_reason=\"length\"} 1".to_owned(),
        "worker:request_success_total{finished_reason=\"stop\"} 1".to_owned(),
        "worker:request_success_total{finished_reason=\"abort\"} 0".to_owned(),
        "worker:time_to_first_token_seconds_count 2".to_owned(),
        "worker:inter_token_latency_seconds_count 34".to_owned(),
        "worker:e2e_request_latency_seconds_count 2".to_owned(),
        format!("worker:prefix_cache_queries_total {}", 2 * prompt_tokens),
        "worker:num_requests_waiting 0".to_owned(),
    ] {
        assert!(metrics.contains(&format!("\n{line}\n")), "{line} in {metrics}");
    }
    let info = "worker:cache_config_info{block_size=\"16\",num_gpu_blocks=\"";
    assert!(metrics.contains(info), "{metrics}");
    for name in
        ["num_requests_running", "kv_cache_usage_perc", "prefix_cache_hits_total", "num_preemptions_total"]
    {
        assert!(metrics.contains(&format!("\nworker:{name} ")), "{name}");
    }
}
