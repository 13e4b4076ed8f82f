//! SGLang's and smg's `cache_aware`: the longest match if it is long enough and the fleet is balanced.
//!
//! From `design/protocols.md` §4. Imbalanced (`max − min > abs` and `max > rel · min` requests in flight): the least loaded.
//! Otherwise, if `matched / input` exceeds a threshold, a worker that holds the deepest matched node; else a cold choice, which
//! newer versions make by load and older ones by tree size.

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::{Choice, IndexBound, IndexUse, Policy};
use crate::request::{PromptUse, RequestView};

/// 67,108,864 characters a worker, at four a token.
const TREE_TOKENS: usize = 67_108_864 / 4;

/// Who gets a prompt that nobody holds enough of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ColdChoice {
    /// The worker with the fewest requests in flight.
    LeastLoaded,
    /// The worker whose tree is smallest.
    SmallestTree,
}

/// `cache_aware` with its constants.
#[derive(Clone, Copy, Debug)]
pub struct SglangCacheAware {
    /// The name it goes by here.
    pub name: &'static str,
    /// `matched / input` must exceed this.
    pub match_share: f64,
    /// The fleet is imbalanced only if most and fewest requests are further apart than this.
    pub imbalance_requests: u32,
    /// The fleet is imbalanced only if the most exceed the fewest this many times.
    pub imbalance_ratio: f64,
    /// What becomes of cold prompts.
    pub cold: ColdChoice,
}

impl SglangCacheAware {
    /// Defaults of smg and of SGLang's newer routers.
    pub const NEWER: Self = Self {
        name: "sglang_cache_aware",
        match_share: 0.3,
        imbalance_requests: 64,
        imbalance_ratio: 1.5,
        cold: ColdChoice::LeastLoaded,
    };
    /// Defaults of SGLang's older routers.
    pub const OLDER: Self = Self {
        name: "sglang_cache_aware_old",
        match_share: 0.5,
        imbalance_requests: 32,
        imbalance_ratio: 1.0001,
        cold: ColdChoice::SmallestTree,
    };

    fn is_imbalanced(&self, choice: &Choice<'_>) -> bool {
        let requests = || choice.candidates.iter().map(|candidate| candidate.load.requests);
        let (most, fewest) = (requests().max().unwrap_or(0), requests().min().unwrap_or(0));
        most - fewest > self.imbalance_requests && f64::from(most) > self.imbalance_ratio * f64::from(fewest)
    }
}

impl Policy for SglangCacheAware {
    fn name(&self) -> &'static str {
        self.name
    }

    fn prompt_use(&self) -> PromptUse {
        PromptUse::Whole
    }

    fn wants_tree_sizes(&self) -> bool {
        self.cold == ColdChoice::SmallestTree
    }

    fn index_use(&self) -> IndexUse {
        IndexUse { bound: IndexBound::Tokens(TREE_TOKENS), ..IndexUse::default() }
    }

    /// Requests in flight, or blocks in the tree, or matched tokens below zero: one unit in each case.
    fn costs(&self, request: &RequestView<'_>, choice: &Choice<'_>) -> Vec<f64> {
        let candidates = choice.candidates;
        let by_load = || candidates.iter().map(|candidate| f64::from(candidate.load.requests)).collect();
        if self.is_imbalanced(choice) {
            return by_load();
        }
        let deepest = candidates.iter().max_by_key(|candidate| candidate.hit_blocks);
        let Some(deepest) = deepest.filter(|deepest| {
            f64::from(deepest.hit_tokens) > self.match_share * request.prompt_tokens.max(1) as f64
        }) else {
            return match self.cold {
                ColdChoice::LeastLoaded => by_load(),
                ColdChoice::SmallestTree => {
                    candidates.iter().map(|candidate| f64::from(candidate.tree_blocks)).collect()
                }
            };
        };
        // The original takes whichever holder its node's table names first: no matter of load, and the same each time.
        let node =
            request.blocks.get((deepest.hit_blocks as usize).wrapping_sub(1)).map_or(0, |block| block.0);
        let draw = |slot: u32| xxh3_64_with_seed(&slot.to_le_bytes(), node) as f64 / u64::MAX as f64;
        candidates
            .iter()
            .map(|candidate| draw(candidate.slot.0) - 2.0 * f64::from(candidate.hit_blocks))
            .collect()
    }
}
