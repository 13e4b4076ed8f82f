//! What no policy can do better than, of a workload: every prompt computed alone, all that was asked for before in the cache.
//!
//! Knows no workers' caches, and no time: a prefix that is asked for again before it has been computed counts as cached. Caller:
//! [`grid`](super::grid).

use std::collections::HashSet;

use roundhouse_types::{BlockHash, ChainHasher};

use super::engine::Engine;
use super::workload::{BLOCK_TOKENS, Workload};

/// Mean time to the first token on an idle `engine` whose cache forgets nothing, in seconds.
#[must_use]
pub fn mean_s<E: Engine>(workload: &Workload, engine: &E) -> f64 {
    let (mut known, mut path) = (HashSet::<BlockHash>::new(), Vec::new());
    let mut total_s = 0.0;
    for request in workload.foreground() {
        workload.path(request, E::PARTIAL, &mut path);
        let hit = path.iter().take_while(|hash| known.contains(*hash)).count() * BLOCK_TOKENS;
        // In a conversation its ids go on with what is generated, which the next turn finds too.
        let mut chain = ChainHasher::new(0);
        known.extend(workload.ids(request).iter().map(|id| chain.push_bytes(&id.to_le_bytes())));
        // One token at least is computed, to draw from.
        let cached = u32::try_from(hit).unwrap_or(u32::MAX).min(request.input_tokens - 1);
        total_s += engine.alone_s(request.input_tokens, cached, 0);
    }
    total_s / workload.foreground().len().max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulate::engine::plain::PlainEngine;
    use crate::simulate::workload::Draft;

    #[test]
    fn what_was_asked_for_before_is_cached_for_ever() {
        let mut workload = Workload::named("w");
        let draft = |input_tokens| Draft { input_tokens, output_tokens: 600, ..Draft::default() };
        workload.push(draft(1_000), [1, 2, 3]); // the third block is generated
        workload.push(draft(2_000), [9]);
        workload.push(draft(1_636), [1, 2, 3, 4]); // three blocks of it are there
        // 1,000 tokens a second: 1 s, 2 s, 0.1 s, whatever the cache of the engine itself holds.
        let mean_s = mean_s(&workload, &PlainEngine::new(1_000.0, 1));
        assert!((mean_s - 3.1 / 3.0).abs() < 1e-9, "{mean_s}");
    }
}
