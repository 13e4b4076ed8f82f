//! What a second thread adds: decisions of one decider that both have, with the hashing, and beside it of one decider each.

use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use router_core::prefix::tree::TreeLimits;
use router_core::{Among, Decider, Fleet, FleetSnapshot, RequestView, WorkerId, WorkerSpec, policy};
use rustix::thread::{CpuSet, sched_setaffinity};

use crate::contestants::hashed;
use crate::prompts;
use crate::speed::median;

const ROUNDS: usize = 15;
const SLICE: Duration = Duration::from_millis(60);

/// The ratio of one and the same decider for both threads, and of one for each, which is what this machine can give at most.
struct Gain {
    shared: f64,
    apart: f64,
}

pub fn table() {
    println!("two threads, prompts a second of one (median of {ROUNDS} rounds)");
    println!("| | 1 KB | 16 KB | 200 KB |\n|---|---|---|---|");
    let gains = [1, 16, 200].map(gain);
    let row = |of: fn(&Gain) -> f64| gains.each_ref().map(|gain| format!("{:.2}", of(gain))).join(" | ");
    println!("| hash and decide, 4 workers | {} |", row(|gain| gain.shared));
    println!("| the same, each thread with a router of its own | {} |\n", row(|gain| gain.apart));
}

struct Router {
    fleet: Arc<FleetSnapshot>,
    decider: Decider,
}

impl Router {
    fn new() -> Self {
        let spec = |n: usize| WorkerSpec {
            id: WorkerId::new(&format!("w{n}")),
            address: format!("http://w{n}:8000"),
        };
        let mut fleet = Fleet::default();
        fleet.reconcile(&(0..4).map(spec).collect::<Vec<_>>());
        let fleet = fleet.snapshot();
        fleet.workers().iter().for_each(|worker| {
            worker.mark_up();
        });
        let policy = policy::by_name("prefix_aware").expect("it is in the table");
        let decider = Decider::new(policy, TreeLimits::within_bytes(64 << 20), 1);
        Self { fleet, decider }
    }

    /// Decides one after the other, hashing each, for that long. Returns how many a second.
    fn decide_for(&self, time: Duration, prompts: &mut Prompts) -> f64 {
        let began = Instant::now();
        let mut count = 0;
        while began.elapsed() < time {
            let blocks = hashed(prompts.next());
            let request = RequestView {
                blocks: &blocks.hashes,
                prompt_bytes: blocks.prompt_bytes,
                prompt_tokens: blocks.prompt_bytes / 4,
                ..RequestView::default()
            };
            drop(self.decider.decide(&self.fleet, &request, Among::Untried(&[]), Duration::ZERO));
            count += 1;
        }
        f64::from(count) / began.elapsed().as_secs_f64()
    }
}

fn gain(kilobytes: usize) -> Gain {
    let (first, second) = (Router::new(), Router::new());
    let (mut shared, mut apart) = (Vec::new(), Vec::new());
    let mut next = 0;
    let mut run = |routers: &[&Router]| {
        next += 1;
        prompts_a_second(routers, kilobytes, next)
    };
    for _ in 0..=ROUNDS {
        let one = run(&[&first]);
        shared.push(run(&[&first, &first]) / one);
        apart.push(run(&[&first, &second]) / one);
    }
    // The first round warms up.
    Gain { shared: median(shared.split_off(1)), apart: median(apart.split_off(1)) }
}

/// What threads decide together, each on a core of its own and at its own router of `routers`.
fn prompts_a_second(routers: &[&Router], kilobytes: usize, run: u64) -> f64 {
    let barrier = Barrier::new(routers.len());
    std::thread::scope(|scope| {
        let threads: Vec<_> = routers
            .iter()
            .enumerate()
            .map(|(core, router)| {
                let barrier = &barrier;
                scope.spawn(move || {
                    let mut prompts = Prompts::new(kilobytes, (run << 1 | core as u64) << 32);
                    stay_on(core);
                    barrier.wait();
                    router.decide_for(SLICE, &mut prompts)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("no decision panics")).sum()
    })
}

/// Otherwise the two are now and then on one core, while something else runs on the other.
fn stay_on(core: usize) {
    let mut cores = CpuSet::new();
    cores.set(core);
    sched_setaffinity(None, &cores).expect("there are two cores");
}

/// Prompts of the shared beginnings in turn, each with an end that nobody has had.
struct Prompts {
    of_beginnings: Vec<String>,
    number: u64,
}

impl Prompts {
    fn new(kilobytes: usize, first: u64) -> Self {
        let of_beginnings = (0..prompts::SHARED).map(|number| prompts::shared(kilobytes, number)).collect();
        Self { of_beginnings, number: first }
    }

    fn next(&mut self) -> &str {
        self.number += 1;
        let prompt = &mut self.of_beginnings[(self.number % prompts::SHARED) as usize];
        let own = prompt.len() * 3 / 4;
        prompt.replace_range(own..own + 16, &format!("{:016x}", self.number));
        prompt
    }
}
