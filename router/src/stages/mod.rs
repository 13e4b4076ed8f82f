//! The path of a request, in order. Each stage consumes what the one before it produced, so that a skipped stage does
//! not compile:
//!
//! [`accept`] → [`admit`] → [`parse`] → [`pick`] → [`dispatch`] → [`relay`] → [`record`]

pub mod accept;
pub mod admit;
pub mod background;
mod continuing;
pub mod dispatch;
mod exchange;
mod in_tokens;
mod keep_alive;
mod legs;
pub mod parse;
pub mod pick;
pub mod record;
pub mod relay;
mod retries;
