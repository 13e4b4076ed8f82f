//! Conversations of several turns; the history grows with the replies that really came.

use rand::rngs::Xoshiro256PlusPlus;
use roundhouse_text::TokenizerError;

use super::prose::Prose;
use super::{Content, Conversation, Dataset, Turn};
use crate::args::DatasetArgs;

/// `count` conversations.
///
/// # Errors
/// A vocabulary that cannot spell the words.
pub fn make(
    args: &DatasetArgs,
    count: usize,
    prose: &Prose<'_>,
    rng: &mut Xoshiro256PlusPlus,
) -> Result<Dataset, TokenizerError> {
    let conversations = (0..count).map(|_| conversation(args, prose, rng)).collect::<Result<_, _>>()?;
    Ok(Dataset::of(conversations))
}

fn conversation(
    args: &DatasetArgs,
    prose: &Prose<'_>,
    rng: &mut Xoshiro256PlusPlus,
) -> Result<Conversation, TokenizerError> {
    let has_system = args.multi_turn_system_len > 0;
    let system = has_system.then(|| prose.passage(args.multi_turn_system_len, rng)).transpose()?;
    let turns = (0..args.multi_turn_num_turns)
        .map(|_| {
            let content = Content::Text(prose.passage(args.multi_turn_question_len, rng)?);
            Ok(Turn { content, output_tokens: Some(args.multi_turn_output_len) })
        })
        .collect::<Result<_, TokenizerError>>()?;
    Ok(Conversation { system, turns })
}
