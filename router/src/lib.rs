//! A cache-aware router in front of LLM engines.
//!
//! A request walks through [`stages`] in order; `router-core` decides; [`transport`] carries. [`app`] wires it all, once.

pub mod admin;
pub mod answers;
pub mod app;
pub mod back_off;
pub mod body_chunks;
pub mod body_memory;
pub mod cache_size;
pub mod config;
pub mod desired;
pub mod disaggregation;
pub mod discovery;
pub mod engine_load;
pub mod error;
pub mod failure_logs;
pub mod file_limit;
pub mod fleet;
pub mod gateway;
mod gathered;
pub mod grpc_messages;
pub mod hop_by_hop;
pub mod http1;
pub mod keys;
pub mod kv_events;
pub mod legacy;
pub mod listener;
pub mod liveness;
pub mod logs;
pub mod metrics;
pub mod metrics_text;
pub mod openai;
pub mod payload;
pub mod precedence;
pub mod probes;
pub mod recording;
pub mod replicas;
pub mod retry_after;
pub mod routes;
pub mod serve;
pub mod spans;
pub mod stages;
pub mod templates;
pub mod time_limits;
pub mod transport;
pub mod turns;
pub mod why;
