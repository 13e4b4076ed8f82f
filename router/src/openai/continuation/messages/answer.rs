//! The rest of an answer in Anthropic's words, from the events of a chat: each thought and each text is a block, and so is each call of a tool.

use bytes::Bytes;
use serde_json::{Value, json};

use super::super::given::{Given, Part};
use super::super::tokens::Teller;
use super::event::Blocks;

/// The last event of a stream.
const STOP: &str = "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n";

/// Writes the rest.
#[derive(Debug)]
pub struct Answer {
    /// How many blocks have begun, and which of them goes on.
    index: u64,
    open: Option<Kind>,
    /// Text that came while a call was open, which is a block behind it.
    behind_call: String,
    /// Whose engines go on.
    teller: Teller,
    stop_sequences: Vec<String>,
    finish: Option<Finish>,
    usage: Option<Value>,
    is_over: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Thought,
    Text,
    Call,
}

/// Why a chat has ended.
#[derive(Debug)]
struct Finish {
    reason: Box<str>,
    /// By this sequence.
    sequence: Option<String>,
}

impl Answer {
    /// What follows on `given`, from an engine of `teller`'s; these sequences end it.
    #[must_use]
    pub fn after(given: &Given, teller: Teller, stop_sequences: Vec<String>) -> Self {
        let Blocks { begun, open } = given.blocks();
        let open = open.map(|part| if part == Part::Thought { Kind::Thought } else { Kind::Text });
        let index = if open.is_some() { begun - 1 } else { begun };
        let behind_call = String::new();
        Self { index, open, behind_call, teller, stop_sequences, finish: None, usage: None, is_over: false }
    }

    /// Whose engines make this chat of the message.
    #[must_use]
    pub fn teller(&self) -> Teller {
        self.teller
    }

    /// Whether all of it has been told.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.is_over
    }

    /// Whole events of the chat, in Anthropic's words.
    pub fn write(&mut self, events: &[u8]) -> Bytes {
        let mut out = String::new();
        for line in events.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii_end) {
            if line.starts_with(b":") {
                out += &String::from_utf8_lossy(line);
                out += "\n\n";
            }
            let Some(data) = line.strip_prefix(b"data:") else { continue };
            if data.trim_ascii() == b"[DONE]" {
                self.end(&mut out);
            } else if let Ok(event) = serde_json::from_slice(data) {
                self.event(&event, &mut out);
            }
        }
        out.into()
    }

    /// What is still to be said where the chat is whole but for the word for that, of so many tokens as far as is known.
    #[must_use]
    pub fn rest(&mut self, tokens: usize) -> Bytes {
        self.usage.get_or_insert_with(|| json!({"completion_tokens": tokens}));
        let mut out = String::new();
        self.end(&mut out);
        out.into()
    }

    fn event(&mut self, event: &Value, out: &mut String) {
        if event["error"].is_object() {
            // Nobody goes on with what the engine takes for the client's mistake.
            self.is_over = true;
            *out += &String::from_utf8_lossy(&failure(format!("data: {event}").as_bytes()));
        }
        if event["usage"].is_object() {
            self.usage = Some(event["usage"].clone());
        }
        let choice = &event["choices"][0];
        let delta = &choice["delta"];
        let thought = ["reasoning", "reasoning_content"].into_iter().find_map(|name| text(&delta[name]));
        if let Some(thought) = thought {
            self.begin(Kind::Thought, || json!({"type": "thinking", "thinking": ""}), out);
            self.piece(&json!({"type": "thinking_delta", "thinking": thought}), out);
        }
        if let Some(text) = text(&delta["content"]) {
            self.text(text, out);
        }
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            self.call(call, out);
        }
        if let Some(reason) = text(&choice["finish_reason"]) {
            let by = [&choice["stop_reason"], &choice["matched_stop"]].into_iter().find_map(Value::as_str);
            let sequence = by.filter(|by| self.stop_sequences.iter().any(|sequence| sequence == by));
            self.finish = Some(Finish { reason: reason.into(), sequence: sequence.map(str::to_owned) });
        }
    }

    fn text(&mut self, text: &str, out: &mut String) {
        if self.open == Some(Kind::Call) {
            self.behind_call += text;
            return;
        }
        self.begin(Kind::Text, || json!({"type": "text", "text": ""}), out);
        self.piece(&json!({"type": "text_delta", "text": text}), out);
    }

    /// A piece of a call, the first of which names it.
    fn call(&mut self, call: &Value, out: &mut String) {
        let function = &call["function"];
        if let Some(name) = text(&function["name"]) {
            self.end_block(out);
            let id = call["id"].as_str().unwrap_or_default();
            self.begin(Kind::Call, || json!({"type": "tool_use", "id": id, "name": name, "input": {}}), out);
        }
        if let Some(piece) = text(&function["arguments"])
            && self.open == Some(Kind::Call)
        {
            self.piece(&json!({"type": "input_json_delta", "partial_json": piece}), out);
        }
    }

    fn begin(&mut self, kind: Kind, block: impl FnOnce() -> Value, out: &mut String) {
        if self.open == Some(kind) {
            return;
        }
        self.end_block(out);
        self.open = Some(kind);
        put(out, &json!({"type": "content_block_start", "index": self.index, "content_block": block()}));
    }

    fn piece(&self, delta: &Value, out: &mut String) {
        put(out, &json!({"type": "content_block_delta", "index": self.index, "delta": delta}));
    }

    fn end_block(&mut self, out: &mut String) {
        let Some(kind) = self.open.take() else { return };
        // vLLM signs thoughts, though nobody can check that.
        if kind == Kind::Thought && self.teller == Teller::Vllm {
            let signature = format!("{:032x}", rand::random::<u128>());
            self.piece(&json!({"type": "signature_delta", "signature": signature}), out);
        }
        put(out, &json!({"type": "content_block_stop", "index": self.index}));
        self.index += 1;
        if !self.behind_call.is_empty() {
            let text = std::mem::take(&mut self.behind_call);
            self.text(&text, out);
            self.end_block(out);
        }
    }

    fn end(&mut self, out: &mut String) {
        if std::mem::replace(&mut self.is_over, true) {
            return;
        }
        let calls = self.open == Some(Kind::Call);
        self.end_block(out);
        let finish = self.finish.take();
        let reason = match finish.as_ref().map(|finish| &*finish.reason) {
            Some("length") => "max_tokens",
            Some("tool_calls") => "tool_use",
            _ if calls => "tool_use",
            _ if finish.as_ref().is_some_and(|finish| finish.sequence.is_some()) => "stop_sequence",
            _ => "end_turn",
        };
        let sequence = finish.and_then(|finish| finish.sequence).filter(|_| reason == "stop_sequence");
        let usage = usage(&self.usage.take().unwrap_or_default());
        put(
            out,
            &json!({"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": sequence}, "usage": usage}),
        );
        *out += STOP;
    }
}

/// What is said, if it says anything.
fn text(value: &Value) -> Option<&str> {
    value.as_str().filter(|text| !text.is_empty())
}

/// Anthropic counts what came from the cache apart.
fn usage(told: &Value) -> Value {
    let cached = told["prompt_tokens_details"]["cached_tokens"].as_u64();
    let mut usage = json!({"output_tokens": told["completion_tokens"].as_u64().unwrap_or_default()});
    if let Some(prompt) = told["prompt_tokens"].as_u64() {
        usage["input_tokens"] = prompt.saturating_sub(cached.unwrap_or_default()).into();
    }
    if let Some(cached) = cached {
        usage["cache_read_input_tokens"] = cached.into();
    }
    usage
}

/// What an engine says of its failure in the events of a chat, in Anthropic's words. Nothing of the answer: another one may go on with that.
#[must_use]
pub fn failure(events: &[u8]) -> Bytes {
    let mut told = events.split(|byte| *byte == b'\n').filter_map(|line| {
        let event: Value = serde_json::from_slice(line.strip_prefix(b"data:")?).ok()?;
        event["error"]["message"].as_str().map(str::to_owned)
    });
    let message = told.next().unwrap_or_else(|| "the engine has failed".to_owned());
    let mut out = String::new();
    put(&mut out, &json!({"type": "error", "error": {"type": "api_error", "message": message}}));
    out.into()
}

/// The last word, where all but that has been said.
#[must_use]
pub fn last_word() -> Bytes {
    Bytes::from_static(STOP.as_bytes())
}

fn put(out: &mut String, event: &Value) {
    let name = event["type"].as_str().unwrap_or_default();
    *out += &format!("event: {name}\ndata: {event}\n\n");
}
