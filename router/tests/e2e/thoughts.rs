//! Streams that break off within a thought, or behind one, are gone on with.
//!
//! The mocks play an engine that tells thoughts from answers: each character is a token, and so is each mark around a thought.

use serde_json::{Value, json};

use crate::harness::*;

const CHAT: &str = "/v1/chat/completions";
const MODEL: &str = "vllm-m";
const BEGIN: u32 = 2_000_000;
const END: u32 = 2_000_001;
/// What the model writes, and what an engine tells of it.
const WRITES: &str = "<think>\nHm, so.\n</think>\n\nThe sky.";
const THOUGHT: &str = "\nHm, so.";
const ANSWER: &str = "\n\nThe sky.";

fn tokens(text: &str) -> Vec<u32> {
    let mut tokens = Vec::new();
    let mut rest = text;
    while let Some(next) = rest.chars().next() {
        let mark =
            [("<think>", BEGIN), ("</think>", END)].into_iter().find(|(mark, _)| rest.starts_with(mark));
        let (length, token) =
            mark.map_or((next.len_utf8(), u32::from(next)), |(mark, token)| (mark.len(), token));
        tokens.push(token);
        rest = &rest[length..];
    }
    tokens
}

fn text(token: u32) -> String {
    match token {
        BEGIN => "<think>".to_owned(),
        END => "</think>".to_owned(),
        token => char::from_u32(token).unwrap().to_string(),
    }
}

/// A chat as its template writes it.
fn chat(body: &Value) -> String {
    let mut written = "U:x\nA:".to_owned();
    assert_eq!(body["messages"][0]["role"], "user");
    if body["continue_final_message"] == true {
        let message = &body["messages"][1];
        let thought = message["reasoning_content"].as_str().unwrap();
        assert_eq!(message["reasoning"], thought);
        let content = message["content"].as_str().unwrap().trim_start();
        written += &format!("<think>\n{}\n</think>\n\n{content}", thought.trim());
    }
    written
}

fn event(delta: &Value, finish: &Value) -> String {
    chunk(&format!(
        "data: {}\n\n",
        json!({"id": "a", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}], "usage": null})
    ))
    .into_iter()
    .map(char::from)
    .collect()
}

/// Pieces of a chat's answer, and its end.
fn pieces(rest: &[(&str, String)]) -> Vec<String> {
    rest.iter().map(|(name, piece)| event(&json!({*name: piece}), &Value::Null)).collect()
}

fn by_character<'a>(name: &'a str, text: &str) -> Vec<(&'a str, String)> {
    text.chars().map(|character| (name, character.to_string())).collect()
}

fn usage(prompt: usize, completion: usize) -> String {
    let usage = json!({"prompt_tokens": prompt, "completion_tokens": completion});
    format!("data: {}\n\n", json!({"id": "b", "choices": [], "usage": usage}))
}

fn stream(events: &[String], ends: Option<String>) -> Vec<Act> {
    let mut all = sse_head();
    events.iter().for_each(|event| all.extend(event.as_bytes()));
    match ends {
        Some(end) => {
            all.extend(chunk(&end));
            all.extend(chunk("data: [DONE]\n\n"));
            all.extend(last_chunk());
            vec![Act::Write(all)]
        }
        None => vec![Act::Write(all), Act::Close],
    }
}

/// An engine that dies of a chat after as many pieces of the answer as its first message says.
fn answers(seen: &Seen) -> Vec<Act> {
    let body: Value = serde_json::from_slice(&seen.body).unwrap();
    match &*seen.path {
        "/tokenize" => {
            let text = body["prompt"].as_str().map_or_else(|| chat(&body), str::to_owned);
            let told = json!({"tokens": tokens(&text), "count": 0, "max_model_len": 4096});
            vec![Act::Write(json_reply(200, &told.to_string()))]
        }
        "/v1/completions" => completes(&body),
        _ if body["continue_final_message"] == true => {
            let written = chat(&body);
            let answer = written.split_once("</think>").unwrap().1;
            let rest = ANSWER.strip_prefix(answer).unwrap();
            let events = pieces(&by_character("content", rest));
            let stop = format!(
                "data: {}\n\n",
                json!({"id": "b", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
            );
            stream(&events, Some(stop + &usage(tokens(&written).len(), rest.len())))
        }
        _ => {
            let dies_after: usize = body["messages"][0]["content"].as_str().unwrap().parse().unwrap();
            let opening = event(&json!({"role": "assistant", "content": ""}), &Value::Null);
            let told = [by_character("reasoning", THOUGHT), by_character("content", ANSWER)].concat();
            stream(&[vec![opening], pieces(&told[..dies_after])].concat(), None)
        }
    }
}

fn completes(body: &Value) -> Vec<Act> {
    let prompt: Vec<u32> =
        body["prompt"].as_array().unwrap().iter().map(|token| token.as_u64().unwrap() as u32).collect();
    let written: String = prompt.iter().map(|token| text(*token)).collect();
    let given = written.strip_prefix("U:x\nA:").unwrap();
    let rest = tokens(WRITES.strip_prefix(given).unwrap_or_else(|| panic!("{given:?}")));
    let stops =
        |token: &u32| body["stop_token_ids"].as_array().is_some_and(|stops| stops.contains(&json!(token)));
    let written: Vec<u32> = rest.iter().copied().take_while(|token| !stops(token)).collect();
    let stopped_by = rest.get(written.len());
    let choice = |text: &str, finish: &Value| {
        let choice = json!({"index": 0, "text": text, "finish_reason": finish, "stop_reason": stopped_by.filter(|_| !finish.is_null())});
        format!("data: {}\n\n", json!({"id": "b", "object": "text_completion", "choices": [choice]}))
    };
    let events: Vec<String> = written
        .iter()
        .map(|token| chunk(&choice(&text(*token), &Value::Null)).into_iter().map(char::from).collect())
        .collect();
    let generated = written.len() + usize::from(stopped_by.is_some());
    stream(&events, Some(choice("", &json!("stop")) + &usage(prompt.len(), generated)))
}

#[tokio::test(flavor = "multi_thread")]
async fn wherever_it_breaks_off_a_thought_and_its_answer_are_told_once() {
    for tools in [json!(null), json!([{"type": "function", "function": {"name": "look"}}])] {
        let mocks = [MockWorker::start(&[MODEL], answers).await, MockWorker::start(&[MODEL], answers).await];
        let router = Router::start(&[&workers(&[&mocks[0], &mocks[1]])]).await;
        // With tools a thought is not gone on with, nor what says nothing yet.
        let first = if tools.is_null() { 1 } else { THOUGHT.len() + 3 };
        let all = first..=THOUGHT.len() + ANSWER.len();
        for dies_after in all.clone() {
            let body = json!({"model": MODEL, "stream": true, "tools": tools, "max_tokens": 90,
                "messages": [{"role": "user", "content": dies_after.to_string()}]});
            let reply = router.post(CHAT, &body.to_string()).await;
            let told = reply.text();
            let why = format!("after {dies_after}, tools {tools}: {told}");
            let data: Vec<_> = told.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).collect();
            assert!(reply.whole && data.last() == Some(&"[DONE]"), "{why}");
            let events: Vec<Value> =
                data[..data.len() - 1].iter().map(|data| serde_json::from_str(data).unwrap()).collect();
            let all = |name: &str| {
                let piece = |event: &Value| {
                    event["choices"][0]["delta"][name].as_str().unwrap_or_default().to_owned()
                };
                events.iter().map(piece).collect::<String>()
            };
            // The white space at a thought's end the first engine does not tell, and templates write the white space behind one themselves.
            assert_eq!(
                (all("reasoning").trim_end(), all("content").trim_start()),
                (THOUGHT, ANSWER.trim_start()),
                "{why}"
            );
            assert!(all("content") == ANSWER || !tools.is_null(), "{why}");
            let thought_pieces = all("reasoning").len();
            assert!(events.iter().all(|event| event["id"] == "a"), "{why}");
            let ends = events.iter().filter(|event| event["choices"][0]["finish_reason"] == "stop");
            assert_eq!(ends.count(), 1, "{why}");
            let usage = &events.last().unwrap()["usage"];
            let thought = &usage["completion_tokens_details"]["reasoning_tokens"];
            assert_eq!((&usage["prompt_tokens"], thought), (&json!(6), &json!(thought_pieces)), "{why}");
        }
        let continued = router.metric("router_streams_continued_total").await;
        assert_eq!(continued, all.count() as f64);
        assert_eq!(router.metric("router_errors_total{blame=\"worker\"}").await, 0.0);
    }
}

/// An engine with a renderer of its own, which ends a message whatever it is told, of a model that does not think.
fn ends_messages(seen: &Seen) -> Vec<Act> {
    let body: Value = serde_json::from_slice(&seen.body).unwrap();
    match &*seen.path {
        "/tokenize" if body["continue_final_message"] == true => {
            let text = body["messages"][1]["content"].as_str().unwrap();
            let tokens = [tokens("U:x\nA:"), tokens(text), vec![END]].concat();
            vec![Act::Write(json_reply(200, &json!({"tokens": tokens, "max_model_len": 4096}).to_string()))]
        }
        "/v1/completions" => {
            let prompt: Vec<u32> = serde_json::from_value(body["prompt"].clone()).unwrap();
            let written: String = prompt.into_iter().map(text).collect();
            let rest = ANSWER.strip_prefix(written.strip_prefix("U:x\nA:").unwrap()).unwrap();
            let choice = |text: &str, finish: Value| {
                let choice = json!({"index": 0, "text": text, "finish_reason": finish});
                format!("data: {}\n\n", json!({"id": "b", "choices": [choice]}))
            };
            let events = [String::from_utf8(chunk(&choice(rest, Value::Null))).unwrap()];
            stream(&events, Some(choice("", json!("stop")) + &usage(written.len(), rest.len())))
        }
        _ if body["continue_final_message"] == true => {
            let again = pieces(&[("content", "Another turn.".to_owned())]);
            stream(&again, Some(event(&json!({}), &json!("stop"))))
        }
        "/tokenize" => answers(seen),
        _ => {
            let opening = event(&json!({"role": "assistant", "content": ""}), &Value::Null);
            let told = pieces(&by_character("content", &ANSWER[..6]));
            stream(&[vec![opening], told].concat(), None)
        }
    }
}

/// How often an engine was to go on with a message.
fn asked_for_messages(mocks: &[MockWorker; 2]) -> usize {
    let asked = mocks.iter().flat_map(MockWorker::seen).filter(|seen| seen.path == CHAT);
    asked.filter(|seen| String::from_utf8_lossy(&seen.body).contains("continue_final_message")).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn where_a_template_ends_what_has_begun_the_rest_is_asked_for_in_tokens() {
    let mocks =
        [MockWorker::start(&[MODEL], ends_messages).await, MockWorker::start(&[MODEL], ends_messages).await];
    let router = Router::start(&[&workers(&[&mocks[0], &mocks[1]])]).await;
    let ask = async |tools: Value| {
        let body = json!({"model": MODEL, "stream": true, "tools": tools, "messages": [{"role": "user", "content": "1"}]});
        router.post(CHAT, &body.to_string()).await
    };
    let reply = ask(Value::Null).await;
    let told = reply.text();
    let events = told.split("\n\n").filter_map(|event| event.strip_prefix("data: {"));
    let events = events.map(|event| serde_json::from_str::<Value>(&format!("{{{event}")).unwrap());
    let content =
        |event: Value| event["choices"][0]["delta"]["content"].as_str().unwrap_or_default().to_owned();
    assert_eq!(events.map(content).collect::<String>(), ANSWER, "{told}");
    assert!(reply.whole && told.contains("[DONE]") && !told.contains("Another"), "{told}");
    assert!(asked_for_messages(&mocks) == 0);
    // A completion knows no calls.
    let refused = ask(json!([{"type": "function", "function": {"name": "look"}}])).await;
    assert!(!refused.whole && refused.text().contains("has only begun"), "{}", refused.text());
}

#[tokio::test(flavor = "multi_thread")]
async fn that_a_model_goes_on_with_messages_is_asked_once() {
    let goes_on = |seen: &Seen| {
        let body: Value = serde_json::from_slice(&seen.body).unwrap();
        match &*seen.path {
            "/tokenize" => {
                let text = body["prompt"].as_str().map(str::to_owned);
                let chat = || format!("U:x\nA:{}", body["messages"][1]["content"].as_str().unwrap());
                let told = json!({"tokens": tokens(&text.unwrap_or_else(chat)), "max_model_len": 4096});
                vec![Act::Write(json_reply(200, &told.to_string()))]
            }
            _ if body["continue_final_message"] == true => {
                let rest = pieces(&[("content", ANSWER[6..].to_owned())]);
                stream(&rest, Some(event(&json!({}), &json!("stop"))))
            }
            _ => stream(&pieces(&by_character("content", &ANSWER[..6])), None),
        }
    };
    let mocks = [MockWorker::start(&[MODEL], goes_on).await, MockWorker::start(&[MODEL], goes_on).await];
    let router = Router::start(&[&workers(&[&mocks[0], &mocks[1]])]).await;
    for _ in 0..3 {
        let body = json!({"model": MODEL, "stream": true, "messages": [{"role": "user", "content": "1"}]});
        let reply = router.post(CHAT, &body.to_string()).await;
        assert!(reply.whole && reply.text().contains("stop"), "{}", reply.text());
    }
    let asked = mocks.iter().flat_map(MockWorker::seen).filter(|seen| seen.path == "/tokenize");
    assert_eq!(asked.count(), 2, "the chat, and the text");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_whose_answers_have_marks_of_their_own_is_not_gone_on_with_in_tokens() {
    let marked = |seen: &Seen| {
        let body: Value = serde_json::from_slice(&seen.body).unwrap();
        match body["prompt"].as_str() {
            Some(text) if seen.path == "/tokenize" && text.contains("<response>") => {
                vec![Act::Write(json_reply(200, &json!({"tokens": [BEGIN, END, 7]}).to_string()))]
            }
            _ => answers(seen),
        }
    };
    let mocks = [MockWorker::start(&[MODEL], marked).await, MockWorker::start(&[MODEL], marked).await];
    let router = Router::start(&[&workers(&[&mocks[0], &mocks[1]])]).await;
    let body = json!({"model": MODEL, "stream": true, "messages": [{"role": "user", "content": "3"}]});
    let reply = router.post(CHAT, &body.to_string()).await;
    assert!(!reply.whole && reply.text().contains("tells the tokens"), "{}", reply.text());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thought_that_ends_with_the_last_token_allowed_is_all_that_is_told() {
    let mocks = [MockWorker::start(&[MODEL], answers).await, MockWorker::start(&[MODEL], answers).await];
    let router = Router::start(&[&workers(&[&mocks[0], &mocks[1]])]).await;
    // The thought, the line's end behind it, and its mark.
    let whole = THOUGHT.len() + 2;
    for (most, finish, is_answered) in [(whole, "length", false), (whole + 1, "stop", true)] {
        let body = json!({"model": MODEL, "stream": true, "max_tokens": most,
            "messages": [{"role": "user", "content": "3"}]});
        let reply = router.post(CHAT, &body.to_string()).await;
        let told = reply.text();
        assert!(reply.whole && told.ends_with("data: [DONE]\n\n") && !told.contains("\"error\""), "{told}");
        assert!(told.contains(&format!("\"finish_reason\":\"{finish}\"")), "{told}");
        assert_eq!(told.contains("\"content\":\"T\""), is_answered, "{told}");
    }
    assert_eq!(router.metric("router_errors_total{blame=\"worker\"}").await, 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn where_nobody_tells_tokens_a_thought_ends_with_an_error() {
    let mute = |seen: &Seen| match &*seen.path {
        "/tokenize" => vec![Act::Write(json_reply(404, "{}"))],
        _ => answers(seen),
    };
    for (model, tools) in [(&["other-m"][..], json!(null)), (&[MODEL], json!(null)), (&[MODEL], json!([{}]))]
    {
        let mocks = [MockWorker::start(model, mute).await, MockWorker::start(model, mute).await];
        let router = Router::start(&[&workers(&[&mocks[0], &mocks[1]])]).await;
        let body = json!({"model": model[0], "stream": true, "tools": tools, "messages": [{"role": "user", "content": "3"}]});
        let reply = router.post(CHAT, &body.to_string()).await;
        assert!(!reply.whole && reply.text().contains("worker_failed"), "{reply:?}");
        assert_eq!(router.metric("router_errors_total{blame=\"worker\"}").await, 1.0);
        until("nothing is in flight", || async { router.metric("router_requests_in_flight").await == 0.0 })
            .await;
    }
}

/// SGLang: the text of a message that is continued stands behind the opening of the answer, and thoughts are told apart only where that is wanted. Dies of
/// a chat after as many pieces of the answer as its first message says.
fn answers_as_sglang(seen: &Seen) -> Vec<Act> {
    let body: Value = serde_json::from_slice(&seen.body).unwrap();
    if seen.path == "/tokenize" {
        let text = body["prompt"].as_str().unwrap_or("U:x\nA:");
        return vec![Act::Write(json_reply(
            200,
            &json!({"tokens": tokens(text), "count": 0, "max_model_len": 9}).to_string(),
        ))];
    }
    if body["continue_final_message"] == true {
        assert_eq!(body["separate_reasoning"], json!(false));
        let rest = WRITES.strip_prefix(body["messages"][1]["content"].as_str().unwrap()).unwrap();
        let written: Vec<(&str, String)> =
            tokens(rest).into_iter().map(|token| ("content", text(token))).collect();
        let stop = event(&json!({}), &json!("stop"));
        return stream(&[pieces(&written), vec![stop]].concat(), Some(usage(6 + 3, tokens(rest).len())));
    }
    let dies_after: usize = body["messages"][0]["content"].as_str().unwrap().parse().unwrap();
    let told =
        [by_character("reasoning_content", THOUGHT_TO_ITS_END), by_character("content", ANSWER)].concat();
    stream(&pieces(&told[..dies_after]), None)
}

/// As SGLang tells it.
const THOUGHT_TO_ITS_END: &str = "\nHm, so.\n";

#[tokio::test(flavor = "multi_thread")]
async fn sglang_goes_on_within_a_thought_and_behind_it() {
    let model: &[&str] = &["sglang-m"];
    let mocks = [
        MockWorker::start(model, answers_as_sglang).await,
        MockWorker::start(model, answers_as_sglang).await,
    ];
    let router = Router::start(&[&workers(&[&mocks[0], &mocks[1]])]).await;
    for dies_after in [3, THOUGHT_TO_ITS_END.len(), THOUGHT_TO_ITS_END.len() + 4] {
        for tools in [json!(null), json!([{}])] {
            // A call might end a thought without its mark.
            let goes_on = tools.is_null() || dies_after > THOUGHT_TO_ITS_END.len();
            let body = json!({"model": "sglang-m", "stream": true, "tools": tools,
                "messages": [{"role": "user", "content": dies_after.to_string()}]});
            let reply = router.post(CHAT, &body.to_string()).await;
            assert_eq!(reply.whole, goes_on, "{dies_after} {tools} {reply:?}");
            if !goes_on {
                continue;
            }
            let text = reply.text();
            let events = text.split("\n\n").filter_map(|event| event.strip_prefix("data: {"));
            let events: Vec<Value> =
                events.map(|event| serde_json::from_str(&format!("{{{event}")).unwrap()).collect();
            let all = |name: &str| -> String {
                events.iter().filter_map(|event| event["choices"][0]["delta"][name].as_str()).collect()
            };
            assert_eq!(
                (&*all("reasoning_content"), &*all("content")),
                (THOUGHT_TO_ITS_END, ANSWER),
                "{dies_after}"
            );
            assert!(
                text.ends_with("data: [DONE]\n\n") && text.contains("\"finish_reason\":\"stop\""),
                "{text}"
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_that_stand_behind_a_mark_are_not_gone_on_with_by_sglang() {
    let model: &[&str] = &["sglang-gpt-oss"];
    let dies = |seen: &Seen| {
        assert!(!seen.body.windows(22).any(|part| part == b"continue_final_message"));
        stream(&pieces(&by_character("content", "The s")), None)
    };
    let mocks = [MockWorker::start(model, dies).await, MockWorker::start(model, dies).await];
    let router = Router::start(&[&workers(&[&mocks[0], &mocks[1]])]).await;
    let body = json!({"model": model[0], "stream": true, "messages": [{"role": "user", "content": "x"}]});
    let reply = router.post(CHAT, &body.to_string()).await;
    assert!(!reply.whole && reply.text().contains("worker_failed"), "{reply:?}");
}
