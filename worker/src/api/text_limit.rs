//! How long a text may be, decided before it is tokenized: tokenizing takes a second and hundreds of megabytes for each
//! megabyte or two, whether the text fits the context or not.
//!
//! Knows no requests and no templates. Next: [`tokens`](super::tokens).

use roundhouse_text::{SpecialTokenPolicy, Tokenizer};

use super::tokens::failed;
use crate::error::RequestError;

/// How much a tokenizer's normalisation may shorten a text at most: NFC puts three bytes of three for one, NFKC one of four.
/// A text that is shortened by more, such as one of spaces that the tokenizer drops, is refused all the same.
const NORMALISED_SHARE: usize = 4;
/// Bytes for a token of the context that are tokenized at once: three or four times as many as prose has.
const PIECE_BYTES_PER_TOKEN: usize = 16;
/// Pieces of a text may have other tokens than the whole at their ends. What has twice as many as there is room for is too
/// long all the same.
const BEYOND_DOUBT: usize = 2;
/// What `/tokenize` takes in any case.
const LEAST_TOKENIZE_BYTES: usize = 1 << 20;

/// The bounds of one model's texts.
#[derive(Clone, Copy, Debug)]
pub struct TextLimit {
    context_tokens: usize,
    longest_token_bytes: usize,
}

impl TextLimit {
    /// Of a context of so many of the tokenizer's tokens. Looks at all of them.
    #[must_use]
    pub fn new(tokenizer: &Tokenizer, context_tokens: usize) -> Self {
        let lengths = tokenizer.ids().into_iter().filter_map(|id| Some(tokenizer.token_bytes(id)?.len()));
        Self { context_tokens, longest_token_bytes: lengths.max().unwrap_or(1).max(1) }
    }

    /// Bytes of a text that could fit the context, were all of it the longest token.
    fn prompt_bytes(self) -> usize {
        self.context_tokens.saturating_mul(self.longest_token_bytes).saturating_mul(NORMALISED_SHARE)
    }

    fn piece_bytes(self) -> usize {
        self.context_tokens.saturating_mul(PIECE_BYTES_PER_TOKEN).max(PIECE_BYTES_PER_TOKEN)
    }

    /// Bytes of a text, or tokens, that `/tokenize` and `/detokenize` take: more than a prompt may have, since they are asked
    /// how long something is.
    pub(super) fn tokenize_bytes(self) -> usize {
        self.piece_bytes().max(LEAST_TOKENIZE_BYTES)
    }

    /// The tokens of a prompt, which the request has in `parameter`. A text that is far too long is tokenized no further than
    /// that shows.
    pub(super) fn encode(
        self,
        tokenizer: &Tokenizer,
        (parameter, text): (&'static str, &str),
        special: SpecialTokenPolicy,
    ) -> Result<Vec<u32>, RequestError> {
        let Self { context_tokens, .. } = self;
        let (most_bytes, text_bytes) = (self.prompt_bytes(), text.len());
        if text_bytes > most_bytes {
            return Err(RequestError::TextTooLong { parameter, context_tokens, most_bytes, text_bytes });
        }
        if text_bytes > self.piece_bytes() {
            let (mut counted_tokens, mut counted_bytes) = (0, 0);
            while counted_bytes < text_bytes {
                let piece = beginning(&text[counted_bytes..], self.piece_bytes());
                counted_tokens += tokenizer.encode(piece, SpecialTokenPolicy::Omit).map_err(failed)?.len();
                counted_bytes += piece.len();
                if counted_tokens > context_tokens.saturating_mul(BEYOND_DOUBT) {
                    return Err(RequestError::TextOverflows {
                        parameter,
                        context_tokens,
                        text_bytes,
                        counted_bytes,
                        counted_tokens,
                    });
                }
            }
        }
        tokenizer.encode(text, special).map_err(failed)
    }
}

/// The first `bytes` of `text`, or as many fewer as cut no character.
fn beginning(text: &str, bytes: usize) -> &str {
    let mut end = bytes.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{ModelFiles, ModelSource};

    fn encoded(text: &str, context_tokens: usize) -> Result<usize, String> {
        let files = ModelFiles::open(&ModelSource::Builtin).unwrap();
        let tokenizer = Tokenizer::from_json(files.tokenizer.as_deref().unwrap().as_bytes()).unwrap();
        let limit = TextLimit::new(&tokenizer, context_tokens);
        let tokens = limit.encode(&tokenizer, ("prompt", text), SpecialTokenPolicy::Add);
        tokens.map(|tokens| tokens.len()).map_err(|error| error.to_string())
    }

    #[test]
    fn what_may_fit_is_tokenized_whole() {
        let text = "wörd ".repeat(30);
        let tokens = encoded(&text, 1_000).unwrap();
        // More than the context has, and not beyond doubt: how many they are is said elsewhere.
        assert_eq!(encoded(&text, tokens * 2 / 3), Ok(tokens));
    }

    #[test]
    fn a_text_is_tokenized_no_further_than_shows_that_it_is_too_long() {
        // Multi-byte characters lie across the ends of pieces.
        let said = encoded(&"→ö".repeat(700), 100).unwrap_err();
        assert!(
            said.contains("the context length is 100 tokens") && said.contains("of the 3500 bytes"),
            "{said}"
        );
        let counted = said.split("the first ").nth(1).unwrap().split(' ').next().unwrap();
        assert!(counted.parse::<usize>().unwrap() <= 1_600, "{said}");
    }

    #[test]
    fn a_text_longer_than_the_longest_tokens_is_not_tokenized_at_all() {
        let said = encoded(&"word ".repeat(1_000_000), 10).unwrap_err();
        assert!(said.contains("the context length is 10 tokens") && said.contains("5000000 bytes"), "{said}");
        assert!(said.contains("bytes of text, but"), "{said}");
    }
}
