//! To a worker inside this process: a function call in place of a connection.
#![cfg(feature = "embedded")]

use http::{HeaderValue, Request, Uri, header};
use worker::Worker;

use crate::hop_by_hop;

use super::{Answer, Transport, UpstreamBody, WorkerRequest};

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
    fn send<'a>(&'a self, request: &'a WorkerRequest) -> Answer<'a> {
        request.sets_out();
        let mut call = Request::new(request.body.joined());
        call.method_mut().clone_from(&request.method);
        *call.uri_mut() = Uri::from(request.path.clone());
        *call.headers_mut() = hop_by_hop::end_to_end_map(&request.headers);
        call.headers_mut().insert(header::CONTENT_LENGTH, HeaderValue::from(request.body.len()));
        Box::pin(async move { Ok(self.worker.handle(call).await.map(UpstreamBody::Embedded)) })
    }
}
