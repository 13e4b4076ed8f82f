//! Reads of a request body what routing needs, while it arrives: piece by piece, in one pass, keeping nothing but three
//! short strings and the hashes of the prompt.
//!
//! Strict about JSON, lenient about everything else: whether `messages` makes sense is for the engine to say. Strings
//! are hashed raw, as they stand between their quotes: tools first, as chat templates have them, then role, content and
//! tool calls of each message in the order in which they come. It takes what `serde_json` takes, except for what is
//! nested too deep; lone surrogates pass, too.
//!
//! [`json`] is the grammar, [`place`] the request format, [`fields`] what is kept. Next: the stage
//! [`parse`](crate::stages::parse).

mod error;
mod fields;
mod json;
mod number;
mod place;
mod text;

use roundhouse_types::ChainHasher;
use router_core::PromptUse;
use router_core::prefix::{PromptBlocks, PromptHasher};
use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};

pub use error::{BodyError, Problem, SyntaxError};
use fields::{Field, Fields};
pub use fields::{MAX_FIELD_BYTES, Name};
pub use json::MAX_DEPTH;
use json::{Event, Json, Kind};
use place::{Key, Place, Use};

/// How prompts are hashed.
#[derive(Clone, Copy, Debug)]
pub struct ScanConfig {
    /// The process's secret, so that nobody outside can aim for collisions.
    pub seed: u64,
    /// What the policy reads of them.
    pub prompt_use: PromptUse,
}

/// What routing needs of a body.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Scanned {
    /// `model`.
    pub model: Option<Name>,
    /// Hash of `user`, OpenAI's name for an end user.
    pub user: Option<u64>,
    /// The prompt, kept apart from those with another model or `cache_salt`.
    pub prompt: PromptBlocks,
}

/// Reads a body that comes in pieces. Where it is cut makes no difference to what is read.
pub struct BodyScanner {
    config: ScanConfig,
    json: Json,
    place: Place,
    key: Key,
    /// What the document is, if not an object.
    found: Option<&'static str>,
    capture: Option<Capture>,
    /// Of the current part of a content, if it came in several pieces.
    digest: Option<Box<Xxh3>>,
    fields: Fields,
    prompt: PromptHasher,
}

/// A value whose bytes are on their way somewhere.
#[derive(Clone, Copy, Debug)]
struct Capture {
    sink: Sink,
    /// Where in the piece it begins.
    from: usize,
    /// How many of its last bytes do not belong to it: the quote, if the quotes stay behind.
    quote_bytes: usize,
    /// Depth of its container.
    depth: usize,
}

#[derive(Clone, Copy, Debug)]
enum Sink {
    Field(Field),
    Text,
    Tools,
    Part,
}

impl BodyScanner {
    /// A scanner at the beginning of a body.
    #[must_use]
    pub fn new(config: ScanConfig) -> Self {
        Self {
            config,
            json: Json::new(),
            place: Place::Document,
            key: Key::Other,
            found: None,
            capture: None,
            digest: None,
            fields: Fields::default(),
            prompt: PromptHasher::new(ChainHasher::new(config.seed), config.prompt_use),
        }
    }

    /// Reads the next piece.
    ///
    /// # Errors
    /// Where the body ceases to be JSON. The error is final: every later call returns it again.
    pub fn push(&mut self, piece: &[u8]) -> Result<(), BodyError> {
        let mut at = 0;
        while let Some(event) = self.json.next(piece, &mut at)? {
            match event {
                Event::Begin { kind, at } => self.begin(kind, at),
                Event::Key { from, to } => self.key = self.place.key(self.json.key(piece, from, to)),
                Event::End { at } => self.end(piece, at),
            }
        }
        self.json.end_piece(piece);
        if let Some(capture) = &mut self.capture {
            let (sink, from) = (capture.sink, std::mem::take(&mut capture.from));
            self.feed(sink, &piece[from..]);
        }
        Ok(())
    }

    /// The body has ended.
    ///
    /// # Errors
    /// When it should not have, or was no object.
    pub fn finish(mut self) -> Result<Scanned, BodyError> {
        self.json.finish()?;
        if let Some(found) = self.found {
            return Err(BodyError::NotAnObject { found });
        }
        let Fields { model, user, cache_salt, .. } = self.fields;
        let salt = ChainHasher::new(self.config.seed)
            .salted(model.as_deref().unwrap_or_default().as_bytes())
            .salted(cache_salt.map(u64::to_le_bytes).as_ref().map_or(&[], |salt| &salt[..]));
        Ok(Scanned { model, user, prompt: self.prompt.finish(salt) })
    }

    fn begin(&mut self, kind: Kind, at: usize) {
        match self.place.value(self.key, kind) {
            Use::Skip if self.place == Place::Document => self.found = Some(kind.named()),
            Use::Skip => {}
            Use::Enter(place) => self.walk(place),
            Use::Field(field) => {
                self.fields.begin(field);
                if kind == Kind::String {
                    self.capture(Sink::Field(field), kind, at);
                }
            }
            Use::Text => {
                // A part with a text is that text.
                self.digest = None;
                self.capture(Sink::Text, kind, at);
            }
            Use::Tools => {
                self.prompt.begin_tools();
                self.capture(Sink::Tools, kind, at);
            }
            Use::Part => {
                self.capture(Sink::Part, kind, at);
                if kind == Kind::Object {
                    self.walk(Place::Part);
                }
            }
        }
    }

    fn end(&mut self, piece: &[u8], at: usize) {
        let depth = self.json.depth();
        if self.place.depth() > depth {
            self.walk(self.place.outside());
        }
        if let Some(capture) = self.capture.take_if(|capture| capture.depth == depth) {
            self.finish_capture(capture.sink, &piece[capture.from..at - capture.quote_bytes]);
        }
    }

    fn walk(&mut self, place: Place) {
        self.place = place;
        self.key = Key::Other;
        self.json.watch(place.depth());
    }

    fn capture(&mut self, sink: Sink, kind: Kind, at: usize) {
        let quote_bytes = usize::from(kind == Kind::String && matches!(sink, Sink::Text | Sink::Field(_)));
        let depth = self.json.depth() - usize::from(matches!(kind, Kind::Object | Kind::Array));
        self.capture = Some(Capture { sink, from: at + quote_bytes, quote_bytes, depth });
    }

    /// Part of a captured value, up to the end of a piece.
    fn feed(&mut self, sink: Sink, bytes: &[u8]) {
        match sink {
            Sink::Field(_) => self.fields.push(bytes),
            Sink::Text => self.prompt.push(bytes),
            Sink::Tools => self.prompt.push_tools(bytes),
            Sink::Part if !self.prompt.hashes() => {}
            Sink::Part => {
                let seed = self.config.seed;
                self.digest.get_or_insert_with(|| Box::new(Xxh3::with_seed(seed))).update(bytes);
            }
        }
    }

    fn finish_capture(&mut self, sink: Sink, bytes: &[u8]) {
        match sink {
            Sink::Field(field) => self.fields.finish(field, bytes),
            Sink::Part => self.finish_part(bytes),
            sink => self.feed(sink, bytes),
        }
    }

    /// Images, audio and whatever else: a picture's megabytes are eight bytes of the prompt, not thousands of blocks.
    fn finish_part(&mut self, bytes: &[u8]) {
        let digest = match self.digest.take() {
            _ if !self.prompt.hashes() => 0,
            Some(mut digest) => {
                digest.update(bytes);
                digest.digest()
            }
            None => xxh3_64_with_seed(bytes, self.config.seed),
        };
        self.prompt.push(&digest.to_le_bytes());
    }
}

impl Kind {
    fn named(self) -> &'static str {
        match self {
            Self::Object => "an object",
            Self::Array => "an array",
            Self::String => "a string",
            Self::Number => "a number",
            Self::Boolean => "a boolean",
            Self::Null => "null",
        }
    }
}

#[cfg(test)]
mod tests;
