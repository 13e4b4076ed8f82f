//! A generation's text in OpenAI's words: one object, or a stream of events.

use std::collections::VecDeque;
use std::task::{Context, Poll};

use bytes::Bytes;
use roundhouse_types::{FinishReason, Usage};
use serde_json::{Value, json};

use super::request::{Kind, Streaming};
use crate::body::ChunkSource;
use crate::error::RequestError;
use crate::generation::{TextEvent, TextStream};

/// What all objects of one reply have in common.
#[derive(Clone, Debug)]
pub struct ReplyHead {
    /// Which endpoint.
    pub kind: Kind,
    /// The reply's id.
    pub id: String,
    /// Seconds since 1970.
    pub created: u64,
    /// The model that answers.
    pub model: String,
}

impl ReplyHead {
    /// The whole answer as one object.
    ///
    /// # Errors
    /// When the engine failed.
    pub async fn whole(&self, mut stream: TextStream) -> Result<Value, RequestError> {
        let mut text = String::new();
        let finished = loop {
            match stream.next().await {
                Some(TextEvent::Text(piece)) => text += &piece,
                Some(TextEvent::Finished(piece, reason)) => {
                    text += &piece;
                    break reason;
                }
                Some(TextEvent::Failed(reason)) => return Err(RequestError::Engine(reason)),
                None => return Err(RequestError::Engine("it ended without a reason".to_owned())),
            }
        };
        let choice = match self.kind {
            Kind::Chat => json!({
                "index": 0,
                "message": { "role": "assistant", "content": text },
                "logprobs": null,
                "finish_reason": finished,
            }),
            Kind::Completion => {
                json!({ "index": 0, "text": text, "logprobs": null, "finish_reason": finished })
            }
        };
        let mut object = self.object(Streaming::No, &json!([choice]));
        object["usage"] = usage_object(&stream.usage());
        Ok(object)
    }

    fn object(&self, streaming: Streaming, choices: &Value) -> Value {
        let object = match (self.kind, streaming) {
            (Kind::Chat, Streaming::No) => "chat.completion",
            (Kind::Chat, _) => "chat.completion.chunk",
            (Kind::Completion, _) => "text_completion",
        };
        json!({ "id": self.id, "object": object, "created": self.created, "model": self.model, "choices": choices })
    }

    fn piece(&self, streaming: Streaming, delta: &Value, finished: Option<FinishReason>) -> Value {
        let choice = match self.kind {
            Kind::Chat => json!({ "index": 0, "delta": delta, "logprobs": null, "finish_reason": finished }),
            Kind::Completion => json!({
                "index": 0,
                "text": delta["content"].as_str().unwrap_or_default(),
                "logprobs": null,
                "finish_reason": finished,
            }),
        };
        let mut object = self.object(streaming, &json!([choice]));
        if streaming == Streaming::WithUsage {
            object["usage"] = Value::Null;
        }
        object
    }
}

fn usage_object(usage: &Usage) -> Value {
    json!({
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": { "cached_tokens": usage.cached_tokens },
    })
}

fn event(object: &Value) -> Bytes {
    format!("data: {object}\n\n").into()
}

/// An answer as a stream of events.
pub struct EventStream {
    head: ReplyHead,
    streaming: Streaming,
    text: TextStream,
    ready: VecDeque<Bytes>,
    begun: bool,
}

impl EventStream {
    /// The events of `text`.
    #[must_use]
    pub fn new(head: ReplyHead, streaming: Streaming, text: TextStream) -> Self {
        Self { head, streaming, text, ready: VecDeque::new(), begun: false }
    }

    /// The role comes with the first token and not before, so that the first event is the first token to whoever measures.
    fn begin(&mut self) {
        if !self.begun && self.head.kind == Kind::Chat {
            let delta = json!({ "role": "assistant", "content": "" });
            self.ready.push_back(event(&self.head.piece(self.streaming, &delta, None)));
        }
        self.begun = true;
    }

    fn take(&mut self, text: TextEvent) {
        match text {
            TextEvent::Text(text) => {
                self.begin();
                // Also when there is no text yet: a token has come.
                let delta = json!({ "content": text });
                self.ready.push_back(event(&self.head.piece(self.streaming, &delta, None)));
            }
            TextEvent::Finished(text, reason) => {
                self.begin();
                if !text.is_empty() {
                    let delta = json!({ "content": text });
                    self.ready.push_back(event(&self.head.piece(self.streaming, &delta, None)));
                }
                self.ready.push_back(event(&self.head.piece(self.streaming, &json!({}), Some(reason))));
                if self.streaming == Streaming::WithUsage {
                    let mut object = self.head.object(self.streaming, &json!([]));
                    object["usage"] = usage_object(&self.text.usage());
                    self.ready.push_back(event(&object));
                }
                self.ready.push_back(Bytes::from_static(b"data: [DONE]\n\n"));
            }
            TextEvent::Failed(reason) => {
                let body = RequestError::Engine(reason).body();
                self.ready.push_back(format!("data: {body}\n\n").into());
            }
        }
    }
}

impl ChunkSource for EventStream {
    fn poll_chunk(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        loop {
            if let Some(chunk) = self.ready.pop_front() {
                return Poll::Ready(Some(chunk));
            }
            match std::task::ready!(self.text.poll_next(cx)) {
                Some(text) => self.take(text),
                None => return Poll::Ready(None),
            }
        }
    }
}
