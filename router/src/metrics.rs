//! What operators see. Labels are bounded: endpoints and outcomes are fixed sets, workers are those of the fleet.

use http::StatusCode;
use prometheus::{
    Encoder, Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry,
    TextEncoder,
};
use roundhouse_types::Usage;

use crate::app::App;
use crate::error::Blame;
use crate::listener::metrics::ListenerMetrics;
use crate::routes::Endpoint;

/// From a millisecond to ten minutes: first tokens of a cached prompt and of a very long one.
const SECONDS: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
    600.0,
];

/// How an attempt at a worker can end: by the class of its status, without an answer, in the middle of it, or because the
/// client left.
pub const ATTEMPT_OUTCOMES: [&str; 8] = ["2xx", "3xx", "429", "4xx", "5xx", "failed", "broken", "cancelled"];

/// All metrics of the router.
pub struct Metrics {
    registry: Registry,
    /// Of connections.
    pub listener: ListenerMetrics,
    requests: IntCounterVec,
    errors: IntCounterVec,
    attempts: IntCounterVec,
    /// Attempts after the first.
    pub retries: IntCounter,
    /// Time to the first piece of the reply.
    pub ttft_seconds: Histogram,
    /// Time between two pieces of a reply.
    pub itl_seconds: Histogram,
    /// Time to the end of the reply.
    pub e2e_seconds: Histogram,
    tokens: IntCounterVec,
    cached_tokens: IntCounterVec,
    in_flight: IntGauge,
    worker_in_flight: IntGaugeVec,
    worker_prefill_tokens: IntGaugeVec,
    worker_up: IntGaugeVec,
    tree_blocks: IntGauge,
}

/// Registers metrics while it builds them.
struct Maker(Registry);

impl Maker {
    fn add<M: prometheus::core::Collector + Clone + 'static>(&self, metric: prometheus::Result<M>) -> M {
        let metric = metric.expect("names and labels are constants, and valid");
        self.0.register(Box::new(metric.clone())).expect("every name is registered once");
        metric
    }

    fn counters(&self, name: &str, help: &str, labels: &[&str]) -> IntCounterVec {
        self.add(IntCounterVec::new(Opts::new(name, help), labels))
    }

    fn gauges(&self, name: &str, help: &str, labels: &[&str]) -> IntGaugeVec {
        self.add(IntGaugeVec::new(Opts::new(name, help), labels))
    }

    fn gauge(&self, name: &str, help: &str) -> IntGauge {
        self.add(IntGauge::new(name, help))
    }

    fn seconds(&self, name: &str, help: &str) -> Histogram {
        self.add(Histogram::with_opts(HistogramOpts::new(name, help).buckets(SECONDS.to_vec())))
    }
}

impl Default for Metrics {
    fn default() -> Self {
        let maker = Maker(Registry::new());
        Self {
            listener: ListenerMetrics::new(&maker.0),
            requests: maker.counters(
                "router_requests_total",
                "Requests by endpoint and status; 499: the client left.",
                &["endpoint", "status"],
            ),
            errors: maker.counters(
                "router_errors_total",
                "Failed requests by whose fault it was.",
                &["blame"],
            ),
            attempts: maker.counters(
                "router_worker_attempts_total",
                "Attempts by worker and how they ended.",
                &["worker", "outcome"],
            ),
            retries: maker.add(IntCounter::new("router_retries_total", "Attempts after a request's first.")),
            ttft_seconds: maker
                .seconds("router_ttft_seconds", "From a request's arrival to the first piece of its reply."),
            itl_seconds: maker.seconds("router_itl_seconds", "Between two pieces of one reply."),
            e2e_seconds: maker
                .seconds("router_e2e_seconds", "From a request's arrival to the end of its reply."),
            tokens: maker.counters("router_tokens_total", "Tokens as workers report them.", &["kind"]),
            cached_tokens: maker.counters(
                "router_cached_tokens_total",
                "Prompt tokens found in a prefix cache: as the router predicted, and as workers report.",
                &["source"],
            ),
            in_flight: maker.gauge("router_requests_in_flight", "Requests in flight."),
            worker_in_flight: maker.gauges(
                "router_worker_requests_in_flight",
                "The same by worker.",
                &["worker"],
            ),
            worker_prefill_tokens: maker.gauges(
                "router_worker_prefill_tokens",
                "Uncached prompt tokens of requests without a first token, by worker.",
                &["worker"],
            ),
            worker_up: maker.gauges("router_worker_up", "1 if requests may go to the worker.", &["worker"]),
            tree_blocks: maker
                .gauge("router_prefix_tree_blocks", "Blocks held in the prefix tree, over all workers."),
            registry: maker.0,
        }
    }
}

impl Metrics {
    /// A request has been answered with `status`.
    pub fn request(&self, endpoint: Endpoint, status: StatusCode) {
        self.requests.with_label_values(&[endpoint.label(), status.as_str()]).inc();
    }

    /// A request has failed.
    pub fn error(&self, blame: Blame) {
        self.errors.with_label_values(&[blame.label()]).inc();
    }

    /// An attempt at `worker` has ended.
    pub fn attempt(&self, worker: &str, outcome: &str) {
        self.attempts.with_label_values(&[worker, outcome]).inc();
    }

    /// `worker` has left: its series end, so that their number stays bounded while workers come and go.
    pub fn forget_worker(&self, worker: &str) {
        for outcome in ATTEMPT_OUTCOMES {
            // Most workers have not seen every outcome.
            let _ = self.attempts.remove_label_values(&[worker, outcome]);
        }
    }

    /// A reply has reported its usage.
    pub fn usage(&self, usage: &Usage, predicted_tokens: usize) {
        self.tokens.with_label_values(&["prompt"]).inc_by(usage.prompt_tokens.into());
        self.tokens.with_label_values(&["completion"]).inc_by(usage.completion_tokens.into());
        self.cached_tokens.with_label_values(&["predicted"]).inc_by(predicted_tokens as u64);
        self.cached_tokens.with_label_values(&["reported"]).inc_by(usage.cached_tokens.into());
    }

    /// Everything in Prometheus' text format.
    #[must_use]
    pub fn render(&self, app: &App) -> Vec<u8> {
        self.read_state(app);
        let mut text = Vec::new();
        TextEncoder::new()
            .encode(&self.registry.gather(), &mut text)
            .expect("writing to memory does not fail");
        text
    }

    /// Gauges are read when they are asked for, not kept up with every request.
    fn read_state(&self, app: &App) {
        let gauge = |value: usize| i64::try_from(value).unwrap_or(i64::MAX);
        self.in_flight.set(gauge(app.admission.in_flight()));
        self.tree_blocks.set(gauge(app.decider.tree_blocks()));
        for gauges in [&self.worker_in_flight, &self.worker_prefill_tokens, &self.worker_up] {
            // Workers that have left are not shown any more.
            gauges.reset();
        }
        for worker in app.fleet.roster().snapshot.workers() {
            let (id, load) = ([worker.id().as_str()], worker.load.read());
            self.worker_in_flight.with_label_values(&id).set(gauge(load.requests));
            self.worker_prefill_tokens.with_label_values(&id).set(gauge(load.prefill_tokens));
            self.worker_up.with_label_values(&id).set(i64::from(worker.is_usable()));
        }
    }
}
