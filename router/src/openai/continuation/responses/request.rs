//! What is asked for the rest of a response: the same, with what has been given of it behind its input.

use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::super::given::Given;
use super::super::request::{changes_nothing, left};
use crate::openai::members::{Members, Others};
use crate::payload::Payload;

/// Members that mean the same for what is left of a response. With any other, nobody goes on.
const KEPT: [&str; 31] = [
    "model",
    "input",
    "instructions",
    "stream",
    "max_output_tokens",
    "metadata",
    "client_metadata",
    "parallel_tool_calls",
    "reasoning",
    "store",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "logit_bias",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "tools",
    "user",
    "session_id",
    "cache_salt",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "priority",
    "chat_template_kwargs",
    "stream_options",
];

/// Others, where they change nothing.
const HARMLESS: [(&str, &[&str]); 8] = [
    ("background", &["false"]),
    ("include_reasoning", &["true"]),
    ("tool_choice", &["\"auto\"", "\"none\""]),
    ("truncation", &["\"disabled\""]),
    ("top_logprobs", &["0"]),
    ("frequency_penalty", &["0", "0.0"]),
    ("presence_penalty", &["0", "0.0"]),
    ("enable_response_messages", &["false"]),
];

/// How long it may be.
const LIMIT: &str = "max_output_tokens";

/// The body that asks for the rest of `given`; `None` if it cannot be asked for.
#[must_use]
pub fn rest_of(given: &Given, body: &Members) -> Option<Payload> {
    let is_kept = |name: &str, value: &[u8]| {
        let is_looked_at = ["text", "include"].contains(&name);
        KEPT.contains(&name) || is_looked_at || changes_nothing(&HARMLESS, (name, value))
    };
    let is_absent_or =
        |name: &str, is_it: fn(Value) -> bool| !body.has(name) || body.parsed(name).is_some_and(is_it);
    let is_text = is_absent_or("text", |text| text["format"].is_null() || text["format"]["type"] == "text");
    // Agents ask for what no engine has to give.
    let includes = is_absent_or("include", |what| {
        what.as_array().is_some_and(|all| all.iter().all(|one| one == "reasoning.encrypted_content"))
    });
    if !given.can_go_on() || !body.all(is_kept) || !is_text || !includes {
        return None;
    }
    // What the client has begun itself, or a call, would be one turn with what was given.
    let ends_with_the_models = body.parsed("input").is_none_or(|input: Value| {
        let last = input.as_array().and_then(|items| items.last());
        last.is_some_and(|item| {
            let kind = item["type"].as_str().unwrap_or("message");
            item["role"] == "assistant" || kind == "reasoning" || kind.ends_with("_call")
        })
    });
    if ends_with_the_models {
        return None;
    }
    let items = given.items()?;
    let place = items.message.as_ref().filter(|_| !given.text().is_empty())?;
    // A thought that is not over is in no item yet.
    let thought = match given.thought() {
        Some(_) => format!(",{}", items.thought.as_ref()?),
        None => String::new(),
    };
    let message = format!(
        ",{{\"type\":\"message\",\"id\":{},\"role\":\"assistant\",\"status\":\"in_progress\",\"content\":[{{\"type\":\"output_text\",\"text\":\"{}\",\"annotations\":[]}}]}}",
        Value::from(&*place.item_id),
        given.text(),
    );
    let mut added = Vec::new();
    if body.has(LIMIT) {
        added.push(format!("\"{LIMIT}\":{}", left(given, body.number(LIMIT)?)?));
    }
    let tail = thought + &message;
    if let Some(body) = body.with_tail(("input", b'[', &tail), &added.join(","), Others::Except(&[LIMIT])) {
        return Some(body);
    }
    let input: Box<RawValue> = body.parsed("input")?;
    input.get().starts_with('"').then_some(())?;
    added.push(format!("\"input\":[{{\"role\":\"user\",\"content\":{}}}{tail}]", input.get()));
    Some(body.with(&added.join(","), &[LIMIT, "input"]))
}

/// A chat that says next to nothing, of the same model: what is asked of an engine to know whether its template goes on with a message.
#[must_use]
pub fn short_chat(body: &Members) -> Value {
    let model: Option<Value> = body.parsed("model");
    json!({"model": model, "messages": [{"role": "user", "content": "Go on."}]})
}
