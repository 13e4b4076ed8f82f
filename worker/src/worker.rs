//! The worker as a handle: started once, then asked by HTTP request. Wires everything, once.

use std::sync::Arc;
use std::time::SystemTime;

use bytes::Bytes;
use http::{Request, Response};
use roundhouse_text::{ChatTemplate, TemplateError, Tokenizer};
use worker_core::SchedulerLimits;
use worker_core::step::{Backend, KvCapacity};

use crate::api::Api;
use crate::backend::{CpuBackend, kv_block_bytes, kv_capacity};
use crate::engine::Engine;
use crate::metrics::Metrics;
use crate::model::{Model, ModelConfig, ModelFiles};
use crate::{KvBudget, WorkerBody, WorkerConfig, WorkerError};

/// Positions of a KV block.
const BLOCK_TOKENS: usize = 16;
/// Full contexts that the pool has room for unless told otherwise, within [`AUTO_KV_BYTES`].
const AUTO_CONTEXTS: usize = 4;
/// Bound of the pool unless told otherwise; one full context fits in any case.
const AUTO_KV_BYTES: u64 = 1 << 30;

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
        let model = Arc::new(Model::load(&files)?);
        let context_tokens = context_tokens(&config, model.config())?;
        let capacity = capacity(&config, model.config(), context_tokens)?;
        let backend = CpuBackend::new(Arc::clone(&model), capacity, config.threads)?;
        let described = format!("cpu, {} threads", config.threads);
        Self::with_backend(config, &files, model.config(), (Box::new(backend), described), context_tokens)
    }

    fn with_backend(
        config: WorkerConfig,
        files: &ModelFiles,
        model: &ModelConfig,
        (backend, described): (Box<dyn Backend>, String),
        context_tokens: usize,
    ) -> Result<Self, WorkerError> {
        let tokenizer = files.tokenizer.as_deref().ok_or_else(|| {
            WorkerError::Config(format!("model {} has no tokenizer.json, which a worker needs", files.name))
        })?;
        let template_config = files.tokenizer_config.as_deref().map(str::as_bytes);
        let template = match ChatTemplate::from_files(template_config, files.chat_template.as_deref()) {
            Ok(template) => Some(template),
            // A base model: it completes, and does not chat.
            Err(TemplateError::Missing) => None,
            Err(error) => return Err(error.into()),
        };
        let limits = SchedulerLimits::mixed(config.max_running, config.max_tokens_per_step);
        let api = Api {
            model: config.served_model_name.unwrap_or_else(|| files.name.clone()),
            backend: described,
            context_tokens,
            block_tokens: BLOCK_TOKENS,
            end_tokens: model.eos_tokens.clone().into(),
            vocab_tokens: model.vocab,
            tokenizer: Tokenizer::from_json(tokenizer.as_bytes())?,
            template,
            engine: Engine::start(backend, limits, config.max_waiting)?,
            metrics: Arc::new(Metrics::default()),
            started: SystemTime::now(),
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

    /// What is served, and on what.
    #[must_use]
    pub fn describe(&self) -> String {
        let (api, stats) = (&self.api, self.api.engine.stats());
        format!(
            "model {}, {}, context {} tokens, KV pool {} blocks of {} tokens",
            api.model, api.backend, api.context_tokens, stats.total_blocks, api.block_tokens
        )
    }

    /// Ends the engine thread; what is being generated fails. Blocks for at most a step.
    pub fn shutdown(&self) {
        self.api.engine.stop();
    }
}

fn check(config: &WorkerConfig) -> Result<(), WorkerError> {
    let bounds = [
        ("threads", config.threads),
        ("max-running", config.max_running),
        ("max-tokens-per-step", config.max_tokens_per_step),
        ("max-waiting", config.max_waiting),
    ];
    match bounds.iter().find(|(_, value)| *value == 0) {
        Some((name, _)) => Err(WorkerError::Config(format!("{name} must be at least 1"))),
        None => Ok(()),
    }
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

/// The size of the KV pool: room for a full context at least, or an error that says how much that takes.
fn capacity(
    config: &WorkerConfig,
    model: &ModelConfig,
    context_tokens: usize,
) -> Result<KvCapacity, WorkerError> {
    let context_blocks = context_tokens.div_ceil(BLOCK_TOKENS);
    let blocks = match config.kv {
        KvBudget::Blocks(blocks) => blocks,
        KvBudget::Bytes(bytes) => kv_capacity(model, BLOCK_TOKENS, bytes).blocks,
        KvBudget::Auto => {
            let affordable = kv_capacity(model, BLOCK_TOKENS, AUTO_KV_BYTES).blocks;
            affordable.min(AUTO_CONTEXTS * context_blocks).max(context_blocks)
        }
    };
    if blocks < context_blocks {
        let needed_bytes = kv_block_bytes(model, BLOCK_TOKENS) * context_blocks;
        return Err(WorkerError::Config(format!(
            "the KV pool has {blocks} blocks, but a context of {context_tokens} tokens needs {context_blocks} \
             ({needed_bytes} bytes); give more KV memory, or set a shorter context-length"
        )));
    }
    Ok(KvCapacity { block_tokens: BLOCK_TOKENS, blocks })
}
