//! The engine's thread: take commands → schedule → forward → commit → deliver, step by step.
//!
//! Knows no text and no connection, only sequences and the channels of their clients. Next: [`Scheduler`] and [`Backend`].

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc as std_mpsc};
use std::time::Instant;

use worker_core::Scheduler;
use worker_core::scheduler::Progress;
use worker_core::step::{Backend, BackendError, Batch, NextToken, SequenceId};

use super::handing_over::guarded;
use super::reports::{Pace, publish_events};
use super::wakeful::WakefulCore;
use super::{Asked, Client, Command, Event, HandOver, Precedence, Shared, priority};
use crate::cpu_quota::CpuQuota;
use crate::kv_events::KvLog;

/// What the thread owns.
pub(super) struct Run {
    pub(super) scheduler: Scheduler,
    pub(super) backend: Box<dyn Backend>,
    inbox: std_mpsc::Receiver<Command>,
    shared: Arc<Shared>,
    pub(super) clients: HashMap<SequenceId, Client>,
    /// Those who wait until this sequence has computed the prompt that they share.
    siblings: HashMap<SequenceId, VecDeque<Asked>>,
    /// Where cache events go, if anybody may want them.
    kv_log: Option<Arc<KvLog>>,
    pace: Pace,
    /// Where the thread stays, if it only keeps time and may have that.
    pub(super) core: Option<WakefulCore>,
    /// Why no step can be computed any more.
    lost: Option<String>,
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
    /// Ready to run, taking commands from the inbox and publishing to what handles share.
    pub(super) fn new(
        scheduler: Scheduler,
        backend: Box<dyn Backend>,
        (inbox, shared): (std_mpsc::Receiver<Command>, Arc<Shared>),
        kv_log: Option<Arc<KvLog>>,
    ) -> Self {
        Self {
            scheduler,
            backend,
            inbox,
            shared,
            clients: HashMap::new(),
            siblings: HashMap::new(),
            kv_log,
            pace: Pace::default(),
            core: None,
            lost: None,
            taken: 0,
        }
    }

    /// Steps until it is told to stop, or nobody is left who could.
    pub(super) fn run(&mut self) {
        while self.take_commands() == Turn::GoOn {
            self.core.iter().for_each(WakefulCore::stay_awake);
            self.cancel_abandoned();
            let batch = self.scheduler.schedule();
            self.count_taken();
            let turn = if batch.sequences.is_empty() { Turn::GoOn } else { self.step(&batch) };
            self.publish();
            if turn == Turn::Stop {
                break;
            }
        }
        let reason = self.lost.take().unwrap_or_else(|| "the worker is shutting down".to_owned());
        let held = self.siblings.drain().flat_map(|(_, siblings)| siblings).map(|sibling| sibling.client);
        for client in self.clients.drain().map(|(_, client)| client).chain(held) {
            // Whoever has left does not need to hear it.
            let _ = client.events.send(Event::Failed(reason.clone()));
        }
    }

    fn step(&mut self, batch: &Batch) -> Turn {
        match self.forward(batch) {
            Ok(drawn) => {
                let progress = self.scheduler.commit(batch, &drawn);
                // Before those who have finished are forgotten: events name their requests.
                self.publish_events();
                self.deliver(batch, &progress, drawn);
                Turn::GoOn
            }
            Err(failure) => {
                self.fail(batch, &failure);
                if self.lost.is_some() { Turn::Stop } else { Turn::GoOn }
            }
        }
    }

    /// Takes what is in the inbox; waits for it when there is nothing else to do.
    fn take_commands(&mut self) -> Turn {
        loop {
            let command = if self.scheduler.is_idle() {
                self.core.iter().for_each(WakefulCore::rest);
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
                Ok(Command::CountCached(prompt, salt, tell)) => {
                    let salt = salt.as_deref().map(str::as_bytes);
                    // Whoever asked may have left.
                    let _ = tell.send(self.scheduler.cached_prefix_blocks(&prompt, salt));
                }
                Ok(Command::TakePrecedence(tell)) => {
                    // Whoever asked may have left.
                    let _ = tell.send(self.take_precedence());
                }
                Ok(Command::Stop) | Err(std_mpsc::TryRecvError::Disconnected) => return Turn::Stop,
                Err(std_mpsc::TryRecvError::Empty) => return Turn::GoOn,
            }
        }
    }

    fn take_precedence(&mut self) -> Precedence {
        let priority = priority::raise();
        self.core = WakefulCore::start(priority, CpuQuota::of_this_process());
        Precedence { priority, core: self.core.as_ref().map(WakefulCore::core) }
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
        let submitted = match &client.hand_over {
            HandOver::Fetched(kv) => self.scheduler.submit_fetched(submission, salt, kv.from_blocks),
            HandOver::None | HandOver::Offer { .. } => self.scheduler.submit_salted(submission, salt),
        };
        match submitted {
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
        let step = guarded(|| {
            self.receive()?;
            self.backend.forward(batch)
        });
        self.pace.stepped(batch, began.elapsed());
        step.map_err(|error| {
            let reason = error.to_string();
            let only = match error {
                BackendError::InvalidSequence { id, .. } => Some(id),
                BackendError::Device(_) => None,
                BackendError::DeviceLost(_) => {
                    self.lost = Some(reason.clone());
                    None
                }
            };
            Failure { only, reason }
        })
    }

    fn deliver(&mut self, batch: &Batch, progress: &[Progress], drawn: Vec<NextToken>) {
        let at = Instant::now();
        // Whose prompts other workers go on from get their last token with the KV, and when everybody else has theirs: it is much to copy.
        let mut handed_over = Vec::new();
        // Both are in batch order; of what was drawn, some may belong to nobody any more.
        let mut drawn = drawn.into_iter();
        for Progress { id, token, cached_tokens, finished } in progress.iter().copied() {
            let logprobs = drawn.find(|next| next.id == id).and_then(|next| next.logprobs);
            let event = Event::Token { token, cached_tokens, logprobs, at, finished };
            match self.clients.get_mut(&id) {
                Some(client) if finished.is_some() && client.offers() => handed_over.push((id, event)),
                Some(client) => {
                    client.needs_no_kv();
                    // Whoever has left is cancelled before the next step.
                    let _ = client.events.send(event);
                    if finished.is_some() {
                        self.clients.remove(&id);
                    }
                }
                None => {}
            }
            if let Some(siblings) = self.siblings.remove(&id) {
                for sibling in siblings {
                    self.submit(sibling);
                }
            }
        }
        for (id, last) in handed_over {
            self.hand_over(batch, id, last);
        }
    }

    /// Ends whom it concerns; others who were in the step begin anew, since what it was to write may be where they would find it.
    fn fail(&mut self, batch: &Batch, failure: &Failure) {
        let Failure { only, reason } = failure;
        let arrived: Vec<_> = self.scheduler.arrivals().iter().map(|arrival| arrival.id).collect();
        let is_in_batch = |id: &SequenceId| batch.sequences.iter().any(|step| step.id == *id);
        // Those of them that wait for a step of decodes.
        let beside = arrived.iter().copied().filter(|id| !is_in_batch(id));
        let ids = || batch.sequences.iter().map(|step| step.id).chain(beside.clone());
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
        self.scheduler.abandon(batch);
        self.publish_events();
    }

    fn publish_events(&mut self) {
        if let Some(log) = &self.kv_log {
            publish_events(log, self.scheduler.take_events(), &self.clients);
        }
    }

    /// Tells the handles how things stand.
    pub(super) fn publish(&self) {
        let mut stats = self.scheduler.stats();
        stats.waiting += self.siblings.values().map(VecDeque::len).sum::<usize>();
        self.shared.publish(stats, &self.pace, self.backend.kv_capacity().block_tokens);
    }
}
