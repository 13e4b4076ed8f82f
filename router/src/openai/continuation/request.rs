//! What the next worker is asked: the same request, with what has been given of the answer at the end of its prompt.

use std::borrow::Cow;

use super::Kind;
use super::given::Given;
use super::responses::request as responses;
use super::tokens::{Next, message};
use crate::openai::members::{Members, Others};
use crate::payload::Payload;

/// How the rest of an answer can be asked for.
#[derive(Debug)]
pub enum Rest {
    /// With this body, where the whole was asked for.
    Body(Payload),
    /// By way of [tokens](super::tokens), of engines that tell them.
    Tokens,
}

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
    "reasoning_effort",
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
    ("include_reasoning", &["true"]),
    ("suffix", &["\"\""]),
    ("tool_choice", &["\"auto\"", "\"none\""]),
    ("response_format", &["{\"type\":\"text\"}", "{\"type\": \"text\"}"]),
];

/// Whether a member might as well not be there, by this list of such values.
pub(super) fn changes_nothing(harmless: &[(&str, &[&str])], (name, value): (&str, &[u8])) -> bool {
    let is_it = |(other, values): &(&str, &[&str])| {
        *other == name && values.iter().any(|harmless| harmless.as_bytes() == value)
    };
    value == b"null" || harmless.iter().any(is_it)
}

/// Whether a request asks for one answer, so that nothing is left of it once that has ended.
#[must_use]
pub fn asks_for_one(body: &Members) -> bool {
    body.all(|name: &str, value: &[u8]| match name {
        "n" | "best_of" => [&b"1"[..], b"null"].contains(&value),
        "prompt" => value.starts_with(b"\""),
        _ => true,
    })
}

/// How the rest of `given` is asked for; `None` if it cannot be.
#[must_use]
pub fn rest_of(given: &Given, body: &Members) -> Option<Rest> {
    let (prompt, opening) = match given.kind() {
        Kind::Chat => ("messages", b'['),
        Kind::Completions => ("prompt", b'"'),
        // It is to be a chat by now.
        Kind::Messages => return None,
        Kind::Responses => return responses::rest_of(given, body).map(Rest::Body),
    };
    let is_kept = |name: &str, value: &[u8]| {
        name == prompt || KEPT.contains(&name) || changes_nothing(HARMLESS, (name, value))
    };
    if !given.can_go_on() || !body.all(is_kept) {
        return None;
    }
    // Without it engines have defaults of their own, which what has been given is part of.
    if given.kind() == Kind::Completions && !body.has("max_tokens") {
        return None;
    }
    let mut added = limits(given, body)?;
    let text = given.text();
    let tail = match given.kind() {
        Kind::Chat if given.thought().is_some() || thinks_in_the_open(text) => {
            return Next::after(given, body).map(|_| Rest::Tokens);
        }
        _ if text.is_empty() => Cow::Borrowed(""),
        Kind::Chat => {
            added.push(CONTINUE_FINAL_MESSAGE.to_owned());
            Cow::Owned(message(given))
        }
        Kind::Completions | Kind::Messages | Kind::Responses => Cow::Borrowed(text),
    };
    body.with_tail((prompt, opening, &tail), &added.join(","), Others::Except(&LIMITS)).map(Rest::Body)
}

/// That what the last message says is gone on with.
pub(super) const CONTINUE_FINAL_MESSAGE: &str =
    "\"add_generation_prompt\":false,\"continue_final_message\":true";

/// Members that say how long an answer may be. Of two the second counts.
pub(super) const LIMITS: [&str; 2] = ["max_tokens", "max_completion_tokens"];

/// The same for the rest, each as JSON text; `None` if nothing is left, or one says something else than a number.
pub(super) fn limits(given: &Given, body: &Members) -> Option<Vec<String>> {
    let there = LIMITS.iter().filter(|name| body.has(name));
    there.map(|name| Some(format!("\"{name}\":{}", left(given, body.number(name)?)?))).collect()
}

/// What is left of `most` tokens.
pub(super) fn left(given: &Given, most: u64) -> Option<u64> {
    most.checked_sub(given.pieces() as u64).filter(|left| *left > 0)
}

/// A model whose engine does not tell thoughts from answers has not ended its thought: no template writes half of one.
fn thinks_in_the_open(text: &str) -> bool {
    text.contains("<think>") && !text.contains("</think>")
}
