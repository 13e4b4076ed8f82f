//! Where a request goes: its router decides, it may wait in line there or be decided of once more, and then its engine has it.

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use router_core::{Among, Leg, RequestView};

use super::fleet::Router;
use super::told::{Coming, Word};
use super::{BLOCK_TOKENS, Event, Placed, Simulation, as_ns};
use crate::simulate::engine::{Engine, Part};

/// Requests in line that have been called.
#[derive(Default)]
pub(super) struct Called(Mutex<Vec<u32>>);

/// One of them.
struct Bell {
    number: u32,
    called: Arc<Called>,
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.called.0.lock().unwrap_or_else(PoisonError::into_inner).push(self.number);
    }
}

impl<E: Engine> Simulation<'_, E> {
    /// Its router places a request at a worker, and sends it there if there is room.
    pub(super) fn send(&mut self, number: u32, now_ns: u64) {
        let replica = self.replicas[number as usize] as usize;
        self.knowledge.look_up::<E>(self.setup.workload, (number, replica), &self.engines, now_ns);
        let before = self.placed[number as usize].take();
        let coming = if before.is_some() { Coming::Anew } else { Coming::New };
        if before.is_some() {
            self.tell(number, Word::Over, now_ns);
        }
        self.read_path(number);
        let leg = match &before {
            Some(Placed { leg, .. }) => *leg,
            None if self.splits(number, now_ns) => Leg::Prefill,
            None => Leg::Whole,
        };
        let view = RequestView { leg, ..self.view(number) };
        let mut learn = |candidates: &mut [_], speed: &_| self.knowledge.tell(&view, candidates, speed);
        let now = Duration::from_nanos(now_ns);
        let Router { decider, fleet } = &self.routers[replica];
        let among = Among::Untried(&[]);
        let decided = match before {
            Some(Placed { decided, .. }) => {
                decider.decide_again_knowing(fleet, &view, (decided, among), now, &mut learn)
            }
            None => decider.decide_knowing(fleet, &view, among, now, &mut learn),
        };
        let decided = decided.expect("of two workers or more one is up");
        let turn = decided.lease.turn();
        let waits = turn.is_some();
        self.records[number as usize].worker = decided.worker.slot.0;
        self.placed[number as usize] = Some(Placed { decided, leg, turn });
        if waits {
            self.tell(number, Word::Waits(coming), now_ns);
            self.wait(number, now_ns);
        } else {
            self.tell(number, Word::Sent(coming), now_ns);
            self.submit(number, now_ns);
        }
    }

    pub(super) fn read_path(&mut self, number: u32) {
        let workload = self.setup.workload;
        workload.path(&workload.requests[number as usize], E::PARTIAL, &mut self.path);
    }

    /// A request whose path has been read, as its router sees it.
    pub(super) fn view(&self, number: u32) -> RequestView<'_> {
        let request = &self.setup.workload.requests[number as usize];
        let prompt_tokens = request.input_tokens as usize;
        let adapters = &self.setup.workload.adapters;
        RequestView {
            model: request.adapter.map(|adapter| adapters[adapter as usize].as_str()),
            session: request.session,
            blocks: self.knowledge.indexed(&self.path),
            block_tokens: Some(BLOCK_TOKENS),
            prompt_bytes: prompt_tokens * 4,
            prompt_tokens,
            may_wait_since: Some(Duration::from_nanos(self.records[number as usize].arrived_ns)),
            precedence: self.precedence(number),
            ..RequestView::default()
        }
    }

    /// A request is in line from now on.
    pub(super) fn wait(&mut self, number: u32, now_ns: u64) {
        let Some(Placed { turn: Some(turn), decided, .. }) = &mut self.placed[number as usize] else {
            return;
        };
        let bell = Waker::from(Arc::new(Bell { number, called: Arc::clone(&self.called) }));
        match Pin::new(turn).poll(&mut Context::from_waker(&bell)) {
            Poll::Ready(()) => bell.wake(),
            Poll::Pending => {
                let anew_ns = now_ns.saturating_add(as_ns(decided.worker.load.reconsider_after()));
                self.enter(anew_ns, Event::Reconsider(number));
            }
        }
    }

    pub(super) fn reconsider(&mut self, number: u32, now_ns: u64) {
        if self.placed[number as usize].as_ref().is_some_and(|placed| placed.turn.is_some()) {
            self.send(number, now_ns);
        }
    }

    /// Sends whoever was called from a line.
    pub(super) fn send_called(&mut self, now_ns: u64) {
        loop {
            let called = self.called.0.lock().unwrap_or_else(PoisonError::into_inner).pop();
            let Some(number) = called else { return };
            let Some(mut placed) = self.placed[number as usize].take() else { continue };
            if placed.turn.take().is_some() {
                self.read_path(number);
                let view = RequestView { leg: placed.leg, ..self.view(number) };
                let router = &self.routers[self.replicas[number as usize] as usize];
                router.decider.goes(&mut placed.decided, &view, Duration::from_nanos(now_ns));
                self.placed[number as usize] = Some(placed);
                self.tell(number, Word::Goes, now_ns);
                self.submit(number, now_ns);
            } else {
                self.placed[number as usize] = Some(placed);
            }
        }
    }

    /// A request goes to its worker.
    pub(super) fn submit(&mut self, number: u32, now_ns: u64) {
        let Some(Placed { decided, leg, .. }) = &self.placed[number as usize] else { return };
        let record = &mut self.records[number as usize];
        let (leg, worker) = (*leg, record.worker);
        if leg != Leg::Decode {
            record.hit_tokens = u32::try_from(decided.hit_tokens).unwrap_or(u32::MAX);
        }
        self.read_path(number);
        self.knowledge.dispatched(self.replicas[number as usize] as usize, worker, &self.path);
        self.engines[worker as usize].submit(self.setup.workload, number, Part::of(leg), now_ns);
        self.expect(worker);
    }
}
