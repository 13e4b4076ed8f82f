//! A generation's way in: read → tokenized → checked → submitted → replied to.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use bytes::Bytes;
use http::Response;
use roundhouse_text::Detokenizer;
use worker_core::{SamplingParams, Submission};

use super::{Api, event_response, json_response, seconds};
use crate::body::WorkerBody;
use crate::engine::{Caller, Generation, HandOver};
use crate::error::RequestError;
use crate::generation::TextStream;
use crate::openai::kv_transfer::KvTransferParams;
use crate::openai::logprobs::LogprobsWriter;
use crate::openai::prompt::{Input, Prompt};
use crate::openai::reply::{Choice, EventStream, ReplyHead};
use crate::openai::request::{GenerationRequest, Kind, Streaming};

/// What OpenAI generates for a completion that does not say how much.
const COMPLETION_TOKENS: usize = 16;

/// A request that is ready for the engine.
struct Prepared {
    request: GenerationRequest,
    prompts: Vec<PreparedPrompt>,
}

struct PreparedPrompt {
    tokens: Vec<u32>,
    max_tokens: usize,
    echo: Option<String>,
}

impl Api {
    pub(super) async fn generate(
        self: &Arc<Self>,
        kind: Kind,
        caller: Caller,
        body: Bytes,
    ) -> Result<Response<WorkerBody>, RequestError> {
        let length = body.len();
        let prepared =
            self.away(length, move |api| api.prepare(GenerationRequest::parse(kind, &body)?)).await?;
        let streaming = prepared.request.streaming;
        let came_to = caller.came_to;
        let offered = self.offered_prompt(&prepared).map(<[u32]>::to_vec);
        let mut choices = self.begin(prepared, caller).await?;
        let prefix = if kind == Kind::Chat { "chatcmpl" } else { "cmpl" };
        let head = ReplyHead {
            kind,
            id: format!("{prefix}-{:032x}", rand::random::<u128>()),
            created: seconds(SystemTime::now()),
            model: self.model.clone(),
        };
        if streaming == Streaming::No {
            let mut reply = head.whole(&mut choices).await?;
            if let (Some(transfer), Some(prompt)) = (&self.transfer, offered) {
                let kv = choices[0].text.take_kv();
                let params = kv.and_then(|kv| transfer.offer(&prompt, kv, came_to));
                if params.is_none() && prompt.len() > 1 {
                    transfer.keeps();
                }
                reply["kv_transfer_params"] = params.into();
            }
            return Ok(json_response(&reply));
        }
        Ok(event_response(EventStream::new(head, streaming, choices)))
    }

    /// The texts of what was asked for otherwise than in JSON; `length` is the request's, in bytes.
    pub(crate) async fn generate_text(
        self: &Arc<Self>,
        request: GenerationRequest,
        length: usize,
        caller: Caller,
    ) -> Result<Vec<Choice>, RequestError> {
        let prepared = self.away(length, move |api| api.prepare(request)).await?;
        self.begin(prepared, caller).await
    }

    async fn begin(&self, prepared: Prepared, caller: Caller) -> Result<Vec<Choice>, RequestError> {
        if let Some(wait) = self.simulation.as_ref().map(|simulation| simulation.pace().request())
            && !wait.is_zero()
        {
            tokio::time::sleep(wait).await;
        }
        let came = Instant::now();
        let hand_over = self.hand_over(&prepared, caller.came_to).await?;
        self.submit(prepared, caller, &hand_over, came)
    }

    /// The only prompt of a request with one answer.
    fn only_prompt(prepared: &Prepared) -> Option<&[u32]> {
        match &prepared.prompts[..] {
            [prompt] if prepared.request.choices == 1 => Some(&prompt.tokens),
            _ => None,
        }
    }

    /// The prompt whose KV another worker is to go on from: of an answer in one piece, since that is where it is said.
    fn offered_prompt<'a>(&self, prepared: &'a Prepared) -> Option<&'a [u32]> {
        let is_asked = prepared.request.kv_transfer == KvTransferParams::RemoteDecode;
        let is_possible = self.transfer.is_some() && prepared.request.streaming == Streaming::No;
        Self::only_prompt(prepared).filter(|_| is_asked && is_possible)
    }

    /// What becomes of the prompt's KV, or where it comes from.
    async fn hand_over(
        &self,
        prepared: &Prepared,
        came_to: Option<SocketAddr>,
    ) -> Result<HandOver, RequestError> {
        let (Some(transfer), Some(prompt)) = (&self.transfer, Self::only_prompt(prepared)) else {
            return Ok(HandOver::None);
        };
        Ok(match &prepared.request.kv_transfer {
            KvTransferParams::RemoteDecode if self.offered_prompt(prepared).is_some() => {
                transfer.hand_over(prompt.len(), came_to)
            }
            KvTransferParams::RemotePrefill(remote) => {
                // What would be refused fetches nothing: KV is given once.
                self.engine.check(prompt.len(), prepared.prompts[0].max_tokens)?;
                let of = (prompt, prepared.request.cache_salt.as_ref());
                let kv = transfer.fetch(remote.as_ref(), of, &self.engine).await;
                kv.map_or(HandOver::None, HandOver::Fetched)
            }
            KvTransferParams::RemoteDecode | KvTransferParams::None => HandOver::None,
        })
    }

    /// Renders, tokenizes and checks.
    fn prepare(&self, mut request: GenerationRequest) -> Result<Prepared, RequestError> {
        self.check_model(request.model.as_deref())?;
        request.check_vocabulary(self.vocab_tokens)?;
        self.check_simulation(&request)?;
        let prompts = match &request.input {
            Input::Chat(conversation) => {
                let tokens = self.conversation_tokens(conversation, request.special_tokens)?;
                vec![self.prepared(&request, tokens, None)?]
            }
            Input::Prompts(prompts) => prompts
                .iter()
                .map(|prompt| self.prepare_prompt(&request, prompt))
                .collect::<Result<_, _>>()?,
        };
        if request.params.min_tokens > 0 {
            request.params.withheld_tokens = self.end_tokens(&request).to_vec();
        }
        Ok(Prepared { request, prompts })
    }

    /// What a simulated engine does not have it refuses: there are no probabilities behind its words.
    fn check_simulation(&self, request: &GenerationRequest) -> Result<(), RequestError> {
        if self.simulation.is_none() {
            return Ok(());
        }
        let params = &request.params;
        let asked = [
            ("logprobs", params.logprobs.is_some()),
            ("logit_bias", !params.logit_bias.is_empty()),
            ("repetition_penalty", params.repetition_penalty != 1.0),
            ("frequency_penalty", params.frequency_penalty != 0.0),
            ("presence_penalty", params.presence_penalty != 0.0),
        ];
        let Some((parameter, _)) = asked.into_iter().find(|(_, asked)| *asked) else { return Ok(()) };
        let message = format!(
            "{parameter} is not to be had of this worker: its compute is simulated, and there are no probabilities behind \
             its random words; leave {parameter} out"
        );
        Err(RequestError::Parameter { parameter, message })
    }

    fn prepare_prompt(
        &self,
        request: &GenerationRequest,
        prompt: &Prompt,
    ) -> Result<PreparedPrompt, RequestError> {
        let tokens = self.prompt_tokens(prompt, request.special_tokens)?;
        let echo = match (request.echo, prompt) {
            (false, _) => None,
            (true, Prompt::Text(text)) => Some(text.clone()),
            (true, Prompt::Tokens(tokens)) => Some(self.text_of(tokens)?),
        };
        self.prepared(request, tokens, echo)
    }

    fn prepared(
        &self,
        request: &GenerationRequest,
        tokens: Vec<u32>,
        echo: Option<String>,
    ) -> Result<PreparedPrompt, RequestError> {
        if tokens.is_empty() {
            let message = "prompt is empty; it must have at least one token".to_owned();
            return Err(RequestError::Parameter { parameter: "prompt", message });
        }
        let max_tokens = self.max_tokens(request, tokens.len())?;
        request.check_min_tokens(max_tokens)?;
        Ok(PreparedPrompt { tokens, max_tokens, echo })
    }

    /// Tokens that may be generated: what was asked for, or what the context has room for.
    fn max_tokens(&self, request: &GenerationRequest, prompt_tokens: usize) -> Result<usize, RequestError> {
        let room = self.context_tokens.saturating_sub(prompt_tokens);
        // The pool may be smaller than the context: what nobody asked for must not fail for it.
        let pool_room = (self.engine.pool_tokens() + 1).saturating_sub(prompt_tokens);
        let default =
            if request.kind == Kind::Chat { room.min(pool_room) } else { COMPLETION_TOKENS.min(room) };
        let max_tokens = request.max_tokens.unwrap_or(default).max(1);
        if max_tokens > room {
            return Err(RequestError::TooLong {
                parameter: if request.kind == Kind::Chat { "messages" } else { "prompt" },
                context_tokens: self.context_tokens,
                needed_tokens: prompt_tokens.saturating_add(max_tokens),
                prompt_tokens,
                max_tokens,
            });
        }
        Ok(max_tokens)
    }

    /// Tokens that end the generation.
    fn end_tokens(&self, request: &GenerationRequest) -> Arc<[u32]> {
        match (request.ignore_eos, request.stop_tokens.is_empty()) {
            (false, true) => Arc::clone(&self.end_tokens),
            (false, false) => self.end_tokens.iter().chain(&request.stop_tokens).copied().collect(),
            (true, _) => request.stop_tokens.as_slice().into(),
        }
    }

    /// Begins all generations of a request. When one is refused, those before it are dropped, which cancels them.
    fn submit(
        &self,
        prepared: Prepared,
        caller: Caller,
        hand_over: &HandOver,
        came: Instant,
    ) -> Result<Vec<Choice>, RequestError> {
        let Prepared { request, prompts } = prepared;
        let caller = Caller { cache_salt: request.cache_salt.clone(), ..caller };
        let params: Vec<_> =
            (0..request.choices).map(|sibling| sibling_params(&request.params, sibling)).collect();
        let end_tokens = self.end_tokens(&request);
        let mut choices = Vec::with_capacity(prompts.len() * request.choices);
        for PreparedPrompt { tokens, max_tokens, echo } in prompts {
            let prompt_tokens = tokens.len();
            let submission = |params: &Arc<SamplingParams>| Submission {
                prompt: tokens.clone(),
                params: Arc::clone(params),
                max_tokens,
                end_tokens: Arc::clone(&end_tokens),
                // Of the scheduler's priorities the highest goes first, of vLLM's the lowest.
                priority: -i64::from(request.priority),
                adapter: None,
            };
            let generations =
                self.engine.submit(params.iter().map(submission).collect(), &caller, hand_over)?;
            self.metrics.prompt_tokens.inc_by(prompt_tokens as u64);
            for (sibling, generation) in generations.into_iter().enumerate() {
                choices.push(Choice {
                    text: self.text_stream(generation, &request, (prompt_tokens, came)),
                    echo: echo.clone(),
                    logprobs: request
                        .params
                        .logprobs
                        .map(|_| LogprobsWriter::new(request.kind, self.tokenizer.clone())),
                    is_first_of_prompt: sibling == 0,
                });
            }
        }
        Ok(choices)
    }

    fn text_stream(
        &self,
        generation: Generation,
        request: &GenerationRequest,
        (prompt_tokens, came): (usize, Instant),
    ) -> TextStream {
        let detokenizer = Detokenizer::new(self.tokenizer.clone(), request.stop.clone())
            .with_stops_after(request.params.min_tokens);
        TextStream::new(generation, detokenizer, (prompt_tokens, came), &self.metrics)
    }
}

/// The parameters of a choice: all draw with seeds of their own, the first with the request's.
fn sibling_params(params: &SamplingParams, sibling: usize) -> Arc<SamplingParams> {
    Arc::new(SamplingParams { seed: params.seed.wrapping_add(sibling as u64), ..params.clone() })
}
