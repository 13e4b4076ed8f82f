//! Text and tokens: tokenizer, chat template and incremental detokenizer.
//!
//! Router and worker share this crate, because hashes of prompts agree only where the prompts do. It reads no files and
//! no clock: callers hand in bytes and the time. Next on the path: the worker's engine takes the token ids, the router
//! hashes them.

pub mod chat_template;
pub mod detokenizer;
mod json_dumps;
mod messages;
mod stop_strings;
mod strftime;
mod token_bytes;
pub mod tokenizer;

pub use chat_template::{ChatInput, ChatTemplate, Ending, SpecialTokens, TemplateError};
pub use detokenizer::{Detokenizer, Piece};
pub use tokenizer::{SpecialTokenPolicy, Tokenizer, TokenizerError};
