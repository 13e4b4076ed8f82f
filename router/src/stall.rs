//! Workers that stand still, as those see it who wait for one: its [prober](crate::probes) finds it, [`exchange`](crate::stages::exchange) and
//! [`relay`](crate::stages::relay) heed it. Knows nothing of either.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use router_core::{Role, Worker};
use tokio::sync::Notify;
use tokio::sync::futures::OwnedNotified;

use crate::disaggregation::PrefillProtocol;

/// Whether `other` could have what `worker` does not do: it takes requests, fails apart from it, and does as much.
#[must_use]
pub fn can_stand_in(other: &Worker, worker: &Worker, protocol: PrefillProtocol) -> bool {
    let does_as_much = other.spec.role == worker.spec.role
        || worker.spec.role == Role::Prefill && protocol.generates_alone();
    other.slot != worker.slot
        && does_as_much
        && other.is_usable()
        && !other.spec.shares_endpoint(&worker.spec)
}

/// Whether one worker stands still, and who waits to hear of it.
#[derive(Debug, Default)]
pub struct Stalls {
    is_now: AtomicBool,
    /// How often it was found.
    count: AtomicU32,
    /// How often those who wait were told.
    told: AtomicU32,
    silence_ms: AtomicU64,
    tells: Arc<Notify>,
    /// Streams of events that have begun there, and are watched.
    streams: AtomicU32,
}

impl Stalls {
    /// The worker has generated nothing for so long.
    pub fn found(&self, silence: Duration) {
        self.silence_ms.store(u64::try_from(silence.as_millis()).unwrap_or(u64::MAX), Ordering::Relaxed);
        self.count.fetch_add(1, Ordering::Relaxed);
        self.is_now.store(true, Ordering::Relaxed);
    }

    /// Wakes all who wait for it to be found.
    pub fn tell(&self) {
        self.told.fetch_add(1, Ordering::Release);
        self.tells.notify_waiters();
    }

    /// The worker goes on, or another is in its place.
    pub fn over(&self) {
        self.is_now.store(false, Ordering::Relaxed);
    }

    /// Whether the worker stands still.
    #[must_use]
    pub fn is_now(&self) -> bool {
        self.is_now.load(Ordering::Relaxed)
    }

    /// How often it was found to.
    #[must_use]
    pub fn count(&self) -> u32 {
        self.count.load(Ordering::Relaxed)
    }

    /// How long it had been silent, the last time.
    #[must_use]
    pub fn silence(&self) -> Duration {
        Duration::from_millis(self.silence_ms.load(Ordering::Relaxed))
    }

    /// Streams that have begun there.
    #[must_use]
    pub fn streams(&self) -> u32 {
        self.streams.load(Ordering::Relaxed)
    }

    /// Ends when those who wait are told the next time.
    pub async fn next(&self) {
        let seen = self.told();
        loop {
            let told = self.tells.notified();
            if self.told() != seen {
                return;
            }
            told.await;
        }
    }

    /// The same for a stream that has begun there: costs a look as long as the same task asks.
    #[must_use]
    pub fn watch(self: &Arc<Self>) -> Watch {
        self.streams.fetch_add(1, Ordering::Relaxed);
        Watch { seen: self.told(), stalls: Arc::clone(self), told: None }
    }

    fn told(&self) -> u32 {
        self.told.load(Ordering::Acquire)
    }
}

/// A stream's watch over its worker: ends when it is told that the worker stands still, and may begin anew.
#[derive(Debug)]
pub struct Watch {
    stalls: Arc<Stalls>,
    seen: u32,
    told: Option<Pin<Box<OwnedNotified>>>,
}

impl Watch {
    /// Whether it has been told. One atomic.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.stalls.told() != self.seen
    }

    /// Waits for the next time.
    pub fn begin_anew(&mut self) {
        (self.seen, self.told) = (self.stalls.told(), None);
    }

    /// How long the worker had been silent.
    #[must_use]
    pub fn silence(&self) -> Duration {
        self.stalls.silence()
    }
}

impl Future for Watch {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let Self { stalls, seen, told } = self.get_mut();
        let notified = told.get_or_insert_with(|| Box::pin(Arc::clone(&stalls.tells).notified_owned()));
        match (notified.as_mut().poll(cx), stalls.told() != *seen) {
            (Poll::Pending, false) => Poll::Pending,
            _ => Poll::Ready(()),
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stalls.streams.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[tokio::test]
    async fn those_who_wait_are_told_and_those_who_come_later_the_next_time() {
        let stalls = Arc::new(Stalls::default());
        let mut watch = stalls.watch();
        let waits = tokio::spawn({
            let stalls = Arc::clone(&stalls);
            async move { stalls.next().await }
        });
        assert!((&mut watch).now_or_never().is_none() && !watch.is_over());
        tokio::task::yield_now().await;
        stalls.found(Duration::from_secs(30));
        assert_eq!((stalls.is_now(), stalls.count(), stalls.silence()), (true, 1, Duration::from_secs(30)));
        stalls.tell();
        assert!(watch.is_over() && (&mut watch).now_or_never().is_some());
        waits.await.unwrap();
        watch.begin_anew();
        assert!((&mut watch).now_or_never().is_none() && stalls.next().now_or_never().is_none());
        stalls.tell();
        watch.await;
        assert_eq!(stalls.streams(), 0, "it is gone");
        stalls.over();
        assert!(!stalls.is_now());
    }
}
