//! What becomes of the values in a body: kept, hashed or left alone, as [`place`](super::place) says. Bytes go to the
//! hasher from the piece they came in, without a copy.

use roundhouse_types::ChainHasher;
use router_core::prefix::PromptHasher;
use router_core::request::Answer;
use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};

use super::error::BodyError;
use super::fields::{Field, Fields};
use super::ids::List;
use super::json::{Key, Kind};
use super::place::{Place, Use};
use super::system::SystemText;
use super::{Name, ScanConfig, Scanned};

/// Reads values as [`Json`](super::json::Json) tells of them.
pub(super) struct Reader {
    seed: u64,
    place: Place,
    /// What the document is, if not an object.
    found: Option<&'static str>,
    capture: Option<Capture>,
    /// Of the current part of a content, if it came in several pieces.
    digest: Option<Box<Xxh3>>,
    fields: Fields,
    answer: Answer,
    list: List,
    system_text: SystemText,
    /// Tokens of a prompt that has come as ids so far; `None` once anything else belongs to it.
    ids: Option<usize>,
    prompt: PromptHasher,
    /// Of the body, so far.
    members: usize,
}

/// Whoever changes a body later keeps a note of each of its members.
pub(super) const MOST_MEMBERS: usize = 4_096;

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
    List,
    Tools,
    System,
    SystemText,
    Part,
}

impl Reader {
    #[inline]
    pub(super) fn new(config: ScanConfig) -> Self {
        Self {
            seed: config.seed,
            place: Place::Document,
            found: None,
            capture: None,
            digest: None,
            fields: Fields::default(),
            answer: Answer::Whole,
            list: List::default(),
            system_text: SystemText::default(),
            ids: Some(0),
            prompt: PromptHasher::new(ChainHasher::new(config.seed), config.prompt_use),
            members: 0,
        }
    }

    /// Values in the container at this depth are to be told of.
    #[inline]
    pub(super) fn watched_depth(&self) -> usize {
        self.place.depth()
    }

    /// Whether the end of a value in the container at `depth` is to be told.
    #[inline]
    pub(super) fn awaits_end(&self, depth: usize) -> bool {
        depth < self.place.depth() || self.capture.is_some_and(|capture| capture.depth == depth)
    }

    /// A value begins at `at` in `piece`, under `key` if it is in an object.
    pub(super) fn begin(&mut self, kind: Kind, key: &mut Key, piece: &[u8], at: usize) {
        let depth = self.place.depth();
        self.members += usize::from(self.place == Place::Body);
        let key = self.place.key(|| key.whole(piece));
        match self.place.value(key, kind) {
            Use::Skip if self.place == Place::Document => self.found = Some(kind.named()),
            Use::Skip => {}
            Use::Enter(place) => self.place = place,
            Use::Field(field) => {
                self.fields.begin(field);
                if kind == Kind::String {
                    self.capture =
                        Some(Capture { sink: Sink::Field(field), from: at + 1, quote_bytes: 1, depth });
                }
            }
            Use::Stream => {
                let asks_for_it = piece.get(at) == Some(&b't');
                self.answer = if asks_for_it { Answer::Streamed } else { Answer::Whole };
            }
            Use::Text => {
                // A part with a text is that text.
                (self.digest, self.ids) = (None, None);
                let quote_bytes = usize::from(kind == Kind::String);
                self.capture = Some(Capture { sink: Sink::Text, from: at + quote_bytes, quote_bytes, depth });
            }
            Use::List => {
                self.list = List::default();
                self.capture = Some(Capture { sink: Sink::List, from: at, quote_bytes: 0, depth });
            }
            Use::Tools => {
                self.ids = None;
                self.prompt.begin_tools();
                self.capture = Some(Capture { sink: Sink::Tools, from: at, quote_bytes: 0, depth });
            }
            Use::System => {
                self.ids = None;
                self.prompt.begin_system();
                match kind {
                    Kind::Array => self.place = Place::System,
                    _ => {
                        let from = at + 1;
                        self.capture = Some(Capture { sink: Sink::System, from, quote_bytes: 1, depth });
                    }
                }
            }
            Use::SystemText => {
                self.system_text = SystemText::default();
                self.capture = Some(Capture { sink: Sink::SystemText, from: at + 1, quote_bytes: 1, depth });
            }
            Use::Part => {
                // The part that this one is in is what its parts are.
                (self.digest, self.ids) = (None, None);
                self.capture = Some(Capture { sink: Sink::Part, from: at, quote_bytes: 0, depth });
                if kind == Kind::Object {
                    self.place = self.place.part();
                }
            }
        }
    }

    /// A value in the container at `depth` has ended before `at` in `piece`.
    pub(super) fn end(&mut self, depth: usize, piece: &[u8], at: usize) {
        if self.place.depth() > depth {
            self.place = self.place.outside();
        }
        if let Some(capture) = self.capture.take_if(|capture| capture.depth == depth) {
            let bytes = &piece[capture.from..at - capture.quote_bytes];
            match capture.sink {
                Sink::Field(field) => self.fields.finish(field, bytes),
                Sink::Part => self.finish_part(bytes),
                Sink::List => {
                    self.list.push(bytes, &mut self.prompt);
                    self.ids = self.ids.zip(self.list.ids()).map(|(before, ids)| before + ids);
                }
                Sink::SystemText => {
                    self.system_text.push(bytes, &mut self.prompt);
                    self.system_text.finish(&mut self.prompt);
                }
                sink => self.feed(sink, bytes),
            }
        }
    }

    /// Must be called after each piece.
    pub(super) fn end_piece(&mut self, piece: &[u8]) {
        if let Some(capture) = &mut self.capture {
            let (sink, from) = (capture.sink, std::mem::take(&mut capture.from));
            self.feed(sink, &piece[from..]);
        }
    }

    pub(super) fn finish(
        self,
        meant: impl FnOnce(&str, Option<u64>) -> Option<Name>,
    ) -> Result<Scanned, BodyError> {
        if let Some(found) = self.found {
            return Err(BodyError::NotAnObject { found });
        }
        if self.members > MOST_MEMBERS {
            return Err(BodyError::TooManyMembers { most: MOST_MEMBERS });
        }
        let Fields { model, user, priority, apart, .. } = self.fields;
        let stands_for = model.as_deref().and_then(|name| meant(name, user));
        let (is_meant, model) = (stands_for.is_some(), stands_for.or(model));
        let salt = ChainHasher::new(self.seed).salted(model.as_ref().map_or(&[], Name::as_bytes));
        let salt = apart.iter().flatten().fold(salt, |salt, own| salt.salted(&own.to_le_bytes()));
        let token_ids = self.ids.filter(|ids| *ids > 0);
        let (answer, prompt) = (self.answer, self.prompt.finish(salt));
        Ok(Scanned { model, is_meant, user, priority, answer, token_ids, prompt })
    }

    /// Part of a captured value.
    fn feed(&mut self, sink: Sink, bytes: &[u8]) {
        match sink {
            Sink::Field(_) => self.fields.push(bytes),
            Sink::Text => self.prompt.push(bytes),
            Sink::List => self.list.push(bytes, &mut self.prompt),
            Sink::Tools => self.prompt.push_tools(bytes),
            Sink::System => self.prompt.push_system(bytes),
            Sink::SystemText => self.system_text.push(bytes, &mut self.prompt),
            Sink::Part if !self.prompt.hashes() => {}
            Sink::Part => {
                let seed = self.seed;
                self.digest.get_or_insert_with(|| Box::new(Xxh3::with_seed(seed))).update(bytes);
            }
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
            None => xxh3_64_with_seed(bytes, self.seed),
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
