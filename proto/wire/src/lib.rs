//! What a worker offers over gRPC, what routers tell each other, and what gateways ask: messages generated from `proto/worker.proto`, `proto/replica.proto` and
//! `proto/gateway.proto`, and what those of workers mean in our own types.
//!
//! Without features there are messages only, which is all that the router needs: it has connections of its own. Knows no
//! sockets. Next: the worker serves it (`worker/src/grpc`), the router's gRPC transport calls it.

mod call;
mod kv_events;
mod load;

/// Generated from `proto/worker.proto`; a test of this crate keeps it fresh, and writes it anew with `REGENERATE=1`.
#[rustfmt::skip]
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic, reason = "generated; the .proto file says what things are")]
pub mod v1;

/// The same from `proto/replica.proto`.
#[rustfmt::skip]
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic, reason = "generated; the .proto file says what things are")]
pub mod replica;

/// The same from `proto/gateway.proto`.
#[rustfmt::skip]
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic, reason = "generated; the .proto file says what things are")]
pub mod gateway;

pub use call::{FRAME_BYTES, GENERATE_PATH, INFO_PATH, KV_EVENTS_PATH, LOAD_PATH, TELL_PATH, frame_call};
pub use kv_events::{KvEventError, told_event};
