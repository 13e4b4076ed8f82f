//! From a generation's events to text: pieces that are final, usage, and how it ended.
//!
//! Next: [`openai::reply`](crate::openai::reply) puts them into OpenAI's words.

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use bytes::Bytes;
use roundhouse_text::detokenizer::{Detokenizer, Piece};
use roundhouse_types::{FinishReason, TokenId, Usage};
use worker_core::sampling::Logprobs;

use crate::engine::{Event, Generation};
use crate::metrics::Metrics;

/// What comes next in a generation's text.
#[derive(Clone, PartialEq, Debug)]
pub enum TextEvent {
    /// More of it, from one token.
    Text(Said),
    /// The last of it, and why it is the last.
    Finished(Said, FinishReason),
    /// The engine failed.
    Failed(String),
}

/// What one token brought.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Said {
    /// Text; empty while a character or a stop string may still be incomplete.
    pub text: String,
    /// The token.
    pub token: TokenId,
    /// Its log-probabilities, where they were asked for.
    pub logprobs: Option<Box<Logprobs>>,
}

/// The text of one generation. Dropping it cancels.
pub struct TextStream {
    generation: Generation,
    detokenizer: Detokenizer,
    usage: Usage,
    /// Its prompt's KV, where another worker is to go on from there.
    kv: Option<Bytes>,
    metrics: Arc<Metrics>,
    submitted: Instant,
    /// When its last token was drawn.
    last: Instant,
    ended: bool,
}

impl TextStream {
    /// The text of `generation`, as `detokenizer` gives it out; of a request that came then.
    #[must_use]
    pub fn new(
        generation: Generation,
        detokenizer: Detokenizer,
        (prompt_tokens, came): (usize, Instant),
        metrics: &Arc<Metrics>,
    ) -> Self {
        let usage =
            Usage { prompt_tokens: u32::try_from(prompt_tokens).unwrap_or(u32::MAX), ..Usage::default() };
        let metrics = Arc::clone(metrics);
        Self { generation, detokenizer, usage, kv: None, metrics, submitted: came, last: came, ended: false }
    }

    /// Tokens so far.
    #[must_use]
    pub fn usage(&self) -> Usage {
        self.usage
    }

    /// Its prompt's KV, once it has ended, where that was asked for and there was room.
    pub(crate) fn take_kv(&mut self) -> Option<Bytes> {
        self.kv.take()
    }

    /// Waits for what comes next; `None` after the end.
    pub async fn next(&mut self) -> Option<TextEvent> {
        std::future::poll_fn(|cx| self.poll_next(cx)).await
    }

    /// The same as a poll.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<TextEvent>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let event = std::task::ready!(self.generation.events.poll_recv(cx));
        let event = event.unwrap_or_else(|| Event::Failed("the engine has stopped".to_owned()));
        let text = match event {
            Event::Kv(kv) => {
                self.kv = Some(kv);
                return self.poll_next(cx);
            }
            Event::Failed(reason) => TextEvent::Failed(reason),
            Event::Token { token, cached_tokens, logprobs, at, finished } => {
                self.count(cached_tokens, at);
                self.said(token, logprobs, finished).unwrap_or_else(TextEvent::Failed)
            }
        };
        if !matches!(text, TextEvent::Text(_)) {
            self.end(&text);
        }
        Poll::Ready(Some(text))
    }

    fn count(&mut self, cached_tokens: usize, at: Instant) {
        let metrics = &self.metrics;
        match self.usage.completion_tokens {
            0 => metrics.ttft_seconds.observe(seconds(self.submitted, at)),
            _ => metrics.itl_seconds.observe(seconds(self.last, at)),
        }
        metrics.generation_tokens.inc();
        self.last = at;
        self.usage.completion_tokens += 1;
        self.usage.cached_tokens = u32::try_from(cached_tokens).unwrap_or(u32::MAX);
    }

    fn said(
        &mut self,
        token: TokenId,
        logprobs: Option<Box<Logprobs>>,
        finished: Option<FinishReason>,
    ) -> Result<TextEvent, String> {
        // A token that ends the turn has no text, special or not.
        let piece = match finished {
            Some(FinishReason::Stop) => Piece::default(),
            _ => self.detokenizer.push(token).map_err(|error| error.to_string())?,
        };
        Ok(match finished {
            _ if piece.stopped => {
                TextEvent::Finished(Said { text: piece.text, token, logprobs }, FinishReason::Stop)
            }
            None => TextEvent::Text(Said { text: piece.text, token, logprobs }),
            Some(reason) => {
                let rest = self.detokenizer.finish().map_err(|error| error.to_string())?;
                let reason = if rest.stopped { FinishReason::Stop } else { reason };
                TextEvent::Finished(Said { text: piece.text + &rest.text, token, logprobs }, reason)
            }
        })
    }

    fn end(&mut self, last: &TextEvent) {
        self.ended = true;
        match last {
            TextEvent::Finished(_, reason) => {
                let reason = match reason {
                    FinishReason::Stop => "stop",
                    FinishReason::Length => "length",
                };
                self.metrics.finished.with_label_values(&[reason]).inc();
                self.metrics.e2e_seconds.observe(seconds(self.submitted, self.last));
            }
            _ => self.metrics.finished.with_label_values(&["error"]).inc(),
        }
        // Nobody reads what may still come: the engine takes that for a cancel.
        self.generation.events.close();
    }
}

impl Drop for TextStream {
    fn drop(&mut self) {
        if !self.ended {
            self.metrics.finished.with_label_values(&["abort"]).inc();
        }
    }
}

fn seconds(from: Instant, to: Instant) -> f64 {
    to.saturating_duration_since(from).as_secs_f64()
}
