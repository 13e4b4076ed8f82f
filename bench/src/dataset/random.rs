//! Unrelated prompts: lengths uniform in [len × ratio, len], words at random.

use rand::RngExt;
use rand::rngs::Xoshiro256PlusPlus;
use roundhouse_text::TokenizerError;

use super::prose::Prose;
use super::{Conversation, Dataset};
use crate::args::DatasetArgs;

/// `count` prompts.
///
/// # Errors
/// A vocabulary that cannot spell the words.
pub fn make(
    args: &DatasetArgs,
    count: usize,
    prose: &Prose<'_>,
    rng: &mut Xoshiro256PlusPlus,
) -> Result<Dataset, TokenizerError> {
    let conversations = (0..count)
        .map(|_| {
            let input_tokens = length(args.random_input_len, args.random_range_ratio, rng);
            let output_tokens = length(args.random_output_len, args.random_range_ratio, rng);
            Ok(Conversation::single(prose.passage(input_tokens, rng)?, output_tokens))
        })
        .collect::<Result<_, TokenizerError>>()?;
    Ok(Dataset::of(conversations))
}

/// Uniform in [longest × ratio, longest], at least 1.
fn length(longest: u64, ratio: f64, rng: &mut Xoshiro256PlusPlus) -> u64 {
    let shortest = ((longest as f64 * ratio) as u64).max(1);
    rng.random_range(shortest..=longest)
}
