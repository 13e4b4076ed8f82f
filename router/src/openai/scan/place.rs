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
    /// What a tool gave, as a list of parts in one of a message.
    Results = 6,
    ResultPart = 7,
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
    /// `tool_calls`, in a part the `input` of a tool.
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

    /// What an object in this list is.
    pub(super) fn part(self) -> Self {
        if self == Self::Parts { Self::Part } else { Self::ResultPart }
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
            Self::Results => Self::Part,
            Self::ResultPart => Self::Results,
        }
    }

    /// What a key means here. `raw` is as it stands between its quotes; it is asked for only where there are keys.
    pub(super) fn key<'a>(self, raw: impl FnOnce() -> &'a [u8]) -> Key {
        if matches!(self, Self::Document | Self::Messages | Self::Parts | Self::Results | Self::System) {
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
        match self {
            Self::Message => match key {
                b"role" | b"tool_calls" => Key::Said,
                b"content" => Key::Content,
                _ => Key::Other,
            },
            Self::Part => match key {
                b"text" => Key::Text,
                b"content" => Key::Content,
                b"input" => Key::Said,
                _ => Key::Other,
            },
            Self::ResultPart | Self::SystemPart if key == b"text" => Key::Text,
            Self::Body => Self::body_key(key),
            _ => Key::Other,
        }
    }

    fn body_key(key: &[u8]) -> Key {
        match key {
            b"messages" => Key::Messages,
            b"model" => Key::Field(Field::Model),
            b"user" => Key::Field(Field::User),
            b"service_tier" => Key::Field(Field::ServiceTier),
            b"cache_salt" => Key::Field(Field::Apart(Apart::CacheSalt)),
            b"lora_path" => Key::Field(Field::Apart(Apart::LoraPath)),
            b"extra_key" => Key::Field(Field::Apart(Apart::ExtraKey)),
            b"stream" => Key::Stream,
            b"tools" => Key::Tools,
            b"system" | b"instructions" => Key::System,
            b"prompt" | b"input" | b"text" | b"input_ids" => Key::Said,
            _ => Key::Other,
        }
    }

    /// What is done with a value of `kind` under `key`; whether it makes sense there is for the engine to say.
    pub(super) fn value(self, key: Key, kind: Kind) -> Use {
        match self {
            Self::Message => match (key, kind) {
                (Key::Content, Kind::Array) => Use::Enter(Self::Parts),
                (Key::Content | Key::Said, _) => Use::Text,
                _ => Use::Skip,
            },
            Self::Part => match (key, kind) {
                (Key::Content | Key::Text, Kind::String) | (Key::Said, _) => Use::Text,
                (Key::Content, Kind::Array) => Use::Enter(Self::Results),
                _ => Use::Skip,
            },
            Self::Parts | Self::Results => Use::Part,
            Self::ResultPart if key == Key::Text && kind == Kind::String => Use::Text,
            Self::SystemPart if key == Key::Text && kind == Kind::String => Use::SystemText,
            Self::Document if kind == Kind::Object => Use::Enter(Self::Body),
            Self::Messages if kind == Kind::Object => Use::Enter(Self::Message),
            Self::System if kind == Kind::Object => Use::Enter(Self::SystemPart),
            Self::Body => Self::body_value(key, kind),
            _ => Use::Skip,
        }
    }

    fn body_value(key: Key, kind: Kind) -> Use {
        match (key, kind) {
            (Key::Field(field), _) => Use::Field(field),
            (Key::Stream, _) => Use::Stream,
            (Key::Tools, _) => Use::Tools,
            (Key::System, Kind::String | Kind::Array) => Use::System,
            (Key::Messages, Kind::Array) => Use::Enter(Self::Messages),
            (Key::Said, Kind::Array) => Use::List,
            (Key::Said, _) => Use::Text,
            _ => Use::Skip,
        }
    }
}
