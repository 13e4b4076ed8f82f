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

/// The request for the rest, and the white space that what has been given ends in.
#[derive(Debug)]
pub struct Rest<'a> {
    /// The body.
    pub body: Payload,
    /// As it stands in JSON, of a chat. It is sent, since the model has written it; but some templates strip it, and then it is written again.
    pub space: &'a str,
}

/// What is asked for the rest of `given`; `None` if that cannot be asked.
#[must_use]
pub fn rest_of<'a>(given: &'a Given, body: &Members) -> Option<Rest<'a>> {
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
    let body = body.with_tail((prompt, opening, &tail), &added.join(","), &without)?;
    let space = match given.kind() {
        Kind::Chat => &text[end_without_space(text)..],
        Kind::Completions => "",
    };
    Some(Rest { body, space })
}

/// Where the white space at the end of a text in JSON begins.
fn end_without_space(text: &str) -> usize {
    let mut end = text.len();
    loop {
        match text.as_bytes()[..end] {
            [.., b' '] => end -= 1,
            [ref before @ .., b'n' | b'r' | b't'] => {
                // Of several backslashes, two each are one of the text's.
                let backslashes = before.iter().rev().take_while(|byte| **byte == b'\\').count();
                if backslashes % 2 == 0 {
                    return end;
                }
                end -= 2;
            }
            _ => return end,
        }
    }
}
