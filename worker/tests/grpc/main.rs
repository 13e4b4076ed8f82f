//! The worker over gRPC and ZeroMQ, on real sockets, with the built-in model.
#![expect(clippy::unwrap_used, reason = "in a test a panic is the report")]

mod generate;
mod harness;
mod kv_events;
mod load;
mod zmq;
