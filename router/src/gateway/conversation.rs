//! One HTTP request, as a gateway tells of it: a gRPC call in which both sides speak as they like, for as long as the request and its answer take.
//!
//! The request walks through the same [stages](crate::stages) as one that a client has sent here. Where they would send it to a worker, the gateway is told
//! to; what the router would answer itself, the gateway is told to answer. Everything happens in one task, which polls what has to be: the gateway,
//! the stages, the answer on its way. Dropped, when the gateway resets the call since its client has left, it takes the request along.

use std::collections::{HashSet, VecDeque};
use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, HeaderValue, Response, StatusCode, header, response};
use http_body::{Body, Frame};
use prost::Message as _;
use roundhouse_wire::gateway as wire;
use roundhouse_wire::gateway::processing_request::Request as Said;
use tokio::time::Sleep;

use super::messages::{self, Direction, Follows};
use super::status::{self, Code};
use crate::answers::respond;
use crate::app::App;
use crate::error::error_body;
use crate::grpc_messages::{Messages, frame_into};
use crate::spans::TRACEPARENT;
use crate::stages::accept;
use crate::stages::relay::RelayBody;
use crate::transport::{Gateway, Handover, ShownBody, TransportError};
use crate::turns;

/// Longest piece of a body in a message to the gateway: Envoy recommends less than 64 KiB.
const PIECE_BYTES: usize = 62_000;
/// What is made ready for the gateway at once.
const BATCH_BYTES: usize = 256 << 10;
/// Longest message of a gateway: pieces are as long as its buffers, 1 MiB unless told otherwise.
const MOST_MESSAGE_BYTES: usize = 4 << 20;
/// Longest answer of a worker that the gateway is told to give in its place: an error.
const MOST_ANSWER_BYTES: usize = 4 << 20;

/// A request on its way through the stages.
type Serving = Pin<Box<dyn Future<Output = Response<RelayBody>> + Send>>;

/// The call's answers, as a body that is asked for them.
pub(super) struct Conversation<B> {
    app: Arc<App>,
    /// What the gateway says.
    incoming: B,
    messages: Messages<wire::ProcessingRequest>,
    gateway: Gateway,
    /// The gateway's own trace, of which the call is a part.
    trace: Option<HeaderValue>,
    /// The request's headers as they came, and its body.
    headers: HeaderMap,
    request: ShownBody,
    /// The same of the answer.
    answer_headers: HeaderMap,
    answer: ShownBody,
    has_trailers: HasTrailers,
    /// Whose head has said that nothing follows.
    is_bodiless: Bodiless,
    /// Of the request's body, what the gateway has not got back.
    to_worker: VecDeque<Bytes>,
    stage: Stage,
    /// The gateway has nothing more to say.
    has_said_all: bool,
    /// Messages that are to go out.
    out: BytesMut,
    /// How long nothing may come.
    silence: Option<Pin<Box<Sleep>>>,
}

/// Which of them has no body.
#[derive(Default)]
struct Bodiless {
    request: bool,
    answer: bool,
}

/// Whose body ends with trailers.
#[derive(Default)]
struct HasTrailers {
    request: bool,
    answer: bool,
}

enum Stage {
    /// Nothing has come.
    Silent,
    /// The stages have it.
    Serving(Serving),
    /// The gateway shows a worker's answer, and gets it back.
    Relaying(RelayBody),
    /// The gateway is told what to answer, once it is there.
    Answering(response::Parts, RelayBody, BytesMut),
    /// What is left to say is how it ended.
    Ends(HeaderMap),
    /// All has been said.
    Over,
}

impl<B> Conversation<B>
where
    B: Body<Data = Bytes, Error: std::error::Error> + Unpin,
{
    pub(super) fn new(app: &Arc<App>, trace: Option<HeaderValue>, incoming: B) -> Self {
        Self {
            app: Arc::clone(app),
            incoming,
            messages: Messages::of_at_most(MOST_MESSAGE_BYTES),
            gateway: Gateway::default(),
            trace,
            headers: HeaderMap::new(),
            request: ShownBody::default(),
            answer_headers: HeaderMap::new(),
            answer: ShownBody::default(),
            has_trailers: HasTrailers::default(),
            is_bodiless: Bodiless::default(),
            to_worker: VecDeque::new(),
            stage: Stage::Silent,
            has_said_all: false,
            out: BytesMut::new(),
            silence: Some(Box::pin(tokio::time::sleep(app.settings.client_timeout))),
        }
    }

    /// Takes in what the gateway says next. Returns whether anything has come of it. Nothing more is read while something waits to be taken: what the
    /// gateway's client sends, or its worker, is held up as it would be by a slow connection.
    fn hear(&mut self, cx: &mut Context<'_>, heard_bytes: &mut usize) -> bool {
        if self.has_pieces() || self.has_said_all {
            return false;
        }
        match self.messages.take_next() {
            Ok(Some(message)) => {
                if let Err(what) = self.take(message) {
                    self.refuse("filter", what);
                }
                return true;
            }
            Ok(None) => {}
            Err(what) => {
                self.refuse("call", what);
                return true;
            }
        }
        match Pin::new(&mut self.incoming).poll_frame(cx) {
            Poll::Pending => return false,
            Poll::Ready(Some(Ok(frame))) => {
                if let Ok(data) = frame.into_data() {
                    *heard_bytes += data.len();
                    self.messages.push(data);
                }
            }
            // It has shown all of the answer, and is owed some of it; or is about to be told what to answer.
            Poll::Ready(None) if self.is_owed() => self.has_said_all = true,
            // Its client has left, or its worker.
            Poll::Ready(None) => self.end(Code::Ok, ""),
            Poll::Ready(Some(Err(error))) => {
                tracing::debug!(%error, "a gateway's call broke");
                self.end(Code::Cancelled, "the call broke");
            }
        }
        true
    }

    fn take(&mut self, message: wire::ProcessingRequest) -> Result<(), &'static str> {
        let wire::ProcessingRequest { request, metadata_context, attributes, protocol_config } = message;
        match (request, &self.stage) {
            (Some(Said::RequestHeaders(headers)), Stage::Silent) => {
                check_modes(protocol_config, Follows::of(headers.end_of_stream))?;
                self.begin(&headers, messages::subset(metadata_context.as_ref()));
            }
            (Some(Said::RequestBody(body)), Stage::Serving(_)) => {
                self.request.push(body.body);
                if body.end_of_stream {
                    self.request.end();
                }
            }
            (Some(Said::RequestTrailers(_)), Stage::Serving(_)) => {
                self.has_trailers.request = true;
                self.request.end();
            }
            (Some(Said::ResponseHeaders(headers)), Stage::Serving(_)) if self.gateway.has_gone() => {
                let head = messages::response_head(&headers)?;
                self.answer_headers.clone_from(head.headers());
                self.is_bodiless.answer = headers.end_of_stream;
                if headers.end_of_stream {
                    self.answer.end();
                }
                let served_by = messages::served_by(metadata_context.as_ref(), &attributes);
                let roster = self.app.fleet.roster();
                let answer = head.map(|()| self.answer.clone());
                self.gateway.answered(answer, served_by, roster.snapshot.workers());
            }
            (Some(Said::ResponseBody(body)), Stage::Serving(_) | Stage::Relaying(_)) => {
                self.answer.push(body.body);
                if body.end_of_stream {
                    self.answer.end();
                }
            }
            (Some(Said::ResponseTrailers(_)), Stage::Serving(_) | Stage::Relaying(_)) => {
                self.has_trailers.answer = true;
                self.answer.end();
            }
            // It has answered by itself before it was told where to send the request.
            (Some(Said::ResponseHeaders(_)), Stage::Serving(_)) => self.end(Code::Ok, ""),
            // It could not know that its request has been answered.
            (Some(_), Stage::Answering(..) | Stage::Relaying(_) | Stage::Ends(_) | Stage::Over) => {}
            (Some(_), _) => return Err("says something before what should be before it"),
            (None, _) => return Err("says something that is not known here"),
        }
        Ok(())
    }

    fn begin(&mut self, headers: &wire::HttpHeaders, subset: Option<HashSet<SocketAddr>>) {
        self.silence = None;
        let mut request = match messages::request_head(headers) {
            Ok(request) => request,
            // Its client's fault.
            Err(what) => {
                let body = error_body(&format!("the request {what}"), "invalid_request_error", None, None);
                self.answered(respond(StatusCode::BAD_REQUEST, "application/json", body.to_vec()));
                return;
            }
        };
        let length = request.headers().get(header::CONTENT_LENGTH);
        let length = length.and_then(|length| length.to_str().ok()?.parse().ok()).unwrap_or(0);
        self.headers.clone_from(request.headers());
        self.request = ShownBody::of_length(length);
        self.is_bodiless.request = headers.end_of_stream;
        if headers.end_of_stream {
            self.request.end();
        }
        self.gateway = Gateway::new(subset);
        request.extensions_mut().insert(self.gateway.clone());
        if let (Some(trace), Some(_)) = (self.trace.take(), &self.app.spans) {
            request.headers_mut().entry(TRACEPARENT).or_insert(trace);
        }
        let (app, request) = (Arc::clone(&self.app), request.map(|()| self.request.clone()));
        self.stage = Stage::Serving(Box::pin(async move { accept::serve(&app, request).await }));
    }

    /// Lets the stages go on. Returns whether they have.
    fn go_on(&mut self, cx: &mut Context<'_>) -> bool {
        let had_pieces = self.has_pieces();
        let progressed = match &mut self.stage {
            Stage::Serving(serving) => match serving.as_mut().poll(cx) {
                Poll::Ready(response) => self.answered(response),
                Poll::Pending => false,
            },
            Stage::Relaying(body) => match Pin::new(&mut *body).poll_frame(cx) {
                Poll::Ready(frame) => {
                    let follows = Follows::of(body.is_end_stream());
                    self.relayed(frame, follows)
                }
                Poll::Pending => false,
            },
            Stage::Answering(_, body, _) => match Pin::new(body).poll_frame(cx) {
                Poll::Ready(frame) => self.read(frame),
                Poll::Pending => false,
            },
            Stage::Silent => self.waits_in_vain(cx),
            Stage::Ends(_) | Stage::Over => false,
        };
        if let Some(handover) = self.gateway.take_handover() {
            self.hand_over(&handover);
            return true;
        }
        // What has been taken makes room for what comes next, which nothing else would ask for.
        progressed || had_pieces && !self.has_pieces()
    }

    /// Whether pieces of a body wait to be taken.
    fn has_pieces(&self) -> bool {
        self.request.has_pieces() || self.answer.has_pieces()
    }

    /// Whether the gateway, which has no more to say, is to be told something yet.
    fn is_owed(&self) -> bool {
        matches!(self.stage, Stage::Answering(..)) || self.gateway.has_gone() && self.answer.is_end_stream()
    }

    /// Ends a call that has said nothing for too long, or at the router's own end.
    fn waits_in_vain(&mut self, cx: &mut Context<'_>) -> bool {
        let is_late = self.silence.as_mut().is_some_and(|silence| silence.as_mut().poll(cx).is_ready());
        let ends = is_late || self.app.cuts_off();
        if ends {
            self.end(Code::Cancelled, "no request has come");
        }
        ends
    }

    fn hand_over(&mut self, handover: &Handover) {
        self.say(&messages::send_to(&self.headers, handover));
        for piece in handover.body.pieces() {
            self.to_worker.extend(cut(piece.clone()));
        }
        if self.to_worker.is_empty() && !self.is_bodiless.request {
            self.to_worker.push_back(Bytes::new());
        }
    }

    /// The request's body, as far as the gateway takes it.
    fn give_back(&mut self) {
        while self.out.len() < BATCH_BYTES
            && let Some(piece) = self.to_worker.pop_front()
        {
            let is_last = self.to_worker.is_empty();
            let follows = Follows::of(is_last && !self.has_trailers.request);
            self.say(&messages::piece(Direction::ToWorker, piece, follows));
            if is_last && self.has_trailers.request {
                self.say(&messages::trailers(Direction::ToWorker));
            }
        }
    }

    /// The stages have an answer, or the beginning of one.
    fn answered(&mut self, response: Response<RelayBody>) -> bool {
        let (head, body) = response.into_parts();
        if body.is_at_gateway() {
            self.say(&messages::pass_head(&self.answer_headers, &head.headers));
            self.stage = Stage::Relaying(body);
        } else {
            self.stage = Stage::Answering(head, body, BytesMut::new());
        }
        true
    }

    /// A piece of the answer has gone through the stages.
    fn relayed(&mut self, frame: Option<Result<Frame<Bytes>, TransportError>>, follows: Follows) -> bool {
        match frame {
            Some(Ok(frame)) => {
                let is_last = follows == Follows::Nothing;
                let ends = is_last && !self.has_trailers.answer;
                let mut pieces = cut(frame.into_data().unwrap_or_default()).peekable();
                while let Some(piece) = pieces.next() {
                    let follows = Follows::of(ends && pieces.peek().is_none());
                    self.say(&messages::piece(Direction::ToClient, piece, follows));
                }
                if is_last {
                    self.is_relayed();
                }
            }
            Some(Err(error)) => self.end(Code::Unavailable, &error.to_string()),
            None => {
                if !self.has_trailers.answer && !self.is_bodiless.answer {
                    self.say(&messages::piece(Direction::ToClient, Bytes::new(), Follows::Nothing));
                }
                self.is_relayed();
            }
        }
        true
    }

    fn is_relayed(&mut self) {
        if self.has_trailers.answer {
            self.say(&messages::trailers(Direction::ToClient));
        }
        self.end(Code::Ok, "");
    }

    /// A piece of what the gateway is to answer.
    fn read(&mut self, frame: Option<Result<Frame<Bytes>, TransportError>>) -> bool {
        let Stage::Answering(head, _, read) = &mut self.stage else { return false };
        match frame {
            Some(Ok(frame)) => {
                read.extend_from_slice(&frame.into_data().unwrap_or_default());
                if read.len() > MOST_ANSWER_BYTES {
                    self.end(Code::Internal, "the answer is too long to be passed on");
                }
            }
            Some(Err(error)) => self.end(Code::Unavailable, &error.to_string()),
            None => {
                let answer = messages::answer(head, read.split().freeze());
                self.say(&answer);
                self.end(Code::Ok, "");
            }
        }
        true
    }

    fn say(&mut self, message: &wire::ProcessingResponse) {
        debug_assert!(message.encoded_len() < 16 << 20, "pieces are short");
        frame_into(&mut self.out, message);
    }

    /// What the gateway says is wrong, in its `part`.
    fn refuse(&mut self, part: &'static str, what: &'static str) {
        let message = format!("the gateway's {part} {what}");
        if self.app.failure_logs.allow(&"gateway") {
            tracing::warn!("{message}");
        }
        self.end(Code::InvalidArgument, &message);
    }

    fn end(&mut self, code: Code, message: &str) {
        self.to_worker.clear();
        self.stage = Stage::Ends(status::trailers(code, message));
    }
}

/// Only where the gateway gives bodies away, and takes back what is to go on, can requests wait here for their body and their turn.
fn check_modes(config: Option<wire::ProtocolConfiguration>, follows: Follows) -> Result<(), &'static str> {
    let Some(config) = config else { return Ok(()) };
    let duplex = wire::BodySendMode::FullDuplexStreamed;
    if config.request_body_mode() != duplex && follows == Follows::More {
        return Err("is to have request_body_mode: FULL_DUPLEX_STREAMED");
    }
    if config.response_body_mode() != duplex {
        return Err("is to have response_body_mode: FULL_DUPLEX_STREAMED");
    }
    Ok(())
}

/// In pieces that are short enough for a message.
fn cut(mut bytes: Bytes) -> impl Iterator<Item = Bytes> {
    std::iter::from_fn(move || {
        let piece = bytes.split_to(bytes.len().min(PIECE_BYTES));
        (!piece.is_empty()).then_some(piece)
    })
}

impl<B> Body for Conversation<B>
where
    B: Body<Data = Bytes, Error: std::error::Error> + Unpin,
{
    type Data = Bytes;
    type Error = TransportError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, TransportError>>> {
        let mut heard_bytes = 0;
        loop {
            self.give_back();
            if !self.out.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(self.out.split().freeze()))));
            }
            if let Stage::Ends(trailers) = &mut self.stage {
                let trailers = std::mem::take(trailers);
                self.stage = Stage::Over;
                return Poll::Ready(Some(Ok(Frame::trailers(trailers))));
            }
            if matches!(self.stage, Stage::Over) {
                return Poll::Ready(None);
            }
            let (heard, progressed) = (self.hear(cx, &mut heard_bytes), self.go_on(cx));
            if !heard && !progressed {
                return Poll::Pending;
            }
            if heard_bytes >= turns::TURN_BYTES && self.out.is_empty() {
                // Others of this thread have their turns.
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
        }
    }
}
