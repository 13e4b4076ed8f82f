//! Where spans go: a collector that takes OTLP over HTTP.
//!
//! The messages are OpenTelemetry's, and that they are sent up to three times more where the collector is busy or cannot be reached; the connection is ours, as to any worker, and
//! shows none of the workers' keys. What the collector wants to be shown stands in OTEL_EXPORTER_OTLP_HEADERS.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use http::uri::PathAndQuery;
use http::{Request, Response, Uri};
use http_body_util::{BodyExt, Limited};
use opentelemetry::Context;
use opentelemetry_http::{HttpClient, HttpError};
use opentelemetry_otlp::{Protocol, WithExportConfig, WithHttpConfig};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceResponse;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{Span, SpanData, SpanExporter, SpanProcessor};
use prometheus::IntCounter;
use prost::Message as _;
use router_core::{WorkerId, WorkerSpec};
use rustls::pki_types::CertificateDer;
use tokio::runtime::Handle;
use tokio::time::timeout;

use super::SpansError;
use super::trouble::Trouble;
use crate::keys::WorkerKeys;
use crate::transport::{Connector, HttpTransport, Transport, TransportError, WorkerRequest};

/// Where collectors take traces, if an address does not say it.
const TRACES: &str = "/v1/traces";
/// Where they take gRPC, which we do not speak to them.
const GRPC_PORT: u16 = 4_317;
/// Time for a batch to be taken: as long as OpenTelemetry's exporters give it.
const TAKEN_WITHIN: Duration = Duration::from_secs(10);
/// Of an answer: it may say how many spans were refused, and why.
const MOST_BYTES: usize = 64 << 10;
/// What it wants to be shown: the second counts if the first is not there.
const HEADERS: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS"];

/// Where a collector is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CollectorAddress {
    /// `scheme://host:port`.
    origin: String,
    path: PathAndQuery,
}

impl CollectorAddress {
    /// Reads `http://host[:port][/path]` or the same with `https`.
    ///
    /// # Errors
    /// What would be right.
    pub fn parse(text: &str) -> Result<Self, String> {
        // Of one that has a key in it no more is said.
        let shown = if text.contains(['@', '?']) { "this" } else { text };
        let wrong = || {
            format!("{shown} is no address of a collector; write http://host:4318, or https://host/v1/traces")
        };
        let uri: Uri = text.parse().map_err(|_| wrong())?;
        let (scheme, usual) = match uri.scheme_str() {
            Some("https") => ("https", 443),
            Some("http") => ("http", 80),
            _ => return Err(wrong()),
        };
        let authority =
            uri.authority().filter(|authority| !authority.as_str().contains('@')).ok_or_else(wrong)?;
        let names_port = authority.as_str() != authority.host();
        let port = if names_port {
            authority.port_u16().filter(|port| *port != 0).ok_or_else(wrong)?
        } else {
            usual
        };
        if port == GRPC_PORT {
            return Err(format!(
                "{shown} is where collectors take gRPC; write the port for HTTP, usually 4318"
            ));
        }
        let path = uri.path_and_query().filter(|path| path.as_str() != "/").cloned();
        Ok(Self {
            origin: format!("{scheme}://{}:{port}", authority.host()),
            path: path.unwrap_or(PathAndQuery::from_static(TRACES)),
        })
    }
}

/// Counts spans, and what became of them.
#[derive(Clone, Debug)]
pub struct SpanCounters {
    /// Those that have ended.
    pub ended: IntCounter,
    /// That a collector has taken.
    pub sent: IntCounter,
    /// That it has said of that it did not keep them.
    pub rejected: IntCounter,
    /// That none has taken.
    pub failed: IntCounter,
    /// That were too many to wait.
    pub left_out: IntCounter,
}

/// A way to a collector.
pub struct Collector {
    address: CollectorAddress,
    transport: Arc<HttpTransport>,
    runtime: Handle,
    /// Why it could not be asked: OpenTelemetry's exporter says no more than that it was so.
    why: Arc<Mutex<Option<String>>>,
    rejects: Trouble,
    rejected: Option<IntCounter>,
}

impl fmt::Debug for Collector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Collector").field(&self.address).finish()
    }
}

impl Collector {
    /// The way to `address`; trusts `authorities` besides the system's. Connections are made on the runtime that this is called in.
    ///
    /// # Errors
    /// When the address is none.
    pub fn new(
        address: CollectorAddress,
        connect_timeout: Duration,
        authorities: Vec<CertificateDer<'static>>,
    ) -> Result<Self, SpansError> {
        let connector = Connector::new(connect_timeout, authorities, WorkerKeys::default());
        let id = WorkerId::new("collector");
        let transport = connector.transport(&WorkerSpec::new(id, address.origin.clone()))?;
        Ok(Self {
            address,
            transport: Arc::new(transport),
            runtime: Handle::current(),
            why: Arc::default(),
            rejects: Trouble::default(),
            rejected: None,
        })
    }

    /// What sends spans there, and a count of those that it has not sent yet.
    pub(super) fn exporter(
        mut self,
        counters: &SpanCounters,
    ) -> Result<(Exporter, Arc<AtomicUsize>), SpansError> {
        let said = |name: &&&str| std::env::var(name).is_ok_and(|value| !value.is_empty());
        if let Some(name) = HEADERS.iter().find(said).copied()
            && std::env::var(name).is_ok_and(|value| value.split(',').any(|header| !header.contains('=')))
        {
            return Err(SpansError::Headers { name });
        }
        let (why, waiting) = (Arc::clone(&self.why), Arc::<AtomicUsize>::default());
        let collector = self.address.origin.clone();
        self.rejected = Some(counters.rejected.clone());
        let otlp = opentelemetry_otlp::SpanExporter::builder()
            .with_http()
            .with_protocol(Protocol::HttpBinary)
            .with_endpoint(format!("{}{}", self.address.origin, self.address.path))
            .with_http_client(self)
            .build()?;
        let (counters, trouble) = (counters.clone(), Trouble::default());
        let exporter = Exporter { otlp, collector, counters, waiting: Arc::clone(&waiting), why, trouble };
        Ok((exporter, waiting))
    }

    /// A collector may take a batch, and say that it does not keep some of it.
    fn read(&self, answer: &Bytes) {
        let told = ExportTraceServiceResponse::decode(answer.clone()).ok();
        let Some(told) = told.and_then(|told| told.partial_success) else { return };
        let rejected = u64::try_from(told.rejected_spans).unwrap_or(0);
        self.rejected.iter().for_each(|counter| counter.inc_by(rejected));
        let why = told.error_message;
        if (rejected > 0 || !why.is_empty()) && self.rejects.is_news(&why, Instant::now()) {
            let collector = &self.address.origin;
            tracing::warn!(collector, rejected, why, "spans were not kept");
        }
    }
}

#[async_trait]
impl HttpClient for Collector {
    /// Called on a thread that runs nothing else, so what is done is done on the runtime.
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let (head, body) = request.into_parts();
        let path = self.address.path.clone();
        let request = WorkerRequest { headers: head.headers, body: body.into(), ..WorkerRequest::post(path) };
        let transport = Arc::clone(&self.transport);
        let exchange = async move {
            let (head, body) = transport.send(&request).await?.into_parts();
            // The head says whether it was taken.
            let body = Limited::new(body, MOST_BYTES).collect().await;
            let body = body.map(http_body_util::Collected::to_bytes).unwrap_or_default();
            Ok::<_, TransportError>(Response::from_parts(head, body))
        };
        let answer = self.runtime.spawn(async { timeout(TAKEN_WITHIN, exchange).await }).await?;
        match answer.unwrap_or(Err(TransportError::Total { limit: TAKEN_WITHIN })) {
            Ok(answer) => {
                if answer.status().is_success() {
                    self.read(answer.body());
                }
                Ok(answer)
            }
            Err(error) => {
                *self.why.lock().unwrap_or_else(PoisonError::into_inner) = Some(error.to_string());
                Err(error.into())
            }
        }
    }
}

/// OpenTelemetry's exporter, with what became of it counted and told.
#[derive(Debug)]
pub(super) struct Exporter {
    otlp: opentelemetry_otlp::SpanExporter,
    collector: String,
    counters: SpanCounters,
    waiting: Arc<AtomicUsize>,
    why: Arc<Mutex<Option<String>>>,
    trouble: Trouble,
}

impl SpanExporter for Exporter {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let spans = batch.len();
        let exported = self.otlp.export(batch).await;
        self.waiting.fetch_sub(spans, Ordering::Relaxed);
        let counter = if exported.is_ok() { &self.counters.sent } else { &self.counters.failed };
        counter.inc_by(spans as u64);
        let why = self.why.lock().unwrap_or_else(PoisonError::into_inner).take();
        let collector = &self.collector;
        match &exported {
            Ok(()) => {
                if self.trouble.ends() {
                    tracing::info!(collector, "spans are sent again");
                }
            }
            Err(error) => {
                let why = why.unwrap_or_else(|| error.to_string());
                if self.trouble.is_news(&why, Instant::now()) {
                    tracing::warn!(collector, spans, why, "spans cannot be sent");
                }
            }
        }
        exported
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.otlp.set_resource(resource);
    }
}

/// Counts what goes by, to whoever is next, and leaves out what is too much.
#[derive(Debug)]
pub(super) struct Counting<P> {
    next: P,
    ended: IntCounter,
    left_out: IntCounter,
    waiting: Arc<AtomicUsize>,
    most_waiting: usize,
}

impl<P> Counting<P> {
    pub(super) fn new(
        next: P,
        (counters, waiting, most_waiting): (&SpanCounters, Arc<AtomicUsize>, usize),
    ) -> Self {
        let (ended, left_out) = (counters.ended.clone(), counters.left_out.clone());
        Self { next, ended, left_out, waiting, most_waiting }
    }
}

impl<P: SpanProcessor> SpanProcessor for Counting<P> {
    fn on_start(&self, span: &mut Span, context: &Context) {
        self.next.on_start(span, context);
    }

    fn on_end(&self, span: SpanData) {
        self.ended.inc();
        if self.waiting.load(Ordering::Relaxed) >= self.most_waiting {
            self.left_out.inc();
            return;
        }
        self.waiting.fetch_add(1, Ordering::Relaxed);
        self.next.on_end(span);
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.next.force_flush()
    }

    fn shutdown_with_timeout(&self, limit: Duration) -> OTelSdkResult {
        self.next.shutdown_with_timeout(limit)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.next.set_resource(resource);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_collectors() {
        for (text, origin, path) in [
            ("http://otel:4318", "http://otel:4318", "/v1/traces"),
            ("http://otel:4318/", "http://otel:4318", "/v1/traces"),
            ("http://127.0.0.1/a?b", "http://127.0.0.1:80", "/a?b"),
            ("https://otlp.example/v1/traces", "https://otlp.example:443", "/v1/traces"),
            ("https://[fd00::1]:9", "https://[fd00::1]:9", "/v1/traces"),
        ] {
            let address = CollectorAddress::parse(text).unwrap();
            assert_eq!((address.origin.as_str(), address.path.as_str()), (origin, path));
        }
        for wrong in
            ["", "otel:4318", "grpc://otel:4318", "http://", "http://otel:0", "http://a@otel", "http://otel:"]
        {
            assert!(CollectorAddress::parse(wrong).unwrap_err().contains("http://host:4318"), "{wrong}");
        }
        assert!(CollectorAddress::parse("http://otel:4317").unwrap_err().contains("4318"));
    }
}
