//! Anthropic's messages, where an answer in their words breaks off: no engine goes on with one, but vLLM and SGLang answer it as a chat, and a chat is gone
//! on with.
//!
//! What has been given is read from its [`event`]s, the [`request`] becomes the chat that engines make of it, and what comes of that becomes the rest of
//! the [`answer`]. Whether it is that chat an engine is asked, by how many tokens each of the two has ([`stages/in_tokens.rs`](crate::stages)).

pub mod answer;
pub mod request;

pub(super) mod event;
