//! Requests a second and CPU a request, in a closed loop: every connection asks again as soon as its answer is there.
//!
//! Next on the path: [`super::load`].

use std::sync::Arc;

use serde::Serialize;

use super::load::Load;
use super::mocks::Plan;
use super::rig::{Rig, Usage};
use super::tally::Tally;
use super::workload::Delivery;

/// What bodies of one size cost.
#[derive(Debug, Clone, Serialize)]
pub struct Rate {
    /// Size of a body.
    pub kilobytes: usize,
    /// Good answers a second.
    pub requests_per_s: f64,
    /// Router CPU for each, in microseconds.
    pub cpu_us_per_request: Option<f64>,
    /// Counts of the window.
    #[serde(flatten)]
    pub usage: Usage,
}

/// Measures [`Rate`].
///
/// # Errors
/// The router is gone.
pub async fn measure(rig: &Rig, kilobytes: usize) -> anyhow::Result<Rate> {
    let tally = Arc::<Tally>::default();
    let workload = Arc::new(rig.workload(kilobytes, Delivery::Whole)?);
    rig.mocks.answer_with(Plan::Whole);
    let mut load = Load::new(&tally);
    load.spawn(rig.connections, &rig.addresses, &workload, |lane, rng| lane.closed_loop(u64::MAX, rng));
    let usage = rig.watch(&tally, |usage| usage.requests).await?;
    load.stop().await;
    let usage = Usage { errors: tally.errors(), ..usage };
    Ok(Rate {
        kilobytes,
        requests_per_s: usage.requests as f64 / usage.seconds,
        cpu_us_per_request: usage.cpu_us_each(usage.requests),
        usage,
    })
}
