//! Where spans go: a collector that takes OTLP over HTTP.
//!
//! The messages and their retries are OpenTelemetry's; the connection is ours, as to any worker, and shows none of the workers' keys. What the collector wants to be shown
//! stands in OTEL_EXPORTER_OTLP_HEADERS.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use http::uri::PathAndQuery;
use http::{Request, Response, Uri};
use http_body_util::{BodyExt, Limited};
use opentelemetry::Context;
use opentelemetry_http::{HttpClient, HttpError};
use opentelemetry_otlp::{Protocol, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{Span, SpanData, SpanExporter, SpanProcessor};
use prometheus::IntCounter;
use router_core::{WorkerId, WorkerSpec};
use rustls::pki_types::CertificateDer;
use tokio::runtime::Handle;
use tokio::time::timeout;

use crate::failure_logs::FailureLogs;
use crate::keys::WorkerKeys;
use crate::transport::{Connector, HttpTransport, Transport, WorkerRequest};

/// Where collectors take traces, if an address does not say it.
const TRACES: &str = "/v1/traces";
/// Where they take gRPC, which we do not speak to them.
const GRPC_PORT: u16 = 4_317;
/// Time for a batch to be taken.
const TAKEN_WITHIN: Duration = Duration::from_secs(10);
/// Of an answer: it says how many spans were refused, and why.
const MOST_BYTES: usize = 64 << 10;

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
        let wrong = || {
            format!(
                "{text:?} is no address of a collector; write http://host:4318, or https://host/v1/traces"
            )
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
                "{text:?} is where collectors take gRPC; write the port for HTTP, usually 4318"
            ));
        }
        let path = uri.path_and_query().filter(|path| path.as_str() != "/").cloned();
        Ok(Self {
            origin: format!("{scheme}://{}:{port}", authority.host()),
            path: path.unwrap_or(PathAndQuery::from_static(TRACES)),
        })
    }
}

/// Counts spans: those that ended, and what became of them. What is neither sent nor failed waits, or was left out.
#[derive(Clone, Debug)]
pub struct SpanCounters {
    /// That have ended.
    pub ended: IntCounter,
    /// That a collector has taken.
    pub sent: IntCounter,
    /// That none has.
    pub failed: IntCounter,
}

/// A way to a collector.
pub struct Collector {
    address: CollectorAddress,
    transport: Arc<HttpTransport>,
    runtime: Handle,
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
    ) -> Result<Self, String> {
        let connector = Connector::new(connect_timeout, authorities, WorkerKeys::default());
        let id = WorkerId::new("collector");
        let transport = connector.transport(&WorkerSpec::new(id, address.origin.clone()));
        let transport = transport.map_err(|error| error.to_string())?;
        Ok(Self { address, transport: Arc::new(transport), runtime: Handle::current() })
    }

    pub(super) fn exporter(self, counters: &SpanCounters) -> Result<Exporter, String> {
        let endpoint = format!("{}{}", self.address.origin, self.address.path);
        let otlp = opentelemetry_otlp::SpanExporter::builder()
            .with_http()
            .with_protocol(Protocol::HttpBinary)
            .with_endpoint(&endpoint)
            .with_http_client(self)
            .build()
            .map_err(|error| error.to_string())?;
        Ok(Exporter { otlp, endpoint, counters: counters.clone(), logs: FailureLogs::default() })
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
            let body = Limited::new(body, MOST_BYTES).collect().await?.to_bytes();
            Ok(Response::from_parts(head, body))
        };
        self.runtime.spawn(async { timeout(TAKEN_WITHIN, exchange).await }).await??
    }
}

/// OpenTelemetry's exporter, with what became of it counted and told.
#[derive(Debug)]
pub(super) struct Exporter {
    otlp: opentelemetry_otlp::SpanExporter,
    endpoint: String,
    counters: SpanCounters,
    logs: FailureLogs,
}

impl SpanExporter for Exporter {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let spans = batch.len();
        let exported = self.otlp.export(batch).await;
        let counter = if exported.is_ok() { &self.counters.sent } else { &self.counters.failed };
        counter.inc_by(spans as u64);
        if let Err(error) = &exported
            && self.logs.allow(&"spans")
        {
            tracing::warn!(collector = self.endpoint, spans, %error, "spans could not be sent");
        }
        exported
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.otlp.set_resource(resource);
    }
}

/// Counts what goes by, to whoever is next.
#[derive(Debug)]
pub(super) struct Counting<P> {
    next: P,
    ended: IntCounter,
}

impl<P> Counting<P> {
    pub(super) fn new(next: P, counters: &SpanCounters) -> Self {
        Self { next, ended: counters.ended.clone() }
    }
}

impl<P: SpanProcessor> SpanProcessor for Counting<P> {
    fn on_start(&self, span: &mut Span, context: &Context) {
        self.next.on_start(span, context);
    }

    fn on_end(&self, span: SpanData) {
        self.ended.inc();
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
