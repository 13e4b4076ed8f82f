//! Stage 2: bound what comes in. A request takes a place among those in flight, or waits in line for one.
//!
//! Next: [`parse`](super::parse), which reads the body.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use http::Request;
use http::request::Parts;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::RequestError;

/// A request that has a place.
pub struct Admitted<B> {
    /// Head.
    pub head: Parts,
    /// Body, of which nothing has been read.
    pub body: B,
    /// Its place among the requests in flight; free again when dropped.
    pub permit: OwnedSemaphorePermit,
}

/// The bounds of this stage.
#[derive(Debug)]
pub struct Admission {
    places: Arc<Semaphore>,
    max_in_flight: usize,
    queued: AtomicUsize,
    max_queue: usize,
    queue_timeout: Duration,
}

impl Admission {
    /// At most `max_in_flight` requests in flight, and `max_queue` that wait for a place, no longer than `queue_timeout`.
    #[must_use]
    pub fn new(max_in_flight: usize, max_queue: usize, queue_timeout: Duration) -> Self {
        let max_in_flight = max_in_flight.min(Semaphore::MAX_PERMITS);
        let places = Arc::new(Semaphore::new(max_in_flight));
        Self { places, max_in_flight, queued: AtomicUsize::new(0), max_queue, queue_timeout }
    }

    /// Requests in flight.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.max_in_flight - self.places.available_permits()
    }

    /// Requests that wait for a place.
    #[must_use]
    pub fn queued(&self) -> usize {
        self.queued.load(Ordering::Relaxed)
    }

    /// Admits a request, when its turn has come.
    ///
    /// # Errors
    /// When neither a place nor one in the queue is free, or the wait is over.
    pub async fn admit<B>(&self, request: Request<B>) -> Result<Admitted<B>, RequestError> {
        let permit = match Arc::clone(&self.places).try_acquire_owned() {
            Ok(permit) => permit,
            Err(_) => self.wait().await?,
        };
        let (head, body) = request.into_parts();
        Ok(Admitted { head, body, permit })
    }

    /// Waits in line. The semaphore is fair: a place that becomes free goes to whoever has waited longest.
    async fn wait(&self) -> Result<OwnedSemaphorePermit, RequestError> {
        let (limit, max_queue) = (self.max_in_flight, self.max_queue);
        let _queued = Queued::enter(&self.queued, max_queue)
            .ok_or(RequestError::Overloaded { limit, queue: max_queue })?;
        let place = Arc::clone(&self.places).acquire_owned();
        match tokio::time::timeout(self.queue_timeout, place).await {
            Ok(permit) => Ok(permit.expect("the semaphore is never closed")),
            Err(_) => Err(RequestError::QueueTimeout { limit: self.queue_timeout }),
        }
    }
}

/// A place in the queue; left when dropped, also by a client that leaves.
struct Queued<'a>(&'a AtomicUsize);

impl<'a> Queued<'a> {
    fn enter(queued: &'a AtomicUsize, limit: usize) -> Option<Self> {
        let one_more = |count| (count < limit).then_some(count + 1);
        queued.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).is_ok().then(|| Self(queued))
    }
}

impl Drop for Queued<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    const LONG: Duration = Duration::from_secs(600);

    fn poll<T>(future: std::pin::Pin<&mut impl Future<Output = T>>) -> Poll<T> {
        future.poll(&mut Context::from_waker(Waker::noop()))
    }

    #[tokio::test]
    async fn places_go_to_whoever_has_waited_longest() {
        let admission = Admission::new(1, 2, LONG);
        let first = admission.admit(Request::new(1)).await.unwrap();
        let (mut second, mut third) =
            (pin!(admission.admit(Request::new(2))), pin!(admission.admit(Request::new(3))));
        assert!(poll(second.as_mut()).is_pending() && poll(third.as_mut()).is_pending());
        assert_eq!((admission.in_flight(), admission.queued()), (1, 2));
        let refused = admission.admit(Request::new(4)).await;
        assert!(matches!(refused, Err(RequestError::Overloaded { limit: 1, queue: 2 })));
        drop(first);
        assert!(poll(third.as_mut()).is_pending(), "it is not its turn");
        let Poll::Ready(Ok(second)) = poll(second.as_mut()) else { panic!("its turn has come") };
        assert_eq!((second.body, admission.queued()), (2, 1));
        drop(second);
        assert_eq!(third.await.unwrap().body, 3);
        assert_eq!((admission.in_flight(), admission.queued()), (0, 0));
    }

    #[tokio::test]
    async fn without_a_queue_nobody_waits() {
        let admission = Admission::new(1, 0, LONG);
        let _first = admission.admit(Request::new(())).await.unwrap();
        let refused = admission.admit(Request::new(())).await;
        assert!(matches!(refused, Err(RequestError::Overloaded { .. })));
    }

    #[tokio::test]
    async fn a_wait_has_an_end_and_whoever_leaves_is_forgotten() {
        let admission = Admission::new(1, 1, Duration::from_millis(10));
        let _first = admission.admit(Request::new(())).await.unwrap();
        let refused = admission.admit(Request::new(())).await;
        assert!(matches!(refused, Err(RequestError::QueueTimeout { .. })));
        {
            let mut leaves = pin!(admission.admit(Request::new(())));
            assert!(poll(leaves.as_mut()).is_pending());
            assert_eq!(admission.queued(), 1);
        }
        assert_eq!(admission.queued(), 0);
    }
}
