//! The engine: one thread owns scheduler and backend, and steps them as long as there is work.
//!
//! Requests come in by a channel, tokens go out by one channel for each. Whoever drops a [`Generation`] cancels it: its
//! blocks are free at the next step. Knows no text. Next: [`generation`](crate::generation).

mod reports;
#[cfg(test)]
pub(crate) mod tests;

use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc as std_mpsc;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use roundhouse_types::{FinishReason, TokenId, WorkerLoad};
use tokio::sync::{mpsc, oneshot, watch};
use worker_core::sampling::Logprobs;
use worker_core::scheduler::{Progress, SchedulerStats};
use worker_core::step::{Backend, BackendError, Batch, NextToken, SequenceId};
use worker_core::{Scheduler, SchedulerLimits, Submission};

use self::reports::{Pace, publish_events};
use crate::error::{RequestError, WorkerError};
use crate::kv_events::KvLog;

pub use self::reports::RequestId;

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
    /// The engine failed; nothing comes after.
    Failed(String),
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
    Stop,
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
        let mut run = Run {
            scheduler,
            backend,
            inbox,
            shared: Arc::clone(&shared),
            clients: HashMap::new(),
            siblings: HashMap::new(),
            kv_log,
            pace: Pace::default(),
            taken: 0,
        };
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

    /// Begins generations of one prompt. The others wait until the first has computed it, and find it in the prefix cache.
    ///
    /// # Errors
    /// When one alone is larger than the KV pool, too many wait, or the engine has stopped.
    pub fn submit(
        &self,
        submissions: Vec<Submission>,
        caller: &Caller,
    ) -> Result<Vec<Generation>, RequestError> {
        for Submission { prompt, max_tokens, .. } in &submissions {
            // The last token is drawn and never computed.
            let needed_tokens = prompt.len() + max_tokens - 1;
            if needed_tokens > self.pool_tokens {
                return Err(RequestError::OutOfKv { needed_tokens, pool_tokens: self.pool_tokens });
            }
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
            let client = Client { events: sender, caller: caller.clone() };
            (Asked { submission, client }, Generation { events })
        };
        let (asked, generations) = submissions.into_iter().map(begin).unzip();
        if self.commands.send(Command::Submit(asked)).is_err() {
            self.shared.queued.fetch_sub(count, Ordering::Relaxed);
            return Err(RequestError::Engine("it has stopped".to_owned()));
        }
        Ok(generations)
    }

    /// Forgets what the prefix cache holds and nobody uses. Returns how many blocks; `None` if the engine has stopped.
    pub async fn flush_cache(&self) -> Option<usize> {
        let (tell, told) = oneshot::channel();
        self.commands.send(Command::Flush(tell)).ok()?;
        told.await.ok()
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

/// What the thread owns.
struct Run {
    scheduler: Scheduler,
    backend: Box<dyn Backend>,
    inbox: std_mpsc::Receiver<Command>,
    shared: Arc<Shared>,
    clients: HashMap<SequenceId, Client>,
    /// Those who wait until this sequence has computed the prompt that they share.
    siblings: HashMap<SequenceId, VecDeque<Asked>>,
    /// Where cache events go, if anybody may want them.
    kv_log: Option<Arc<KvLog>>,
    pace: Pace,
    /// Generations that came in and are still counted among the queued.
    taken: usize,
}

/// Why a step came to nothing.
struct Failure {
    /// Whose fault it is, if nothing was computed for the others.
    only: Option<SequenceId>,
    reason: String,
}

/// Whether the thread goes on.
#[derive(PartialEq, Eq)]
enum Turn {
    GoOn,
    Stop,
}

impl Run {
    fn run(&mut self) {
        while self.take_commands() == Turn::GoOn {
            self.cancel_abandoned();
            let batch = self.scheduler.schedule();
            self.count_taken();
            if !batch.sequences.is_empty() {
                match self.forward(&batch) {
                    Ok(drawn) => {
                        let progress = self.scheduler.commit(&batch, &drawn);
                        // Before those who have finished are forgotten: events name their requests.
                        self.publish_events();
                        self.deliver(&progress, drawn);
                    }
                    Err(failure) => self.fail(&batch, &failure),
                }
            }
            self.publish();
        }
        let held = self.siblings.drain().flat_map(|(_, siblings)| siblings).map(|sibling| sibling.client);
        for client in self.clients.drain().map(|(_, client)| client).chain(held) {
            // Whoever has left does not need to hear it.
            let _ = client.events.send(Event::Failed("the worker is shutting down".to_owned()));
        }
    }

    /// Takes what is in the inbox; waits for it when there is nothing else to do.
    fn take_commands(&mut self) -> Turn {
        loop {
            let command = if self.scheduler.is_idle() {
                self.backend.idle();
                self.inbox.recv().map_err(|_| std_mpsc::TryRecvError::Disconnected)
            } else {
                self.inbox.try_recv()
            };
            match command {
                Ok(Command::Submit(asked)) => {
                    self.taken += asked.len();
                    self.submit_first(asked);
                }
                Ok(Command::Flush(tell)) => {
                    // Whoever has left already holds nothing.
                    self.cancel_abandoned();
                    let flushed = self.scheduler.flush_cache();
                    self.publish_events();
                    self.publish();
                    // Whoever asked may have left.
                    let _ = tell.send(flushed);
                }
                Ok(Command::Stop) | Err(std_mpsc::TryRecvError::Disconnected) => return Turn::Stop,
                Err(std_mpsc::TryRecvError::Empty) => return Turn::GoOn,
            }
        }
    }

    /// Those that came in are among the counters from here on: before the step, since others come in while it lasts. For a moment
    /// they are counted twice, never not at all.
    fn count_taken(&mut self) {
        if self.taken > 0 {
            self.publish();
            self.shared.queued.fetch_sub(std::mem::take(&mut self.taken), Ordering::Relaxed);
        }
    }

    /// Submits the first and holds the others back. Should it be refused, the next is the first.
    fn submit_first(&mut self, mut siblings: VecDeque<Asked>) {
        while let Some(first) = siblings.pop_front() {
            if let Some(id) = self.submit(first) {
                if !siblings.is_empty() {
                    self.siblings.insert(id, siblings);
                }
                return;
            }
        }
    }

    /// Submits one, unless its client has left meanwhile.
    fn submit(&mut self, Asked { submission, client }: Asked) -> Option<SequenceId> {
        if client.has_left() {
            return None;
        }
        let salt = client.caller.cache_salt.as_deref().map(str::as_bytes);
        match self.scheduler.submit_salted(submission, salt) {
            Ok(id) => {
                self.clients.insert(id, client);
                Some(id)
            }
            Err(error) => {
                // Whoever has left does not need to hear it.
                let _ = client.events.send(Event::Failed(error.to_string()));
                None
            }
        }
    }

    fn cancel_abandoned(&mut self) {
        let abandoned: Vec<_> =
            self.clients.iter().filter(|(_, client)| client.has_left()).map(|(id, _)| *id).collect();
        for id in abandoned {
            self.scheduler.cancel(id);
            self.clients.remove(&id);
            if let Some(siblings) = self.siblings.remove(&id) {
                self.submit_first(siblings);
            }
        }
    }

    fn forward(&mut self, batch: &Batch) -> Result<Vec<NextToken>, Failure> {
        let began = Instant::now();
        let step = catch_unwind(AssertUnwindSafe(|| self.backend.forward(batch)));
        self.pace.stepped(batch, began.elapsed());
        match step {
            Ok(outcome) => outcome.map_err(|error| {
                let only = match &error {
                    BackendError::InvalidSequence { id, .. } => Some(*id),
                    BackendError::Device(_) => None,
                };
                Failure { only, reason: error.to_string() }
            }),
            Err(panic) => {
                let said = panic.downcast_ref::<String>().map(String::as_str);
                let said = said.or(panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
                Err(Failure { only: None, reason: format!("the backend panicked: {said}") })
            }
        }
    }

    fn deliver(&mut self, progress: &[Progress], drawn: Vec<NextToken>) {
        let at = Instant::now();
        // Both are in batch order; of what was drawn, some may belong to nobody any more.
        let mut drawn = drawn.into_iter();
        for Progress { id, token, cached_tokens, finished } in progress.iter().copied() {
            let logprobs = drawn.find(|next| next.id == id).and_then(|next| next.logprobs);
            if let Some(client) = self.clients.get(&id) {
                // Whoever has left is cancelled before the next step.
                let _ = client.events.send(Event::Token { token, cached_tokens, logprobs, at, finished });
            }
            if finished.is_some() {
                self.clients.remove(&id);
            }
            if let Some(siblings) = self.siblings.remove(&id) {
                for sibling in siblings {
                    self.submit(sibling);
                }
            }
        }
    }

    /// Ends whom it concerns. What the step wrote, if anything, is undefined; none of it has become findable.
    fn fail(&mut self, batch: &Batch, failure: &Failure) {
        let Failure { only, reason } = failure;
        let ids = || batch.sequences.iter().map(|step| step.id);
        // A name that is none of the batch's must not leave a batch that fails for ever.
        let only = only.filter(|only| ids().any(|id| id == *only));
        let ended: Vec<SequenceId> = ids().filter(|id| only.is_none_or(|only| only == *id)).collect();
        tracing::error!(reason, sequences = ended.len(), of = batch.sequences.len(), "step failed");
        for id in ended {
            self.scheduler.cancel(id);
            let siblings = self.siblings.remove(&id).into_iter().flatten().map(|sibling| sibling.client);
            for client in self.clients.remove(&id).into_iter().chain(siblings) {
                let _ = client.events.send(Event::Failed(reason.clone()));
            }
        }
    }

    fn publish_events(&mut self) {
        if let Some(log) = &self.kv_log {
            publish_events(log, self.scheduler.take_events(), &self.clients);
        }
    }

    fn publish(&self) {
        let mut stats = self.scheduler.stats();
        stats.waiting += self.siblings.values().map(VecDeque::len).sum::<usize>();
        self.shared.publish(stats, &self.pace, self.backend.kv_capacity().block_tokens);
    }
}
