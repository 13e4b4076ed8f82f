//! The engine: one thread owns scheduler and backend, and steps them as long as there is work.
//!
//! Requests come in by a channel, tokens go out by one channel for each. Whoever drops a [`Generation`] cancels it: its
//! blocks are free at the next step. Knows no text. Next: [`generation`](crate::generation).

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc as std_mpsc;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use roundhouse_types::{FinishReason, TokenId};
use tokio::sync::{mpsc, oneshot};
use worker_core::scheduler::{Progress, SchedulerStats};
use worker_core::step::{Backend, Batch, NextToken, SequenceId};
use worker_core::{Scheduler, SchedulerLimits, Submission};

use crate::error::{RequestError, WorkerError};

/// What a generation yields.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// A token.
    Token {
        /// Its id.
        token: TokenId,
        /// Tokens of the prompt that came from the cache.
        cached_tokens: usize,
        /// Set when it is the last.
        finished: Option<FinishReason>,
    },
    /// The engine failed; nothing comes after.
    Failed(String),
}

/// A running generation. Dropping it cancels.
#[derive(Debug)]
pub struct Generation {
    /// Its events. At most `max_tokens` wait here, so the channel needs no bound of its own.
    pub events: mpsc::UnboundedReceiver<Event>,
}

enum Command {
    Submit(Box<Submission>, mpsc::UnboundedSender<Event>),
    Flush(oneshot::Sender<usize>),
    Stop,
}

/// A handle to the engine thread.
pub struct Engine {
    commands: std_mpsc::Sender<Command>,
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
    max_waiting: usize,
}

/// What handles read of the engine.
#[derive(Default)]
struct Shared {
    stats: Mutex<SchedulerStats>,
    /// Submitted and not admitted to a step yet.
    queued: AtomicUsize,
}

impl Engine {
    /// Starts the thread.
    ///
    /// # Errors
    /// When the system has none.
    pub fn start(
        backend: Box<dyn Backend>,
        limits: SchedulerLimits,
        max_waiting: usize,
    ) -> Result<Self, WorkerError> {
        let (commands, inbox) = std_mpsc::channel();
        let shared = Arc::new(Shared::default());
        let scheduler = Scheduler::new(backend.kv_capacity(), limits, rand::random());
        let mut run = Run { scheduler, backend, inbox, shared: Arc::clone(&shared), clients: HashMap::new() };
        run.publish();
        let thread = std::thread::Builder::new().name("engine".to_owned());
        let thread = thread.spawn(move || run.run()).map_err(WorkerError::Thread)?;
        Ok(Self { commands, shared, thread: Mutex::new(Some(thread)), max_waiting })
    }

    /// Begins a generation.
    ///
    /// # Errors
    /// When too many wait, or the engine has stopped.
    pub fn submit(&self, submission: Submission) -> Result<Generation, RequestError> {
        let queued = self.shared.queued.fetch_add(1, Ordering::Relaxed);
        let waiting = self.stats().waiting + queued;
        if waiting >= self.max_waiting {
            self.shared.queued.fetch_sub(1, Ordering::Relaxed);
            return Err(RequestError::Busy { waiting });
        }
        let (sender, events) = mpsc::unbounded_channel();
        if self.commands.send(Command::Submit(Box::new(submission), sender)).is_err() {
            self.shared.queued.fetch_sub(1, Ordering::Relaxed);
            return Err(RequestError::Engine("it has stopped".to_owned()));
        }
        Ok(Generation { events })
    }

    /// Forgets what the prefix cache holds and nobody uses. Returns how many blocks; `None` if the engine has stopped.
    pub async fn flush_cache(&self) -> Option<usize> {
        let (tell, told) = oneshot::channel();
        self.commands.send(Command::Flush(tell)).ok()?;
        told.await.ok()
    }

    /// The counters as of the last step.
    #[must_use]
    pub fn stats(&self) -> SchedulerStats {
        *self.shared.stats.lock().unwrap_or_else(PoisonError::into_inner)
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
    clients: HashMap<SequenceId, mpsc::UnboundedSender<Event>>,
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
            if !batch.sequences.is_empty() {
                match self.forward(&batch) {
                    Ok(drawn) => {
                        let progress = self.scheduler.commit(&batch, &drawn);
                        self.deliver(&progress);
                    }
                    Err(reason) => self.fail(&batch, &reason),
                }
            }
            self.publish();
        }
        for (_, client) in self.clients.drain() {
            // Whoever has left does not need to hear it.
            let _ = client.send(Event::Failed("the worker is shutting down".to_owned()));
        }
    }

    /// Takes what is in the inbox; waits for it when there is nothing else to do.
    fn take_commands(&mut self) -> Turn {
        loop {
            let command = if self.scheduler.is_idle() {
                self.inbox.recv().map_err(|_| std_mpsc::TryRecvError::Disconnected)
            } else {
                self.inbox.try_recv()
            };
            match command {
                Ok(Command::Submit(submission, client)) => self.submit(*submission, client),
                Ok(Command::Flush(tell)) => {
                    // Whoever asked may have left.
                    let _ = tell.send(self.scheduler.flush_cache());
                    self.publish();
                }
                Ok(Command::Stop) | Err(std_mpsc::TryRecvError::Disconnected) => return Turn::Stop,
                Err(std_mpsc::TryRecvError::Empty) => return Turn::GoOn,
            }
        }
    }

    fn submit(&mut self, submission: Submission, client: mpsc::UnboundedSender<Event>) {
        self.shared.queued.fetch_sub(1, Ordering::Relaxed);
        match self.scheduler.submit(submission) {
            Ok(id) => drop(self.clients.insert(id, client)),
            Err(error) => drop(client.send(Event::Failed(error.to_string()))),
        }
    }

    fn cancel_abandoned(&mut self) {
        let abandoned: Vec<_> =
            self.clients.iter().filter(|(_, client)| client.is_closed()).map(|(id, _)| *id).collect();
        for id in abandoned {
            self.scheduler.cancel(id);
            self.clients.remove(&id);
        }
    }

    fn forward(&mut self, batch: &Batch) -> Result<Vec<NextToken>, String> {
        let step = catch_unwind(AssertUnwindSafe(|| self.backend.forward(batch)));
        match step {
            Ok(outcome) => outcome.map_err(|error| error.to_string()),
            Err(panic) => {
                let said = panic.downcast_ref::<String>().map(String::as_str);
                let said = said.or(panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
                Err(format!("the backend panicked: {said}"))
            }
        }
    }

    fn deliver(&mut self, progress: &[Progress]) {
        for Progress { id, token, cached_tokens, finished } in progress.iter().copied() {
            if let Some(client) = self.clients.get(&id) {
                // Whoever has left is cancelled before the next step.
                let _ = client.send(Event::Token { token, cached_tokens, finished });
            }
            if finished.is_some() {
                self.clients.remove(&id);
            }
        }
    }

    /// What the step wrote is undefined; none of it has become findable.
    fn fail(&mut self, batch: &Batch, reason: &str) {
        tracing::error!(reason, sequences = batch.sequences.len(), "step failed");
        for step in &batch.sequences {
            self.scheduler.cancel(step.id);
            if let Some(client) = self.clients.remove(&step.id) {
                let _ = client.send(Event::Failed(reason.to_owned()));
            }
        }
    }

    fn publish(&self) {
        *self.shared.stats.lock().unwrap_or_else(PoisonError::into_inner) = self.scheduler.stats();
    }
}
