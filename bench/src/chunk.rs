//! What the benchmark reads of an OpenAI response: text, the end, usage, an error; all else is skipped unparsed.
//!
//! Must not know time or HTTP. One type serves chat and completions, stream chunks and whole answers.

use std::borrow::Cow;

use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

/// A stream chunk, or a whole answer.
#[derive(Debug, Default, Deserialize)]
pub struct Chunk<'a> {
    /// Choices; usage-only chunks have none.
    #[serde(borrow, default, deserialize_with = "null_as_default")]
    pub choices: Vec<Choice<'a>>,
    /// Token counts.
    #[serde(default)]
    pub usage: Option<WireUsage>,
    /// An error in place of a chunk.
    #[serde(borrow, default)]
    pub error: Option<&'a RawValue>,
}

/// One choice.
#[derive(Debug, Default, Deserialize)]
pub struct Choice<'a> {
    /// Completions: the text.
    #[serde(borrow, default)]
    text: Option<Text<'a>>,
    /// Chat, streamed: the piece of the message.
    #[serde(borrow, default)]
    delta: Option<Message<'a>>,
    /// Chat, whole: the message.
    #[serde(borrow, default)]
    message: Option<Message<'a>>,
    /// Set when the choice is complete.
    #[serde(borrow, default)]
    finish_reason: Option<Text<'a>>,
}

#[derive(Debug, Default, Deserialize)]
struct Message<'a> {
    #[serde(borrow, default)]
    content: Option<Text<'a>>,
    // vLLM and SGLang call it reasoning_content, newer vLLM reasoning
    #[serde(borrow, default, alias = "reasoning")]
    reasoning_content: Option<Text<'a>>,
}

/// A string borrowed from the input where it has no escapes.
#[derive(Debug, Deserialize)]
#[serde(transparent)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

/// `usage` as servers send it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub struct WireUsage {
    /// Prompt tokens, chat template included.
    #[serde(default)]
    pub prompt_tokens: u64,
    /// Generated tokens.
    #[serde(default)]
    pub completion_tokens: u64,
    /// Details of the prompt.
    #[serde(default)]
    pub prompt_tokens_details: Option<PromptTokensDetails>,
}

/// `usage.prompt_tokens_details`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub struct PromptTokensDetails {
    /// Prompt tokens that came from the prefix cache.
    #[serde(default)]
    pub cached_tokens: Option<u64>,
}

/// `error` as servers send it: an object with a message, or a string.
#[derive(Deserialize)]
#[serde(untagged)]
enum WireError {
    Object { message: String },
    Text(String),
}

fn null_as_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(
    deserializer: D,
) -> Result<T, D::Error> {
    Option::<T>::deserialize(deserializer).map(Option::unwrap_or_default)
}

impl<'a> Chunk<'a> {
    /// Parses one.
    ///
    /// # Errors
    /// What serde says of malformed JSON.
    pub fn parse(bytes: &'a [u8]) -> serde_json::Result<Self> {
        serde_json::from_slice(bytes)
    }

    /// The pieces of generated text in it, reasoning before content. None is empty.
    pub fn texts(&self) -> impl Iterator<Item = &str> {
        self.choices.iter().flat_map(Choice::texts).filter(|text| !text.is_empty())
    }

    /// Whether a choice says why it ended.
    pub fn is_finished(&self) -> bool {
        self.choices
            .iter()
            .any(|choice| choice.finish_reason.as_ref().is_some_and(|reason| !reason.0.is_empty()))
    }

    /// The message of an error sent in place of a chunk.
    pub fn error_message(&self) -> Option<String> {
        self.error.map(|raw| match serde_json::from_str(raw.get()) {
            Ok(WireError::Object { message } | WireError::Text(message)) => message,
            Err(_) => raw.get().to_owned(),
        })
    }
}

impl Choice<'_> {
    fn texts(&self) -> impl Iterator<Item = &str> {
        let messages = self.delta.iter().chain(&self.message);
        let of_message =
            messages.flat_map(|message| message.reasoning_content.iter().chain(&message.content));
        self.text.iter().chain(of_message).map(|text| text.0.as_ref())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(json: &str) -> Vec<String> {
        Chunk::parse(json.as_bytes()).unwrap().texts().map(str::to_owned).collect()
    }

    #[test]
    fn reads_text_of_every_shape() {
        assert_eq!(
            texts(r#"{"choices":[{"index":0,"delta":{"role":"assistant","content":"a\nb"}}]}"#),
            ["a\nb"]
        );
        assert_eq!(texts(r#"{"choices":[{"delta":{"reasoning_content":"why","content":null}}]}"#), ["why"]);
        assert_eq!(texts(r#"{"choices":[{"delta":{"reasoning":"why","content":"x"}}]}"#), ["why", "x"]);
        assert_eq!(texts(r#"{"choices":[{"text":" hi","logprobs":null}]}"#), [" hi"]);
        assert_eq!(texts(r#"{"choices":[{"message":{"content":"whole"}}]}"#), ["whole"]);
        assert!(texts(r#"{"choices":[{"delta":{"role":"assistant","content":""}}]}"#).is_empty());
        assert!(texts(r#"{"choices":[]}"#).is_empty());
        assert!(texts(r#"{"choices":null}"#).is_empty());
    }

    #[test]
    fn borrows_text_without_escapes() {
        let chunk = Chunk::parse(br#"{"choices":[{"text":"plain"}]}"#).unwrap();
        assert!(matches!(chunk.choices[0].text, Some(Text(Cow::Borrowed("plain")))));
    }

    #[test]
    fn reads_usage_with_and_without_cached_tokens() {
        let usage = |json: &str| Chunk::parse(json.as_bytes()).unwrap().usage.unwrap();
        let full = usage(
            r#"{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":8}}}"#,
        );
        assert_eq!((full.prompt_tokens, full.completion_tokens), (9, 4));
        assert_eq!(full.prompt_tokens_details.unwrap().cached_tokens, Some(8));
        let bare =
            usage(r#"{"usage":{"prompt_tokens":9,"completion_tokens":4,"prompt_tokens_details":null}}"#);
        assert_eq!(bare.prompt_tokens_details, None);
    }

    #[test]
    fn tells_the_end_and_errors() {
        let chunk = |json: &'static str| Chunk::parse(json.as_bytes()).unwrap();
        assert!(chunk(r#"{"choices":[{"text":"","finish_reason":"length"}]}"#).is_finished());
        assert!(!chunk(r#"{"choices":[{"text":"a","finish_reason":null}]}"#).is_finished());
        assert_eq!(
            chunk(r#"{"error":{"message":"out of KV","code":500}}"#).error_message().unwrap(),
            "out of KV"
        );
        assert_eq!(chunk(r#"{"error":"gone"}"#).error_message().unwrap(), "gone");
        assert_eq!(chunk(r#"{"error":{"detail":1}}"#).error_message().unwrap(), r#"{"detail":1}"#);
        assert_eq!(chunk(r#"{"error":null,"choices":[]}"#).error_message(), None);
    }
}
