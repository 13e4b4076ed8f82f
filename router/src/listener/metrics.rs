//! What operators see of connections. Labels are bounded: cores, and the statuses of [`refusal`](super::refusal).

use prometheus::core::Collector;
use prometheus::{IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry};

/// Counters and gauges of the listener.
#[derive(Clone, Debug)]
pub struct ListenerMetrics {
    /// Connections that are open.
    pub connections: IntGauge,
    /// Connections closed at once, since there were too many.
    pub connections_refused: IntCounter,
    /// Streams that are open on each core: HTTP/1 connections, and HTTP/2 streams.
    pub core_streams: IntGaugeVec,
    /// All streams that each core has had.
    pub core_streams_total: IntCounterVec,
    refused_heads: IntCounterVec,
}

impl ListenerMetrics {
    /// Makes the metrics, and registers them.
    #[must_use]
    pub fn new(registry: &Registry) -> Self {
        let metrics = Self::unregistered().expect("names and labels are constants, and valid");
        let all: [Box<dyn Collector>; 5] = [
            Box::new(metrics.connections.clone()),
            Box::new(metrics.connections_refused.clone()),
            Box::new(metrics.core_streams.clone()),
            Box::new(metrics.core_streams_total.clone()),
            Box::new(metrics.refused_heads.clone()),
        ];
        for metric in all {
            registry.register(metric).expect("every name is registered once");
        }
        metrics
    }

    fn unregistered() -> prometheus::Result<Self> {
        Ok(Self {
            connections: IntGauge::new("router_connections", "Client connections that are open.")?,
            connections_refused: IntCounter::new(
                "router_connections_refused_total",
                "Client connections closed at once, since --max-connections were open.",
            )?,
            core_streams: IntGaugeVec::new(
                Opts::new(
                    "router_core_streams",
                    "Open streams by core: HTTP/1 connections and HTTP/2 streams.",
                ),
                &["core"],
            )?,
            core_streams_total: IntCounterVec::new(
                Opts::new("router_core_streams_total", "Streams that each core has been given."),
                &["core"],
            )?,
            refused_heads: IntCounterVec::new(
                Opts::new(
                    "router_protocol_errors_total",
                    "What clients sent that was no proper request, by the status of the answer.",
                ),
                &["status"],
            )?,
        })
    }

    /// Something that came was no request.
    pub fn refused_head(&self, status: http::StatusCode) {
        self.refused_heads.with_label_values(&[status.as_str()]).inc();
    }
}
