//! Keeps what happens to the cache for whoever asked to know: nothing, and at no cost, until then.
//!
//! Blocks are forgotten by the pool and stored by the scheduler; here both come into one order.

use std::ops::Range;

use crate::block_pool::BlockPool;
use crate::kv_event::{KvEvent, StoredBlocks};
use crate::sequence::Sequence;

/// Events that nobody has taken yet; `None` while nobody wants to know.
#[derive(Clone, Debug, Default)]
pub(super) struct EventLog {
    events: Option<Vec<KvEvent>>,
}

impl EventLog {
    pub(super) fn switch_on(&mut self, pool: &mut BlockPool) {
        pool.record_forgotten();
        self.events.get_or_insert_default();
    }

    pub(super) fn take(&mut self, pool: &mut BlockPool) -> Vec<KvEvent> {
        self.removed(pool);
        self.events.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// What the pool has forgotten since it was last asked.
    pub(super) fn removed(&mut self, pool: &mut BlockPool) {
        let Some(events) = &mut self.events else { return };
        let hashes = pool.take_forgotten();
        if !hashes.is_empty() {
            events.push(KvEvent::Removed { hashes });
        }
    }

    /// The pool has forgotten everything.
    pub(super) fn cleared(&mut self, pool: &mut BlockPool) {
        let Some(events) = &mut self.events else { return };
        pool.take_forgotten();
        events.push(KvEvent::Cleared);
    }

    /// Full blocks of `sequence`, `blocks` of its table, can be found now and could not before.
    pub(super) fn stored(
        &mut self,
        pool: &mut BlockPool,
        sequence: &mut Sequence,
        blocks: Range<usize>,
        block_tokens: usize,
    ) {
        if blocks.is_empty() || sequence.is_salted || self.events.is_none() {
            return;
        }
        // A block may have been forgotten to make room for just these.
        self.removed(pool);
        let Some(events) = &mut self.events else { return };
        let positions = blocks.start * block_tokens..blocks.end * block_tokens;
        let path = sequence.hashes(block_tokens);
        let parent = blocks.start.checked_sub(1).map(|before| path[before]);
        let hashes = path[blocks].to_vec();
        let tokens = sequence.tokens[positions.clone()].to_vec();
        let sequence = sequence.id;
        events.push(KvEvent::Stored(StoredBlocks {
            hashes,
            parent,
            tokens,
            block_tokens,
            sequence,
            positions,
        }));
    }
}
