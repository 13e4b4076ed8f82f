//! The router as a client, a worker and an operator see it: real sockets, workers whose every byte the test decides.

#![expect(clippy::unwrap_used, reason = "in a test a panic is the report")]

mod bodies;
mod faults;
mod harness;
mod proxy;
mod routing;
