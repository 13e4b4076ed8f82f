//! What requests at one worker add to its KV cache, and how much they may: see [`recomputed`](crate::prefix::recomputed), which says when that is
//! bounded.

use super::line::Memory;

/// Who adds at most such a part of what one counts at most adds next to nothing, and never waits for that.
const NOTHING: usize = 64;

/// How much requests may add to a worker's cache, in tokens. What a worker has room for may not be known: then nothing is counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CacheRoom {
    /// What one request counts at most: one that is longer does not have to wait for all others, nor they for it.
    pub each: usize,
    /// For all that were sent and are not over; `None` where there is no bound.
    pub all: Option<usize>,
}

/// What they add at the moment. Used by [`PrefillQueue`](super::PrefillQueue) alone.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Additions {
    /// Of all requests that are not over, those in line included.
    pub(super) tokens: usize,
    pub(super) room: CacheRoom,
}

impl Additions {
    /// Memory is short where they are bounded.
    pub(super) fn memory(self) -> Memory {
        if self.room.all.is_some() { Memory::Short } else { Memory::Enough }
    }

    /// Whether there is room for a request that adds `tokens`, while others in line are to add `in_line`.
    pub(super) fn fit(self, tokens: usize, in_line: usize) -> bool {
        let sent = self.tokens.saturating_sub(in_line);
        self.room.all.is_none_or(|all| sent + tokens <= all || tokens <= self.room.each / NOTHING)
    }
}
