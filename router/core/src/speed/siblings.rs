//! Prompts with one beginning that come together: what one of them is about to compute, the others find if they come a step later.
//!
//! Engines take what waits into a step at once, and what is computed in it can be found once it is over: each of several siblings in a step computes
//! what they share. So they wait in line until the first of them is in a step; then they are in the next one. Used by
//! [`PrefillQueue`](super::PrefillQueue).

use roundhouse_types::BlockHash;

use super::PrefillSpeed;
use crate::request::{Leg, RequestView};

/// What computing what is shared must take, in seconds, besides a step's fixed part: whoever waits may miss a step of those that decode.
const LEAST_SHARED_S: f64 = 0.01;

/// What of a prompt its worker has to compute, and whom it waits for. A block's hash stands for all before it too.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Siblings {
    /// The first block that it computes, and where in the prompt that is.
    computes: Option<(usize, BlockHash)>,
    /// Whoever computes from here on goes first.
    awaits: Option<BlockHash>,
}

impl Siblings {
    /// Of a prompt of which a worker has `hit_blocks`, given those that were `sent` there and have not begun: it waits for the one with which it shares
    /// most, if that is worth it, and else for those in line alone that compute the same.
    pub(super) fn of<'a>(
        request: &RequestView<'_>,
        hit_blocks: usize,
        sent: impl Iterator<Item = &'a Self>,
        speed: &PrefillSpeed,
    ) -> Self {
        if request.leg == Leg::Decode {
            return Self::default();
        }
        let covered = request.covered_tokens(hit_blocks);
        let shared = |one: &Self| {
            let (at, block) = one.computes.filter(|(at, _)| *at < hit_blocks)?;
            let tokens = covered.saturating_sub(request.covered_tokens(at));
            let is_worth_it = speed.token_s * tokens as f64 > speed.fixed_s.max(LEAST_SHARED_S);
            (request.blocks.get(at) == Some(&block) && is_worth_it).then_some((tokens, block))
        };
        let computes = request.blocks.get(hit_blocks).map(|block| (hit_blocks, *block));
        let first = sent.filter_map(shared).max_by_key(|(tokens, _)| *tokens);
        Self { computes, awaits: first.or(computes).map(|(_, block)| block) }
    }

    /// Whether it waits for `other`.
    pub(super) fn awaits(&self, other: &Self) -> bool {
        self.awaits.is_some_and(|block| other.computes.is_some_and(|(_, first)| first == block))
    }
}
