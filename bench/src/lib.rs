//! Serving benchmarks in the format people already read: SGLang's and vLLM's tables, JSON keys and flags.
//!
//! The path of a run, in order: [`args`] → [`dataset`] → [`arrivals`] → [`run`] (over [`client`]) →
//! [`record`] → [`statistics`] → [`report`]. [`sweep`] and [`knee`] are many such runs. [`overhead`] and [`soak`] are other measurements, of
//! routers. [`simulate`] runs the router's and the worker's own cores on a clock of its own, and [`size`] looks for a fleet with it; nothing else
//! here knows their insides: it speaks HTTP like any client.

pub mod args;
pub mod arrivals;
pub mod body;
pub mod chunk;
pub mod client;
pub mod dataset;
pub mod knee;
pub mod overhead;
pub mod plot;
pub mod record;
pub mod report;
pub mod run;
pub mod simulate;
pub mod size;
pub mod soak;
pub mod sse;
pub mod statistics;
pub mod sweep;
pub mod ticker;
pub mod tokens;
pub mod wire;
