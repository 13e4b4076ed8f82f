//! What of a response has been given: its name, and the items of its output.

use serde::Deserialize;
use serde_json::value::RawValue;

use super::super::event::{Piece, Said, ThoughtNames, is_nothing, unquoted};

/// A response so far: at most a thought that is over, and a message that is not.
#[derive(Clone, Default, Debug)]
pub(in super::super) struct Items {
    /// Its name and its time, as JSON.
    pub(in super::super) id: Option<Box<str>>,
    pub(in super::super) created_at: Option<Box<str>>,
    /// The number of its next event, if they have numbers.
    pub(in super::super) next_event: Option<u64>,
    /// The thought as an item, as JSON, once it is over.
    pub(in super::super) thought: Option<Box<str>>,
    /// The message, once it has begun.
    pub(in super::super) message: Option<Place>,
}

/// Where in a response a text stands.
#[derive(Clone, Debug)]
pub(in super::super) struct Place {
    /// Its item's name.
    pub(in super::super) item_id: Box<str>,
    /// And which of the items that is.
    pub(in super::super) output_index: u64,
}

#[derive(Deserialize)]
struct Wire<'a> {
    #[serde(rename = "type")]
    kind: &'a str,
    sequence_number: Option<u64>,
    #[serde(default)]
    output_index: u64,
    #[serde(default)]
    content_index: u64,
    #[serde(borrow)]
    delta: Option<&'a RawValue>,
    #[serde(borrow)]
    logprobs: Option<&'a RawValue>,
    #[serde(borrow)]
    item: Option<&'a RawValue>,
    #[serde(borrow)]
    response: Option<Response<'a>>,
    #[serde(borrow)]
    code: Option<&'a RawValue>,
    #[serde(borrow)]
    error: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Response<'a> {
    #[serde(borrow)]
    id: Option<&'a RawValue>,
    #[serde(borrow)]
    created_at: Option<&'a RawValue>,
    #[serde(borrow)]
    error: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Item<'a> {
    #[serde(rename = "type")]
    kind: &'a str,
    id: Option<Box<str>>,
}

impl Wire<'_> {
    /// Of an error: whether the request is to blame for it.
    fn is_the_clients(&self) -> bool {
        #[derive(Deserialize)]
        struct Wire<'a> {
            #[serde(borrow)]
            code: Option<&'a RawValue>,
        }
        let of_response = self.response.as_ref().and_then(|response| response.error);
        let code = self.code.or_else(|| {
            let error: Wire<'_> = serde_json::from_str(self.error.or(of_response)?.get()).ok()?;
            error.code
        });
        code.is_some_and(|code| {
            let code = code.get().trim_matches('"');
            code.starts_with("invalid") || matches!(code.parse(), Ok(400..500_u16))
        })
    }
}

impl Items {
    /// Takes in a line; `None` if it says something that cannot be gone on with.
    pub(in super::super) fn hear<'a>(&mut self, line: &'a [u8]) -> Option<Said<'a>> {
        // What the event is called, its data say as well.
        if line.starts_with(b":") || line.starts_with(b"event:") {
            return Some(Said::Nothing);
        }
        let wire: Wire<'a> = serde_json::from_slice(line.strip_prefix(b"data:")?).ok()?;
        if matches!(wire.kind, "error" | "response.failed") {
            return (!wire.is_the_clients()).then_some(Said::Error);
        }
        self.next_event = wire.sequence_number.map(|number| number.saturating_add(1)).or(self.next_event);
        let mut piece = Piece::nothing(line);
        let text = |delta: Option<&'a RawValue>| unquoted(delta?);
        // A message has one text.
        let is_plain = wire.content_index == 0 && wire.logprobs.is_none_or(is_nothing);
        match wire.kind {
            "response.created" | "response.in_progress" => {
                let response = wire.response?;
                self.id = response.id.map(|id| id.get().into());
                self.created_at = response.created_at.map(|time| time.get().into());
            }
            "response.output_item.added" => {
                let item: Item<'_> = serde_json::from_str(wire.item?.get()).ok()?;
                match item.kind {
                    "message" if self.message.is_none() => {
                        self.message = Some(Place { item_id: item.id?, output_index: wire.output_index });
                    }
                    "reasoning" if self.thought.is_none() && self.message.is_none() => {}
                    _ => return None,
                }
            }
            "response.content_part.added" if wire.content_index == 0 => {}
            "response.output_text.delta" if is_plain => piece.text = Some(text(wire.delta)?),
            "response.reasoning_text.delta" if is_plain && self.message.is_none() => {
                let thought = text(wire.delta)?;
                let names = ThoughtNames { short: true, long: false };
                piece.thought = (!thought.is_empty()).then_some((thought, names));
            }
            "response.reasoning_text.done" | "response.content_part.done" if self.message.is_none() => {}
            "response.output_item.done" if self.message.is_none() => {
                self.thought = Some(wire.item?.get().into());
            }
            "response.completed" | "response.incomplete" => return Some(Said::Done),
            // Behind a text that is over nobody knows what comes.
            _ => return None,
        }
        Some(Said::Piece(piece))
    }
}
