//! What operators see. Labels are bounded: endpoints and outcomes are fixed sets, workers are those of the fleet.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwap;
use http::StatusCode;
use prometheus::{
    Encoder, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge,
    IntGaugeVec, Opts, Registry, TextEncoder,
};
use router_core::prefix::index::Comparison;
use router_core::{BreakerState, Demand, Role, Worker, WorkerId};

use crate::app::App;
use crate::error::Blame;
use crate::listener::metrics::ListenerMetrics;
use crate::logs;
use crate::openai::usage::ReportedUsage;
use crate::replicas::metrics::ReplicaMetrics;
use crate::routes::Endpoint;
use crate::spans::collector::SpanCounters;

/// From a millisecond to ten minutes: first tokens of a cached prompt and of a very long one.
const SECONDS: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
    600.0,
];

/// From exactly right over an engine's own block to a very long prompt.
const TOKENS: &[f64] = &[0.0, 16.0, 64.0, 256.0, 1_024.0, 4_096.0, 16_384.0, 65_536.0, 262_144.0];

/// How an attempt at a worker can end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AttemptOutcome {
    /// With an answer, by the class of its status.
    Success,
    /// 3xx.
    Redirect,
    /// 429.
    Busy,
    /// Another 4xx.
    ClientError,
    /// Anything else.
    ServerError,
    /// Without an answer.
    Failed,
    /// In the middle of its answer; it has been counted by its status as well.
    Broken,
    /// The client left, or the router had to end.
    Cancelled,
}

/// Label values of [`AttemptOutcome`], in its order.
const OUTCOME_LABELS: [&str; 8] = ["2xx", "3xx", "429", "4xx", "5xx", "failed", "broken", "cancelled"];

impl From<StatusCode> for AttemptOutcome {
    fn from(status: StatusCode) -> Self {
        match status.as_u16() {
            200..=299 => Self::Success,
            300..=399 => Self::Redirect,
            429 => Self::Busy,
            400..=499 => Self::ClientError,
            _ => Self::ServerError,
        }
    }
}

/// One worker's attempt counters, so that a request does not look them up by their labels.
struct WorkerCounters {
    worker: WorkerId,
    attempts: [IntCounter; OUTCOME_LABELS.len()],
}

/// All metrics of the router.
pub struct Metrics {
    registry: Registry,
    /// Of connections.
    pub listener: ListenerMetrics,
    replicas: ReplicaMetrics,
    requests: IntCounterVec,
    /// The counters of [`Metrics::requests`] for status 200, by endpoint.
    requests_ok: [IntCounter; Endpoint::ALL.len()],
    errors: IntCounterVec,
    attempts: IntCounterVec,
    /// The counters of [`Metrics::attempts`], by worker slot.
    worker_counters: ArcSwap<Vec<Option<Arc<WorkerCounters>>>>,
    /// Who has series among [`Metrics::attempts`]. A slot tells that of its last worker alone.
    named: Mutex<HashSet<WorkerId>>,
    /// Attempts after the first.
    pub retries: IntCounter,
    /// Retries that the budget did not allow.
    pub retries_refused: IntCounter,
    /// Streams that broke off and were gone on with.
    pub continued: IntCounter,
    /// Spans of requests.
    pub spans: SpanCounters,
    /// Attempts at two workers, of which one computes the prompt.
    pub splits: IntCounter,
    /// Time to the first piece of the reply.
    pub ttft_seconds: Histogram,
    /// How long requests that were in line waited there.
    pub line_seconds: Histogram,
    /// How long requests waited in the background for time to spare.
    pub background_seconds: Histogram,
    /// Time between two pieces of a reply.
    pub itl_seconds: Histogram,
    /// Time to the end of the reply.
    pub e2e_seconds: Histogram,
    prompt_tokens: IntCounter,
    completion_tokens: IntCounter,
    predicted_cached_tokens: IntCounter,
    reported_cached_tokens: IntCounter,
    /// By direction: what was expected and not there, and what was there and not expected.
    prediction_error_over: Histogram,
    prediction_error_under: Histogram,
    /// By direction: first tokens that came after they were expected, and before.
    first_token_late: Histogram,
    first_token_early: Histogram,
    /// Blocks that the tree forgot because a worker turned out not to have them.
    pub corrected_blocks: IntCounter,
    in_flight: IntGauge,
    queued: IntGauge,
    in_background: IntGauge,
    body_bytes: IntGauge,
    worker_in_flight: IntGaugeVec,
    worker_in_line: IntGaugeVec,
    worker_recomputed: GaugeVec,
    worker_prefill_tokens: IntGaugeVec,
    worker_up: IntGaugeVec,
    worker_stands_still: IntGaugeVec,
    worker_models_known: IntGaugeVec,
    worker_connections: IntGaugeVec,
    worker_breaker: IntGaugeVec,
    worker_draining: IntGaugeVec,
    worker_cache_trust: IntGaugeVec,
    worker_others: IntGaugeVec,
    demand_workers: GaugeVec,
    usable_workers: IntGaugeVec,
    tree_blocks: IntGauge,
    discovery_failures: IntCounterVec,
    discovery_workers: IntGaugeVec,
    discovery_age: GaugeVec,
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
        let requests = maker.counters(
            "router_requests_total",
            "Requests by endpoint and status; 499: the client left.",
            &["endpoint", "status"],
        );
        let tokens = maker.counters("router_tokens_total", "Tokens as workers report them.", &["kind"]);
        let prediction_error = maker.add(HistogramVec::new(
            HistogramOpts::new(
                "router_prefix_prediction_error_tokens",
                "Difference between the prompt tokens that the router expected in a worker's cache and those that the worker \
                 found there, of replies that say so. over: expected more, or just as many; under: expected fewer.",
            )
            .buckets(TOKENS.to_vec()),
            &["direction"],
        ));
        let first_tokens = maker.add(HistogramVec::new(
            HistogramOpts::new(
                "router_ttft_prediction_error_seconds",
                "Difference between when the first token of a stream, or the end of a prompt that is computed apart, was expected when its worker was picked (what this router knew to \
                 wait there before it, and its own prompt) and when it came. late: after that, or just then; early: before.",
            )
            .buckets(SECONDS.to_vec()),
            &["direction"],
        ));
        maker.add(Ok(logs::dropped_lines()));
        let cached_tokens = maker.counters(
            "router_cached_tokens_total",
            "Prompt tokens found in a prefix cache: as the router predicted, and as workers report.",
            &["source"],
        );
        let spans = maker.counters(
            "router_spans_total",
            "Spans of requests: that have ended, that were sent to the collector, that it has rejected of these, that it has not taken (failed), and that were too many to wait (left_out).",
            &["state"],
        );
        Self {
            listener: ListenerMetrics::new(&maker.0),
            replicas: ReplicaMetrics::new(&maker.0),
            requests_ok: Endpoint::ALL.map(|endpoint| requests.with_label_values(&[endpoint.label(), "200"])),
            requests,
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
            worker_counters: ArcSwap::default(),
            named: Mutex::default(),
            retries: maker.add(IntCounter::new("router_retries_total", "Attempts after a request's first.")),
            continued: maker.add(IntCounter::new(
                "router_streams_continued_total",
                "Streams that broke off at one worker and were gone on with by another.",
            )),
            spans: SpanCounters {
                ended: spans.with_label_values(&["ended"]),
                sent: spans.with_label_values(&["sent"]),
                rejected: spans.with_label_values(&["rejected"]),
                failed: spans.with_label_values(&["failed"]),
                left_out: spans.with_label_values(&["left_out"]),
            },
            retries_refused: maker.add(IntCounter::new(
                "router_retries_refused_total",
                "Failures relayed because the retry budget was used up.",
            )),
            splits: maker.add(IntCounter::new(
                "router_split_attempts_total",
                "Attempts in which one worker computes the prompt and another generates.",
            )),
            line_seconds: maker.seconds(
                "router_line_seconds",
                "How long requests that had to wait for room at a worker waited in line, also those that got none.",
            ),
            background_seconds: maker.seconds(
                "router_background_seconds",
                "How long requests in the background waited until a worker had time to spare for them, also those that got none.",
            ),
            ttft_seconds: maker
                .seconds("router_ttft_seconds", "From a request's arrival to the first piece of its reply; not of those in the background."),
            itl_seconds: maker.seconds("router_itl_seconds", "Between two pieces of one reply; not of those in the background."),
            e2e_seconds: maker
                .seconds("router_e2e_seconds", "From a request's arrival to the end of its reply; not of those in the background."),
            prompt_tokens: tokens.with_label_values(&["prompt"]),
            completion_tokens: tokens.with_label_values(&["completion"]),
            predicted_cached_tokens: cached_tokens.with_label_values(&["predicted"]),
            reported_cached_tokens: cached_tokens.with_label_values(&["reported"]),
            prediction_error_over: prediction_error.with_label_values(&["over"]),
            prediction_error_under: prediction_error.with_label_values(&["under"]),
            first_token_late: first_tokens.with_label_values(&["late"]),
            first_token_early: first_tokens.with_label_values(&["early"]),
            corrected_blocks: maker.add(IntCounter::new(
                "router_prefix_corrected_blocks_total",
                "Blocks of the prefix tree that were forgotten because a worker's reply said that it had evicted them.",
            )),
            in_flight: maker.gauge("router_requests_in_flight", "Requests in flight."),
            queued: maker
                .gauge("router_requests_queued", "Requests that wait for a place among those in flight."),
            worker_connections: maker.gauges(
                "router_worker_connections",
                "Connections to a worker, by whether they carry a request.",
                &["worker", "state"],
            ),
            in_background: maker.gauge(
                "router_requests_in_background",
                "Requests in the background that wait until a worker has time to spare for them.",
            ),
            body_bytes: maker.gauge("router_request_body_bytes", "Memory that the bodies of requests hold."),
            worker_recomputed: maker.add(GaugeVec::new(
                Opts::new(
                    "router_worker_recomputed_ratio",
                    "Share of what a worker computed of late that the fleet had computed a short time before, and evicted. From 0.4 on \
                     requests wait for those that add to its cache already.",
                ),
                &["worker"],
            )),
            worker_in_line: maker.gauges(
                "router_worker_requests_in_line",
                "Requests that wait in the router until a worker has room for them; they count as in flight there too.",
                &["worker"],
            ),
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
            worker_stands_still: maker.gauges(
                "router_worker_stands_still",
                "1 while the worker is out since its engine hangs: it had requests, and generated nothing for --stall-timeout.",
                &["worker"],
            ),
            worker_up: maker.gauges(
                "router_worker_up",
                "1 if the worker can be reached and is well.",
                &["worker"],
            ),
            worker_models_known: maker.gauges(
                "router_worker_models_known",
                "1 if the worker has listed its models. One that has not gets no request for a model that another lists.",
                &["worker"],
            ),
            worker_breaker: maker.gauges(
                "router_worker_breaker",
                "The worker's circuit breaker. 0: closed, 1: half-open, 2: open.",
                &["worker"],
            ),
            worker_draining: maker.gauges(
                "router_worker_draining",
                "1 if an operator wants the worker to get no new requests.",
                &["worker"],
            ),
            worker_others: maker.gauges(
                "router_worker_others_requests",
                "Requests at a worker that are neither this router's nor of those that tell it, of late, as the worker says; absent if it does not.",
                &["worker"],
            ),
            worker_cache_trust: maker.gauges(
                "router_worker_cache_trust",
                "What the router's knowledge of the worker's cache rests on. 0: its own routes, 1: cache events that are being \
                 caught up with, or have not named a request yet, 2: cache events in order, 3: those of an engine that is not Roundhouse's.",
                &["worker"],
            ),
            demand_workers: maker.add(GaugeVec::new(
                Opts::new(
                    "router_demand_workers",
                    "Workers that the requests of the last ten seconds would keep busy without pause, without those in the background, by learned \
                     speeds; by the first model that workers name, and what they do. Above 0.7 for each worker that there is, requests begin to wait.",
                ),
                &["model", "role"],
            )),
            usable_workers: maker.gauges(
                "router_usable_workers",
                "Workers that new requests can go to, by the same.",
                &["model", "role"],
            ),
            tree_blocks: maker
                .gauge("router_prefix_tree_blocks", "Blocks held in the prefix tree, over all workers."),
            discovery_failures: maker.counters(
                "router_discovery_failures_total",
                "How often a source of workers could not be asked, or was not understood. What was known of it serves on.",
                &["source"],
            ),
            discovery_workers: maker.gauges(
                "router_discovery_workers",
                "Workers that a source has found, also those that are not usable.",
                &["source"],
            ),
            discovery_age: maker.add(GaugeVec::new(
                Opts::new(
                    "router_discovery_age_seconds",
                    "How long ago a source of workers was heard of last; about a minute at most where all is well.",
                ),
                &["source"],
            )),
            registry: maker.0,
        }
    }
}

impl Metrics {
    /// A request has been answered with `status`.
    pub fn request(&self, endpoint: Endpoint, status: StatusCode) {
        if status == StatusCode::OK {
            self.requests_ok[endpoint as usize].inc();
        } else {
            self.requests.with_label_values(&[endpoint.label(), status.as_str()]).inc();
        }
    }

    /// A request has failed.
    pub fn error(&self, blame: Blame) {
        self.errors.with_label_values(&[blame.label()]).inc();
    }

    /// Counts the failures of a source of workers.
    pub fn discovery_failures(&self, source: &str) -> IntCounter {
        self.discovery_failures.with_label_values(&[source])
    }

    /// An attempt at `worker` has ended.
    pub fn attempt(&self, worker: &Worker, outcome: AttemptOutcome) {
        let known = self.worker_counters.load();
        match known.get(worker.slot.index()).and_then(Option::as_ref) {
            Some(counters) if counters.worker == *worker.id() => counters.attempts[outcome as usize].inc(),
            _ => self.add_worker(worker).attempts[outcome as usize].inc(),
        }
    }

    fn add_worker(&self, worker: &Worker) -> Arc<WorkerCounters> {
        let id = worker.id();
        self.named.lock().unwrap_or_else(PoisonError::into_inner).insert(id.clone());
        let attempts = OUTCOME_LABELS.map(|outcome| self.attempts.with_label_values(&[id.as_str(), outcome]));
        let new = Arc::new(WorkerCounters { worker: id.clone(), attempts });
        self.worker_counters.rcu(|known| {
            let mut known = Vec::clone(known);
            known.resize(known.len().max(worker.slot.index() + 1), None);
            known[worker.slot.index()] = Some(Arc::clone(&new));
            known
        });
        new
    }

    /// Series of workers that have left end, so that their number stays bounded while workers come and go. Whenever the metrics are read,
    /// since a request that was under way when its worker left counts after that.
    fn forget_workers_but(&self, present: &HashSet<&WorkerId>) {
        let mut named = self.named.lock().unwrap_or_else(PoisonError::into_inner);
        for left in named.extract_if(|worker| !present.contains(worker)) {
            self.worker_counters.rcu(|known| {
                let is_other = |counters: &Arc<WorkerCounters>| counters.worker != left;
                known.iter().map(|counters| counters.clone().filter(is_other)).collect::<Vec<_>>()
            });
            for outcome in OUTCOME_LABELS {
                // All are made together; there is nothing to do about one that is missing.
                let _ = self.attempts.remove_label_values(&[left.as_str(), outcome]);
            }
        }
    }

    /// A reply has reported its usage.
    pub fn usage(&self, usage: &ReportedUsage, predicted_tokens: usize) {
        self.prompt_tokens.inc_by(usage.prompt_tokens.into());
        self.completion_tokens.inc_by(usage.completion_tokens.into());
        self.predicted_cached_tokens.inc_by(predicted_tokens as u64);
        self.reported_cached_tokens.inc_by(usage.cached_tokens.unwrap_or(0).into());
    }

    /// A reply has said what was cached of its prompt.
    pub fn predicted(&self, comparison: Comparison) {
        let Comparison { predicted_tokens, cached_tokens } = comparison;
        let difference = predicted_tokens.abs_diff(cached_tokens) as f64;
        if predicted_tokens >= cached_tokens {
            self.prediction_error_over.observe(difference);
        } else {
            self.prediction_error_under.observe(difference);
        }
    }

    /// A first token has come so many seconds after it was expected; a negative number is before. `None` where nothing was.
    pub fn first_token_late(&self, late_s: Option<f64>) {
        match late_s {
            Some(late_s) if late_s >= 0.0 => self.first_token_late.observe(late_s),
            Some(late_s) => self.first_token_early.observe(-late_s),
            None => {}
        }
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
        self.queued.set(gauge(app.admission.queued()));
        self.in_background.set(gauge(app.backlogs.waiting()));
        self.body_bytes.set(gauge(app.body_memory.held_bytes()));
        self.tree_blocks.set(gauge(app.decider.tree_blocks()));
        for gauges in [
            &self.worker_in_flight,
            &self.worker_in_line,
            &self.worker_prefill_tokens,
            &self.worker_up,
            &self.worker_stands_still,
            &self.worker_models_known,
            &self.worker_connections,
            &self.worker_breaker,
            &self.worker_draining,
            &self.worker_cache_trust,
            &self.worker_others,
        ] {
            // Workers that have left are not shown any more.
            gauges.reset();
        }
        self.worker_recomputed.reset();
        self.demand_workers.reset();
        self.usable_workers.reset();
        let others = app.replicas.as_ref().map_or(&[][..], |replicas| &replicas.sources);
        for source in app.sources.iter().chain(others) {
            let name = [&*source.name];
            self.discovery_workers.with_label_values(&name).set(gauge(source.workers()));
            self.discovery_age.with_label_values(&name).set(source.age().as_secs_f64());
        }
        let roster = app.fleet.roster();
        if let Some(replicas) = &app.replicas {
            self.replicas.show(replicas, roster.snapshot.workers().iter().map(|worker| &**worker));
        }
        self.forget_workers_but(&roster.snapshot.workers().iter().map(|worker| worker.id()).collect());
        for upstream in roster.upstreams() {
            let (id, connections) = (upstream.worker.id().as_str(), upstream.transport.connections());
            self.worker_stands_still.with_label_values(&[id]).set(upstream.stalls.is_now().into());
            for (state, count) in [("idle", connections.idle), ("busy", connections.busy)] {
                self.worker_connections.with_label_values(&[id, state]).set(gauge(count));
            }
        }
        for Demand { model, role, usable, workers } in app.decider.demand(&roster.snapshot, app.now()) {
            let role = if role == Role::Prefill { "prefill" } else { "generate" };
            let kind = [model.as_deref().unwrap_or_default(), role];
            self.demand_workers.with_label_values(&kind).set(workers);
            self.usable_workers.with_label_values(&kind).set(gauge(usable));
        }
        for worker in roster.snapshot.workers() {
            worker.load.lapse(app.now());
            let (id, load) = ([worker.id().as_str()], worker.load.read());
            self.worker_in_flight.with_label_values(&id).set(gauge(worker.load.own()));
            self.worker_recomputed.with_label_values(&id).set(app.decider.recomputed_share(worker.slot));
            self.worker_in_line.with_label_values(&id).set(gauge(worker.load.in_line()));
            self.worker_prefill_tokens.with_label_values(&id).set(gauge(load.prefill_tokens as usize));
            self.worker_up.with_label_values(&id).set(i64::from(worker.is_up()));
            let knows_models = worker.models().is_some();
            self.worker_models_known.with_label_values(&id).set(i64::from(knows_models));
            self.worker_draining.with_label_values(&id).set(i64::from(worker.is_draining()));
            self.worker_cache_trust.with_label_values(&id).set(worker.reports.trust() as i64);
            if let Some(report) = worker.reports.load(app.now()) {
                self.worker_others.with_label_values(&id).set(report.others.requests.into());
            }
            let breaker = match worker.health.breaker(app.now()) {
                BreakerState::Closed => 0,
                BreakerState::HalfOpen => 1,
                BreakerState::Open => 2,
            };
            self.worker_breaker.with_label_values(&id).set(breaker);
        }
    }
}

#[cfg(test)]
mod tests {
    use prometheus::core::Collector;
    use router_core::{WorkerSlot, WorkerSpec};

    use super::*;

    fn in_first_slot(id: &str) -> Worker {
        let spec = WorkerSpec::new(WorkerId::new(id), format!("http://{id}:8000"));
        Worker::new(spec, WorkerSlot(0))
    }

    #[test]
    fn series_of_all_workers_that_a_slot_had_end_but_those_of_the_last() {
        let metrics = Metrics::default();
        let workers: Vec<_> = (0..9).map(|number| in_first_slot(&format!("w{number}"))).collect();
        let last = &workers[8];
        for worker in &workers {
            metrics.attempt(worker, AttemptOutcome::Success);
        }
        // What was under way at one that has left ends after its successor was asked.
        metrics.attempt(&workers[3], AttemptOutcome::Success);
        metrics.attempt(last, AttemptOutcome::Success);
        metrics.forget_workers_but(&HashSet::from([last.id()]));
        let series = metrics.attempts.collect();
        assert_eq!(series[0].get_metric().len(), OUTCOME_LABELS.len(), "{series:?}");
        assert_eq!(metrics.attempts.with_label_values(&["w8", "2xx"]).get(), 2, "none of its own is lost");
    }
}
