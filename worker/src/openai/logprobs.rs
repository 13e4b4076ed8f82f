//! Log-probabilities in OpenAI's words: a list of objects for chats, parallel lists for completions.

use roundhouse_text::Tokenizer;
use roundhouse_types::TokenId;
use serde_json::{Map, Value, json};
use worker_core::sampling::Logprobs;

use super::request::Kind;

/// Least that is written: JSON has no infinity.
const LEAST: f32 = -9999.0;

/// Writes the log-probabilities of one choice.
pub struct LogprobsWriter {
    kind: Kind,
    tokenizer: Tokenizer,
    /// Characters of the choice's tokens so far.
    offset: usize,
}

impl LogprobsWriter {
    /// A writer at the beginning of a choice.
    #[must_use]
    pub fn new(kind: Kind, tokenizer: Tokenizer) -> Self {
        Self { kind, tokenizer, offset: 0 }
    }

    /// The `logprobs` of a choice, or of a piece of one, that consists of `tokens`.
    pub fn write(&mut self, tokens: &[(TokenId, Box<Logprobs>)]) -> Value {
        match self.kind {
            Kind::Chat => {
                let content: Vec<Value> =
                    tokens.iter().map(|(token, found)| self.chat(*token, found)).collect();
                json!({ "content": content, "refusal": null })
            }
            Kind::Completion => self.completion(tokens),
        }
    }

    fn chat(&self, token: TokenId, found: &Logprobs) -> Value {
        let entry = |token: TokenId, logprob: f32| {
            let bytes = self.tokenizer.token_bytes(token).unwrap_or_default();
            json!({ "token": String::from_utf8_lossy(&bytes), "logprob": logprob.max(LEAST), "bytes": bytes })
        };
        let mut object = entry(token, found.drawn);
        object["top_logprobs"] = found.top.iter().map(|(token, logprob)| entry(*token, *logprob)).collect();
        object
    }

    fn completion(&mut self, tokens: &[(TokenId, Box<Logprobs>)]) -> Value {
        let (mut spelled, mut offsets) = (Vec::new(), Vec::new());
        for (token, _) in tokens {
            let bytes = self.tokenizer.token_bytes(*token).unwrap_or_default();
            // A token that goes on with a character stands where that character begins.
            let goes_on = bytes.first().is_some_and(|byte| !begins_character(*byte));
            offsets.push(self.offset.saturating_sub(usize::from(goes_on)));
            self.offset += bytes.iter().filter(|byte| begins_character(**byte)).count();
            spelled.push(spelling(&bytes));
        }
        let top: Vec<Value> = tokens.iter().map(|(token, found)| self.top(*token, found)).collect();
        json!({
            "text_offset": offsets,
            "token_logprobs": tokens.iter().map(|(_, found)| found.drawn.max(LEAST)).collect::<Vec<_>>(),
            "tokens": spelled,
            "top_logprobs": top,
        })
    }

    /// The drawn token is always among them, as OpenAI has it.
    fn top(&self, token: TokenId, found: &Logprobs) -> Value {
        let of = |token: TokenId| spelling(&self.tokenizer.token_bytes(token).unwrap_or_default());
        let mut top: Map<String, Value> = Map::new();
        for (token, logprob) in found.top.iter().copied().chain([(token, found.drawn)]) {
            top.entry(of(token)).or_insert_with(|| json!(logprob.max(LEAST)));
        }
        Value::Object(top)
    }
}

/// Whether a byte of UTF-8 is the first of a character.
fn begins_character(byte: u8) -> bool {
    byte & 0xc0 != 0x80
}

/// A token as text; as OpenAI's `bytes:\xe2\x82` where it is a part of a character only, so that two such tokens stay two.
fn spelling(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes.iter().fold("bytes:".to_owned(), |text, byte| format!("{text}\\x{byte:02x}")),
    }
}
