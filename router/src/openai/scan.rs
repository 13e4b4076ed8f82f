//! Reads of a request body what routing needs, while it arrives: piece by piece, in one pass, keeping nothing but
//! a few short strings and the hashes of the prompt.
//!
//! Strict about JSON, lenient about everything else: whether `messages` makes sense is for the engine to say. Strings
//! are hashed raw, as they stand between their quotes, lists of token ids without their spaces: tools first, as chat templates have them, then the instructions
//! (`system`, `instructions`), wherever in the body they stand, then role, content and
//! tool calls of each message in the order in which they come. It takes what `serde_json` takes, except for what is
//! nested too deep or has thousands of members; lone surrogates pass, too.
//!
//! [`json`] is the grammar, [`place`] the request format, [`reader`] what becomes of each value. Next: the stage
//! [`parse`](crate::stages::parse).

mod error;
mod fields;
mod ids;
mod json;
mod number;
mod place;
mod reader;
mod system;
mod text;

use router_core::prefix::PromptBlocks;
use router_core::request::Answer;
use router_core::{Priority, PromptUse};

pub use error::{BodyError, Problem, SyntaxError};
pub use fields::{MAX_FIELD_BYTES, Name};
use json::Json;
pub use json::MAX_DEPTH;
use reader::Reader;

/// How prompts are hashed.
#[derive(Clone, Copy, Debug)]
pub struct ScanConfig {
    /// The process's secret, so that nobody outside can aim for collisions.
    pub seed: u64,
    /// What the policy reads of them.
    pub prompt_use: PromptUse,
}

/// What routing needs of a body.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Scanned {
    /// `model`, or what is meant by it.
    pub model: Option<Name>,
    /// Whether it is what is meant, and the body has another name.
    pub is_meant: bool,
    /// Hash of `user`, OpenAI's name for an end user.
    pub user: Option<u64>,
    /// By its `service_tier`; `None` if that says nothing.
    pub priority: Option<Priority>,
    /// Whether it asks for a `stream`.
    pub answer: Answer,
    /// Tokens of the prompt, if it came as their ids.
    pub token_ids: Option<usize>,
    /// The prompt, kept apart from those with another model, `cache_salt`, `lora_path` or `extra_key`.
    pub prompt: PromptBlocks,
}

/// Reads a body that comes in pieces. Where it is cut makes no difference to what is read.
pub struct BodyScanner {
    json: Json,
    reader: Reader,
}

impl BodyScanner {
    /// A scanner at the beginning of a body.
    #[must_use]
    pub fn new(config: ScanConfig) -> Self {
        Self { json: Json::new(), reader: Reader::new(config) }
    }

    /// Reads the next piece.
    ///
    /// # Errors
    /// Where the body ceases to be JSON. The error is final: every later call returns it again.
    pub fn push(&mut self, piece: &[u8]) -> Result<(), BodyError> {
        self.json.push(piece, &mut self.reader)?;
        self.reader.end_piece(piece);
        Ok(())
    }

    /// The body has ended.
    ///
    /// # Errors
    /// When it should not have, or was no object.
    pub fn finish(self) -> Result<Scanned, BodyError> {
        self.finish_for(|_, _| None)
    }

    /// The same; `meant` may say which model is meant by the name in it, given that and the hash of `user`. The prompt is then one of that model.
    ///
    /// # Errors
    /// As above.
    pub fn finish_for(
        mut self,
        meant: impl FnOnce(&str, Option<u64>) -> Option<Name>,
    ) -> Result<Scanned, BodyError> {
        self.json.finish()?;
        self.reader.finish(meant)
    }
}

#[cfg(test)]
mod tests;
