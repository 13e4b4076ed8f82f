//! What must hold after every operation, as assertions. For tests.

use std::collections::HashMap;

use super::Scheduler;
use crate::sequence::Sequence;

impl Scheduler {
    /// Panics if blocks, sequences and counters contradict each other.
    ///
    /// # Panics
    /// When an invariant is broken.
    pub fn check_invariants(&self) {
        self.pool.check_invariants();
        self.check_tables();
        self.check_order();
        let all = || self.running.iter().chain(self.waiting.iter());
        for sequence in all() {
            assert!(
                sequence.cached_tokens.unwrap_or(0) < sequence.prompt_tokens,
                "of a prompt one token is computed at least"
            );
        }
        let remaining: usize = all().map(Sequence::owed_tokens).sum();
        assert_eq!(self.stats().uncomputed_tokens, remaining);
        assert!(self.counted.recomputed_tokens <= self.counted.retracted_tokens);
        assert!(self.running.len() <= self.limits.max_running);
        assert!(self.running_adapters().len() <= self.limits.max_adapters);
    }

    fn check_tables(&self) {
        let mut references = HashMap::new();
        for sequence in &self.running {
            assert!(sequence.table.len() * self.block_tokens >= sequence.computed_tokens);
            assert!(sequence.computed_tokens < sequence.tokens.len());
            // Between `schedule` and `commit` what the step will fill may be found already.
            let full_blocks = sequence.computed_tokens / self.block_tokens;
            assert!(
                sequence.full_blocks == full_blocks
                    || !self.planned.is_empty() && sequence.full_blocks > full_blocks
            );
            for (index, block) in sequence.table.iter().enumerate() {
                *references.entry(*block).or_insert(0) += 1;
                if index >= sequence.full_blocks {
                    assert_eq!(self.pool.references(*block), 1, "a block that is written to has one holder");
                }
            }
        }
        for (block, count) in &references {
            assert_eq!(self.pool.references(*block), *count);
        }
        assert_eq!(self.pool.total_blocks() - self.pool.free_blocks(), references.len());
        for sequence in self.waiting.iter() {
            assert!(sequence.table.is_empty() && sequence.computed_tokens == 0);
            assert!(sequence.foreseen_tokens < sequence.prompt_tokens);
        }
    }

    fn check_order(&self) {
        let running: Vec<i64> = self.running.iter().map(|sequence| sequence.priority).collect();
        let waiting: Vec<i64> = self.waiting.iter().map(|sequence| sequence.priority).collect();
        for priorities in [running, waiting] {
            assert!(
                priorities.is_sorted_by(|one, next| one >= next),
                "higher priorities come first: {priorities:?}"
            );
        }
    }
}
