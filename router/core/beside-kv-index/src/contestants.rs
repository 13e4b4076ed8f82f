//! The trees, each as its product uses it: look a prompt up, enter it for a worker, keep within a bound.

use std::collections::VecDeque;

use kv_index::{StringTree, TokenTree};
use radix_trie::{Trie, TrieCommon};
use roundhouse_types::ChainHasher;
use router_core::prefix::tree::TreeLimits;
use router_core::prefix::{Cut, Path, PrefixTree, PromptBlocks, PromptHasher};
use router_core::{PromptUse, WorkerSlot};

use crate::prompts::WORKERS;

/// Something that remembers who was sent what.
pub trait Contestant {
    fn name(&self) -> &'static str;

    /// Looks `prompt` up, and enters it for `worker`. Returns something of what was found, so that it is computed.
    fn serve(&mut self, prompt: &str, worker: u32) -> usize;
}

/// How much each of them keeps, in bytes of prompts as entered for a worker.
pub const KEPT_BYTES: usize = 64 << 20;

pub fn hashed(prompt: &str) -> PromptBlocks {
    let mut hasher = PromptHasher::new(ChainHasher::new(1), PromptUse::Whole);
    hasher.push(prompt.as_bytes());
    hasher.finish(ChainHasher::new(2))
}

/// Ours: hashing, depths of all holders, insertion, eviction of the oldest.
pub struct Ours(PrefixTree);

impl Ours {
    /// As much as the others keep of prompts of that length.
    pub fn new(kilobytes: usize) -> Self {
        let blocks = hashed(&"x".repeat(kilobytes * 1_024)).hashes.len();
        let total_blocks = KEPT_BYTES / (kilobytes * 1_024) * blocks;
        Self(PrefixTree::new(TreeLimits { total_blocks, worker_blocks: total_blocks }))
    }
}

impl Contestant for Ours {
    fn name(&self) -> &'static str {
        "ours, 16 depths"
    }

    fn serve(&mut self, prompt: &str, worker: u32) -> usize {
        let blocks = hashed(prompt);
        let hits = self.0.hits(&blocks.hashes);
        let path = Path::new(&blocks.hashes, Cut::Bytes(blocks.opening));
        self.0.insert(WorkerSlot(worker), path, &hits);
        hits.iter().map(|(_, depth)| depth).sum()
    }
}

pub fn tenants() -> Vec<String> {
    (0..WORKERS).map(|worker| format!("http://worker-{worker}:8000")).collect()
}

/// Runs an eviction after so many bytes of prompts, an eighth of what is kept: smg sweeps every two minutes.
const SWEEP_BYTES: usize = KEPT_BYTES / 8;

/// smg's tree of text: finds one owner (and up to eight that share its node).
pub struct SmgText {
    tree: StringTree,
    tenants: Vec<String>,
    since_sweep: usize,
}

impl Default for SmgText {
    fn default() -> Self {
        Self { tree: StringTree::new(), tenants: tenants(), since_sweep: 0 }
    }
}

impl Contestant for SmgText {
    fn name(&self) -> &'static str {
        "kv-index, text"
    }

    fn serve(&mut self, prompt: &str, worker: u32) -> usize {
        let found = self.tree.match_and_insert(prompt, &self.tenants[worker as usize]);
        self.since_sweep += prompt.len();
        if self.since_sweep >= SWEEP_BYTES {
            self.since_sweep = 0;
            self.tree.evict_tenant_by_size(KEPT_BYTES / WORKERS as usize);
        }
        found.matched_char_count
    }
}

/// smg's tree of tokens, given four bytes as a token, without the time that tokenizing takes.
pub struct SmgTokens {
    tree: TokenTree,
    tenants: Vec<String>,
    since_sweep: usize,
}

impl Default for SmgTokens {
    fn default() -> Self {
        Self { tree: TokenTree::new(), tenants: tenants(), since_sweep: 0 }
    }
}

impl Contestant for SmgTokens {
    fn name(&self) -> &'static str {
        "kv-index, tokens"
    }

    fn serve(&mut self, prompt: &str, worker: u32) -> usize {
        let word = |bytes: &[u8]| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        let tokens: Vec<u32> = prompt.as_bytes().chunks_exact(4).map(word).collect();
        let found = self.tree.match_and_insert(&tokens, &self.tenants[worker as usize]);
        self.since_sweep += prompt.len();
        if self.since_sweep >= SWEEP_BYTES {
            self.since_sweep = 0;
            self.tree.evict_tenant_by_size(KEPT_BYTES / 4 / WORKERS as usize);
        }
        found.matched_token_count
    }
}

/// The `radix_trie` crate, which matches whole keys only: the longest earlier prompt that is a prefix of this one.
#[derive(Default)]
pub struct RadixTrie {
    trie: Trie<String, u32>,
    order: VecDeque<String>,
    kept_bytes: usize,
}

impl Contestant for RadixTrie {
    fn name(&self) -> &'static str {
        "radix_trie crate"
    }

    fn serve(&mut self, prompt: &str, worker: u32) -> usize {
        /// It needs ten times the memory of others.
        const KEPT_BYTES: usize = super::contestants::KEPT_BYTES / 8;
        let found = self.trie.get_ancestor(prompt).and_then(|node| node.key().map(String::len)).unwrap_or(0);
        self.trie.insert(prompt.to_owned(), worker);
        self.order.push_back(prompt.to_owned());
        self.kept_bytes += prompt.len();
        while self.kept_bytes > KEPT_BYTES {
            let Some(oldest) = self.order.pop_front() else { break };
            self.trie.remove(&oldest);
            self.kept_bytes -= oldest.len();
        }
        found
    }
}

pub fn all(kilobytes: usize) -> Vec<Box<dyn Contestant>> {
    vec![
        Box::new(SmgText::default()),
        Box::new(SmgTokens::default()),
        Box::new(RadixTrie::default()),
        Box::new(Ours::new(kilobytes)),
    ]
}
