//! What operators see of the routers beside this one. Labels are bounded: two directions, and the workers that there are.

use prometheus::{IntGaugeVec, Opts, Registry};
use router_core::Worker;

use super::Replicas;

/// Gauges; they are set when somebody looks.
#[derive(Clone, Debug)]
pub struct ReplicaMetrics {
    connected: IntGaugeVec,
    worker_requests: IntGaugeVec,
}

impl ReplicaMetrics {
    /// Makes the metrics, and registers them.
    #[must_use]
    pub fn new(registry: &Registry) -> Self {
        let metrics = Self::unregistered().expect("names and labels are constants, and valid");
        for metric in [&metrics.connected, &metrics.worker_requests] {
            registry.register(Box::new(metric.clone())).expect("every name is registered once");
        }
        metrics
    }

    fn unregistered() -> prometheus::Result<Self> {
        let connected = Opts::new(
            "router_replicas",
            "Other routers that are told what this one does, and that tell what they do.",
        );
        let worker_requests = Opts::new(
            "router_worker_replica_requests",
            "Requests in flight at a worker that other routers have told of.",
        );
        Ok(Self {
            connected: IntGaugeVec::new(connected, &["direction"])?,
            worker_requests: IntGaugeVec::new(worker_requests, &["worker"])?,
        })
    }

    /// Shows what is connected now, and what others have at these workers.
    pub fn show<'a>(&self, replicas: &Replicas, workers: impl Iterator<Item = &'a Worker>) {
        let gauge = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        for (direction, count) in [("told", replicas.told()), ("heard", replicas.heard())] {
            self.connected.with_label_values(&[direction]).set(gauge(count));
        }
        // Workers that have left are not shown any more.
        self.worker_requests.reset();
        for worker in workers {
            self.worker_requests.with_label_values(&[worker.id().as_str()]).set(gauge(worker.load.others()));
        }
    }
}
