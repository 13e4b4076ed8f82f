//! Stage 4: the fleet as it is now, the policy and the prefix tree → a worker, reserved.
//!
//! Next: [`dispatch`](super::dispatch), which comes back here for another worker when an attempt failed.

use std::sync::Arc;
use std::time::Duration;

use router_core::{Among, Decided, PickError};

use super::parse::Reading;
use crate::app::App;
use crate::fleet::Upstream;

/// A worker that is booked for one attempt.
pub struct Picked {
    /// Who, and what it occupies there.
    pub decided: Decided,
    /// The way to it; `None` if it has left since.
    pub upstream: Option<Arc<Upstream>>,
}

/// Picks a worker `among` those that are left, as things stand `now`.
///
/// # Errors
/// [`PickError`] when there is none.
pub fn pick(app: &App, reading: &Reading, among: Among<'_>, now: Duration) -> Result<Picked, PickError> {
    let roster = app.fleet.roster();
    let decided = app.decider.decide(&roster.snapshot, &reading.view(), among, now)?;
    let upstream = roster.upstream(&decided.worker);
    Ok(Picked { decided, upstream })
}
