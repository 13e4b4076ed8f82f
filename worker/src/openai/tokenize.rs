//! `/tokenize` and `/detokenize`, in vLLM's shape.

use roundhouse_text::SpecialTokenPolicy;

use super::fields::{Fields, must, token_ids, wrong};
use super::prompt::Conversation;
use crate::error::RequestError;

/// What is to be tokenized.
#[derive(Clone, PartialEq, Debug)]
pub enum TokenizeInput {
    /// A conversation, as it would be generated from.
    Chat(Conversation),
    /// A text.
    Text(String),
}

/// A text or a conversation whose tokens are wanted.
#[derive(Clone, PartialEq, Debug)]
pub struct TokenizeRequest {
    /// The model asked for, if any was.
    pub model: Option<String>,
    /// The text.
    pub input: TokenizeInput,
    /// Whether the tokenizer's own tokens are put around it.
    pub special_tokens: SpecialTokenPolicy,
    /// Whether the tokens' spellings are wanted beside their ids.
    pub token_strings: bool,
}

impl TokenizeRequest {
    /// Reads a body: `messages`, or otherwise `prompt`.
    ///
    /// # Errors
    /// When it is no JSON, or a parameter is wrong; the message says which, and what would be right.
    pub fn parse(body: &[u8]) -> Result<Self, RequestError> {
        let fields = Fields::parse(body)?;
        fields.refuse(&[("chat_template", &[])])?;
        let (input, special_tokens) = if fields.get("messages").is_some() {
            (TokenizeInput::Chat(fields.conversation()?), SpecialTokenPolicy::Omit)
        } else {
            (TokenizeInput::Text(fields.one_text()?), SpecialTokenPolicy::Add)
        };
        Ok(Self {
            model: fields.text("model")?,
            input,
            special_tokens: fields.special_tokens(special_tokens)?,
            token_strings: fields.switch("return_token_strs", false)?,
        })
    }
}

/// Tokens whose text is wanted.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DetokenizeRequest {
    /// The model asked for, if any was.
    pub model: Option<String>,
    /// The tokens.
    pub tokens: Vec<u32>,
}

impl DetokenizeRequest {
    /// Reads a body.
    ///
    /// # Errors
    /// When it is no JSON, or a parameter is wrong; the message says which, and what would be right.
    pub fn parse(body: &[u8]) -> Result<Self, RequestError> {
        let fields = Fields::parse(body)?;
        let missing = || wrong("tokens", "tokens must be a list of token ids; it is missing".to_owned());
        let value = fields.get("tokens").ok_or_else(missing)?;
        let tokens = token_ids(value).ok_or_else(|| must("tokens", "a list of token ids", value))?;
        Ok(Self { model: fields.text("model")?, tokens })
    }
}
