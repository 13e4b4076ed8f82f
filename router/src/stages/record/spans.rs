//! What a recorder tells of its request's spans.

use http::{HeaderValue, Request, StatusCode};
use router_core::{Among, Decided, Leg, RequestView};

use super::Recorder;
use crate::error::RequestError;
use crate::openai::usage::ReportedUsage;
use crate::spans::{AttemptSpan, End, TRACEPARENT};
use crate::stages::parse::Parsed;
use crate::stages::pick::Picked;
use crate::transport::WorkerRequest;

/// Of larger fleets it is not told why a worker was picked: every one of them would be looked at for that.
const MOST_EXPLAINED: usize = 256;

impl Recorder {
    /// Begins the request's spans, if there are to be any.
    pub fn trace<B>(&mut self, request: &mut Request<B>) {
        let Some(spans) = &self.app.spans else { return };
        let path = request.uri().path().to_owned();
        self.spans = spans.begin((&self.method, path, self.endpoint), request.headers_mut());
    }

    pub(super) fn tell_that_it_is_read(&mut self, parsed: &Parsed) {
        if let Some(spans) = &mut self.spans {
            spans.has_read(&parsed.reading, parsed.body.len());
        }
    }

    /// A worker is about to be picked.
    pub fn picks(&mut self, view: &RequestView<'_>, among: Among<'_>) {
        let Some(spans) = &mut self.spans else { return };
        let (fleet, app) = (self.app.fleet.roster(), &self.app);
        // Why it goes elsewhere then, or when, is another question.
        let is_first = matches!(among, Among::Untried(tried) if tried.is_empty())
            && !app.decider.waits_for_spare(view)
            && fleet.snapshot.workers().len() <= MOST_EXPLAINED;
        let explain = || app.decider.explain(&fleet.snapshot, view, app.now()).ok();
        let explanation = is_first.then(explain).flatten();
        spans.picks(explanation.as_ref().map(|explanation| (explanation, view.prompt_tokens)));
    }

    /// It has been, and there may be a line to wait in.
    pub fn waits_for(&mut self, picked: &Picked) {
        if let Some(spans) = &mut self.spans
            && picked.decided.lease.waits()
        {
            spans.waits_in_line(&picked.decided.worker);
        }
    }

    /// The request can be sent there, or it has turned out that nobody can be asked.
    pub fn picked(&mut self, picked: Result<&Picked, &RequestError>) {
        if let Some(spans) = &mut self.spans {
            spans.picked(picked.map(|picked| &picked.decided));
        }
    }

    /// Begins the span of an attempt. Returns what its worker is to be told.
    pub(super) fn begin_attempt_span(&mut self, decided: &Decided, leg: Leg) -> Option<HeaderValue> {
        self.spans.as_mut().map(|spans| spans.attempt(decided, leg))
    }

    /// Of two attempts that begin at once, this is the one that is answered.
    pub fn sends(&mut self, request: &mut WorkerRequest, decided: &Decided, leg: Leg) {
        if let Some(told) = self.begin_attempt_span(decided, leg) {
            request.headers.insert(TRACEPARENT, told);
        }
    }

    /// And this the other one.
    pub fn sends_apart(
        &mut self,
        request: &mut WorkerRequest,
        decided: &Decided,
        leg: Leg,
    ) -> Option<AttemptSpan> {
        let (span, told) = self.spans.as_mut()?.attempt_apart(decided, leg);
        request.headers.insert(TRACEPARENT, told);
        Some(span)
    }

    /// Nobody waits any more for the answer to the attempt that has begun.
    pub fn gives_up_attempt(&mut self) {
        if let Some(spans) = &mut self.spans {
            spans.attempt_given_up();
        }
    }

    pub(super) fn end_spans(
        &mut self,
        (status, outcome): (StatusCode, &'static str),
        usage: ReportedUsage,
        error: Option<String>,
    ) {
        let Some(spans) = self.spans.take() else { return };
        let (attempts, continued, worker) = (self.attempts, self.continued, self.worker.as_deref());
        let ttft = self.first_piece.map(|first| first - self.began);
        spans.end(&End { status, outcome, attempts, continued, worker, ttft, usage, error });
    }
}
