//! Memory for each byte of prompts of which none is like another, by what the system has given to a process that holds nothing else.

use crate::contestants::{Contestant, all};
use crate::prompts::{WORKERS, text};

/// Half of what everybody keeps at least, so that nothing is evicted; `radix_trie` keeps an eighth.
const PROMPTS_BYTES: usize = 7 << 20;
const OTHERS_BYTES: usize = 48 << 20;

pub fn table() {
    println!("memory, bytes a byte of unique prompt");
    println!("| | 1 KB | 16 KB | 200 KB |\n|---|---|---|---|");
    let this = std::env::current_exe().expect("this program has a path");
    for name in all(1).iter().map(|contestant| contestant.name()) {
        let cell = |kilobytes: usize| {
            let out =
                std::process::Command::new(&this).args(["memory", name, &kilobytes.to_string()]).output();
            String::from_utf8_lossy(&out.expect("it runs").stdout).trim().to_owned()
        };
        println!("| {name} | {} |", [1, 16, 200].map(cell).join(" | "));
    }
    println!();
}

/// Measures one contestant in this process.
pub fn child(name: &str, kilobytes: &str) {
    let kilobytes: usize = kilobytes.parse().expect("a number of kilobytes");
    let mut contestant = all(kilobytes).into_iter().find(|one| one.name() == name).expect("a contestant");
    let bytes = if name.starts_with("radix") { PROMPTS_BYTES } else { OTHERS_BYTES };
    let count = bytes / (kilobytes << 10);
    let fill = |contestant: &mut dyn Contestant, number: usize| {
        let number = number as u64;
        contestant.serve(&text(number, kilobytes << 10), (number % WORKERS) as u32);
    };
    fill(&mut *contestant, 0);
    let before = resident_bytes();
    for number in 1..=count {
        fill(&mut *contestant, number);
    }
    println!("{:.2}", (resident_bytes() - before) as f64 / (count * (kilobytes << 10)) as f64);
}

fn resident_bytes() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux has it");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("it says so");
    line.trim().trim_end_matches(" kB").parse::<usize>().expect("a number") << 10
}
