//! What requests in flight hold of a worker's KV cache together: a prefix that several of them have is there once.
//!
//! Exact for equal prompts, and within half of what two prompts share for others, since prompts are compared where their blocks
//! have doubled in number: a dozen places, however long they are. Knows no tree and no policies. Next: the [ledger](super).

use hashbrown::HashTable;
use roundhouse_types::BlockHash;
use smallvec::SmallVec;

use crate::request::RequestView;

/// A prompt's beginning, from where the one before ends.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Part {
    /// The chained hash of its last block, so that all before it is equal too where this is.
    end: BlockHash,
    tokens: usize,
}

/// A prompt as far as it may be held together with others, and how much of it is its own for certain.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct HeldPrompt {
    parts: SmallVec<[Part; 8]>,
    rest_tokens: usize,
}

impl HeldPrompt {
    /// Of a request.
    #[must_use]
    pub fn of(request: &RequestView<'_>) -> Self {
        let mut parts = SmallVec::new();
        let (mut blocks, mut covered) = (1, 0);
        while covered < request.prompt_tokens && !request.blocks.is_empty() {
            let count = request.blocks.len().min(blocks);
            let up_to = request.covered_tokens(count);
            parts.push(Part { end: request.blocks[count - 1], tokens: up_to.saturating_sub(covered) });
            covered = covered.max(up_to);
            if count == request.blocks.len() {
                break;
            }
            blocks *= 2;
        }
        Self { parts, rest_tokens: request.prompt_tokens.saturating_sub(covered) }
    }
}

/// All that is held at one worker.
#[derive(Debug, Default)]
pub(super) struct HeldTokens {
    parts: HashTable<Shared>,
    tokens: usize,
}

/// A part that some requests have.
#[derive(Debug)]
struct Shared {
    end: BlockHash,
    requests: u32,
    /// As many as the first of them said, which is what is taken off again: estimates of the same bytes differ with time.
    tokens: usize,
}

impl HeldTokens {
    pub(super) fn tokens(&self) -> usize {
        self.tokens
    }

    /// Of a prompt, what is held already: a prefix of others' that it has too.
    pub(super) fn shared(&self, prompt: &HeldPrompt) -> usize {
        let is_held = |part: &&Part| self.parts.find(part.end.0, |shared| shared.end == part.end).is_some();
        prompt.parts.iter().take_while(is_held).map(|part| part.tokens).sum()
    }

    pub(super) fn add(&mut self, prompt: &HeldPrompt) {
        self.tokens += prompt.rest_tokens;
        for part in &prompt.parts {
            if let Some(shared) = self.parts.find_mut(part.end.0, |shared| shared.end == part.end) {
                shared.requests += 1;
                continue;
            }
            let Part { end, tokens } = *part;
            self.parts.insert_unique(end.0, Shared { end, requests: 1, tokens }, |shared| shared.end.0);
            self.tokens += tokens;
        }
    }

    pub(super) fn remove(&mut self, prompt: &HeldPrompt) {
        self.tokens -= prompt.rest_tokens;
        for part in &prompt.parts {
            let Ok(mut entry) = self.parts.find_entry(part.end.0, |shared| shared.end == part.end) else {
                continue;
            };
            entry.get_mut().requests -= 1;
            if entry.get().requests == 0 {
                let (shared, _) = entry.remove();
                self.tokens -= shared.tokens;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BLOCK_TOKENS: usize = 100;

    /// A prompt of blocks that are known by their numbers, each number standing for all before it too, and some tokens more.
    fn held(blocks: &[u64], more_tokens: usize) -> HeldPrompt {
        let mut path = Vec::new();
        let mut chain = 17_u64;
        for block in blocks {
            chain = (chain ^ block).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
            path.push(BlockHash(chain));
        }
        let prompt_tokens = blocks.len() * BLOCK_TOKENS + more_tokens;
        HeldPrompt::of(&RequestView {
            blocks: &path,
            block_tokens: Some(BLOCK_TOKENS),
            prompt_tokens,
            ..RequestView::default()
        })
    }

    fn together(prompts: &[HeldPrompt]) -> usize {
        let mut all = HeldTokens::default();
        prompts.iter().for_each(|prompt| all.add(prompt));
        all.tokens()
    }

    #[test]
    fn equal_prompts_are_there_once_but_for_what_fills_no_block() {
        let prompt = held(&[1, 2, 3, 4, 5, 6, 7], 30);
        assert_eq!(together(std::slice::from_ref(&prompt)), 730);
        assert_eq!(together(&[prompt.clone(), prompt.clone(), prompt.clone()]), 790);
        let mut one = HeldTokens::default();
        one.add(&prompt);
        assert_eq!(
            (one.shared(&prompt), one.shared(&held(&[1, 2, 9, 9], 0)), one.shared(&held(&[3], 0))),
            (700, 200, 0)
        );
    }

    #[test]
    fn a_common_beginning_counts_once_up_to_where_prompts_are_compared() {
        let (one, two) = (held(&[1, 2, 3, 4, 5, 6], 0), held(&[1, 2, 3, 4, 5, 9, 9], 0));
        // Of five blocks they share the first four are seen to be shared.
        assert_eq!(together(&[one, two]), 600 + 700 - 400);
        assert_eq!(together(&[held(&[1, 2], 0), held(&[2, 1], 0)]), 400);
        assert_eq!(together(&[held(&[], 50), held(&[], 50)]), 100, "what has no block is nobody else's");
    }

    #[test]
    fn equal_blocks_of_two_estimates_leave_nothing_behind() {
        let path = [BlockHash(1), BlockHash(2), BlockHash(3)];
        let estimated = |prompt_tokens| {
            HeldPrompt::of(&RequestView {
                blocks: &path,
                prompt_bytes: 200,
                prompt_tokens,
                ..RequestView::default()
            })
        };
        // Bytes a token are learned, so that the same bytes are so many tokens now, and others later.
        for (first, second) in [(50, 67), (67, 50)] {
            let mut all = HeldTokens::default();
            all.add(&estimated(first));
            all.add(&estimated(second));
            all.remove(&estimated(first));
            all.remove(&estimated(second));
            assert_eq!(all.tokens(), 0);
        }
    }

    #[test]
    fn what_others_still_hold_stays_when_the_first_has_gone() {
        let (first, second) = (held(&[1, 2, 3, 4], 10), held(&[1, 2, 3, 4, 5], 10));
        let mut all = HeldTokens::default();
        all.add(&first);
        all.add(&second);
        all.remove(&first);
        assert_eq!(all.tokens(), 510);
        all.remove(&second);
        assert_eq!((all.tokens(), all.parts.len()), (0, 0));
    }

    proptest! {
        #[test]
        fn never_less_than_what_is_there_nor_more_than_all_prompts(
            prompts in prop::collection::vec(prop::collection::vec(0_u64..3, 0..12), 1..8)
        ) {
            let mut distinct: Vec<&[u64]> =
                prompts.iter().flat_map(|prompt| (1..=prompt.len()).map(|end| &prompt[..end])).collect();
            distinct.sort_unstable();
            distinct.dedup();
            let sum: usize = prompts.iter().map(Vec::len).sum();
            let tokens = together(&prompts.iter().map(|prompt| held(prompt, 0)).collect::<Vec<_>>());
            prop_assert!((distinct.len() * BLOCK_TOKENS..=sum * BLOCK_TOKENS).contains(&tokens));
        }

        #[test]
        fn all_that_is_added_can_be_removed_in_any_order(
            prompts in prop::collection::vec(prop::collection::vec(0_u64..3, 0..12), 1..8).prop_shuffle()
        ) {
            let mut all = HeldTokens::default();
            let mut held: Vec<_> = prompts.iter().map(|prompt| held(prompt, prompt.len())).collect();
            held.iter().for_each(|prompt| all.add(prompt));
            held.reverse();
            held.iter().for_each(|prompt| all.remove(prompt));
            prop_assert_eq!((all.tokens(), all.parts.len()), (0, 0));
        }
    }
}
