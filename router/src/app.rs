//! Wires everything, once. What requests share is in [`App`].

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use http::HeaderName;
use router_core::prefix::feed::Listener;
use router_core::prefix::tree::TreeLimits;
use router_core::request::{PromptUse, RequestView};
use router_core::token_ratio::TokenRatios;
use router_core::{Among, Decider, Doubt, Leg, RetryBudget, Trial, WorkerId, policy};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::aliases::Aliases;
use crate::body_memory::BodyMemory;
use crate::config::{Config, Settings};
use crate::discovery::{self, state::SourceState};
use crate::failure_logs::FailureLogs;
use crate::fleet::{FleetError, FleetService};
use crate::keys::Keys;
use crate::keys::allowances::Allowances;
use crate::legacy::{self, Legacy};
use crate::metrics::Metrics;
use crate::openai::scan::ScanConfig;
use crate::precedence::PrecedenceHeaders;
use crate::recording::{Recording, RecordingError};
use crate::replicas::Replicas;
use crate::routes::Routes;
use crate::spans::collector::Collector;
use crate::spans::{Spans, SpansError};
use crate::stages::admit::Admission;
use crate::stages::background::Backlogs;
use crate::stages::parse::{BodyLimits, Parser, Reading};
use crate::templates::Templates;
use crate::time_limits::TimeLimitTable;
use crate::transport::Connector;

/// What all requests share.
pub struct App {
    /// The knobs.
    pub settings: Settings,
    /// The workers.
    pub fleet: FleetService,
    /// Where workers come from that nobody has named, and how that goes.
    pub sources: Vec<Arc<SourceState>>,
    /// The routers beside this one, if it has any.
    pub replicas: Option<Arc<Replicas>>,
    /// Who gets what.
    pub decider: Arc<Decider>,
    /// Bytes a token, by model.
    pub ratios: TokenRatios,
    /// What operators see.
    pub metrics: Metrics,
    /// Who may come in.
    pub keys: Keys,
    /// What they have asked for.
    pub allowances: Allowances,
    /// What request bodies hold.
    pub body_memory: Arc<BodyMemory>,
    /// Stage 2.
    pub admission: Admission,
    /// How long a request may take.
    pub time_limits: TimeLimitTable,
    /// How much may be tried again.
    pub retry_budget: RetryBudget,
    /// Whether workers may have died of what was there when they did.
    pub doubt: Doubt,
    /// Stage 3.
    pub parser: Parser,
    /// Who waits in the background.
    pub backlogs: Backlogs,
    /// Which models go on with a message that has begun.
    pub templates: Templates,
    /// What is served where.
    pub routes: Routes,
    /// Bounds the lines about failures.
    pub failure_logs: FailureLogs,
    /// The trace of what passes, if one is written.
    pub recording: Option<Recording>,
    /// What becomes of requests, if somebody is told.
    pub spans: Option<Spans>,
    /// When the process began to serve.
    pub started: Instant,
    /// Where to leave what is known of prefixes, and the seed of their hashes.
    prefix_state: Option<(PathBuf, u64)>,
    draining: AtomicBool,
    cuts_off: AtomicBool,
}

/// Why the router could not be put together.
#[derive(Debug, thiserror::Error)]
pub enum AppError {
    /// The policy vanished between the check and its use.
    #[error("no policy {0:?}")]
    Policy(String),
    /// The header's name is none.
    #[error("{0:?} is no header name")]
    Header(String),
    /// A worker could not be set up.
    #[error(transparent)]
    Fleet(#[from] FleetError),
    /// It is not known where workers are to be looked for.
    #[error("{0}")]
    Discovery(String),
    /// What passes could not be recorded.
    #[error(transparent)]
    Recording(#[from] RecordingError),
    /// What becomes of requests could not be told.
    #[error(transparent)]
    Spans(#[from] SpansError),
}

impl App {
    /// Puts the router together and starts embedded workers. Must be called within a tokio runtime, which then runs the
    /// probers.
    ///
    /// # Errors
    /// [`AppError`] when a worker cannot be set up.
    pub fn build(config: &Config) -> Result<Arc<Self>, AppError> {
        let settings = config.settings.clone();
        let policy =
            policy::by_name(&settings.policy).ok_or_else(|| AppError::Policy(settings.policy.clone()))?;
        let recording = settings.record.as_deref().map(Recording::begin).transpose()?;
        let prompt_use = if recording.is_some() { PromptUse::Whole } else { policy.prompt_use() };
        let state_file = settings.prefix_state_file.clone();
        let legacy = state_file.as_deref().and_then(|file| Legacy::take(file, config.prefix_seed));
        let seed = config.prefix_seed.or(legacy.as_ref().map(Legacy::seed)).unwrap_or_else(rand::random);
        let scan = ScanConfig { seed, prompt_use };
        // So that routers can tell whether they share it. No secret from those who may listen to workers.
        let seed_digest = config.prefix_seed.map(|seed| xxh3_64_with_seed(b"prefix seed", seed));
        let listener = Listener { router: rand::random(), seed_digest };
        let body_memory = BodyMemory::new(settings.max_body_memory, settings.max_body_bytes);
        let limits = BodyLimits {
            max_bytes: settings.max_body_bytes,
            memory: Arc::clone(&body_memory),
            timeout: settings.client_timeout,
        };
        let tree_limits = TreeLimits::within_bytes(settings.prefix_memory);
        let decider = Decider::new(policy, tree_limits, rand::random());
        let decider = decider.with_host_caches(settings.kv_host_ratio);
        let decider = decider.with_background_load(settings.background_load.share());
        let decider = Arc::new(decider.with_decode_weight(settings.split_decode_weight));
        let header = |name: &String| HeaderName::try_from(name).map_err(|_| AppError::Header(name.clone()));
        let session_header = header(&settings.session_header)?;
        let precedence = PrecedenceHeaders {
            priority: header(&settings.priority_header)?,
            tenant: header(&settings.tenant_header)?,
        };
        let (started, metrics) = (Instant::now(), Metrics::default());
        let spans = spans(config, &metrics)?;
        let sources = config.sources.iter().map(|source| {
            let failures = metrics.discovery_failures(&source.name);
            Arc::new(SourceState::new(Arc::clone(&source.name), failures))
        });
        let app = Arc::new(Self {
            sources: sources.collect(),
            replicas: Replicas::of(config, listener.router, |name| metrics.discovery_failures(name)),
            fleet: FleetService::new(
                &settings,
                Connector::new(
                    settings.connect_timeout,
                    config.worker_authorities.clone(),
                    config.worker_keys.clone(),
                ),
                (listener, legacy),
                started,
            ),
            decider,
            keys: config.keys.clone(),
            allowances: Allowances::default(),
            ratios: TokenRatios::default(),
            metrics,
            body_memory,
            admission: Admission::new(settings.max_in_flight, settings.max_queue, settings.queue_timeout),
            time_limits: TimeLimitTable::new(config),
            retry_budget: RetryBudget::new(settings.retry_budget.share()),
            doubt: Doubt::default(),
            parser: Parser::new(
                (scan, Aliases::new(&config.model_aliases)),
                session_header,
                precedence,
                limits,
            ),
            backlogs: Backlogs::new(settings.max_background.min(settings.max_in_flight.div_ceil(2))),
            templates: Templates::default(),
            routes: Routes::default(),
            failure_logs: FailureLogs::default(),
            recording,
            spans,
            started,
            prefix_state: state_file.map(|file| (file, seed)),
            draining: AtomicBool::new(false),
            cuts_off: AtomicBool::new(false),
            settings,
        });
        app.keys.keep_fresh();
        app.fleet.set(&config.workers, &app.decider)?;
        discovery::start(&app, config).map_err(AppError::Discovery)?;
        Ok(app)
    }

    /// Whether requests may need a worker that only computes prompts: there is one, or engines cannot do without and one may come.
    #[must_use]
    pub fn has_prefill(&self) -> bool {
        let is_needed =
            !self.settings.prefill_protocol.generates_alone() && !self.settings.prefill.is_empty();
        is_needed || self.fleet.roster().snapshot.has_prefill()
    }

    /// Whether somebody is there for a model, and for its prompts too where engines compute these apart; or may be in a moment, since workers have come
    /// that have said nothing yet.
    #[must_use]
    pub fn serves(&self, model: &str) -> bool {
        let (roster, reading) = (self.fleet.roster(), Reading::default());
        let snapshot = &roster.snapshot;
        let has = |leg| {
            let view = RequestView { model: Some(model), leg, ..reading.view() };
            Decider::can_decide(snapshot, &view, Among::Untried(&[]))
        };
        let needs_prefill = self.has_prefill() && !self.settings.prefill_protocol.generates_alone();
        snapshot.workers().iter().any(|worker| worker.is_awaited())
            || snapshot.lists(model) && has(Leg::Whole) && (!needs_prefill || has(Leg::Prefill))
    }

    /// A reading of the clock that workers' health and the retry budget go by.
    #[must_use]
    pub fn now(&self) -> Duration {
        self.started.elapsed()
    }

    /// A worker has failed an attempt.
    pub fn report_failure(&self, worker: &WorkerId, trial: Trial) {
        if trial.fail(self.now(), rand::random()) {
            tracing::warn!(%worker, "worker fails; its breaker has opened");
        }
    }

    /// Whether the router is on its way out.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// From now on probes say that it is on its way out.
    pub fn begin_draining(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    /// Nobody is served any more: what is known of prefixes is left to the next router, if that is wanted.
    pub fn leave_prefixes(&self) {
        if let Some((file, seed)) = &self.prefix_state {
            legacy::leave(file, *seed, self.fleet.roster().snapshot.workers(), &self.decider);
        }
    }

    /// Whether the time that answers had after that is over.
    #[must_use]
    pub fn cuts_off(&self) -> bool {
        self.cuts_off.load(Ordering::Acquire)
    }

    /// From now on answers that are not whole break off, once they are asked for what comes next.
    pub fn begin_cutting_off(&self) {
        self.cuts_off.store(true, Ordering::Release);
    }
}

/// What tells of requests, if it is to.
fn spans(config: &Config, metrics: &Metrics) -> Result<Option<Spans>, AppError> {
    let Some(address) = config.otlp_traces.clone() else { return Ok(None) };
    let Settings { connect_timeout, otlp_traces_share, .. } = config.settings;
    let share = otlp_traces_share.share().unwrap_or(0.0);
    let collector = Collector::new(address, connect_timeout, config.worker_authorities.clone())?;
    Ok(Some(Spans::start(collector, share, &metrics.spans)?))
}
