//! Stage 2: bound what comes in. Takes a place among the requests in flight and reads the body, within limits.
//!
//! Next: [`parse`](super::parse).

use std::sync::Arc;
use std::time::Duration;

use http::Request;
use http::request::Parts;
use http_body_util::BodyExt;
use hyper::body::{Body, Incoming};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::RequestError;
use crate::payload::{Payload, PayloadBuilder};

/// A request that has a place and its whole body.
pub struct Admitted {
    /// Head.
    pub head: Parts,
    /// Body, as it came.
    pub body: Payload,
    /// Its place among the requests in flight; free again when dropped.
    pub permit: OwnedSemaphorePermit,
}

/// The bounds of this stage.
#[derive(Debug)]
pub struct Admission {
    places: Arc<Semaphore>,
    limit: usize,
    max_body_bytes: usize,
    body_timeout: Duration,
}

impl Admission {
    /// At most `limit` requests in flight, each with a body of at most `max_body_bytes` that comes within `body_timeout`.
    #[must_use]
    pub fn new(limit: usize, max_body_bytes: usize, body_timeout: Duration) -> Self {
        let limit = limit.min(Semaphore::MAX_PERMITS);
        Self { places: Arc::new(Semaphore::new(limit)), limit, max_body_bytes, body_timeout }
    }

    /// Requests in flight.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.limit - self.places.available_permits()
    }

    /// Admits a request.
    ///
    /// # Errors
    /// When there is no place, or the body is too large, too slow or broken.
    pub async fn admit(&self, request: Request<Incoming>) -> Result<Admitted, RequestError> {
        let permit = Arc::clone(&self.places)
            .try_acquire_owned()
            .map_err(|_| RequestError::Overloaded { limit: self.limit })?;
        let (head, body) = request.into_parts();
        let body = tokio::time::timeout(self.body_timeout, self.read(body))
            .await
            .map_err(|_| RequestError::BodyTimeout { limit: self.body_timeout })??;
        Ok(Admitted { head, body, permit })
    }

    async fn read(&self, mut body: Incoming) -> Result<Payload, RequestError> {
        let limit_bytes = self.max_body_bytes;
        if body.size_hint().lower() > limit_bytes as u64 {
            return Err(RequestError::BodyTooLarge { limit_bytes });
        }
        let mut payload = PayloadBuilder::default();
        while let Some(frame) = body.frame().await {
            let Ok(data) = frame.map_err(RequestError::BodyBroken)?.into_data() else { continue };
            payload.push(data);
            if payload.len() > limit_bytes {
                return Err(RequestError::BodyTooLarge { limit_bytes });
            }
        }
        Ok(payload.finish())
    }
}
