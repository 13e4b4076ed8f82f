//! What is kept of one request.
//!
//! Plain values, filled by [`crate::client`] and [`crate::run`], read by [`crate::statistics`]. All times are offsets
//! from the start of the run.

use std::time::Duration;

use crate::chunk::WireUsage;

/// One request, from its schedule to its last byte.
#[derive(Debug, Clone, Default)]
pub struct RequestRecord {
    /// Conversation in the dataset's order.
    pub session: usize,
    /// Turn within the conversation, from 0.
    pub turn: usize,
    /// Waiting for the concurrency limit; only the first turn of a conversation waits.
    pub queued: Duration,
    /// How much later than scheduled (or than the limit allowed) the client sent it.
    pub late: Duration,
    /// Just before the POST, connecting included.
    pub start: Duration,
    /// What came back.
    pub response: Response,
    /// Prompt tokens as the dataset counts them, history included, without a chat template.
    pub dataset_input_tokens: u64,
    /// Output tokens that were asked for.
    pub requested_output_tokens: Option<u64>,
    /// Tokens of the generated text by the benchmark's own tokenizer.
    pub retokenized_tokens: Option<u64>,
    /// Why it failed; `None` is success.
    pub failure: Option<String>,
}

/// The measured part of one response.
#[derive(Debug, Clone, Default)]
pub struct Response {
    /// From the start to the first chunk with text.
    pub ttft: Option<Duration>,
    /// Gaps between later chunks with text.
    pub itls: Vec<Duration>,
    /// From the start to the last chunk with text (to the end where there was none).
    pub latency: Duration,
    /// Chunks with text.
    pub chunks: u64,
    /// The server's token counts.
    pub usage: Option<Usage>,
    /// Generated text, reasoning included.
    pub text: String,
    /// `x-router-worker`: who answered.
    pub worker: Option<String>,
    /// `x-router-hit-tokens`: the router's prediction.
    pub predicted_hit_tokens: Option<u64>,
}

/// The server's token counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// Prompt tokens, chat template included.
    pub prompt_tokens: u64,
    /// Generated tokens.
    pub completion_tokens: u64,
    /// Prompt tokens from the prefix cache, where the server says.
    pub cached_tokens: Option<u64>,
}

impl From<WireUsage> for Usage {
    fn from(wire: WireUsage) -> Self {
        Self {
            prompt_tokens: wire.prompt_tokens,
            completion_tokens: wire.completion_tokens,
            cached_tokens: wire.prompt_tokens_details.and_then(|details| details.cached_tokens),
        }
    }
}

impl RequestRecord {
    /// Whether the answer came whole.
    pub fn is_success(&self) -> bool {
        self.failure.is_none()
    }

    /// Output tokens by the best count there is: the server's, else the own tokenizer's, else chunks. Never the
    /// requested number, which hides answers that ended early.
    pub fn output_tokens(&self) -> u64 {
        let reported = self.response.usage.map(|usage| usage.completion_tokens);
        reported.or(self.retokenized_tokens).unwrap_or(self.response.chunks)
    }

    /// TPOT = (latency − TTFT) / (output tokens − 1); `None` for fewer than two tokens.
    pub fn tpot(&self) -> Option<Duration> {
        let later_tokens = self.output_tokens().checked_sub(1).filter(|tokens| *tokens > 0)?;
        let decode = self.response.latency.saturating_sub(self.response.ttft?);
        Some(Duration::from_secs_f64(decode.as_secs_f64() / later_tokens as f64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(usage_tokens: Option<u64>, retokenized: Option<u64>, chunks: u64) -> RequestRecord {
        let usage = usage_tokens.map(|completion_tokens| Usage {
            prompt_tokens: 1,
            completion_tokens,
            cached_tokens: None,
        });
        let response = Response {
            ttft: Some(Duration::from_millis(100)),
            latency: Duration::from_millis(500),
            chunks,
            usage,
            ..Response::default()
        };
        RequestRecord {
            retokenized_tokens: retokenized,
            requested_output_tokens: Some(99),
            response,
            ..RequestRecord::default()
        }
    }

    #[test]
    fn output_tokens_prefer_usage_then_tokenizer_then_chunks() {
        assert_eq!(record(Some(5), Some(6), 7).output_tokens(), 5);
        assert_eq!(record(None, Some(6), 7).output_tokens(), 6);
        assert_eq!(record(None, None, 7).output_tokens(), 7);
    }

    #[test]
    fn tpot_divides_the_decode_time_by_the_later_tokens() {
        assert_eq!(record(Some(5), None, 5).tpot(), Some(Duration::from_millis(100)));
        assert_eq!(record(Some(1), None, 1).tpot(), None);
        assert_eq!(record(Some(0), None, 0).tpot(), None);
    }
}
