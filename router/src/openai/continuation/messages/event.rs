//! Events of an answer in Anthropic's words, as far as they say what has been given.

use serde::Deserialize;
use serde_json::value::RawValue;

use super::super::event::{Piece, Said, ThoughtNames, is_nothing, is_the_engines, unquoted};
use super::super::given::Part;

/// A block of an answer: one thought, or one text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in super::super) enum Block {
    /// It begins, and it is this one.
    Begins(u64, Part),
    /// It is over.
    Ends,
}

/// The blocks of an answer.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(in super::super) struct Blocks {
    /// How many have begun.
    pub(in super::super) begun: u64,
    /// What the last of them is, if it is not over.
    pub(in super::super) open: Option<Part>,
}

impl Blocks {
    /// Takes note of what one does.
    pub(in super::super) fn note(&mut self, block: Block) {
        match block {
            Block::Begins(index, part) => (self.begun, self.open) = (index.saturating_add(1), Some(part)),
            Block::Ends => self.open = None,
        }
    }
}

#[derive(Deserialize)]
struct Wire<'a> {
    #[serde(rename = "type")]
    kind: &'a str,
    #[serde(default)]
    index: u64,
    #[serde(borrow)]
    delta: Option<Told<'a>>,
    #[serde(borrow)]
    content_block: Option<Told<'a>>,
    #[serde(borrow)]
    error: Option<&'a RawValue>,
}

/// What a block begins with, or a piece of it.
#[derive(Deserialize)]
struct Told<'a> {
    #[serde(rename = "type")]
    kind: Option<&'a str>,
    #[serde(borrow)]
    text: Option<&'a RawValue>,
    #[serde(borrow)]
    thinking: Option<&'a RawValue>,
    #[serde(borrow)]
    stop_reason: Option<&'a RawValue>,
}

/// Reads the data of an event, which stands in `line`; `None` if it says something that cannot be gone on with.
pub(in super::super) fn read<'a>(line: &'a [u8], data: &'a [u8]) -> Option<Said<'a>> {
    let wire: Wire<'a> = serde_json::from_slice(data).ok()?;
    let mut piece = Piece::nothing(line);
    match (wire.kind, wire.delta, wire.content_block) {
        ("ping", ..) => return Some(Said::Nothing),
        ("error", ..) => return wire.error.filter(|error| is_the_engines(error)).map(|_| Said::Error),
        ("message_stop", ..) => return Some(Said::Done),
        ("message_start", ..) => {}
        ("content_block_start", _, Some(block)) => {
            let part = match block.kind? {
                "text" => Part::Answer,
                "thinking" => Part::Thought,
                _ => return None,
            };
            piece.block = Some(Block::Begins(wire.index, part));
            piece.says(&block)?;
        }
        ("content_block_delta", Some(delta), _) => {
            let is_known = matches!(delta.kind?, "text_delta" | "thinking_delta" | "signature_delta");
            is_known.then_some(())?;
            piece.says(&delta)?;
        }
        ("content_block_stop", ..) => piece.block = Some(Block::Ends),
        ("message_delta", Some(delta), _) => {
            piece.is_last = delta.stop_reason.is_some_and(|reason| !is_nothing(reason));
        }
        _ => return None,
    }
    Some(Said::Piece(piece))
}

impl<'a> Piece<'a> {
    fn says(&mut self, said: &Told<'a>) -> Option<()> {
        if let Some(text) = said.text.filter(|text| !is_nothing(text)) {
            self.text = Some(unquoted(text)?);
        }
        if let Some(thought) = said.thinking.filter(|thought| !is_nothing(thought)) {
            let thought = unquoted(thought)?;
            // It is asked for in vLLM's words.
            let names = ThoughtNames { short: true, long: false };
            self.thought = (!thought.is_empty()).then_some((thought, names));
        }
        Some(())
    }
}
