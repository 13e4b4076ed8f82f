//! What the worker answers at which path.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, header};
use roundhouse_text::{ChatInput, ChatTemplate, Detokenizer, SpecialTokenPolicy, Tokenizer};
use serde_json::{Value, json};
use worker_core::Submission;

use crate::body::{ChunkSource, WorkerBody};
use crate::engine::Engine;
use crate::error::RequestError;
use crate::generation::TextStream;
use crate::metrics::Metrics;
use crate::openai::reply::{EventStream, ReplyHead};
use crate::openai::request::{GenerationRequest, Kind, Prompt, Streaming};

/// Bodies longer than this are read, rendered and tokenized on a thread of their own: at 1 to 2 MB/s a longer one would
/// hold up the other connections of its thread.
const INLINE_BYTES: usize = 512;
/// What OpenAI generates for a completion that does not say how much.
const COMPLETION_TOKENS: usize = 16;

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
}

/// A request that is ready for the engine.
struct Prepared {
    request: GenerationRequest,
    tokens: Vec<u32>,
}

impl Api {
    /// Answers one request.
    pub async fn handle(self: &Arc<Self>, request: Request<Bytes>) -> Response<WorkerBody> {
        let id = request.headers().get("x-request-id").cloned();
        let mut response = match self.route(request).await {
            Ok(response) => response,
            Err(error) => error.response(),
        };
        if let Some(id) = id {
            response.headers_mut().insert("x-request-id", id);
        }
        response
    }

    async fn route(self: &Arc<Self>, request: Request<Bytes>) -> Result<Response<WorkerBody>, RequestError> {
        let path = request.uri().path().to_owned();
        let takes = |method: &Method, allowed: &'static str| {
            let fits = method.as_str() == allowed || (allowed == "GET" && *method == Method::HEAD);
            if fits { Ok(()) } else { Err(RequestError::MethodNotAllowed { path: path.clone(), allowed }) }
        };
        let allowed = match path.as_str() {
            "/v1/chat/completions" | "/v1/completions" | "/flush_cache" => "POST",
            "/health" | "/livez" | "/readyz" | "/v1/models" | "/server_info" | "/get_server_info"
            | "/get_model_info" | "/metrics" => "GET",
            _ => return Err(RequestError::NotFound { path }),
        };
        takes(request.method(), allowed)?;
        match path.as_str() {
            "/v1/chat/completions" => self.generate(Kind::Chat, request.into_body()).await,
            "/v1/completions" => self.generate(Kind::Completion, request.into_body()).await,
            "/v1/models" => Ok(json_response(&json!({ "object": "list", "data": [self.model_entry()] }))),
            "/server_info" | "/get_server_info" => Ok(json_response(&self.server_info())),
            "/get_model_info" => {
                Ok(json_response(&json!({ "model_path": self.model, "is_generation": true })))
            }
            "/metrics" => {
                Ok(text_response("text/plain; version=0.0.4", self.metrics.render(&self.engine.stats())))
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
            "owned_by": "roundhouse",
            "max_model_len": self.context_tokens,
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
            "retractions": stats.retractions,
        })
    }

    async fn generate(
        self: &Arc<Self>,
        kind: Kind,
        body: Bytes,
    ) -> Result<Response<WorkerBody>, RequestError> {
        let Prepared { request, tokens } = self.prepare(kind, body).await?;
        let prompt_tokens = tokens.len();
        let max_tokens = self.max_tokens(&request, prompt_tokens)?;
        let end_tokens: Arc<[u32]> =
            if request.ignore_eos { Arc::new([]) } else { Arc::clone(&self.end_tokens) };
        let params = Arc::new(request.params);
        let generation =
            self.engine.submit(Submission { prompt: tokens, params, max_tokens, end_tokens, priority: 0 })?;
        let detokenizer = Detokenizer::new(self.tokenizer.clone(), request.stop);
        let stream = TextStream::new(generation, detokenizer, prompt_tokens, &self.metrics);
        let prefix = if kind == Kind::Chat { "chatcmpl" } else { "cmpl" };
        let head = ReplyHead {
            kind,
            id: format!("{prefix}-{:032x}", rand::random::<u128>()),
            created: seconds(SystemTime::now()),
            model: self.model.clone(),
        };
        if request.streaming == Streaming::No {
            return Ok(json_response(&head.whole(stream).await?));
        }
        let events = EventStream::new(head, request.streaming, stream);
        Ok(event_response(events))
    }

    /// Reads, renders and tokenizes; off this thread unless it is short.
    async fn prepare(self: &Arc<Self>, kind: Kind, body: Bytes) -> Result<Prepared, RequestError> {
        if body.len() <= INLINE_BYTES {
            return self.prepare_now(kind, &body);
        }
        let api = Arc::clone(self);
        let prepared = tokio::task::spawn_blocking(move || api.prepare_now(kind, &body)).await;
        prepared.unwrap_or_else(|_| Err(RequestError::Engine("reading the request panicked".to_owned())))
    }

    fn prepare_now(&self, kind: Kind, body: &[u8]) -> Result<Prepared, RequestError> {
        let request = GenerationRequest::parse(kind, body)?;
        if let Some(asked) = request.model.clone().filter(|asked| *asked != self.model) {
            return Err(RequestError::UnknownModel { asked, served: self.model.clone() });
        }
        let tokens = self.tokens(&request.prompt)?;
        if tokens.is_empty() {
            let message = "prompt is empty; give at least one token".to_owned();
            return Err(RequestError::Parameter { parameter: "prompt", message });
        }
        Ok(Prepared { request, tokens })
    }

    fn tokens(&self, prompt: &Prompt) -> Result<Vec<u32>, RequestError> {
        let failed =
            |error: roundhouse_text::TokenizerError| RequestError::Engine(format!("{error}: {error:?}"));
        match prompt {
            Prompt::Chat { messages, tools, template_variables } => {
                let Some(template) = &self.template else {
                    let message =
                        "this model has no chat template: messages cannot be rendered; use /v1/completions"
                            .to_owned();
                    return Err(RequestError::Parameter { parameter: "messages", message });
                };
                let input = ChatInput {
                    messages,
                    tools: tools.as_ref().and_then(Value::as_array).map(Vec::as_slice),
                    add_generation_prompt: true,
                    extra: Some(template_variables),
                    unix_seconds: i64::try_from(seconds(SystemTime::now())).unwrap_or(0),
                };
                let text = template.render(&input).map_err(RequestError::Template)?;
                self.tokenizer.encode(&text, SpecialTokenPolicy::Omit).map_err(failed)
            }
            Prompt::Text(text) => self.tokenizer.encode(text, SpecialTokenPolicy::Add).map_err(failed),
            Prompt::Tokens(tokens) => {
                if let Some(unknown) = tokens.iter().find(|token| **token as usize >= self.vocab_tokens) {
                    let message =
                        format!("prompt has token {unknown}, but the vocabulary has {}", self.vocab_tokens);
                    return Err(RequestError::Parameter { parameter: "prompt", message });
                }
                Ok(tokens.clone())
            }
        }
    }

    /// Tokens that may be generated: what was asked for, or what the context has room for.
    fn max_tokens(&self, request: &GenerationRequest, prompt_tokens: usize) -> Result<usize, RequestError> {
        let room = self.context_tokens.saturating_sub(prompt_tokens);
        let default = if request.kind == Kind::Chat { room } else { COMPLETION_TOKENS.min(room) };
        let max_tokens = request.max_tokens.unwrap_or(default).max(1);
        if max_tokens > room {
            return Err(RequestError::TooLong {
                context_tokens: self.context_tokens,
                needed_tokens: prompt_tokens + max_tokens,
                prompt_tokens,
                max_tokens,
            });
        }
        Ok(max_tokens)
    }
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
