//! How a generation ended and what it cost.

/// A token of the model's vocabulary.
pub type TokenId = u32;

/// Why a generation stopped, in OpenAI's words.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The model ended its turn, or a stop string was met.
    Stop,
    /// `max_tokens` or the context length was reached.
    Length,
}

/// Token counts of one request, as `usage` reports them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Usage {
    /// Tokens of the prompt, cached ones included.
    pub prompt_tokens: u32,
    /// Tokens generated, the end-of-turn token included.
    pub completion_tokens: u32,
    /// Tokens of the prompt whose KV was found in the prefix cache.
    pub cached_tokens: u32,
}
