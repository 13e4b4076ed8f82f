//! A trace in the format of Mooncake's (FAST'25): a request a line, `{"timestamp": ms, "input_length": tokens,
//! "output_length": tokens, "hash_ids": […]}`, each id naming the block of 512 tokens that begins there, the last one
//! cut short.

use std::time::Duration;

use anyhow::{Context, ensure};
use serde::Deserialize;

use super::blocks::{BlockWriter, Recipe};
use super::{Content, Conversation, Dataset, Turn, read_file};
use crate::args::DatasetArgs;
use crate::args::values::time;

#[derive(Deserialize)]
struct Line {
    timestamp: f64,
    input_length: u64,
    output_length: u64,
    hash_ids: Vec<u64>,
}

/// The first `wanted` requests that are short enough, or all.
///
/// # Errors
/// A file that cannot be read, or a line that is no such request; the message names the line.
pub fn read(args: &DatasetArgs, wanted: Option<usize>, writer: BlockWriter) -> anyhow::Result<Dataset> {
    let file = read_file(args.dataset_path.as_deref())?;
    let lines = file.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let requests = lines.map(|(index, line)| {
        request(line, writer.block_tokens()).with_context(|| format!("line {} of the trace", index + 1))
    });
    let mut replay = Replay::new(args.trace_context_len, wanted);
    for request in requests {
        if !replay.wants_more() {
            break;
        }
        replay.add(request?);
    }
    replay.finish(writer)
}

fn request(line: &str, block_tokens: u64) -> anyhow::Result<Recorded> {
    let line: Line = serde_json::from_str(line)
        .context("expected timestamp (ms), input_length, output_length and hash_ids")?;
    let blocks = line.input_length.div_ceil(block_tokens);
    ensure!(
        line.hash_ids.len() as u64 == blocks,
        "{} tokens are {blocks} blocks of {block_tokens} tokens, but there are {} hash_ids (--trace-block-len has another \
         length)",
        line.input_length,
        line.hash_ids.len()
    );
    ensure!(line.input_length > 0, "input_length must be at least 1");
    let longest = u64::from(u32::MAX);
    ensure!(
        line.input_length <= longest && line.output_length <= longest,
        "input_length and output_length must be at most {longest}"
    );
    let at = time(line.timestamp / 1e3).context("timestamp must be milliseconds from 0 to 1e12")?;
    Ok(Recorded {
        at,
        recipe: Recipe { blocks: line.hash_ids, tokens: line.input_length },
        output_tokens: line.output_length,
    })
}

/// One request of a trace.
pub(super) struct Recorded {
    /// When it came, from any zero.
    pub(super) at: Duration,
    /// Its prompt.
    pub(super) recipe: Recipe,
    /// Tokens that were generated.
    pub(super) output_tokens: u64,
}

/// Makes a dataset of recorded requests.
pub(super) struct Replay {
    requests: Vec<Recorded>,
    longest_tokens: u64,
    wanted: Option<usize>,
    dropped: usize,
}

impl Replay {
    /// Of the first `wanted` requests that are, prompt and output together, not longer than `longest_tokens`.
    pub(super) fn new(longest_tokens: Option<u64>, wanted: Option<usize>) -> Self {
        let longest_tokens = longest_tokens.unwrap_or(u64::MAX);
        Self { requests: Vec::new(), longest_tokens, wanted, dropped: 0 }
    }

    /// Whether there is use for another request.
    pub(super) fn wants_more(&self) -> bool {
        self.wanted.is_none_or(|wanted| self.requests.len() < wanted)
    }

    /// Takes a request.
    pub(super) fn add(&mut self, request: Recorded) {
        if request.recipe.tokens + request.output_tokens > self.longest_tokens {
            self.dropped += 1;
        } else {
            self.requests.push(request);
        }
    }

    /// In the order of their times, which begin with the first.
    pub(super) fn finish(mut self, writer: BlockWriter) -> anyhow::Result<Dataset> {
        let found = self.requests.len();
        let mut notes = Vec::new();
        if self.dropped > 0 {
            notes.push(format!(
                "{} requests were dropped by --trace-context-len {}",
                self.dropped, self.longest_tokens
            ));
        }
        if let Some(wanted) = self.wanted.filter(|wanted| found < *wanted) {
            notes.push(format!("the trace has {found} usable requests, {wanted} were asked for"));
        }
        self.requests.sort_by_key(|request| request.at); // stable: equal times stay in the file's order
        let first = self.requests.first().map_or(Duration::ZERO, |request| request.at);
        let arrivals = self.requests.iter().map(|request| request.at - first).collect();
        let conversations = self.requests.into_iter().map(|request| {
            let output_tokens = Some(request.output_tokens.max(1));
            Conversation {
                system: None,
                turns: vec![Turn { content: Content::Made(request.recipe), output_tokens }],
            }
        });
        let conversations = conversations.collect();
        Ok(Dataset { conversations, notes, arrivals, writer: Some(writer) })
    }
}
