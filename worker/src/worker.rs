//! The worker as a handle: started once, then asked by HTTP request. Wires everything, once.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::{Request, Response};
use roundhouse_text::{ChatTemplate, TemplateError, Tokenizer};
use worker_core::SchedulerLimits;
use worker_core::step::{Backend, KvCapacity};
use worker_core::timing::EnginePreset;
use worker_kernels::cuda::launch::head_dim_is_supported;
use worker_kernels::cuda::{CudaKernels, PrefillKernel};

use crate::api::{Api, TextLimit, Tokenizing};
use crate::backend::timing::SystemClock;
use crate::backend::{CpuBackend, CudaBackend, CudaModel, TimingBackend, kv_block_bytes};
use crate::engine::Engine;
use crate::grpc::GrpcWorker;
use crate::kv_events::KvLog;
use crate::kv_size::{KvMemory, KvNeed, KvRoom, size};
use crate::memory::available_bytes;
use crate::metrics::Metrics;
use crate::model::{Model, ModelConfig, ModelFiles};
use crate::simulation::{BackendChoice, Simulation, plain_words};
use crate::transfer::{Transfer, TransferParts};
use crate::{
    KernelOverlap, KvBudget, KvEventRecording, KvTransfer, StepSize, WorkerBody, WorkerConfig, WorkerError,
};

/// What KV may take on its way between workers, unless told otherwise.
const MOST_TRANSFER_BYTES: u64 = 4 << 30;
/// Positions of a KV block.
const BLOCK_TOKENS: usize = 16;

/// A started worker; clones are handles to the same one. The engine ends with the last of them.
#[derive(Clone)]
pub struct Worker {
    api: Arc<Api>,
}

impl Worker {
    /// Loads the model and starts the engine thread. Blocks until the model is loaded.
    ///
    /// # Errors
    /// [`WorkerError`] when the model cannot be loaded or the configuration does not fit it.
    pub fn start(config: WorkerConfig) -> Result<Self, WorkerError> {
        check(&config)?;
        let files = ModelFiles::open(&config.model)?;
        match config.backend {
            BackendChoice::Cpu => Self::start_cpu(config, &files),
            BackendChoice::Cuda => {
                let kernels = CudaKernels::open(0)
                    .map_err(|error| WorkerError::Config(format!("backend cuda: {error}")))?;
                Self::start_cuda(config, &files, kernels)
            }
            BackendChoice::Auto => match CudaKernels::open(0) {
                Ok(kernels) if head_dim_is_supported(ModelConfig::from_files(&files)?.head_dim) => {
                    Self::start_cuda(config, &files, kernels)
                }
                Ok(_) => {
                    tracing::info!(
                        model = files.name,
                        "computing on the CPU: no CUDA kernels for the model's heads"
                    );
                    Self::start_cpu(config, &files)
                }
                Err(reason) if reason.is_no_gpu() => {
                    tracing::info!(%reason, "computing on the CPU");
                    Self::start_cpu(config, &files)
                }
                Err(reason) => {
                    tracing::warn!(%reason, "computing on the CPU, since the GPU cannot be used");
                    Self::start_cpu(config, &files)
                }
            },
            BackendChoice::Timing(preset) => Self::start_timing(config, &files, preset),
        }
    }

    fn start_cpu(config: WorkerConfig, files: &ModelFiles) -> Result<Self, WorkerError> {
        let step = StepSize::CPU.or_as_told(&config)?;
        let model = Arc::new(Model::load(files)?);
        let context_tokens = context_tokens(&config, model.config())?;
        let room = KvRoom {
            memory: KvMemory::Host,
            available_bytes: available_bytes(),
            sharers: config.memory_sharers,
        };
        let block_bytes = kv_block_bytes(model.config(), BLOCK_TOKENS);
        let need =
            KvNeed { block_tokens: BLOCK_TOKENS, block_bytes, context_tokens, max_running: step.max_running };
        let capacity = capacity(need, config.kv, room)?;
        let backend = CpuBackend::new(Arc::clone(&model), capacity, config.threads)?;
        let text = Text::read(files)?;
        Self::assemble(
            Parts {
                name: files.name.clone(),
                backend: Box::new(backend),
                model_digest: files.digest(),
                computes: Computes::Model(format!("cpu, {} threads", config.threads)),
                limits: SchedulerLimits::mixed(step.max_running, step.max_tokens),
                context_tokens,
            },
            model.config(),
            text,
            config,
        )
    }

    fn start_cuda(
        config: WorkerConfig,
        files: &ModelFiles,
        kernels: CudaKernels,
    ) -> Result<Self, WorkerError> {
        let step = StepSize::GPU.or_as_told(&config)?;
        let kernels = kernels
            .with_prefill(config.prefill_kernel)
            .map_err(|error| WorkerError::Config(format!("prefill-kernel wgmma: {error}")))?;
        if config.kernel_overlap == KernelOverlap::Off {
            kernels.gpu().keep_kernels_apart();
        }
        let model = CudaModel::load(kernels, files)?;
        let (described, model_config) = (model.describe(), model.config().clone());
        let context_tokens = context_tokens(&config, model.config())?;
        let (free, of_steps) = (model.free_bytes()?, model.workspace_bytes(step, context_tokens));
        // What steps take is not there for KV.
        let available = free.checked_sub(of_steps).ok_or_else(|| {
            WorkerError::Config(format!(
                "steps of {} tokens and {} sequences take {}, but {} of the GPU's memory is free beside the model; lower \
                 --max-tokens-per-step and --max-running",
                step.max_tokens,
                step.max_running,
                size(of_steps as u64),
                size(free as u64)
            ))
        })?;
        let room = KvRoom {
            memory: KvMemory::Gpu,
            available_bytes: Some(available as u64),
            sharers: config.memory_sharers,
        };
        let block_bytes = model.kv_block_bytes(BLOCK_TOKENS);
        let need =
            KvNeed { block_tokens: BLOCK_TOKENS, block_bytes, context_tokens, max_running: step.max_running };
        let capacity = capacity(need, config.kv, room)?;
        let backend = CudaBackend::new(model, capacity)?;
        let text = Text::read(files)?;
        Self::assemble(
            Parts {
                name: files.name.clone(),
                backend: Box::new(backend),
                model_digest: files.digest(),
                computes: Computes::Model(described),
                limits: SchedulerLimits::mixed(step.max_running, step.max_tokens),
                context_tokens,
            },
            &model_config,
            text,
            config,
        )
    }

    /// A worker that computes nothing: of the model only what makes tokens of text.
    fn start_timing(
        config: WorkerConfig,
        files: &ModelFiles,
        preset: &'static EnginePreset,
    ) -> Result<Self, WorkerError> {
        let usual = StepSize { max_running: preset.max_running, max_tokens: preset.max_tokens_per_step };
        let step = usual.or_as_told(&config)?;
        let model = ModelConfig::from_files(files)?;
        let text = Text::read(files)?;
        let words = plain_words(&text.tokenizer, &model.eos_tokens);
        if words.is_empty() {
            return Err(WorkerError::Config(format!(
                "the tokenizer of {} has no words to draw from",
                files.name
            )));
        }
        let simulation = Simulation::new(preset, config.time_scale);
        let lateness = Arc::clone(&simulation.lateness);
        let capacity = simulated_capacity(&config, preset)?;
        let clock = SystemClock::default();
        let backend = TimingBackend::new(simulation.pace(), capacity, words.into(), lateness, clock);
        Self::assemble(
            Parts {
                name: format!("simulated-{}", preset.name),
                backend: Box::new(backend),
                model_digest: files.digest(),
                computes: Computes::Nothing(simulation),
                limits: SchedulerLimits {
                    max_running: step.max_running,
                    max_tokens_per_step: step.max_tokens,
                    ..preset.limits()
                },
                context_tokens: config.context_tokens.unwrap_or(preset.context_tokens),
            },
            &model,
            text,
            config,
        )
    }

    fn assemble(
        parts: Parts,
        model: &ModelConfig,
        text: Text,
        config: WorkerConfig,
    ) -> Result<Self, WorkerError> {
        let instance = rand::random();
        warn_of_unknown_tokens(&text.tokenizer, model.vocab);
        let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let kv_log = (config.kv_events == KvEventRecording::On).then(|| Arc::new(KvLog::new(instance)));
        let metrics = Arc::<Metrics>::default();
        let transfer = parts.transfer(&config, instance, &metrics);
        let engine = Engine::start(parts.backend, parts.limits, config.max_waiting, kv_log.clone())?;
        let (backend, simulation) = match parts.computes {
            Computes::Model(described) => (described, None),
            Computes::Nothing(simulation) => {
                let simulation = simulation.on(&engine);
                (simulation.describe(), Some(simulation))
            }
        };
        let api = Api {
            model: config.served_model_name.unwrap_or(parts.name),
            backend,
            context_tokens: parts.context_tokens,
            block_tokens: BLOCK_TOKENS,
            end_tokens: model.eos_tokens.clone().into(),
            vocab_tokens: model.vocab,
            text_limit: TextLimit::new(&text.tokenizer, parts.context_tokens),
            tokenizing: Tokenizing::new(threads, config.max_waiting),
            tokenizer: text.tokenizer,
            template: text.template,
            engine,
            metrics,
            started: SystemTime::now(),
            simulation,
            instance,
            kv_log,
            transfer,
        };
        Ok(Self { api: Arc::new(api) })
    }

    /// Answers one request, whole body in; never blocks the calling thread for long. Must be called within a tokio
    /// runtime.
    ///
    /// Dropping the future, or the body it returned, cancels the generation.
    pub async fn handle(&self, request: Request<Bytes>) -> Response<WorkerBody> {
        self.api.handle(request).await
    }

    /// The same worker as a gRPC service.
    #[must_use]
    pub fn grpc(&self) -> GrpcWorker {
        GrpcWorker::new(Arc::clone(&self.api))
    }

    /// What happens to its prefix cache, if that is recorded.
    #[must_use]
    pub fn kv_log(&self) -> Option<Arc<KvLog>> {
        self.api.kv_log.clone()
    }

    /// What is served, and on what.
    #[must_use]
    pub fn describe(&self) -> String {
        let (api, stats) = (&self.api, self.api.engine.stats());
        format!(
            "model {}, {}, context {} tokens, KV pool {} blocks of {} tokens",
            api.model, api.backend, api.context_tokens, stats.total_blocks, api.block_tokens
        )
    }

    /// Whether nothing is computed, and steps only take as long as a recorded engine's.
    #[must_use]
    pub fn is_simulated(&self) -> bool {
        self.api.simulation.is_some()
    }

    /// Ends the engine thread; what is being generated fails. Blocks for at most a step.
    pub fn shutdown(&self) {
        self.api.engine.stop();
    }
}

/// What differs by backend.
struct Parts {
    /// The model id, unless another is asked for.
    name: String,
    backend: Box<dyn Backend>,
    /// Tells models apart.
    model_digest: u64,
    computes: Computes,
    limits: SchedulerLimits,
    context_tokens: usize,
}

impl Parts {
    /// What hands KV over, if it is to be.
    fn transfer(&self, config: &WorkerConfig, instance: u64, metrics: &Arc<Metrics>) -> Option<Transfer> {
        let KvTransfer::On { reach, memory_bytes } = &config.kv_transfer else { return None };
        let mut format = self.backend.kv_format()?;
        if let Computes::Nothing(simulation) = &self.computes {
            format.name = format!("{}-{}", format.name, simulation.preset.name);
        }
        let most =
            || available_bytes().map_or(MOST_TRANSFER_BYTES, |bytes| MOST_TRANSFER_BYTES.min(bytes / 8));
        let room_bytes = memory_bytes.unwrap_or_else(most);
        tracing::info!(format = format.name, room = size(room_bytes), "KV is handed over");
        Some(Transfer::new(TransferParts {
            format,
            model_digest: self.model_digest,
            block_tokens: BLOCK_TOKENS,
            instance,
            reach: reach.clone(),
            room_bytes: usize::try_from(room_bytes).unwrap_or(usize::MAX),
            metrics: Arc::clone(metrics),
            simulated_token: match &self.computes {
                Computes::Model(_) => Duration::ZERO,
                Computes::Nothing(simulation) => simulation.fetch_token(),
            },
        }))
    }
}

/// What a backend does with a batch.
enum Computes {
    /// It computes the model; on what, for people.
    Model(String),
    /// It keeps time.
    Nothing(Simulation),
}

/// What turns text into tokens.
struct Text {
    tokenizer: Tokenizer,
    /// `None` for a base model: it completes, and does not chat.
    template: Option<ChatTemplate>,
}

impl Text {
    fn read(files: &ModelFiles) -> Result<Self, WorkerError> {
        let tokenizer = files.tokenizer.as_deref().ok_or_else(|| {
            WorkerError::Config(format!("model {} has no tokenizer.json, which a worker needs", files.name))
        })?;
        let template_config = files.tokenizer_config.as_deref().map(str::as_bytes);
        let template = match ChatTemplate::from_files(template_config, files.chat_template.as_deref()) {
            Ok(template) => Some(template),
            Err(TemplateError::Missing) => None,
            Err(error) => return Err(error.into()),
        };
        Ok(Self { tokenizer: Tokenizer::from_json(tokenizer.as_bytes())?, template })
    }
}

/// A tokenizer with tokens that the model has not is a mistake of whoever put the two together, and no reason not to serve
/// texts without them.
fn warn_of_unknown_tokens(tokenizer: &Tokenizer, vocab_tokens: usize) {
    let unknown = tokenizer.ids().into_iter().filter(|id| *id as usize >= vocab_tokens);
    let (count, highest) = unknown.fold((0, 0), |(count, _), id| (count + 1, id));
    if count > 0 {
        tracing::warn!(
            count,
            highest,
            vocab_tokens,
            "the tokenizer has tokens beyond the model's vocabulary; prompts that have one are refused"
        );
    }
}

fn check(config: &WorkerConfig) -> Result<(), WorkerError> {
    check_backend(config)?;
    let bounds = [
        ("threads", config.threads),
        ("max-running", config.max_running.unwrap_or(1)),
        ("max-tokens-per-step", config.max_tokens_per_step.unwrap_or(1)),
        ("max-waiting", config.max_waiting),
        ("memory-sharers", config.memory_sharers),
    ];
    if let Some((name, _)) = bounds.iter().find(|(_, value)| *value == 0) {
        return Err(WorkerError::Config(format!("{name} must be at least 1")));
    }
    Ok(())
}

fn check_backend(config: &WorkerConfig) -> Result<(), WorkerError> {
    let refused = |message: &str| Err(WorkerError::Config(message.to_owned()));
    if !(config.time_scale.is_finite() && config.time_scale > 0.0) {
        return refused(&format!(
            "time-scale {} must be a number above 0; 1 is real time",
            config.time_scale
        ));
    }
    match config.backend {
        BackendChoice::Cpu | BackendChoice::Cuda | BackendChoice::Auto if config.time_scale != 1.0 => {
            refused("time-scale is for timing backends: add --backend timing:PRESET, or leave it out")
        }
        BackendChoice::Cpu | BackendChoice::Timing(_)
            if config.prefill_kernel != PrefillKernel::default() =>
        {
            refused("prefill-kernel is for a GPU: add --backend cuda, or leave it out")
        }
        BackendChoice::Cpu | BackendChoice::Timing(_)
            if config.kernel_overlap != KernelOverlap::default() =>
        {
            refused("kernel-overlap is for a GPU: add --backend cuda, or leave it out")
        }
        BackendChoice::Timing(_) if matches!(config.kv, KvBudget::Bytes(_)) => {
            refused("a timing backend keeps no KV in memory: give kv-blocks in place of kv-memory")
        }
        BackendChoice::Timing(_) if config.context_tokens.is_some_and(|tokens| tokens < 2) => {
            refused("context-length must be at least 2")
        }
        _ => Ok(()),
    }
}

/// The pool of a simulated engine. It may be smaller than a context: a request that it cannot hold is refused with both
/// sizes.
fn simulated_capacity(config: &WorkerConfig, preset: &EnginePreset) -> Result<KvCapacity, WorkerError> {
    let blocks = match config.kv {
        KvBudget::Blocks(blocks) => blocks,
        KvBudget::Auto | KvBudget::Bytes(_) => preset.kv_tokens / BLOCK_TOKENS,
    };
    if blocks == 0 {
        return Err(WorkerError::Config("kv-blocks must be at least 1".to_owned()));
    }
    Ok(KvCapacity { block_tokens: BLOCK_TOKENS, blocks })
}

fn context_tokens(config: &WorkerConfig, model: &ModelConfig) -> Result<usize, WorkerError> {
    match config.context_tokens {
        None => Ok(model.context_tokens),
        Some(tokens) if (2..=model.context_tokens).contains(&tokens) => Ok(tokens),
        Some(tokens) => Err(WorkerError::Config(format!(
            "context-length {tokens} must be from 2 to the model's own {}",
            model.context_tokens
        ))),
    }
}

/// The size of the KV pool, which is logged: by default it depends on the machine.
fn capacity(need: KvNeed, budget: KvBudget, room: KvRoom) -> Result<KvCapacity, WorkerError> {
    let capacity = need.capacity(budget, room)?;
    tracing::info!(
        blocks = capacity.blocks,
        tokens = capacity.blocks * need.block_tokens,
        size = size((capacity.blocks as u64).saturating_mul(need.block_bytes as u64)),
        available = room.available_bytes.map(size),
        sharers = room.sharers,
        "KV pool"
    );
    Ok(capacity)
}
