//! The rest of an answer, from another worker, made to follow on its beginning: one name, one opening, one usage.

use std::ops::Range;

use bytes::Bytes;
use serde_json::Value;

use super::Kind;
use super::event::{Piece, Said, read};
use super::given::Given;

/// Changes events of the rest.
#[derive(Debug)]
pub struct Seam {
    kind: Kind,
    id: Option<Box<str>>,
    /// The client knows who speaks.
    has_begun: bool,
    /// Tokens that were given before, and are now part of the prompt.
    tokens: u64,
}

impl Seam {
    /// After what has been `given`.
    #[must_use]
    pub fn after(given: &Given) -> Self {
        Self {
            kind: given.kind(),
            id: given.id().map(Box::from),
            has_begun: given.has_begun(),
            tokens: given.pieces() as u64,
        }
    }

    /// Whole events, as they are to go to the client.
    pub fn pass(&self, events: &Bytes) -> Bytes {
        let mut out = Vec::with_capacity(events.len());
        let mut leaves_out = false;
        for line in events.split_inclusive(|byte| *byte == b'\n') {
            let text = line.trim_ascii_end();
            if text.is_empty() {
                // The empty line after an event that is left out goes with it.
                if !std::mem::take(&mut leaves_out) {
                    out.extend_from_slice(line);
                }
                continue;
            }
            match read(text, self.kind) {
                Some(Said::Piece(piece)) => match self.changed(&piece) {
                    Some(changes) => {
                        splice(text, changes, &mut out);
                        out.extend_from_slice(&line[text.len()..]);
                    }
                    None => leaves_out = true,
                },
                _ => out.extend_from_slice(line),
            }
        }
        out.into()
    }

    /// What of an event is to be another; `None` if the client has it already.
    fn changed(&self, piece: &Piece<'_>) -> Option<Vec<(Range<usize>, String)>> {
        let mut changes = Vec::new();
        if let (Some(id), Some(first)) = (piece.id, &self.id) {
            changes.push((piece.place(id), first.to_string()));
        }
        let says_nothing = piece.text.is_none_or(str::is_empty) && !piece.is_last;
        if says_nothing && piece.has_role && self.has_begun {
            return None;
        }
        if let Some(usage) = piece.usage
            && let Some(whole) = self.usage(usage)
        {
            changes.push((piece.place(usage), whole));
        }
        Some(changes)
    }

    /// The usage of the whole answer.
    fn usage(&self, rest: &str) -> Option<String> {
        let mut usage: Value = serde_json::from_str(rest).ok()?;
        let prompt_tokens = usage["prompt_tokens"].as_u64()?.saturating_sub(self.tokens);
        usage["prompt_tokens"] = prompt_tokens.into();
        if let Some(generated) = usage["completion_tokens"].as_u64() {
            usage["completion_tokens"] = (generated + self.tokens).into();
        }
        if let Some(cached) = usage["prompt_tokens_details"]["cached_tokens"].as_u64() {
            usage["prompt_tokens_details"]["cached_tokens"] = cached.min(prompt_tokens).into();
        }
        Some(usage.to_string())
    }
}

fn splice(line: &[u8], mut changes: Vec<(Range<usize>, String)>, out: &mut Vec<u8>) {
    changes.sort_by_key(|(place, _)| place.start);
    let mut at = 0;
    for (place, new) in changes {
        out.extend_from_slice(&line[at..place.start]);
        out.extend_from_slice(new.as_bytes());
        at = place.end;
    }
    out.extend_from_slice(&line[at..]);
}
