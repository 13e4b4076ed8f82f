//! Groups of prompts that share a prefix, as SGLang's `generated-shared-prefix`: prefix, empty line, question.

use anyhow::bail;
use rand::rngs::Xoshiro256PlusPlus;
use rand::seq::SliceRandom;
use roundhouse_text::TokenizerError;

use super::prose::Prose;
use super::{Content, Conversation, Dataset, Turn};
use crate::args::DatasetArgs;

/// All groups, shuffled unless `--gsp-ordered`, cut to `wanted` conversations.
///
/// # Errors
/// `wanted` beyond groups × prompts a group, or a vocabulary that cannot spell the words.
pub fn make(
    args: &DatasetArgs,
    wanted: Option<usize>,
    prose: &Prose<'_>,
    rng: &mut Xoshiro256PlusPlus,
) -> anyhow::Result<Dataset> {
    let total = args.gsp_num_groups * args.gsp_prompts_per_group;
    if wanted.is_some_and(|wanted| wanted > total) {
        bail!(
            "--num-prompts is more than the {total} of --gsp-num-groups {} × --gsp-prompts-per-group {}; leave it out \
             for all, or make the groups larger",
            args.gsp_num_groups,
            args.gsp_prompts_per_group
        );
    }
    let mut conversations = Vec::with_capacity(total);
    for _ in 0..args.gsp_num_groups {
        conversations.extend(group(args, prose, rng)?);
    }
    if !args.gsp_ordered {
        conversations.shuffle(rng);
    }
    conversations.truncate(wanted.unwrap_or(total));
    Ok(Dataset::of(conversations))
}

fn group(
    args: &DatasetArgs,
    prose: &Prose<'_>,
    rng: &mut Xoshiro256PlusPlus,
) -> Result<Vec<Conversation>, TokenizerError> {
    let prefix = prose.passage(args.gsp_system_prompt_len, rng)?;
    let mut seam_tokens = None; // counted once a group: the prefix is long and the seam the same
    let mut conversations = Vec::with_capacity(args.gsp_prompts_per_group);
    for _ in 0..args.gsp_prompts_per_group {
        let question = prose.passage(args.gsp_question_len, rng)?;
        let seam_tokens = match seam_tokens {
            Some(tokens) => tokens,
            None => *seam_tokens.insert(prose.seam(&prefix, &question)?),
        };
        let mut conversation =
            Conversation::single(prose.join(&prefix, &question, seam_tokens), args.gsp_output_len);
        for _ in 1..args.gsp_num_turns {
            let content = Content::Text(prose.passage(args.gsp_question_len, rng)?);
            conversation.turns.push(Turn { content, output_tokens: Some(args.gsp_output_len) });
        }
        conversations.push(conversation);
    }
    Ok(conversations)
}
