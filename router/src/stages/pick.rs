//! Stage 4: the fleet as it is now, the policy and the prefix tree → a worker, reserved.
//!
//! Where the policy binds late, a request waits here, in line, while its worker has enough to compute.
//!
//! Next: [`dispatch`](super::dispatch), which comes back here for another worker when an attempt failed.

use std::sync::Arc;
use std::time::Duration;

use prometheus::Histogram;
use router_core::{Among, Decided, Decider, FleetSnapshot, PickError, RequestView};
use tokio::time::{Instant, sleep, timeout_at};

use super::parse::{Extent, Reading};
use crate::app::App;
use crate::error::RequestError;
use crate::fleet::Upstream;

/// How long the first probes of new workers are waited for, where there is nobody else.
const FIRST_PROBES: Duration = Duration::from_secs(3);
/// And how often it is looked whether they have ended.
const BETWEEN_LOOKS: Duration = Duration::from_millis(20);

/// A worker that is booked for one attempt.
pub struct Picked {
    /// Who, and what it occupies there.
    pub decided: Decided,
    /// The way to it; `None` if it has left since.
    pub upstream: Option<Arc<Upstream>>,
}

/// Picks a worker `among` those that are left, as things stand `now`. If the request may wait, its turn may be yet to come: see
/// [`take_turn`].
///
/// # Errors
/// [`PickError`] when there is none.
pub fn pick(app: &App, view: &RequestView<'_>, among: Among<'_>, now: Duration) -> Result<Picked, PickError> {
    pick_by(app, view, now, |fleet| app.decider.decide(fleet, view, among, now))
}

/// Picks a worker that has time to spare for a request in the background.
///
/// # Errors
/// [`PickError::NoneSpare`] while there is none, and as [`pick`].
pub fn pick_spare(
    app: &App,
    view: &RequestView<'_>,
    among: Among<'_>,
    now: Duration,
) -> Result<Picked, PickError> {
    pick_by(app, view, now, |fleet| app.decider.decide_spare(fleet, view, among, now))
}

fn pick_by(
    app: &App,
    view: &RequestView<'_>,
    now: Duration,
    decide: impl Fn(&FleetSnapshot) -> Result<Decided, PickError>,
) -> Result<Picked, PickError> {
    let mut roster = app.fleet.roster();
    let mut decided = match decide(&roster.snapshot) {
        Err(PickError::NoneUsable { .. }) => {
            // Those who were there may have left since; who has come instead is in the next roster.
            roster = app.fleet.roster();
            decide(&roster.snapshot)?
        }
        decided => decided?,
    };
    tell_others(app, &mut decided, view, (now, false));
    let upstream = roster.upstream(&decided.worker);
    Ok(Picked { decided, upstream })
}

/// Waits, where there was nobody to pick, as `error` says, for the first probes of new workers to end: a whole fleet may have been replaced at once.
/// Returns whether it is worth to look again.
pub async fn new_workers_are_known(
    app: &App,
    view: &RequestView<'_>,
    (among, error): (Among<'_>, &RequestError),
    deadline: Instant,
) -> bool {
    let may_change =
        matches!(error, RequestError::Pick(PickError::NoneUsable { .. } | PickError::ModelUntold { .. }));
    let (end, mut awaited) = (deadline.min(Instant::now() + FIRST_PROBES), false);
    while may_change && awaits_any(app) {
        if Decider::can_decide(&app.fleet.roster().snapshot, view, among) {
            return true;
        }
        if Instant::now() >= end {
            return false;
        }
        awaited = true;
        sleep(BETWEEN_LOOKS).await;
    }
    awaited
}

/// Whether a worker may turn out to be up in a moment.
fn awaits_any(app: &App) -> bool {
    app.fleet.roster().snapshot.workers().iter().any(|worker| worker.is_awaited())
}

/// Other routers are told of a decision, if there are any; and whether it is one that was made before, and is made anew.
fn tell_others(app: &App, decided: &mut Decided, view: &RequestView<'_>, (now, is_anew): (Duration, bool)) {
    if let Some(replicas) = &app.replicas {
        replicas.picked(&decided.worker, &mut decided.lease, view, (now, is_anew));
    }
}

/// Refuses a request that names no model where workers would take it for different ones: any of them would answer, most likely with a model
/// that was not meant. A body that could not be read goes on, since it may name one.
///
/// # Errors
/// [`RequestError::ModelNotNamed`].
pub fn check_model(app: &App, reading: &Reading) -> Result<(), RequestError> {
    if reading.model.is_some() || reading.extent == Extent::Nothing {
        return Ok(());
    }
    match app.fleet.roster().snapshot.models_to_choose_from() {
        Some(known) => Err(RequestError::ModelNotNamed { known }),
        None => Ok(()),
    }
}

/// Waits until the picked worker has room for the request, if it is in line. While it waits it is decided anew every now and then: its worker
/// may be down by now, or another may have become the better one. A client that leaves loses its place.
///
/// # Errors
/// When there is no worker any more, or `deadline` has come.
pub async fn take_turn(
    app: &App,
    view: &RequestView<'_>,
    mut picked: Picked,
    among: Among<'_>,
    (deadline, limit): (Instant, Duration),
) -> Result<Picked, RequestError> {
    let Some(mut turn) = picked.decided.lease.turn() else { return Ok(picked) };
    let _in_line = Wait::begins(&app.metrics.line_seconds);
    loop {
        let anew_at = Instant::now() + picked.decided.worker.load.reconsider_after();
        if timeout_at(anew_at.min(deadline), turn).await.is_ok() && picked.decided.worker.is_usable() {
            app.decider.goes(&mut picked.decided, view, app.now());
            break;
        }
        if Instant::now() >= deadline {
            return Err(RequestError::NoRoom { limit });
        }
        let roster = app.fleet.roster();
        let before = (picked.decided, among);
        let now = app.now();
        let mut decided = app.decider.decide_again(&roster.snapshot, view, before, now)?;
        tell_others(app, &mut decided, view, (now, true));
        let upstream = roster.upstream(&decided.worker);
        picked = Picked { decided, upstream };
        match picked.decided.lease.turn() {
            Some(next) => turn = next,
            None => break,
        }
    }
    Ok(picked)
}

/// Observes a wait when it is over, however it ends: the request's turn, an error, a client that leaves.
pub(super) struct Wait<'a> {
    seconds: &'a Histogram,
    began: Instant,
}

impl<'a> Wait<'a> {
    pub(super) fn begins(seconds: &'a Histogram) -> Self {
        Self { seconds, began: Instant::now() }
    }
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        self.seconds.observe(self.began.elapsed().as_secs_f64());
    }
}
