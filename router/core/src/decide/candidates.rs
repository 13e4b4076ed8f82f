//! The workers that may serve a request, as they stand: made of the table's rows, in one walk under the decider's lock.

use std::sync::Arc;
use std::time::Duration;

use super::Among;
use crate::fleet::{FleetSnapshot, Ring, Row};
use crate::health::{Standing, Trial};
use crate::ledger::LoadReading;
use crate::models::Serving;
use crate::policy::{Candidate, Choice};
use crate::reports::LoadReport;
use crate::request::RequestView;
use crate::speed::{Prefill, PrefillSpeed, QueueReading};
use crate::sync::atomic::Ordering;
use crate::unseen::Unseen;
use crate::worker::{Worker, WorkerSlot, is_draining, is_up, is_usable};

/// Of all there are, those whose standing is the best: so a worker whose breaker is open, or that is busy, is a candidate only if all are
/// like it. Kept between picks, for its room.
#[derive(Default)]
pub(super) struct Candidates {
    pub(super) list: Vec<Candidate>,
    /// What each of them said of its load last; empty where none says anything.
    reports: Vec<Option<LoadReport>>,
    standing: Rank,
    requests: u64,
    prefilling: u64,
}

/// What a pick goes by before any policy; the best first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
enum Rank {
    Up(Standing),
    #[default]
    Down,
}

/// What is the same for all candidates of a pick.
pub(super) struct Moment {
    pub(super) now: Duration,
    /// How fast the fleet computes prompts; `None` for policies that do not go by time.
    speed: Option<PrefillSpeed>,
    now_ns: u64,
    now_ms: u64,
    /// What the whole prompt takes, with nothing cached.
    cold_s: f64,
}

impl Moment {
    pub(super) fn new(now: Duration, request: &RequestView<'_>, speed: Option<PrefillSpeed>) -> Self {
        let prefill = Prefill { new_tokens: request.prompt_tokens.max(1), cached_tokens: 0 };
        Self {
            now,
            speed,
            now_ns: u64::try_from(now.as_nanos()).unwrap_or(u64::MAX),
            now_ms: u64::try_from(now.as_millis()).unwrap_or(u64::MAX),
            cold_s: speed.map_or(0.0, |speed| speed.seconds(prefill)),
        }
    }
}

impl Candidates {
    /// Gathers those `among` which a request may be picked; none if nobody may.
    pub(super) fn gather(
        &mut self,
        fleet: &FleetSnapshot,
        eligible: &Eligible<'_>,
        moment: &Moment,
        draw: &mut dyn FnMut() -> f64,
    ) {
        self.clear(Rank::Down);
        for row in fleet.rows() {
            if !eligible.has(fleet, row) {
                continue;
            }
            let rank = if !is_up(row.load.state.load(Ordering::Relaxed)) {
                Rank::Down
            } else if moment.now_ms >= row.load.ordinary_from_ms.load(Ordering::Relaxed) {
                Rank::Up(Standing::Ready)
            } else {
                Rank::Up(fleet.worker(row).health.standing(moment.now, draw))
            };
            if rank < self.standing {
                self.clear(rank);
            }
            if rank == self.standing {
                self.add(fleet, row, moment);
            }
        }
        if !self.reports.is_empty() {
            self.reports.resize(self.list.len(), None);
        }
    }

    fn clear(&mut self, standing: Rank) {
        self.list.clear();
        self.reports.clear();
        (self.standing, self.requests, self.prefilling) = (standing, 0, 0);
    }

    #[inline]
    fn add(&mut self, fleet: &FleetSnapshot, row: Row<'_>, moment: &Moment) {
        let load = LoadReading::of(row.load);
        self.requests += u64::from(load.requests);
        self.prefilling += u64::from(load.prefilling);
        let mut candidate = Candidate {
            place: row.place,
            load,
            kv_capacity_tokens: row.load.kv_capacity_tokens.load(Ordering::Relaxed),
            ..Candidate::new(row.slot)
        };
        if moment.speed.is_some() {
            let queue = QueueReading::of(row.load);
            candidate.ratio = queue.ratio;
            candidate.joins_step = queue.joins_step;
            candidate.queued_s = queue.left_s(moment.now_ns);
            candidate.own_s = f64::from(queue.ratio) * moment.cold_s;
        }
        if row.load.tells_load.load(Ordering::Relaxed) > 0 {
            let worker = fleet.worker(row);
            self.reports.resize(self.list.len(), None);
            let sent = worker.load.sent();
            self.reports.push(worker.reports.load(moment.now).map(|report| LoadReport { sent, ..report }));
        }
        self.list.push(candidate);
    }

    /// Says that the worker of that slot holds the first `blocks` of the prompt; nothing if it is no candidate.
    pub(super) fn hit(
        &mut self,
        fleet: &FleetSnapshot,
        (slot, blocks): (WorkerSlot, usize),
        (request, speed): (&RequestView<'_>, &PrefillSpeed),
    ) {
        if let Some(at) = fleet.place(slot).and_then(|place| self.find(place)) {
            self.list[at].hit(request, blocks, speed);
        }
    }

    /// Where in the list the worker at that place of the fleet stands. They are in fleet order, most of them at their own place.
    fn find(&self, place: u32) -> Option<usize> {
        match self.list.get(place as usize) {
            Some(candidate) if candidate.place == place => Some(place as usize),
            _ => self.list.binary_search_by_key(&place, |candidate| candidate.place).ok(),
        }
    }

    /// What a policy chooses from.
    pub(super) fn choice<'a>(
        &'a self,
        ring: &'a dyn Fn() -> &'a Ring,
        arrivals_per_s: f64,
        (unseen, speed): (Unseen, PrefillSpeed),
    ) -> Choice<'a> {
        Choice {
            candidates: &self.list,
            reports: &self.reports,
            requests: self.requests,
            prefilling: self.prefilling,
            ring,
            arrivals_per_s,
            unseen,
            speed,
        }
    }

    /// Begins an attempt at a candidate; `None` if only a probe may go there, and one is on its way.
    pub(super) fn begin_trial(&self, worker: &Arc<Worker>, now: Duration) -> Option<Trial> {
        match self.standing {
            Rank::Up(Standing::Ready | Standing::Warming) => Trial::begin(&worker.health, now),
            // There is nobody better.
            _ => Some(Trial::begin_anyway(&worker.health, now)),
        }
    }

    /// Age of the oldest report of load from a worker that is busy. One that is idle would tell at once of a request, and else tells
    /// nothing for long.
    pub(super) fn report_age(&self) -> Duration {
        let busy = self.reports.iter().flatten().filter(|report| report.running + report.waiting > 0);
        Duration::from_millis(busy.map(|report| report.age_ms).max().unwrap_or(0).into())
    }
}

/// Who may get a request at all.
pub(super) struct Eligible<'a> {
    among: Among<'a>,
    serving: Serving<'a>,
}

impl<'a> Eligible<'a> {
    pub(super) fn new(fleet: &FleetSnapshot, request: &RequestView<'a>, among: Among<'a>) -> Self {
        Self { among, serving: fleet.serving(request.model) }
    }

    #[inline]
    pub(super) fn has(&self, fleet: &FleetSnapshot, row: Row<'_>) -> bool {
        let state = row.load.state.load(Ordering::Relaxed);
        let may_be_picked = match self.among {
            Among::Untried(tried) => is_usable(state) && !tried.contains(&row.slot),
            Among::Anyone => !is_draining(state),
        };
        may_be_picked && self.serves(fleet, row)
    }

    fn serves(&self, fleet: &FleetSnapshot, row: Row<'_>) -> bool {
        let has = |bits: u32| row.load.models.load(Ordering::Relaxed) & bits != 0;
        match self.serving {
            Serving::Anyone => true,
            Serving::Bit(bit) => has(bit),
            Serving::Asked(bits, model) => has(bits) && fleet.worker(row).may_serve(Some(model)),
        }
    }
}
