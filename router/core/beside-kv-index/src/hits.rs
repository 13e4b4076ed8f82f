//! What share of shared text is found: ours against blocks of 64 bytes all the way.

use std::collections::HashSet;

use roundhouse_types::ChainHasher;
use router_core::WorkerSlot;
use router_core::prefix::blocks::covered_bytes;
use router_core::prefix::tree::TreeLimits;
use router_core::prefix::{Cut, Path, PrefixTree};

use crate::contestants::hashed;
use crate::prompts::text;

const PROMPTS: u64 = 2_000;

pub fn table() {
    println!("share of shared bytes that is found; what is shared ends anywhere");
    println!("| | 1 KB | 4 KB | 16 KB | 200 KB |\n|---|---|---|---|---|");
    let cells = [1, 4, 16, 200].map(shares);
    println!("| ours | {} |", cells.map(|(ours, _)| format!("{ours:.3}")).join(" | "));
    println!("| 64-byte blocks | {} |\n", cells.map(|(_, plain)| format!("{plain:.3}")).join(" | "));
}

fn shares(kilobytes: usize) -> (f64, f64) {
    let bytes = kilobytes << 10;
    let beginning = text(7, bytes);
    let mut tree = PrefixTree::new(TreeLimits { total_blocks: 10_000_000, worker_blocks: 10_000_000 });
    let mut plain: HashSet<u64> = HashSet::new();
    let (mut shared_bytes, mut ours_bytes, mut plain_bytes) = (0, 0, 0);
    for number in 0..PROMPTS.min(400_000 / kilobytes as u64) {
        // From a twentieth of the prompt to all of it, by the golden ratio, so that every place is met.
        let share = 0.05 + 0.95 * (number as f64 * 0.618_033_988_7).fract();
        let shared = (bytes as f64 * share) as usize;
        let prompt = beginning[..shared].to_owned() + &text(100 + number, bytes - shared);
        let blocks = hashed(&prompt);
        let path = Path::new(&blocks.hashes, Cut::Bytes(blocks.opening));
        let hits = tree.hits(&blocks.hashes);
        let depth = hits.deepest();
        tree.insert(WorkerSlot(0), path, &hits);
        let mut chain = ChainHasher::new(3);
        let hashes: Vec<_> =
            prompt.as_bytes().chunks_exact(64).map(|block| chain.push_bytes(block).0).collect();
        let found = hashes.iter().take_while(|hash| plain.contains(hash)).count() * 64;
        plain.extend(&hashes);
        if number > 0 {
            shared_bytes += shared;
            ours_bytes += covered_bytes(depth).min(shared);
            plain_bytes += found.min(shared);
        }
    }
    (ours_bytes as f64 / shared_bytes as f64, plain_bytes as f64 / shared_bytes as f64)
}
