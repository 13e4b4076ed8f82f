//! A Hugging Face tokenizer: text to token ids and back.
//!
//! Knows nothing of chats or streams; [`chat_template`](crate::chat_template) makes the text, and
//! [`detokenizer`](crate::detokenizer) turns tokens back into it one at a time.

use std::sync::Arc;

use roundhouse_types::TokenId;
use tokenizers::DecoderWrapper;

use crate::token_bytes;

/// A tokenizer; clones share one vocabulary.
#[derive(Clone)]
pub struct Tokenizer {
    inner: Arc<tokenizers::Tokenizer>,
    byte_fallback: bool,
    byte_level: bool,
}

/// Whether encoding adds the tokens that the tokenizer puts around a text of its own accord, such as a BOS.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SpecialTokenPolicy {
    /// Add them: for a bare prompt.
    Add,
    /// Leave them out: for the output of a chat template, which writes its own.
    Omit,
}

/// Why a tokenizer could not be read or used.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// The bytes are not a tokenizer.json that this build understands.
    #[error("tokenizer.json is invalid")]
    Invalid(#[source] tokenizers::Error),
    /// The text cannot be encoded.
    #[error("text cannot be tokenized")]
    Encode(#[source] tokenizers::Error),
    /// The token ids cannot be decoded.
    #[error("tokens cannot be turned into text")]
    Decode(#[source] tokenizers::Error),
}

impl Tokenizer {
    /// Reads the content of a tokenizer.json. Truncation and padding set in it are switched off: they serve training.
    ///
    /// # Errors
    /// [`TokenizerError::Invalid`].
    pub fn from_json(bytes: &[u8]) -> Result<Self, TokenizerError> {
        let mut inner = tokenizers::Tokenizer::from_bytes(bytes).map_err(TokenizerError::Invalid)?;
        inner.with_padding(None);
        inner.with_truncation(None).map_err(TokenizerError::Invalid)?;
        let decodes = |part: fn(&DecoderWrapper) -> bool| {
            inner.get_decoder().is_some_and(|decoder| any_decoder(decoder, &part))
        };
        let byte_fallback = decodes(|decoder| matches!(decoder, DecoderWrapper::ByteFallback(_)));
        let byte_level = decodes(|decoder| matches!(decoder, DecoderWrapper::ByteLevel(_)));
        Ok(Self { inner: Arc::new(inner), byte_fallback, byte_level })
    }

    /// The token ids of `text`.
    ///
    /// # Errors
    /// [`TokenizerError::Encode`].
    pub fn encode(&self, text: &str, special: SpecialTokenPolicy) -> Result<Vec<TokenId>, TokenizerError> {
        let add = special == SpecialTokenPolicy::Add;
        let encoding = self.inner.encode_fast(text, add).map_err(TokenizerError::Encode)?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of `tokens`, without special tokens. Bytes that are not UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// [`TokenizerError::Decode`].
    pub fn decode(&self, tokens: &[TokenId]) -> Result<String, TokenizerError> {
        self.inner.decode(tokens, true).map_err(TokenizerError::Decode)
    }

    /// The text of `tokens`, special tokens spelled out. Bytes that are not UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// [`TokenizerError::Decode`].
    pub fn decode_verbatim(&self, tokens: &[TokenId]) -> Result<String, TokenizerError> {
        self.inner.decode(tokens, false).map_err(TokenizerError::Decode)
    }

    /// The bytes that `token` stands for: a part of a character where it is one, its spelling where it is special. `None` for
    /// an id that is no token.
    #[must_use]
    pub fn token_bytes(&self, token: TokenId) -> Option<Vec<u8>> {
        let spelling = self.inner.id_to_token(token)?;
        if self.inner.get_added_vocabulary().get_added_tokens_decoder().contains_key(&token) {
            return Some(spelling.into_bytes());
        }
        if self.byte_level {
            return Some(token_bytes::of_byte_level(&spelling));
        }
        Some(token_bytes::of_sentence_piece(&spelling, self.byte_fallback))
    }

    /// How many ids there are, added tokens included; valid ids may still have gaps below it.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// The ids of all tokens, added ones included, ascending. Where there are gaps the last is beyond
    /// [`vocab_size`](Self::vocab_size). Copies the vocabulary: for the start of a program.
    #[must_use]
    pub fn ids(&self) -> Vec<TokenId> {
        let mut ids: Vec<TokenId> = self.inner.get_vocab(true).into_values().collect();
        ids.sort_unstable();
        ids
    }

    /// The id of a token by its exact spelling, such as `<|im_end|>`.
    #[must_use]
    pub fn token_to_id(&self, token: &str) -> Option<TokenId> {
        self.inner.token_to_id(token)
    }

    /// What `token` does to a run of single bytes (`<0xE2>`), which the decoder judges as a whole: text from an unfinished
    /// run may still change.
    pub(crate) fn effect_on_byte_run(&self, token: TokenId) -> ByteRun {
        if !self.byte_fallback {
            return ByteRun::Ends;
        }
        match self.inner.id_to_token(token) {
            Some(text) if self.inner.get_added_vocabulary().is_special_token(&text) => ByteRun::Unchanged,
            Some(text) if text.len() == 6 && text.starts_with("<0x") && text.ends_with('>') => {
                ByteRun::GoesOn
            }
            Some(_) => ByteRun::Ends,
            None => ByteRun::Unchanged,
        }
    }
}

/// What a token does to a run of single bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ByteRun {
    /// It is a byte of the run.
    GoesOn,
    /// It has text of its own.
    Ends,
    /// The decoder never sees it.
    Unchanged,
}

/// Whether a decoder, or one of those that it is made of, is such a one.
fn any_decoder(decoder: &DecoderWrapper, wanted: &dyn Fn(&DecoderWrapper) -> bool) -> bool {
    match decoder {
        DecoderWrapper::Sequence(sequence) => {
            sequence.get_decoders().iter().any(|decoder| any_decoder(decoder, wanted))
        }
        one => wanted(one),
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Tokenizer").field("vocab_size", &self.vocab_size()).finish_non_exhaustive()
    }
}
