//! Requests in the background: they wait in their router until a worker has time to spare, or clients send them as requests like others.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use router_core::backlog::{Backlog, BacklogTicket};
use router_core::{Among, Leg, PickError, Precedence, Priority};

use super::fleet::Router;
use super::{Event, Placed, Simulation, as_ns};
use crate::simulate::args::Background;
use crate::simulate::engine::Engine;
use crate::simulate::workload::Workload;

/// As often as the router looks.
const LOOKS_EVERY: Duration = Duration::from_millis(20);

/// Those that have not been sent, and what has been done of the others.
pub(super) struct Waiting {
    /// Of each router.
    backlogs: Vec<(Backlog, HashMap<BacklogTicket, u32>)>,
    /// Which of them are looking for time.
    look: Vec<bool>,
    /// Where clients take the next one.
    clients: VecDeque<u32>,
    done_tokens: u64,
}

impl Waiting {
    pub(super) fn new(workload: &Workload, background: Background, replicas: usize) -> Self {
        let mut waiting = Self {
            backlogs: (0..replicas).map(|_| Default::default()).collect(),
            look: vec![false; replicas],
            clients: VecDeque::new(),
            done_tokens: 0,
        };
        let all = workload.first_in_background()..u32::try_from(workload.requests.len()).unwrap_or(u32::MAX);
        match background {
            Background::LeftOut => {}
            Background::Clients(_) => waiting.clients.extend(all),
            Background::Spare(_) => {
                for number in all {
                    waiting.enter(workload, number, number as usize % replicas);
                }
            }
        }
        waiting
    }

    fn enter(&mut self, workload: &Workload, number: u32, replica: usize) {
        let (backlog, numbers) = &mut self.backlogs[replica];
        numbers.insert(backlog.enter(workload.requests[number as usize].precedence), number);
    }

    pub(super) fn done_tokens(&self) -> u64 {
        self.done_tokens
    }
}

impl<E: Engine> Simulation<'_, E> {
    /// What a request waits by. Where clients send what is in the background, it is like others.
    pub(super) fn precedence(&self, number: u32) -> Precedence {
        let Workload { requests, is_all_alike, .. } = self.setup.workload;
        if *is_all_alike && number < self.setup.workload.first_in_background() {
            return Precedence::default();
        }
        let precedence = requests[number as usize].precedence;
        match self.setup.background {
            Background::Clients(_) => {
                Precedence { priority: precedence.priority.max(Priority(0)), ..precedence }
            }
            Background::Spare(_) | Background::LeftOut => precedence,
        }
    }

    pub(super) fn begin_background(&mut self) {
        match self.setup.background {
            Background::LeftOut => {}
            Background::Clients(count) => {
                let at_once = count * self.engines.len();
                (0..at_once).for_each(|_| self.send_next(0));
            }
            Background::Spare(_) => {
                for router in (0..).take(self.setup.routers.count.max(1)) {
                    self.begin_to_look(router, 0);
                }
            }
        }
    }

    fn begin_to_look(&mut self, replica: u16, at_ns: u64) {
        if !std::mem::replace(&mut self.waiting.look[replica as usize], true) {
            self.enter(at_ns, Event::Spare(replica));
        }
    }

    /// A client sends the next one.
    fn send_next(&mut self, now_ns: u64) {
        if let Some(number) = self.waiting.clients.pop_front() {
            self.arrive(number, now_ns);
        }
    }

    pub(super) fn end_in_background(&mut self, number: u32, now_ns: u64) {
        let request = &self.setup.workload.requests[number as usize];
        self.waiting.done_tokens += u64::from(request.input_tokens) + u64::from(request.output_tokens);
        self.send_next(now_ns);
    }

    /// Whether a request waits for time to spare, in place of being sent at once.
    pub(super) fn waits_for_spare(&mut self, number: u32, now_ns: u64) -> bool {
        let is_given = matches!(self.setup.background, Background::Spare(_));
        let waits = is_given && self.precedence(number).priority.is_background();
        if waits {
            let replica = self.replicas[number as usize];
            self.waiting.enter(self.setup.workload, number, replica as usize);
            self.begin_to_look(replica, now_ns);
        }
        waits
    }

    /// Sends as many as there is time to spare for.
    pub(super) fn look_for_spare(&mut self, replica: u16, now_ns: u64) {
        while self.send_to_spare(replica, now_ns) {}
        self.waiting.look[replica as usize] = false;
        if !self.waiting.backlogs[replica as usize].0.is_empty() {
            self.begin_to_look(replica, now_ns.saturating_add(as_ns(LOOKS_EVERY)));
        }
    }

    fn send_to_spare(&mut self, replica: u16, now_ns: u64) -> bool {
        let (backlog, numbers) = &self.waiting.backlogs[replica as usize];
        let Some(ticket) = backlog.first() else { return false };
        let number = numbers[&ticket];
        let place = (number, replica as usize);
        self.knowledge.look_up::<E>(self.setup.workload, place, &self.engines, now_ns);
        self.read_path(number);
        let view = self.view(number);
        let mut learn = |candidates: &mut [_], speed: &_| self.knowledge.tell(&view, candidates, speed);
        let Router { decider, fleet } = &self.routers[replica as usize];
        let now = Duration::from_nanos(now_ns);
        let decided = match decider.decide_spare_knowing(fleet, &view, Among::Untried(&[]), now, &mut learn) {
            Ok(decided) => decided,
            Err(PickError::NoneSpare) => return false,
            Err(error) => unreachable!("of two workers or more one is up: {error}"),
        };
        let (precedence, tokens) = (view.precedence, view.prompt_tokens);
        let (backlog, numbers) = &mut self.waiting.backlogs[replica as usize];
        backlog.leave(precedence, ticket, tokens);
        numbers.remove(&ticket);
        self.replicas[number as usize] = replica;
        self.records[number as usize].worker = decided.worker.slot.0;
        self.placed[number as usize] = Some(Placed { decided, leg: Leg::Whole, turn: None });
        self.submit(number, now_ns);
        true
    }
}
