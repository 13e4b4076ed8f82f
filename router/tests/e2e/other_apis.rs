//! What generates text beside OpenAI's chat and completions: its responses, Anthropic's messages, SGLang's own.

use std::sync::Arc;

use serde_json::{Value, json};
use tokio::sync::Notify;

use crate::harness::*;

const RESPONSES: &str = "/v1/responses";
const MESSAGES: &str = "/v1/messages";

fn named(name: &str, more: &Value) -> String {
    let mut data = json!({ "type": name });
    data.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    format!("event: {name}\ndata: {data}\n\n")
}

/// What an engine says of a response before it computes anything.
fn opening() -> Vec<Act> {
    let events = [named("response.created", &json!({})), named("response.in_progress", &json!({}))];
    [vec![Act::Write(sse_head())], events.map(|event| Act::Write(chunk(&event))).to_vec()].concat()
}

fn delta() -> String {
    named("response.output_text.delta", &json!({"delta": "blue"}))
}

fn completed() -> String {
    let usage = json!({"input_tokens": 12, "input_tokens_details": {"cached_tokens": 4}, "output_tokens": 3});
    named("response.completed", &json!({"response": {"usage": usage}}))
}

fn body(stream: bool) -> String {
    json!({"model": "m", "stream": stream, "input": "Why is the sky blue?"}).to_string()
}

fn messages() -> String {
    let messages = [json!({"role": "user", "content": "Why is the sky blue?"})];
    json!({"model": "m", "stream": true, "max_tokens": 9, "messages": messages}).to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_response_that_has_only_been_announced_is_asked_for_elsewhere() {
    for end in [Act::Close, Act::Write(last_chunk())] {
        let bad = MockWorker::start(&["m"], move |_| [opening(), vec![end.clone()]].concat()).await;
        let answers = [delta(), completed()].map(|event| Act::Write(chunk(&event)));
        let answers = [opening(), answers.to_vec(), vec![Act::Write(last_chunk())]].concat();
        let good = MockWorker::start(&["m"], move |_| answers.clone()).await;
        let router = Router::start(&[&workers(&[&bad, &good]), "--policy=round_robin"]).await;
        for _ in 0..4 {
            let reply = router.post(RESPONSES, &body(true)).await;
            let text = reply.text();
            assert!(reply.status == 200 && reply.whole, "{reply:?}");
            assert_eq!(text.matches("event: response.created").count(), 1, "{text}");
            assert!(text.contains("output_text.delta") && text.ends_with(&completed()), "{text}");
        }
        assert!(!bad.seen().is_empty());
        assert_eq!(tokens(&router).await, [48., 16., 12.]);
        let name = "router_requests_total{endpoint=\"responses\",status=\"200\"}";
        assert_eq!(router.metric(name).await, 4.0);
    }
}

/// What answers have told of prompts, of what of them was cached, and of themselves.
async fn tokens(router: &Router) -> [f64; 3] {
    [
        router.metric("router_tokens_total{kind=\"prompt\"}").await,
        router.metric("router_cached_tokens_total{source=\"reported\"}").await,
        router.metric("router_tokens_total{kind=\"completion\"}").await,
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_announced_has_not_begun() {
    let goes_on = Arc::new(Notify::new());
    let held = Arc::clone(&goes_on);
    let worker = MockWorker::start(&["m"], move |_| {
        let rest = [delta(), completed()].map(|event| Act::Write(chunk(&event))).to_vec();
        [opening(), vec![Act::Wait(Arc::clone(&held))], rest, vec![Act::Write(last_chunk())]].concat()
    })
    .await;
    let router = Router::start(&[&workers(&[&worker])]).await;
    let address = router.address;
    let asking =
        tokio::spawn(async move { exchange(address, "POST", RESPONSES, &[], body(true).as_bytes()).await });
    until("it is there", || async { worker.seen().len() == 1 }).await;
    let queued = || async { router.metric("router_worker_prefill_tokens{worker=\"w0\"}").await };
    until("its prompt is counted", || async { queued().await > 0.0 }).await;
    assert_eq!(router.metric("router_ttft_seconds_count").await, 0.0);
    goes_on.notify_one();
    assert!(asking.await.unwrap().whole);
    until("it is over", || async { queued().await == 0.0 }).await;
    assert_eq!(router.metric("router_ttft_seconds_count").await, 1.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_that_break_off_say_so_in_the_words_of_their_api() {
    let start = named("message_start", &json!({"message": {}}));
    let text = named("content_block_delta", &json!({"delta": {"type": "text_delta", "text": "blue"}}));
    let stop = named("message_stop", &json!({}));
    let whole = [&start, &text, &stop].map(|event| Act::Write(chunk(event)));
    let begun = whole[..2].to_vec();
    let head = || vec![Act::Write(sse_head())];
    let ends_well = [head(), whole.to_vec(), vec![Act::Close]].concat();
    let breaks = [head(), begun.clone(), vec![Act::Close]].concat();
    let stops_short = [head(), begun, vec![Act::Write(last_chunk())]].concat();
    let worker = MockWorker::start(&["m"], move |seen| match find(&seen.body, b"break").is_some() {
        true => breaks.clone(),
        false if find(&seen.body, b"short").is_some() => stops_short.clone(),
        false => ends_well.clone(),
    })
    .await;
    let router = Router::start(&[&workers(&[&worker])]).await;
    let ask = |word: &str| {
        let body = messages().replace("blue", word);
        let router = &router;
        async move { router.post(MESSAGES, &body).await }
    };
    let short = ask("short").await;
    assert!(short.whole && !short.text().contains("error"), "it may never say it: {short:?}");
    assert!(ask("blue").await.text().ends_with(&stop), "what comes behind the end matters to nobody");
    for word in ["break", "short"] {
        let reply = ask(word).await;
        let text = reply.text();
        let (before, error) = text.trim_end().rsplit_once("\n\n").unwrap();
        let error: Value = serde_json::from_str(error.strip_prefix("event: error\ndata: ").unwrap()).unwrap();
        assert_eq!((&error["type"], &error["error"]["code"]), (&json!("error"), &json!("worker_failed")));
        assert!(before.contains("blue") && !reply.whole, "{word}: {text}");
    }
    let unknown = router.post(MESSAGES, &messages().replace("\"m\"", "\"x\"")).await;
    assert_eq!((unknown.status, &unknown.json()["type"]), (404, &json!("error")));
    assert_eq!(unknown.error().1, "model_not_found");
}

#[tokio::test(flavor = "multi_thread")]
async fn sglangs_own_answers_tell_their_usage() {
    let meta = json!({"prompt_tokens": 12, "completion_tokens": 3, "cached_tokens": 4});
    let worker =
        MockWorker::answering(&["m"], json_reply(200, &json!({"text": "a", "meta_info": meta}).to_string()))
            .await;
    let router = Router::start(&[&workers(&[&worker])]).await;
    let asked = json!({"text": "Why is the sky blue?", "sampling_params": {"max_new_tokens": 3}}).to_string();
    assert_eq!(router.post("/generate", &asked).await.status, 200);
    assert_eq!(tokens(&router).await, [12., 4., 3.]);
}
