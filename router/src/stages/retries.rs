//! Whether a failed attempt is followed by another, where and when; and what the client is told when none is.
//!
//! Used by [`dispatch`](super::dispatch), and by [`continuing`](super::continuing) for streams that break off; and only once an attempt has failed.

use std::sync::Arc;
use std::time::Duration;

use http::{HeaderValue, StatusCode, header};
use router_core::{Among, Decider, FleetSnapshot, Leg, RequestView, Role, Worker, WorkerSlot};
use smallvec::SmallVec;
use tokio::time::Instant;

use super::dispatch::Begun;
use super::parse::Reading;
use crate::app::App;
use crate::error::RequestError;
use crate::transport::{Broken, Gateway, TransportError};

/// The first back-off is drawn from 0 to this, each further one from twice as much: long enough to part requests that
/// failed together, short beside a prefill.
const FIRST_BACK_OFF: Duration = Duration::from_millis(20);

/// What kind of failure an attempt met.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Cause {
    /// There was no connection, so nothing has been processed.
    Unreachable,
    /// The same, and it took long to find out.
    ConnectTimeout,
    /// The connection broke before the request was out, or what came was no answer.
    Reset,
    /// The connection broke after the request had gone out, before the answer was whole: the worker may have died, and of this very request. Or it stands still.
    /// So there is a [doubt](router_core::Doubt).
    Died,
    /// 429: the worker has enough to do.
    Busy,
    /// 502, 503 or 504; or a gateway could not use it.
    Failing,
    /// 500: may be the request's own fault, so it gets one more try and no third.
    InternalError,
    /// Time is up; or it must not run twice.
    TimeUp,
}

impl Cause {
    /// What is wrong with an answer of that status; `None` if it is to be relayed.
    pub(super) fn of_status(status: StatusCode) -> Option<Self> {
        match status {
            StatusCode::TOO_MANY_REQUESTS => Some(Self::Busy),
            StatusCode::BAD_GATEWAY | StatusCode::SERVICE_UNAVAILABLE | StatusCode::GATEWAY_TIMEOUT => {
                Some(Self::Failing)
            }
            StatusCode::INTERNAL_SERVER_ERROR => Some(Self::InternalError),
            _ => None,
        }
    }

    pub(super) fn is_unreachable(self) -> bool {
        matches!(self, Self::Unreachable | Self::ConnectTimeout)
    }

    /// Whether the connection failed: all that waited at the worker may have lost it.
    pub(super) fn lost_connection(self) -> bool {
        self.is_unreachable() || matches!(self, Self::Reset | Self::Died)
    }

    /// Whether it may be the process that fails, and with it all data-parallel ranks behind its address: vLLM answers 500 at each of them when one
    /// has died, and then ends.
    fn may_be_the_process(self) -> bool {
        !matches!(self, Self::Busy | Self::TimeUp)
    }

    /// What is wrong when there is no answer.
    pub(super) fn of_error(error: &TransportError) -> Self {
        match error {
            TransportError::FirstByte { .. } | TransportError::Total { .. } => Self::TimeUp,
            TransportError::ConnectTimeout { .. } | TransportError::NotSent { .. } => Self::ConnectTimeout,
            TransportError::Left => Self::Unreachable,
            TransportError::PassedOver => Self::Failing,
            TransportError::Broken(Broken::Io(_) | Broken::Closed | Broken::Http2(_))
            | TransportError::EngineFailed
            | TransportError::Stalled { .. }
            | TransportError::Unfinished => Self::Died,
            _ if error.is_unreachable() => Self::Unreachable,
            _ => Self::Reset,
        }
    }
}

/// An attempt that came to nothing.
pub(super) struct Failed {
    pub(super) worker: Arc<Worker>,
    pub(super) cause: Cause,
    /// Where the connection failed: requests that were at the worker, this one included.
    pub(super) in_flight: usize,
    /// How long the worker asked to be left alone.
    pub(super) retry_after: Option<Duration>,
    /// The worker's own answer, or what happened in its place.
    pub(super) told: Result<Begun, RequestError>,
}

/// A request's attempts so far.
#[derive(Default)]
pub(super) struct Retries {
    /// For each of these somebody must be left.
    legs: &'static [Leg],
    /// Who has been asked, and who is not to be at all.
    tried: SmallVec<[WorkerSlot; 4]>,
    /// Of those tried, whose connections failed, and how often each had been found down by then; `None` of one that was down.
    lost: SmallVec<[(Arc<Worker>, Option<u32>); 2]>,
    /// Who is not to be asked, tried or not.
    left_out: Vec<WorkerSlot>,
    /// Those tried, and the other ranks of endpoints that failed; empty where nobody else is left, or there are no ranks.
    avoided: SmallVec<[WorkerSlot; 4]>,
    failures: usize,
    unreachable: usize,
    internal_errors: usize,
    /// For each worker that may have died of it, how many requests were there.
    deaths: SmallVec<[usize; 4]>,
    anyone: Option<AllTried>,
    least_retry_after: Option<Duration>,
    last: Option<Box<Result<Begun, RequestError>>>,
    /// Some workers cannot be asked at all: a gateway does not send to them.
    is_bounded: bool,
}

/// Each worker has been tried; from now on all are candidates again.
struct AllTried;

impl Retries {
    /// The request needs a worker for each of these.
    pub(super) fn need(&mut self, legs: &'static [Leg]) {
        self.legs = legs;
    }

    /// These are not to be asked.
    pub(super) fn leave_out(&mut self, workers: Vec<WorkerSlot>) {
        self.is_bounded |= !workers.is_empty();
        if !self.avoided.is_empty() {
            self.avoided.extend_from_slice(&workers);
        }
        self.tried.extend_from_slice(&workers);
        self.left_out = workers;
    }

    /// Somebody answers: what others said before is nobody's answer any more.
    pub(super) fn of_one_that_has_begun(self) -> Self {
        Self { last: None, ..self }
    }

    /// Who may get the next attempt.
    pub(super) fn among(&self) -> Among<'_> {
        match &self.anyone {
            Some(AllTried) => Among::Anyone,
            None if self.avoided.is_empty() => Among::Untried(&self.tried),
            None => Among::Untried(&self.avoided),
        }
    }

    /// Who is not to be asked in place of a worker that stands still; `None` if nobody is: too many have failed, or what hangs engines may be this
    /// request, which may as well stay.
    pub(super) fn leaves(&self, app: &App) -> Option<SmallVec<[WorkerSlot; 4]>> {
        let may_be_another = |slot: &WorkerSlot| {
            let mut lost = self.lost.iter().filter(|(worker, _)| worker.slot == *slot);
            lost.any(|(worker, downs)| !worker.is_up() || is_another(worker, *downs))
        };
        let tried = || self.tried.iter().copied().filter(|slot| !may_be_another(slot)).collect();
        (self.failures < app.settings.max_retries && self.deaths.is_empty()).then(tried)
    }

    /// Takes in a failure. Returns the time to wait before another attempt, or `None` if there is to be none.
    pub(super) fn after(
        &mut self,
        app: &App,
        reading: &Reading,
        failed: Failed,
        deadline: Instant,
    ) -> Option<Duration> {
        let worker = Arc::clone(&failed.worker);
        let cause = failed.cause;
        self.note(failed);
        let is_at_fault = match cause {
            Cause::TimeUp => true,
            Cause::InternalError => self.internal_errors > 1,
            Cause::Died => app.doubt.is_at_fault(app.now(), &self.deaths),
            _ => false,
        };
        if is_at_fault || self.failures > app.settings.max_retries {
            return None;
        }
        self.find_somebody(app, reading, (&worker, cause))?;
        let wait = self.back_off(cause, rand::random());
        if Instant::now() + wait >= deadline {
            return None;
        }
        if cause.lost_connection() && worker.rescue.take() || app.retry_budget.take(app.now()) {
            return Some(wait);
        }
        app.metrics.retries_refused.inc();
        None
    }

    /// What the client gets where no attempt can follow a failure, whatever it was.
    pub(super) fn give_up_after(&mut self, failed: Failed) -> Result<Begun, RequestError> {
        self.note(failed);
        self.give_up().expect("it has just been given a failure")
    }

    /// A gateway has gone on to that worker by itself: nobody else is asked.
    pub(super) fn went_on(&mut self, failed: Failed, to: WorkerSlot, fleet: &FleetSnapshot) {
        self.note(failed);
        self.avoided = fleet.workers().iter().map(|other| other.slot).filter(|slot| *slot != to).collect();
    }

    /// Nobody that `gateway` does not send to gets an attempt to generate.
    pub(super) fn stay_within(&mut self, gateway: &Gateway, fleet: &FleetSnapshot) {
        self.is_bounded = gateway.has_subset();
        let generates = |worker: &&Arc<Worker>| worker.spec.role != Role::Prefill;
        self.tried.extend(gateway.beyond(fleet.workers().iter().filter(generates)));
    }

    /// What the client gets in the end: the last worker's own answer, if any worker gave one.
    pub(super) fn give_up(&mut self) -> Option<Result<Begun, RequestError>> {
        let all_unreachable = self.unreachable == self.failures;
        Some(match *self.last.take()? {
            Ok(mut answer) => {
                if answer.response.status() == StatusCode::TOO_MANY_REQUESTS {
                    let wait = self.least_retry_after.unwrap_or(Duration::from_secs(1));
                    let seconds = wait.as_millis().div_ceil(1_000).max(1);
                    let seconds = HeaderValue::from(u64::try_from(seconds).unwrap_or(u64::MAX));
                    answer.response.headers_mut().insert(header::RETRY_AFTER, seconds);
                }
                Ok(answer)
            }
            Err(RequestError::Worker { worker, source }) if all_unreachable => {
                Err(RequestError::Unreachable { attempts: self.failures, worker, source })
            }
            Err(error) => Err(error),
        })
    }

    fn note(&mut self, failed: Failed) {
        let Failed { worker, cause, in_flight, retry_after, told } = failed;
        self.tried.push(worker.slot);
        if cause.lost_connection() {
            self.lost.push((Arc::clone(&worker), worker.is_up().then(|| worker.downs())));
        }
        self.failures += 1;
        self.unreachable += usize::from(cause.is_unreachable());
        self.internal_errors += usize::from(cause == Cause::InternalError);
        self.deaths.extend((cause == Cause::Died).then_some(in_flight));
        self.least_retry_after = [self.least_retry_after, retry_after].into_iter().flatten().min();
        // What a worker says tells more than that another one could not be reached.
        let keeps_answer = told.is_err() && cause != Cause::TimeUp;
        if !(keeps_answer && matches!(self.last.as_deref(), Some(Ok(_)))) {
            self.last = Some(Box::new(told));
        }
    }

    /// Another worker while one is left, at another endpoint than a rank that failed; one that was down since and is up again is another. Then, if the last one processed nothing and said so at
    /// once, any: it may be about to listen again.
    fn find_somebody(
        &mut self,
        app: &App,
        reading: &Reading,
        (worker, cause): (&Worker, Cause),
    ) -> Option<()> {
        let roster = app.fleet.roster();
        let view = reading.view();
        let on = |leg| RequestView { leg, ..view };
        let can = |among: Among<'_>| {
            self.legs.iter().all(|leg| Decider::can_decide(&roster.snapshot, &on(*leg), among))
        };
        self.forget_processes_that_ended(&roster.snapshot);
        self.avoid(worker, cause, &roster.snapshot);
        if !self.avoided.is_empty() {
            if can(Among::Untried(&self.avoided)) {
                self.anyone = None;
                return Some(());
            }
            self.avoided.clear();
        }
        if can(Among::Untried(&self.tried)) {
            self.anyone = None;
            return Some(());
        }
        let may_be_anyone = cause == Cause::Unreachable && !self.is_bounded;
        self.anyone = (may_be_anyone && can(Among::Anyone)).then_some(AllTried);
        self.anyone.as_ref().map(|_| ())
    }

    /// What is at a worker's place now may be another process, or another worker.
    fn forget_processes_that_ended(&mut self, fleet: &FleetSnapshot) {
        let Self { tried, avoided, lost, left_out, .. } = self;
        lost.retain(|(worker, downs)| {
            let has_left = || !fleet.workers().iter().any(|other| Arc::ptr_eq(other, worker));
            let is_another = is_another(worker, *downs) || has_left();
            if is_another && !left_out.contains(&worker.slot) {
                tried.retain(|slot| *slot != worker.slot);
                avoided.retain(|slot| *slot != worker.slot);
            }
            !is_another
        });
    }

    /// The process behind a rank that fails has perhaps ended, or is about to: its other ranks would take an attempt each to say the same.
    fn avoid(&mut self, worker: &Worker, cause: Cause, fleet: &FleetSnapshot) {
        if cause.may_be_the_process() && worker.spec.dp_rank.is_some() {
            let others = fleet.others_at_endpoint(worker).map(|other| other.slot);
            if self.avoided.is_empty() {
                self.avoided.clone_from(&self.tried);
            }
            self.avoided.extend(others);
        }
        if !self.avoided.is_empty() {
            self.avoided.push(worker.slot);
        }
    }

    /// `draw` is from 0 to 1.
    fn back_off(&self, cause: Cause, draw: f64) -> Duration {
        if cause.is_unreachable() && self.anyone.is_none() {
            // Others have nothing to do with a connection that one of them refused.
            return Duration::ZERO;
        }
        let doublings = u32::try_from(self.failures - 1).unwrap_or(u32::MAX).min(10);
        (FIRST_BACK_OFF * 2u32.pow(doublings)).mul_f64(draw)
    }
}

/// Whether a worker is up that was down then, or has been since.
fn is_another(worker: &Worker, downs: Option<u32>) -> bool {
    worker.is_up() && Some(worker.downs()) != downs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn back_offs_are_drawn_from_a_span_that_doubles() {
        let mut retries = Retries::default();
        for most_ms in [20, 40, 80] {
            retries.failures += 1;
            assert_eq!(retries.back_off(Cause::Busy, 1.0), Duration::from_millis(most_ms));
            assert_eq!(retries.back_off(Cause::Busy, 0.0), Duration::ZERO);
            assert_eq!(retries.back_off(Cause::Unreachable, 1.0), Duration::ZERO);
        }
        retries.anyone = Some(AllTried);
        assert_eq!(retries.back_off(Cause::Unreachable, 0.5), Duration::from_millis(40));
    }

    #[test]
    fn causes() {
        for (status, cause) in [
            (200, None),
            (400, None),
            (404, None),
            (429, Some(Cause::Busy)),
            (500, Some(Cause::InternalError)),
            (501, None),
            (502, Some(Cause::Failing)),
            (503, Some(Cause::Failing)),
            (504, Some(Cause::Failing)),
        ] {
            assert_eq!(Cause::of_status(StatusCode::from_u16(status).unwrap()), cause, "{status}");
        }
        let limit = Duration::from_secs(1);
        for (error, cause) in [
            (TransportError::FirstByte { limit }, Cause::TimeUp),
            (TransportError::Total { limit }, Cause::TimeUp),
            (TransportError::ConnectTimeout { limit }, Cause::ConnectTimeout),
            (TransportError::NotSent { limit }, Cause::ConnectTimeout),
            (TransportError::Left, Cause::Unreachable),
            (TransportError::Idle { limit }, Cause::Reset),
            (TransportError::Unsent(Broken::Closed), Cause::Reset),
            (TransportError::Broken(Broken::Closed), Cause::Died),
            (TransportError::EngineFailed, Cause::Died),
            (TransportError::Stalled { silence: limit }, Cause::Died),
            (TransportError::Unfinished, Cause::Died),
            (TransportError::Broken(Broken::Malformed("is none")), Cause::Reset),
        ] {
            assert_eq!(Cause::of_error(&error), cause, "{error}");
        }
    }
}
