//! Every parameter that says how tokens are drawn and when to stop, as a client sees it.

use serde_json::{Value, json};
use worker::Worker;

use crate::{SHARED, chat, post, start, stream};

const CHAT: &str = "/v1/chat/completions";
const COMPLETION: &str = "/v1/completions";

fn contents(answer: &Value) -> Vec<&str> {
    let choices = answer["choices"].as_array().unwrap();
    for (index, choice) in choices.iter().enumerate() {
        assert_eq!(choice["index"], index);
    }
    choices
        .iter()
        .map(|choice| choice["message"]["content"].as_str().or(choice["text"].as_str()).unwrap())
        .collect()
}

async fn completion(worker: &Worker, extra: &Value) -> Value {
    let mut body = json!({"prompt": "It is a truth", "temperature": 0, "max_tokens": 12});
    body.as_object_mut().unwrap().extend(extra.as_object().cloned().unwrap());
    let (status, answer) = post(worker, COMPLETION, &body).await;
    assert_eq!(status, 200, "{answer}");
    answer
}

/// The tokens of a completion, by what its log-probabilities say.
async fn tokens(extra: Value) -> Vec<String> {
    let mut extra = extra;
    extra["logprobs"] = json!(0);
    let answer = completion(&SHARED, &extra).await;
    serde_json::from_value(answer["choices"][0]["logprobs"]["tokens"].clone()).unwrap()
}

async fn token_id(text: &str) -> u32 {
    let (_, answer) = post(&SHARED, "/tokenize", &json!({"prompt": text})).await;
    let tokens: Vec<u32> = serde_json::from_value(answer["tokens"].clone()).unwrap();
    assert_eq!(tokens.len(), 1, "{text:?} is one token");
    tokens[0]
}

#[tokio::test]
async fn choices_differ_by_seed_and_the_first_is_the_only_ones() {
    let body = |n: u64| chat("Tell me of Bath.", &json!({"temperature": 1.2, "seed": 5, "n": n}));
    let (_, one) = post(&SHARED, CHAT, &body(1)).await;
    let (_, four) = post(&SHARED, CHAT, &body(4)).await;
    let said = contents(&four);
    assert_eq!(said.len(), 4);
    assert_eq!(said[0], contents(&one)[0]);
    assert!(said[1..].iter().all(|other| *other != said[0]));
    assert_eq!(said, contents(&post(&SHARED, CHAT, &body(4)).await.1), "a seed repeats all choices");
    let each = one["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!(four["usage"]["prompt_tokens"], each, "the prompt counts once");
}

#[tokio::test]
async fn choices_share_the_prompts_prefill() {
    let worker = start(|_| {});
    let body = chat(&"a long story that is told again ".repeat(20), &json!({"n": 5, "max_tokens": 4}));
    let (_, answer) = post(&worker, CHAT, &body).await;
    let prompt_tokens = answer["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    assert_eq!(answer["usage"]["completion_tokens"], 20);
    let metrics = crate::text(crate::send(&worker, http::Method::GET, "/metrics", "").await).await;
    let found = format!("worker:prefix_cache_hits_total {}\n", 4 * ((prompt_tokens - 1) / 16 * 16));
    assert!(metrics.contains(&found), "all but the first find {found}: {metrics}");
    assert!(metrics.contains(&format!("worker:prompt_tokens_total {prompt_tokens}\n")), "{metrics}");
}

#[tokio::test]
async fn several_prompts_get_what_each_gets_alone() {
    let prompts = ["It is a truth", "She was", "The"];
    let mut alone = Vec::new();
    let mut prompt_tokens = 0;
    for prompt in prompts {
        let answer = completion(&SHARED, &json!({"prompt": prompt, "n": 2})).await;
        prompt_tokens += answer["usage"]["prompt_tokens"].as_u64().unwrap();
        alone.extend(contents(&answer).into_iter().map(str::to_owned));
    }
    let together = completion(&SHARED, &json!({"prompt": prompts, "n": 2})).await;
    assert_eq!(contents(&together), alone);
    assert_eq!(together["usage"]["prompt_tokens"], prompt_tokens);
}

#[tokio::test]
async fn a_stream_of_choices_says_what_the_whole_says() {
    let body = json!({"prompt": ["It is", "She was"], "n": 3, "temperature": 1, "seed": 3, "max_tokens": 9,
                      "logprobs": 1});
    let (_, whole) = post(&SHARED, COMPLETION, &body).await;
    let mut streaming = body.clone();
    streaming["stream"] = json!(true);
    streaming["stream_options"] = json!({"include_usage": true});
    let objects = stream(&SHARED, COMPLETION, &streaming).await;
    let (usage, pieces) = objects.split_last().unwrap();
    assert_eq!(usage["usage"]["completion_tokens"], whole["usage"]["completion_tokens"]);
    for (index, said) in contents(&whole).into_iter().enumerate() {
        let of_choice =
            pieces.iter().map(|piece| &piece["choices"][0]).filter(|choice| choice["index"] == index);
        let text: String = of_choice.clone().map(|choice| choice["text"].as_str().unwrap()).collect();
        assert_eq!(text, said);
        assert_eq!(of_choice.clone().filter(|choice| !choice["finish_reason"].is_null()).count(), 1);
        for list in ["tokens", "token_logprobs", "text_offset", "top_logprobs"] {
            let together: Vec<Value> = of_choice
                .clone()
                .filter_map(|choice| choice["logprobs"][list].as_array())
                .flatten()
                .cloned()
                .collect();
            assert_eq!(json!(together), whole["choices"][index]["logprobs"][list], "{list} of {index}");
        }
    }
}

#[tokio::test]
async fn log_probabilities_of_a_completion_are_parallel_lists() {
    let answer = completion(&SHARED, &json!({"logprobs": 3})).await;
    let logprobs = &answer["choices"][0]["logprobs"];
    let tokens: Vec<String> = serde_json::from_value(logprobs["tokens"].clone()).unwrap();
    assert_eq!(tokens.concat(), contents(&answer)[0]);
    let mut offset = 0;
    for (at, token) in tokens.iter().enumerate() {
        assert_eq!(logprobs["text_offset"][at], offset);
        offset += token.chars().count();
        let top = logprobs["top_logprobs"][at].as_object().unwrap();
        assert_eq!(top.len(), 3, "greedy draws the first of the three");
        assert_eq!(top[token], logprobs["token_logprobs"][at]);
        assert!(top.values().all(|other| other.as_f64() <= top[token].as_f64()));
        let probability: f64 = top.values().map(|logprob| logprob.as_f64().unwrap().exp()).sum();
        assert!(probability > 0.0 && probability <= 1.0 + 1e-6);
    }
}

#[tokio::test]
async fn log_probabilities_of_a_chat_are_objects_with_bytes() {
    let body = chat("Hello!", &json!({"logprobs": true, "top_logprobs": 2, "max_tokens": 10}));
    let (_, answer) = post(&SHARED, CHAT, &body).await;
    let content = answer["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(content.len(), 10);
    let mut bytes = Vec::new();
    for entry in content {
        assert_eq!(entry["top_logprobs"].as_array().unwrap().len(), 2);
        assert_eq!(entry["top_logprobs"][0]["token"], entry["token"]);
        assert!(entry["top_logprobs"][0]["logprob"].as_f64() >= entry["top_logprobs"][1]["logprob"].as_f64());
        bytes.extend(serde_json::from_value::<Vec<u8>>(entry["bytes"].clone()).unwrap());
    }
    assert_eq!(String::from_utf8(bytes).unwrap(), contents(&answer)[0]);
    let (_, plain) = post(&SHARED, CHAT, &chat("Hello!", &json!({}))).await;
    assert_eq!(plain["choices"][0]["logprobs"], Value::Null);
    let bare = chat("Hello!", &json!({"logprobs": true, "max_tokens": 1}));
    let (_, bare) = post(&SHARED, CHAT, &bare).await;
    assert_eq!(bare["choices"][0]["logprobs"]["content"][0]["top_logprobs"], json!([]));
}

#[tokio::test]
async fn echo_begins_with_the_prompt() {
    let plain = completion(&SHARED, &json!({})).await;
    let said = contents(&plain)[0];
    let echoed = completion(&SHARED, &json!({"echo": true})).await;
    assert_eq!(contents(&echoed), [format!("It is a truth{said}")]);
    let (_, tokens) = post(&SHARED, "/tokenize", &json!({"prompt": "It is a truth"})).await;
    let by_ids = completion(&SHARED, &json!({"prompt": tokens["tokens"], "echo": true})).await;
    assert_eq!(contents(&by_ids), contents(&echoed));
    let body =
        json!({"prompt": "It is a truth", "temperature": 0, "max_tokens": 12, "echo": true, "stream": true});
    let pieces = stream(&SHARED, COMPLETION, &body).await;
    let text: String = pieces.iter().map(|piece| piece["choices"][0]["text"].as_str().unwrap()).collect();
    assert_eq!(text, contents(&echoed)[0]);
}

#[tokio::test]
async fn a_bias_forces_and_forbids() {
    let token = token_id(" sir").await;
    assert_eq!(tokens(json!({"logit_bias": {token.to_string(): 100}, "max_tokens": 3})).await, [" sir"; 3]);
    let free = tokens(json!({"max_tokens": 1})).await;
    let first = token_id(&free[0]).await;
    let other = tokens(json!({"logit_bias": {first.to_string(): -100}, "max_tokens": 1})).await;
    assert_ne!(other, free);
}

#[tokio::test]
async fn penalties_keep_tokens_from_coming_again() {
    let token = token_id(" sir").await;
    // The bias alone repeats it; each penalty outweighs it once the token is in the answer.
    let bias = json!({token.to_string(): 30});
    let with = |name: &str, value: f64| {
        let mut extra = json!({"logit_bias": bias, "max_tokens": 30});
        extra[name] = json!(value);
        tokens(extra)
    };
    let count = |tokens: &[String]| tokens.iter().filter(|token| *token == " sir").count();
    let free = count(&with("presence_penalty", 0.0).await);
    assert_eq!(free, 30);
    let (repetition, frequency) =
        (count(&with("repetition_penalty", 50.0).await), count(&with("frequency_penalty", 2.0).await));
    assert!((1..30).contains(&repetition), "{repetition}");
    assert!((2..30).contains(&frequency), "{frequency}");
    assert!(frequency > repetition, "one grows with the count, the other is there at once");
    // In the prompt it counts for repetition only.
    let prompted =
        json!({"prompt": "Yes, sir", "logit_bias": bias, "max_tokens": 1, "repetition_penalty": 50});
    assert_ne!(tokens(prompted).await, [" sir"]);
    let prompted = json!({"prompt": "Yes, sir", "logit_bias": bias, "max_tokens": 1, "frequency_penalty": 2});
    assert_eq!(tokens(prompted).await, [" sir"]);
}

#[tokio::test]
async fn presence_counts_once() {
    let token = token_id(" sir").await;
    let answer =
        tokens(json!({"logit_bias": {token.to_string(): 100}, "presence_penalty": 2, "max_tokens": 5})).await;
    assert_eq!(answer, [" sir"; 5], "however often, 2 off a bias of 100 is no obstacle");
}

#[tokio::test]
async fn min_p_of_one_is_greedy() {
    let greedy = tokens(json!({})).await;
    assert_eq!(tokens(json!({"temperature": 2, "min_p": 1, "seed": 1})).await, greedy);
    assert_ne!(tokens(json!({"temperature": 2, "seed": 1})).await, greedy);
}

#[tokio::test]
async fn stop_tokens_end_an_answer_without_their_text() {
    let free = completion(&SHARED, &json!({"logprobs": 0})).await;
    let spelled: Vec<String> =
        serde_json::from_value(free["choices"][0]["logprobs"]["tokens"].clone()).unwrap();
    let stop = token_id(&spelled[4]).await;
    let expected = spelled.iter().take_while(|token| **token != spelled[4]).cloned().collect::<String>();
    let stopped = completion(&SHARED, &json!({"stop_token_ids": [stop]})).await;
    assert_eq!(contents(&stopped), [expected]);
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
}

#[tokio::test]
async fn min_tokens_holds_off_every_kind_of_end() {
    let ended = chat("Hello!", &json!({"max_tokens": 60}));
    let (_, short) = post(&SHARED, CHAT, &ended).await;
    assert_eq!(short["usage"]["completion_tokens"], 31);
    let (_, longer) =
        post(&SHARED, CHAT, &chat("Hello!", &json!({"max_tokens": 60, "min_tokens": 40}))).await;
    assert!(longer["usage"]["completion_tokens"].as_u64().unwrap() >= 40);
    let stop =
        |min_tokens: u64| chat("Hello!", &json!({"stop": ["a"], "max_tokens": 60, "min_tokens": min_tokens}));
    let (_, at_once) = post(&SHARED, CHAT, &stop(0)).await;
    let (_, later) = post(&SHARED, CHAT, &stop(10)).await;
    assert_eq!(contents(&at_once), ["\"I "]);
    assert!(contents(&later)[0].starts_with("\"I am not afraid"), "{later}");
    assert!(later["usage"]["completion_tokens"].as_u64().unwrap() > 10);
    assert_eq!(later["choices"][0]["finish_reason"], "stop");
}
