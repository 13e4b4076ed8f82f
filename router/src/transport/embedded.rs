//! To a worker inside this process: a function call in place of a connection.
#![cfg(feature = "embedded")]

use http::Request;
use worker::Worker;

use crate::payload::Payload;

use super::{Answer, Transport, UpstreamBody};

/// A worker with its own engine thread in this process.
pub struct EmbeddedTransport {
    worker: Worker,
}

impl EmbeddedTransport {
    /// A way to `worker`.
    #[must_use]
    pub fn new(worker: Worker) -> Self {
        Self { worker }
    }
}

impl Drop for EmbeddedTransport {
    fn drop(&mut self) {
        self.worker.shutdown();
    }
}

impl Transport for EmbeddedTransport {
    fn send(&self, request: Request<Payload>) -> Answer<'_> {
        Box::pin(async move {
            Ok(self.worker.handle(request.map(|body| body.joined())).await.map(UpstreamBody::Embedded))
        })
    }
}
