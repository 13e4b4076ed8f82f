//! Stage 5: run the route. One attempt after another, each on another worker while one is left, until an answer has
//! begun. `retries.rs` says whether there is another one.
//!
//! When a reply counts as begun is in [`exchange`](super::exchange).
//!
//! Next: [`relay`](super::relay).

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::header::HeaderName;
use http::request::Parts;
use http::uri::PathAndQuery;
use http::{Response, StatusCode};
use router_core::{Among, Decided, Decider, Lease, Leg, RequestView, Role, Worker, WorkerSlot};
use smallvec::SmallVec;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

use super::background::pick_when_spare;
use super::continuing::Continuing;
use super::exchange::{Answer, exchange, is_before_answer, is_stream};
use super::legs::{Splitter, without_foreign_kv};
use super::parse::{Extent, Parsed, Reading};
use super::pick::{Picked, new_workers_are_known, pick, take_turn};
use super::record::Recorder;
use super::retries::{Cause, Failed, Retries};
use crate::app::App;
use crate::error::RequestError;
use crate::payload::Payload;
use crate::retry_after::retry_after;
use crate::routes::Endpoint;
use crate::stall::can_stand_in;
use crate::time_limits::TimeLimits;
use crate::transport::{Gateway, TransportError, UpstreamBody, WorkerRequest};

/// Header that names a request on its whole way.
pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// How long a worker is left alone that answered 429 without saying how long: a few decode steps.
const BUSY_COOLING: Duration = Duration::from_millis(500);

/// An answer that has begun.
pub struct Dispatched {
    /// The answer.
    pub begun: Begun,
    /// How long it may take.
    pub limits: TimeLimits,
    /// When the request as a whole runs out of time.
    pub deadline: Instant,
    /// What was read of the request.
    pub reading: Reading,
    /// What is kept of it, in case that the answer breaks off.
    pub continuing: Option<Box<Continuing>>,
    /// Its place among the requests in flight.
    pub permit: OwnedSemaphorePermit,
}

/// One worker's answer, with its first piece.
pub struct Begun {
    /// Who answers.
    pub worker: Arc<Worker>,
    /// What the request occupies there; nothing any more if the answer was a failure.
    pub lease: Option<Lease>,
    /// Who computed the prompt for it, if it was another.
    pub prefill_worker: Option<Arc<Worker>>,
    /// Prompt tokens that were expected in the cache of whoever computed it.
    pub hit_tokens: usize,
    /// Head, and the rest of the body.
    pub response: Response<UpstreamBody>,
    /// The first piece of the body; `None` if it is empty.
    pub first: Option<Bytes>,
}

/// Why an attempt gave no answer for the client.
pub(super) enum Stopped {
    /// There was nobody to ask.
    Nobody(RequestError),
    /// Whoever was asked failed.
    Failed(Box<Failed>),
}

impl From<Box<Failed>> for Stopped {
    fn from(failed: Box<Failed>) -> Self {
        Self::Failed(failed)
    }
}

impl From<RequestError> for Stopped {
    fn from(error: RequestError) -> Self {
        Self::Nobody(error)
    }
}

/// How long a request may take, and until when.
pub(super) type Times = (TimeLimits, Instant);

/// Finds a worker that answers, or two that do so together.
///
/// # Errors
/// When none could be picked, or every attempt failed.
pub async fn dispatch(
    app: &Arc<App>,
    parsed: Parsed,
    recorder: &mut Recorder,
) -> Result<Dispatched, RequestError> {
    let Parsed { head, body, reading, share, permit } = parsed;
    let limits = app.time_limits.of(reading.model.as_deref());
    let mut request = outgoing(head, body);
    let deadline = Instant::now() + limits.total;
    let now = app.now();
    // What computes no prompt does not wait for one, and of what could not be read nobody knows how long it is.
    let may_wait = recorder.is_generation() && reading.extent == Extent::Whole;
    let may_wait_since = (app.settings.late_binding && may_wait).then_some(now);
    if app.decider.waits_for_spare(&reading.view()) {
        app.backlogs.check(&share)?;
        recorder.is_in_background();
    }
    tell_priority(app, &mut request, &reading, recorder).await;
    app.retry_budget.count_request(now);
    let mut retries = Retries::default();
    let (asked, how) = ((&mut request, &reading), (&mut retries, may_wait_since));
    let begun = attempts(app, asked, how, (limits, deadline), recorder).await?;
    let answered = (&begun, recorder.endpoint());
    let continuing = Continuing::of(app, (request, share), answered, retries, (limits, deadline));
    Ok(Dispatched { begun, limits, deadline, reading, continuing, permit })
}

/// Engines that order what they have been sent are told how important a request is, if they are to be told.
async fn tell_priority(app: &App, request: &mut WorkerRequest, reading: &Reading, recorder: &Recorder) {
    // What a gateway sends is not changed here, nor what is no JSON as it stands. Anthropic's API has no such member.
    if recorder.is_generation()
        && recorder.endpoint() != Endpoint::Messages
        && request.gateway.is_none()
        && let Some(body) =
            app.settings.engine_priority.body(&request.body, reading.precedence.priority).await
    {
        request.body = body;
    }
}

/// One attempt after another, until a reply has begun.
pub(super) async fn attempts(
    app: &Arc<App>,
    (request, reading): (&mut WorkerRequest, &Reading),
    (retries, may_wait_since): (&mut Retries, Option<Duration>),
    (limits, deadline): Times,
    recorder: &mut Recorder,
) -> Result<Begun, RequestError> {
    let mut now = app.now();
    let mut view = RequestView { may_wait_since, ..reading.view() };
    let members = without_foreign_kv(app, request).await;
    let splitter = Splitter::of(app, request, members)?;
    retries.need(splitter.as_ref().map_or(&[Leg::Whole], Splitter::needs));
    if let Some(gateway) = &request.gateway {
        retries.stay_within(gateway, &app.fleet.roster().snapshot);
    }
    let mut prefill_fails = false;
    // Who has, by a gateway that went on from whoever was picked.
    let mut served = None;
    loop {
        request.underway = limits.first_byte.map(|_| Arc::default());
        // Of a gateway's nobody else can be asked once it has gone out.
        request.leaves = if request.gateway.is_none() { retries.leaves(app) } else { None };
        let (asked, among) = ((&*request, reading), retries.among());
        let splits = |splitter: &&Splitter| {
            served.is_none() && splitter.splits(app, &view, (among, prefill_fails), now)
        };
        let split_by = splitter.as_ref().filter(splits);
        let attempted = match split_by {
            Some(splitter) => {
                Box::pin(splitter.attempt(app, (asked, &view), among, (limits, deadline), recorder)).await
            }
            None => whole(app, (asked, &view), (among, now), (limits, deadline), recorder).await,
        };
        let failed = match attempted {
            Ok(begun) => return Ok(begun),
            // Who was there to compute the prompt has left, or went down while the request waited for one of them; or those who generate from it have.
            Err(Stopped::Nobody(RequestError::Pick(_)))
                if !prefill_fails && split_by.is_some_and(Splitter::can_do_without) =>
            {
                (prefill_fails, now) = (true, app.now());
                continue;
            }
            Err(Stopped::Nobody(error)) => {
                if let Some(begun) =
                    request.gateway.as_ref().and_then(|gateway| passed(gateway, served.take()))
                {
                    return Ok(begun);
                }
                let nobody = (retries.among(), &error);
                // Boxed, since it is rare, and a request's future should be small.
                if Box::pin(new_workers_are_known(app, &view, nobody, deadline)).await {
                    now = app.now();
                    continue;
                }
                // Nobody is left: what the last one said is the answer, if one was asked at all.
                return retries.give_up().unwrap_or(Err(error));
            }
            Err(Stopped::Failed(failed)) => *failed,
        };
        prefill_fails |= failed.worker.spec.role == Role::Prefill;
        if let Some(gateway) = request.gateway.as_ref().filter(|gateway| gateway.has_gone()) {
            served = gateway.go_on();
            let Some(worker) = &served else { return retries.give_up_after(failed) };
            retries.went_on(failed, worker.slot, &app.fleet.roster().snapshot);
            // What is under way waits for nobody's turn.
            (view.may_wait_since, now) = (None, app.now());
            view.precedence = view.precedence.of_one_that_has_begun();
            continue;
        }
        match retries.after(app, reading, failed, deadline) {
            Some(Duration::ZERO) => {}
            Some(wait) => tokio::time::sleep(wait).await,
            None => return retries.give_up().expect("it has just been given a failure"),
        }
        now = app.now();
    }
}

/// An attempt at one worker that does all of it.
async fn whole(
    app: &App,
    (asked, view): ((&WorkerRequest, &Reading), &RequestView<'_>),
    (among, now): (Among<'_>, Duration),
    times: Times,
    recorder: &mut Recorder,
) -> Result<Begun, Stopped> {
    let picked = pick_in_turn(app, view, (among, now), times, recorder).await?;
    Ok(attempt(app, asked, (picked, view.leg), times, recorder).await?)
}

/// Picks a worker, and waits until the request's turn has come there.
pub(super) async fn pick_in_turn(
    app: &App,
    view: &RequestView<'_>,
    (among, now): (Among<'_>, Duration),
    times: Times,
    recorder: &mut Recorder,
) -> Result<Picked, RequestError> {
    recorder.picks(view, among);
    let picked = picked_in_turn(app, view, (among, now), times, recorder).await;
    recorder.picked(picked.as_ref());
    picked
}

async fn picked_in_turn(
    app: &App,
    view: &RequestView<'_>,
    (among, now): (Among<'_>, Duration),
    (limits, deadline): Times,
    recorder: &mut Recorder,
) -> Result<Picked, RequestError> {
    if app.decider.waits_for_spare(view) {
        // Boxed, since it is rare, and a request's future should be small.
        return Box::pin(pick_when_spare(app, view, among, (deadline, limits.total))).await;
    }
    let picked = pick(app, view, among, now)?;
    recorder.waits_for(&picked);
    take_turn(app, view, picked, among, (deadline, limits.total)).await
}

/// One attempt: send, and wait for the head and the first piece of the answer. What became of it is told to the worker's
/// health, the tree and the recorder.
pub(super) async fn attempt(
    app: &App,
    (request, reading): (&WorkerRequest, &Reading),
    (picked, leg): (Picked, Leg),
    (limits, deadline): Times,
    recorder: &mut Recorder,
) -> Result<Begun, Box<Failed>> {
    let Picked { decided, upstream } = picked;
    recorder.attempt(&decided, leg);
    let follower = upstream.as_ref().and_then(|upstream| upstream.follower.as_ref());
    let told = recorder.follow(follower, (request, reading), (&decided, leg)).await;
    let request = told.as_ref().unwrap_or(request);
    if let Some(gateway) = request.gateway.as_ref().filter(|_| leg == Leg::Whole) {
        let offering = offer_others(app, gateway, (request, reading), &decided.worker);
        // Without them the request goes all the same.
        let _ = tokio::time::timeout(app.settings.connect_timeout, offering).await;
    }
    let may_leave =
        |worker: &Worker| may_leave(app, request.leaves.as_ref(), reading.model.as_deref(), worker);
    match exchange(upstream.as_deref(), (request, &may_leave), (limits, deadline)).await {
        Ok(answer) => answered(app, reading, (decided, leg), answer, recorder),
        Err(error) => Err(Box::new(lost(app, reading, decided, error, recorder))),
    }
}

/// Whether a request may leave `worker`, which stands still, for another: one that is not among `tried` can have it.
pub(super) fn may_leave(
    app: &App,
    tried: Option<&SmallVec<[WorkerSlot; 4]>>,
    model: Option<&str>,
    worker: &Worker,
) -> bool {
    let Some(tried) = tried else { return false };
    let roster = app.fleet.roster();
    roster.snapshot.workers().iter().any(|other| {
        can_stand_in(other, worker, app.settings.prefill_protocol)
            && !tried.contains(&other.slot)
            && other.may_serve(model)
    })
}

/// The answer of a worker that a gateway went on to, and that cannot be picked: it may have been told to drain meanwhile.
fn passed(gateway: &Gateway, served: Option<Arc<Worker>>) -> Option<Begun> {
    let (worker, response) = served.zip(gateway.take_answer())?;
    Some(Begun { worker, lease: None, prefill_worker: None, hit_tokens: 0, response, first: None })
}

/// Tells a gateway who else might serve the request, if it is to be told of any.
async fn offer_others(
    app: &App,
    gateway: &Gateway,
    (request, reading): (&WorkerRequest, &Reading),
    picked: &Worker,
) {
    let most = app.settings.gateway_fallbacks;
    if most == 0 || gateway.has_gone() {
        return;
    }
    let roster = app.fleet.roster();
    let mut others = Vec::with_capacity(most);
    let beyond = gateway.beyond(roster.snapshot.workers().iter());
    let rank = |worker: &Worker| worker.spec.dp_rank.map(|rank| rank.number);
    // Who gets the same: another rank would be told by another header.
    let reaches = |worker: &Arc<Worker>| {
        worker.slot != picked.slot && rank(worker) == rank(picked) && !beyond.contains(&worker.slot)
    };
    for worker in Decider::least_busy(&roster.snapshot, &reading.view(), reaches, (most, app.now())) {
        if let Some(upstream) = roster.upstream(&worker)
            && let Ok(handover) = upstream.transport.hand_over(request).await
        {
            others.push((worker.slot, handover));
        }
    }
    gateway.offer(others);
}

/// A worker answered. Whether that is an answer for the client is another question.
pub(super) fn answered(
    app: &App,
    reading: &Reading,
    (decided, leg): (Decided, Leg),
    answer: Answer,
    recorder: &mut Recorder,
) -> Result<Begun, Box<Failed>> {
    let Decided { worker, mut lease, mut trial, hit_tokens, basis } = decided;
    let is_stream = is_stream(answer.0.headers());
    // At a gateway a stream may be no further than its opening.
    let shows_first_token = is_stream && !is_before_answer(&answer) || leg == Leg::Prefill;
    let (response, first) = answer;
    let status = response.status();
    match status.is_success() {
        true if shows_first_token && leg != Leg::Decode => {
            let now = app.now();
            app.metrics.first_token_late(app.decider.late_s(&lease, now));
            app.decider.first_token(&mut lease, now);
        }
        true if recorder.computes_at_once() && !is_stream && leg != Leg::Decode => {
            app.decider.whole_answer(&mut lease, app.now());
        }
        // An error comes without a token, what is relayed need not compute any, and what another worker computed is there at once: none of
        // them tells how long a prompt takes.
        _ => lease.first_token(),
    }
    recorder.attempt_answered(&worker, status);
    if !status.is_success() {
        app.decider.take_back(&mut lease, &worker, &reading.blocks, basis);
    }
    let begun = |response, lease| Begun {
        worker: Arc::clone(&worker),
        prefill_worker: None,
        lease,
        hit_tokens,
        response,
        first,
    };
    let Some(cause) = Cause::of_status(status) else {
        trial.first_byte();
        recorder.watch(trial);
        return Ok(begun(response, Some(lease)));
    };
    let now = app.now();
    let retry_after = retry_after(response.headers(), SystemTime::now());
    if cause == Cause::Busy {
        // That it has enough to do is no failure.
        worker.health.cool(now, retry_after.unwrap_or(BUSY_COOLING));
    } else {
        app.report_failure(worker.id(), trial);
        if let (StatusCode::SERVICE_UNAVAILABLE, Some(how_long)) = (status, retry_after) {
            worker.health.cool(now, how_long);
        }
    }
    // The answer is kept, in case that it is the last; the worker has done with the request.
    drop(lease);
    let told = Ok(begun(response, None));
    Err(Box::new(Failed { worker, cause, in_flight: 0, retry_after, told }))
}

/// No answer came.
pub(super) fn lost(
    app: &App,
    reading: &Reading,
    decided: Decided,
    source: TransportError,
    recorder: &mut Recorder,
) -> Failed {
    let Decided { worker, mut lease, trial, basis, .. } = decided;
    let (cause, now) = (Cause::of_error(&source), app.now());
    app.decider.take_back(&mut lease, &worker, &reading.blocks, basis);
    recorder.attempt_failed(&worker, &source);
    let own = source.is_routers_own();
    let is_down = !own && cause.lost_connection();
    // While the lease still counts this request among those that are there.
    let in_flight = if is_down { worker.rescue.note(now, worker.load.own()) } else { 0 };
    drop(lease);
    let says_nothing = match source {
        // Of a worker that answers others, such a request asks too much; one that says nothing to anybody hangs.
        TransportError::Total { .. } => worker.is_heard(),
        // That a worker left, or that its name could not be looked up, is no sign of a sick one.
        TransportError::Left | TransportError::Resolve { .. } | TransportError::Refused(_) => true,
        _ => false,
    };
    if !own && !says_nothing {
        app.report_failure(worker.id(), trial);
    }
    if !own && source.is_unreachable() {
        app.fleet.report_unreachable(&worker, &source, &app.decider);
    }
    let told = Err(RequestError::Worker { worker: worker.id().clone(), source });
    Failed { worker, cause, in_flight, retry_after: None, told }
}

/// The client's request as workers get it: same method, path, headers and bytes. What belongs to the connection is left
/// out by the transports.
fn outgoing(head: Parts, body: Payload) -> WorkerRequest {
    let Parts { method, uri, headers, mut extensions, .. } = head;
    let path = uri.into_parts().path_and_query.unwrap_or_else(|| PathAndQuery::from_static("/"));
    WorkerRequest { method, path, headers, body, underway: None, leaves: None, gateway: extensions.remove() }
}
