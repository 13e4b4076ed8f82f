//! The pure part of the worker: what a step is, which blocks exist, what they hold, who runs next.
//!
//! Knows no channels, HTTP, tokenizer or clock. Callers: the engine thread in `worker`, later the simulator.

mod block_index;
pub mod block_pool;
pub mod block_table;
pub mod kv_event;
pub mod sampling;
pub mod scheduler;
pub mod sequence;
pub mod step;
pub mod timing;

pub use block_pool::BlockPool;
pub use block_table::BlockTable;
pub use kv_event::KvEvent;
pub use sampling::SamplingParams;
pub use scheduler::{PrefillOrder, Scheduler, SchedulerLimits};
pub use sequence::Submission;
pub use timing::{EnginePreset, EngineTiming};
