//! What a decision costs: hits, ledger, policy, lease and the tree's new entry, for prompts of 1, 16 and 200 KB before four and a
//! hundred workers; and beyond the tree, the ledger and the lease, for 8 to 10,000. 8 shared beginnings make 75 % of the text; the rest is new each time, as in `bench overhead`.
//!
//! `cargo bench -p router-core --bench pick`

use std::hint::black_box;
use std::time::Duration;

use criterion::measurement::WallTime;
use criterion::{BatchSize, BenchmarkGroup, BenchmarkId, Criterion, criterion_group, criterion_main};
use roundhouse_types::{ChainHasher, WorkerLoad};
use router_core::Precedence;
use router_core::ledger::{Booking, HeldPrompt, LoadReading};
use router_core::prefix::PromptHasher;
use router_core::prefix::blocks::PromptBlocks;
use router_core::prefix::tree::TreeLimits;
use router_core::reports::EngineLoad;
use router_core::request::Answer;
use router_core::speed::{CacheRoom, Prefill, PrefillSpeed, Siblings};
use router_core::{
    Among, Decider, Fleet, FleetSnapshot, Lease, PromptUse, RequestView, WorkerId, WorkerSpec, policy,
};

const SHARED_PROMPTS: u64 = 8;
const MODEL: &str = "m";

fn fleet(count: usize) -> std::sync::Arc<FleetSnapshot> {
    let spec = |n: usize| WorkerSpec::new(WorkerId::new(&format!("w{n}")), format!("http://w{n}:8000"));
    let mut fleet = Fleet::default();
    fleet.reconcile(&(0..count).map(spec).collect::<Vec<_>>());
    let snapshot = fleet.snapshot();
    for worker in snapshot.workers() {
        worker.mark_up();
        worker.set_models(vec![MODEL.to_owned()]);
    }
    snapshot
}

/// Request number `number` of `kilobytes`.
fn prompt(kilobytes: usize, number: u64) -> PromptBlocks {
    let bytes = kilobytes * 1_024;
    let text =
        |seed: u64, length: usize| seed.to_le_bytes().into_iter().cycle().take(length).collect::<Vec<u8>>();
    let mut hasher = PromptHasher::new(ChainHasher::new(1), PromptUse::Whole);
    hasher.push(&text(number % SHARED_PROMPTS, bytes * 3 / 4));
    hasher.push(&text(SHARED_PROMPTS + number, bytes / 4));
    hasher.finish(ChainHasher::new(2))
}

fn pick(criterion: &mut Criterion) {
    for (name, workers) in [("round_robin", 4), ("prefix_aware", 4), ("prefix_aware", 100)] {
        let mut group = criterion.benchmark_group(format!("{name}/{workers} workers"));
        let fleet = fleet(workers);
        for kilobytes in [1, 16, 200] {
            let policy = policy::by_name(name).expect("it is in the table");
            let decider = Decider::new(policy, TreeLimits::within_bytes(64 << 20), 1);
            let mut number = 0;
            let mut next = || {
                number += 1;
                prompt(kilobytes, number)
            };
            group.bench_function(BenchmarkId::from_parameter(format!("{kilobytes} KB")), |bencher| {
                bencher.iter_batched(
                    &mut next,
                    |prompt| {
                        let request = RequestView {
                            model: Some(MODEL),
                            blocks: &prompt.hashes,
                            prompt_bytes: prompt.prompt_bytes,
                            prompt_tokens: prompt.prompt_bytes / 4,
                            ..RequestView::default()
                        };
                        black_box(decider.decide(&fleet, &request, Among::Untried(&[]), Duration::ZERO))
                    },
                    BatchSize::SmallInput,
                );
            });
        }
        group.finish();
    }
}

/// Each worker has up to three requests in flight, of which the last waits for its first token.
fn occupy(fleet: &FleetSnapshot) -> Vec<Lease> {
    let mut leases = Vec::new();
    for (worker, number) in fleet.workers().iter().zip(1..) {
        for nth in 0..number * 7 % 4 {
            let prefill = Prefill { new_tokens: 1_000 + number as usize % 97, cached_tokens: 0 };
            let booking = Booking {
                pick: number * 4 + nth,
                now: Duration::ZERO,
                context_tokens: 2_000,
                held: HeldPrompt::default(),
                prefill,
                speed: PrefillSpeed::default(),
                room: CacheRoom::default(),
                may_wait_since: None,
                answer: Answer::Streamed,
                adapter: None,
                siblings: Siblings::default(),
                whose: Precedence::default(),
                background_tokens: None,
                taken_s: 0.0,
                due_in_s: 0.0,
            };
            leases.iter_mut().last().map(Lease::first_token);
            leases.push(Lease::reserve(&worker.load, booking));
        }
    }
    leases
}

/// What a decision costs beside the tree: prompts of one block, of which one worker holds 8 others. A popular one has been asked for all the time.
fn beyond_the_tree(criterion: &mut Criterion) {
    for name in ["idle", "busy", "busy, popular", "engines count", "workers tell"] {
        let mut group = criterion.benchmark_group(format!("prefix_aware, beyond the tree, {name}"));
        for workers in [8, 1_000, 10_000] {
            let fleet = fleet(workers);
            let _leases = if name == "idle" { Vec::new() } else { occupy(&fleet) };
            for worker in fleet.workers() {
                match name {
                    "engines count" => {
                        worker.hear_counts(&EngineLoad::default(), &LoadReading::default(), Duration::ZERO);
                    }
                    "workers tell" => worker.hear_load(&WorkerLoad::default(), Duration::ZERO),
                    _ => {}
                }
            }
            let times_asked = if name == "busy, popular" { 20 } else { 0 };
            pick_beyond_the_tree(&mut group, &fleet, times_asked);
        }
        group.finish();
    }
}

fn pick_beyond_the_tree(group: &mut BenchmarkGroup<'_, WallTime>, fleet: &FleetSnapshot, times_asked: u32) {
    let policy = policy::by_name("prefix_aware").expect("it is in the table");
    let decider = Decider::new(policy, TreeLimits::within_bytes(64 << 20), 1);
    let prompt = prompt(1, 0);
    let request =
        RequestView { model: Some(MODEL), prompt_bytes: 100, prompt_tokens: 25, ..RequestView::default() };
    let held = RequestView { blocks: &prompt.hashes[..8], ..request };
    drop(decider.decide(fleet, &held, Among::Untried(&[]), Duration::ZERO));
    let request = RequestView { blocks: &prompt.hashes[..1], ..request };
    let now = Duration::from_millis(300) * times_asked;
    for number in 0..times_asked {
        drop(decider.decide(fleet, &request, Among::Untried(&[]), Duration::from_millis(300) * number));
    }
    group.bench_function(
        BenchmarkId::from_parameter(format!("{} workers", fleet.workers().len())),
        |bencher| {
            bencher.iter(|| black_box(decider.decide(fleet, &request, Among::Untried(&[]), now)));
        },
    );
}
criterion_group!(benches, pick, beyond_the_tree);
criterion_main!(benches);
