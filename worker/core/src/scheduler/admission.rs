//! Who of those that wait begins to run: in order, as long as each finds room for all of its tokens and for what the
//! others grow. Who wants an adapter for which there is no place is passed.

use roundhouse_types::BlockHash;
use smallvec::SmallVec;

use super::{Arrival, Plan, PrefillOrder, Scheduler};
use crate::sequence::Sequence;

/// There was no room for the first that waits and has a place for its adapter. Until blocks are given back it is not looked at again, unless more of it
/// can be found.
#[derive(Clone, Copy, Debug)]
pub(super) struct Blocked {
    /// The first block of it that could not be found.
    missing: Option<BlockHash>,
}

impl Scheduler {
    /// Takes sequences from the queue, in order, as long as each finds blocks for all of its tokens.
    pub(super) fn admit(&mut self, plan: &mut Plan) {
        if self.waiting.is_empty() || self.is_blocked() {
            return;
        }
        let mut reserved_tokens = self.reserved_tokens();
        while plan.budget_tokens > 0 && self.running.len() < self.limits.max_running {
            let Some(at) = self.admit_first(reserved_tokens) else { return };
            // What it generates itself is kept free whole, until the next step.
            reserved_tokens +=
                self.limits.reserve.map_or(0, |reserve| reserve.growth_tokens(&self.running[at]));
            // All of its blocks at once: two prompts that each held half of what they need would wait for ever.
            if self.make_room_without_retracting(at, self.running[at].remaining_tokens()) {
                self.make_place_in_plan(at);
                self.take_fetched(at);
                // Where prompts have steps of their own, one that was fetched takes part in the decodes'.
                if self.limits.prefill == PrefillOrder::First && self.running[at].joins_decodes() {
                    continue;
                }
                let chunk = self.running[at].remaining_tokens().min(plan.budget_tokens);
                self.take_part(plan, at, chunk);
            }
        }
    }

    /// Whether nothing has happened that could make room for the first of the queue since there was none.
    pub(super) fn is_blocked(&self) -> bool {
        let can_go_on = |blocked: &Blocked| blocked.missing.is_some_and(|hash| self.pool.knows(hash));
        self.blocked.as_ref().is_some_and(|blocked| !can_go_on(blocked))
    }

    /// The first of the queue that has a place for its adapter.
    pub(super) fn first_admissible(&self) -> Option<usize> {
        if self.limits.max_adapters == usize::MAX {
            return (!self.waiting.is_empty()).then_some(0);
        }
        let present = self.running_adapters();
        let is_full = present.len() >= self.limits.max_adapters;
        let has_place = |adapter: u32| !is_full || present.binary_search(&adapter).is_ok();
        self.waiting.iter().position(|sequence| sequence.adapter.is_none_or(has_place))
    }

    /// Adapters of what runs, sorted.
    pub(super) fn running_adapters(&self) -> SmallVec<[u32; 16]> {
        let mut present: SmallVec<_> = self.running.iter().filter_map(|sequence| sequence.adapter).collect();
        present.sort_unstable();
        present.dedup();
        present
    }

    /// Tokens to keep free for what runs.
    fn reserved_tokens(&self) -> usize {
        let Some(reserve) = self.limits.reserve else { return 0 };
        let growth: usize = self.running.iter().map(|sequence| reserve.growth_tokens(sequence)).sum();
        (growth as f64 * self.reserved_share) as usize
    }

    /// Moves the first of the queue to those that run, with the blocks its beginning is found in, if there are enough
    /// for the rest and for the reserve. Returns its place.
    fn admit_first(&mut self, reserved_tokens: usize) -> Option<usize> {
        let block_tokens = self.block_tokens;
        let first = self.first_admissible()?;
        let next = self.waiting.get_mut(first)?;
        // At least one token must be computed, or there would be nothing to draw from.
        let findable = (next.tokens.len() - 1) / block_tokens;
        let needed = next.tokens.len().div_ceil(block_tokens);
        let own = self.limits.reserve.map_or(0, |reserve| reserve.growth_tokens(next));
        let path = next.hashes(block_tokens);
        let found = self.pool.find(path, findable);
        // Alone it gets all there is.
        let reserved_tokens = if self.running.is_empty() { 0 } else { reserved_tokens + own };
        let reserved = reserved_tokens.div_ceil(block_tokens);
        if needed - found.blocks.len() + found.unheld + reserved > self.pool.free_blocks() {
            let missing = path[..findable].get(found.blocks.len()).copied();
            self.blocked = Some(Blocked { missing });
            return None;
        }
        let mut sequence = self.waiting.take(first)?;
        self.blocked = None;
        self.pool.hold_all(&found.blocks);
        sequence.computed_tokens = found.blocks.len() * block_tokens;
        sequence.full_blocks = found.blocks.len();
        sequence.table = found.blocks.into();
        self.counted.uncomputed_tokens += std::mem::take(&mut sequence.foreseen_tokens);
        self.counted.uncomputed_tokens -= sequence.computed_tokens;
        // What should come before what was fetched has been evicted meanwhile: without it the rest is of no use.
        sequence.fetched_from = sequence.fetched_from.filter(|from| *from <= sequence.full_blocks);
        if sequence.cached_tokens.is_none() {
            sequence.cached_tokens = Some(sequence.computed_tokens);
            self.counted.queried_tokens += sequence.prompt_tokens as u64;
            self.counted.hit_tokens += sequence.computed_tokens as u64;
        }
        let rank = |sequence: &Sequence| (sequence.priority, sequence.generated_tokens());
        let before = self.running.iter().rposition(|other| rank(other) >= rank(&sequence));
        let at = before.map_or(0, |before| before + 1);
        self.running.insert(at, sequence);
        Some(at)
    }

    /// What another worker has computed is in its blocks, and can be found by others.
    fn take_fetched(&mut self, at: usize) {
        let sequence = &self.running[at];
        if sequence.is_fetched() {
            let fetched = sequence.prompt_tokens - 1 - sequence.computed_tokens;
            self.arrivals.push(Arrival {
                id: sequence.id,
                blocks: sequence.table.clone(),
                first: sequence.full_blocks,
            });
            self.count_computed(at, fetched);
            self.counted.computed_tokens -= fetched as u64;
        }
    }

    /// Whoever was planned from `at` on is one place further back.
    fn make_place_in_plan(&mut self, at: usize) {
        if at + 1 < self.running.len() {
            self.planned.iter_mut().filter(|planned| **planned >= at).for_each(|planned| *planned += 1);
        }
    }
}
