//! The prefix cache of a mock: the system prompts it saw last, and no more of them than it holds.
//!
//! Knows names of prompts, not prompts.

use crate::overhead::workload::TAG_BYTES;

/// The most recently used prompts, the latest first.
#[derive(Debug)]
pub struct PromptCache {
    tags: Vec<[u8; TAG_BYTES]>,
    capacity_prompts: usize,
}

impl PromptCache {
    /// An empty cache of that many prompts.
    pub fn new(capacity_prompts: usize) -> Self {
        Self { tags: Vec::with_capacity(capacity_prompts + 1), capacity_prompts }
    }

    /// Uses a prompt; whether it was there.
    pub fn touch(&mut self, tag: [u8; TAG_BYTES]) -> bool {
        let found = self.tags.iter().position(|cached| *cached == tag);
        if let Some(at) = found {
            self.tags.remove(at);
        }
        self.tags.insert(0, tag);
        self.tags.truncate(self.capacity_prompts);
        found.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn evicts_the_least_recently_used() {
        let mut cache = PromptCache::new(2);
        let mut touch = |name: u8| cache.touch([name; TAG_BYTES]);
        assert!(!touch(b'a'));
        assert!(!touch(b'b'));
        assert!(touch(b'a'));
        assert!(!touch(b'c'), "c is new and pushes b out");
        assert!(touch(b'a'));
        assert!(!touch(b'b'));
    }
}
