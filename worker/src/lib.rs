//! An engine that serves one model over OpenAI HTTP: continuous batching, paged KV cache, prefix reuse.
//!
//! The path of a request: [`api`] routes it, [`openai`] reads it and renders its prompt, [`engine`] runs it step by step
//! on a [`backend`], [`generation`] turns tokens back into text, and a [`WorkerBody`] streams that to the client.
//! [`Worker::handle`] is the whole of it in one call; the TCP server and the router's embedded transport both use it.

pub mod api;
pub mod backend;
pub mod body;
pub mod config;
mod control_groups;
mod cpu_quota;
pub mod engine;
pub mod error;
pub mod file_limit;
pub mod generation;
pub mod grpc;
pub mod kv_events;
mod kv_size;
mod memory;
pub mod metrics;
pub mod model;
pub mod openai;
pub mod serve;
pub mod simulation;
pub mod transfer;
mod worker;

pub use body::WorkerBody;
pub use config::{KernelOverlap, KvBudget, KvEventRecording, KvTransfer, StepSize, WorkerConfig};
pub use error::WorkerError;
pub use kv_size::KvSizeError;
pub use model::ModelSource;
pub use simulation::BackendChoice;
pub use worker::Worker;
pub use worker_kernels::cuda::PrefillKernel;
