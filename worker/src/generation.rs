//! From a generation's events to text: pieces that are final, usage, and how it ended.
//!
//! Next: [`openai::reply`](crate::openai::reply) puts them into OpenAI's words.

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use roundhouse_text::detokenizer::{Detokenizer, Piece};
use roundhouse_types::{FinishReason, Usage};

use crate::engine::{Event, Generation};
use crate::metrics::Metrics;

/// What comes next in a generation's text.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum TextEvent {
    /// More text, from one token; empty while a character or a stop string may still be incomplete.
    Text(String),
    /// The last text, and why it is the last.
    Finished(String, FinishReason),
    /// The engine failed.
    Failed(String),
}

/// The text of one generation. Dropping it cancels.
pub struct TextStream {
    generation: Generation,
    detokenizer: Detokenizer,
    usage: Usage,
    metrics: Arc<Metrics>,
    submitted: Instant,
    ended: bool,
}

impl TextStream {
    /// The text of `generation`, as `detokenizer` gives it out.
    #[must_use]
    pub fn new(
        generation: Generation,
        detokenizer: Detokenizer,
        prompt_tokens: usize,
        metrics: &Arc<Metrics>,
    ) -> Self {
        metrics.prompt_tokens.inc_by(prompt_tokens as u64);
        let usage =
            Usage { prompt_tokens: u32::try_from(prompt_tokens).unwrap_or(u32::MAX), ..Usage::default() };
        let metrics = Arc::clone(metrics);
        Self { generation, detokenizer, usage, metrics, submitted: Instant::now(), ended: false }
    }

    /// Tokens so far.
    #[must_use]
    pub fn usage(&self) -> Usage {
        self.usage
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
            Event::Failed(reason) => TextEvent::Failed(reason),
            Event::Token { token, cached_tokens, finished } => {
                if self.usage.completion_tokens == 0 {
                    self.metrics.ttft_seconds.observe(self.submitted.elapsed().as_secs_f64());
                }
                self.usage.completion_tokens += 1;
                self.metrics.generation_tokens.inc();
                self.usage.cached_tokens = u32::try_from(cached_tokens).unwrap_or(u32::MAX);
                self.text_of(token, finished).unwrap_or_else(TextEvent::Failed)
            }
        };
        if !matches!(text, TextEvent::Text(_)) {
            self.ended = true;
            if matches!(text, TextEvent::Finished(..)) {
                self.metrics.requests.inc();
            }
            // Nobody reads what may still come: the engine takes that for a cancel.
            self.generation.events.close();
        }
        Poll::Ready(Some(text))
    }

    fn text_of(&mut self, token: u32, finished: Option<FinishReason>) -> Result<TextEvent, String> {
        // A token that ends the turn has no text, special or not.
        let piece = match finished {
            Some(FinishReason::Stop) => Piece::default(),
            _ => self.detokenizer.push(token).map_err(|error| error.to_string())?,
        };
        Ok(match finished {
            _ if piece.stopped => TextEvent::Finished(piece.text, FinishReason::Stop),
            None => TextEvent::Text(piece.text),
            Some(reason) => {
                let rest = self.detokenizer.finish().map_err(|error| error.to_string())?;
                let reason = if rest.stopped { FinishReason::Stop } else { reason };
                TextEvent::Finished(piece.text + &rest.text, reason)
            }
        })
    }
}
