//! From a generation's events to text: pieces that are final, usage, and how it ended.
//!
//! Next: [`openai::reply`](crate::openai::reply) puts them into OpenAI's words.

use std::task::{Context, Poll};

use roundhouse_text::detokenizer::{Detokenizer, Piece};
use roundhouse_text::tokenizer::Tokenizer;
use roundhouse_types::{FinishReason, Usage};

use crate::engine::{Event, Generation};

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
    ended: bool,
}

impl TextStream {
    /// The text of `generation`, up to the first of `stop`.
    #[must_use]
    pub fn new(
        generation: Generation,
        tokenizer: Tokenizer,
        stop: Vec<String>,
        prompt_tokens: usize,
    ) -> Self {
        let usage =
            Usage { prompt_tokens: u32::try_from(prompt_tokens).unwrap_or(u32::MAX), ..Usage::default() };
        let detokenizer = Detokenizer::new(tokenizer, stop);
        Self { generation, detokenizer, usage, ended: false }
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
                self.usage.completion_tokens += 1;
                self.usage.cached_tokens = u32::try_from(cached_tokens).unwrap_or(u32::MAX);
                self.text_of(token, finished).unwrap_or_else(TextEvent::Failed)
            }
        };
        if !matches!(text, TextEvent::Text(_)) {
            self.ended = true;
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
