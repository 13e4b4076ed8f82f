//! The first exchange of each conversation of a ShareGPT file: a JSON array of
//! `{"id": …, "conversations": [{"from": …, "value": …}, …]}`.
//!
//! The recorded answer only gives the output length.

use std::borrow::Cow;

use anyhow::Context;
use rand::rngs::Xoshiro256PlusPlus;
use rand::seq::SliceRandom;
use serde::Deserialize;

use super::{Conversation, Dataset, Passage, read_file};
use crate::args::DatasetArgs;
use crate::tokens::TokenCounter;

#[derive(Deserialize)]
struct Entry<'a> {
    #[serde(borrow, default, alias = "conversation")]
    conversations: Vec<Utterance<'a>>,
}

#[derive(Deserialize)]
struct Utterance<'a> {
    #[serde(borrow)]
    value: Cow<'a, str>,
}

/// Shuffles the file and takes the first `count` exchanges that pass the bounds.
///
/// # Errors
/// A file that cannot be read or is no such array.
pub fn read(
    args: &DatasetArgs,
    count: usize,
    counter: &TokenCounter,
    rng: &mut Xoshiro256PlusPlus,
) -> anyhow::Result<Dataset> {
    let file = read_file(args.dataset_path.as_deref())?;
    let entries: Vec<Entry<'_>> = serde_json::from_str(&file)
        .context("the sharegpt dataset must be a JSON array of {\"conversations\": [{\"value\": …}, …]}")?;
    let mut exchanges: Vec<_> = entries
        .iter()
        .filter_map(|entry| match entry.conversations.as_slice() {
            [prompt, answer, ..] => Some((prompt.value.as_ref(), answer.value.as_ref())),
            _ => None,
        })
        .collect();
    exchanges.shuffle(rng);
    let bounds = Bounds::of(args);
    let mut conversations = Vec::new();
    for (prompt, answer) in exchanges {
        if conversations.len() == count {
            break;
        }
        let tokens = counter.count(prompt)?;
        let output_tokens = args.sharegpt_output_len.map_or_else(|| counter.count(answer), Ok)?;
        if bounds.allow(tokens, output_tokens) {
            let passage = Passage { text: prompt.to_owned(), tokens };
            conversations.push(Conversation::single(passage, output_tokens));
        }
    }
    let found = conversations.len();
    let notes =
        (found < count).then(|| format!("the file has {found} usable conversations, {count} were asked for"));
    Ok(Dataset { notes: notes.into_iter().collect(), ..Dataset::of(conversations) })
}

/// Which exchanges are kept, in tokens.
struct Bounds {
    shortest: u64,
    shortest_output: u64,
    longest_prompt: u64,
    longest_together: u64,
}

impl Bounds {
    fn of(args: &DatasetArgs) -> Self {
        let mut bounds = match args.sharegpt_prune {
            true => {
                // An output length that was asked for is not an answer that is too short.
                let shortest_output = if args.sharegpt_output_len.is_some() { 0 } else { 4 };
                Self { shortest: 4, shortest_output, longest_prompt: 1024, longest_together: 2048 }
            }
            false => {
                Self { shortest: 2, shortest_output: 2, longest_prompt: u64::MAX, longest_together: u64::MAX }
            }
        };
        if let Some(context) = args.sharegpt_context_len {
            bounds.longest_together = bounds.longest_together.min(context);
        }
        bounds
    }

    fn allow(&self, prompt: u64, output: u64) -> bool {
        prompt >= self.shortest
            && output >= self.shortest_output
            && prompt <= self.longest_prompt
            && prompt + output <= self.longest_together
    }
}
