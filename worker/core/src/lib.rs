//! The pure part of the worker: what a step is, which blocks exist, who runs next.
//!
//! Knows no channels, HTTP, tokenizer or clock. Callers: the engine thread in `worker`, later the simulator.

pub mod sampling;
pub mod step;
