//! How much of a reply has gone by, for whoever must count its tokens and is not told them.

use memchr::memmem::Finder;
use router_core::token_ratio::TokenRatios;

/// Before what each event of a stream says.
const DATA: &[u8] = b"data:";

/// What has gone by.
#[derive(Debug, Default)]
pub(super) struct SaidSoFar {
    events: usize,
    bytes: usize,
}

impl SaidSoFar {
    /// Another piece.
    pub(super) fn add(&mut self, piece: &[u8]) {
        self.events += Finder::new(DATA).find_iter(piece).count();
        self.bytes += piece.len();
    }

    /// How many tokens that is: a stream has one or more in an event, and a document is mostly text.
    pub(super) fn tokens(&self, model: Option<&str>, ratios: &TokenRatios) -> usize {
        if self.events > 0 { self.events } else { ratios.tokens(model, self.bytes) }
    }
}
