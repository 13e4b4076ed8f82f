//! Our prefix tree beside the `radix_trie` crate and smg's published trees, in one run and one table.
//!
//! `cargo run --release` prints everything; `-- speed`, `-- memory`, `-- hits` or `-- threads` one part. Contestants take turns within
//! a round, and ratios are medians over rounds, since a machine is never quiet for as long as one contestant runs: that is why this is
//! no criterion benchmark.

mod contestants;
mod hits;
mod memory;
mod prompts;
mod speed;
mod threads;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words[..] {
        [] => {
            speed::table();
            memory::table();
            hits::table();
            threads::table();
        }
        ["speed"] => speed::table(),
        // For a profiler.
        ["speed", name, kilobytes] => speed::alone(name, kilobytes),
        ["memory"] => memory::table(),
        ["memory", name, kilobytes] => memory::child(name, kilobytes),
        ["hits"] => hits::table(),
        ["threads"] => threads::table(),
        ["threads", kilobytes] => threads::alone(kilobytes),
        _ => eprintln!(
            "{words:?} is no part; there are speed, memory, hits and threads, and without a word all of them"
        ),
    }
}
