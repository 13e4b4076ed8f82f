//! Where in a request body what stands: the containers that are walked through, the keys that are known in each, and
//! what is done with a value. All that the router knows of OpenAI's request format, and Anthropic's, is in this file.

use super::fields::{Apart, Field, unescaped};
use super::json::Kind;

/// A container that is walked through. The last three bits of its number are its depth.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Place {
    Document = 0,
    Body = 1,
    Messages = 2,
    Message = 3,
    Parts = 4,
    Part = 5,
    /// The instructions, as a list of parts.
    System = 8 | 2,
    SystemPart = 8 | 3,
}

/// A key that is looked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Key {
    Field(Field),
    Stream,
    Tools,
    /// Its value is the instructions: Anthropic's `system`, `instructions` of OpenAI's responses.
    System,
    Messages,
    /// Its value is text of the prompt, whatever it is: in the body `prompt` and its like, in a message `role` and
    /// `tool_calls`.
    Said,
    Content,
    Text,
    Other,
}

/// What is done with a value.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Use {
    /// It is only checked.
    Skip,
    /// What it holds is looked at.
    Enter(Place),
    /// Kept, if it is a string.
    Field(Field),
    /// It says whether the answer is to be a stream.
    Stream,
    /// Hashed as it stands, a string without its quotes.
    Text,
    /// A list of texts, hashed as it stands, or of token ids.
    List,
    /// Hashed as it stands, as tools.
    Tools,
    /// Hashed as instructions: a string without its quotes, of a list the texts in it.
    System,
    /// The same, of one text in that list.
    SystemText,
    /// Hashed by digest, unless a text is found in it.
    Part,
}

impl Place {
    pub(super) fn depth(self) -> usize {
        self as usize & 7
    }

    /// The container that this one is in.
    pub(super) fn outside(self) -> Self {
        match self {
            Self::Document | Self::Body => Self::Document,
            Self::Messages | Self::System => Self::Body,
            Self::Message => Self::Messages,
            Self::SystemPart => Self::System,
            Self::Parts => Self::Message,
            Self::Part => Self::Parts,
        }
    }

    /// What a key means here. `raw` is as it stands between its quotes; it is asked for only where there are keys.
    pub(super) fn key<'a>(self, raw: impl FnOnce() -> &'a [u8]) -> Key {
        if matches!(self, Self::Document | Self::Messages | Self::Parts | Self::System) {
            return Key::Other;
        }
        let raw = raw();
        match self.known_key(raw) {
            Key::Other if raw.contains(&b'\\') => {
                unescaped(raw).map_or(Key::Other, |key| self.known_key(key.as_bytes()))
            }
            key => key,
        }
    }

    fn known_key(self, key: &[u8]) -> Key {
        match (self, key) {
            (Self::Message, b"role" | b"tool_calls") => Key::Said,
            (Self::Message, b"content") => Key::Content,
            (Self::Part | Self::SystemPart, b"text") => Key::Text,
            (Self::Body, b"messages") => Key::Messages,
            (Self::Body, b"model") => Key::Field(Field::Model),
            (Self::Body, b"user") => Key::Field(Field::User),
            (Self::Body, b"cache_salt") => Key::Field(Field::Apart(Apart::CacheSalt)),
            (Self::Body, b"lora_path") => Key::Field(Field::Apart(Apart::LoraPath)),
            (Self::Body, b"extra_key") => Key::Field(Field::Apart(Apart::ExtraKey)),
            (Self::Body, b"stream") => Key::Stream,
            (Self::Body, b"tools") => Key::Tools,
            (Self::Body, b"system" | b"instructions") => Key::System,
            (Self::Body, b"prompt" | b"input" | b"text" | b"input_ids") => Key::Said,
            _ => Key::Other,
        }
    }

    /// What is done with a value of `kind` under `key`; whether it makes sense there is for the engine to say.
    pub(super) fn value(self, key: Key, kind: Kind) -> Use {
        match (self, key, kind) {
            (Self::Document, _, Kind::Object) => Use::Enter(Self::Body),
            (Self::Body, Key::Field(field), _) => Use::Field(field),
            (Self::Body, Key::Stream, _) => Use::Stream,
            (Self::Body, Key::Tools, _) => Use::Tools,
            (Self::Body, Key::System, Kind::String | Kind::Array) => Use::System,
            (Self::System, _, Kind::Object) => Use::Enter(Self::SystemPart),
            (Self::SystemPart, Key::Text, Kind::String) => Use::SystemText,
            (Self::Body, Key::Messages, Kind::Array) => Use::Enter(Self::Messages),
            (Self::Messages, _, Kind::Object) => Use::Enter(Self::Message),
            (Self::Message, Key::Content, Kind::Array) => Use::Enter(Self::Parts),
            (Self::Body, Key::Said, Kind::Array) => Use::List,
            (Self::Body | Self::Message, Key::Said, _) | (Self::Message, Key::Content, _) => Use::Text,
            (Self::Parts, ..) => Use::Part,
            (Self::Part, Key::Text, Kind::String) => Use::Text,
            _ => Use::Skip,
        }
    }
}
