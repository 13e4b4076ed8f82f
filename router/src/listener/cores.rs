//! The threads that serve clients. Each has a runtime of its own, so that an HTTP/1 request never changes threads; a
//! connection, or a stream of an HTTP/2 connection, goes to the core with the fewest open streams.
//!
//! Knows no protocol. Next: [`connection`](super::connection).

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::Poll;
use std::time::Duration;

use prometheus::{IntCounter, IntGauge};
use tokio::runtime::{Builder, Handle};
use tokio::sync::{Notify, oneshot};

use super::metrics::ListenerMetrics;

/// A core, as those see it that give it work.
struct Core {
    runtime: Handle,
    /// HTTP/1 connections and HTTP/2 streams.
    streams: IntGauge,
    streams_total: IntCounter,
    connections: AtomicUsize,
    closing: Closing,
}

/// What those who are told to break off have to say so to their clients.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Tells the connections of a core that the router is on its way out. One for each core, so that cores share no lock.
#[derive(Clone, Debug, Default)]
pub struct Closing(Arc<Stages>);

#[derive(Debug, Default)]
struct Stages {
    closes: Event,
    breaks_off: Event,
}

impl Closing {
    /// Resolves when connections are to close once they have answered what they have been asked.
    pub async fn begins(&self) {
        self.0.closes.comes().await;
    }

    /// Resolves when they can wait for answers no longer.
    pub async fn breaks_off(&self) {
        self.0.breaks_off.comes().await;
    }
}

/// Something that happens once.
#[derive(Debug, Default)]
struct Event {
    has_come: AtomicBool,
    notify: Notify,
}

impl Event {
    fn happen(&self) {
        self.has_come.store(true, Ordering::Release);
        self.notify.notify_waiters();
    }

    /// Resolves when it happens. Costs one load where it is polled again.
    async fn comes(&self) {
        let mut notified = pin!(self.notify.notified());
        let mut waits = false;
        poll_fn(|cx| {
            if self.has_come.load(Ordering::Acquire) {
                return Poll::Ready(());
            }
            if std::mem::replace(&mut waits, true) { Poll::Pending } else { notified.as_mut().poll(cx) }
        })
        .await;
    }
}

/// Where work goes; cheap to clone.
#[derive(Clone)]
pub struct Spread {
    cores: Arc<[Core]>,
    shared: Arc<Shared>,
}

struct Shared {
    metrics: ListenerMetrics,
    /// All connections that are open.
    connections: AtomicUsize,
    /// A connection has ended.
    ended: Notify,
}

/// A place on a core for one stream; free again when dropped.
pub struct OpenStream {
    streams: IntGauge,
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        self.streams.dec();
    }
}

/// A connection among those of a core; none any more when dropped.
pub struct OpenConnection {
    spread: Spread,
    core: usize,
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.spread.cores[self.core].connections.fetch_sub(1, Ordering::Relaxed);
        self.spread.shared.metrics.connections.dec();
        self.spread.shared.connections.fetch_sub(1, Ordering::Relaxed);
        self.spread.shared.ended.notify_one();
    }
}

impl OpenConnection {
    /// Tells when the router is on its way out.
    #[must_use]
    pub fn closing(&self) -> &Closing {
        &self.spread.cores[self.core].closing
    }

    /// Runs a stream of this connection on the core with the fewest, on this one if others have no fewer.
    pub fn spawn_stream(&self, stream: impl Future<Output = ()> + Send + 'static) {
        let cores = &self.spread.cores;
        let streams = |index: &usize| (cores[*index].streams.get(), *index != self.core);
        let Some(index) = (0..cores.len()).min_by_key(streams) else { return };
        let open = cores[index].open_stream();
        cores[index].runtime.spawn(async move {
            let _open = open;
            stream.await;
        });
    }
}

impl Core {
    fn open_stream(&self) -> OpenStream {
        self.streams.inc();
        self.streams_total.inc();
        OpenStream { streams: self.streams.clone() }
    }
}

impl Spread {
    /// Connections that are open.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.shared.connections.load(Ordering::Relaxed)
    }

    /// Resolves when none is open.
    async fn finished(&self) {
        while self.connections() > 0 {
            self.shared.ended.notified().await;
        }
    }

    /// Runs a connection on the core with the fewest open streams; among those, on the one with the fewest connections, since
    /// an HTTP/2 connection may be open without a stream.
    pub fn spawn_connection<S>(&self, serve: impl FnOnce(OpenConnection, OpenStream) -> S)
    where
        S: Future<Output = ()> + Send + 'static,
    {
        let load = |core: &Core| (core.streams.get(), core.connections.load(Ordering::Relaxed));
        let Some((index, core)) = self.cores.iter().enumerate().min_by_key(|(_, core)| load(core)) else {
            return;
        };
        core.connections.fetch_add(1, Ordering::Relaxed);
        self.shared.connections.fetch_add(1, Ordering::Relaxed);
        self.shared.metrics.connections.inc();
        let connection = OpenConnection { spread: self.clone(), core: index };
        core.runtime.spawn(serve(connection, core.open_stream()));
    }
}

/// The threads. Dropped without a drain they end at once, and all connections with them.
pub struct Cores {
    spread: Spread,
    threads: Vec<Thread>,
}

struct Thread {
    /// Dropped, it ends the thread.
    _stop: oneshot::Sender<()>,
    handle: std::thread::JoinHandle<()>,
}

impl Cores {
    /// Starts `count` threads.
    ///
    /// # Errors
    /// When the system has no thread or runtime for us.
    pub fn start(count: usize, metrics: &ListenerMetrics) -> std::io::Result<Self> {
        let (mut cores, mut threads) = (Vec::new(), Vec::new());
        for index in 0..count {
            let runtime = Builder::new_current_thread().enable_all().build()?;
            let label = [index.to_string()];
            cores.push(Core {
                runtime: runtime.handle().clone(),
                streams: metrics.core_streams.with_label_values(&label),
                streams_total: metrics.core_streams_total.with_label_values(&label),
                connections: AtomicUsize::new(0),
                closing: Closing::default(),
            });
            let (stop, stopped) = oneshot::channel::<()>();
            let thread = std::thread::Builder::new().name(format!("core-{index}"));
            let handle = thread.spawn(move || {
                // Nobody sends; the sender is dropped.
                let _ = runtime.block_on(stopped);
                runtime.shutdown_background();
            })?;
            threads.push(Thread { _stop: stop, handle });
        }
        let shared =
            Shared { metrics: metrics.clone(), connections: AtomicUsize::new(0), ended: Notify::new() };
        Ok(Self { spread: Spread { cores: cores.into(), shared: Arc::new(shared) }, threads })
    }

    /// Where work goes.
    #[must_use]
    pub fn spread(&self) -> &Spread {
        &self.spread
    }

    /// Lets every connection finish what it has in flight and waits for that until `limit` has passed. Then has what is left told by
    /// `break_off` that it must not go on, gives it a moment to say so, and ends the threads. Returns how many connections were cut off.
    pub async fn drain(self, limit: Duration, break_off: impl FnOnce()) -> usize {
        for core in self.spread.cores.iter() {
            core.closing.0.closes.happen();
        }
        // Over or not, what is left is counted.
        let _ = tokio::time::timeout(limit, self.spread.finished()).await;
        let cut_off = self.spread.connections();
        if cut_off > 0 {
            break_off();
            for core in self.spread.cores.iter() {
                core.closing.0.breaks_off.happen();
            }
            // Whoever does not read what it is told in that time does not hear of it.
            let _ = tokio::time::timeout(LAST_WORDS, self.spread.finished()).await;
        }
        for Thread { _stop, handle } in self.threads {
            drop(_stop);
            if handle.join().is_err() {
                tracing::error!("a core has panicked");
            }
        }
        cut_off
    }
}
