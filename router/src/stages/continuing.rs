//! A stream that breaks off is gone on with by another worker, where that is possible: what has gone to the client becomes part of the prompt, and
//! the client sees a pause.
//!
//! The text is in [`continuation`](crate::openai::continuation); here is what is kept of a request for it, and the way back to
//! [`dispatch`](super::dispatch), for some by way of [tokens](super::in_tokens). Used by [`relay`](super::relay).

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use http::header::{self, HeaderValue};
use http::uri::PathAndQuery;
use router_core::{Lease, Worker, WorkerSlot};
use tokio::time::{Instant, timeout};

use super::dispatch::{Begun, Times, attempts, may_leave};
use super::exchange::is_event_stream;
use super::in_tokens;
use super::parse::Reading;
use super::record::Recorder;
use super::relay::watch;
use super::retries::{Cause, Failed, Retries};
use crate::app::App;
use crate::body_memory::BodyShare;
use crate::config::Switch;
use crate::error::RequestError;
use crate::openai::bounds;
use crate::openai::continuation::given::Given;
use crate::openai::continuation::messages::answer::{self, Answer};
use crate::openai::continuation::request::{Rest, asks_for_one, rest_of};
use crate::openai::continuation::responses::rest as responses;
use crate::openai::continuation::seam::{Passed, Seam};
use crate::openai::continuation::tokens::{Next, Teller};
use crate::openai::continuation::{Kind, ends};
use crate::openai::members::Members;
use crate::routes::Endpoint;
use crate::stall::Watch;
use crate::templates::Messages;
use crate::transport::{TransportError, WorkerRequest};

/// The last event of a stream of chat's or completions'.
const DONE_EVENT: &[u8] = b"data: [DONE]\n\n";
const CHAT: PathAndQuery = PathAndQuery::from_static("/v1/chat/completions");

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
    follows: Option<Follows>,
    /// Of one that its client reads in Anthropic's words, and that a chat goes on with.
    as_messages: Option<Answer>,
    /// The memory of the request's body.
    _share: BodyShare,
}

/// How what another worker says is made to follow on what was given.
enum Follows {
    Answer(Box<Seam>),
    Response(Box<responses::Rest>),
}

/// What is gone on with.
struct Whole {
    /// Of the request.
    members: Members,
    /// All of its answer has come.
    has_come: bool,
    /// Who cannot be asked for more of it.
    others: Vec<WorkerSlot>,
}

/// Why nothing more of an answer is expected of a worker, though it is not whole.
pub(super) enum Stop {
    /// It broke off.
    Broke(TransportError),
    /// The engine says that it has failed, in these events.
    Failed(Bytes),
    /// What was asked for was a thought's end, and that has come.
    ThoughtIsOver,
}

/// A stream that has stopped.
pub(super) struct Stopped {
    /// What the request occupied at its worker.
    pub lease: Option<Lease>,
    /// What happened; nothing if there is merely something else to be asked for.
    pub error: Option<TransportError>,
}

/// How an answer goes on.
pub(super) enum GoesOn {
    /// By another worker, and with what knows how that follows on.
    By(Box<Begun>, Box<Continuing>),
    /// By the one that stands still, if that ever does: what follows can be asked of nobody else. With what the request occupies there.
    Here(Option<Box<Lease>>, Box<Continuing>),
    /// Not at all: all of it was there, but for these last words.
    NotAtAll(Bytes),
}

/// What a request has been through, and what was read of it.
pub(super) struct Record {
    /// What becomes of it.
    pub recorder: Recorder,
    /// What was read.
    pub reading: Reading,
}

impl Record {
    /// Who answers.
    fn slot(&self) -> Option<WorkerSlot> {
        self.recorder.worker().map(|worker| worker.slot)
    }
}

/// What came of going on.
pub(super) struct Outcome {
    /// As it was given.
    pub record: Record,
    /// How the answer goes on, or why it does not.
    pub result: Result<GoesOn, TransportError>,
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
            Endpoint::Messages => Kind::Messages,
            Endpoint::Responses => Kind::Responses,
            _ => return None,
        };
        // Who sends in the router's place relays as well; and a body that is compressed cannot be added to.
        let is_plain = request.gateway.is_none() && !request.headers.contains_key(header::CONTENT_ENCODING);
        let is_kept =
            app.settings.continue_streams == Switch::On && is_plain && share.may_stay() && goes_on(begun);
        is_kept.then(|| {
            let request = compact(request);
            let (app, given, retries) = (Arc::clone(app), Given::new(kind), retries.of_one_that_has_begun());
            let (follows, as_messages) = (None, None);
            Box::new(Self { app, request, retries, times, given, follows, as_messages, _share: share })
        })
    }

    /// A watch over `worker`, who answers; `None` if it has left.
    pub(super) fn watch(&self, worker: &Arc<Worker>) -> Option<Watch> {
        watch(&self.app, worker)
    }

    /// Whole events on their way, as they are to go to the client; and why no more follow, if they say so.
    pub(super) fn pass(&mut self, events: Bytes) -> (Bytes, Option<Stop>) {
        let passed = |events| Passed { events, thought_is_over: false };
        let Passed { mut events, thought_is_over } = match &mut self.follows {
            Some(Follows::Answer(seam)) => seam.pass(&events),
            Some(Follows::Response(rest)) => passed(rest.pass(&events)),
            None => passed(events),
        };
        let answer = self.given.hear(&events);
        let says = events.split_off(answer);
        let stop = match thought_is_over {
            _ if !says.is_empty() && self.as_messages.is_some() => Some(Stop::Failed(answer::failure(&says))),
            _ if !says.is_empty() => Some(Stop::Failed(says)),
            true => {
                self.given.end_thought();
                Some(Stop::ThoughtIsOver)
            }
            false => None,
        };
        (self.in_their_words(events), stop)
    }

    /// Events as the client reads them.
    fn in_their_words(&mut self, events: Bytes) -> Bytes {
        match &mut self.as_messages {
            Some(answer) => answer.write(&events),
            None => events,
        }
    }

    /// Whether the events that pass are changed.
    pub(super) fn changes(&self) -> bool {
        self.follows.is_some()
    }

    /// Whether another worker can be asked for the rest, or nothing may be left, as far as the answer goes; after `error`.
    pub(super) fn can_go_on(&self, error: &TransportError) -> bool {
        let may = match error {
            TransportError::Total { .. } | TransportError::ShuttingDown => false,
            TransportError::Stalled { .. } => self.retries.leaves(&self.app).is_some(),
            _ => true,
        };
        may && (self.given.can_go_on() || self.given.is_whole())
    }

    /// Whether the stream says of itself that there is more to come, with its last line, if that is left.
    pub(super) fn is_unfinished(&self, last: &[u8]) -> bool {
        match self.given.kind() {
            // Behind the last text come words that nobody else says.
            Kind::Messages | Kind::Responses => !bounds::is_last(last),
            _ if self.as_messages.as_ref().is_some_and(|answer| !answer.is_over()) => true,
            kind => self.given.can_go_on() && !ends(last, kind),
        }
    }

    /// Whether the stream that the client reads has an end of its own, which is still to be written.
    pub(super) fn has_an_end(&self) -> bool {
        self.as_messages.as_ref().is_some_and(|answer| !answer.is_over())
    }

    /// Finds another worker that goes on.
    pub(super) async fn go_on(mut self: Box<Self>, stopped: Stopped, mut record: Record) -> Outcome {
        let as_sent = (self.given.kind() == Kind::Messages).then(|| self.request.clone());
        if matches!(stopped.error, Some(TransportError::Stalled { .. })) && !self.can_leave(&record).await {
            if let Some(as_sent) = as_sent {
                (self.request, self.as_messages) = (as_sent, None);
                self.given.goes_on_as(Kind::Messages);
            }
            return Outcome { record, result: Ok(GoesOn::Here(stopped.lease.map(Box::new), self)) };
        }
        let app = Arc::clone(&self.app);
        let result = {
            let mut asking = pin!(self.ask_for_the_rest(stopped, &mut record));
            poll_fn(|cx| match app.cuts_off() {
                true => Poll::Ready(Err(TransportError::ShuttingDown)),
                false => asking.as_mut().poll(cx),
            })
            .await
        };
        let goes_on = |begun| match begun {
            Some(begun) => GoesOn::By(Box::new(begun), self),
            None => GoesOn::NotAtAll(self.last_words()),
        };
        Outcome { record, result: result.map(goes_on) }
    }

    /// What ends the answer.
    fn last_words(mut self: Box<Self>) -> Bytes {
        match &mut self.as_messages {
            Some(answer) => answer.rest(self.given.pieces()),
            None if self.given.kind() == Kind::Messages => answer::last_word(),
            None => Bytes::from_static(DONE_EVENT),
        }
    }

    /// Makes a chat of a request in Anthropic's words, if an engine says that it is that chat.
    async fn ask_as_chat(&mut self, members: &Members, record: &Record) -> Option<Members> {
        let Self { app, request, retries, given, times, .. } = &*self;
        let asked = (request, members, given);
        let among = (&record.reading, retries.among(), record.slot());
        let told = in_tokens::as_chat(app, asked, among, times.1).await?;
        self.as_messages = Some(Answer::after(&self.given, told.teller, told.stop_sequences));
        self.given.goes_on_as(Kind::Chat);
        (self.request.path, self.request.body) = (CHAT, told.body);
        Members::of(&self.request.body).await
    }

    /// What is gone on with; `None` if it cannot be.
    async fn whole(&mut self, record: &Record) -> Option<Whole> {
        let mut members = Members::of(&self.request.body).await?;
        if self.given.is_whole() && asks_for_one(&members) {
            return Some(Whole { members, has_come: true, others: Vec::new() });
        }
        if self.given.kind() == Kind::Messages {
            members = self.ask_as_chat(&members, record).await?;
        }
        let others = match &self.as_messages {
            // Others make another chat of it.
            Some(answer) => self.who_is_not_of(&[answer.teller().owner()]),
            None if self.given.kind() == Kind::Responses => self.who_cannot_respond(&members, record).await?,
            None => Vec::new(),
        };
        Some(Whole { members, has_come: false, others })
    }

    /// Whether what follows can be asked of another worker, and there is one that can have it.
    async fn can_leave(&mut self, record: &Record) -> bool {
        let Some(Whole { members, has_come, others }) = self.whole(record).await else { return false };
        if has_come {
            return true;
        }
        let Some(mut rest) = rest_of(&self.given, &members) else { return false };
        if self.is_asked_in_messages(&rest) && !self.messages_go_on(&members, &record.reading).await {
            if Next::after(&self.given, &members).is_none() {
                return false;
            }
            rest = Rest::Tokens;
        }
        let (Some(mut tried), Some(worker)) = (self.retries.leaves(&self.app), record.recorder.worker())
        else {
            return false;
        };
        tried.extend(self.who_cannot(&rest).into_iter().chain(others));
        may_leave(&self.app, Some(&tried), record.reading.model.as_deref(), worker)
    }

    /// `None` if there is no rest: only the word for that was missing.
    async fn ask_for_the_rest(
        &mut self,
        Stopped { lease, error }: Stopped,
        record: &mut Record,
    ) -> Result<Option<Begun>, TransportError> {
        let whole = self.whole(record).await;
        let rest = whole.as_ref().and_then(|whole| rest_of(&self.given, &whole.members));
        let has_come = whole.as_ref().is_some_and(|whole| whole.has_come);
        if has_come || rest.is_none() {
            error.iter().for_each(|error| record.recorder.broke(error));
        }
        if has_come {
            return Ok(None);
        }
        let (Some(Whole { members, others, .. }), Some(mut rest)) = (whole, rest) else {
            return Err(cannot(error));
        };
        self.retries.leave_out(self.who_cannot(&rest).into_iter().chain(others).collect());
        let has_broken = error.is_some();
        let wait = match error {
            Some(error) => self.after(error, lease, record)?,
            None => {
                record.recorder.did_its_part();
                drop(lease);
                Duration::ZERO
            }
        };
        tokio::time::sleep_until(Instant::now() + wait).await;
        if self.is_asked_in_messages(&rest) && !self.messages_go_on(&members, &record.reading).await {
            // Their tokens can be put together all the same.
            Next::after(&self.given, &members).ok_or_else(template_ends_it)?;
            rest = Rest::Tokens;
            self.retries.leave_out(self.who_cannot(&rest));
        }
        let (mut asked, follows) = match rest {
            Rest::Body(body) => {
                let follows = self.follows_in_body(&members).ok_or_else(|| cannot(None))?;
                (WorkerRequest { body, ..self.request.clone() }, follows)
            }
            Rest::Tokens => {
                let Self { app, request, retries, given, times, .. } = &*self;
                let asked = (request, &members, given);
                let (asked, seam, teller) =
                    in_tokens::rest(app, asked, (&record.reading, retries.among()), times.1)
                        .await
                        .ok_or_else(nobody_tells)?;
                // Others would take it for something else.
                self.retries.leave_out(self.who_is_not_of(&[teller.owner()]));
                (asked, Follows::Answer(Box::new(seam)))
            }
        };
        let begun = self.attempt(&mut asked, record).await;
        let recorder = &mut record.recorder;
        match begun {
            Ok(begun) if goes_on(&begun) => {
                if has_broken {
                    recorder.went_on();
                }
                self.follows = Some(follows);
                Ok(Some(begun))
            }
            Ok(begun) => {
                recorder.did_its_part();
                Err(TransportError::NotGoneOn { status: begun.response.status() })
            }
            Err(error) => Err(of_request(error)),
        }
    }

    /// Takes in that the stream broke off. Returns how long to wait before somebody else is asked; an error if nobody is to be.
    fn after(
        &mut self,
        error: TransportError,
        lease: Option<Lease>,
        record: &mut Record,
    ) -> Result<Duration, TransportError> {
        let Self { app, retries, times, .. } = self;
        let Record { recorder, reading } = record;
        let Some(worker) = recorder.worker().map(Arc::clone) else { return Err(error) };
        recorder.broke(&error);
        let cause = Cause::of_error(&error);
        // While the lease still counts this request among those that are there.
        let in_flight =
            if cause.lost_connection() { worker.rescue.note(app.now(), worker.load.own()) } else { 0 };
        drop(lease);
        let told = Err(RequestError::Worker { worker: worker.id().clone(), source: error });
        let failed = Failed { worker, cause, in_flight, retry_after: None, told };
        retries.after(app, reading, failed, times.1).ok_or_else(|| {
            let told = retries.give_up().expect("it has just been given a failure");
            told.map_or_else(of_request, |begun| TransportError::NotGoneOn {
                status: begun.response.status(),
            })
        })
    }

    /// Asks for the rest.
    async fn attempt(
        &mut self,
        asked: &mut WorkerRequest,
        record: &mut Record,
    ) -> Result<Begun, RequestError> {
        let Self { app, retries, times, given, .. } = self;
        let Record { recorder, reading } = record;
        // What has been given is prompt now: so it is weighed, and so speeds are learned from it.
        let given_tokens = given.pieces();
        reading.prompt_tokens += given_tokens;
        let precedence = reading.precedence;
        reading.precedence = precedence.of_one_that_has_begun();
        // It does not wait in line: who has begun to read goes first.
        let begun = attempts(app, (asked, reading), (retries, None), *times, recorder).await;
        (reading.prompt_tokens, reading.precedence) = (reading.prompt_tokens - given_tokens, precedence);
        begun
    }

    /// How what is asked for where the whole was follows on what was given.
    fn follows_in_body(&self, members: &Members) -> Option<Follows> {
        if self.given.kind() != Kind::Responses {
            return Some(Follows::Answer(Box::new(Seam::after(&self.given))));
        }
        let limit = members.parsed("max_output_tokens").unwrap_or_default();
        responses::Rest::after(&self.given, limit).map(|rest| Follows::Response(Box::new(rest)))
    }

    /// All but those engines that go on with the message that a response is so far; `None` if none says that it does.
    async fn who_cannot_respond(&mut self, members: &Members, record: &Record) -> Option<Vec<WorkerSlot>> {
        let Self { app, request, retries, given, times, .. } = &*self;
        let asked = (request, members, given);
        let among = (&record.reading, retries.among(), record.slot());
        // Templates may write a thought or not.
        let model = record.reading.model.as_deref().unwrap_or_default();
        let name = format!("{model}\n{}", given.thought().is_some());
        let asking = async {
            let who = in_tokens::who_responds(app, asked, among, times.1).await;
            let known = || app.templates.of(&name, app.now());
            if known().is_none() {
                let _one = app.templates.asking_of_responses.lock().await;
                if known().is_none() {
                    let told = in_tokens::response_goes_on(asked, &who, times.1).await;
                    app.templates.note(&name, told, app.now());
                }
            }
            (known() == Some(Messages::GoOn)).then_some(who)
        };
        let who = timeout(2 * in_tokens::ASKED_FOR, asking).await.ok().flatten()?;
        let roster = app.fleet.roster();
        let can = |slot: WorkerSlot| who.iter().any(|(upstream, _)| upstream.worker.slot == slot);
        Some(roster.snapshot.workers().iter().map(|worker| worker.slot).filter(|slot| !can(*slot)).collect())
    }

    fn is_asked_in_messages(&self, rest: &Rest) -> bool {
        matches!(rest, Rest::Body(_)) && is_begun_message(&self.given)
    }

    /// Whether an engine goes on with the message that the answer is so far, and does not end it. Where nobody tells, most do.
    async fn messages_go_on(&mut self, members: &Members, reading: &Reading) -> bool {
        let Self { app, request, retries, given, times, .. } = &*self;
        let model = reading.model.as_deref().unwrap_or_default();
        let known = || app.templates.of(model, app.now());
        if let Some(known) = known() {
            return known != Messages::End;
        }
        let asked = (request, members, given);
        let among = (reading, retries.among());
        let asking = async {
            let _one = app.templates.asking.lock().await;
            match known() {
                Some(known) => known,
                None => in_tokens::messages(app, asked, among, times.1).await,
            }
        };
        // As long as the one before may take, and this one.
        let told = timeout(2 * in_tokens::MESSAGES_ASKED_FOR, asking).await;
        told != Ok(Messages::End)
    }

    /// Who would take the beginning of an answer for a turn that has ended, or does not tell tokens.
    fn who_cannot(&self, rest: &Rest) -> Vec<WorkerSlot> {
        let can: &[&str] = match rest {
            Rest::Tokens => &Teller::OWNERS,
            Rest::Body(_) if is_begun_message(&self.given) => &GO_ON_WITH_MESSAGES,
            Rest::Body(_) => return Vec::new(),
        };
        self.who_is_not_of(can)
    }

    /// Whose models are none of these owners'.
    fn who_is_not_of(&self, owners: &[&str]) -> Vec<WorkerSlot> {
        let roster = self.app.fleet.roster();
        let is_of_others = |worker: &&Arc<Worker>| {
            let upstream = roster.upstream(worker);
            !upstream.is_some_and(|upstream| upstream.is_of(owners))
        };
        let others = roster.snapshot.workers().iter().filter(is_of_others);
        others.map(|worker| worker.slot).collect()
    }
}

/// Whether the answer to a chat has begun, so that it is the beginning of a message.
fn is_begun_message(given: &Given) -> bool {
    given.kind() == Kind::Chat && !given.text().is_empty()
}

/// The rest cannot be asked for, whoever is there.
fn cannot(error: Option<TransportError>) -> TransportError {
    let why = || "how the answer to it goes on cannot be asked for".to_owned();
    error.unwrap_or_else(|| TransportError::NobodyGoesOn { why: why() })
}

/// With tools the rest cannot be asked for in tokens, nor with pictures.
fn template_ends_it() -> TransportError {
    let why = "the model's template ends a message that has only begun".to_owned();
    TransportError::NobodyGoesOn { why }
}

/// The rest of a thought, or behind one, takes an engine that tells tokens.
fn nobody_tells() -> TransportError {
    TransportError::NobodyGoesOn { why: "no other engine tells the tokens of a thought".to_owned() }
}

/// What a request failed of is what a stream breaks off with.
fn of_request(error: RequestError) -> TransportError {
    match error {
        RequestError::Worker { source, .. } | RequestError::Unreachable { source, .. } => source,
        other => TransportError::NobodyGoesOn { why: other.to_string() },
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
