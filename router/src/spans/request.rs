//! The spans of one request: one for all of it, and below that one for each stage that takes its time (`read`, `pick`) and for each attempt.
//!
//! Names of attributes are those of OpenTelemetry's conventions for generative AI and HTTP where they have one, and begin with `router.` else.

use std::time::Duration;

use http::{HeaderValue, StatusCode};
use opentelemetry::trace::{Span as _, SpanKind, Status, TraceContextExt, Tracer};
use opentelemetry::{Context, KeyValue, StringValue, Value};
use opentelemetry_sdk::trace::{SdkTracer, Span};
use router_core::{Decided, Explanation, Leg, Worker, WorkerSlot};
use smallvec::SmallVec;

use super::traceparent;
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
    /// Two where one worker computes the prompt and another generates from it.
    attempts: SmallVec<[(WorkerSlot, Span); 2]>,
}

/// How a request ended.
#[derive(Clone, Copy, Debug)]
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
}

impl RequestSpans {
    pub(super) fn new(tracer: SdkTracer, whole: Context, endpoint: Endpoint) -> Self {
        let mut spans = Self { tracer, whole, endpoint, stage: None, attempts: SmallVec::new() };
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
        if let Some(model) = reading.model.as_deref() {
            let operation = operation(self.endpoint);
            whole.update_name(format!("{operation} {model}"));
            whole.set_attribute(KeyValue::new("gen_ai.operation.name", operation));
            whole.set_attribute(KeyValue::new("gen_ai.request.model", model.to_owned()));
        }
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
            span.set_attribute(KeyValue::new("router.why", why(explanation, prompt_tokens)));
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
        match picked {
            Ok(decided) => {
                span.set_attribute(named(&decided.worker));
                span.set_attribute(count("router.hit_tokens", decided.hit_tokens));
            }
            // That a worker has time to spare, or nobody else is left, is no failure of the request yet.
            Err(RequestError::Pick(error)) => {
                span.set_attribute(KeyValue::new("router.nobody", error.to_string()));
            }
            Err(error) => span.set_status(Status::error(error.to_string())),
        }
        span.end();
    }

    /// An attempt begins, or the second leg of one. Returns what its worker is told of the trace.
    pub fn attempt(&mut self, decided: &Decided, leg: Leg) -> HeaderValue {
        let worker = &decided.worker;
        if leg != Leg::Decode {
            self.attempts.clear();
        }
        let mut span = self.child(name_of(leg), SpanKind::Client);
        span.set_attribute(named(worker));
        span.set_attribute(KeyValue::new("server.address", worker.spec.address.clone()));
        if leg != Leg::Decode {
            span.set_attribute(count("router.hit_tokens", decided.hit_tokens));
        }
        let context = span.span_context();
        let ids = (
            u128::from_be_bytes(context.trace_id().to_bytes()),
            u64::from_be_bytes(context.span_id().to_bytes()),
        );
        let told = traceparent(ids, context.trace_flags());
        self.attempts.push((worker.slot, span));
        told
    }

    /// A worker has answered.
    pub fn attempt_answered(&mut self, worker: &Worker, status: StatusCode) {
        let Some(span) = self.attempt_at(worker) else { return };
        span.set_attribute(KeyValue::new("http.response.status_code", i64::from(status.as_u16())));
        if status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS {
            span.set_status(Status::error(status.to_string()));
        }
    }

    /// The first piece of the reply has come.
    pub fn first_piece(&mut self) {
        if let Some((_, span)) = self.attempts.last_mut() {
            span.add_event("first piece", Vec::new());
        }
    }

    /// An attempt has come to nothing, or its reply has broken off.
    pub fn attempt_failed(&mut self, worker: &Worker, error: &TransportError) {
        if let Some(span) = self.attempt_at(worker) {
            span.set_status(Status::error(error.to_string()));
            self.attempts.retain(|(slot, _)| *slot != worker.slot);
        }
    }

    /// The first of two workers has computed the prompt.
    pub fn prefilled(&mut self, worker: &Worker) {
        self.attempts.retain(|(slot, _)| *slot != worker.slot);
    }

    /// The request is over; `error` says what became of it if it failed.
    pub fn end(mut self, end: &End<'_>, error: Option<&RequestError>) {
        // Dropped, they end.
        self.attempts.clear();
        self.stage = None;
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
        if end.status.is_server_error() || matches!(end.outcome, "broken" | "cut_off") {
            let kind = if end.status.is_server_error() {
                end.status.as_str().to_owned()
            } else {
                end.outcome.to_owned()
            };
            whole.set_attribute(KeyValue::new("error.type", kind));
            whole.set_status(Status::error(error.map_or_else(String::new, ToString::to_string)));
        }
        whole.end();
    }

    fn child(&self, name: &'static str, kind: SpanKind) -> Span {
        self.tracer.build_with_context(self.tracer.span_builder(name).with_kind(kind), &self.whole)
    }

    fn attempt_at(&mut self, worker: &Worker) -> Option<&mut Span> {
        self.attempts.iter_mut().find(|(slot, _)| *slot == worker.slot).map(|(_, span)| span)
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

fn named(worker: &Worker) -> KeyValue {
    KeyValue::new("router.worker", worker.id().as_str().to_owned())
}

fn count(name: &'static str, count: usize) -> KeyValue {
    KeyValue::new(name, i64::try_from(count).unwrap_or(i64::MAX))
}
