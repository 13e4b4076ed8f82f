//! The engine's handle: one thread owns scheduler and backend, and steps them as long as there is work.
//!
//! Requests come in by a channel, tokens go out by one channel for each. Whoever drops a [`Generation`] cancels it: its
//! blocks are free at the next step. Knows no text. Next: `run`, the thread; its tokens go to [`generation`](crate::generation).

mod handing_over;
mod priority;
mod reports;
mod run;
#[cfg(test)]
pub(crate) mod tests;
mod wakeful;

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc as std_mpsc;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use bytes::Bytes;
use roundhouse_types::{FinishReason, TokenId, WorkerLoad};
use tokio::sync::{mpsc, oneshot, watch};
use worker_core::sampling::Logprobs;
use worker_core::scheduler::SchedulerStats;
use worker_core::step::Backend;
use worker_core::{Scheduler, SchedulerLimits, Submission};

use self::run::Run;
use crate::error::{RequestError, WorkerError};
use crate::kv_events::KvLog;
use crate::transfer::room::Room;

pub use self::priority::Priority;
pub use self::reports::RequestId;
pub use self::wakeful::AwakeCore;

/// What a generation yields.
#[derive(Clone, PartialEq, Debug)]
pub enum Event {
    /// A token.
    Token {
        /// Its id.
        token: TokenId,
        /// Tokens of the prompt that came from the cache.
        cached_tokens: usize,
        /// Its log-probability and others, where they were asked for.
        logprobs: Option<Box<Logprobs>>,
        /// When its step ended.
        at: Instant,
        /// Set when it is the last.
        finished: Option<FinishReason>,
    },
    /// Before the last token, where another worker is to go on from the prompt and there is room for it: its blocks' KV.
    Kv(Bytes),
    /// The engine failed; nothing comes after.
    Failed(String),
}

/// What a prompt's KV has to do with another worker.
#[derive(Clone, Debug, Default)]
pub enum HandOver {
    /// Nothing.
    #[default]
    None,
    /// The first `blocks` of it are copied there once the generation is over, if there is room.
    Offer {
        /// Those that another worker goes on from.
        blocks: usize,
        /// What a block takes.
        block_bytes: usize,
        /// Where to.
        room: Arc<Room>,
    },
    /// It has come from there.
    Fetched(FetchedKv),
}

/// A prompt's KV that has come from another worker, but for its last token's.
#[derive(Clone, Debug)]
pub struct FetchedKv {
    /// Blocks, one behind another.
    pub bytes: Bytes,
    /// The first of them; those before are in the cache, or were.
    pub from_blocks: usize,
    /// What a block takes.
    pub block_bytes: usize,
}

/// On whose behalf something is generated.
#[derive(Clone, Debug, Default)]
pub struct Caller {
    /// How the client names its request.
    pub request_id: RequestId,
    /// Ends the generation from outside.
    pub abort: AbortFlag,
    /// Blocks are shared with generations of the same salt only.
    pub cache_salt: Option<Arc<str>>,
    /// The address of this worker's that it called, if it came by the network.
    pub came_to: Option<SocketAddr>,
}

/// Ends what is generated under it, at the next step, also while nobody asks for its events; clones are the same flag.
#[derive(Clone, Debug, Default)]
pub struct AbortFlag(Arc<AtomicBool>);

impl AbortFlag {
    /// Raises it, for good.
    pub fn raise(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    fn is_raised(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// A running generation. Dropping it cancels.
#[derive(Debug)]
pub struct Generation {
    /// Its events. At most `max_tokens` wait here, so the channel needs no bound of its own.
    pub events: mpsc::UnboundedReceiver<Event>,
}

/// A generation to begin, and who gets its events.
struct Asked {
    submission: Submission,
    client: Client,
}

/// Who gets a generation's events.
struct Client {
    events: mpsc::UnboundedSender<Event>,
    caller: Caller,
    hand_over: HandOver,
}

impl Client {
    /// Whether nobody wants its events any more.
    fn has_left(&self) -> bool {
        self.events.is_closed() || self.caller.abort.is_raised()
    }
}

enum Command {
    Submit(VecDeque<Asked>),
    Flush(oneshot::Sender<usize>),
    CountCached(Vec<TokenId>, Option<Arc<str>>, oneshot::Sender<usize>),
    TakePrecedence(std_mpsc::Sender<Precedence>),
    Stop,
}

/// What the system gives an engine's thread that only keeps time.
#[derive(Clone, Debug, Default)]
pub struct Precedence {
    /// How soon it gets a core.
    pub priority: Priority,
    /// The core that it stays on, and that does not halt while steps are due; `None` if it may run on any, and any may halt.
    pub core: Option<AwakeCore>,
}

/// A handle to the engine thread.
pub struct Engine {
    commands: std_mpsc::Sender<Command>,
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
    max_waiting: usize,
    /// Tokens that fit into the KV pool.
    pool_tokens: usize,
}

/// What handles read of the engine.
#[derive(Default)]
struct Shared {
    stats: Mutex<SchedulerStats>,
    load: watch::Sender<WorkerLoad>,
    /// Submitted and not among what `stats` counts yet.
    queued: AtomicUsize,
    /// The thread has ended, as it was told or by a panic.
    has_ended: AtomicBool,
}

/// Says that the thread has ended, however it did.
struct End(Arc<Shared>);

impl Drop for End {
    fn drop(&mut self) {
        self.0.has_ended.store(true, Ordering::Release);
    }
}

impl Engine {
    /// Starts the thread, which tells `kv_log` what happens to its cache.
    ///
    /// # Errors
    /// When the system has none.
    pub fn start(
        backend: Box<dyn Backend>,
        limits: SchedulerLimits,
        max_waiting: usize,
        kv_log: Option<Arc<KvLog>>,
    ) -> Result<Self, WorkerError> {
        let (commands, inbox) = std_mpsc::channel();
        let shared = Arc::new(Shared::default());
        let mut scheduler = Scheduler::new(backend.kv_capacity(), limits, rand::random());
        if kv_log.is_some() {
            scheduler.record_events();
        }
        let pool_tokens = scheduler.pool_tokens();
        let mut run = Run::new(scheduler, backend, (inbox, Arc::clone(&shared)), kv_log);
        run.publish();
        let thread = std::thread::Builder::new().name("engine".to_owned());
        let end = End(Arc::clone(&shared));
        let body = move || {
            // Dropped before `run`, with which go the channels of whoever waits: who finds those closed finds this said.
            let _end = end;
            run.run();
        };
        let thread = thread.spawn(body).map_err(WorkerError::Thread)?;
        Ok(Self { commands, shared, thread: Mutex::new(Some(thread)), max_waiting, pool_tokens })
    }

    /// Begins generations of one prompt. The others wait until the first has computed it, and find it in the prefix cache; of one with which KV is
    /// handed over there are none.
    ///
    /// # Errors
    /// When one alone is larger than the KV pool, too many wait, or the engine has stopped.
    pub fn submit(
        &self,
        submissions: Vec<Submission>,
        caller: &Caller,
        hand_over: &HandOver,
    ) -> Result<Vec<Generation>, RequestError> {
        for Submission { prompt, max_tokens, .. } in &submissions {
            self.check_size(prompt.len(), *max_tokens)?;
        }
        let count = submissions.len();
        let queued = self.shared.queued.fetch_add(count, Ordering::Relaxed);
        let waiting = self.stats().waiting + queued;
        if waiting >= self.max_waiting {
            self.shared.queued.fetch_sub(count, Ordering::Relaxed);
            return Err(RequestError::Busy { waiting });
        }
        let begin = |submission| {
            let (sender, events) = mpsc::unbounded_channel();
            let client = Client { events: sender, caller: caller.clone(), hand_over: hand_over.clone() };
            (Asked { submission, client }, Generation { events })
        };
        let (asked, generations) = submissions.into_iter().map(begin).unzip();
        // A thread that has said so may still take commands, a moment before its end of the channel goes.
        if self.has_ended() || self.commands.send(Command::Submit(asked)).is_err() {
            self.shared.queued.fetch_sub(count, Ordering::Relaxed);
            return Err(RequestError::EngineEnded);
        }
        Ok(generations)
    }

    fn check_size(&self, prompt_tokens: usize, max_tokens: usize) -> Result<(), RequestError> {
        // The last token is drawn and never computed.
        let needed_tokens = prompt_tokens + max_tokens - 1;
        if needed_tokens > self.pool_tokens {
            return Err(RequestError::OutOfKv { needed_tokens, pool_tokens: self.pool_tokens });
        }
        Ok(())
    }

    /// Whether one generation more would be taken now.
    ///
    /// # Errors
    /// As of [`submit`](Self::submit).
    pub fn check(&self, prompt_tokens: usize, max_tokens: usize) -> Result<(), RequestError> {
        self.check_size(prompt_tokens, max_tokens)?;
        let waiting = self.stats().waiting + self.shared.queued.load(Ordering::Relaxed);
        if waiting >= self.max_waiting { Err(RequestError::Busy { waiting }) } else { Ok(()) }
    }

    /// Forgets what the prefix cache holds and nobody uses. Returns how many blocks; `None` if the engine has stopped.
    pub async fn flush_cache(&self) -> Option<usize> {
        let (tell, told) = oneshot::channel();
        self.commands.send(Command::Flush(tell)).ok()?;
        told.await.ok()
    }

    /// How many of the blocks that `prompt` begins with could be found in the cache now; `None` if the engine has stopped. Waits for a step at most.
    pub async fn cached_prefix_blocks(&self, prompt: &[TokenId], salt: Option<&Arc<str>>) -> Option<usize> {
        let (tell, told) = oneshot::channel();
        self.commands.send(Command::CountCached(prompt.to_vec(), salt.cloned(), tell)).ok()?;
        told.await.ok()
    }

    /// Asks the system for real-time priority for the thread, and then for a core that does not halt, and says what it has
    /// now. For backends whose steps sleep. Waits for a step at most.
    #[must_use]
    pub fn take_precedence(&self) -> Precedence {
        let (tell, told) = std_mpsc::channel();
        // A thread that has ended needs none.
        let asked = self.commands.send(Command::TakePrecedence(tell));
        asked.ok().and_then(|()| told.recv().ok()).unwrap_or_default()
    }

    /// Whether the thread has ended, and nothing will be generated any more.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.shared.has_ended.load(Ordering::Acquire)
    }

    /// Tokens that fit into the KV pool.
    #[must_use]
    pub fn pool_tokens(&self) -> usize {
        self.pool_tokens
    }

    /// The counters as of the last step.
    #[must_use]
    pub fn stats(&self) -> SchedulerStats {
        *self.shared.stats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The load as of the last step, to be awaited.
    #[must_use]
    pub fn load(&self) -> watch::Receiver<WorkerLoad> {
        self.shared.load.subscribe()
    }

    /// Ends the thread and waits for it: at most one step.
    pub fn stop(&self) {
        // It may have stopped already.
        let _ = self.commands.send(Command::Stop);
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(Err(_)) = thread.map(JoinHandle::join) {
            tracing::error!("the engine thread panicked");
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.stop();
    }
}
