//! OpenAI's responses, where one breaks off: vLLM goes on with a message whose status says that it is in progress.
//!
//! What has been given is read from its events ([`items`]), the [`request`] is the same with that message behind its input, and the events of what comes
//! are made to follow on it ([`rest`]).

pub mod request;
pub mod rest;

pub(super) mod items;
