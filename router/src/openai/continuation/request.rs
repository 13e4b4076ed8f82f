//! What the next worker is asked: the same request, with what has been given of the answer at the end of its prompt.

use std::borrow::Cow;

use super::Kind;
use super::given::Given;
use crate::openai::members::Members;
use crate::payload::Payload;

/// Members that mean the same for what is left of an answer. With any other, nobody goes on.
const KEPT: &[&str] = &[
    "model",
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "logit_bias",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "add_special_tokens",
    "user",
    "cache_salt",
    "priority",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "chat_template_kwargs",
    "tools",
    "parallel_tool_calls",
];

/// Others, where they change nothing.
const HARMLESS: &[(&str, &[&str])] = &[
    ("n", &["1"]),
    ("best_of", &["1"]),
    ("echo", &["false"]),
    ("logprobs", &["false"]),
    ("top_logprobs", &["0"]),
    ("frequency_penalty", &["0", "0.0"]),
    ("presence_penalty", &["0", "0.0"]),
    ("min_tokens", &["0"]),
    ("suffix", &["\"\""]),
    ("tool_choice", &["\"auto\"", "\"none\""]),
    ("response_format", &["{\"type\":\"text\"}", "{\"type\": \"text\"}"]),
];

/// Whether a request asks for one answer, so that nothing is left of it once that has ended.
#[must_use]
pub fn asks_for_one(body: &Members) -> bool {
    body.all(|name: &str, value: &[u8]| match name {
        "n" | "best_of" => [&b"1"[..], b"null"].contains(&value),
        "prompt" => value.starts_with(b"\""),
        _ => true,
    })
}

/// What is asked for the rest of `given`; `None` if that cannot be asked.
#[must_use]
pub fn rest_of(given: &Given, body: &Members) -> Option<Payload> {
    let (prompt, opening) = match given.kind() {
        Kind::Chat => ("messages", b'['),
        Kind::Completions => ("prompt", b'"'),
    };
    let is_kept = |name: &str, value: &[u8]| {
        let means_nothing = |(other, values): &(&str, &[&str])| {
            *other == name && values.iter().any(|harmless| harmless.as_bytes() == value)
        };
        name == prompt || KEPT.contains(&name) || value == b"null" || HARMLESS.iter().any(means_nothing)
    };
    if !given.can_go_on() || !body.all(is_kept) {
        return None;
    }
    let text = given.text();
    // Without it engines have defaults of their own, which what has been given is part of.
    if given.kind() == Kind::Completions && !body.has("max_tokens") {
        return None;
    }
    let mut added = Vec::new();
    let mut without = Vec::new();
    for name in ["max_tokens", "max_completion_tokens"] {
        if body.has(name) {
            let left = body.number(name)?.checked_sub(given.pieces() as u64).filter(|left| *left > 0)?;
            added.push(format!("\"{name}\":{left}"));
            without.push(name);
        }
    }
    let tail = match given.kind() {
        _ if text.is_empty() => Cow::Borrowed(""),
        // A model that thinks in the open has not ended its thought: no template writes half of one.
        Kind::Chat if text.contains("<think>") && !text.contains("</think>") => return None,
        Kind::Chat => {
            added.push("\"add_generation_prompt\":false,\"continue_final_message\":true".to_owned());
            Cow::Owned(format!(",{{\"role\":\"assistant\",\"content\":\"{text}\"}}"))
        }
        Kind::Completions => Cow::Borrowed(text),
    };
    body.with_tail((prompt, opening, &tail), &added.join(","), &without)
}
