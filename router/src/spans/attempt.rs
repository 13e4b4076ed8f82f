//! The span of one attempt at a worker. Dropped, it ends.

use http::{HeaderValue, StatusCode, Uri};
use opentelemetry::KeyValue;
use opentelemetry::trace::{Span as _, Status};
use opentelemetry_sdk::trace::Span;
use router_core::{Decided, Leg};

use super::request::{count, named};
use super::traceparent;
use crate::transport::TransportError;

/// An attempt that has not ended.
pub struct AttemptSpan(Span);

impl AttemptSpan {
    /// At the worker that was picked.
    pub(super) fn begin(mut span: Span, decided: &Decided, leg: Leg) -> Self {
        let worker = &decided.worker;
        span.set_attribute(named(worker));
        let address: Option<Uri> = worker.spec.address.parse().ok();
        if let Some(authority) = address.as_ref().and_then(Uri::authority) {
            span.set_attribute(KeyValue::new("server.address", authority.host().to_owned()));
            span.set_attribute(KeyValue::new("server.port", authority.port_u16().map_or(0, i64::from)));
        }
        // Hits are those of the worker that computes the prompt.
        if leg != Leg::Decode {
            span.set_attribute(count("router.hit_tokens", decided.hit_tokens));
        }
        Self(span)
    }

    /// What its worker is told of the trace.
    pub(super) fn told(&self) -> HeaderValue {
        let context = self.0.span_context();
        let trace = u128::from_be_bytes(context.trace_id().to_bytes());
        let span = u64::from_be_bytes(context.span_id().to_bytes());
        traceparent((trace, span), context.trace_flags())
    }

    /// Its worker has answered.
    pub fn answered(&mut self, status: StatusCode) {
        self.0.set_attribute(KeyValue::new("http.response.status_code", i64::from(status.as_u16())));
        if status.is_client_error() || status.is_server_error() {
            self.0.set_status(Status::error(status.to_string()));
        }
    }

    /// The first piece of the answer has come.
    pub(super) fn first_piece(&mut self) {
        self.0.add_event("first piece", Vec::new());
    }

    /// It has come to nothing, or its answer has broken off.
    pub fn failed(&mut self, error: &TransportError) {
        self.0.set_status(Status::error(error.to_string()));
    }

    /// Nobody waits for its answer any more.
    pub fn given_up(&mut self) {
        self.0.set_status(Status::error("given up, since the prompt was not computed"));
    }
}
