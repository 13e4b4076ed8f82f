//! `Generate`: a whole HTTP request answered by a head and pieces of a body, or a prompt answered by tokens.

use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use futures_util::Stream;
use futures_util::future::{AbortHandle, AbortRegistration, Abortable};
use futures_util::stream::once;
use http::{HeaderName, HeaderValue, Method, Request, Uri, header};
use http_body::Body;
use roundhouse_text::SpecialTokenPolicy;
use roundhouse_types::FinishReason;
use roundhouse_wire::v1;
use roundhouse_wire::v1::generate_reply::Event;
use roundhouse_wire::v1::prompt::Content;
use tonic::Status;
use worker_core::SamplingParams;

use super::running::Place;
use super::{GrpcWorker, MAX_BODY_BYTES, Replies};
use crate::api;
use crate::body::WorkerBody;
use crate::engine::{Caller, RequestId};
use crate::error::RequestError;
use crate::generation::{Said, TextEvent, TextStream};
use crate::openai::kv_transfer::KvTransferParams;
use crate::openai::prompt::{Input, Prompt};
use crate::openai::request::{GenerationRequest, Kind, Streaming};
use crate::openai::sampling::{MAX_CHOICES, MAX_LOGPROBS};

/// Longest piece of a body in one message: nobody has to hold more at once.
const MAX_PIECE_BYTES: usize = 256 << 10;

/// Answers a whole HTTP request.
pub(super) fn over_http(
    worker: &GrpcWorker,
    (request_id, came_to): (String, Option<SocketAddr>),
    call: v1::HttpCall,
) -> Result<Replies<v1::GenerateReply>, Status> {
    let request = request_of(call)?;
    let id = named(request_id).or_else(|| api::request_id(request.headers()));
    let caller = Caller { request_id: id, came_to, ..Caller::default() };
    let (place, registration) = enter(worker, &caller);
    let api = Arc::clone(&worker.api);
    let answer = async move {
        if request.body().len() > MAX_BODY_BYTES {
            return RequestError::BodyTooLarge { limit_bytes: MAX_BODY_BYTES }.response();
        }
        api.handle_for(caller, request).await
    };
    // Nothing may be said before there is a head: an answer that is not streamed comes whole, after all its steps.
    let begin = async move {
        let (head, body) = answer.await.into_parts();
        HttpReplies { head: Some(head_of(&head, &body)), body, rest: Bytes::new() }
    };
    let replies = once(begin);
    Ok(abortable(futures_util::StreamExt::flatten(replies), place, registration))
}

/// Answers a prompt.
pub(super) async fn from_prompt(
    worker: &GrpcWorker,
    request_id: String,
    prompt: v1::Prompt,
) -> Result<Replies<v1::GenerateReply>, Status> {
    let caller = Caller { request_id: named(request_id), ..Caller::default() };
    let (place, registration) = enter(worker, &caller);
    let length = match &prompt.content {
        Some(Content::Text(text)) => text.len(),
        Some(Content::Tokens(tokens)) => size_of_val(tokens.ids.as_slice()),
        None => 0,
    };
    let request = generation_request(prompt)?;
    let choices = worker.api.generate_text(request, length, caller).await.map_err(|error| error.grpc())?;
    let texts = choices.into_iter().map(|choice| choice.text);
    Ok(abortable(TokenReplies::new(texts), place, registration))
}

fn named(id: String) -> RequestId {
    (!id.is_empty()).then(|| Arc::from(id))
}

/// A place among those that run, and what ends it from there; without an id it cannot be ended from outside.
fn enter(worker: &GrpcWorker, caller: &Caller) -> (Option<Place>, AbortRegistration) {
    match &caller.request_id {
        Some(id) => {
            let (place, registration) = worker.running.enter(id, caller.abort.clone());
            (Some(place), registration)
        }
        None => (None, AbortHandle::new_pair().1),
    }
}

/// `replies` until they end or are aborted, which is said.
fn abortable(
    replies: impl Stream<Item = Result<v1::GenerateReply, Status>> + Send + 'static,
    place: Option<Place>,
    registration: AbortRegistration,
) -> Replies<v1::GenerateReply> {
    Box::pin(UntilAborted { replies: Some(Box::pin(Abortable::new(replies, registration))), _place: place })
}

struct UntilAborted<S> {
    /// `None` after the end: what was generated for is gone, and with it the generation.
    replies: Option<Pin<Box<Abortable<S>>>>,
    _place: Option<Place>,
}

impl<S: Stream<Item = Result<v1::GenerateReply, Status>>> Stream for UntilAborted<S> {
    type Item = Result<v1::GenerateReply, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Some(replies) = &mut self.replies else { return Poll::Ready(None) };
        let next = ready!(replies.as_mut().poll_next(cx));
        if next.is_some() {
            return Poll::Ready(next);
        }
        let aborted = replies.is_aborted();
        self.replies = None;
        Poll::Ready(aborted.then(|| Err(Status::cancelled("aborted by its id"))))
    }
}

fn reply(event: Event) -> Result<v1::GenerateReply, Status> {
    Ok(v1::GenerateReply { event: Some(event) })
}

/// The request in a call.
fn request_of(call: v1::HttpCall) -> Result<Request<Bytes>, Status> {
    let wrong = |what: &str, given: &str| Status::invalid_argument(format!("{what} {given:?} is none"));
    let method = Method::from_bytes(call.method.as_bytes()).map_err(|_| wrong("method", &call.method))?;
    let uri = Uri::try_from(call.path.as_str()).ok().filter(|uri| uri.path().starts_with('/'));
    let mut request = Request::new(call.body);
    *request.method_mut() = method;
    *request.uri_mut() = uri.ok_or_else(|| wrong("path", &call.path))?;
    for v1::Header { name, value } in call.headers {
        let known = HeaderName::from_bytes(name.as_bytes()).map_err(|_| wrong("header", &name))?;
        let value = HeaderValue::from_maybe_shared(value).map_err(|_| wrong("value of header", &name))?;
        request.headers_mut().append(known, value);
    }
    Ok(request)
}

fn head_of(head: &http::response::Parts, body: &WorkerBody) -> v1::HttpHead {
    let header = |(name, value): (&HeaderName, &HeaderValue)| v1::Header {
        name: name.as_str().to_owned(),
        value: Bytes::copy_from_slice(value.as_bytes()),
    };
    let mut headers: Vec<_> =
        head.headers.iter().filter(|(name, _)| *name != header::CONNECTION).map(header).collect();
    if let Some(length) = body.size_hint().exact() {
        headers.push(header((&header::CONTENT_LENGTH, &HeaderValue::from(length))));
    }
    v1::HttpHead { status: head.status.as_u16().into(), headers }
}

/// An HTTP answer in messages.
struct HttpReplies {
    head: Option<v1::HttpHead>,
    body: WorkerBody,
    /// What of the last piece has not been sent.
    rest: Bytes,
}

impl Stream for HttpReplies {
    type Item = Result<v1::GenerateReply, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Some(head) = self.head.take() {
            return Poll::Ready(Some(reply(Event::Head(head))));
        }
        while self.rest.is_empty() {
            let Some(frame) = ready!(Pin::new(&mut self.body).poll_frame(cx)) else {
                return Poll::Ready(None);
            };
            let frame = frame.unwrap_or_else(|never| match never {});
            self.rest = frame.into_data().unwrap_or_default();
        }
        let piece_bytes = self.rest.len().min(MAX_PIECE_BYTES);
        Poll::Ready(Some(reply(Event::Body(self.rest.split_to(piece_bytes)))))
    }
}

/// Generations' tokens in messages.
struct TokenReplies {
    /// `None` for those that have ended.
    choices: Vec<Option<TextStream>>,
    /// The choice to ask first, so that none is served before all others for ever.
    turn: usize,
    /// Comes after the last token of a choice.
    last: Option<v1::Finished>,
}

impl TokenReplies {
    fn new(texts: impl Iterator<Item = TextStream>) -> Self {
        Self { choices: texts.map(Some).collect(), turn: 0, last: None }
    }

    /// What any choice says next; `None` when all have ended.
    fn poll_choices(&mut self, cx: &mut Context<'_>) -> Poll<Option<(usize, Option<TextEvent>)>> {
        let count = self.choices.len();
        let mut waits = false;
        for step in 0..count {
            let index = (self.turn + step) % count;
            let Some(text) = &mut self.choices[index] else { continue };
            if let Poll::Ready(event) = text.poll_next(cx) {
                self.turn = index + 1;
                return Poll::Ready(Some((index, event)));
            }
            waits = true;
        }
        if waits { Poll::Pending } else { Poll::Ready(None) }
    }

    /// The choice is over; how it ended comes next.
    fn finish(&mut self, index: usize, reason: FinishReason) {
        let usage = self.choices[index].take().map(|text| text.usage()).unwrap_or_default();
        let reason = match reason {
            FinishReason::Stop => v1::FinishReason::Stop,
            FinishReason::Length => v1::FinishReason::Length,
        };
        self.last = Some(v1::Finished {
            reason: reason.into(),
            usage: Some(v1::Usage {
                prompt_tokens: usage.prompt_tokens,
                completion_tokens: usage.completion_tokens,
                cached_tokens: usage.cached_tokens,
            }),
            choice: number(index),
        });
    }
}

impl Stream for TokenReplies {
    type Item = Result<v1::GenerateReply, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Some(finished) = self.last.take() {
            return Poll::Ready(Some(reply(Event::Finished(finished))));
        }
        let Some((index, event)) = ready!(self.poll_choices(cx)) else { return Poll::Ready(None) };
        Poll::Ready(Some(match event {
            Some(TextEvent::Text(said)) => token(index, said),
            Some(TextEvent::Finished(said, reason)) => {
                self.finish(index, reason);
                token(index, said)
            }
            failed => {
                // What the others would still say is of no use: the reply has failed.
                self.choices.clear();
                Err(match failed {
                    Some(TextEvent::Failed(reason)) => RequestError::Engine(reason).grpc(),
                    _ => Status::internal("the generation ended without a reason"),
                })
            }
        }))
    }
}

fn token(index: usize, said: Said) -> Result<v1::GenerateReply, Status> {
    let logprobs = said.logprobs.map(|found| {
        let top = found.top.into_iter().map(|(id, logprob)| v1::TokenLogprob { id, logprob });
        v1::Logprobs { drawn: found.drawn, top: top.collect() }
    });
    reply(Event::Token(v1::Token { id: said.token, text: said.text, choice: number(index), logprobs }))
}

/// A choice's number: there are 128 at most.
fn number(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(u32::MAX)
}

fn generation_request(prompt: v1::Prompt) -> Result<GenerationRequest, Status> {
    let content = match prompt.content {
        Some(Content::Text(text)) => Prompt::Text(text),
        Some(Content::Tokens(tokens)) => Prompt::Tokens(tokens.ids),
        None => return Err(Status::invalid_argument("prompt has no content; give text or tokens")),
    };
    let mut params = sampling(prompt.sampling.unwrap_or_default());
    params.logprobs = within("logprobs", prompt.logprobs, 0..=MAX_LOGPROBS)?;
    if let Some(problem) = params.problem() {
        return Err(Status::invalid_argument(format!("sampling: {problem}")));
    }
    Ok(GenerationRequest {
        // What OpenAI leaves open is what there is room for, as with a conversation.
        kind: Kind::Chat,
        model: None,
        input: Input::Prompts(vec![content]),
        special_tokens: SpecialTokenPolicy::Add,
        params,
        choices: within("choices", prompt.choices, 1..=MAX_CHOICES)?.unwrap_or(1) as usize,
        max_tokens: match prompt.max_tokens {
            Some(0) => return Err(Status::invalid_argument("max_tokens must be at least 1, not 0")),
            tokens => tokens.map(|tokens| tokens as usize),
        },
        stop: prompt.stop,
        stop_tokens: prompt.stop_tokens,
        ignore_eos: prompt.ignore_eos,
        echo: false,
        priority: prompt.priority,
        cache_salt: None,
        kv_transfer: KvTransferParams::None,
        streaming: Streaming::Yes,
    })
}

/// `value`, if it is within `range`.
fn within(name: &str, value: Option<u32>, range: RangeInclusive<u32>) -> Result<Option<u32>, Status> {
    match value.filter(|value| !range.contains(value)) {
        None => Ok(value),
        Some(wrong) => {
            let (least, most) = (range.start(), range.end());
            Err(Status::invalid_argument(format!("{name} must be from {least} to {most}, not {wrong}")))
        }
    }
}

fn sampling(sampling: v1::Sampling) -> SamplingParams {
    let default = SamplingParams::default();
    SamplingParams {
        temperature: sampling.temperature.unwrap_or(default.temperature),
        top_k: sampling.top_k,
        top_p: sampling.top_p.unwrap_or(default.top_p),
        min_p: sampling.min_p.unwrap_or(default.min_p),
        repetition_penalty: sampling.repetition_penalty.unwrap_or(default.repetition_penalty),
        frequency_penalty: sampling.frequency_penalty.unwrap_or(default.frequency_penalty),
        presence_penalty: sampling.presence_penalty.unwrap_or(default.presence_penalty),
        min_tokens: sampling.min_tokens.into(),
        seed: sampling.seed.unwrap_or_else(rand::random),
        ..default
    }
}
