//! The deciding part of the router: who the workers are, what each is busy with, which prefixes each holds, and which
//! of them gets a request.
//!
//! Pure: no tokio, HTTP, clock or metrics. Readings of the clock, randomness and snapshots come in as arguments,
//! decisions go out as values; the stages in `router` do the effects. The simulator runs this same code.

pub mod adapters;
mod answer_lengths;
pub mod backlog;
pub mod decide;
pub mod dp_rank;
pub mod fleet;
pub mod health;
pub mod ledger;
mod load_table;
mod models;
pub mod policy;
mod pools;
mod precedence;
pub mod prefix;
pub mod reports;
pub mod request;
pub mod retry_budget;
mod spare;
pub mod speed;
mod sync;
pub mod telling;
pub mod token_ratio;
pub mod unseen;
pub mod window;
pub mod worker;

pub use decide::demand::Demand;
pub use decide::{Among, Booked, Decided, Decider, Explained, Explanation, SplitCosts};
pub use dp_rank::{DpRank, DpRanks, ToldBy};
pub use fleet::{Fleet, FleetSnapshot};
pub use health::{BreakerState, Health, Trial};
pub use ledger::{Lease, LoadReading, Turn};
pub use policy::{PickError, Policy};
pub use precedence::{Precedence, Priority};
pub use reports::{CacheTrust, EngineLoad, LoadReport, OthersLoad, QueueSource, Reports};
pub use request::{Leg, PromptUse, RequestView};
pub use retry_budget::{Doubt, RetryBudget};
pub use worker::{Arrival, Role, Worker, WorkerId, WorkerSlot, WorkerSpec};
