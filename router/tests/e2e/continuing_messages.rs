//! Streams in Anthropic's words that break off are gone on with as the chat that they are.
//!
//! The mocks play an engine whose tokens are characters, but for the marks around a thought.

use std::sync::Arc;

use serde_json::{Value, json};
use tokio::sync::Notify;

use crate::continuing::others;
use crate::harness::*;

const MESSAGES: &str = "/v1/messages";
const MODEL: &str = "vllm-m";
const BEGIN: u32 = 2_000_000;
const END: u32 = 2_000_001;

fn named(event: &Value) -> String {
    format!("event: {}\ndata: {event}\n\n", event["type"].as_str().unwrap())
}

fn start() -> String {
    let message = json!({"id": "msg_a", "type": "message", "role": "assistant", "content": [], "model": MODEL,
        "usage": {"input_tokens": 9, "output_tokens": 0}});
    named(&json!({"type": "message_start", "message": message}))
}

fn begins(index: usize, block: &Value) -> String {
    named(&json!({"type": "content_block_start", "content_block": block, "index": index}))
}

fn piece(index: usize, kind: &str, text: &str) -> String {
    let name = kind.strip_suffix("_delta").unwrap();
    named(&json!({"type": "content_block_delta", "delta": {"type": kind, name: text}, "index": index}))
}

fn by_character(index: usize, kind: &str, text: &str) -> Vec<String> {
    text.chars().map(|character| piece(index, kind, &character.to_string())).collect()
}

fn ends(index: usize) -> String {
    named(&json!({"type": "content_block_stop", "index": index}))
}

fn breaks(events: &[String]) -> Vec<Act> {
    let all = events.iter().fold(sse_head(), |all, event| all.into_iter().chain(chunk(event)).collect());
    vec![Act::Write(all), Act::Close]
}

/// A chat as its template writes it.
fn chat(body: &Value) -> String {
    let mut written = String::new();
    for message in body["messages"].as_array().unwrap() {
        let role = message["role"].as_str().unwrap();
        written += &format!("{}:{}\n", &role[..1], message["content"].as_str().unwrap());
    }
    if body["continue_final_message"] == true { written.trim_end().to_owned() } else { written + "a:" }
}

fn tokens(text: &str) -> Vec<u32> {
    let marked = text.replace("<think>", "\u{1}").replace("</think>", "\u{2}");
    let token = |character| match character {
        '\u{1}' => BEGIN,
        '\u{2}' => END,
        other => u32::from(other),
    };
    marked.chars().map(token).collect()
}

fn choice(choice: &Value) -> String {
    let mut choice = choice.clone();
    choice["index"] = 0.into();
    format!("data: {}\n\n", json!({"id": "b", "choices": [choice]}))
}

fn delta(delta: &Value) -> String {
    choice(&json!({"delta": delta, "finish_reason": null}))
}

fn whole(events: &[String], (prompt, completion, cached): (usize, usize, usize)) -> Vec<Act> {
    let usage = json!({"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": {"cached_tokens": cached}});
    let last = [
        format!("data: {}\n\n", json!({"id": "b", "choices": [], "usage": usage})),
        "data: [DONE]\n\n".into(),
    ];
    let all = events
        .iter()
        .chain(&last)
        .fold(sse_head(), |all, event| all.into_iter().chain(chunk(event)).collect());
    vec![Act::Write(all), Act::Write(last_chunk())]
}

/// An engine that dies of each message after what its last one says, and writes no more than `counts` says of how long one is.
fn answers(seen: &Seen, counts: impl Fn(usize) -> usize) -> Vec<Act> {
    let body: Value = serde_json::from_slice(&seen.body).unwrap();
    let how =
        body["messages"].as_array().and_then(|all| all.iter().rfind(|message| message["role"] == "user"));
    let how = how.map(|message| message["content"].as_str().unwrap().to_owned()).unwrap_or_default();
    match &*seen.path {
        "/v1/messages/count_tokens" => {
            assert!(body.get("max_tokens").is_none(), "{body}");
            let system = json!([{"role": "system", "content": body["system"]}]);
            let all =
                [system.as_array().unwrap(), body["messages"].as_array().unwrap()].map(Vec::clone).concat();
            let told = json!({"input_tokens": counts(tokens(&chat(&json!({"messages": all}))).len())});
            vec![Act::Write(json_reply(200, &told.to_string()))]
        }
        "/tokenize" => {
            let text = body["prompt"].as_str().map_or_else(|| chat(&body), str::to_owned);
            let told = json!({"tokens": tokens(&text), "max_model_len": 4096});
            vec![Act::Write(json_reply(200, &told.to_string()))]
        }
        "/v1/completions" => {
            let prompt: Vec<u32> = serde_json::from_value(body["prompt"].clone()).unwrap();
            let thinks = prompt.iter().rposition(|token| *token == BEGIN).is_some() && !prompt.contains(&END);
            assert_eq!(body["stop_token_ids"].is_array(), thinks, "{body}");
            let (text, stop) = if thinks { (" so", json!(END)) } else { ("!", Value::Null) };
            let last = choice(&json!({"text": "", "finish_reason": "stop", "stop_reason": stop}));
            whole(&[choice(&json!({"text": text, "finish_reason": null})), last], (prompt.len(), 2, 4))
        }
        "/v1/chat/completions" => {
            assert_eq!(body["messages"][0], json!({"role": "system", "content": "Be brief."}));
            let given = body["messages"].as_array().unwrap().last().unwrap()["content"].as_str().unwrap();
            if how == "again and again" || how == "again" && given == "Sky" {
                // As vLLM and SGLang say that they have failed.
                let word = " was";
                let failed = json!({"error": {"message": "dead", "code": 500}});
                let says = delta(&json!({"content": word})) + &format!("data: {failed}\n\ndata: [DONE]\n\n");
                return vec![Act::Write([sse_head(), chunk(&says)].concat()), Act::Write(last_chunk())];
            }
            if how == "wrong" {
                let wrong = json!({"error": {"message": "yours", "code": 400}});
                let says = delta(&json!({"content": " is"})) + &format!("data: {wrong}\n\ndata: [DONE]\n\n");
                return vec![Act::Write([sse_head(), chunk(&says)].concat()), Act::Write(last_chunk())];
            }
            if how == "no last word" {
                let finish = choice(&json!({"delta": {"content": " is"}, "finish_reason": "stop"}));
                return vec![Act::Write([sse_head(), chunk(&finish)].concat()), Act::Write(last_chunk())];
            }
            let mut events = vec![
                delta(&json!({"role": "assistant", "content": ""})),
                delta(&json!({"content": " is"})),
                ": there\n\n".into(),
            ];
            let mut finish = json!({"delta": {}, "finish_reason": "stop", "stop_reason": null});
            if body["tools"].is_array() {
                let call = |call: Value| delta(&json!({"tool_calls": [call]}));
                events.push(call(json!({"index": 0, "id": "c1", "type": "function", "function": {"name": "Look", "arguments": ""}})));
                events.push(call(json!({"index": 0, "function": {"arguments": "{\"at\":"}})));
                // Some parsers let through what stands in between.
                events.push(delta(&json!({"content": "\n"})));
                events.push(call(json!({"index": 0, "function": {"arguments": "1}"}})));
                finish["finish_reason"] = "tool_calls".into();
            }
            if how == "sequence" {
                finish["stop_reason"] = "END".into();
            }
            events.push(choice(&finish));
            whole(&events, (tokens(&chat(&body)).len(), 2, 8))
        }
        MESSAGES if how == "held" => vec![Act::Wait(Arc::new(Notify::new()))],
        MESSAGES => {
            let text = json!({"type": "text", "text": ""});
            let thought = json!({"type": "thinking", "thinking": ""});
            let mut events = vec![start()];
            match &*how {
                "thought" => {
                    events.push(begins(0, &thought));
                    events.extend(by_character(0, "thinking_delta", "Hm,"));
                }
                "behind a thought" => {
                    events.push(begins(0, &thought));
                    events.extend(by_character(0, "thinking_delta", "Hm"));
                    events.extend([ends(0), begins(1, &text), piece(1, "text_delta", "Sky")]);
                }
                "call" => events
                    .push(begins(0, &json!({"type": "tool_use", "id": "c", "name": "Look", "input": {}}))),
                _ => {
                    events.push(begins(0, &text));
                    events.extend(by_character(0, "text_delta", "Sky"));
                }
            }
            if how == "last word" {
                events.push(ends(0));
                events.push(named(&json!({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 3}})));
            }
            if how.starts_with("failed") {
                let failed = json!({"type": "error", "error": {"type": "internal_error", "message": "dead"}});
                events.push(named(&failed) + &named(&json!({"type": "message_stop"})));
                let all = events
                    .iter()
                    .fold(sse_head(), |all, event| all.into_iter().chain(chunk(event)).collect());
                return vec![Act::Write(all), Act::Write(last_chunk())];
            }
            breaks(&events)
        }
        other => panic!("{other}"),
    }
}

/// What the client was told: the types of its events, their data, and whether the stream ended well.
fn told(reply: &Reply) -> (Vec<Value>, bool) {
    let text = reply.text();
    let events = text.split("\n\n").filter(|event| event.starts_with("event: ")).map(|event| {
        let (name, data) = event.strip_prefix("event: ").unwrap().split_once("\ndata: ").unwrap();
        let data: Value = serde_json::from_str(data).unwrap();
        assert_eq!(data["type"], name);
        data
    });
    let events: Vec<Value> = events.collect();
    let is_whole = reply.whole && events.last().is_some_and(|event| event["type"] == "message_stop");
    (events, is_whole)
}

/// The message that these events are, as a client puts it together.
fn message(events: &[Value]) -> Value {
    let mut blocks: Vec<Value> = Vec::new();
    let mut open = None;
    let mut end = Value::Null;
    for event in events {
        let index = event["index"].as_u64().map(|index| index as usize);
        match event["type"].as_str().unwrap() {
            "content_block_start" => {
                assert_eq!((open, index), (None, Some(blocks.len())), "{events:?}");
                open = index;
                blocks.push(event["content_block"].clone());
            }
            "content_block_delta" => {
                assert_eq!(open, index);
                let block = blocks.last_mut().unwrap();
                for (name, text) in
                    event["delta"].as_object().unwrap().iter().filter(|(name, _)| *name != "type")
                {
                    let before = block[name].as_str().unwrap_or_default().to_owned();
                    block[name] = (before + text.as_str().unwrap()).into();
                }
            }
            "content_block_stop" => assert_eq!(open.take(), index),
            "message_delta" => end = json!({"why": event["delta"], "usage": event["usage"]}),
            _ => {}
        }
    }
    assert_eq!(open, None, "{events:?}");
    json!({"blocks": blocks, "end": end})
}

fn question(how: &str, extra: &Value) -> String {
    let mut body = json!({"model": MODEL, "stream": true, "max_tokens": 50, "system": "Be brief.", "stop_sequences": ["END"],
        "messages": [{"role": "user", "content": how}]});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body.to_string()
}

async fn fleet(counts: fn(usize) -> usize) -> ([MockWorker; 2], Router) {
    let start = || MockWorker::start(&[MODEL], move |seen| answers(seen, counts));
    let mocks = [start().await, start().await];
    let router = Router::start(&[&workers(&[&mocks[0], &mocks[1]])]).await;
    (mocks, router)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_is_gone_on_with_as_the_chat_that_it_is() {
    let (mocks, router) = fleet(|count| count).await;
    let reply = router.post(MESSAGES, &question("text", &json!({}))).await;
    let (events, is_whole) = told(&reply);
    assert!(is_whole, "{reply:?}");
    assert!(reply.text().contains(": there\n\n"), "comments pass: {reply:?}");
    let prompt = "s:Be brief.\nu:text\na:".len();
    let usage = json!({"input_tokens": prompt - 8, "output_tokens": 5, "cache_read_input_tokens": 8});
    let end = json!({"why": {"stop_reason": "end_turn", "stop_sequence": null}, "usage": usage});
    assert_eq!(message(&events), json!({"blocks": [{"type": "text", "text": "Sky is"}], "end": end}));
    assert_eq!(events.iter().filter(|event| event["type"] == "message_start").count(), 1);
    let asked: Vec<Seen> = mocks.iter().flat_map(MockWorker::seen).collect();
    let rest = asked.iter().find(|request| request.path == "/v1/chat/completions").unwrap();
    let rest: Value = serde_json::from_slice(&rest.body).unwrap();
    assert_eq!((&rest["continue_final_message"], &rest["max_tokens"]), (&json!(true), &json!(47)));
    assert_eq!(rest["messages"][2], json!({"role": "assistant", "content": "Sky"}));
    assert_eq!(router.metric("router_streams_continued_total").await, 1.0);
    assert_eq!(router.metric("router_tokens_total{kind=\"completion\"}").await, 5.0);
    let reply = router.post(MESSAGES, &question("sequence", &json!({}))).await;
    let end = &message(&told(&reply).0)["end"]["why"];
    assert_eq!(*end, json!({"stop_reason": "stop_sequence", "stop_sequence": "END"}));
}

#[tokio::test(flavor = "multi_thread")]
async fn tools_that_are_called_in_the_rest_are_blocks_of_their_own() {
    let (_mocks, router) = fleet(|count| count).await;
    let tools = json!({"tools": [{"name": "Look", "input_schema": {"type": "object", "properties": {}}}]});
    let reply = router.post(MESSAGES, &question("text", &tools)).await;
    let (events, is_whole) = told(&reply);
    assert!(is_whole, "{reply:?}");
    let message = message(&events);
    let call =
        json!({"type": "tool_use", "id": "c1", "name": "Look", "input": {}, "partial_json": "{\"at\":1}"});
    let between = json!({"type": "text", "text": "\n"});
    assert_eq!(message["blocks"], json!([{"type": "text", "text": "Sky is"}, call, between]));
    assert_eq!(message["end"]["why"]["stop_reason"], "tool_use");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thought_is_gone_on_with_and_the_answer_behind_it() {
    let (_mocks, router) = fleet(|count| count).await;
    for (how, thought, text) in [("thought", "Hm, so", "!"), ("behind a thought", "Hm", "Sky!")] {
        let reply = router.post(MESSAGES, &question(how, &json!({"thinking": {"type": "adaptive"}}))).await;
        let (events, is_whole) = told(&reply);
        assert!(is_whole, "{reply:?}");
        let mut message = message(&events);
        // An engine of vLLM's signs what it has ended itself.
        let signature = message["blocks"][0].as_object_mut().unwrap().remove("signature");
        assert_eq!(signature.is_some(), how == "thought", "{reply:?}");
        let blocks = json!([{"type": "thinking", "thinking": thought}, {"type": "text", "text": text}]);
        assert_eq!(message["blocks"], blocks, "{how}");
    }
    // How much may be left of its measure nobody knows.
    let measured = json!({"thinking": {"type": "enabled", "budget_tokens": 2048}});
    let (events, is_whole) = told(&router.post(MESSAGES, &question("thought", &measured)).await);
    assert!(!is_whole && events.last().unwrap()["type"] == "error", "{events:?}");
    assert!(told(&router.post(MESSAGES, &question("behind a thought", &measured)).await).1);
}

#[tokio::test(flavor = "multi_thread")]
async fn it_breaks_off_again_and_again() {
    let mut mocks = Vec::new();
    for _ in 0..3 {
        mocks.push(MockWorker::start(&[MODEL], |seen| answers(seen, |count| count)).await);
    }
    let all = workers(&mocks.iter().collect::<Vec<_>>());
    let router = Router::start(&[&all, "--retry-budget=off", "--policy=round_robin"]).await;
    let _others = others(&router, &mocks, (MESSAGES, question("held", &json!({})))).await;
    let reply = router.post(MESSAGES, &question("again", &json!({}))).await;
    let (events, is_whole) = told(&reply);
    assert!(is_whole, "{}", reply.text());
    let message = message(&events);
    assert_eq!(message["blocks"], json!([{"type": "text", "text": "Sky was is"}]));
    assert_eq!(message["end"]["why"]["stop_reason"], "end_turn");
    let reply = router.post(MESSAGES, &question("again and again", &json!({}))).await;
    let (events, is_whole) = told(&reply);
    let errors: Vec<&Value> = events.iter().filter(|event| event["type"] == "error").collect();
    assert!(!is_whole && errors.len() == 1 && errors[0]["error"]["message"] == "dead", "{}", reply.text());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_says_in_their_words_that_it_has_failed_is_gone_on_from() {
    let (mocks, router) = fleet(|count| count).await;
    let reply = router.post(MESSAGES, &question("failed", &json!({}))).await;
    let (events, is_whole) = told(&reply);
    assert!(is_whole, "{reply:?}");
    assert_eq!(message(&events)["blocks"], json!([{"type": "text", "text": "Sky is"}]));
    assert_eq!(router.metric("router_errors_total{blame=\"worker\"}").await, 0.0);
    let alone = Router::start(&[&workers(&[&mocks[0]])]).await;
    for _ in 0..2 {
        let reply = alone.post(MESSAGES, &question("failed", &json!({}))).await;
        let (events, _) = told(&reply);
        let errors: Vec<&Value> = events.iter().filter(|event| event["type"] == "error").collect();
        assert_eq!(errors.len(), 1, "{reply:?}");
        assert_eq!(errors[0]["error"]["message"], "dead");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_rest_ends_as_its_chat_did() {
    let (_mocks, router) = fleet(|count| count).await;
    let reply = router.post(MESSAGES, &question("wrong", &json!({}))).await;
    let (events, is_whole) = told(&reply);
    assert!(!is_whole && events.last().unwrap()["error"]["message"] == "yours", "{reply:?}");
    let reply = router.post(MESSAGES, &question("no last word", &json!({}))).await;
    let (events, is_whole) = told(&reply);
    assert!(is_whole, "{reply:?}");
    assert_eq!(message(&events)["end"]["usage"], json!({"output_tokens": 4}));
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_last_word_is_missing() {
    let (mocks, router) = fleet(|count| count).await;
    let reply = router.post(MESSAGES, &question("last word", &json!({}))).await;
    let (events, is_whole) = told(&reply);
    assert!(is_whole, "{reply:?}");
    assert_eq!(message(&events)["end"]["usage"], json!({"output_tokens": 3}));
    assert_eq!(mocks.iter().map(|mock| mock.seen().len()).sum::<usize>(), 1, "nobody is asked");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_surely_that_chat_ends_with_an_error() {
    let (_mocks, router) = fleet(|count| count + 1).await;
    let (events, is_whole) = told(&router.post(MESSAGES, &question("text", &json!({}))).await);
    assert!(!is_whole && events.last().unwrap()["type"] == "error", "{events:?}");
    let (_mocks, router) = fleet(|count| count).await;
    for (how, extra) in [("call", json!({})), ("text", json!({"what_nobody_knows": 1}))] {
        let (events, is_whole) = told(&router.post(MESSAGES, &question(how, &extra)).await);
        assert!(!is_whole && events.last().unwrap()["type"] == "error", "{events:?}");
    }
}
