//! The rest of an answer, from another worker, made to follow on its beginning: one name, one opening, one usage.

use std::ops::Range;

use bytes::Bytes;
use serde_json::Value;

use super::event::{Piece, Said, read};
use super::given::Given;
use super::{Kind, request};

/// Changes events of the rest.
#[derive(Debug)]
pub struct Seam {
    kind: Kind,
    id: Option<Box<str>>,
    /// The client knows who speaks.
    has_begun: bool,
    /// Tokens that were given before, and are now part of the prompt.
    tokens: u64,
    /// White space that the client has, and that this worker may write again.
    space: Box<str>,
}

impl Seam {
    /// After what has been `given`, of which `rest` leaves some out.
    #[must_use]
    pub fn after(given: &Given, rest: &request::Rest<'_>) -> Self {
        Self {
            kind: given.kind(),
            id: given.id().map(Box::from),
            has_begun: given.has_begun(),
            tokens: given.pieces() as u64,
            space: rest.space.into(),
        }
    }

    /// Whole events, as they are to go to the client.
    pub fn pass(&mut self, events: &Bytes) -> Bytes {
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
    fn changed(&mut self, piece: &Piece<'_>) -> Option<Vec<(Range<usize>, String)>> {
        let mut changes = Vec::new();
        if let (Some(id), Some(first)) = (piece.id, &self.id) {
            changes.push((piece.place(id), first.to_string()));
        }
        if let Some(text) = piece.text.filter(|text| !text.is_empty()) {
            let known = self.known(text);
            if known == text.len() && !piece.is_last {
                return None;
            }
            let place = piece.place(text);
            changes.push((place.start..place.start + known, String::new()));
        } else if piece.has_role && self.has_begun && !piece.is_last {
            return None;
        }
        if let Some(usage) = piece.usage
            && let Some(whole) = self.usage(usage)
        {
            changes.push((piece.place(usage), whole));
        }
        Some(changes)
    }

    /// How much of a text the client has already.
    fn known(&mut self, text: &str) -> usize {
        if self.space.is_empty() {
            return 0;
        }
        let same = text.bytes().zip(self.space.bytes()).take_while(|(one, other)| one == other).count();
        // Both are ASCII as far as they are the same; half an escape is no character.
        let same = if text[..same].ends_with('\\') { same - 1 } else { same };
        self.space = if same == text.len() { self.space[same..].into() } else { Box::default() };
        same
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
