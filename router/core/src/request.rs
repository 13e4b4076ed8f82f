//! All that a policy may see of a request.

use roundhouse_types::BlockHash;

/// What was read of a request before it is routed; borrowed from the body's parse.
#[derive(Clone, Copy, Debug, Default)]
pub struct RequestView<'a> {
    /// The model asked for, if the body named one.
    pub model: Option<&'a str>,
    /// Hash of the session header, or else of the body's `user`.
    pub session: Option<u64>,
    /// Chained hashes of the prompt's full blocks, first block first.
    pub blocks: &'a [BlockHash],
    /// Length of the prompt in template order.
    pub prompt_bytes: usize,
    /// Estimated length of the prompt: bytes by the learned bytes a token of its model.
    pub prompt_tokens: usize,
}

impl RequestView<'_> {
    /// What keeps equal prefixes together when there is no session: the hash of the prompt's first KiB, or what there
    /// is of it.
    #[must_use]
    pub fn affinity(&self) -> Option<u64> {
        const FIRST_BLOCKS: usize = 16;
        self.session.or_else(|| self.blocks.iter().take(FIRST_BLOCKS).next_back().map(|block| block.0))
    }
}
