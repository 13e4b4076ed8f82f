//! To a Roundhouse worker over gRPC: the client's request as it is inside one `Generate` call, and the worker's own HTTP
//! answer back in pieces.
//!
//! Not as tokens: OpenAI's words stay in one place, the worker's, errors and usage included, and the stages see the same bytes
//! whichever way a worker is reached. gRPC is a POST over HTTP/2, so connections, limits, refusals and keys are those of
//! [`HttpTransport`], and a dropped answer resets its stream, which cancels the generation. Knows no policies.

mod replies;

use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::header::{self, HeaderName};
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderValue, Response, StatusCode};
use http_body::{Body, Frame};
use prost::Message;
use roundhouse_wire::v1::generate_reply::Event;
use roundhouse_wire::v1::{GenerateReply, HttpHead};
use roundhouse_wire::{GENERATE_PATH, frame_call};

use self::replies::Replies;
use super::http::{HttpTransport, MuxBody};
use super::{Answer, Connections, Transport, TransportError, UpstreamBody, WorkerRequest};
use crate::grpc_messages::framed;
use crate::hop_by_hop;
use crate::payload::{Payload, PayloadBuilder};

const CONTENT_TYPE: HeaderValue = HeaderValue::from_static("application/grpc");
/// Bodies up to this are copied behind their call's head, so that both are one frame: most requests.
const SMALL_BODY_BYTES: usize = 4 << 10;

/// gRPC to one address.
pub struct GrpcTransport {
    http: HttpTransport,
}

impl GrpcTransport {
    /// gRPC over the HTTP/2 that `http` speaks.
    pub(super) fn new(http: HttpTransport) -> Self {
        Self { http }
    }

    /// Calls `path` with one message; the answers come one after the other.
    ///
    /// # Errors
    /// When there is no such answer; a status that says so is [`Broken::Grpc`](super::Broken::Grpc).
    pub async fn call<A: Message + Default>(
        &self,
        path: &'static str,
        message: &impl Message,
    ) -> Result<Answers<A>, TransportError> {
        let body = framed(message).ok_or(TransportError::TooLong { body_bytes: message.encoded_len() })?;
        let request = grpc_request(path, Payload::from(body));
        Ok(Answers(Replies::new(self.stream(&request).await?)))
    }

    /// Sends a call and waits for the head of its answer.
    async fn stream(&self, call: &WorkerRequest) -> Result<MuxBody, TransportError> {
        let (head, body) = self.http.attempt(call).await?.into_parts();
        let is_grpc = head
            .headers
            .get(header::CONTENT_TYPE)
            .is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc"));
        let UpstreamBody::Http2(body) = body else { return Err(strange("is not HTTP/2")) };
        if head.status != StatusCode::OK || !is_grpc {
            return Err(strange("is not gRPC; is it a Roundhouse worker?"));
        }
        // A call that fails at once has its status here, and no body.
        replies::check_status(&head.headers)?;
        Ok(body)
    }

    async fn attempt(&self, request: &WorkerRequest) -> Result<Response<UpstreamBody>, TransportError> {
        let call = WorkerRequest { underway: request.underway.clone(), ..call_of(request)? };
        let mut replies = Replies::new(self.stream(&call).await?);
        let first = poll_fn(|cx| replies.poll_event(cx)).await.transpose()?;
        let Some(Event::Head(head)) = first else { return Err(strange("has no head")) };
        let status = u16::try_from(head.status).ok().and_then(|status| StatusCode::from_u16(status).ok());
        let headers = headers_of(head)?;
        let length = headers.get(header::CONTENT_LENGTH).map(|length| length.to_str().ok()?.parse().ok());
        let missing_bytes =
            length.map(|length| length.ok_or(strange("has a length that is none"))).transpose()?;
        let mut response =
            Response::new(UpstreamBody::Grpc(Box::new(GrpcBody { replies, missing_bytes, last: None })));
        *response.status_mut() = status.ok_or(strange("has a status that is none"))?;
        *response.headers_mut() = headers;
        Ok(response)
    }
}

/// The answers of one call; dropped before their end, they cancel it.
pub struct Answers<A>(Replies<MuxBody, A>);

impl<A: Message + Default> Answers<A> {
    /// The next one; `None` after the last, if the worker says that all went well. May be given up and asked again.
    ///
    /// # Errors
    /// When the stream broke, or the worker ended it otherwise.
    pub async fn next(&mut self) -> Result<Option<A>, TransportError> {
        poll_fn(|cx| self.0.poll_next(cx)).await.transpose()
    }
}

impl Transport for GrpcTransport {
    fn send<'a>(&'a self, request: &'a WorkerRequest) -> Answer<'a> {
        Box::pin(self.attempt(request))
    }

    fn connections(&self) -> Connections {
        self.http.connections()
    }
}

/// The call that carries `request`, whose body is sent as it is.
fn call_of(request: &WorkerRequest) -> Result<WorkerRequest, TransportError> {
    let headers = hop_by_hop::end_to_end(&request.headers);
    let headers = headers.map(|(name, value)| (name.as_str(), value.as_bytes()));
    let (method, path) = (request.method.as_str(), request.path.as_str());
    let mut framed = frame_call(method, path, headers, request.body.len())
        .ok_or(TransportError::TooLong { body_bytes: request.body.len() })?;
    let body = if request.body.len() <= SMALL_BODY_BYTES {
        request.body.pieces().iter().for_each(|piece| framed.extend_from_slice(piece));
        Payload::from(framed.freeze())
    } else {
        let mut builder = PayloadBuilder::default();
        builder.push(framed.freeze());
        request.body.pieces().iter().cloned().for_each(|piece| builder.push(piece));
        builder.finish()
    };
    Ok(grpc_request(GENERATE_PATH, body))
}

fn grpc_request(path: &'static str, body: Payload) -> WorkerRequest {
    let mut headers = HeaderMap::with_capacity(2);
    headers.insert(header::CONTENT_TYPE, CONTENT_TYPE);
    let path = PathAndQuery::from_static(path);
    WorkerRequest { headers, body, ..WorkerRequest::post(path) }
}

fn headers_of(head: HttpHead) -> Result<HeaderMap, TransportError> {
    let mut headers = HeaderMap::with_capacity(head.headers.len());
    for header in head.headers {
        let name = HeaderName::from_bytes(header.name.as_bytes());
        let value = HeaderValue::from_maybe_shared(header.value);
        let (Ok(name), Ok(value)) = (name, value) else { return Err(strange("has a header that is none")) };
        headers.append(name, value);
    }
    Ok(headers)
}

fn strange(what: &'static str) -> TransportError {
    TransportError::Protocol { what }
}

/// What a body yields.
type Polled = Option<Result<Frame<Bytes>, TransportError>>;

/// The body of an answer; dropped before its end, it resets the stream, and the worker stops generating.
pub struct GrpcBody {
    replies: Replies<MuxBody, GenerateReply>,
    /// Of a length that is known, what has not come.
    missing_bytes: Option<usize>,
    /// The last piece of such a body: whoever gets it may never ask again, so it waits for the end, which comes with it.
    last: Option<Bytes>,
}

impl GrpcBody {
    /// Takes in what came; `None` if it was the last piece, whose end is not there yet.
    fn take(&mut self, reply: Option<Result<Event, TransportError>>) -> Option<Polled> {
        let piece = match reply {
            Some(Ok(Event::Body(piece))) => piece,
            Some(Ok(_)) => {
                return Some(Some(Err(strange("has something in its body that does not belong there"))));
            }
            Some(Err(error)) => return Some(Some(Err(error))),
            None if self.missing_bytes.is_some_and(|missing| missing > 0) => {
                return Some(Some(Err(strange("is shorter than its length"))));
            }
            None => return Some(self.last.take().map(|piece| Ok(Frame::data(piece)))),
        };
        let Some(missing) = self.missing_bytes else { return Some(Some(Ok(Frame::data(piece)))) };
        let Some(missing) = missing.checked_sub(piece.len()) else {
            return Some(Some(Err(strange("is longer than its length"))));
        };
        self.missing_bytes = Some(missing);
        if missing > 0 || piece.is_empty() {
            return Some(Some(Ok(Frame::data(piece))));
        }
        self.last = Some(piece);
        None
    }
}

impl Body for GrpcBody {
    type Data = Bytes;
    type Error = TransportError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Polled> {
        loop {
            let reply = std::task::ready!(self.replies.poll_event(cx));
            if let Some(frame) = self.take(reply) {
                return Poll::Ready(frame);
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.replies.is_ended() && self.last.is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use roundhouse_wire::FRAME_BYTES;
    use roundhouse_wire::v1::{GenerateRequest, generate_request::Input};

    /// The message that a worker gets.
    fn sent(request: &WorkerRequest) -> roundhouse_wire::v1::HttpCall {
        let call = call_of(request).unwrap();
        assert_eq!(call.path, "/roundhouse.worker.v1.Worker/Generate");
        let message = call.body.joined().slice(FRAME_BYTES..);
        match GenerateRequest::decode(message).unwrap().input {
            Some(Input::Http(call)) => call,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_request_goes_whole_and_without_headers_of_its_connection() {
        let mut request = WorkerRequest::post(PathAndQuery::from_static("/v1/chat/completions?a=b"));
        for (name, value) in [("connection", "x-mine"), ("x-mine", "1"), ("host", "router"), ("x-kept", "2")]
        {
            request.headers.append(name, HeaderValue::from_static(value));
        }
        for body_bytes in [0, 1, SMALL_BODY_BYTES, SMALL_BODY_BYTES + 1, 200 << 10] {
            request.body = Bytes::from(vec![b'x'; body_bytes]).into();
            let call = sent(&request);
            assert_eq!((call.method.as_str(), call.path.as_str()), ("POST", "/v1/chat/completions?a=b"));
            assert_eq!(call.body.len(), body_bytes);
            let headers: Vec<_> =
                call.headers.iter().map(|header| (header.name.as_str(), &header.value[..])).collect();
            assert_eq!(headers, [("x-kept", &b"2"[..])]);
        }
    }

    #[test]
    fn a_long_body_is_not_copied() {
        let body = Bytes::from(vec![b'x'; 100 << 10]);
        let mut request = WorkerRequest::get(PathAndQuery::from_static("/"));
        request.body = body.clone().into();
        let call = call_of(&request).unwrap();
        assert!(call.body.pieces().iter().any(|piece| piece.as_ptr() == body.as_ptr()));
    }
}
