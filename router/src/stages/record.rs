//! Stage 7: what became of a request → metrics, one log line, and what the router learns from it.
//!
//! A recorder goes along with its request from the first stage on. Dropped without an outcome, it records that the
//! client has left.

mod said;
mod spans;

use std::sync::Arc;
use std::time::{Duration, Instant};

use http::{HeaderValue, Method, StatusCode};
use router_core::prefix::feed::PromptUsage;
use router_core::prefix::index::Basis;
use router_core::request::Answer;
use router_core::telling::{Found, Listener as _, Word};
use router_core::{Decided, Leg, Trial, Worker};

use self::said::SaidSoFar;
use super::parse::{Extent, Parsed, Reading};
use super::retries::Cause;
use crate::app::App;
use crate::error::{Blame, RequestError};
use crate::keys::allowances::{Allowance, Spent};
use crate::kv_events::{Followed, Follower};
use crate::metrics::AttemptOutcome;
use crate::openai::usage::{ReplyTail, ReportedUsage, Words};
use crate::recording::Passed;
use crate::routes::Endpoint;
use crate::spans::{RequestSpans, TRACEPARENT, in_short};
use crate::transport::{TransportError, WorkerRequest};

/// How a relayed reply ended.
#[derive(Clone, Copy, Debug)]
pub enum Outcome<'a> {
    /// The worker's answer has gone out whole.
    Complete,
    /// It broke off.
    Broken(&'a TransportError),
    /// The router had to end.
    CutOff,
}

/// What a worker is expected to have cached of a prompt.
pub struct Expected {
    endpoint: Endpoint,
    prompt_tokens: usize,
    hit_tokens: usize,
    basis: Basis,
    /// Its number, where other routers are told of it.
    told: Option<u64>,
}

impl Expected {
    /// Of a request for `endpoint`, that goes where it was `decided`.
    #[must_use]
    pub fn of(endpoint: Endpoint, reading: &Reading, decided: &Decided) -> Self {
        let Decided { lease, hit_tokens, basis, .. } = decided;
        let prompt_tokens = reading.prompt_tokens;
        Self { endpoint, prompt_tokens, hit_tokens: *hit_tokens, basis: *basis, told: lease.told() }
    }

    /// Beside what `worker` says of it, from which the tree learns, and whoever follows that worker.
    pub fn compare(
        &self,
        app: &App,
        worker: &Arc<Worker>,
        followed: Option<&mut Followed>,
        usage: &ReportedUsage,
    ) {
        if usage.prompt_tokens == 0 || self.endpoint == Endpoint::Responses || !app.decider.reads_prefixes() {
            return;
        }
        let cached = worker.reports.cached_tokens(self.endpoint as u32, usage.cached_tokens);
        if let Some(followed) = followed {
            let cached_tokens = cached.map(|tokens| tokens as usize);
            followed.used(PromptUsage { prompt_tokens: usage.prompt_tokens as usize, cached_tokens });
        }
        let Some(cached) = cached else { return };
        let found = Found { prompt_tokens: usage.prompt_tokens as usize, cached_tokens: cached as usize };
        if let (Some(replicas), Some(told)) = (&app.replicas, self.told) {
            replicas.hear(told, Word::Found(found));
        }
        let comparison = found.beside(self.hit_tokens, self.prompt_tokens);
        app.metrics.predicted(comparison);
        let corrected = app.decider.compare(worker, self.basis, comparison);
        app.metrics.corrected_blocks.inc_by(corrected as u64);
    }
}

/// What is known of a request so far.
pub struct Recorder {
    app: Arc<App>,
    endpoint: Endpoint,
    method: Method,
    request_id: HeaderValue,
    began: Instant,
    status: Option<StatusCode>,
    worker: Option<Arc<Worker>>,
    /// Who computed the prompt, where that is another one.
    prefill_worker: Option<Arc<Worker>>,
    /// What that one said of the prompt, in whose cache the hits were expected.
    prefill_usage: Option<ReportedUsage>,
    hit_tokens: usize,
    basis: Basis,
    /// Its number, where other routers are told of it.
    told: Option<u64>,
    /// At a worker that tells of its cache.
    followed: Option<Followed>,
    attempts: usize,
    /// The reply has broken off, and nobody has gone on with it yet.
    has_broken: bool,
    /// How often somebody else has gone on with the reply.
    continued: usize,
    first_piece: Option<Instant>,
    last_piece: Option<Instant>,
    pieces: usize,
    tail: ReplyTail,
    /// What the end of the reply says of its worker's health.
    trial: Option<Trial>,
    recorded: bool,
    in_background: bool,
    /// Of its key, if that has limits.
    allowance: Option<Allowance>,
    /// Of the reply, where its tokens count and nobody may say how many there are.
    said: SaidSoFar,
    /// Where they are sent somewhere, and the request is among those whose are.
    spans: Option<Box<RequestSpans>>,
}

impl Recorder {
    /// Begins the record of a request that has just come.
    #[must_use]
    pub fn new(app: &Arc<App>, endpoint: Endpoint, method: Method, request_id: HeaderValue) -> Self {
        Self {
            app: Arc::clone(app),
            endpoint,
            method,
            request_id,
            began: Instant::now(),
            status: None,
            worker: None,
            prefill_worker: None,
            prefill_usage: None,
            hit_tokens: 0,
            basis: Basis::default(),
            told: None,
            followed: None,
            attempts: 0,
            has_broken: false,
            continued: 0,
            first_piece: None,
            last_piece: None,
            pieces: 0,
            tail: ReplyTail::default(),
            trial: None,
            recorded: false,
            in_background: false,
            allowance: None,
            said: SaidSoFar::default(),
            spans: None,
        }
    }

    /// Its key may ask for it.
    pub fn allow(&mut self, allowance: Option<Allowance>) {
        self.allowance = allowance;
    }

    /// All of the request is there.
    ///
    /// # Errors
    /// When its key has had all that it may meanwhile.
    pub fn has_read(&mut self, parsed: &Parsed) -> Result<(), Spent> {
        self.tell_that_it_is_read(parsed);
        let Some(allowance) = &mut self.allowance else { return Ok(()) };
        allowance.begin(parsed.reading.prompt_tokens, self.app.now())
    }

    /// Nobody waits for it: how long it takes is in no metric of those that somebody does wait for.
    pub fn is_in_background(&mut self) {
        self.in_background = true;
    }

    /// Whether an engine generates text for it, as far as the path tells.
    #[must_use]
    pub fn is_generation(&self) -> bool {
        self.endpoint.is_generation()
    }

    /// Whether an answer in one piece has been computed when it comes. A response may be only queued then (`background`).
    #[must_use]
    pub fn computes_at_once(&self) -> bool {
        self.is_generation() && self.endpoint != Endpoint::Responses
    }

    /// What it asks for.
    #[must_use]
    pub fn endpoint(&self) -> Endpoint {
        self.endpoint
    }

    /// Who answers, as far as that is known.
    #[must_use]
    pub fn worker(&self) -> Option<&Arc<Worker>> {
        self.worker.as_ref()
    }

    /// Whether it must not go on, since the router ends.
    #[must_use]
    pub fn is_cut_off(&self) -> bool {
        self.app.cuts_off()
    }

    /// An attempt begins, or the second leg of one.
    pub fn attempt(&mut self, decided: &Decided, leg: Leg) {
        if leg == Leg::Decode {
            // Hits are those of the worker that computes the prompt.
            self.prefill_worker = self.worker.replace(Arc::clone(&decided.worker));
            return;
        }
        (self.prefill_worker, self.prefill_usage) = (None, None);
        if self.attempts > 0 {
            self.app.metrics.retries.inc();
        }
        self.attempts += 1;
        self.worker = Some(Arc::clone(&decided.worker));
        (self.hit_tokens, self.basis) = (decided.hit_tokens, decided.basis);
        (self.told, self.followed) = (decided.lease.told(), None);
    }

    /// The attempt goes to a worker that may tell of its cache, and of what it does; `None`, or the request as that worker is to get it.
    pub async fn follow(
        &mut self,
        follower: Option<&Follower>,
        (request, reading): (&WorkerRequest, &Reading),
        (decided, leg): (&Decided, Leg),
    ) -> Option<WorkerRequest> {
        self.followed = match follower {
            Some(follower) => follower.follow(&self.request_id, request, reading).await,
            None => None,
        };
        let trace = self.begin_attempt_span(decided, leg);
        let name = self.followed.as_mut().and_then(Followed::to_say);
        if name.is_none() && trace.is_none() {
            return None;
        }
        let mut told = request.clone();
        if let Some(name) = name {
            name.say(&mut told);
        }
        if let Some(trace) = trace {
            told.headers.insert(TRACEPARENT, trace);
        }
        Some(told)
    }

    /// Of two attempts that begin at once, the one that computes the prompt goes to a worker that may tell of its cache. What follows that, if anything
    /// does, and the request says what it is to say.
    pub async fn follow_apart(
        &self,
        follower: Option<&Follower>,
        request: &mut WorkerRequest,
        reading: &Reading,
    ) -> Option<Followed> {
        let mut followed = follower?.follow(&self.request_id, request, reading).await?;
        if let Some(name) = followed.to_say() {
            name.say(request);
        }
        Some(followed)
    }

    /// An attempt came to nothing.
    pub fn attempt_failed(&mut self, worker: &Worker, error: &TransportError) {
        if let Some(spans) = &mut self.spans {
            spans.attempt_failed(worker, error);
        }
        self.app.metrics.attempt(worker, AttemptOutcome::Failed);
        if self.app.failure_logs.allow(worker.id()) {
            tracing::warn!(worker = %worker.id(), %error, "attempt failed");
        }
    }

    /// A worker answered an attempt.
    pub fn attempt_answered(&mut self, worker: &Worker, status: StatusCode) {
        if let Some(spans) = &mut self.spans {
            spans.attempt_answered(worker, status, Cause::of_status(status).is_none());
        }
        if status.is_success() && self.is_generation() {
            worker.generates();
        }
        self.app.metrics.attempt(worker, status.into());
    }

    /// A good reply has begun; how it ends is told to `trial`. If the client leaves, it is told nothing.
    pub fn watch(&mut self, trial: Trial) {
        self.trial = Some(trial);
    }

    /// The worker of the first leg has computed the prompt, and said `usage`.
    pub fn prefilled(&mut self, usage: Option<ReportedUsage>, reading: &Reading) {
        if let Some(trial) = self.trial.take() {
            trial.succeed(self.app.now());
        }
        if let Some(spans) = &mut self.spans {
            spans.prefilled();
        }
        self.prefill_usage = usage;
        self.compare(&usage.unwrap_or_default(), reading);
    }

    /// Its answer to the first leg broke off.
    pub fn prefill_broke(&mut self, worker: &Worker, error: &TransportError) {
        if let Some(trial) = self.trial.take() {
            self.app.report_failure(worker.id(), trial);
        }
        self.attempt_failed(worker, error);
    }

    /// The head of the answer is known.
    pub fn answered(&mut self, status: StatusCode) {
        self.status = Some(status);
    }

    /// Somebody else goes on with it.
    pub fn went_on(&mut self) {
        self.has_broken = false;
        self.continued += 1;
        self.app.metrics.continued.inc();
    }

    /// Whoever was asked has done what it was asked for, or does not go on with what another has begun: that is no failure of its.
    pub fn did_its_part(&mut self) {
        if let Some(trial) = self.trial.take() {
            trial.succeed(self.app.now());
        }
    }

    /// A piece of the reply goes by, `now`.
    pub fn piece(&mut self, piece: &[u8], now: Instant) {
        let metrics = &self.app.metrics;
        let succeeds = self.status.is_some_and(|status| status.is_success());
        match self.last_piece {
            None => {
                self.first_piece = Some(now);
                if let Some(spans) = &mut self.spans {
                    spans.first_piece();
                }
                if succeeds && !self.in_background {
                    metrics.ttft_seconds.observe((now - self.began).as_secs_f64());
                }
            }
            Some(last) if succeeds && !self.in_background => {
                metrics.itl_seconds.observe((now - last).as_secs_f64());
            }
            Some(_) => {}
        }
        if let Some(worker) = &self.worker {
            worker.hear();
            // A comment is the server's.
            if succeeds && self.is_generation() && piece.first() != Some(&b':') {
                worker.generates();
            }
        }
        self.last_piece = Some(now);
        self.pieces += 1;
        if self.allowance.as_ref().is_some_and(Allowance::counts_tokens) {
            self.said.add(piece);
        }
        self.tail.push(piece);
    }

    /// The reply has ended; learns from it.
    pub fn finish(&mut self, outcome: Outcome<'_>, reading: &Reading) {
        if self.recorded {
            return;
        }
        let reported = self.tail.usage(self.words());
        self.enter_in_trace(reported.as_ref(), reading);
        let mut usage = reported.unwrap_or_default();
        let app = Arc::clone(&self.app);
        let metrics = &app.metrics;
        if self.prefill_worker.is_some() {
            // What came from the other worker is no hit, whatever engines say.
            usage.cached_tokens = self.prefill_usage.and_then(|prefill| prefill.cached_tokens);
        } else {
            self.compare(&usage, reading);
        }
        // Whoever hears that the request is over may send the next one under its name.
        self.followed = None;
        self.count(reported.as_ref(), reading);
        metrics.usage(&usage, self.hit_tokens);
        if reading.token_ids.is_none() && self.tells_of_its_body(&usage) {
            app.ratios.observe(reading.model.as_deref(), reading.prompt_bytes, usage.prompt_tokens as usize);
        }
        match outcome {
            Outcome::Complete => {
                if let Some(trial) = self.trial.take() {
                    trial.succeed(app.now());
                }
                let status = self.status.unwrap_or(StatusCode::OK);
                if status.is_success() {
                    self.learn_answer(reported.as_ref(), reading);
                    if !self.in_background {
                        metrics.e2e_seconds.observe(self.began.elapsed().as_secs_f64());
                    }
                } else {
                    let blame = if status.is_client_error() { Blame::Client } else { Blame::Worker };
                    metrics.error(blame);
                }
                self.record("complete", Some(usage));
            }
            Outcome::Broken(error) => {
                metrics.error(Blame::Worker);
                self.broke(error);
                self.record_with("broken", Some(usage), self.spans.as_ref().map(|_| error.to_string()));
            }
            Outcome::CutOff => self.give_up(Blame::Router, "cut_off", usage),
        }
    }

    /// The reply of its worker has broken off.
    pub fn broke(&mut self, error: &TransportError) {
        // One that broke off before, and was not gone on with, is not blamed again.
        if std::mem::replace(&mut self.has_broken, true) {
            return;
        }
        let app = &self.app;
        // That a reply takes longer than a request may is no sign of a sick worker.
        let trial = self.trial.take().filter(|_| !matches!(error, TransportError::Total { .. }));
        if let Some(worker) = &self.worker {
            if let Some(spans) = &mut self.spans {
                spans.attempt_failed(worker, error);
            }
            if let Some(trial) = trial {
                app.report_failure(worker.id(), trial);
            }
            app.metrics.attempt(worker, AttemptOutcome::Broken);
            // A worker that dies takes all of its streams along.
            if app.failure_logs.allow(worker.id()) {
                tracing::warn!(worker = %worker.id(), %error, "stream broke");
            }
        }
    }

    /// Nobody waits for the rest, or can: that says nothing of the worker.
    fn give_up(&mut self, blame: Blame, outcome: &'static str, usage: ReportedUsage) {
        self.app.metrics.error(blame);
        if let Some(worker) = &self.worker {
            self.app.metrics.attempt(worker, AttemptOutcome::Cancelled);
        }
        self.trial = None;
        if let Some(allowance) = &mut self.allowance {
            allowance.count_more(self.said.tokens(None, &self.app.ratios));
        }
        self.record(outcome, Some(usage));
    }

    /// What was generated goes into the trace, if one is written. Who left, or was refused, is not in it.
    fn enter_in_trace(&self, usage: Option<&ReportedUsage>, reading: &Reading) {
        let Some(recording) = &self.app.recording else { return };
        // How long an answer of another API was only its usage says.
        let is_known = usage.is_some() || matches!(self.endpoint, Endpoint::Chat | Endpoint::Completions);
        if !self.is_generation() || !is_known || !self.status.is_some_and(|status| status.is_success()) {
            return;
        }
        let passed = Passed {
            arrived: self.began.saturating_duration_since(self.app.started),
            prompt_tokens: usage.map(|usage| usage.prompt_tokens as usize),
            output_tokens: usage.map_or(self.pieces, |usage| usage.completion_tokens as usize),
        };
        if let Some(left_out) = recording.passed(reading, passed)
            && self.app.failure_logs.allow(&"recording")
        {
            tracing::warn!(left_out, "the trace lacks requests: it is not written fast enough");
        }
    }

    /// Compares what was expected in the worker's cache with what it found there, if it says that.
    fn compare(&mut self, usage: &ReportedUsage, reading: &Reading) {
        let Some(worker) = &self.worker else { return };
        let Self { app, endpoint, hit_tokens, basis, told, followed, .. } = self;
        let prompt_tokens = reading.prompt_tokens;
        let expected = Expected {
            endpoint: *endpoint,
            prompt_tokens,
            hit_tokens: *hit_tokens,
            basis: *basis,
            told: *told,
        };
        expected.compare(app, worker, followed.as_mut(), usage);
    }

    /// Whether the prompt whose tokens are told is what stands in its body. A response may go on from one that its engine keeps, and count a prompt for
    /// each tool it calls; of messages some engines count what was cached twice.
    fn tells_of_its_body(&self, usage: &ReportedUsage) -> bool {
        match self.endpoint {
            Endpoint::Responses => false,
            Endpoint::Messages => usage.cached_tokens.unwrap_or(0) == 0,
            _ => true,
        }
    }

    /// Whether each piece of its answer is a token, or may be taken for one.
    fn says_each_token(&self, reading: &Reading) -> bool {
        matches!(self.endpoint, Endpoint::Chat | Endpoint::Completions)
            && reading.extent == Extent::Whole
            && reading.answer == Answer::Streamed
    }

    /// In whose words its answer tells the usage.
    pub fn words(&self) -> Words {
        if self.endpoint == Endpoint::Generate { Words::MetaInfo } else { Words::Usage }
    }

    /// How long an answer was says how much of a worker's memory the next ones will take. Of a stream that does not say it, each piece
    /// is taken for a token.
    fn learn_answer(&self, usage: Option<&ReportedUsage>, reading: &Reading) {
        let Some(worker) = self.worker.as_ref().filter(|_| self.is_generation()) else { return };
        let tokens = match usage {
            Some(usage) => usage.completion_tokens as usize,
            None if self.says_each_token(reading) => self.pieces,
            None => return,
        };
        self.app.decider.answered(worker, tokens);
    }

    /// What the request has taken counts for its key, and it is over. What failed took nothing.
    fn count(&mut self, usage: Option<&ReportedUsage>, reading: &Reading) {
        let Some(mut allowance) = self.allowance.take() else { return };
        let has_failed = self.status.is_some_and(|status| !status.is_success());
        allowance.count(match usage {
            _ if has_failed => 0,
            Some(usage) => usage.prompt_tokens as usize + usage.completion_tokens as usize,
            None => reading.prompt_tokens + self.said.tokens(reading.model.as_deref(), &self.app.ratios),
        });
    }

    /// The request was not answered by a worker.
    pub fn fail(&mut self, error: &RequestError) {
        self.status = Some(error.status());
        if let Some(allowance) = &mut self.allowance {
            allowance.count(0);
        }
        self.app.metrics.error(error.blame());
        if error.blame() != Blame::Client && self.app.failure_logs.allow(&"request") {
            tracing::warn!(%error, "request failed");
        }
        self.record_with("failed", None, self.spans.as_ref().map(|_| in_short(error)));
    }

    /// The router itself has answered.
    pub fn served(&mut self, status: StatusCode) {
        self.status = Some(status);
        self.app.metrics.request(self.endpoint, status);
        self.recorded = true;
    }

    fn record(&mut self, outcome: &'static str, usage: Option<ReportedUsage>) {
        self.record_with(outcome, usage, None);
    }

    fn record_with(&mut self, outcome: &'static str, usage: Option<ReportedUsage>, error: Option<String>) {
        self.recorded = true;
        let trace_id = self.spans.as_ref().map(|spans| spans.trace_id());
        let status = self.status.unwrap_or(CLIENT_CLOSED_REQUEST);
        self.app.metrics.request(self.endpoint, status);
        let usage = usage.unwrap_or_default();
        self.end_spans((status, outcome), usage, error);
        let milliseconds = |time: Duration| time.as_secs_f64() * 1_000.0;
        tracing::info!(
            method = %self.method,
            endpoint = self.endpoint.label(),
            status = status.as_u16(),
            outcome,
            worker = self.worker.as_ref().map_or("-", |worker| worker.id().as_str()),
            prefill_worker = self.prefill_worker.as_ref().map(|worker| worker.id().as_str()),
            attempts = self.attempts,
            continued = (self.continued > 0).then_some(self.continued),
            hit_tokens = self.hit_tokens,
            cached_tokens = usage.cached_tokens,
            prompt_tokens = usage.prompt_tokens,
            completion_tokens = usage.completion_tokens,
            ttft_ms = self.first_piece.map(|first| milliseconds(first - self.began)),
            e2e_ms = milliseconds(self.began.elapsed()),
            request_id = self.request_id.to_str().ok(),
            trace_id,
            "request"
        );
    }
}

/// What nginx calls 499: nobody was there any more to be told.
const CLIENT_CLOSED_REQUEST: StatusCode = match StatusCode::from_u16(499) {
    Ok(status) => status,
    Err(_) => StatusCode::BAD_REQUEST,
};

impl Drop for Recorder {
    fn drop(&mut self) {
        if self.recorded {
            return;
        }
        if self.is_cut_off() {
            // Its client took nothing, and so nobody asked for the piece that would have said so.
            self.status.get_or_insert(StatusCode::SERVICE_UNAVAILABLE);
            self.give_up(Blame::Router, "cut_off", ReportedUsage::default());
        } else {
            self.status = None;
            self.give_up(Blame::Client, "client_gone", ReportedUsage::default());
        }
    }
}
