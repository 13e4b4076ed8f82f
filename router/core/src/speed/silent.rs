//! Requests that a worker has computed without anybody seeing it: no first token comes where answers come whole.
//!
//! Until their answers come they are kept here, since these tell how long they took. Used by [`PrefillQueue`](super::PrefillQueue) alone.

use super::Prefill;
use super::queue::{MOST_REQUESTS, Waiting};

/// Those of one worker.
#[derive(Debug, Default)]
pub(super) struct Silent {
    requests: Vec<Waiting>,
    /// What was computed like that in the interval that the next first token ends: tokens and pairs.
    in_step: (f64, f64),
    /// Not told to the ledger yet: how many, and their tokens.
    news: (usize, usize),
}

impl Silent {
    /// Whether another may come in.
    pub(super) fn has_room(&self) -> bool {
        self.requests.len() < MOST_REQUESTS
    }

    pub(super) fn enter(&mut self, one: Waiting) {
        self.is_in_step(one.prefill);
        self.news = (self.news.0 + 1, self.news.1 + one.prefill.new_tokens);
        self.requests.push(one);
    }

    /// A prompt was computed in the present interval.
    pub(super) fn is_in_step(&mut self, prefill: Prefill) {
        self.in_step = (self.in_step.0 + prefill.new_tokens as f64, self.in_step.1 + prefill.pairs());
    }

    /// Another interval begins. Returns the tokens and pairs of this one.
    pub(super) fn begin_step(&mut self) -> (f64, f64) {
        std::mem::take(&mut self.in_step)
    }

    pub(super) fn take_news(&mut self) -> (usize, usize) {
        std::mem::take(&mut self.news)
    }

    pub(super) fn has(&self, ticket: u64) -> bool {
        self.requests.iter().any(|one| one.ticket == ticket)
    }

    pub(super) fn leave(&mut self, ticket: u64) -> Option<Waiting> {
        let at = self.requests.iter().position(|one| one.ticket == ticket)?;
        Some(self.requests.swap_remove(at))
    }
}
