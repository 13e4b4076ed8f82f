//! Ways to a worker. A transport carries one attempt: a request head and the client's bytes there, a head and a body
//! back. It knows nothing of policies, admission or the client's connection.

mod embedded;
mod http;

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use ::http::{Request, Response};
use bytes::Bytes;
use http_body::{Body, Frame};

use crate::payload::Payload;

#[cfg(feature = "embedded")]
pub use embedded::EmbeddedTransport;
pub use http::HttpTransport;

/// A future of one attempt's answer.
pub type Answer<'a> =
    Pin<Box<dyn Future<Output = Result<Response<UpstreamBody>, TransportError>> + Send + 'a>>;

/// Carries requests to one worker.
pub trait Transport: Send + Sync {
    /// Sends `request`, whose URI is path and query, and waits for the head of the answer. Dropping the future, or the
    /// body it yields, cancels the request at the worker.
    fn send(&self, request: Request<Payload>) -> Answer<'_>;
}

/// Why an attempt failed.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    /// The worker's host name has no address.
    #[error("{host} cannot be resolved")]
    Resolve {
        /// The name.
        host: String,
        /// What the resolver said.
        #[source]
        source: std::io::Error,
    },
    /// Nobody listens there.
    #[error("no connection to {address}")]
    Connect {
        /// Where.
        address: String,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// The connection took too long.
    #[error("no connection within {} s", limit.as_secs_f64())]
    ConnectTimeout {
        /// The limit.
        limit: Duration,
    },
    /// The connection broke.
    #[error("connection broke: {0}")]
    Broken(#[source] hyper::Error),
    /// The reply did not begin in time.
    #[error("no first byte within {} s", limit.as_secs_f64())]
    FirstByte {
        /// The limit.
        limit: Duration,
    },
    /// The reply stood still for too long.
    #[error("nothing came for {} s", limit.as_secs_f64())]
    Idle {
        /// The limit.
        limit: Duration,
    },
    /// The request as a whole took too long.
    #[error("not answered within {} s", limit.as_secs_f64())]
    Total {
        /// The limit.
        limit: Duration,
    },
    /// The worker left the fleet between pick and dispatch.
    #[error("the worker has left")]
    Left,
}

impl TransportError {
    /// Whether it was a limit that ran out.
    #[must_use]
    pub fn is_timeout(&self) -> bool {
        matches!(
            self,
            Self::ConnectTimeout { .. } | Self::FirstByte { .. } | Self::Idle { .. } | Self::Total { .. }
        )
    }

    /// Whether it means that the worker is not there at all.
    #[must_use]
    pub fn is_unreachable(&self) -> bool {
        matches!(self, Self::Resolve { .. } | Self::Connect { .. } | Self::ConnectTimeout { .. })
    }
}

/// The body of a worker's answer.
pub enum UpstreamBody {
    /// From an HTTP connection, which goes back to its pool at the end.
    Http(http::PooledBody),
    /// From a worker in this process.
    #[cfg(feature = "embedded")]
    Embedded(worker::WorkerBody),
}

impl Body for UpstreamBody {
    type Data = Bytes;
    type Error = TransportError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, TransportError>>> {
        match self.get_mut() {
            Self::Http(body) => Pin::new(body).poll_frame(cx),
            #[cfg(feature = "embedded")]
            Self::Embedded(body) => Pin::new(body)
                .poll_frame(cx)
                .map(|frame| frame.map(|frame| frame.map_err(|never| match never {}))),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Http(body) => body.is_end_stream(),
            #[cfg(feature = "embedded")]
            Self::Embedded(body) => body.is_end_stream(),
        }
    }
}
