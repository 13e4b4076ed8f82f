//! What the worker answers at which path.
//!
//! Next: [`generate`] for what is generated, [`tokens`] for text to tokens and back.

mod generate;
mod tokens;

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, Response, header};
use roundhouse_text::{ChatTemplate, Tokenizer};
use serde_json::{Value, json};

use crate::body::{ChunkSource, WorkerBody};
use crate::engine::{Engine, RequestId};
use crate::error::RequestError;
use crate::kv_events::KvLog;
use crate::metrics::Metrics;
use crate::openai::request::Kind;
use crate::simulation::Simulation;

const REQUEST_ID: &str = "x-request-id";

/// A served model: all that requests share.
pub struct Api {
    /// The id that clients name.
    pub model: String,
    /// Where it runs and on what, for `/server_info`.
    pub backend: String,
    /// Longest prompt and answer together.
    pub context_tokens: usize,
    /// Positions of a KV block.
    pub block_tokens: usize,
    /// Tokens that end a turn.
    pub end_tokens: Arc<[u32]>,
    /// Tokens of the vocabulary.
    pub vocab_tokens: usize,
    /// Text to tokens and back.
    pub tokenizer: Tokenizer,
    /// Conversations to text; `None` for models that only complete.
    pub template: Option<ChatTemplate>,
    /// Runs generations.
    pub engine: Engine,
    /// Counters.
    pub metrics: Arc<Metrics>,
    /// When the worker began.
    pub started: SystemTime,
    /// What is simulated, if compute is.
    pub simulation: Option<Simulation>,
    /// Drawn anew by each process, so that others see that it is another.
    pub instance: u64,
    /// What happens to the cache, if that is recorded.
    pub kv_log: Option<Arc<KvLog>>,
}

impl Api {
    /// Answers one request, which is known by its header `x-request-id`, if it has one.
    pub async fn handle(self: &Arc<Self>, request: Request<Bytes>) -> Response<WorkerBody> {
        let id = request_id(request.headers());
        self.handle_as(id, request).await
    }

    /// Answers one request, which is known as `request_id`.
    pub(crate) async fn handle_as(
        self: &Arc<Self>,
        request_id: RequestId,
        request: Request<Bytes>,
    ) -> Response<WorkerBody> {
        let id = request.headers().get(REQUEST_ID).cloned();
        let mut response = match self.route(request_id, request).await {
            Ok(response) => response,
            Err(error) => error.response(),
        };
        if let Some(id) = id {
            response.headers_mut().insert(REQUEST_ID, id);
        }
        response
    }

    async fn route(
        self: &Arc<Self>,
        request_id: RequestId,
        request: Request<Bytes>,
    ) -> Result<Response<WorkerBody>, RequestError> {
        let path = request.uri().path().to_owned();
        let takes = |method: &Method, allowed: &'static str| {
            let fits = method.as_str() == allowed || (allowed == "GET" && *method == Method::HEAD);
            if fits { Ok(()) } else { Err(RequestError::MethodNotAllowed { path: path.clone(), allowed }) }
        };
        let allowed = match path.as_str() {
            "/v1/chat/completions" | "/v1/completions" | "/tokenize" | "/detokenize" | "/flush_cache" => {
                "POST"
            }
            "/health" | "/livez" | "/readyz" | "/v1/models" | "/server_info" | "/get_server_info"
            | "/get_model_info" | "/metrics" => "GET",
            _ => return Err(RequestError::NotFound { path }),
        };
        takes(request.method(), allowed)?;
        match path.as_str() {
            "/v1/chat/completions" => self.generate(Kind::Chat, request_id, request.into_body()).await,
            "/v1/completions" => self.generate(Kind::Completion, request_id, request.into_body()).await,
            "/tokenize" => self.tokenize(request.into_body()).await,
            "/detokenize" => self.detokenize(request.into_body()).await,
            "/v1/models" => Ok(json_response(&json!({ "object": "list", "data": [self.model_entry()] }))),
            "/server_info" | "/get_server_info" => Ok(json_response(&self.server_info())),
            "/get_model_info" => {
                Ok(json_response(&json!({ "model_path": self.model, "is_generation": true })))
            }
            "/metrics" => {
                let mut metrics = self.metrics.render(&self.engine.stats(), self.block_tokens);
                metrics += &self.simulation.as_ref().map(Simulation::metrics).unwrap_or_default();
                Ok(text_response("text/plain; version=0.0.4", metrics))
            }
            "/flush_cache" => {
                let blocks = self.engine.flush_cache().await;
                let blocks = blocks.ok_or_else(|| RequestError::Engine("it has stopped".to_owned()))?;
                Ok(json_response(&json!({ "flushed_blocks": blocks })))
            }
            _ => Ok(text_response("text/plain; charset=utf-8", "ok\n".to_owned())),
        }
    }

    fn model_entry(&self) -> Value {
        json!({
            "id": self.model,
            "object": "model",
            "created": seconds(self.started),
            "owned_by": if self.simulation.is_some() { "roundhouse-simulated" } else { "roundhouse" },
            "max_model_len": self.context_tokens,
            "simulated": self.simulation.is_some(),
        })
    }

    fn server_info(&self) -> Value {
        let stats = self.engine.stats();
        json!({
            "name": "roundhouse-worker",
            "version": env!("CARGO_PKG_VERSION"),
            "model": self.model,
            "backend": self.backend,
            "context_tokens": self.context_tokens,
            "block_tokens": self.block_tokens,
            "kv_blocks_total": stats.total_blocks,
            "kv_blocks_used": stats.held_blocks,
            "kv_blocks_free": stats.total_blocks - stats.held_blocks,
            "kv_blocks_cached": stats.cached_blocks,
            "requests_running": stats.running,
            "requests_waiting": stats.waiting,
            "uncomputed_tokens": stats.uncomputed_tokens,
            "computed_tokens": stats.computed_tokens,
            "retractions": stats.retractions,
            "retracted_tokens": stats.retracted_tokens,
            "recomputed_tokens": stats.recomputed_tokens,
            "simulated": self.simulation.as_ref().map(Simulation::info),
        })
    }
}

/// How the client names its request.
pub(crate) fn request_id(headers: &HeaderMap) -> RequestId {
    headers.get(REQUEST_ID).and_then(|id| id.to_str().ok()).filter(|id| !id.is_empty()).map(Arc::from)
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

fn json_response(value: &Value) -> Response<WorkerBody> {
    text_response("application/json", value.to_string())
}

fn text_response(content_type: &'static str, body: String) -> Response<WorkerBody> {
    let mut response = Response::new(WorkerBody::whole(body));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

fn event_response(events: impl ChunkSource + 'static) -> Response<WorkerBody> {
    let mut response = Response::new(WorkerBody::stream(events));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}
