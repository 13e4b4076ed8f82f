//! Prompts made of named blocks: equal names give equal tokens, whoever asks and in whatever order.
//!
//! A trace says which blocks of its prompts are equal, and not what is in them. The words of a block follow from its name
//! and the seed alone, so that a prompt is kept as a list of names and written when it is sent: all prompts of a Mooncake
//! trace together are 700 MB of text. Knows nothing of traces.

use std::fmt;

use rand::rngs::Xoshiro256PlusPlus;
use rand::{RngExt, SeedableRng};

use super::prose::Prose;

/// A prompt by the names of its blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recipe {
    /// One for each begun block, in order.
    pub blocks: Vec<u64>,
    /// Length of the prompt; the last block is cut to it.
    pub tokens: u64,
}

/// Writes prompts from recipes.
#[derive(Clone, PartialEq)]
pub struct BlockWriter {
    /// Words that are one token each, at the beginning of a text as well as after a space.
    words: Vec<&'static str>,
    block_tokens: u64,
    seed: u64,
}

impl fmt::Debug for BlockWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockWriter")
            .field("words", &self.words.len())
            .field("block_tokens", &self.block_tokens)
            .field("seed", &self.seed)
            .finish()
    }
}

impl BlockWriter {
    /// Blocks of this length.
    ///
    /// # Errors
    /// A vocabulary that has not two words of one token each: lengths could not be honoured.
    pub fn new(prose: &Prose<'_>, block_tokens: u64, seed: u64) -> anyhow::Result<Self> {
        let words = prose.words_of_one_token();
        anyhow::ensure!(
            words.len() >= 2,
            "--tokenizer: its vocabulary has hardly any English word as one token, so that prompts of given lengths \
             cannot be written with it"
        );
        Ok(Self { words, block_tokens, seed })
    }

    /// Length of a block.
    pub fn block_tokens(&self) -> u64 {
        self.block_tokens
    }

    /// The prompt of a recipe.
    pub fn text(&self, recipe: &Recipe) -> String {
        let mut text = String::with_capacity(recipe.tokens as usize * 6);
        let mut left_tokens = recipe.tokens;
        for name in &recipe.blocks {
            // The golden ratio's bits spread neighbouring names over all seeds.
            let seed = self.seed ^ name.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
            for _ in 0..left_tokens.min(self.block_tokens) {
                if !text.is_empty() {
                    text.push(' ');
                }
                text.push_str(self.words[rng.random_range(0..self.words.len())]);
            }
            left_tokens = left_tokens.saturating_sub(self.block_tokens);
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokens::TokenCounter;

    fn writer(seed: u64) -> BlockWriter {
        let counter = TokenCounter::Approximate;
        BlockWriter::new(&Prose::new(&counter).unwrap(), 4, seed).unwrap()
    }

    fn words(writer: &BlockWriter, blocks: &[u64], tokens: u64) -> Vec<String> {
        let text = writer.text(&Recipe { blocks: blocks.to_vec(), tokens });
        text.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn equal_names_give_equal_blocks_and_other_names_others() {
        let writer = writer(1);
        let one = words(&writer, &[7, 8, 9], 12);
        let other = words(&writer, &[7, 10, 9], 12);
        assert_eq!((one.len(), other.len()), (12, 12));
        assert_eq!((&one[..4], &one[8..]), (&other[..4], &other[8..]));
        assert_ne!(one[4..8], other[4..8]);
        assert_ne!(words(&super::tests::writer(2), &[7, 8, 9], 12), one, "another seed says other words");
    }

    #[test]
    fn a_begun_block_is_the_beginning_of_the_whole_one() {
        let writer = writer(1);
        let whole = words(&writer, &[7, 8], 8);
        assert_eq!(words(&writer, &[7, 8], 6), whole[..6]);
        assert_eq!(words(&writer, &[7], 1), whole[..1]);
    }
}
