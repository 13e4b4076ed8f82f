//! What became of requests, as OpenTelemetry's spans: which stage took how long, who was asked, and why.
//!
//! A caller's trace is gone on with, and engines that are told of it (`traceparent`, W3C Trace Context) put their own spans below those of the attempts here. No
//! text of a request is in a span, nor whose it is. What is said of one request is in [`request`]; how spans leave the process, in [`collector`].

mod attempt;
pub mod collector;
mod request;
mod trouble;

use std::mem;
use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue, Method};
use opentelemetry::propagation::TextMapPropagator;
use opentelemetry::trace::{SpanKind, TraceContextExt, TraceFlags, Tracer, TracerProvider};
use opentelemetry::{Context, KeyValue};
use opentelemetry_http::HeaderExtractor;
use opentelemetry_otlp::ExporterBuildError;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{
    BatchConfigBuilder, BatchSpanProcessor, Sampler, SdkTracer, SdkTracerProvider,
};

use self::collector::{Collector, Counting, SpanCounters};
use crate::routes::Endpoint;
use crate::transport::AddressError;

pub use self::attempt::AttemptSpan;
pub use self::request::{End, RequestSpans, in_short};

/// Header that says which trace a request belongs to (W3C Trace Context, 3.2).
pub const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
/// And what others have to say of it (3.3).
const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// Spans that wait to be sent, some kilobyte each; more are left out. At 10,000 requests a second this is half a second of them.
const MOST_WAITING: usize = 16_384;
/// How many go at once: half a megabyte.
const AT_ONCE: usize = 512;
/// And how often, if they are fewer: whoever has just asked something wants to see it.
const SENT_EVERY: Duration = Duration::from_secs(1);
/// Time for the last ones to be sent when the process ends, which has been draining before.
const LAST_SPANS: Duration = Duration::from_secs(3);
/// What the router is called unless the environment says otherwise.
const SERVICE: &str = "roundhouse-router";

/// Why spans cannot be sent.
#[derive(Debug, thiserror::Error)]
pub enum SpansError {
    /// To that address, ever.
    #[error("otlp-traces-endpoint: {0}")]
    Address(#[from] AddressError),
    /// By that configuration.
    #[error("otlp-traces-endpoint: {0}")]
    Exporter(#[from] ExporterBuildError),
    /// With what the collector wants to be shown.
    #[error("{name}: write name=value, and commas between several")]
    Headers {
        /// The environment variable.
        name: &'static str,
    },
}

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
    /// [`SpansError`].
    pub fn start(collector: Collector, share: f64, counters: &SpanCounters) -> Result<Self, SpansError> {
        let (exporter, waiting) = collector.exporter(counters)?;
        let batches = BatchConfigBuilder::default()
            // What would be too many is left out, and counted, before it comes there.
            .with_max_queue_size(2 * MOST_WAITING)
            .with_max_export_batch_size(AT_ONCE)
            .with_scheduled_delay(SENT_EVERY);
        let batches = BatchSpanProcessor::builder(exporter).with_batch_config(batches.build()).build();
        let version = KeyValue::new("service.version", env!("CARGO_PKG_VERSION"));
        let resource = Resource::builder().with_attribute(version);
        let resource = if has_name() { resource } else { resource.with_service_name(SERVICE) };
        let provider = SdkTracerProvider::builder()
            .with_resource(resource.build())
            // What is sampled is decided before there is a span.
            .with_sampler(Sampler::AlwaysOn)
            .with_span_processor(Counting::new(batches, (counters, waiting, MOST_WAITING)))
            .build();
        // Dropped, the last one would wait for what is still to be sent, and on the very thread that sends it: a process that is told to end at once is to.
        mem::forget(provider.clone());
        Ok(Self { tracer: provider.tracer("router"), provider, share })
    }

    /// Begins the spans of a request that has just come, or says in its `headers` that it has none.
    pub fn begin(
        &self,
        (method, path, endpoint): (&Method, String, Endpoint),
        headers: &mut HeaderMap,
    ) -> Option<Box<RequestSpans>> {
        let caller = callers(headers);
        if let Some(caller) = &caller
            && !caller.span().span_context().is_sampled()
        {
            return None;
        }
        if caller.is_none() {
            // What it says is of no trace that is gone on with.
            headers.remove(TRACESTATE);
            if rand::random::<f64>() >= self.share {
                // So that engines do not decide anew.
                let told = traceparent((rand::random(), rand::random()), TraceFlags::default());
                headers.insert(TRACEPARENT, told);
                return None;
            }
        }
        let mut span = self.tracer.span_builder(endpoint.label()).with_kind(SpanKind::Server);
        let mut attributes = vec![KeyValue::new("http.request.method", method.as_str().to_owned())];
        // Elsewhere it may name what is a client's.
        if endpoint != Endpoint::Relayed {
            attributes.push(KeyValue::new("url.path", path));
        }
        span.attributes = Some(attributes);
        let span = self.tracer.build_with_context(span, &caller.unwrap_or_default());
        let whole = Context::new().with_span(span);
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

/// Whether the environment names the service.
fn has_name() -> bool {
    let said = |name| std::env::var(name).unwrap_or_default();
    !said("OTEL_SERVICE_NAME").is_empty() || said("OTEL_RESOURCE_ATTRIBUTES").contains("service.name=")
}

/// The trace that a request is part of, if it is of one.
fn callers(headers: &HeaderMap) -> Option<Context> {
    let mut values = headers.get_all(TRACEPARENT).iter();
    let is_one = is_traceparent(values.next()?.as_bytes()) && values.next().is_none();
    let extract =
        || TraceContextPropagator::new().extract_with_context(&Context::new(), &HeaderExtractor(headers));
    is_one.then(extract).filter(|caller| caller.span().span_context().is_valid())
}

/// Whether it has the standard's form, where OpenTelemetry takes others for it; a later version may have more behind that (3.2.2 and 3.2.4).
fn is_traceparent(value: &[u8]) -> bool {
    const FORM: &[u8; 55] = b"hh-hhhhhhhhhhhhhhhhhhhhhhhhhhhhhhhh-hhhhhhhhhhhhhhhh-hh";
    let fits = |(byte, form): (&u8, &u8)| match form {
        b'h' => matches!(byte, b'0'..=b'9' | b'a'..=b'f'),
        _ => byte == form,
    };
    let has_form = value.len() >= FORM.len() && value.iter().zip(FORM).all(fits);
    let ends = match value.get(FORM.len()) {
        None => true,
        Some(next) => *next == b'-' && !value.starts_with(b"00"),
    };
    has_form && ends && !value.starts_with(b"ff")
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
    fn a_trace_is_a_callers_if_it_is_said_as_the_standard_says() {
        let right = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        for (told, is_one) in [
            (vec![right], true),
            (vec!["cc-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more"], true),
            (vec!["ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"], false),
            (vec!["00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more"], false),
            (vec!["00-4BF92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"], false),
            (vec!["00-00000000000000000000000000000000-00f067aa0ba902b7-01"], false),
            (vec!["00-1-2-1"], false),
            (vec![right, right], false),
            (vec![], false),
        ] {
            let mut headers = HeaderMap::new();
            for value in &told {
                headers.append(TRACEPARENT, HeaderValue::from_static(value));
            }
            assert_eq!(callers(&headers).is_some(), is_one, "{told:?}");
        }
    }

    #[test]
    fn a_span_has_a_name_that_a_header_can_carry() {
        let told = traceparent(
            (0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736, 0x00f0_67aa_0ba9_02b7),
            TraceFlags::SAMPLED,
        );
        assert_eq!(told, "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01");
    }
}
