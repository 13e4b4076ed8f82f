//! One simulation: arrivals → the router's own decider → engines → what became of each request.
//!
//! Discrete events on a clock of nanoseconds; of two events at one moment, the one that was entered first. Everything random comes
//! from the seed, so that the same setup gives the same figures on any machine. Next: [`outcome`](super::outcome) sums up.

mod apart;
mod background;
mod demand;
mod fleet;
mod knowledge;
mod placing;
mod told;

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;
use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use roundhouse_types::{BlockHash, ChainHasher, RouterPlace};
use router_core::{Decided, Leg, Turn};

use super::args::{Apart, Background, Front, Routers};
use super::contender::Contender;
use super::engine::{Engine, Notice};
use super::outcome::Outcome;
use super::workload::{BLOCK_TOKENS, Workload, nanoseconds};
use fleet::Router;
use knowledge::Knowledge;
use placing::Called;
use told::{Heard, Word};

/// How a workload is run.
#[derive(Debug, Clone, Copy)]
pub struct Setup<'a> {
    /// What arrives.
    pub workload: &'a Workload,
    /// Who decides.
    pub contender: &'a Contender,
    /// Times the workload's own times; 0 for everything at once.
    pub time_scale: f64,
    /// Blocks of an engine's cache.
    pub blocks: usize,
    /// How many adapters it computes side by side, if requests are for any.
    pub adapter_places: Option<u32>,
    /// Who computes prompts and nothing else.
    pub apart: Apart,
    /// Who decides, in how many places.
    pub routers: Routers,
    /// What becomes of requests in the background.
    pub background: Background,
    /// Who dies, if anybody.
    pub fault: Option<Fault>,
    /// What all randomness comes from.
    pub seed: u64,
}

/// A worker that dies. What it was asked for is asked again, of others, and the clocks of those requests go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// Which.
    pub worker: u32,
    /// When.
    pub dies_ns: u64,
    /// When it is back, with an empty cache.
    pub back_ns: u64,
}

/// What became of a request; times in nanoseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Record {
    /// Which of the workload's requests.
    pub request: u32,
    /// When it arrived.
    pub arrived_ns: u64,
    /// When its first token came.
    pub first_ns: u64,
    /// When its last token came.
    pub done_ns: u64,
    /// Tokens of its prompt that were in the cache.
    pub cached_tokens: u32,
    /// What its prefill took of a worker that did nothing else.
    pub own_ns: u64,
    /// Tokens that the router expected there.
    pub hit_tokens: u32,
    /// Who had it, or generated from it.
    pub worker: u32,
    /// Who computed its prompt, if that was another one.
    pub prefill_worker: Option<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A request that waited for another.
    Arrival(u32),
    /// Something happens at a worker.
    Worker(u32),
    /// A worker dies.
    Death(u32),
    /// It is back.
    Return(u32),
    /// Workers say how they are.
    Report,
    /// Indexes forget.
    Expire,
    /// A request that is in line may be better off elsewhere by now.
    Reconsider(u32),
    /// What the router that has a request tells of it has reached the others.
    Told(u32, Word),
    /// A router looks for workers with time to spare.
    Spare(u16),
}

/// A request that its router has placed.
struct Placed {
    decided: Decided,
    leg: Leg,
    /// While it is in line.
    turn: Option<Turn>,
}

struct Simulation<'a, E> {
    setup: Setup<'a>,
    engines: Vec<E>,
    routers: Vec<Router>,
    rng: SmallRng,
    knowledge: Knowledge,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    entered: u64,
    /// When each worker's next event is, as entered in `events`.
    expected_ns: Vec<Option<u64>>,
    placed: Vec<Option<Placed>>,
    /// Of each router that is not the strangers'.
    heard: Vec<Heard>,
    called: Arc<Called>,
    /// Which router had each request.
    replicas: Vec<u16>,
    records: Vec<Record>,
    /// Requests that wait for the one of the same index.
    followers: Vec<Option<u32>>,
    left: usize,
    waiting: background::Waiting,
    demand: demand::Seen,
    /// Of engines that have died since.
    retractions: u64,
    path: Vec<BlockHash>,
    notices: Vec<Notice>,
}

/// Runs a workload over `engines` to its end. `tick` is told of each request that is done.
#[must_use]
pub fn run<E: Engine>(setup: Setup<'_>, engines: Vec<E>, tick: &mut dyn FnMut()) -> Outcome {
    let mut simulation = Simulation::new(setup, engines);
    simulation.run(tick);
    let retractions =
        simulation.retractions + simulation.engines.iter().map(Engine::retractions).sum::<u64>();
    let own = setup.routers.count.max(1);
    let foreground = setup.workload.foreground().len();
    let records = simulation.records.into_iter().zip(simulation.replicas).take(foreground);
    let records = records.filter(|(_, replica)| usize::from(*replica) < own).map(|(record, _)| record);
    let spare_tokens = simulation.waiting.done_tokens();
    let (workers, demand) = (simulation.engines.len(), simulation.demand.mean());
    Outcome { records: records.collect(), workers, retractions, spare_tokens, demand }
}

impl<'a, E: Engine> Simulation<'a, E> {
    fn new(setup: Setup<'a>, engines: Vec<E>) -> Self {
        let Setup { workload, contender, blocks, routers, apart, background, seed, .. } = setup;
        let replicas = routers.count.max(1);
        let count = workload.requests.len();
        let places = u32::try_from(replicas).unwrap_or(u32::MAX);
        let known_blocks = routers.know_capacity.then_some(blocks);
        let router = |rank: u32| {
            let seed = seed.wrapping_add(rank.into());
            let drawn = (background.share(), seed);
            let router = Router::new(contender.policy(), (engines.len(), apart), known_blocks, drawn);
            if routers.told_after_ms.is_some() {
                router.is_told(RouterPlace { rank, count: places }, known_blocks);
            }
            if let Some(places) = setup.adapter_places {
                router.knows_adapters(&workload.adapters, places);
            }
            router
        };
        let mut all: Vec<_> = (0..places).map(router).collect();
        if routers.strangers > 0 {
            all.push(Router::of_strangers(engines.len(), seed));
        }
        let mut followers = vec![None; count];
        for (number, request) in (0..).zip(&workload.requests) {
            if let Some(leader) = request.after {
                followers[leader as usize] = Some(number);
            }
        }
        Self {
            setup,
            routers: all,
            rng: SmallRng::seed_from_u64(seed),
            knowledge: Knowledge::new(contender, routers, engines.len(), blocks),
            events: BinaryHeap::new(),
            entered: 0,
            expected_ns: vec![None; engines.len()],
            placed: (0..count).map(|_| None).collect(),
            heard: (0..replicas).map(|_| Heard::new()).collect(),
            called: Arc::default(),
            replicas: vec![0; count],
            records: (0..).map(|request| Record { request, ..Record::default() }).take(count).collect(),
            followers,
            left: workload.foreground().len(),
            waiting: background::Waiting::new(workload, background, replicas),
            demand: demand::Seen::default(),
            retractions: 0,
            path: Vec::new(),
            notices: Vec::new(),
            engines,
        }
    }

    fn run(&mut self, tick: &mut dyn FnMut()) {
        let Setup { workload, time_scale, .. } = self.setup;
        for (event, every) in
            [(Event::Report, self.knowledge.reports_every()), (Event::Expire, self.knowledge.expires_every())]
        {
            if every.is_some() {
                self.enter(0, event);
            }
        }
        if let Some(Fault { worker, dies_ns, back_ns }) = self.setup.fault {
            self.enter(dies_ns, Event::Death(worker));
            self.enter(back_ns, Event::Return(worker));
        }
        self.begin_background();
        let mut next = 0;
        let foreground = workload.foreground();
        while self.left > 0 {
            let is_due = |number: usize| foreground[number].after.is_none();
            while next < foreground.len() && !is_due(next) {
                next += 1;
            }
            let due_ns = foreground.get(next).map(|request| Workload::due_ns(request, time_scale));
            let event_ns = self.events.peek().map(|Reverse((at_ns, ..))| *at_ns);
            match (due_ns, event_ns) {
                (Some(due_ns), _) if event_ns.is_none_or(|event_ns| due_ns <= event_ns) => {
                    self.arrive(u32::try_from(next).unwrap_or(u32::MAX), due_ns);
                    next += 1;
                }
                (_, Some(_)) => self.happen(tick),
                _ => return,
            }
        }
    }

    fn enter(&mut self, at_ns: u64, event: Event) {
        self.entered += 1;
        self.events.push(Reverse((at_ns, self.entered, event)));
    }

    fn happen(&mut self, tick: &mut dyn FnMut()) {
        let Some(Reverse((now_ns, _, event))) = self.events.pop() else { return };
        match event {
            Event::Arrival(number) => self.arrive(number, now_ns),
            Event::Worker(worker) => self.advance(worker, now_ns, tick),
            Event::Death(worker) => self.die(worker, now_ns),
            Event::Return(worker) => self.routers.iter().for_each(|router| router.comes_back(worker)),
            Event::Report => {
                self.knowledge.report(&self.engines, &self.routers, now_ns);
                let every = self.knowledge.reports_every().unwrap_or(Duration::MAX);
                self.enter(now_ns.saturating_add(as_ns(every)), event);
            }
            Event::Expire => {
                self.knowledge.expire(&self.routers);
                let every = self.knowledge.expires_every().unwrap_or(Duration::MAX);
                self.enter(now_ns.saturating_add(as_ns(every)), event);
            }
            Event::Reconsider(number) => self.reconsider(number, now_ns),
            Event::Told(number, word) => self.hear(number, word, now_ns),
            Event::Spare(router) => self.look_for_spare(router, now_ns),
        }
        self.send_called(now_ns);
    }

    fn arrive(&mut self, number: u32, now_ns: u64) {
        let replica = self.front(number);
        self.replicas[number as usize] = u16::try_from(replica).unwrap_or(u16::MAX);
        self.records[number as usize].arrived_ns = now_ns;
        self.demand.look(&self.routers[0], now_ns);
        if !self.waits_for_spare(number, now_ns) {
            self.send(number, now_ns);
        }
    }

    /// Which router a balancer in front of them gives a request to.
    fn front(&mut self, number: u32) -> usize {
        /// Blocks that a prompt is known by.
        const FIRST: usize = 2;
        let Setup { workload, routers, .. } = self.setup;
        let request = &workload.requests[number as usize];
        let known_by = match routers.front {
            Front::Random => None,
            Front::Session => {
                request.session.map(|session| ChainHasher::new(0).push_bytes(&session.to_le_bytes()).0)
            }
            Front::Prefix => {
                let mut chain = ChainHasher::new(0);
                workload.ids(request).iter().take(FIRST).map(|id| chain.push_tokens(&[*id]).0).last()
            }
        };
        if routers.strangers > 0 {
            let known_by = request.session.unwrap_or_else(|| number.into());
            let hash = ChainHasher::new(1).push_bytes(&known_by.to_le_bytes()).0;
            if hash % 100 < routers.strangers.into() {
                return routers.count;
            }
        }
        match (routers.count, known_by) {
            (1, _) => 0,
            (count, Some(hash)) => usize::try_from(hash % count as u64).unwrap_or(0),
            (count, None) => self.rng.random_range(0..count),
        }
    }

    /// A worker dies: its router notices at once, from connections that break, and sends elsewhere what was there.
    fn die(&mut self, worker: u32, now_ns: u64) {
        let engine = &mut self.engines[worker as usize];
        self.retractions += engine.retractions();
        engine.restart();
        self.expected_ns[worker as usize] = None;
        self.routers.iter().for_each(|router| router.loses(worker));
        self.knowledge.forget(worker);
        let was_there = |number: &u32| {
            let at = *number as usize;
            self.placed[at].is_some() && self.records[at].worker == worker
        };
        let lost: Vec<u32> = (0..).take(self.placed.len()).filter(was_there).collect();
        for number in &lost {
            self.placed[*number as usize] = None;
            self.tell(*number, Word::Over, now_ns);
        }
        for number in lost {
            if !self.waits_for_spare(number, now_ns) {
                self.send(number, now_ns);
            }
        }
    }

    /// Enters a worker's next event, if it is not yet.
    fn expect(&mut self, worker: u32) {
        let next_ns = self.engines[worker as usize].next_ns();
        let expected = &mut self.expected_ns[worker as usize];
        if *expected != next_ns {
            *expected = next_ns;
            if let Some(at_ns) = next_ns {
                self.enter(at_ns, Event::Worker(worker));
            }
        }
    }

    fn advance(&mut self, worker: u32, now_ns: u64, tick: &mut dyn FnMut()) {
        if self.expected_ns[worker as usize] != Some(now_ns) {
            // Something came in between; there is another entry.
            return;
        }
        let mut notices = std::mem::take(&mut self.notices);
        self.engines[worker as usize].advance(self.setup.workload, &mut notices);
        for notice in notices.drain(..) {
            match notice {
                Notice::FirstToken { request, cached_tokens } => self.begin(request, cached_tokens, now_ns),
                Notice::Done { request } if self.leg(request) == Leg::Prefill => {
                    self.hand_over(request, now_ns);
                }
                Notice::Done { request } => {
                    self.end(request, now_ns);
                    if request < self.setup.workload.first_in_background() {
                        tick();
                    }
                }
            }
        }
        self.notices = notices;
        self.expect(worker);
    }

    fn begin(&mut self, number: u32, cached_tokens: u32, now_ns: u64) {
        let leg = self.leg(number);
        let record = &mut self.records[number as usize];
        record.first_ns = now_ns;
        if leg != Leg::Decode {
            record.cached_tokens = cached_tokens;
            let input_tokens = self.setup.workload.requests[number as usize].input_tokens;
            let own_s =
                self.engines[record.worker as usize].alone_s(input_tokens, cached_tokens, record.arrived_ns);
            record.own_ns = nanoseconds(own_s);
        }
        if let Some(Placed { decided: Decided { lease, .. }, .. }) = &mut self.placed[number as usize] {
            let router = &self.routers[self.replicas[number as usize] as usize];
            match leg {
                // What another worker computed tells no speed.
                Leg::Decode => lease.first_token(),
                Leg::Whole | Leg::Prefill => {
                    router.decider.first_token(lease, Duration::from_nanos(now_ns));
                }
            }
        }
        let worker = record.worker;
        self.tell(number, Word::Begun, now_ns);
        if self.knowledge.minds_flight() {
            self.read_path(number);
            let replica = self.replicas[number as usize] as usize;
            self.knowledge.arrived_at(replica, worker, &self.path);
        }
    }

    fn end(&mut self, number: u32, now_ns: u64) {
        let record = &mut self.records[number as usize];
        record.done_ns = now_ns;
        let router = &self.routers[self.replicas[number as usize] as usize];
        let tokens = self.setup.workload.requests[number as usize].output_tokens as usize;
        router.decider.answered(&router.fleet.workers()[record.worker as usize], tokens);
        self.placed[number as usize] = None;
        self.tell(number, Word::Over, now_ns);
        if number >= self.setup.workload.first_in_background() {
            return self.end_in_background(number, now_ns);
        }
        self.left -= 1;
        if let Some(follower) = self.followers[number as usize] {
            let request = &self.setup.workload.requests[follower as usize];
            let due_ns = Workload::due_ns(request, self.setup.time_scale);
            self.enter(due_ns.max(now_ns), Event::Arrival(follower));
        }
    }
}

fn as_ns(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
