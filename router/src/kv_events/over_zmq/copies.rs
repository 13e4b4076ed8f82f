//! An engine's events → blocks that it holds or does not.
//!
//! An engine may have a block more than once: vLLM tells each copy in its GPU's memory as stored, and each as removed, and so do the tiers below (host memory,
//! disks). Held is what has a copy anywhere. Of models with several kinds of attention, what counts is the caches that keep all of a prompt.

use std::collections::HashMap;

use roundhouse_types::{BlockHash, KvEvent, StoredBlocks};

use super::batch::{Event, Kind};

/// Kinds of caches that keep all of a prompt, in vLLM's words.
const WHOLE: [&str; 3] = ["full_attention", "mla_attention", "sink_full_attention"];
/// The tier that KV is computed in.
const COMPUTED_IN: &str = "GPU";

/// More than any engine has room for; one that tells of more does not tell what goes.
const MOST_BLOCKS: usize = 4 << 20;
/// More kinds of caches than any model has.
const MOST_GROUPS: usize = 64;

/// Copies of one block.
#[derive(Clone, Copy, Default)]
struct Count {
    on_gpu: u32,
    below: u32,
}

/// How many copies the engine has of each block.
#[derive(Default)]
pub(super) struct Copies {
    counts: HashMap<BlockHash, Count>,
    /// Groups of caches that do not keep all of a prompt.
    partial: Vec<u64>,
    /// The largest that has been seen.
    block_tokens: usize,
}

impl Copies {
    /// What an event means.
    pub(super) fn take(&mut self, event: Event) -> Option<KvEvent> {
        match event.kind {
            Kind::Stored => self.stored(event),
            Kind::Removed => self.removed(event),
            Kind::Cleared => {
                self.counts.clear();
                Some(KvEvent::Cleared)
            }
            Kind::Other => None,
        }
    }

    fn stored(&mut self, event: Event) -> Option<KvEvent> {
        if event.attention.as_deref().is_some_and(|kind| !WHOLE.contains(&kind)) {
            let group = event.group.unwrap_or_default();
            if !self.partial.contains(&group) && self.partial.len() < MOST_GROUPS {
                self.partial.push(group);
            }
            return None;
        }
        if !is_on_gpu(&event) {
            // A copy of what is known; where it hangs is not said for all of these.
            for hash in &event.hashes {
                if let Some(count) = self.counts.get_mut(hash) {
                    count.below += 1;
                }
            }
            return None;
        }
        // Parts of blocks are smaller. They are told of again when they are whole.
        let block_tokens = event.block_tokens;
        if event.hashes.is_empty() || block_tokens == 0 || block_tokens < self.block_tokens {
            return None;
        }
        if block_tokens > self.block_tokens || self.counts.len() > MOST_BLOCKS {
            self.counts.clear();
        }
        self.block_tokens = block_tokens;
        for hash in &event.hashes {
            self.counts.entry(*hash).or_default().on_gpu += 1;
        }
        Some(KvEvent::Stored(StoredBlocks {
            hashes: event.hashes,
            parent: event.parent,
            tokens: Vec::new(),
            block_tokens,
            request_id: event.session,
            first_position: 0,
        }))
    }

    fn removed(&mut self, event: Event) -> Option<KvEvent> {
        if event.group.is_some_and(|group| self.partial.contains(&group)) {
            return None;
        }
        let on_gpu = is_on_gpu(&event);
        let mut hashes = event.hashes;
        hashes.retain(|hash| {
            let Some(count) = self.counts.get_mut(hash) else { return on_gpu };
            let copies = if on_gpu { &mut count.on_gpu } else { &mut count.below };
            *copies = copies.saturating_sub(1);
            let is_gone = count.on_gpu + count.below == 0;
            if is_gone {
                self.counts.remove(hash);
            }
            is_gone
        });
        (!hashes.is_empty()).then_some(KvEvent::Removed { hashes })
    }
}

fn is_on_gpu(event: &Event) -> bool {
    event.medium.as_deref().is_none_or(|medium| medium == COMPUTED_IN)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(kind: Kind, medium: &str, hash: u64) -> Event {
        let medium = Some(medium.to_owned());
        Event { kind, hashes: vec![BlockHash(hash)], block_tokens: 16, medium, ..Event::default() }
    }

    fn removed(hash: u64) -> Option<KvEvent> {
        Some(KvEvent::Removed { hashes: vec![BlockHash(hash)] })
    }

    #[test]
    fn a_block_is_gone_with_its_last_copy() {
        let mut copies = Copies::default();
        assert!(matches!(copies.take(event(Kind::Stored, "GPU", 1)), Some(KvEvent::Stored(_))));
        assert!(matches!(copies.take(event(Kind::Stored, "GPU", 1)), Some(KvEvent::Stored(_))));
        assert_eq!(copies.take(event(Kind::Stored, "CPU", 1)), None);
        assert_eq!(copies.take(event(Kind::Removed, "GPU", 1)), None);
        assert_eq!(copies.take(event(Kind::Removed, "GPU", 1)), None, "the host has it");
        assert_eq!(copies.take(event(Kind::Removed, "CPU", 1)), removed(1));
        assert_eq!(copies.take(event(Kind::Removed, "GPU", 1)), removed(1), "of one from before");
        assert_eq!(copies.take(event(Kind::Stored, "CPU", 2)), None, "what it hangs on is not known");
        assert_eq!(copies.take(event(Kind::Removed, "CPU", 2)), None);
        copies.take(event(Kind::Stored, "GPU", 3));
        copies.take(event(Kind::Stored, "GPU", 3));
        assert_eq!(copies.take(event(Kind::Cleared, "GPU", 0)), Some(KvEvent::Cleared));
        copies.take(event(Kind::Stored, "GPU", 3));
        assert_eq!(copies.take(event(Kind::Removed, "GPU", 3)), removed(3));
    }

    #[test]
    fn only_caches_of_whole_prompts_count() {
        let of = |kind, attention: Option<&str>, group| Event {
            attention: attention.map(str::to_owned),
            group: Some(group),
            ..event(kind, "GPU", 1)
        };
        let mut copies = Copies::default();
        assert_eq!(copies.take(of(Kind::Stored, Some("sliding_window"), 1)), None);
        assert!(copies.take(of(Kind::Stored, Some("mla_attention"), 0)).is_some());
        assert_eq!(copies.take(of(Kind::Removed, None, 1)), None);
        assert_eq!(copies.take(of(Kind::Removed, None, 0)), removed(1));
    }

    #[test]
    fn parts_of_blocks_are_no_blocks() {
        let mut copies = Copies::default();
        let part = Event { block_tokens: 4, ..event(Kind::Stored, "GPU", 2) };
        let empty = Event { block_tokens: 0, ..event(Kind::Stored, "GPU", 2) };
        assert_eq!(copies.take(empty), None);
        assert!(copies.take(event(Kind::Stored, "GPU", 1)).is_some());
        assert_eq!(copies.take(part), None);
        assert_eq!(copies.take(Event { hashes: Vec::new(), ..event(Kind::Stored, "GPU", 1) }), None);
    }
}
