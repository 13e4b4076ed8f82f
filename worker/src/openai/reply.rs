//! Generations' texts in OpenAI's words: one object, or a stream of events. A reply has a choice for each generation.

use std::collections::VecDeque;
use std::task::{Context, Poll};

use bytes::Bytes;
use roundhouse_types::{FinishReason, Usage};
use serde_json::{Value, json};

use super::logprobs::LogprobsWriter;
use super::request::{Kind, Streaming};
use crate::body::ChunkSource;
use crate::error::RequestError;
use crate::generation::{Said, TextEvent, TextStream};

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

/// One answer of several, or the only one.
pub struct Choice {
    /// Its text.
    pub text: TextStream,
    /// Comes before it.
    pub echo: Option<String>,
    /// Set when log-probabilities were asked for.
    pub logprobs: Option<LogprobsWriter>,
    /// The first choice of its prompt, which stands for the prompt in the usage.
    pub is_first_of_prompt: bool,
}

impl Choice {
    fn logprobs(&mut self, said: &[Said]) -> Value {
        let scored = |said: &Said| Some((said.token, said.logprobs.clone()?));
        let tokens: Vec<_> = said.iter().filter_map(scored).collect();
        match &mut self.logprobs {
            Some(writer) if !tokens.is_empty() => writer.write(&tokens),
            _ => Value::Null,
        }
    }

    /// All of it, as an entry of `choices`.
    fn entry(&mut self, kind: Kind, index: usize, whole: &Whole) -> Value {
        let text = self.echo.take().unwrap_or_default();
        let text = whole.said.iter().fold(text, |text, said| text + &said.text);
        let (logprobs, finished) = (self.logprobs(&whole.said), whole.finished);
        match kind {
            Kind::Chat => json!({
                "index": index,
                "message": { "role": "assistant", "content": text },
                "logprobs": logprobs,
                "finish_reason": finished,
            }),
            Kind::Completion => {
                json!({ "index": index, "text": text, "logprobs": logprobs, "finish_reason": finished })
            }
        }
    }
}

/// What a choice has said so far, where it is to be told whole.
#[derive(Default)]
struct Whole {
    said: Vec<Said>,
    /// Set after the last.
    finished: Option<FinishReason>,
}

impl Whole {
    /// Takes in what `text` says until it waits or ends.
    fn poll(&mut self, text: &mut TextStream, cx: &mut Context<'_>) -> Poll<Result<(), RequestError>> {
        while self.finished.is_none() {
            match std::task::ready!(text.poll_next(cx)) {
                Some(TextEvent::Text(said)) => self.said.push(said),
                Some(TextEvent::Finished(said, reason)) => {
                    self.said.push(said);
                    self.finished = Some(reason);
                }
                Some(TextEvent::Failed(reason)) => return Poll::Ready(Err(RequestError::Engine(reason))),
                None => {
                    let reason = "it ended without a reason".to_owned();
                    return Poll::Ready(Err(RequestError::Engine(reason)));
                }
            }
        }
        Poll::Ready(Ok(()))
    }
}

/// What all of `choices` say. Each is heard as it speaks: one that comes to a stop string is not generated any further, whatever
/// the others do.
async fn hear(choices: &mut [Choice]) -> Result<Vec<Whole>, RequestError> {
    let mut wholes: Vec<Whole> = choices.iter().map(|_| Whole::default()).collect();
    std::future::poll_fn(|cx| {
        let mut waits = false;
        for (whole, choice) in wholes.iter_mut().zip(&mut *choices) {
            match whole.poll(&mut choice.text, cx) {
                Poll::Ready(Ok(())) => {}
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Pending => waits = true,
            }
        }
        if waits { Poll::Pending } else { Poll::Ready(Ok(())) }
    })
    .await?;
    Ok(wholes)
}

impl ReplyHead {
    /// The whole answer as one object.
    ///
    /// # Errors
    /// When the engine failed.
    pub async fn whole(&self, choices: &mut [Choice]) -> Result<Value, RequestError> {
        let wholes = hear(choices).await?;
        let entry =
            |(index, (choice, whole)): (usize, (&mut Choice, &Whole))| choice.entry(self.kind, index, whole);
        let entries: Vec<Value> = choices.iter_mut().zip(&wholes).enumerate().map(entry).collect();
        let mut object = self.object(Streaming::No, &json!(entries));
        object["usage"] = usage_object(choices.iter());
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

    fn piece(&self, streaming: Streaming, piece: Piece) -> Bytes {
        let Piece { index, delta, logprobs, finished } = piece;
        let choice = match self.kind {
            Kind::Chat => {
                json!({ "index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finished })
            }
            Kind::Completion => json!({
                "index": index,
                "text": delta["content"].as_str().unwrap_or_default(),
                "logprobs": logprobs,
                "finish_reason": finished,
            }),
        };
        let mut object = self.object(streaming, &json!([choice]));
        if streaming == Streaming::WithUsage {
            object["usage"] = Value::Null;
        }
        event(&object)
    }
}

/// What one event says of one choice.
struct Piece {
    index: usize,
    delta: Value,
    logprobs: Value,
    finished: Option<FinishReason>,
}

impl Piece {
    fn text(index: usize, text: &str) -> Self {
        Self { index, delta: json!({ "content": text }), logprobs: Value::Null, finished: None }
    }
}

/// The prompts once each, and what was generated for all choices.
fn usage_object<'a>(choices: impl Iterator<Item = &'a Choice>) -> Value {
    let mut all = Usage::default();
    for choice in choices {
        let usage = choice.text.usage();
        all.completion_tokens += usage.completion_tokens;
        if choice.is_first_of_prompt {
            all.prompt_tokens += usage.prompt_tokens;
            all.cached_tokens += usage.cached_tokens;
        }
    }
    json!({
        "prompt_tokens": all.prompt_tokens,
        "completion_tokens": all.completion_tokens,
        "total_tokens": all.prompt_tokens + all.completion_tokens,
        "prompt_tokens_details": { "cached_tokens": all.cached_tokens },
    })
}

fn event(object: &Value) -> Bytes {
    format!("data: {object}\n\n").into()
}

/// An answer as a stream of events.
pub struct EventStream {
    head: ReplyHead,
    streaming: Streaming,
    choices: Vec<StreamedChoice>,
    /// The choice to ask first, so that none is served before all others for ever.
    turn: usize,
    ready: VecDeque<Bytes>,
    ended: bool,
}

struct StreamedChoice {
    choice: Choice,
    begun: bool,
    ended: bool,
}

impl EventStream {
    /// The events of `choices`.
    #[must_use]
    pub fn new(head: ReplyHead, streaming: Streaming, choices: Vec<Choice>) -> Self {
        let choices = choices.into_iter().map(|choice| StreamedChoice { choice, begun: false, ended: false });
        Self { head, streaming, choices: choices.collect(), turn: 0, ready: VecDeque::new(), ended: false }
    }

    fn push(&mut self, piece: Piece) {
        let event = self.head.piece(self.streaming, piece);
        self.ready.push_back(event);
    }

    /// Role and echo come with the first token and not before, so that the first event is the first token to whoever measures.
    fn begin(&mut self, index: usize) {
        if std::mem::replace(&mut self.choices[index].begun, true) {
            return;
        }
        if self.head.kind == Kind::Chat {
            let delta = json!({ "role": "assistant", "content": "" });
            self.push(Piece { delta, ..Piece::text(index, "") });
        }
        if let Some(echo) = self.choices[index].choice.echo.take() {
            self.push(Piece::text(index, &echo));
        }
    }

    fn say(&mut self, index: usize, said: Said) {
        let text = Piece::text(index, &said.text);
        let logprobs = self.choices[index].choice.logprobs(&[said]);
        self.push(Piece { logprobs, ..text });
    }

    fn take(&mut self, index: usize, text: TextEvent) {
        match text {
            TextEvent::Text(said) => {
                self.begin(index);
                // Also when there is no text yet: a token has come.
                self.say(index, said);
            }
            TextEvent::Finished(said, reason) => {
                self.begin(index);
                if !said.text.is_empty() || said.logprobs.is_some() {
                    self.say(index, said);
                }
                let nothing = Piece { delta: json!({}), ..Piece::text(index, "") };
                self.push(Piece { finished: Some(reason), ..nothing });
                self.choices[index].ended = true;
                if self.choices.iter().all(|choice| choice.ended) {
                    self.end();
                }
            }
            TextEvent::Failed(reason) => {
                let body = RequestError::Engine(reason).body();
                self.ready.push_back(format!("data: {body}\n\n").into());
                // What the others would still say is of no use: the reply has failed.
                self.ended = true;
            }
        }
    }

    fn end(&mut self) {
        if self.streaming == Streaming::WithUsage {
            let mut object = self.head.object(self.streaming, &json!([]));
            object["usage"] = usage_object(self.choices.iter().map(|streamed| &streamed.choice));
            self.ready.push_back(event(&object));
        }
        self.ready.push_back(Bytes::from_static(b"data: [DONE]\n\n"));
        self.ended = true;
    }

    /// The next event of any choice.
    fn poll_choices(&mut self, cx: &mut Context<'_>) -> Poll<(usize, TextEvent)> {
        let count = self.choices.len();
        for step in 0..count {
            let index = (self.turn + step) % count;
            let streamed = &mut self.choices[index];
            if streamed.ended {
                continue;
            }
            if let Poll::Ready(text) = streamed.choice.text.poll_next(cx) {
                self.turn = index + 1;
                let text = text.unwrap_or_else(|| TextEvent::Failed("it ended without a reason".to_owned()));
                return Poll::Ready((index, text));
            }
        }
        Poll::Pending
    }
}

impl ChunkSource for EventStream {
    fn poll_chunk(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        loop {
            if let Some(chunk) = self.ready.pop_front() {
                return Poll::Ready(Some(chunk));
            }
            if self.ended {
                return Poll::Ready(None);
            }
            let (index, text) = std::task::ready!(self.poll_choices(cx));
            self.take(index, text);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::Arc;
    use std::time::Instant;

    use futures_util::FutureExt;
    use roundhouse_text::{Detokenizer, SpecialTokenPolicy, Tokenizer};
    use tokio::sync::mpsc;

    use super::*;
    use crate::engine::{Event, Generation};
    use crate::metrics::Metrics;
    use crate::model::{ModelFiles, ModelSource};

    fn choice(tokenizer: &Tokenizer) -> (Choice, mpsc::UnboundedSender<Event>) {
        let (sender, events) = mpsc::unbounded_channel();
        let detokenizer = Detokenizer::new(tokenizer.clone(), vec!["stop".to_owned()]);
        let text = TextStream::new(
            Generation { events },
            detokenizer,
            (1, Instant::now()),
            &Arc::new(Metrics::default()),
        );
        (Choice { text, echo: None, logprobs: None, is_first_of_prompt: true }, sender)
    }

    #[tokio::test]
    async fn a_choice_that_comes_to_a_stop_string_ends_while_others_go_on() {
        let files = ModelFiles::open(&ModelSource::Builtin).unwrap();
        let tokenizer = Tokenizer::from_json(files.tokenizer.as_deref().unwrap().as_bytes()).unwrap();
        let (first, goes_on) = choice(&tokenizer);
        let (second, stops) = choice(&tokenizer);
        let head = ReplyHead { kind: Kind::Completion, id: String::new(), created: 0, model: String::new() };
        let mut choices = [first, second];
        let mut whole = pin!(head.whole(&mut choices));
        let say = |to: &mpsc::UnboundedSender<Event>, text: &str, finished| {
            for token in tokenizer.encode(text, SpecialTokenPolicy::Omit).unwrap() {
                let event =
                    Event::Token { token, cached_tokens: 0, logprobs: None, at: Instant::now(), finished };
                to.send(event).unwrap();
            }
        };
        say(&stops, "now stop", None);
        assert!(whole.as_mut().now_or_never().is_none());
        assert!(stops.is_closed() && !goes_on.is_closed(), "the engine sees that it need not go on");
        say(&goes_on, "x", Some(FinishReason::Length));
        let answer = whole.await.unwrap();
        assert_eq!(answer["choices"][1]["text"].as_str().unwrap().trim(), "now");
        assert_eq!(answer["choices"][1]["finish_reason"], "stop");
        assert_eq!(answer["choices"][0]["finish_reason"], "length");
    }
}
