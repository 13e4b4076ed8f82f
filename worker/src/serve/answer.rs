//! From a request on a connection to the worker's answer: by HTTP, or by gRPC where that is what the request says.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Extensions, Request, Response, header};
use http_body::{Body, Frame, SizeHint};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::Incoming;
use roundhouse_wire::v1::worker_server::WorkerServer;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tonic::codegen::Service;

use super::CLIENT_TIMEOUT;
use crate::api::CameTo;
use crate::error::RequestError;
use crate::grpc::{GrpcWorker, MAX_BODY_BYTES};
use crate::{Worker, WorkerBody};

/// Answers the requests of all connections.
#[derive(Clone)]
pub(super) struct Answerer {
    worker: Worker,
    grpc: WorkerServer<GrpcWorker>,
    /// What the connection has called, if it is known.
    came_to: Option<CameTo>,
}

impl Answerer {
    /// Answers for `worker`, which drains once `draining` turns true.
    pub(super) fn new(worker: &Worker, draining: &watch::Receiver<bool>) -> Self {
        Self { worker: worker.clone(), grpc: worker.grpc().until(draining.clone()).service(), came_to: None }
    }

    /// The same for one connection.
    pub(super) fn of(&self, stream: &TcpStream) -> Self {
        Self { came_to: stream.local_addr().ok().map(CameTo), ..self.clone() }
    }

    fn extensions(&self) -> Extensions {
        let mut extensions = Extensions::new();
        if let Some(came_to) = self.came_to {
            extensions.insert(came_to);
        }
        extensions
    }

    /// Answers a request by HTTP.
    pub(super) async fn http(&self, request: Request<Incoming>) -> Response<WorkerBody> {
        let (mut head, body) = request.into_parts();
        head.extensions.extend(self.extensions());
        let whole = tokio::time::timeout(CLIENT_TIMEOUT, Limited::new(body, MAX_BODY_BYTES).collect()).await;
        let body = match whole {
            Ok(Ok(body)) => body.to_bytes(),
            Ok(Err(error)) if error.is::<LengthLimitError>() => {
                return RequestError::BodyTooLarge { limit_bytes: MAX_BODY_BYTES }.response();
            }
            Ok(Err(error)) => return RequestError::Body(error.to_string()).response(),
            Err(_) => return RequestError::Body("not in time".to_owned()).response(),
        };
        self.worker.handle(Request::from_parts(head, body)).await
    }

    /// Answers a request in its own way.
    pub(super) async fn http_or_grpc(&self, mut request: Request<Incoming>) -> Response<EitherBody> {
        let kind = request.headers().get(header::CONTENT_TYPE);
        if !kind.is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc")) {
            return self.http(request).await.map(EitherBody::Http);
        }
        request.extensions_mut().extend(self.extensions());
        let answer = self.grpc.clone().call(request).await;
        answer.unwrap_or_else(|never| match never {}).map(EitherBody::Grpc)
    }
}

/// The body of either kind of answer.
pub(super) enum EitherBody {
    Http(WorkerBody),
    Grpc(tonic::body::Body),
}

impl Body for EitherBody {
    type Data = Bytes;
    type Error = tonic::Status;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, tonic::Status>>> {
        match self.get_mut() {
            Self::Http(body) => Pin::new(body)
                .poll_frame(cx)
                .map(|frame| frame.map(|frame| frame.map_err(|never| match never {}))),
            Self::Grpc(body) => Pin::new(body).poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Http(body) => body.is_end_stream(),
            Self::Grpc(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Http(body) => body.size_hint(),
            Self::Grpc(body) => body.size_hint(),
        }
    }
}
