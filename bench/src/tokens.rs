//! Counting tokens: exactly with a tokenizer.json, roughly without.
//!
//! Must not know what the counts are for. [`crate::dataset`] cuts prompts with it, [`crate::run`] recounts answers.

use std::path::Path;

use anyhow::Context as _;
use roundhouse_text::{SpecialTokenPolicy, Tokenizer, TokenizerError};

use crate::statistics::DatasetCount;

/// Bytes a token, roughly, of English text in today's vocabularies.
const BYTES_A_TOKEN: usize = 4;

/// A way of counting.
#[derive(Debug)]
pub enum TokenCounter {
    /// By the model's own tokenizer.
    Exact(Box<Tokenizer>),
    /// By length.
    Approximate,
}

impl TokenCounter {
    /// Loads `DIR/tokenizer.json`, or the file itself; without a path, counts are approximate.
    ///
    /// # Errors
    /// A file that cannot be read or is no tokenizer.
    pub fn load(path: Option<&Path>) -> anyhow::Result<Self> {
        let Some(path) = path else { return Ok(Self::Approximate) };
        let path = if path.is_dir() { path.join("tokenizer.json") } else { path.to_owned() };
        let json = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let tokenizer =
            Tokenizer::from_json(&json).with_context(|| format!("cannot use {}", path.display()))?;
        Ok(Self::Exact(Box::new(tokenizer)))
    }

    /// Tokens of a text, without special tokens.
    ///
    /// # Errors
    /// A text that the tokenizer's vocabulary cannot spell.
    pub fn count(&self, text: &str) -> Result<u64, TokenizerError> {
        match self {
            Self::Exact(tokenizer) => {
                tokenizer.encode(text, SpecialTokenPolicy::Omit).map(|tokens| tokens.len() as u64)
            }
            Self::Approximate => Ok(text.len().div_ceil(BYTES_A_TOKEN) as u64),
        }
    }

    /// How much to believe the counts.
    pub fn dataset_count(&self) -> DatasetCount {
        match self {
            Self::Exact(_) => DatasetCount::Exact,
            Self::Approximate => DatasetCount::Approximate,
        }
    }
}
