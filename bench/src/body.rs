//! Request bodies: the parts that every request shares are serialized once, prompts are written between them.
//!
//! Must not know the dataset or the connection; [`crate::run`] asks for a body and hands it to [`crate::client`].

use std::borrow::Cow;

use bytes::Bytes;
use serde::Serialize;
use serde_json::{Value, json};

use crate::args::{Api, JsonObject, ServeArgs};

/// One chat message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Message<'a> {
    /// `system`, `user` or `assistant`.
    pub role: &'static str,
    /// The text.
    pub content: Cow<'a, str>,
}

impl Message<'_> {
    /// The same message without owning its text.
    pub fn borrowed(&self) -> Message<'_> {
        Message { role: self.role, content: Cow::Borrowed(&self.content) }
    }
}

/// Builds the bodies of one run.
#[derive(Debug)]
pub struct BodyWriter {
    model: String,
    streaming: Streaming,
    ignore_eos: IgnoreEos,
    extra: JsonObject,
    /// `,"temperature":0.0,…}`: what follows the prompt and the output length in every body.
    tail: String,
}

/// Whether answers are streamed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Streaming {
    /// Token by token.
    On,
    /// Whole answers.
    Off,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum IgnoreEos {
    Sent,
    NotSent,
}

impl BodyWriter {
    /// For the model and the request flags of a run.
    pub fn new(args: &ServeArgs, model: &str) -> Self {
        let streaming = if args.request.disable_stream { Streaming::Off } else { Streaming::On };
        let ignore_eos = if args.request.disable_ignore_eos { IgnoreEos::NotSent } else { IgnoreEos::Sent };
        let extra = args.request.extra_request_body.clone().unwrap_or_default();
        let mut writer = Self { model: model.to_owned(), streaming, ignore_eos, extra, tail: String::new() };
        writer.tail = writer.shared_tail();
        writer
    }

    /// Whether the bodies ask for streams.
    pub fn streaming(&self) -> Streaming {
        self.streaming
    }

    fn shared_tail(&self) -> String {
        let mut shared = JsonObject::new();
        shared.insert("temperature".into(), json!(0.0));
        self.insert_stream(&mut shared);
        if self.ignore_eos == IgnoreEos::Sent {
            shared.insert("ignore_eos".into(), json!(true));
        }
        shared.extend(self.extra.clone());
        let object = Value::Object(shared).to_string();
        format!(",{}", &object[1..])
    }

    fn insert_stream(&self, body: &mut JsonObject) {
        body.insert("stream".into(), json!(self.streaming == Streaming::On));
        match self.streaming {
            Streaming::On => body.insert("stream_options".into(), json!({ "include_usage": true })),
            Streaming::Off => body.remove("stream_options"), // servers refuse it without stream
        };
    }

    /// A chat completion.
    pub fn chat(&self, messages: &[Message<'_>], output_tokens: Option<u64>) -> Bytes {
        self.write("messages", messages, output_tokens)
    }

    /// A completion.
    pub fn completion(&self, prompt: &str, output_tokens: Option<u64>) -> Bytes {
        self.write("prompt", prompt, output_tokens)
    }

    fn write<P: Serialize + ?Sized>(&self, key: &str, prompt: &P, output_tokens: Option<u64>) -> Bytes {
        const NEVER_FAILS: &str = "strings serialize into memory";
        let mut body = Vec::with_capacity(512);
        body.extend_from_slice(b"{\"model\":");
        serde_json::to_writer(&mut body, &self.model).expect(NEVER_FAILS);
        body.extend_from_slice(format!(",\"{key}\":").as_bytes());
        serde_json::to_writer(&mut body, prompt).expect(NEVER_FAILS);
        // An output length in --extra-request-body stands in the tail and must not be said twice.
        if let Some(tokens) = output_tokens.filter(|_| !has_output_length(&self.extra)) {
            body.extend_from_slice(format!(",\"max_tokens\":{tokens}").as_bytes());
        }
        body.extend_from_slice(self.tail.as_bytes());
        Bytes::from(body)
    }

    /// A body from a file: its own fields stay, `--extra-request-body` overrides them, model and streaming are the
    /// run's. `ignore_eos` is added only where the body bounds its output, or it would run to the context's end.
    pub fn recorded(&self, body: &JsonObject, output_tokens: Option<u64>) -> Bytes {
        let mut body = body.clone();
        body.extend(self.extra.clone());
        body.insert("model".into(), json!(self.model));
        if let Some(tokens) = output_tokens {
            body.retain(|key, _| key != "max_completion_tokens");
            body.insert("max_tokens".into(), json!(tokens));
        }
        if self.ignore_eos == IgnoreEos::Sent && has_output_length(&body) && !body.contains_key("ignore_eos")
        {
            body.insert("ignore_eos".into(), json!(true));
        }
        self.insert_stream(&mut body);
        Bytes::from(Value::Object(body).to_string())
    }

    /// The output length that a request will ask for, when the dataset asks for `output_tokens`.
    pub fn requested_output_tokens(&self, output_tokens: Option<u64>) -> Option<u64> {
        output_length(&self.extra).or(output_tokens)
    }
}

fn has_output_length(body: &JsonObject) -> bool {
    body.contains_key("max_tokens") || body.contains_key("max_completion_tokens")
}

/// The output length that a body asks for.
pub fn output_length(body: &JsonObject) -> Option<u64> {
    let length = |key: &str| body.get(key).and_then(Value::as_u64);
    length("max_completion_tokens").or_else(|| length("max_tokens"))
}

/// The endpoint that a recorded body is for; `None` when it has neither messages nor a prompt.
pub fn api_of(body: &JsonObject) -> Option<Api> {
    if body.contains_key("messages") {
        Some(Api::Chat)
    } else if body.contains_key("prompt") {
        Some(Api::Completions)
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};

    fn writer(flags: &[&str]) -> BodyWriter {
        let words = ["bench", "serve"].iter().chain(flags);
        let Command::Serve(args) = Cli::try_parse_from(words).unwrap().command else { panic!("not serve") };
        BodyWriter::new(&args, "m\"1")
    }

    fn json(body: &Bytes) -> Value {
        serde_json::from_slice(body).unwrap()
    }

    #[test]
    fn writes_chat_bodies_with_usage_asked_for() {
        let messages = [Message { role: "user", content: "say \"hi\"\n".into() }];
        assert_eq!(
            json(&writer(&[]).chat(&messages, Some(7))),
            json!({"model": "m\"1", "messages": [{"role": "user", "content": "say \"hi\"\n"}], "max_tokens": 7,
                   "temperature": 0.0, "stream": true, "stream_options": {"include_usage": true}, "ignore_eos": true})
        );
    }

    #[test]
    fn extra_body_overrides_and_flags_switch_off() {
        let extra = r#"{"temperature": 0.5, "max_tokens": 3}"#;
        let writer = writer(&["--disable-stream", "--disable-ignore-eos", "--extra-request-body", extra]);
        let body = writer.completion("p", Some(7));
        assert_eq!(
            json(&body),
            json!({"model": "m\"1", "prompt": "p", "temperature": 0.5, "stream": false, "max_tokens": 3})
        );
        assert_eq!(body.windows(12).filter(|part| part == b"\"max_tokens\"").count(), 1);
        assert_eq!(writer.requested_output_tokens(Some(7)), Some(3));
    }

    #[test]
    fn recorded_bodies_keep_their_fields() {
        let object = |value: Value| value.as_object().unwrap().clone();
        let open = object(json!({"model": "other", "messages": [], "top_p": 0.9}));
        let sent = json(&writer(&[]).recorded(&open, None));
        assert_eq!(
            (&sent["model"], &sent["top_p"], sent.get("ignore_eos")),
            (&json!("m\"1"), &json!(0.9), None)
        );
        let bounded = object(json!({"messages": [], "max_completion_tokens": 5}));
        assert_eq!(json(&writer(&[]).recorded(&bounded, None))["ignore_eos"], json!(true));
        let cut = json(&writer(&[]).recorded(&bounded, Some(2)));
        assert_eq!((&cut["max_tokens"], cut.get("max_completion_tokens")), (&json!(2), None));
    }
}
