//! What a router tells others of its requests in flight: a request's lease says so by itself, wherever it goes and however it ends.
//!
//! Those others book the same ([`Decider::book`](crate::Decider::book)). Knows no sockets: words go to whoever is given. Next: `replicas` in the
//! router, which sends them.

use std::fmt;
use std::sync::Arc;

use crate::prefix::index::Comparison;

/// How a request has begun to be answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Beginning {
    /// With its first token, which tells how long its prefill took.
    FirstToken,
    /// With a whole answer, which took longer than that.
    WholeAnswer,
    /// In a way that tells nothing of the worker's speed.
    Other,
}

/// What a worker found of a prompt in its cache, as it has counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Found {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Those that were cached.
    pub cached_tokens: usize,
}

impl Found {
    /// Beside what was expected, `hit_tokens` of the prompt's `estimated_tokens`: these are estimates, and the worker has counted.
    #[must_use]
    pub fn beside(self, hit_tokens: usize, estimated_tokens: usize) -> Comparison {
        let counted = hit_tokens * self.prompt_tokens;
        let predicted_tokens = counted.checked_div(estimated_tokens).unwrap_or(0);
        Comparison { predicted_tokens, cached_tokens: self.cached_tokens }
    }
}

/// What is told of a request that has been sent to a worker, or is in line for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Word {
    /// It was in line, and is sent.
    Goes,
    /// Its answer has begun.
    Begun(Beginning),
    /// It came to nothing there: the worker does not hold its prompt.
    Failed,
    /// The worker says what it found in its cache.
    Found(Found),
    /// It is there no more.
    Over,
}

/// Whoever passes words on. Told from within requests, so it must not wait for anybody.
pub trait Listener: Send + Sync + fmt::Debug {
    /// A word of the request of that number.
    fn hear(&self, request: u64, word: Word);
}

/// One request of which others are told; dropped, it is over.
#[derive(Debug)]
pub struct Told {
    request: u64,
    listener: Arc<dyn Listener>,
}

impl Told {
    /// The request of that number, of which `listener` has been told that it goes to a worker.
    #[must_use]
    pub fn new(request: u64, listener: Arc<dyn Listener>) -> Self {
        Self { request, listener }
    }

    /// Its number.
    #[must_use]
    pub fn request(&self) -> u64 {
        self.request
    }

    pub(crate) fn tell(&self, word: Word) {
        self.listener.hear(self.request, word);
    }
}

impl Drop for Told {
    fn drop(&mut self) {
        self.tell(Word::Over);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_found_is_compared_in_tokens_as_the_worker_counts() {
        let found = Found { prompt_tokens: 300, cached_tokens: 100 };
        let expected = Comparison { predicted_tokens: 150, cached_tokens: 100 };
        assert_eq!(found.beside(100, 200), expected);
        assert_eq!(found.beside(0, 0).predicted_tokens, 0);
    }
}
