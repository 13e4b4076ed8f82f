//! What became of requests, as OpenTelemetry's spans: which stage took how long, who was asked, and why.
//!
//! A caller's trace is gone on with, and engines that are told of it (`traceparent`, W3C Trace Context) put their own spans below those of the attempts here. No
//! text of a request is in a span, nor whose it is. What is said of one request is in [`request`]; how spans leave the process, in [`collector`].

pub mod collector;
mod request;

use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue, Method};
use opentelemetry::propagation::TextMapPropagator;
use opentelemetry::trace::{SpanKind, TraceContextExt, TraceFlags, Tracer, TracerProvider};
use opentelemetry::{Context, KeyValue};
use opentelemetry_http::HeaderExtractor;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{
    BatchConfigBuilder, BatchSpanProcessor, Sampler, SdkTracer, SdkTracerProvider,
};

use self::collector::{Collector, SpanCounters};
use crate::routes::Endpoint;

pub use self::request::{End, RequestSpans};

/// Header that says which trace a request belongs to (W3C Trace Context, 3.2).
pub const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// Spans that wait to be sent, some kilobyte each; more are left out. At 10,000 requests a second this is half a second of them.
const MOST_WAITING: usize = 16_384;
/// And how many go at once.
const AT_ONCE: usize = 512;
/// Time for the last ones to be sent when the process ends.
const LAST_SPANS: Duration = Duration::from_secs(3);
/// What the router is called unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES say otherwise.
const SERVICE: &str = "roundhouse-router";

/// Makes spans, and sends them.
pub struct Spans {
    provider: SdkTracerProvider,
    tracer: SdkTracer,
    /// Of requests without a caller's trace.
    share: f64,
}

impl Spans {
    /// Begins to send the spans of `share` of all requests to `collector`; whether those are among them that are part of a caller's trace is the caller's decision.
    /// Must be called within a tokio runtime, which then does the sending.
    ///
    /// # Errors
    /// When one of OpenTelemetry's environment variables makes no sense.
    pub fn start(collector: Collector, share: f64, counters: &SpanCounters) -> Result<Self, String> {
        let exporter = collector.exporter(counters)?;
        let batches = BatchConfigBuilder::default()
            .with_max_queue_size(MOST_WAITING)
            .with_max_export_batch_size(AT_ONCE);
        let batches = BatchSpanProcessor::builder(exporter).with_batch_config(batches.build()).build();
        let named = ["OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"]
            .iter()
            .any(|name| std::env::var_os(name).is_some());
        let resource = Resource::builder();
        let resource = if named { resource } else { resource.with_service_name(SERVICE) };
        let version = KeyValue::new("service.version", env!("CARGO_PKG_VERSION"));
        let provider = SdkTracerProvider::builder()
            .with_resource(resource.with_attribute(version).build())
            // What is sampled is decided before there is a span.
            .with_sampler(Sampler::AlwaysOn)
            .with_span_processor(collector::Counting::new(batches, counters))
            .build();
        Ok(Self { tracer: provider.tracer("router"), provider, share })
    }

    /// Begins the spans of a request that has just come, or says in its `headers` that it has none.
    pub fn begin(
        &self,
        (method, path, endpoint): (&Method, String, Endpoint),
        headers: &mut HeaderMap,
    ) -> Option<Box<RequestSpans>> {
        let caller = match headers.contains_key(TRACEPARENT) {
            true => TraceContextPropagator::new()
                .extract_with_context(&Context::new(), &HeaderExtractor(&*headers)),
            false => Context::new(),
        };
        let callers = caller.span().span_context().clone();
        if callers.is_valid() && !callers.is_sampled() {
            return None;
        }
        if !callers.is_valid() && rand::random::<f64>() >= self.share {
            // So that engines do not decide anew.
            headers.insert(TRACEPARENT, traceparent((rand::random(), rand::random()), TraceFlags::default()));
            return None;
        }
        let mut span = self.tracer.span_builder(endpoint.label()).with_kind(SpanKind::Server);
        span.attributes = Some(vec![
            KeyValue::new("http.request.method", method.as_str().to_owned()),
            KeyValue::new("url.path", path),
        ]);
        let whole = Context::new().with_span(self.tracer.build_with_context(span, &caller));
        Some(Box::new(RequestSpans::new(self.tracer.clone(), whole, endpoint)))
    }

    /// Sends what there is still to send.
    pub async fn end(&self) {
        let provider = self.provider.clone();
        // It waits for a thread of its own, which needs this one.
        let ended = tokio::task::spawn_blocking(move || provider.shutdown_with_timeout(LAST_SPANS)).await;
        if !matches!(ended, Ok(Ok(()))) {
            tracing::warn!("the last spans could not be sent");
        }
    }
}

/// A trace and a span as the header names them.
fn traceparent((trace, span): (u128, u64), flags: TraceFlags) -> HeaderValue {
    let mut digits = *b"00-00000000000000000000000000000000-0000000000000000-00";
    let mut write = |bytes: &[u8], at: usize| {
        let nibbles = bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]);
        for (digit, nibble) in digits[at..].iter_mut().zip(nibbles) {
            *digit = b"0123456789abcdef"[usize::from(nibble)];
        }
    };
    write(&trace.to_be_bytes(), 3);
    write(&span.to_be_bytes(), 36);
    write(&[flags.to_u8()], 53);
    HeaderValue::from_bytes(&digits).expect("hexadecimal digits are a value")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_has_a_name_that_a_header_can_carry() {
        let told = traceparent(
            (0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736, 0x00f0_67aa_0ba9_02b7),
            TraceFlags::SAMPLED,
        );
        assert_eq!(told, "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01");
    }
}
