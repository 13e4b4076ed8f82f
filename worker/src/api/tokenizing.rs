//! Where texts are tokenized: on threads beside those of the connections, as many as there are cores, with a bounded
//! queue before them. Whoever leaves the queue is not tokenized any more.
//!
//! Knows no texts, only work and its size. Next: [`tokens`](super::tokens) says what is done.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::Semaphore;

use crate::error::RequestError;

/// What all texts that wait may hold of memory together; four of the longest bodies.
const MAX_WAITING_BYTES: usize = 256 << 20;

/// The threads, and who waits for them.
#[derive(Debug)]
pub struct Tokenizing {
    threads: Arc<Semaphore>,
    waiting: AtomicUsize,
    waiting_bytes: AtomicUsize,
    most_waiting: usize,
}

/// A place among those who wait; dropping it leaves.
struct Place<'a> {
    queue: &'a Tokenizing,
    bytes: usize,
}

impl Tokenizing {
    /// On `threads` threads, with at most `most_waiting` texts before them.
    #[must_use]
    pub fn new(threads: usize, most_waiting: usize) -> Self {
        let threads = Arc::new(Semaphore::new(threads.clamp(1, Semaphore::MAX_PERMITS)));
        Self { threads, waiting: AtomicUsize::new(0), waiting_bytes: AtomicUsize::new(0), most_waiting }
    }

    /// Does `work` on a text of so many bytes, once a thread is free. Dropping the future before that leaves the queue.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce() -> Result<T, RequestError> + Send + 'static,
    ) -> Result<T, RequestError> {
        let threads = Arc::clone(&self.threads);
        let thread = match Arc::clone(&threads).try_acquire_owned() {
            Ok(thread) => thread,
            Err(_) => {
                let _place = self.enter(bytes)?;
                threads.acquire_owned().await.expect("nobody closes it")
            }
        };
        let client = Arc::new(());
        let here = Arc::downgrade(&client);
        let begun = tokio::task::spawn_blocking(move || {
            let _thread = thread;
            // The runtime may have had other work for its threads meanwhile.
            (here.strong_count() > 0).then(work)
        });
        let done = begun.await;
        drop(client);
        let failed = || RequestError::Engine("reading the request panicked".to_owned());
        done.ok().flatten().ok_or_else(failed)?
    }

    fn enter(&self, bytes: usize) -> Result<Place<'_>, RequestError> {
        let waiting = self.waiting.fetch_add(1, Ordering::Relaxed);
        let before_bytes = self.waiting_bytes.fetch_add(bytes, Ordering::Relaxed);
        let place = Place { queue: self, bytes };
        if waiting >= self.most_waiting || before_bytes.saturating_add(bytes) > MAX_WAITING_BYTES {
            return Err(RequestError::TextsWait { waiting });
        }
        Ok(place)
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.queue.waiting.fetch_sub(1, Ordering::Relaxed);
        self.queue.waiting_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::mpsc;

    use futures_util::FutureExt;

    use super::*;

    /// Work that waits to be told to end.
    fn held() -> (impl FnOnce() -> Result<(), RequestError> + Send + 'static, mpsc::Sender<()>) {
        let (end, told) = mpsc::channel();
        let work = move || {
            told.recv().unwrap();
            Ok(())
        };
        (work, end)
    }

    #[tokio::test]
    async fn one_more_than_may_wait_is_refused_and_whoever_leaves_is_not_tokenized() {
        let queue = Tokenizing::new(1, 1);
        let (work, end) = held();
        let mut first = pin!(queue.run(9, work));
        assert!(first.as_mut().now_or_never().is_none(), "it has the thread");
        let never = || -> Result<(), RequestError> { panic!("its client has left") };
        {
            let mut second = pin!(queue.run(9, never));
            assert!(second.as_mut().now_or_never().is_none(), "it waits");
            let refused = queue.run(9, || Ok(())).await.unwrap_err();
            assert!(matches!(refused, RequestError::TextsWait { waiting: 1 }), "{refused}");
            let response = refused.response();
            assert_eq!(
                (response.status().as_u16(), &response.headers()["retry-after"]),
                (429, &"1".parse().unwrap())
            );
        }
        let mut next = pin!(queue.run(9, || Ok(7)));
        assert!(next.as_mut().now_or_never().is_none(), "there is room again");
        end.send(()).unwrap();
        first.await.unwrap();
        assert_eq!(next.await.unwrap(), 7);
        assert_eq!(queue.waiting.load(Ordering::Relaxed) + queue.waiting_bytes.load(Ordering::Relaxed), 0);
    }

    #[tokio::test]
    async fn what_waits_is_bounded_in_bytes_too() {
        let queue = Tokenizing::new(1, 100);
        let (work, end) = held();
        let mut first = pin!(queue.run(9, work));
        assert!(first.as_mut().now_or_never().is_none());
        let mut large = pin!(queue.run(MAX_WAITING_BYTES, || Ok(())));
        assert!(large.as_mut().now_or_never().is_none());
        assert!(matches!(queue.run(1, || Ok(())).await, Err(RequestError::TextsWait { waiting: 1 })));
        end.send(()).unwrap();
        large.await.unwrap();
    }
}
