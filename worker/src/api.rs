//! What the worker answers at which path.
//!
//! Next: [`generate`] for what is generated, [`tokens`] for text to tokens and back.

mod generate;
mod text_limit;
mod tokenizing;
mod tokens;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use http::{Extensions, HeaderMap, HeaderValue, Method, Request, Response, Uri, header};
use roundhouse_text::{ChatTemplate, Tokenizer};
use serde_json::{Value, json};

use crate::body::{ChunkSource, WorkerBody};
use crate::engine::{Caller, Engine, RequestId};
use crate::error::RequestError;
use crate::kv_events::KvLog;
use crate::metrics::Metrics;
use crate::openai::request::Kind;
use crate::simulation::Simulation;
use crate::transfer::{Transfer, fetch};

pub use self::text_limit::TextLimit;
pub use self::tokenizing::Tokenizing;

const REQUEST_ID: &str = "x-request-id";
/// vLLM's name of what its cache events say whose blocks are.
const SESSION_ID: &str = "x-session-id";

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
    /// How long texts may be.
    pub text_limit: TextLimit,
    /// Where they are tokenized.
    pub tokenizing: Tokenizing,
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
    /// Hands KV over to other workers, and takes it, if it does.
    pub transfer: Option<Transfer>,
}

/// In a request's extensions: the address of this worker's that it called.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CameTo(pub(crate) SocketAddr);

/// The address that a request called.
pub(crate) fn came_to(extensions: &Extensions) -> Option<SocketAddr> {
    extensions.get::<CameTo>().map(|came_to| came_to.0)
}

impl Api {
    /// Answers one request, which cache events call as its header `x-session-id` says, as vLLM's do, or else `x-request-id`.
    pub async fn handle(self: &Arc<Self>, request: Request<Bytes>) -> Response<WorkerBody> {
        let headers = request.headers();
        let request_id = named_by(headers, SESSION_ID).or_else(|| request_id(headers));
        let came_to = came_to(request.extensions());
        let caller = Caller { request_id, came_to, ..Caller::default() };
        self.handle_for(caller, request).await
    }

    /// Answers one request of `caller`'s.
    pub(crate) async fn handle_for(
        self: &Arc<Self>,
        caller: Caller,
        request: Request<Bytes>,
    ) -> Response<WorkerBody> {
        let id = request.headers().get(REQUEST_ID).cloned();
        let mut response = match self.route(caller, request).await {
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
        caller: Caller,
        request: Request<Bytes>,
    ) -> Result<Response<WorkerBody>, RequestError> {
        let path = request.uri().path().to_owned();
        let takes = |method: &Method, allowed: &'static str| {
            // KV is given once: who looks only would have taken it.
            let is_harmless = allowed == "GET" && !path.starts_with(fetch::PATH);
            let fits = method.as_str() == allowed || (is_harmless && *method == Method::HEAD);
            if fits { Ok(()) } else { Err(RequestError::MethodNotAllowed { path: path.clone(), allowed }) }
        };
        let allowed = match path.as_str() {
            "/v1/chat/completions" | "/v1/completions" | "/tokenize" | "/detokenize" | "/flush_cache" => {
                "POST"
            }
            "/health" | "/livez" | "/readyz" | "/v1/models" | "/server_info" | "/get_server_info"
            | "/get_model_info" | "/metrics" | "/kv_event_sources" => "GET",
            _ if self.transfer.is_some() && path.starts_with(fetch::PATH) => "GET",
            _ => return Err(RequestError::NotFound { path }),
        };
        takes(request.method(), allowed)?;
        match path.as_str() {
            "/v1/chat/completions" => self.generate(Kind::Chat, caller, request.into_body()).await,
            "/v1/completions" => self.generate(Kind::Completion, caller, request.into_body()).await,
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
            kv if kv.starts_with(fetch::PATH) => self.offered_kv(request.uri()),
            "/kv_event_sources" => Ok(json_response(&self.kv_event_sources())),
            "/flush_cache" => {
                let blocks = self.engine.flush_cache().await;
                let blocks = blocks.ok_or(RequestError::EngineEnded)?;
                Ok(json_response(&json!({ "flushed_blocks": blocks })))
            }
            // Alive, healthy and ready are the same here: without its engine a worker is none of them, and does not recover.
            _ if self.engine.has_ended() => Err(RequestError::EngineEnded),
            _ => Ok(text_response("text/plain; charset=utf-8", "ok\n".to_owned())),
        }
    }

    /// A prompt's KV, which another worker goes on from.
    fn offered_kv(&self, uri: &Uri) -> Result<Response<WorkerBody>, RequestError> {
        let ticket = uri.path().strip_prefix(fetch::PATH).unwrap_or_default();
        let from_block = uri.query().and_then(|query| query.strip_prefix(fetch::FROM_BLOCK)?.parse().ok());
        let kv = self.transfer.as_ref().and_then(|transfer| transfer.take(ticket, from_block.unwrap_or(0)));
        let kv = kv.ok_or_else(|| RequestError::NotFound { path: uri.path().to_owned() })?;
        let mut response = Response::new(WorkerBody::stream(kv));
        let kind = HeaderValue::from_static("application/octet-stream");
        response.headers_mut().insert(header::CONTENT_TYPE, kind);
        Ok(response)
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

    /// Where cache events are published over ZeroMQ, as vLLM says it: by data-parallel rank, of which there is one here.
    fn kv_event_sources(&self) -> Value {
        let Some(published) = self.kv_log.as_ref().and_then(|log| log.published()) else { return json!({}) };
        let endpoint = |address: SocketAddr| format!("tcp://{address}");
        json!({ "0": {
            "enable_kv_cache_events": true,
            "publisher": "zmq",
            "endpoint": endpoint(published.publish),
            "replay_endpoint": published.replay.map(endpoint),
            "topic": published.topic,
        } })
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
            "kv_transfer": self.transfer.as_ref().map(|transfer| {
                json!({ "format": transfer.format(), "held_bytes": transfer.held_bytes() })
            }),
            "simulated": self.simulation.as_ref().map(Simulation::info),
        })
    }
}

/// How the client names its request.
pub(crate) fn request_id(headers: &HeaderMap) -> RequestId {
    named_by(headers, REQUEST_ID)
}

fn named_by(headers: &HeaderMap, name: &str) -> RequestId {
    headers.get(name).and_then(|id| id.to_str().ok()).filter(|id| !id.is_empty()).map(Arc::from)
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

#[cfg(test)]
mod tests {
    use http::StatusCode;
    use http_body_util::BodyExt;

    use super::*;
    use crate::engine::tests::broken_engine;
    use crate::model::{ModelFiles, ModelSource};

    /// With an engine that broke down, and a model of a hundred tokens, of which the tokenizer has more.
    async fn api() -> Arc<Api> {
        let files = ModelFiles::open(&ModelSource::Builtin).unwrap();
        let tokenizer = Tokenizer::from_json(files.tokenizer.as_deref().unwrap().as_bytes()).unwrap();
        Arc::new(Api {
            model: "m".to_owned(),
            backend: "none".to_owned(),
            context_tokens: 100,
            block_tokens: 4,
            end_tokens: Arc::new([]),
            vocab_tokens: 100,
            text_limit: TextLimit::new(&tokenizer, 100),
            tokenizing: Tokenizing::new(1, 1),
            tokenizer,
            template: None,
            engine: broken_engine().await,
            metrics: Arc::default(),
            started: SystemTime::now(),
            simulation: None,
            instance: 1,
            kv_log: None,
            transfer: None,
        })
    }

    #[tokio::test]
    async fn a_worker_whose_engine_broke_down_is_not_healthy() {
        let api = api().await;
        for path in ["/health", "/readyz", "/livez"] {
            let response = api.handle(Request::get(path).body(Bytes::new()).unwrap()).await;
            assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE, "{path}");
        }
        let models = api.handle(Request::get("/v1/models").body(Bytes::new()).unwrap()).await;
        assert_eq!(models.status(), StatusCode::OK, "what needs no engine is answered");
    }

    #[tokio::test]
    async fn tokens_that_the_model_has_not_are_refused_before_they_come_to_the_engine() {
        let api = api().await;
        let body = json!({"prompt": "Once upon a time", "max_tokens": 1}).to_string();
        let request = Request::post("/v1/completions").body(Bytes::from(body)).unwrap();
        let response = api.handle(request).await;
        assert_eq!(response.status(), StatusCode::BAD_REQUEST);
        let answer = response.into_body().collect().await.unwrap().to_bytes();
        let answer = String::from_utf8_lossy(&answer);
        assert!(answer.contains("vocabulary has only 100") && answer.contains("invalid_value"), "{answer}");
    }
}
