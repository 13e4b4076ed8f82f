//! What a second thread adds: decisions of the router's own decider, hashing outside its lock.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use router_core::prefix::tree::TreeLimits;
use router_core::{Among, Decider, Fleet, FleetSnapshot, RequestView, WorkerId, WorkerSpec, policy};

use crate::contestants::hashed;
use crate::prompts::shared;
use crate::speed::median;

const ROUNDS: usize = 15;

pub fn table() {
    println!("two threads, prompts a second of one (median of {ROUNDS} rounds)");
    println!("| | 1 KB | 16 KB | 200 KB |\n|---|---|---|---|");
    println!(
        "| hash and decide, 4 workers | {} |\n",
        [1, 16, 200].map(|kilobytes| format!("{:.2}", gain(kilobytes))).join(" | ")
    );
}

fn gain(kilobytes: usize) -> f64 {
    let mut fleet = Fleet::default();
    let spec =
        |n: usize| WorkerSpec { id: WorkerId::new(&format!("w{n}")), address: format!("http://w{n}:8000") };
    fleet.reconcile(&(0..4).map(spec).collect::<Vec<_>>());
    let fleet = fleet.snapshot();
    fleet.workers().iter().for_each(|worker| {
        worker.mark_up();
    });
    let policy = policy::by_name("prefix_aware").expect("it is in the table");
    let decider = Decider::new(policy, TreeLimits::within_bytes(64 << 20), 1);
    let count = (16_384 / kilobytes).clamp(40, 4_000);
    let mut number = 0;
    let mut ratios = Vec::new();
    for _ in 0..=ROUNDS {
        let mut prompts = || -> Vec<String> {
            (0..count)
                .map(|_| {
                    number += 1;
                    shared(kilobytes, number)
                })
                .collect()
        };
        let (alone, two) = (vec![prompts()], vec![prompts(), prompts()]);
        let one_s = run(&decider, &fleet, &alone);
        let two_s = run(&decider, &fleet, &two);
        ratios.push(2.0 * one_s / two_s);
    }
    // The first round warms up.
    median(ratios.split_off(1))
}

/// Seconds until each thread has decided its own prompts.
fn run(decider: &Decider, fleet: &FleetSnapshot, of_threads: &[Vec<String>]) -> f64 {
    let barrier = Barrier::new(of_threads.len() + 1);
    std::thread::scope(|scope| {
        let threads: Vec<_> = of_threads
            .iter()
            .map(|prompts| {
                let barrier = &barrier;
                scope.spawn(move || {
                    barrier.wait();
                    for prompt in prompts {
                        let blocks = hashed(prompt);
                        let request = RequestView {
                            blocks: &blocks.hashes,
                            prompt_bytes: blocks.prompt_bytes,
                            prompt_tokens: blocks.prompt_bytes / 4,
                            ..RequestView::default()
                        };
                        drop(decider.decide(fleet, &request, Among::Untried(&[]), Duration::ZERO));
                    }
                })
            })
            .collect();
        barrier.wait();
        let began = Instant::now();
        for thread in threads {
            thread.join().expect("no decision panics");
        }
        began.elapsed().as_secs_f64()
    })
}
