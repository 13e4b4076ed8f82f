//! What a second thread adds: look-ups and insertions in one tree that both have, decisions of one decider, both with the hashing, and smg's
//! tree of text, whose nodes have a lock each; beside them what two threads reach here that share nothing, and what it takes to hand memory from core to core.

use std::hint::{black_box, spin_loop};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Barrier, Mutex, TryLockError};
use std::time::{Duration, Instant};

use kv_index::StringTree;
use router_core::prefix::tree::TreeLimits;
use router_core::prefix::{Cut, Path, PrefixTree};
use router_core::{
    Among, Decider, Fleet, FleetSnapshot, RequestView, WorkerId, WorkerSlot, WorkerSpec, policy,
};
use rustix::thread::{CpuSet, sched_setaffinity};

use crate::contestants::{KEPT_BYTES, hashed, tenants};
use crate::prompts;
use crate::speed::median;

const ROUNDS: usize = 15;
const SLICE: Duration = Duration::from_millis(60);
const SIZES: [usize; 3] = [1, 16, 200];

pub fn table() {
    println!("two threads, prompts a second of one (median of {ROUNDS} rounds)");
    println!("| | 1 KB | 16 KB | 200 KB |\n|---|---|---|---|");
    rows("ours, hash, match and insert, 16 workers", SIZES.map(gain::<Tree>));
    rows("ours, hash and decide, 4 workers", SIZES.map(gain::<Router>));
    rows("kv-index, text, 16 workers", SIZES.map(gain::<SmgText>));
    println!("\nfrom core to core a line of memory takes {:.0} ns\n", hand_over_ns());
}

/// Decisions of ours by themselves, for a profiler.
pub fn alone(kilobytes: &str) {
    let Gain { shared, apart } = gain::<Router>(kilobytes.parse().expect("a number of kilobytes"));
    println!("two threads: {shared:.2} of one, with a decider for each {apart:.2}");
}

/// The ratio of one and the same tree for both threads, and of one for each, which is what this machine can give at most.
struct Gain {
    shared: f64,
    apart: f64,
}

fn rows(name: &str, gains: [Gain; 3]) {
    let row = |of: fn(&Gain) -> f64| gains.each_ref().map(|gain| format!("{:.2}", of(gain))).join(" | ");
    println!("| {name} | {} |", row(|gain| gain.shared));
    println!("| the same, one for each thread | {} |", row(|gain| gain.apart));
}

/// What two threads may have in common.
trait Served: Default + Sync {
    fn serve(&self, prompt: &str, number: u64);
    /// Between rounds.
    fn sweep(&self) {}
}

/// As the decider has it: under one lock, with the hashing outside.
struct Tree(Mutex<PrefixTree>);

impl Default for Tree {
    fn default() -> Self {
        Self(Mutex::new(PrefixTree::new(TreeLimits::within_bytes(64 << 20))))
    }
}

impl Served for Tree {
    fn serve(&self, prompt: &str, number: u64) {
        let blocks = hashed(prompt);
        let path = Path::new(&blocks.hashes, Cut::Bytes(blocks.opening));
        let mut tree = loop {
            match self.0.try_lock() {
                Ok(tree) => break tree,
                Err(TryLockError::WouldBlock) => spin_loop(),
                Err(TryLockError::Poisoned(_)) => panic!("the other thread has panicked"),
            }
        };
        let hits = tree.hits(path.hashes);
        black_box(tree.insert(WorkerSlot(prompts::worker(number)), path, &hits));
    }
}

struct Router {
    fleet: Arc<FleetSnapshot>,
    decider: Decider,
}

impl Default for Router {
    fn default() -> Self {
        let spec = |n: usize| WorkerSpec::new(WorkerId::new(&format!("w{n}")), format!("http://w{n}:8000"));
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
}

impl Served for Router {
    fn serve(&self, prompt: &str, _: u64) {
        let blocks = hashed(prompt);
        let request = RequestView {
            blocks: &blocks.hashes,
            prompt_bytes: blocks.prompt_bytes,
            prompt_tokens: blocks.prompt_bytes / 4,
            ..RequestView::default()
        };
        drop(self.decider.decide(&self.fleet, &request, Among::Untried(&[]), Duration::ZERO));
    }
}

struct SmgText {
    tree: StringTree,
    tenants: Vec<String>,
}

impl Default for SmgText {
    fn default() -> Self {
        Self { tree: StringTree::new(), tenants: tenants() }
    }
}

impl Served for SmgText {
    fn serve(&self, prompt: &str, number: u64) {
        black_box(self.tree.match_and_insert(prompt, &self.tenants[prompts::worker(number) as usize]));
    }

    fn sweep(&self) {
        self.tree.evict_tenant_by_size(KEPT_BYTES / self.tenants.len());
    }
}

fn gain<T: Served>(kilobytes: usize) -> Gain {
    let (first, second) = (T::default(), T::default());
    let (mut shared, mut apart) = (Vec::new(), Vec::new());
    let mut next = 0;
    let mut run = |both: &[&T]| {
        next += 1;
        prompts_a_second(both, kilobytes, next)
    };
    for _ in 0..=ROUNDS {
        let one = run(&[&first]);
        shared.push(run(&[&first, &first]) / one);
        apart.push(run(&[&first, &second]) / one);
        first.sweep();
        second.sweep();
    }
    // The first round warms up.
    Gain { shared: median(shared.split_off(1)), apart: median(apart.split_off(1)) }
}

/// What threads do together, each on a core of its own.
fn prompts_a_second<T: Served>(of_threads: &[&T], kilobytes: usize, run: u64) -> f64 {
    let barrier = Barrier::new(of_threads.len());
    let work = |core: usize, tree: &T| {
        let mut prompts = Prompts::new(kilobytes, (run << 1 | core as u64) << 32);
        stay_on(core);
        barrier.wait();
        let (began, mut count) = (Instant::now(), 0);
        while began.elapsed() < SLICE {
            let (prompt, number) = prompts.next();
            tree.serve(prompt, number);
            count += 1;
        }
        f64::from(count) / began.elapsed().as_secs_f64()
    };
    let work = &work;
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            of_threads.iter().enumerate().map(|(core, tree)| scope.spawn(move || work(core, tree))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no decision panics")).sum()
    })
}

/// Half of what it takes to send a number there and get the next one back.
fn hand_over_ns() -> f64 {
    const TURNS: u32 = 200_000;
    let line = AtomicU32::new(0);
    let take_turns = |core: usize| {
        stay_on(core);
        let began = Instant::now();
        for turn in (core as u32..TURNS).step_by(2) {
            while line.load(Ordering::Acquire) != turn {
                spin_loop();
            }
            line.store(turn + 1, Ordering::Release);
        }
        began.elapsed().as_secs_f64() * 1e9 / f64::from(TURNS)
    };
    let take_turns = &take_turns;
    median(
        (0..ROUNDS)
            .map(|_| {
                line.store(0, Ordering::Relaxed);
                std::thread::scope(|scope| {
                    scope.spawn(move || take_turns(1));
                    scope.spawn(move || take_turns(0)).join().expect("nothing in it panics")
                })
            })
            .collect(),
    )
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

    fn next(&mut self) -> (&str, u64) {
        self.number += 1;
        let prompt = &mut self.of_beginnings[(self.number % prompts::SHARED) as usize];
        let own = prompt.len() * 3 / 4;
        let letters: [u8; 16] = std::array::from_fn(|at| b'a' + (self.number >> (4 * at) & 15) as u8);
        prompt.replace_range(own..own + 16, std::str::from_utf8(&letters).expect("they are letters"));
        (prompt, self.number)
    }
}
