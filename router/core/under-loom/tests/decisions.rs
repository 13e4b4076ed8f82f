//! Decisions, ends of requests and news of workers at once, in every order that two preemptions can bring about.

#![expect(clippy::unwrap_used, reason = "in a test a panic is the report")]

use std::sync::Arc;
use std::time::Duration;

use loom::thread;
use roundhouse_types::ChainHasher;
use router_core::prefix::tree::TreeLimits;
use router_core::prefix::{PromptBlocks, PromptHasher};
use router_core::{
    Among, Decided, Decider, Fleet, FleetSnapshot, PromptUse, RequestView, WorkerId, WorkerSpec, policy,
};

const NOW: Duration = Duration::from_secs(100);

struct Router {
    decider: Decider,
    fleet: Arc<FleetSnapshot>,
}

impl Router {
    fn new(workers: usize) -> Arc<Self> {
        let name = |n: usize| WorkerId::new(&format!("w{n}"));
        let spec = |n: usize| WorkerSpec::new(name(n), format!("http://w{n}:8000"));
        let mut fleet = Fleet::default();
        fleet.reconcile(&(0..workers).map(spec).collect::<Vec<_>>());
        let fleet = fleet.snapshot();
        fleet.workers().iter().for_each(|worker| {
            worker.mark_up();
        });
        let policy = policy::by_name("prefix_aware").unwrap();
        let decider = Decider::new(policy, TreeLimits { total_blocks: 100, worker_blocks: 100 }, 1);
        Arc::new(Self { decider, fleet })
    }

    fn decide(&self, prompt: &PromptBlocks) -> Decided {
        self.decider.decide(&self.fleet, &view(prompt), Among::Untried(&[]), NOW).unwrap()
    }

    /// Nothing is in flight, and no entry is kept for what is not.
    fn is_idle(&self) {
        for worker in self.fleet.workers() {
            let load = worker.load.read();
            let counts = (load.requests, load.prefilling, load.prefill_tokens, load.context_tokens);
            assert_eq!(counts, (0, 0, 0, 0));
            let queue = worker.load.queue();
            assert!(queue.owed_s.abs() < 1e-6, "{queue:?}");
        }
        self.decider.forget_unused_since(self.decider.tree_clock());
        assert_eq!(self.decider.tree_blocks(), 0, "a pin was lost");
    }
}

fn prompt(text: &str) -> PromptBlocks {
    let mut hasher = PromptHasher::new(ChainHasher::new(3), PromptUse::Whole);
    hasher.push(text.repeat(200 / text.len()).as_bytes());
    hasher.finish(ChainHasher::new(4))
}

fn view(prompt: &PromptBlocks) -> RequestView<'_> {
    RequestView {
        blocks: &prompt.hashes,
        prompt_bytes: prompt.prompt_bytes,
        prompt_tokens: prompt.prompt_bytes / 4,
        ..RequestView::default()
    }
}

fn explore(body: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
    builder.check(body);
}

#[test]
fn of_two_equal_prompts_at_once_one_sees_the_other() {
    explore(|| {
        let router = Router::new(1);
        let other = Arc::clone(&router);
        let thread = thread::spawn(move || other.decide(&prompt("a")));
        let here = router.decide(&prompt("a"));
        let there = thread.join().unwrap();
        let mut known = [here.basis.known_blocks, there.basis.known_blocks];
        known.sort_unstable();
        assert_eq!(known, [0, 3]);
        assert_eq!(router.fleet.workers()[0].load.read().requests, 2);
        drop((here, there));
        router.is_idle();
    });
}

#[test]
fn two_cold_prompts_at_once_go_to_two_workers() {
    explore(|| {
        let router = Router::new(2);
        let other = Arc::clone(&router);
        let thread = thread::spawn(move || other.decide(&prompt("a")));
        let here = router.decide(&prompt("b"));
        let there = thread.join().unwrap();
        assert_ne!(here.worker.slot, there.worker.slot);
    });
}

#[test]
fn what_ends_while_another_is_decided_leaves_nothing() {
    explore(|| {
        let router = Router::new(1);
        let mut before = router.decide(&prompt("a"));
        let other = Arc::clone(&router);
        let thread = thread::spawn(move || {
            other.decider.first_token(&mut before.lease, NOW);
            drop(before);
        });
        drop(router.decide(&prompt("a")));
        thread.join().unwrap();
        router.is_idle();
    });
}

#[test]
fn a_failure_takes_back_no_more_than_its_own() {
    explore(|| {
        let router = Router::new(1);
        let other = Arc::clone(&router);
        let thread = thread::spawn(move || {
            let path = prompt("a");
            let Decided { worker, mut lease, basis, .. } = other.decide(&path);
            other.decider.take_back(&mut lease, &worker, &path.hashes, basis);
        });
        let here = router.decide(&prompt("a"));
        thread.join().unwrap();
        // Whoever came first: this one is in flight, and so is its path.
        assert_eq!(router.decider.tree_blocks(), 3);
        drop(here);
        router.is_idle();
    });
}

#[test]
fn a_worker_that_restarts_under_its_requests_is_forgotten_once() {
    explore(|| {
        let router = Router::new(1);
        let before = router.decide(&prompt("a"));
        let other = Arc::clone(&router);
        let thread = thread::spawn(move || other.decider.forget(&other.fleet.workers()[0]));
        let here = router.decide(&prompt("a"));
        drop(before);
        thread.join().unwrap();
        drop(here);
        router.is_idle();
    });
}
