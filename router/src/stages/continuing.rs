//! A stream that breaks off is gone on with by another worker, where that is possible: what has gone to the client becomes part of the prompt, and
//! the client sees a pause.
//!
//! The text is in [`continuation`](crate::openai::continuation); here is what is kept of a request for it, and the way back to
//! [`dispatch`](super::dispatch). Used by [`relay`](super::relay).

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;

use bytes::Bytes;
use http::header::{self, HeaderValue};
use http::uri::PathAndQuery;
use router_core::{Lease, Worker, WorkerSlot};
use tokio::time::Instant;

use super::dispatch::{Begun, Times, attempts};
use super::exchange::is_event_stream;
use super::parse::Reading;
use super::record::Recorder;
use super::retries::{Cause, Failed, Retries};
use crate::app::App;
use crate::body_memory::BodyShare;
use crate::config::Switch;
use crate::error::RequestError;
use crate::openai::continuation::given::Given;
use crate::openai::continuation::request::{asks_for_one, rest_of};
use crate::openai::continuation::seam::Seam;
use crate::openai::continuation::{Kind, ends};
use crate::openai::members::Members;
use crate::routes::Endpoint;
use crate::transport::{TransportError, WorkerRequest};

/// Who says of their models that they are theirs, takes `continue_final_message`.
const GO_ON_WITH_MESSAGES: [&str; 4] = ["vllm", "sglang", "roundhouse", "roundhouse-simulated"];

/// What is kept of a request whose answer is a stream, until that has ended.
pub struct Continuing {
    app: Arc<App>,
    request: WorkerRequest,
    retries: Retries,
    times: Times,
    given: Given,
    /// Of an answer that another worker has gone on with.
    seam: Option<Seam>,
    /// The memory of the request's body.
    _share: BodyShare,
}

/// A stream that broke off.
pub(super) struct Broke {
    /// What the request occupied at its worker.
    pub lease: Option<Lease>,
    /// What happened.
    pub error: TransportError,
}

/// What a request has been through, and what was read of it.
pub(super) struct Record {
    /// What becomes of it.
    pub recorder: Recorder,
    /// What was read.
    pub reading: Reading,
}

/// What came of going on.
pub(super) struct Outcome {
    /// As it was given.
    pub record: Record,
    /// The answer that goes on, and what knows how it follows on, unless all of it was there; or why there is none.
    pub result: Result<Option<(Begun, Box<Continuing>)>, TransportError>,
}

impl Continuing {
    /// Keeps `request`, if the stream that answers it might be gone on with.
    pub(super) fn of(
        app: &Arc<App>,
        (request, share): (WorkerRequest, BodyShare),
        (begun, endpoint): (&Begun, Endpoint),
        retries: Retries,
        times: Times,
    ) -> Option<Box<Self>> {
        let kind = match endpoint {
            Endpoint::Chat => Kind::Chat,
            Endpoint::Completions => Kind::Completions,
            _ => return None,
        };
        // Who sends in the router's place relays as well; and a body that is compressed cannot be added to.
        let is_plain = request.gateway.is_none() && !request.headers.contains_key(header::CONTENT_ENCODING);
        let is_kept =
            app.settings.continue_streams == Switch::On && is_plain && share.may_stay() && goes_on(begun);
        is_kept.then(|| {
            let request = compact(request);
            let (app, given, retries) = (Arc::clone(app), Given::new(kind), retries.of_one_that_has_begun());
            Box::new(Self { app, request, retries, times, given, seam: None, _share: share })
        })
    }

    /// Whole events on their way, as they are to go to the client; and apart, if the engine says that it has failed, what it says.
    pub(super) fn pass(&mut self, events: Bytes) -> (Bytes, Option<Bytes>) {
        let mut events = match &self.seam {
            Some(seam) => seam.pass(&events),
            None => events,
        };
        let answer = self.given.hear(&events);
        let failure = (answer < events.len()).then(|| events.split_off(answer));
        (events, failure)
    }

    /// Whether the events that pass are changed.
    pub(super) fn changes(&self) -> bool {
        self.seam.is_some()
    }

    /// Whether another worker can be asked for the rest, or nothing may be left, as far as the answer goes; after `error`.
    pub(super) fn can_go_on(&self, error: &TransportError) -> bool {
        let may = !matches!(error, TransportError::Total { .. } | TransportError::ShuttingDown);
        may && (self.given.can_go_on() || self.given.is_whole())
    }

    /// Whether the stream says of itself that there is more to come, with its last line, if that is left.
    pub(super) fn is_unfinished(&self, last: &[u8]) -> bool {
        self.given.can_go_on() && !ends(last, self.given.kind())
    }

    /// Finds another worker that goes on.
    pub(super) async fn go_on(mut self: Box<Self>, broke: Broke, mut record: Record) -> Outcome {
        let app = Arc::clone(&self.app);
        let result = {
            let mut asking = pin!(self.ask_for_the_rest(broke, &mut record));
            poll_fn(|cx| match app.cuts_off() {
                true => Poll::Ready(Err(TransportError::ShuttingDown)),
                false => asking.as_mut().poll(cx),
            })
            .await
        };
        Outcome { record, result: result.map(|begun| begun.map(|begun| (begun, self))) }
    }

    /// `None` if there is no rest: only the word for that was missing.
    async fn ask_for_the_rest(
        &mut self,
        broke: Broke,
        record: &mut Record,
    ) -> Result<Option<Begun>, TransportError> {
        let Self { app, request, retries, times, given, seam, .. } = self;
        let Record { recorder, reading } = record;
        let Broke { lease, error } = broke;
        let Some(worker) = recorder.worker().map(Arc::clone) else { return Err(error) };
        let Some(members) = Members::of(&request.body).await else { return Err(error) };
        if given.is_whole() && asks_for_one(&members) {
            recorder.broke(&error);
            return Ok(None);
        }
        let Some(body) = rest_of(given, &members) else { return Err(error) };
        let follows = Seam::after(given);
        if given.kind() == Kind::Chat && !given.text().is_empty() {
            retries.leave_out(who_cannot_go_on_with_messages(app));
        }
        recorder.broke(&error);
        let cause = Cause::of_error(&error);
        // While the lease still counts this request among those that are there.
        let in_flight =
            if cause.lost_connection() { worker.rescue.note(app.now(), worker.load.own()) } else { 0 };
        drop(lease);
        let told = Err(RequestError::Worker { worker: worker.id().clone(), source: error });
        let failed = Failed { worker, cause, in_flight, retry_after: None, told };
        // What has been given is prompt now: so it is weighed, and so speeds are learned from it.
        let given_tokens = given.pieces();
        reading.prompt_tokens += given_tokens;
        let asked = reading.precedence;
        reading.precedence = asked.of_one_that_has_begun();
        let mut rest = WorkerRequest { body, ..request.clone() };
        let begun = match retries.after(app, reading, failed, times.1) {
            None => retries.give_up().expect("it has just been given a failure"),
            Some(wait) => {
                tokio::time::sleep_until(Instant::now() + wait).await;
                // It does not wait in line: who has begun to read goes first.
                attempts(app, (&mut rest, reading), (retries, None), *times, recorder).await
            }
        };
        (reading.prompt_tokens, reading.precedence) = (reading.prompt_tokens - given_tokens, asked);
        match begun {
            Ok(begun) if goes_on(&begun) => {
                recorder.went_on();
                *seam = Some(follows);
                Ok(Some(begun))
            }
            Ok(begun) => {
                recorder.declined();
                Err(TransportError::NotGoneOn { status: begun.response.status() })
            }
            Err(RequestError::Worker { source, .. } | RequestError::Unreachable { source, .. }) => {
                Err(source)
            }
            Err(other) => Err(TransportError::NobodyGoesOn { why: other.to_string() }),
        }
    }
}

/// The same in memory of its own: what came with a request's head keeps the buffer of its connection, which is many times as large.
fn compact(mut request: WorkerRequest) -> WorkerRequest {
    for value in request.headers.values_mut() {
        if let Ok(own) = HeaderValue::from_bytes(value.as_bytes()) {
            *value = own;
        }
    }
    let path = PathAndQuery::try_from(request.path.as_str()).unwrap_or(request.path);
    WorkerRequest { path, body: request.body.compact(), ..request }
}

/// Whether an answer is a stream as far as its head goes.
fn goes_on(begun: &Begun) -> bool {
    begun.response.status().is_success() && is_event_stream(begun.response.headers())
}

/// Who would take the beginning of an answer for a turn that has ended.
fn who_cannot_go_on_with_messages(app: &App) -> Vec<WorkerSlot> {
    let roster = app.fleet.roster();
    let can = |worker: &Arc<Worker>| {
        let entries =
            roster.upstream(worker).and_then(|upstream| upstream.model_entries.read().ok()?.clone().into());
        entries.is_some_and(|entries| {
            let mut owners = entries.iter().filter_map(|entry| entry.get("owned_by")?.as_str());
            owners.any(|owner| GO_ON_WITH_MESSAGES.contains(&owner))
        })
    };
    roster.snapshot.workers().iter().filter(|worker| !can(worker)).map(|worker| worker.slot).collect()
}
