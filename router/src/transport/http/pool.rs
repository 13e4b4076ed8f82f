//! The connections to one worker: each thread has its own, so that there is no lock, and a connection stays on the core
//! that serves its client.
//!
//! HTTP/1 connections wait here for their next request, the one used last in front, so that a burst's surplus ages and
//! goes. Engines close idle connections on their own (uvicorn after 5 s), so ours are given up a little earlier. HTTP/2
//! connections are shared while they carry requests. Knows nothing of requests.

use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{Semaphore, watch};

use super::link::Link;
use super::mux::Mux;
use crate::transport::Connections;

/// Idle HTTP/1 connections kept for a worker by each thread: more than one thread has in flight at a worker but in a burst.
const MAX_IDLE: usize = 256;
/// Idle HTTP/1 connections are given up after this; uvicorn's own limit is 5 s.
const IDLE_LIMIT: Duration = Duration::from_secs(4);
/// HTTP/2 connections to a worker by each thread. Servers allow 100 streams or more on each; beyond that requests wait.
const MAX_MUXES: usize = 8;
/// Between two looks at what is idle. Connections that have ended or aged are closed at most so much later.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);

/// One thread's connections to a worker, counted. Others only read.
#[derive(Default)]
pub(super) struct Counts {
    open: AtomicUsize,
    busy: AtomicUsize,
}

impl Counts {
    pub(super) fn opened(&self) {
        self.open.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn closed(&self) {
        self.open.fetch_sub(1, Ordering::Relaxed);
    }

    pub(super) fn took_up(&self) {
        self.busy.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn laid_down(&self) {
        self.busy.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What a worker turned out to speak.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Protocol {
    /// One request at a time.
    Http1,
    /// Many streams.
    Http2,
}

/// A connection that can take a request.
pub(super) enum Line {
    /// HTTP/1.
    Link(Box<Link>),
    /// HTTP/2.
    Mux(Mux),
}

/// Names a worker's connections, on whichever thread.
pub(super) struct Pool {
    /// Where each thread keeps them; used again once nobody holds the pool.
    index: usize,
    /// Tells it from the pools that had the same index before.
    generation: u64,
    counts: Mutex<Vec<Arc<Counts>>>,
    /// Closed when the worker has left.
    alive: watch::Receiver<()>,
}

/// Held by the transport; dropping it closes what is idle, on all threads.
pub(super) struct Alive(#[expect(dead_code, reason = "held to be dropped")] watch::Sender<()>);

/// One thread's part of a pool.
struct Shard {
    generation: u64,
    counts: Arc<Counts>,
    #[expect(clippy::vec_box, reason = "links travel between here and their bodies with every request")]
    idle: Vec<Box<Link>>,
    muxes: Vec<Mux>,
    protocol: Option<Protocol>,
    /// One HTTP/2 connection is made at a time, since the others can use it.
    connecting: Arc<Semaphore>,
    sweeper: Sweeper,
}

/// Whether there is a task that looks after what is idle.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sweeper {
    Absent,
    Present,
}

thread_local! {
    /// This thread's part of every pool, by index.
    static SHARDS: RefCell<Vec<Option<Shard>>> = const { RefCell::new(Vec::new()) };
}

/// Indexes that no pool has, and how many there are in all.
static INDEXES: Mutex<(Vec<usize>, usize)> = Mutex::new((Vec::new(), 0));

impl Pool {
    /// An empty pool, and what keeps it alive.
    pub(super) fn new() -> (Arc<Self>, Alive) {
        static GENERATIONS: AtomicU64 = AtomicU64::new(0);
        let mut indexes = INDEXES.lock().unwrap_or_else(PoisonError::into_inner);
        let index = indexes.0.pop().unwrap_or_else(|| {
            indexes.1 += 1;
            indexes.1 - 1
        });
        let (end, alive) = watch::channel(());
        let generation = GENERATIONS.fetch_add(1, Ordering::Relaxed);
        (Arc::new(Self { index, generation, counts: Mutex::default(), alive }), Alive(end))
    }

    /// All threads' connections.
    pub(super) fn connections(&self) -> Connections {
        let counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let sum = |of: fn(&Counts) -> &AtomicUsize| {
            counts.iter().map(|counts| of(counts).load(Ordering::Relaxed)).sum::<usize>()
        };
        let (open, busy) = (sum(|counts| &counts.open), sum(|counts| &counts.busy));
        Connections { idle: open.saturating_sub(busy), busy }
    }

    /// A connection of this thread that can take a request now.
    pub(super) fn take(&self) -> Option<Line> {
        self.with(|shard| match shard.protocol {
            Some(Protocol::Http2) => shard.take_mux().map(Line::Mux),
            _ => shard.take_link().map(Line::Link),
        })
    }

    /// Keeps an idle connection for this thread's next request.
    pub(super) fn put(self: &Arc<Self>, link: Box<Link>) {
        if self.alive.has_changed().is_err() {
            return;
        }
        let surplus = self.with(|shard| {
            if shard.idle.len() < MAX_IDLE {
                shard.idle.push(link);
                None
            } else {
                Some(link)
            }
        });
        drop(surplus);
        self.sweep_later();
    }

    /// Closes what this thread keeps that has been idle since that moment, or for longer: the worker has closed one that was.
    pub(super) fn discard_idle_since(&self, moment: Instant) {
        let idle = |shard: &mut Shard| {
            shard.idle.extract_if(.., |link| link.has_idled_since(moment)).collect::<Vec<_>>()
        };
        drop(self.with(idle));
    }

    /// Shares a new connection with this thread's other requests.
    pub(super) fn share(self: &Arc<Self>, mux: &Mux) {
        self.with(|shard| shard.muxes.push(mux.clone()));
        self.sweep_later();
    }

    /// Takes a connection that refuses streams out of use.
    pub(super) fn abandon(&self, mux: &Mux) {
        self.with(|shard| shard.muxes.retain(|other| !other.is(mux)));
    }

    /// What the worker spoke when last connected to.
    pub(super) fn protocol(&self) -> Option<Protocol> {
        self.with(|shard| shard.protocol)
    }

    /// Remembers what the worker speaks.
    pub(super) fn learn(&self, protocol: Protocol) {
        self.with(|shard| shard.protocol = Some(protocol));
    }

    /// This thread's counts.
    pub(super) fn counts(&self) -> Arc<Counts> {
        self.with(|shard| Arc::clone(&shard.counts))
    }

    /// The permit to make this thread's next HTTP/2 connection.
    pub(super) fn connecting(&self) -> Arc<Semaphore> {
        self.with(|shard| Arc::clone(&shard.connecting))
    }

    fn with<T>(&self, act: impl FnOnce(&mut Shard) -> T) -> T {
        SHARDS.with_borrow_mut(|shards| {
            if shards.len() <= self.index {
                shards.resize_with(self.index + 1, || None);
            }
            let slot = &mut shards[self.index];
            if slot.as_ref().is_none_or(|shard| shard.generation != self.generation) {
                let counts = Arc::<Counts>::default();
                self.counts.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(&counts));
                *slot = Some(Shard::new(self.generation, counts));
            }
            act(slot.as_mut().expect("was filled just now"))
        })
    }

    /// Sees to it that somebody closes what stays idle for too long, or when the worker leaves.
    fn sweep_later(self: &Arc<Self>) {
        let present = self.with(|shard| std::mem::replace(&mut shard.sweeper, Sweeper::Present));
        if present == Sweeper::Present {
            return;
        }
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn(Arc::clone(self).keep_sweeping())),
            // The runtime ends, and its sockets with it.
            Err(_) => drop(self.with(Shard::clear)),
        }
    }

    /// Closes what need not be kept, until nothing is left on this thread or the worker has left.
    async fn keep_sweeping(self: Arc<Self>) {
        let mut alive = self.alive.clone();
        loop {
            tokio::select! {
                () = tokio::time::sleep(SWEEP_INTERVAL) => {}
                _ = alive.changed() => break,
            }
            let swept = self.with(|shard| {
                let closing = shard.sweep();
                let nothing_left = shard.idle.is_empty() && shard.muxes.is_empty();
                if nothing_left {
                    shard.sweeper = Sweeper::Absent;
                }
                (closing, nothing_left)
            });
            if swept.1 {
                return;
            }
        }
        drop(self.with(Shard::clear));
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        INDEXES.lock().unwrap_or_else(PoisonError::into_inner).0.push(self.index);
    }
}

/// Connections on their way out: closed where the shards are not borrowed.
type Closing = (Vec<Box<Link>>, Vec<Mux>);

impl Shard {
    fn new(generation: u64, counts: Arc<Counts>) -> Self {
        Self {
            generation,
            counts,
            idle: Vec::new(),
            muxes: Vec::new(),
            protocol: None,
            connecting: Arc::new(Semaphore::new(1)),
            sweeper: Sweeper::Absent,
        }
    }

    /// The connection used last, if it is young enough. That it is still open shows when it is written to.
    fn take_link(&mut self) -> Option<Box<Link>> {
        let earliest = Instant::now().checked_sub(IDLE_LIMIT);
        self.idle.pop_if(|link| !link.is_older_than(earliest))
    }

    /// The connection with the fewest streams, unless it is full and there may be another.
    fn take_mux(&mut self) -> Option<Mux> {
        self.muxes.retain(Mux::is_open);
        let emptiest = self.muxes.iter().min_by_key(|mux| mux.streams())?;
        (!emptiest.is_full() || self.muxes.len() >= MAX_MUXES).then(|| emptiest.clone())
    }

    fn sweep(&mut self) -> Closing {
        let earliest = Instant::now().checked_sub(IDLE_LIMIT);
        (
            self.idle.extract_if(.., |link| !link.keeps(earliest)).collect(),
            self.muxes.extract_if(.., |mux| !mux.keeps()).collect(),
        )
    }

    fn clear(&mut self) -> Closing {
        self.sweeper = Sweeper::Absent;
        (std::mem::take(&mut self.idle), std::mem::take(&mut self.muxes))
    }
}
