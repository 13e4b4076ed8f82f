//! OpenAI's API: requests in, replies out. Knows no sockets and no engine thread.

mod fields;
pub mod kv_transfer;
pub mod logprobs;
pub mod prompt;
pub mod reply;
pub mod request;
pub(crate) mod sampling;
pub mod tokenize;
