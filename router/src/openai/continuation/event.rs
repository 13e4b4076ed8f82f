//! One event of a stream, as far as it matters for going on: where in its line what stands.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::Deserialize;
use serde_json::value::RawValue;

use super::Kind;
use super::messages::event::{self as messages, Block};

type Object<'a> = BTreeMap<&'a str, &'a RawValue>;

/// What an event says.
#[derive(Debug)]
pub(super) enum Said<'a> {
    /// A piece of the answer, or nothing yet.
    Piece(Piece<'a>),
    /// That the engine has failed, and not that the request was wrong.
    Error,
    /// That it is over.
    Done,
    /// A comment.
    Nothing,
}

/// An event that goes on with the answer.
#[derive(Debug)]
pub(super) struct Piece<'a> {
    /// The line.
    line: &'a [u8],
    /// Its text, between the quotes.
    pub(super) text: Option<&'a str>,
    /// What it says of a thought, the same, and under which names.
    pub(super) thought: Option<(&'a str, ThoughtNames)>,
    /// It says who speaks, as the first one of a chat does.
    pub(super) has_role: bool,
    /// It is the last one with text.
    pub(super) is_last: bool,
    /// The answer's name, with its quotes.
    pub(super) id: Option<&'a str>,
    /// The usage so far, or of all.
    pub(super) usage: Option<&'a str>,
    /// In Anthropic's words: what becomes of a block.
    pub(super) block: Option<Block>,
}

/// The names that a piece of a thought has, side by side.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct ThoughtNames {
    /// `reasoning`, as vLLM says.
    pub(super) short: bool,
    /// `reasoning_content`, as vLLM said before, and SGLang does.
    pub(super) long: bool,
}

impl<'a> Piece<'a> {
    /// Of `line`, in which nothing is said yet.
    pub(super) fn nothing(line: &'a [u8]) -> Self {
        Self {
            line,
            text: None,
            thought: None,
            has_role: false,
            is_last: false,
            id: None,
            usage: None,
            block: None,
        }
    }

    /// Where in the line a part of it stands.
    pub(super) fn place(&self, part: &str) -> Range<usize> {
        let begins = part.as_ptr() as usize - self.line.as_ptr() as usize;
        begins..begins + part.len()
    }
}

#[derive(Deserialize)]
struct Wire<'a> {
    #[serde(borrow)]
    id: Option<&'a RawValue>,
    #[serde(borrow)]
    choices: Option<Vec<Object<'a>>>,
    #[serde(borrow)]
    usage: Option<&'a RawValue>,
    #[serde(borrow)]
    error: Option<&'a RawValue>,
}

/// Reads a line of a stream; `None` if it says something that cannot be gone on with.
pub(super) fn read(line: &[u8], kind: Kind) -> Option<Said<'_>> {
    if line.is_empty() || line.starts_with(b":") {
        return Some(Said::Nothing);
    }
    // What the event is called, its data say as well.
    if kind == Kind::Messages && line.starts_with(b"event:") {
        return Some(Said::Nothing);
    }
    let data = line.strip_prefix(b"data:")?;
    if kind == Kind::Messages {
        return messages::read(line, data);
    }
    if data.trim_ascii() == b"[DONE]" {
        return Some(Said::Done);
    }
    let Wire { id, choices, usage, error } = serde_json::from_slice(data).ok()?;
    let Some(choices) = choices else {
        return error.filter(|error| is_the_engines(error)).map(|_| Said::Error);
    };
    let usage = usage.filter(|usage| !is_nothing(usage)).map(RawValue::get);
    let mut piece = Piece { id: id.map(RawValue::get), usage, ..Piece::nothing(line) };
    match &choices[..] {
        [] => {}
        [choice] => piece.choice(choice, kind)?,
        _ => return None,
    }
    Some(Said::Piece(piece))
}

impl<'a> Piece<'a> {
    fn choice(&mut self, choice: &Object<'a>, kind: Kind) -> Option<()> {
        for (name, value) in choice {
            match (*name, kind) {
                ("index", _) if value.get() == "0" => {}
                ("text", Kind::Completions) => self.text(value)?,
                ("delta", Kind::Chat) => self.delta(value)?,
                ("finish_reason" | "stop_reason" | "matched_stop", _) => {
                    // Some say an empty one in every event.
                    self.is_last |= *name == "finish_reason" && !is_nothing(value) && value.get() != "\"\"";
                }
                _ if is_nothing(value) => {}
                _ => return None,
            }
        }
        Some(())
    }

    fn delta(&mut self, delta: &'a RawValue) -> Option<()> {
        for (name, value) in serde_json::from_str::<Object<'a>>(delta.get()).ok()? {
            match name {
                "role" if value.get() == "\"assistant\"" => self.has_role = true,
                "content" => self.text(value)?,
                "reasoning" => self.thought(value, ThoughtNames { short: true, long: false })?,
                "reasoning_content" => self.thought(value, ThoughtNames { short: false, long: true })?,
                _ if is_nothing(value) => {}
                _ => return None,
            }
        }
        Some(())
    }

    fn text(&mut self, value: &'a RawValue) -> Option<()> {
        if !is_nothing(value) {
            self.text = Some(unquoted(value)?);
        }
        Some(())
    }

    /// Under two names it is to be the same.
    fn thought(&mut self, value: &'a RawValue, name: ThoughtNames) -> Option<()> {
        if is_nothing(value) || value.get() == "\"\"" {
            return Some(());
        }
        let thought = unquoted(value)?;
        let names = match self.thought {
            None => name,
            Some((same, _)) if same == thought => ThoughtNames { short: true, long: true },
            Some(_) => return None,
        };
        self.thought = Some((thought, names));
        Some(())
    }
}

/// What stands between a text's quotes.
pub(super) fn unquoted(value: &RawValue) -> Option<&str> {
    value.get().strip_prefix('"')?.strip_suffix('"')
}

/// Whether an error is not the request's own.
pub(super) fn is_the_engines(error: &RawValue) -> bool {
    #[derive(Deserialize)]
    struct Wire<'a> {
        #[serde(borrow)]
        code: Option<&'a RawValue>,
        #[serde(rename = "type", borrow)]
        kind: Option<&'a RawValue>,
    }
    let Ok(Wire { code, kind }) = serde_json::from_str(error.get()) else { return !is_nothing(error) };
    let is_clients = code.is_some_and(|code| matches!(code.get().parse(), Ok(400..500_u16)))
        || kind
            .is_some_and(|kind| ["\"invalid_request_error\"", "\"BadRequestError\""].contains(&kind.get()));
    !is_clients
}

/// Whether a member might as well not be there.
pub(super) fn is_nothing(value: &RawValue) -> bool {
    matches!(value.get(), "null" | "[]" | "{}")
}
