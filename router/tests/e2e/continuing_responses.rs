//! Responses that break off are gone on with, by vLLM.
//!
//! The mocks play an engine whose tokens are characters, but for marks.

use std::sync::Arc;

use serde_json::{Value, json};
use tokio::sync::Notify;

use crate::continuing::others;
use crate::harness::*;

const RESPONSES: &str = "/v1/responses";
const MODEL: &str = "vllm-m";

/// Numbers events as they come.
#[derive(Default)]
struct Events(Vec<String>);

impl Events {
    fn put(&mut self, kind: &str, more: &Value) {
        let mut event = json!({"type": kind, "sequence_number": self.0.len()});
        event.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        self.0.push(format!("event: {kind}\ndata: {event}\n\n"));
    }

    fn of(id: &str) -> Self {
        let mut events = Self::default();
        for kind in ["response.created", "response.in_progress"] {
            events.put(
                kind,
                &json!({"response": {"id": id, "created_at": id.len(), "model": MODEL, "output": []}}),
            );
        }
        events
    }

    fn begin(&mut self, index: usize, item: &Value, part: &str) {
        let id = item["id"].clone();
        self.put("response.output_item.added", &json!({"output_index": index, "item": item}));
        let place = json!({"output_index": index, "content_index": 0, "item_id": id, "part": {"type": part, "text": ""}});
        self.put("response.content_part.added", &place);
    }

    fn pieces(&mut self, kind: &str, (index, id): (usize, &str), text: &str) {
        for piece in text.chars().map(String::from) {
            let place = json!({"output_index": index, "content_index": 0, "item_id": id, "delta": piece, "logprobs": []});
            self.put(kind, &place);
        }
    }

    fn end(&mut self, (index, id): (usize, &str), kind: &str, text: &str) -> Value {
        let place = json!({"output_index": index, "content_index": 0, "item_id": id});
        let with = |name: &str, value: Value| {
            let mut event = place.clone();
            event[name] = value;
            event
        };
        let part = json!({"type": kind, "text": text});
        self.put(&format!("response.{kind}.done"), &with("text", text.into()));
        self.put("response.content_part.done", &with("part", part.clone()));
        let item = match kind {
            "output_text" => json!({"type": "message", "id": id, "role": "assistant", "status": "completed",
                "content": if text.is_empty() { json!([]) } else { json!([part]) }}),
            _ => {
                json!({"type": "reasoning", "id": id, "status": "completed", "summary": [], "content": [part]})
            }
        };
        self.put("response.output_item.done", &json!({"output_index": index, "item": item}));
        item
    }

    fn complete(&mut self, output: &[Value], (input, generated): (usize, usize)) {
        let usage = json!({"input_tokens": input, "output_tokens": generated, "total_tokens": input + generated,
            "input_tokens_details": {"cached_tokens": 4}, "output_tokens_details": {"reasoning_tokens": 0}});
        let response = json!({"id": "resp_b", "created_at": 99, "status": "completed", "max_output_tokens": 7, "output": output, "usage": usage});
        self.put("response.completed", &json!({"response": response}));
    }

    fn acts(self, end: Act) -> Vec<Act> {
        let all = self.0.iter().fold(sse_head(), |all, event| all.into_iter().chain(chunk(event)).collect());
        vec![Act::Write(all), end]
    }
}

fn message(id: &str) -> Value {
    json!({"type": "message", "id": id, "role": "assistant", "status": "in_progress", "content": []})
}

fn has_begun_once(begun: &Value) -> bool {
    begun["content"][0]["text"] == "Skies"
}

/// What is asked for the rest is told so.
fn rest(how: &str, asked: &[Value]) -> Vec<Act> {
    let begun = &asked[asked.len() - 1];
    let has_thought = asked[asked.len() - 2]["type"] == "reasoning";
    let text = begun["content"][0]["text"].as_str().unwrap();
    assert!(has_begun_once(begun) || how.contains("again") && text == "Skies was", "{begun}");
    assert_eq!(has_thought, how.contains("thought"));
    let mut events = Events::of("resp_b");
    if how.contains("again") && has_begun_once(begun) {
        events.begin(0, &message("m_b"), "output_text");
        events.pieces("response.output_text.delta", (0, "m_b"), " was");
        let error = json!({"code": "server_error", "message": "dead"});
        events.put("response.failed", &json!({"response": {"id": "resp_b", "error": error}}));
        return events.acts(Act::Write(last_chunk()));
    }
    let mut output = Vec::new();
    if how.contains("text") {
        events.begin(0, &message("m_b"), "output_text");
        events.pieces("response.output_text.delta", (0, "m_b"), " is");
        output.push(events.end((0, "m_b"), "output_text", " is"));
    }
    if how.contains("call") {
        let index = output.len();
        let call =
            json!({"type": "function_call", "id": "fc", "call_id": "c", "name": "look", "arguments": "{}"});
        events.put("response.output_item.added", &json!({"output_index": index, "item": call}));
        events.put(
            "response.function_call_arguments.delta",
            &json!({"output_index": index, "item_id": "fc", "delta": "{}"}),
        );
        events.put("response.output_item.done", &json!({"output_index": index, "item": call}));
        output.push(call);
    }
    events.complete(&output, (20, 3));
    events.acts(Act::Write(last_chunk()))
}

/// What a template makes of a chat: `ends` says whether it ends what has only begun.
fn tokens(body: &Value, ends: bool) -> Vec<u32> {
    let text = match body["prompt"].as_str() {
        Some(text) => text.to_owned(),
        None => {
            assert_eq!(body["messages"][0]["content"], "Go on.");
            let mut text = "u:Go on.a:".to_owned();
            if body["continue_final_message"] == true {
                let begun = &body["messages"][1];
                if let Some(thought) = begun["reasoning"].as_str() {
                    text += &format!("<think>{thought}\n</think>");
                }
                text += begun["content"].as_str().unwrap();
                text += if ends { "." } else { "" };
            }
            text
        }
    };
    let marked = text.replace("<think>", "\u{1}").replace("</think>", "\u{2}");
    marked.chars().map(u32::from).collect()
}

fn answers(seen: &Seen, ends: bool) -> Vec<Act> {
    let body: Value = serde_json::from_slice(&seen.body).unwrap();
    match &*seen.path {
        "/tokenize" => {
            let told = json!({"tokens": tokens(&body, ends), "max_model_len": 4096});
            vec![Act::Write(json_reply(200, &told.to_string()))]
        }
        RESPONSES => {
            let how = body["metadata"]["how"].as_str().unwrap();
            if how == "held" {
                return vec![Act::Wait(Arc::new(Notify::new()))];
            }
            let has_begun =
                |items: &&Vec<Value>| items.last().is_some_and(|item| item["status"] == "in_progress");
            if let Some(asked) = body["input"].as_array().filter(has_begun) {
                return rest(how, asked);
            }
            let mut events = Events::of("resp_a");
            let mut index = 0;
            if how.contains("thought") {
                events.begin(0, &json!({"type": "reasoning", "id": "r_a"}), "reasoning_text");
                events.pieces("response.reasoning_text.delta", (0, "r_a"), "Hm");
                if !how.contains("half") {
                    events.end((0, "r_a"), "reasoning_text", "Hm");
                    index = 1;
                }
            }
            if !how.contains("half") {
                events.begin(index, &message("m_a"), "output_text");
                let text = if how.contains("one letter") { "S" } else { "Skies" };
                events.pieces("response.output_text.delta", (index, "m_a"), text);
            }
            if how.contains("over") {
                events.end((index, "m_a"), "output_text", "Skies");
            }
            if how.contains("failed") {
                let error = json!({"code": "server_error", "message": "dead"});
                events.put("response.failed", &json!({"response": {"id": "resp_a", "error": error}}));
                return events.acts(Act::Write(last_chunk()));
            }
            events.acts(Act::Close)
        }
        other => panic!("{other}"),
    }
}

fn question(how: &str, extra: &Value) -> String {
    let mut body = json!({"model": MODEL, "stream": true, "input": "Why?", "max_output_tokens": 10, "metadata": {"how": how}});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body.to_string()
}

fn told(reply: &Reply) -> (Vec<Value>, bool) {
    let text = reply.text();
    let events: Vec<Value> = text
        .split("\n\n")
        .filter(|event| event.starts_with("event: "))
        .map(|event| {
            let (name, data) = event.strip_prefix("event: ").unwrap().split_once("\ndata: ").unwrap();
            let data: Value = serde_json::from_str(data).unwrap();
            assert_eq!(data["type"], name);
            data
        })
        .collect();
    let is_whole = reply.whole && events.last().is_some_and(|event| event["type"] == "response.completed");
    (events, is_whole)
}

/// Two engines; those that write a turn's end behind every message are named so, and those of an earlier version.
async fn fleet(name: &str) -> ([MockWorker; 2], Router) {
    let models: &'static [&'static str] = if name == "old" { &[MODEL, "vllm-old"] } else { &[MODEL] };
    let ends = name == "ends";
    let start = || MockWorker::start(models, move |seen| answers(seen, ends));
    let mocks = [start().await, start().await];
    let router = Router::start(&[&workers(&[&mocks[0], &mocks[1]])]).await;
    (mocks, router)
}

/// The output that the deltas make, which is the one at the end.
fn output(events: &[Value]) -> Vec<Value> {
    let mut items: Vec<(Value, String)> = Vec::new();
    for (number, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], number, "{events:?}");
        let kind = event["type"].as_str().unwrap();
        if kind == "response.output_item.added" {
            assert_eq!(event["output_index"], items.len());
            items.push((event["item"].clone(), String::new()));
        } else if let Some(index) = event["output_index"].as_u64() {
            let (item, text) = &mut items[usize::try_from(index).unwrap()];
            assert!(event["item_id"].is_null() || event["item_id"] == item["id"], "{event}");
            match kind {
                "response.output_text.delta" | "response.reasoning_text.delta" => {
                    *text += event["delta"].as_str().unwrap();
                }
                "response.output_text.done" => assert_eq!(event["text"], **text),
                "response.content_part.done" => assert_eq!(event["part"]["text"], **text),
                "response.output_item.done" => {
                    assert_eq!(event["item"]["id"], item["id"]);
                    assert!(
                        event["item"]["content"].is_null() || event["item"]["content"][0]["text"] == **text
                    );
                    *item = event["item"].clone();
                }
                _ => {}
            }
        }
    }
    let whole = events.last().unwrap()["response"]["output"].as_array().unwrap().clone();
    assert_eq!(whole, items.into_iter().map(|(item, _)| item).collect::<Vec<_>>());
    whole
}

#[tokio::test(flavor = "multi_thread")]
async fn a_response_is_gone_on_with_and_its_client_sees_one() {
    for (how, texts) in [
        ("text", &["Skies is"][..]),
        ("text call", &["Skies is", ""]),
        ("call", &["Skies", ""]),
        ("nothing", &["Skies"]),
        ("thought text", &["Hm", "Skies is"]),
        ("thought call", &["Hm", "Skies", ""]),
        ("failed text", &["Skies is"]),
    ] {
        let (mocks, router) = fleet("").await;
        let reply = router.post(RESPONSES, &question(how, &json!({}))).await;
        let (events, is_whole) = told(&reply);
        assert!(is_whole, "{how}: {reply:?}");
        let output = output(&events);
        let said: Vec<&str> =
            output.iter().map(|item| item["content"][0]["text"].as_str().unwrap_or_default()).collect();
        assert_eq!(said, texts, "{how}");
        let response = &events.last().unwrap()["response"];
        let named = json!([response["id"], response["created_at"], response["max_output_tokens"]]);
        assert_eq!(named, json!(["resp_a", 6, 10]), "{how}");
        let given = if how.contains("thought") { 8 } else { 5 };
        assert_eq!(response["usage"]["input_tokens"], 20 - given, "{how}");
        assert_eq!(
            (&response["usage"]["output_tokens"], &response["usage"]["total_tokens"]),
            (&json!(3 + given), &json!(23))
        );
        let asked = mocks.iter().flat_map(MockWorker::seen).rfind(|seen| seen.path == RESPONSES).unwrap();
        let asked: Value = serde_json::from_slice(&asked.body).unwrap();
        assert_eq!(asked["max_output_tokens"], 10 - given);
        assert_eq!(asked["input"][0], json!({"role": "user", "content": "Why?"}));
        assert_eq!(asked["input"].as_array().unwrap().last().unwrap()["status"], "in_progress");
        assert_eq!(router.metric("router_streams_continued_total").await, 1.0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_list_of_input_gets_what_was_given_at_its_end() {
    let (mocks, router) = fleet("").await;
    let list = json!({"input": [{"role": "user", "content": "Why?"}], "include": ["reasoning.encrypted_content"], "text": {"verbosity": "low"}});
    let (events, is_whole) = told(&router.post(RESPONSES, &question("text", &list)).await);
    assert!(is_whole, "{events:?}");
    let asked = mocks.iter().flat_map(MockWorker::seen).rfind(|seen| seen.path == RESPONSES).unwrap();
    let asked: Value = serde_json::from_slice(&asked.body).unwrap();
    assert_eq!(asked["input"].as_array().unwrap().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_nobody_else_could_go_on_with_ends_with_an_error() {
    for (name, how, extra) in [
        ("old", "text", json!({})),
        ("ends", "text", json!({})),
        ("", "text", json!({"previous_response_id": "resp_0"})),
        ("", "text", json!({"text": {"format": {"type": "json_schema"}}})),
        ("", "text", json!({"include": ["message.output_text.logprobs"]})),
        ("", "text", json!({"max_output_tokens": 3})),
        ("", "half a thought", json!({})),
        ("", "one letter of a text", json!({})),
        (
            "",
            "text",
            json!({"input": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "The"}]}),
        ),
        (
            "",
            "text",
            json!({"input": [{"role": "user", "content": "Why?"}, {"type": "function_call", "name": "look"}]}),
        ),
        ("", "text that is over", json!({})),
    ] {
        let (_mocks, router) = fleet(name).await;
        let (events, is_whole) = told(&router.post(RESPONSES, &question(how, &extra)).await);
        assert!(!is_whole && events.last().unwrap()["type"] == "error", "{name} {how} {extra}: {events:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn of_engines_of_two_versions_the_later_goes_on() {
    let start = |models| MockWorker::start(models, |seen| answers(seen, false));
    let [old, new] = [start(&[MODEL, "vllm-old"][..]).await, start(&[MODEL]).await];
    for _ in 0..4 {
        let router = Router::start(&[&workers(&[&old, &new])]).await;
        let reply = router.post(RESPONSES, &question("text", &json!({}))).await;
        let (events, is_whole) = told(&reply);
        assert_eq!(is_whole, reply.header("x-router-worker") == "w0", "{events:?}");
    }
    let asked_for_the_rest = |mock: &MockWorker| {
        mock.seen().iter().filter(|seen| find(&seen.body, b"in_progress").is_some()).count()
    };
    assert_eq!(asked_for_the_rest(&old), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn it_breaks_off_again() {
    let mut mocks = Vec::new();
    for _ in 0..3 {
        mocks.push(MockWorker::start(&[MODEL], |seen| answers(seen, false)).await);
    }
    let all = workers(&mocks.iter().collect::<Vec<_>>());
    let router = Router::start(&[&all, "--retry-budget=off", "--policy=round_robin"]).await;
    let _others = others(&router, &mocks, (RESPONSES, question("held", &json!({})))).await;
    let reply = router.post(RESPONSES, &question("text again", &json!({}))).await;
    let (events, is_whole) = told(&reply);
    assert!(is_whole, "{}", reply.text());
    assert_eq!(output(&events)[0]["content"][0]["text"], "Skies was is");
}
