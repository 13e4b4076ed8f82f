//! Ways to a worker. A transport carries one attempt: a request head and the client's bytes there, a head and a body
//! back. It knows nothing of policies, admission or the client's connection.

mod canned;
mod embedded;
mod error;
mod gateway;
mod grpc;
mod http;
mod ranked;

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use ::http::uri::PathAndQuery;
use ::http::{HeaderMap, Method, Response};
use bytes::Bytes;
use http_body::{Body, Frame};
use router_core::WorkerSlot;
use smallvec::SmallVec;

use crate::payload::Payload;

pub use canned::CannedTransport;
#[cfg(feature = "embedded")]
pub use embedded::EmbeddedTransport;
pub use error::{Broken, TransportError};
pub use gateway::{Gateway, HandingOver, Handover, ShownBody};
pub use grpc::{Answers, GrpcTransport};
#[cfg(any(test, fuzzing))]
pub use http::check_reply;
pub use http::tls::{read_certificates, trusting_only};
pub use http::{AddressError, Connector, HttpTransport};
pub use ranked::{RANK_FIELDS, RankedTransport};

/// A future of one attempt's answer.
pub type Answer<'a> =
    Pin<Box<dyn Future<Output = Result<Response<UpstreamBody>, TransportError>> + Send + 'a>>;

/// What a worker is asked, whoever it will be.
#[derive(Clone, Debug)]
pub struct WorkerRequest {
    /// Method.
    pub method: Method,
    /// Path and query.
    pub path: PathAndQuery,
    /// Headers as the client sent them; of these the transport sends what goes [from end to end](crate::hop_by_hop::end_to_end),
    /// and adds `host` and `content-length`.
    pub headers: HeaderMap,
    /// Body.
    pub body: Payload,
    /// Whether some of it has gone to a worker, where somebody wants to know.
    pub underway: Option<Arc<AtomicBool>>,
    /// Who may not be asked in place of a worker that turns out to stand still before it has answered; `None` if nobody may.
    pub leaves: Option<SmallVec<[WorkerSlot; 4]>>,
    /// Who sends it in the router's place, if a gateway does.
    pub gateway: Option<Gateway>,
}

impl WorkerRequest {
    /// A GET of `path`.
    #[must_use]
    pub fn get(path: PathAndQuery) -> Self {
        let (headers, body) = (HeaderMap::new(), Payload::default());
        Self { method: Method::GET, path, headers, body, underway: None, leaves: None, gateway: None }
    }

    /// A POST to `path` of what is yet to be filled in.
    #[must_use]
    pub fn post(path: PathAndQuery) -> Self {
        Self { method: Method::POST, ..Self::get(path) }
    }

    /// There is a way to the worker now, and the request goes there.
    fn sets_out(&self) {
        if let Some(underway) = &self.underway {
            underway.store(true, Ordering::Relaxed);
        }
    }
}

/// Carries requests to one worker.
pub trait Transport: Send + Sync {
    /// Sends `request` and waits for the head of the answer. Dropping the future, or the body it yields, cancels the request at
    /// the worker.
    fn send<'a>(&'a self, request: &'a WorkerRequest) -> Answer<'a>;

    /// What a gateway is to send in place of this transport. Fails where the worker speaks what gateways do not.
    fn hand_over<'a>(&'a self, _: &'a WorkerRequest) -> HandingOver<'a> {
        let what = "sends to workers that speak HTTP, and this one does not";
        Box::pin(std::future::ready(Err(TransportError::Gateway { what })))
    }

    /// Connections to the worker, over all threads; none where a call is no connection.
    fn connections(&self) -> Connections {
        Connections::default()
    }
}

/// How many connections there are to a worker at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Connections {
    /// That wait for a request.
    pub idle: usize,
    /// That carry at least one.
    pub busy: usize,
}

/// The body of a worker's answer.
pub enum UpstreamBody {
    /// From an HTTP/1 connection, which goes back to its pool at the end.
    Http1(http::LinkBody),
    /// One stream of an HTTP/2 connection.
    Http2(http::MuxBody),
    /// What a gRPC call brought.
    Grpc(Box<grpc::GrpcBody>),
    /// From a worker in this process.
    #[cfg(feature = "embedded")]
    Embedded(worker::WorkerBody),
    /// Shown by a gateway.
    Gateway(ShownBody),
    /// Known beforehand.
    Canned(VecDeque<Bytes>),
}

impl Body for UpstreamBody {
    type Data = Bytes;
    type Error = TransportError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, TransportError>>> {
        match self.get_mut() {
            Self::Http1(body) => Pin::new(body).poll_frame(cx),
            Self::Http2(body) => Pin::new(body).poll_frame(cx),
            Self::Grpc(body) => Pin::new(body).poll_frame(cx),
            #[cfg(feature = "embedded")]
            Self::Embedded(body) => Pin::new(body)
                .poll_frame(cx)
                .map(|frame| frame.map(|frame| frame.map_err(|never| match never {}))),
            Self::Gateway(body) => Pin::new(body).poll_frame(cx),
            Self::Canned(pieces) => Poll::Ready(pieces.pop_front().map(|piece| Ok(Frame::data(piece)))),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Http1(body) => body.is_end_stream(),
            Self::Http2(body) => body.is_end_stream(),
            Self::Grpc(body) => body.is_end_stream(),
            #[cfg(feature = "embedded")]
            Self::Embedded(body) => body.is_end_stream(),
            Self::Gateway(body) => body.is_end_stream(),
            Self::Canned(pieces) => pieces.is_empty(),
        }
    }
}
