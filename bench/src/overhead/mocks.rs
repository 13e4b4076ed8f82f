//! The mock workers: engines that answer at once, so that what is measured is what stands in front of them.
//!
//! They run on the generator's thread, and a part of the measurement tells them how to answer ([`Plan`]) directly: no
//! header or field has to survive the router for that. Each remembers the last [`CACHED_PROMPTS`] system prompts, as an
//! engine's prefix cache would. Knows nothing of the router. Next on the path: [`answers`],
//! [`cache`] and [`tokens`].

pub mod answers;
pub mod cache;
pub mod tokens;

use std::collections::BTreeSet;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context;
use memchr::memmem::Finder;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};

use super::workload::{TAG_BYTES, TAG_MARK};
use crate::ticker::Ticker;
use crate::wire::message::{MessageReader, Side, StartLine};
use crate::wire::socket::{ReadError, read_message, set_options};
use answers::{Answers, Endpoint};
use cache::PromptCache;

/// System prompts that each mock's cache holds: with eight prompts over four mocks, a quarter hits by chance.
pub const CACHED_PROMPTS: usize = 2;
/// Unknown paths that are remembered.
const REMEMBERED_PATHS: usize = 20;

/// How generation requests are answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plan {
    /// With one JSON object, at once.
    Whole,
    /// With this error status.
    Status(u16),
    /// With a stream of `chunks` at a pace.
    Paced {
        /// Chunks of each stream.
        chunks: u32,
        /// When they come.
        pace: Pace,
    },
    /// With a stream of this many chunks, each written as soon as the socket takes it.
    Flood {
        /// Chunks of each stream.
        chunks: u32,
    },
    /// With the first chunk of a stream that then says nothing until the other side leaves.
    Held,
}

/// When the chunks of paced streams come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pace {
    /// Streams that are open together, over all mocks.
    pub streams: u32,
    /// Time between two chunks of one.
    pub interval: Duration,
    /// Which streams speak together.
    pub pacing: Pacing,
}

/// Which streams speak together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Pacing {
    /// All of one worker, as an engine's decode step gives every running sequence its next token; the workers' steps are
    /// spread evenly
    Steps,
    /// None: all chunks are spread evenly, and each wakes the router up
    Spread,
}

/// What the mocks have counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MockCounts {
    /// Generation requests.
    pub requests: u64,
    /// Those whose system prompt was in the cache of the mock that got them.
    pub hits: u64,
    /// Those whose system prompt was not found.
    pub untagged: u64,
}

/// A set of mocks on ports of their own. A clone is the same mocks.
#[derive(Debug, Clone)]
pub struct Mocks {
    workers: Vec<Arc<Worker>>,
    addresses: Vec<SocketAddr>,
}

#[derive(Debug)]
struct Worker {
    state: Mutex<State>,
    answers: Arc<Answers>,
    /// Which part of an interval its steps wait for.
    step_phase: f64,
    /// What all mocks count their steps from.
    epoch: Instant,
    /// Streams begun by all mocks together, which decides who speaks when.
    streams: Arc<AtomicU32>,
}

#[derive(Debug)]
struct State {
    plan: Plan,
    counts: MockCounts,
    cache: PromptCache,
    other_requests: BTreeSet<String>,
}

impl Mocks {
    /// Listens on these loopback ports (0: any free one) and serves from then on.
    ///
    /// # Errors
    /// A port is taken.
    pub async fn listen(ports: &[u16]) -> anyhow::Result<Self> {
        let (answers, streams) = (Arc::new(Answers::new()), Arc::new(AtomicU32::new(0)));
        let epoch = Instant::now();
        let mut mocks = Self { workers: Vec::new(), addresses: Vec::new() };
        for (number, port) in ports.iter().enumerate() {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).await.with_context(|| {
                format!("no mock worker can listen on port {port}; --mock-ports takes others")
            })?;
            let worker = Arc::new(Worker {
                state: Mutex::new(State {
                    plan: Plan::Whole,
                    counts: MockCounts::default(),
                    cache: PromptCache::new(CACHED_PROMPTS),
                    other_requests: BTreeSet::new(),
                }),
                answers: Arc::clone(&answers),
                step_phase: number as f64 / ports.len() as f64,
                epoch,
                streams: Arc::clone(&streams),
            });
            mocks.addresses.push(listener.local_addr()?);
            mocks.workers.push(Arc::clone(&worker));
            tokio::spawn(accept(listener, worker));
        }
        Ok(mocks)
    }

    /// Where they listen.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// `http://…` of each.
    pub fn urls(&self) -> Vec<String> {
        self.addresses.iter().map(|address| format!("http://{address}")).collect()
    }

    /// Tells all of them how to answer from now on.
    pub fn answer_with(&self, plan: Plan) {
        for worker in &self.workers {
            worker.lock().plan = plan;
        }
    }

    /// Tells one of them how to answer from now on.
    pub fn answer_at(&self, worker: usize, plan: Plan) {
        self.workers[worker].lock().plan = plan;
    }

    /// The counts of each mock.
    pub fn counts(&self) -> Vec<MockCounts> {
        self.workers.iter().map(|worker| worker.lock().counts).collect()
    }

    /// The counts of all together.
    pub fn total(&self) -> MockCounts {
        self.counts().into_iter().fold(MockCounts::default(), |sum, counts| MockCounts {
            requests: sum.requests + counts.requests,
            hits: sum.hits + counts.hits,
            untagged: sum.untagged + counts.untagged,
        })
    }

    /// Requests that no mock knew, as `METHOD path` or what was wrong with them.
    pub fn other_requests(&self) -> BTreeSet<String> {
        self.workers.iter().flat_map(|worker| worker.lock().other_requests.clone()).collect()
    }
}

impl MockCounts {
    /// What came since an earlier moment.
    #[must_use]
    pub fn since(self, earlier: Self) -> Self {
        Self {
            requests: self.requests - earlier.requests,
            hits: self.hits - earlier.hits,
            untagged: self.untagged - earlier.untagged,
        }
    }

    /// Hits of all requests, in percent; nothing without requests.
    pub fn hit_percent(self) -> Option<f64> {
        (self.requests > 0).then(|| 100.0 * self.hits as f64 / self.requests as f64)
    }
}

async fn accept(listener: TcpListener, worker: Arc<Worker>) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                tokio::spawn(serve(stream, Arc::clone(&worker)));
            }
            // Out of descriptors, most likely: the connections that hold them will end.
            Err(error) => {
                worker.note(format!("accept failed: {}", error.kind()));
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
    }
}

async fn serve(mut stream: TcpStream, worker: Arc<Worker>) {
    let mut reader = MessageReader::new(Side::Request);
    let mut beginning = Vec::new();
    if set_options(&stream).is_err() {
        return;
    }
    loop {
        beginning.clear();
        let mut body_bytes = 0;
        let keep = |start_line: &StartLine, piece: &[u8]| {
            body_bytes += piece.len();
            let room = Endpoint::of(start_line.path()).looks_at_bytes() - beginning.len();
            beginning.extend_from_slice(&piece[..piece.len().min(room)]);
        };
        match read_message(&mut stream, &mut reader, keep).await {
            Ok(()) => {}
            Err(ReadError::Malformed(error)) => {
                worker.note(format!("malformed request: {error}"));
                let _ = stream.write_all(&answers::error(400)).await;
                return;
            }
            Err(_) => return,
        }
        // A router that leaves before its answer is no fault of the mock's.
        let body = (&beginning[..], body_bytes);
        if worker.answer(reader.start_line().path(), body, &mut stream).await.is_err() || reader.closes() {
            return;
        }
    }
}

impl Worker {
    /// Answers a request, of whose body there are the beginning and the length.
    async fn answer(
        &self,
        path: &[u8],
        (body, body_bytes): (&[u8], usize),
        stream: &mut TcpStream,
    ) -> io::Result<()> {
        match Endpoint::of(path) {
            Endpoint::Chat => {
                let plan = self.count(body);
                self.generate(plan, body_bytes, stream).await
            }
            Endpoint::Completions => {
                self.count(body);
                stream.write_all(self.answers.text_completion(body_bytes)).await
            }
            Endpoint::Tokens(shape) => {
                let answer = match tokens::ids(body) {
                    Some(ids) => answers::tokens(shape, &ids),
                    None => answers::error(400),
                };
                stream.write_all(&answer).await
            }
            Endpoint::Other => {
                let answer = self.answers.of(path);
                if answer.is_none() {
                    self.note(String::from_utf8_lossy(path).into_owned());
                }
                stream.write_all(answer.unwrap_or(&self.answers.not_found)).await
            }
        }
    }

    /// Counts a generation request; how to answer it.
    fn count(&self, body: &[u8]) -> Plan {
        let mut state = self.lock();
        state.counts.requests += 1;
        match tag(body) {
            Some(tag) => state.counts.hits += u64::from(state.cache.touch(tag)),
            None => state.counts.untagged += 1,
        }
        state.plan
    }

    async fn generate(&self, plan: Plan, body_bytes: usize, stream: &mut TcpStream) -> io::Result<()> {
        let answers = &*self.answers;
        match plan {
            Plan::Whole => stream.write_all(answers.chat_completion(body_bytes)).await,
            Plan::Status(status) => stream.write_all(&answers::error(status)).await,
            Plan::Paced { chunks, pace } => {
                let mut ticker = Ticker::start(self.first_chunk(pace), pace.interval)?;
                stream.write_all(&answers.stream_head).await?;
                for _ in 0..chunks {
                    ticker.tick().await?;
                    stream.write_all(&answers.chunk).await?;
                }
                stream.write_all(&answers.stream_end).await
            }
            Plan::Flood { chunks } => {
                stream.write_all(&answers.stream_head).await?;
                for _ in 0..chunks {
                    stream.write_all(&answers.chunk).await?;
                    tokio::task::yield_now().await; // engines write each chunk by itself, and so do we
                }
                stream.write_all(&answers.stream_end).await
            }
            Plan::Held => {
                stream.write_all(&answers.stream_head).await?;
                stream.write_all(&answers.chunk).await?;
                // Nothing more is to come on this connection but its end.
                let mut reader = MessageReader::new(Side::Request);
                let _ = read_message(stream, &mut reader, |_, _| {}).await;
                Err(io::ErrorKind::ConnectionAborted.into())
            }
        }
    }

    /// How long a stream that begins now waits for its first chunk.
    fn first_chunk(&self, pace: Pace) -> Duration {
        let interval_s = pace.interval.as_secs_f64();
        let share = match pace.pacing {
            Pacing::Spread => {
                let turn = self.streams.fetch_add(1, Ordering::Relaxed) % pace.streams.max(1);
                f64::from(turn) / f64::from(pace.streams.max(1))
            }
            Pacing::Steps => {
                let steps = self.epoch.elapsed().as_secs_f64() / interval_s;
                (self.step_phase - steps).rem_euclid(1.0)
            }
        };
        pace.interval.mul_f64(share)
    }

    fn note(&self, what: String) {
        let mut state = self.lock();
        if state.other_requests.len() < REMEMBERED_PATHS {
            state.other_requests.insert(what);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The name of the system prompt in the beginning of a body.
fn tag(body: &[u8]) -> Option<[u8; TAG_BYTES]> {
    static MARK: LazyLock<Finder<'_>> = LazyLock::new(|| Finder::new(TAG_MARK));
    let at = MARK.find(body)? + TAG_MARK.len();
    body.get(at..at + TAG_BYTES)?.try_into().ok()
}
