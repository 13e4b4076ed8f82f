//! The spans of one request: one for all of it, and below that one for each stage that takes its time (`read`, `pick`) and for each attempt.
//!
//! Names of attributes are those of OpenTelemetry's conventions for generative AI and HTTP where they have one, and begin with `router.` else.

use std::time::Duration;

use http::{HeaderValue, StatusCode};
use opentelemetry::trace::{Span as _, SpanKind, Status, TraceContextExt, Tracer};
use opentelemetry::{Context, KeyValue, StringValue, Value};
use opentelemetry_sdk::trace::{SdkTracer, Span};
use router_core::{Decided, Explanation, Leg, Worker, WorkerId, WorkerSlot};

use super::attempt::AttemptSpan;
use crate::error::RequestError;
use crate::openai::usage::ReportedUsage;
use crate::routes::Endpoint;
use crate::stages::parse::Reading;
use crate::transport::TransportError;
use crate::why::{cheapest, why};

/// Candidates whose costs are told.
const MOST_COSTS: usize = 5;

/// Spans that have not ended.
pub struct RequestSpans {
    tracer: SdkTracer,
    /// With the span of the whole request, below which the others are.
    whole: Context,
    endpoint: Endpoint,
    /// What the router is at before an attempt.
    stage: Option<Span>,
    attempt: Option<(WorkerSlot, AttemptSpan)>,
    /// Asked for; clients may ask for any, so that it is told once a worker has been found that has it.
    model: Option<String>,
    /// Why the worker would be picked that is named here.
    why: Option<(WorkerId, String)>,
}

/// How a request ended.
#[derive(Clone, Debug)]
pub struct End<'a> {
    /// What the client was told, or would have been.
    pub status: StatusCode,
    /// In the words of the log.
    pub outcome: &'static str,
    /// Attempts at workers.
    pub attempts: usize,
    /// How often somebody else has gone on with the reply.
    pub continued: usize,
    /// Who answered.
    pub worker: Option<&'a Worker>,
    /// From its arrival to the first piece of the reply.
    pub ttft: Option<Duration>,
    /// What was said of tokens.
    pub usage: ReportedUsage,
    /// What it failed of.
    pub error: Option<String>,
}

impl RequestSpans {
    pub(super) fn new(tracer: SdkTracer, whole: Context, endpoint: Endpoint) -> Self {
        let mut spans = Self { tracer, whole, endpoint, stage: None, attempt: None, model: None, why: None };
        spans.stage = Some(spans.child("read", SpanKind::Internal));
        spans
    }

    /// The trace's name.
    #[must_use]
    pub fn trace_id(&self) -> String {
        self.whole.span().span_context().trace_id().to_string()
    }

    /// All of the request is there.
    pub fn has_read(&mut self, reading: &Reading, body_bytes: usize) {
        let whole = self.whole.span();
        self.model = reading.model.as_deref().map(str::to_owned);
        whole.set_attribute(KeyValue::new("router.priority", i64::from(reading.precedence.priority.0)));
        if let Some(mut span) = self.stage.take() {
            span.set_attribute(count("http.request.body.size", body_bytes));
            span.set_attribute(count("router.prompt_tokens_estimated", reading.prompt_tokens));
            span.end();
        }
    }

    /// A worker is picked, and waited for: by `explanation`, if there is one, with so many tokens in the prompt.
    pub fn picks(&mut self, explanation: Option<(&Explanation, usize)>) {
        let mut span = self.child("pick", SpanKind::Internal);
        if let Some((explanation, prompt_tokens)) = explanation {
            let picked = explanation.candidates[explanation.picked].worker.id().clone();
            self.why = Some((picked, why(explanation, prompt_tokens)));
            let costs: Vec<_> =
                cheapest(explanation, MOST_COSTS).into_iter().map(StringValue::from).collect();
            span.set_attribute(KeyValue::new("router.costs", Value::Array(costs.into())));
        }
        self.stage = Some(span);
    }

    /// It waits in line for a worker.
    pub fn waits_in_line(&mut self, worker: &Worker) {
        if let Some(span) = &mut self.stage {
            span.add_event("in line", vec![named(worker)]);
        }
    }

    /// A worker is picked, and its turn has come there; or there is nobody.
    pub fn picked(&mut self, picked: Result<&Decided, &RequestError>) {
        let Some(mut span) = self.stage.take() else { return };
        let explained = self.why.take();
        match picked {
            Ok(decided) => {
                span.set_attribute(named(&decided.worker));
                span.set_attribute(count("router.hit_tokens", decided.hit_tokens));
                // Others may have been picked meanwhile, and another one be better now.
                if let Some((_, why)) = explained.filter(|(worker, _)| worker == decided.worker.id()) {
                    span.set_attribute(KeyValue::new("router.why", why));
                }
                self.tell_model();
            }
            Err(error) => span.set_status(Status::error(in_short(error))),
        }
        span.end();
    }

    fn tell_model(&mut self) {
        let Some(model) = self.model.take() else { return };
        let (whole, operation) = (self.whole.span(), operation(self.endpoint));
        whole.update_name(format!("{operation} {model}"));
        whole.set_attribute(KeyValue::new("gen_ai.operation.name", operation));
        whole.set_attribute(KeyValue::new("gen_ai.request.model", model));
    }

    /// An attempt begins, or the second leg of one. Returns what its worker is told of the trace.
    pub fn attempt(&mut self, decided: &Decided, leg: Leg) -> HeaderValue {
        let (span, told) = self.attempt_apart(decided, leg);
        self.attempt = Some((decided.worker.slot, span));
        told
    }

    /// One that goes on beside others.
    pub fn attempt_apart(&mut self, decided: &Decided, leg: Leg) -> (AttemptSpan, HeaderValue) {
        let span = AttemptSpan::begin(self.child(name_of(leg), SpanKind::Client), decided, leg);
        let told = span.told();
        (span, told)
    }

    /// A worker has answered, and whether that is an answer for the client.
    pub fn attempt_answered(&mut self, worker: &Worker, status: StatusCode, is_one: bool) {
        if let Some(span) = self.attempt_at(worker) {
            span.answered(status);
            self.attempt.take_if(|_| !is_one);
        }
    }

    /// The first piece of the reply has come.
    pub fn first_piece(&mut self) {
        if let Some((_, span)) = &mut self.attempt {
            span.first_piece();
        }
    }

    /// An attempt has come to nothing, or its reply has broken off.
    pub fn attempt_failed(&mut self, worker: &Worker, error: &TransportError) {
        if let Some(span) = self.attempt_at(worker) {
            span.failed(error);
            self.attempt = None;
        }
    }

    /// Nobody waits for its answer any more.
    pub fn attempt_given_up(&mut self) {
        if let Some((_, mut span)) = self.attempt.take() {
            span.given_up();
        }
    }

    /// The first of two workers has computed the prompt.
    pub fn prefilled(&mut self) {
        self.attempt = None;
    }

    /// The request is over.
    pub fn end(mut self, end: &End<'_>) {
        // Dropped, they end.
        (self.attempt, self.stage) = (None, None);
        let whole = self.whole.span();
        whole.set_attribute(KeyValue::new("http.response.status_code", i64::from(end.status.as_u16())));
        whole.set_attribute(KeyValue::new("router.outcome", end.outcome));
        whole.set_attribute(count("router.attempts", end.attempts));
        whole.set_attribute(count("router.continued", end.continued));
        if let Some(ttft) = end.ttft {
            // In seconds, and by vLLM's name for it.
            whole.set_attribute(KeyValue::new("gen_ai.latency.time_to_first_token", ttft.as_secs_f64()));
        }
        if let Some(worker) = end.worker {
            whole.set_attribute(named(worker));
        }
        let ReportedUsage { prompt_tokens, completion_tokens, cached_tokens } = end.usage;
        if prompt_tokens > 0 {
            whole.set_attribute(KeyValue::new("gen_ai.usage.input_tokens", i64::from(prompt_tokens)));
            whole.set_attribute(KeyValue::new("gen_ai.usage.output_tokens", i64::from(completion_tokens)));
        }
        if let Some(cached) = cached_tokens {
            whole.set_attribute(KeyValue::new("gen_ai.usage.cache_read.input_tokens", i64::from(cached)));
        }
        let is_error = end.status.is_server_error() || matches!(end.outcome, "broken" | "cut_off");
        if is_error || end.status.is_client_error() && end.error.is_some() {
            let kind = if end.status.is_success() { end.outcome } else { end.status.as_str() };
            whole.set_attribute(KeyValue::new("error.type", kind.to_owned()));
        }
        if is_error {
            whole.set_status(Status::error(end.error.clone().unwrap_or_default()));
        }
        whole.end();
    }

    fn child(&self, name: &'static str, kind: SpanKind) -> Span {
        self.tracer.build_with_context(self.tracer.span_builder(name).with_kind(kind), &self.whole)
    }

    fn attempt_at(&mut self, worker: &Worker) -> Option<&mut AttemptSpan> {
        self.attempt.as_mut().filter(|(slot, _)| *slot == worker.slot).map(|(_, span)| span)
    }
}

/// What a request failed of, without what its client has written: what a worker failed of in full, and of all else the kind alone.
pub fn in_short(error: &RequestError) -> String {
    match error {
        RequestError::Worker { .. } | RequestError::Unreachable { .. } => error.to_string(),
        other => other.code().unwrap_or("invalid_request").to_owned(),
    }
}

/// `gen_ai.operation.name`.
fn operation(endpoint: Endpoint) -> &'static str {
    match endpoint {
        Endpoint::Chat | Endpoint::Messages | Endpoint::Responses => "chat",
        Endpoint::Completions | Endpoint::Generate => "text_completion",
        other => other.label(),
    }
}

fn name_of(leg: Leg) -> &'static str {
    match leg {
        Leg::Whole => "attempt",
        Leg::Prefill => "prefill",
        Leg::Decode => "decode",
    }
}

pub(super) fn named(worker: &Worker) -> KeyValue {
    KeyValue::new("router.worker", worker.id().as_str().to_owned())
}

pub(super) fn count(name: &'static str, count: usize) -> KeyValue {
    KeyValue::new(name, i64::try_from(count).unwrap_or(i64::MAX))
}
