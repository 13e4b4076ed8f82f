//! Match and insertion, hashing and eviction included, one thread.

use std::hint::black_box;

use rustix::time::{ClockId, clock_gettime};

use crate::contestants::{Contestant, KEPT_BYTES, all};
use crate::prompts::{shared, worker};

const ROUNDS: usize = 15;

pub fn table() {
    println!("match + insert, us a prompt (ratio to kv-index's text tree, median of {ROUNDS} rounds)");
    println!("| | 1 KB | 16 KB | 200 KB |\n|---|---|---|---|");
    let columns: Vec<_> = [1, 16, 200].map(|kilobytes| column(all(kilobytes), kilobytes)).into();
    for (row, (name, ..)) in columns[0].iter().enumerate() {
        let cell = |column: &Vec<(&str, f64, f64)>| format!("{:.2} ({:.2})", column[row].1, column[row].2);
        let cells: Vec<_> = columns.iter().map(cell).collect();
        println!("| {name} | {} |", cells.join(" | "));
    }
    println!();
}

/// One contestant by itself.
pub fn alone(name: &str, kilobytes: &str) {
    let kilobytes = kilobytes.parse().expect("a number of kilobytes");
    let contestants = all(kilobytes).into_iter().filter(|one| one.name().starts_with(name)).collect();
    for (name, time_us, _) in column(contestants, kilobytes) {
        println!("{name}: {time_us:.2} us");
    }
}

/// Of each contestant: its name, its median time, and its median ratio to the first.
fn column(mut contestants: Vec<Box<dyn Contestant>>, kilobytes: usize) -> Vec<(&'static str, f64, f64)> {
    let count = (4_096 / kilobytes).clamp(20, 2_000);
    let mut number = 0;
    // Until all of them evict.
    for _ in 0..(KEPT_BYTES / (kilobytes << 10)) + count {
        number += 1;
        let prompt = shared(kilobytes, number);
        for contestant in &mut contestants {
            contestant.serve(&prompt, worker(number));
        }
    }
    let mut times: Vec<Vec<f64>> = vec![Vec::new(); contestants.len()];
    for _ in 0..ROUNDS {
        let prompts: Vec<_> = (0..count)
            .map(|_| {
                number += 1;
                (shared(kilobytes, number), worker(number))
            })
            .collect();
        for (contestant, times) in contestants.iter_mut().zip(&mut times) {
            let began_s = cpu_s();
            for (prompt, worker) in &prompts {
                black_box(contestant.serve(prompt, *worker));
            }
            times.push((cpu_s() - began_s) * 1e6 / count as f64);
        }
    }
    let ratios = |own: &Vec<f64>| own.iter().zip(&times[0]).map(|(own, first)| own / first).collect();
    let row = |(contestant, own): (&dyn Contestant, &Vec<f64>)| {
        (contestant.name(), median(own.clone()), median(ratios(own)))
    };
    contestants.iter().map(AsRef::as_ref).zip(&times).map(row).collect()
}

/// What this thread has had of a core: time in which others had it does not count.
fn cpu_s() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

pub fn median(mut of: Vec<f64>) -> f64 {
    of.sort_by(f64::total_cmp);
    of[of.len() / 2]
}
