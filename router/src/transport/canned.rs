//! A worker whose answer is known beforehand: for benchmarks of what the router itself costs, and for tests.

use std::collections::VecDeque;

use bytes::Bytes;
use http::{HeaderMap, Response, StatusCode};

use super::{Answer, Transport, UpstreamBody, WorkerRequest};

/// Gives every request the same answer, at once.
#[derive(Clone, Debug)]
pub struct CannedTransport {
    /// Headers of the answer, whose status is 200.
    pub headers: HeaderMap,
    /// Its body.
    pub pieces: VecDeque<Bytes>,
}

impl Transport for CannedTransport {
    fn send<'a>(&'a self, _: &'a WorkerRequest) -> Answer<'a> {
        let mut response = Response::new(UpstreamBody::Canned(self.pieces.clone()));
        *response.status_mut() = StatusCode::OK;
        response.headers_mut().clone_from(&self.headers);
        Box::pin(std::future::ready(Ok(response)))
    }
}
