//! What gateways ask: Envoy and those that speak its external processing (ext_proc), as Kubernetes' Gateway API Inference Extension has them do.
//!
//! A gateway takes the clients' requests and sends them to workers itself; of each it asks the router where. It is a gRPC call over HTTP/2: the
//! [`listener`](crate::listener) brings it, its [`conversation`] takes the request through the stages, and [`messages`] has the protocol's words.

mod conversation;
mod messages;
mod status;

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, HeaderValue, Request, Response, header};
use http_body::{Body, Frame};
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use roundhouse_wire::gateway::health_check_response::ServingStatus;
use roundhouse_wire::gateway::{HealthCheckRequest, HealthCheckResponse};

use self::conversation::Conversation;
use self::status::Code;
use crate::answers;
use crate::app::App;
use crate::grpc_messages::{Messages, frame_into};
use crate::spans::TRACEPARENT;
use crate::transport::TransportError;

const PROCESS: &str = "/envoy.service.ext_proc.v3.ExternalProcessor/Process";
const HEALTH_CHECK: &str = "/grpc.health.v1.Health/Check";
/// The one service whose health does not depend on workers: that the process answers.
const LIVENESS: &str = "liveness";
/// Longest request of a health check.
const MOST_CHECK_BYTES: usize = 1 << 10;

/// The answer to a call.
pub struct GatewayBody(Answer);

enum Answer {
    Conversation(Box<Conversation<Incoming>>),
    /// A message, and how the call ends.
    Whole(Option<Bytes>, Option<HeaderMap>),
}

/// Answers a call of a gateway.
pub async fn answer(app: &Arc<App>, request: Request<Incoming>) -> Response<GatewayBody> {
    let answer = match request.uri().path() {
        PROCESS => {
            let (head, body) = request.into_parts();
            let trace = head.headers.get(TRACEPARENT).cloned();
            Answer::Conversation(Box::new(Conversation::new(app, trace, body)))
        }
        HEALTH_CHECK => Box::pin(check_health(app, request.into_body())).await,
        path => {
            let message = format!("{path} is not served here; {PROCESS} and {HEALTH_CHECK} are");
            Answer::Whole(None, Some(status::trailers(Code::Unimplemented, &message)))
        }
    };
    let mut response = Response::new(GatewayBody(answer));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    response
}

async fn check_health(app: &App, body: Incoming) -> Answer {
    let failed = |code, message| Answer::Whole(None, Some(status::trailers(code, message)));
    let read = Limited::new(body, MOST_CHECK_BYTES).collect();
    let Ok(Ok(read)) = tokio::time::timeout(app.settings.client_timeout, read).await else {
        return failed(Code::Cancelled, "the check did not come, or is too long");
    };
    let mut messages = Messages::<HealthCheckRequest>::default();
    messages.push(read.to_bytes());
    let Ok(Some(check)) = messages.take_next() else {
        return failed(Code::InvalidArgument, "the check is none");
    };
    let serves = check.service == LIVENESS || answers::is_ready(app);
    let status = if serves { ServingStatus::Serving } else { ServingStatus::NotServing };
    let mut message = BytesMut::new();
    frame_into(&mut message, &HealthCheckResponse { status: status.into() });
    Answer::Whole(Some(message.freeze()), Some(status::trailers(Code::Ok, "")))
}

impl Body for GatewayBody {
    type Data = Bytes;
    type Error = TransportError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, TransportError>>> {
        match &mut self.0 {
            Answer::Conversation(conversation) => Pin::new(&mut **conversation).poll_frame(cx),
            Answer::Whole(message, trailers) => {
                let message = message.take().map(Frame::data);
                Poll::Ready(message.or_else(|| trailers.take().map(Frame::trailers)).map(Ok))
            }
        }
    }
}
