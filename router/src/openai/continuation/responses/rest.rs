//! The rest of a response, made to follow on its beginning: one name, one numbering of events and items, whole texts where they end, one usage.

use bytes::Bytes;
use serde_json::{Value, json};

use super::super::given::Given;
use super::items::{Items, Place};

/// Changes events of the rest.
#[derive(Debug)]
pub struct Rest {
    items: Items,
    place: Place,
    /// What of the message has been given.
    text: String,
    tokens: u64,
    thought_tokens: u64,
    limit: Value,
    message: Message,
    /// Items of the whole output that are over.
    done: Vec<Value>,
}

/// What becomes of the message that had begun.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Message {
    /// Nothing has come yet.
    Waits,
    /// The first item of the rest is more of it.
    GoesOn,
    /// It is over.
    Over,
}

impl Rest {
    /// After what has been `given` of a response that might have `limit` tokens, or null; `None` if nothing of its message has.
    #[must_use]
    pub fn after(given: &Given, limit: Value) -> Option<Self> {
        let items = given.items()?.clone();
        let text = serde_json::from_str(&format!("\"{}\"", given.text())).ok()?;
        let place = items.message.clone()?;
        let done = items.thought.iter().filter_map(|item| serde_json::from_str(item).ok()).collect();
        Some(Self {
            items,
            place,
            text,
            tokens: given.pieces() as u64,
            thought_tokens: given.thought_pieces() as u64,
            limit,
            message: Message::Waits,
            done,
        })
    }

    /// Whole events, as they are to go to the client.
    pub fn pass(&mut self, events: &[u8]) -> Bytes {
        let mut out = Vec::with_capacity(events.len());
        for line in events.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii_end) {
            if line.starts_with(b":") {
                out.extend_from_slice(line);
                out.extend_from_slice(b"\n\n");
            }
            let Some(data) = line.strip_prefix(b"data:") else { continue };
            if let Ok(event) = serde_json::from_slice(data) {
                self.event(event, &mut out);
            }
        }
        out.into()
    }

    fn event(&mut self, mut event: Value, out: &mut Vec<u8>) {
        let kind = event["type"].as_str().unwrap_or_default().to_owned();
        let index = event["output_index"].as_u64();
        match &*kind {
            "response.created" | "response.queued" | "response.in_progress" => return,
            "response.completed" | "response.incomplete" => {
                self.end_message(out);
                self.response(&mut event["response"]);
            }
            // Another engine may go on with the message.
            "response.failed" => self.response(&mut event["response"]),
            "response.output_item.added"
                if self.message == Message::Waits
                    && index == Some(0)
                    && event["item"]["type"] == "message" =>
            {
                self.message = Message::GoesOn;
                return;
            }
            "response.output_item.added" if self.message == Message::Waits => self.end_message(out),
            _ => {}
        }
        match index {
            Some(0) if self.message == Message::GoesOn => {
                if kind == "response.content_part.added" {
                    return;
                }
                self.of_message(&kind, &mut event);
            }
            Some(index) => event["output_index"] = (self.place.output_index + index + self.shift()).into(),
            None => {}
        }
        if kind == "response.output_item.done" {
            self.done.push(event["item"].clone());
            if index == Some(0) && self.message == Message::GoesOn {
                self.message = Message::Over;
                self.text.clear();
            }
        }
        self.put(event, out);
    }

    /// How many items stand before the first of the rest, but for those before the message.
    fn shift(&self) -> u64 {
        // It was ended before the rest said anything.
        u64::from(self.message == Message::Over && !self.text.is_empty())
    }

    /// An event of the message that goes on.
    fn of_message(&self, kind: &str, event: &mut Value) {
        event["output_index"] = self.place.output_index.into();
        if event["item_id"].is_string() {
            event["item_id"] = (*self.place.item_id).into();
        }
        let whole = |rest: &Value| Value::from(self.text.clone() + rest.as_str().unwrap_or_default());
        match kind {
            "response.output_text.done" => event["text"] = whole(&event["text"]),
            "response.content_part.done" => event["part"]["text"] = whole(&event["part"]["text"]),
            "response.output_item.done" => {
                let item = &mut event["item"];
                item["id"] = (*self.place.item_id).into();
                let text = whole(&item["content"][0]["text"]);
                match item["content"].as_array().is_some_and(Vec::is_empty) {
                    true => item["content"] = json!([part(&text)]),
                    false => item["content"][0]["text"] = text,
                }
            }
            _ => {}
        }
    }

    /// Ends the message, if the rest says nothing of it.
    fn end_message(&mut self, out: &mut Vec<u8>) {
        if self.message != Message::Waits {
            return;
        }
        self.message = Message::Over;
        let Place { item_id, output_index } = self.place.clone();
        let part = part(&self.text.clone().into());
        let item = json!({"id": &*item_id, "type": "message", "role": "assistant", "status": "completed", "content": [part]});
        for (kind, name, value) in [
            ("response.output_text.done", "text", self.text.clone().into()),
            ("response.content_part.done", "part", part),
            ("response.output_item.done", "item", item.clone()),
        ] {
            let mut event = json!({"type": kind, "sequence_number": 0, "output_index": output_index});
            if name != "item" {
                (event["item_id"], event["content_index"]) = ((*item_id).into(), 0.into());
            }
            if name == "text" {
                event["logprobs"] = json!([]);
            }
            event[name] = value;
            self.put(event, out);
        }
        self.done.push(item);
    }

    /// The whole of it.
    fn response(&mut self, response: &mut Value) {
        if !response.is_object() {
            return;
        }
        let known = [("id", &self.items.id), ("created_at", &self.items.created_at)];
        for (name, value) in known {
            if let Some(value) = value.as_ref().and_then(|value| serde_json::from_str(value).ok()) {
                response[name] = value;
            }
        }
        response["output"] = std::mem::take(&mut self.done).into();
        response["max_output_tokens"] = self.limit.clone();
        let usage = &mut response["usage"];
        if !usage.is_object() {
            return;
        }
        let number = |value: &Value| value.as_u64().unwrap_or_default();
        let input = number(&usage["input_tokens"]).saturating_sub(self.tokens);
        let output = number(&usage["output_tokens"]) + self.tokens;
        (usage["input_tokens"], usage["output_tokens"]) = (input.into(), output.into());
        usage["total_tokens"] = (input + output).into();
        if usage["output_tokens_details"]["reasoning_tokens"].is_u64() {
            usage["output_tokens_details"]["reasoning_tokens"] = self.thought_tokens.into();
        }
        if let Some(cached) = usage["input_tokens_details"]["cached_tokens"].as_u64() {
            usage["input_tokens_details"]["cached_tokens"] = cached.min(input).into();
        }
    }

    fn put(&mut self, mut event: Value, out: &mut Vec<u8>) {
        if let Some(number) = &mut self.items.next_event
            && event["sequence_number"].is_u64()
        {
            event["sequence_number"] = (*number).into();
            *number = number.saturating_add(1);
        }
        let name = event["type"].as_str().unwrap_or_default();
        out.extend_from_slice(format!("event: {name}\ndata: {event}\n\n").as_bytes());
    }
}

/// A text, whole.
fn part(text: &Value) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": null})
}
