//! The router as a client, a worker and an operator see it: real sockets, workers whose every byte the test decides.

#![expect(clippy::unwrap_used, reason = "in a test a panic is the report")]

mod adapters;
mod aliases;
mod bodies;
mod canary;
mod continuing;
mod continuing_messages;
mod continuing_responses;
mod disaggregated;
mod discovery;
mod engine_events;
mod engine_load;
mod fault_processes;
mod fault_suite;
mod faults;
mod faults_health;
mod following;
mod gateway;
mod grpc;
mod handed_over;
mod harness;
mod http2;
mod keep_alive;
mod keys;
mod kubernetes;
mod legacy;
mod line;
mod listener;
mod other_apis;
mod precedence;
mod predictions;
mod proxy;
mod ranks;
mod replicas;
mod routing;
mod smuggling;
mod spans;
mod stalls;
mod stalls_apart;
mod thoughts;
mod upstream;
mod upstream_h2;
