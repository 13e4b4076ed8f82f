//! JSON as a machine that is pushed along byte by byte, and stops wherever a piece ends: no recursion, nothing kept of
//! what went by, a bit for each open container.
//!
//! It checks everything, and tells of the values that are watched for: those whose container is not deeper than
//! [`watch`](Json::watch). It does not know what they mean; its caller, [`BodyScanner`](super::BodyScanner), does.

use smallvec::SmallVec;

use super::error::{Problem, SyntaxError};
use super::number::Number;
use super::text::Text;

/// Containers that may be open at once. Engines stop earlier; a tool's schema needs some ten.
pub const MAX_DEPTH: usize = 256;
/// How much of a key is kept over the end of a piece: the longest that is looked for, each letter escaped.
const MAX_KEY_BYTES: usize = 64;

/// The machine.
pub(super) struct Json {
    state: State,
    role: Role,
    text: Text,
    depth: usize,
    /// A bit for each open container, whether it is an object.
    objects: [u64; MAX_DEPTH / 64],
    watched_depth: usize,
    /// Where in the piece the key being read begins.
    key_from: usize,
    /// What came of it in earlier pieces.
    key_before: SmallVec<[u8; MAX_KEY_BYTES]>,
    /// Length of all pieces before this one.
    offset: usize,
    line: usize,
    /// Offset of the line's first byte.
    line_offset: usize,
    failed: Option<SyntaxError>,
}

/// What may come next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Value,
    /// After `[`.
    ValueOrEnd,
    Key,
    /// After `{`.
    KeyOrEnd,
    Colon,
    /// After a value: in a container its end or a comma, outside nothing.
    AfterValue,
    InText,
    InNumber(Number),
    /// In `true`, `false` or `null`: how much of it has been read.
    InWord(&'static str, usize),
}

/// What a string is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Role {
    Key,
    Value,
}

/// What a value is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Object,
    Array,
    String,
    Number,
    Boolean,
    Null,
}

/// Something that is watched for. Positions are in the current piece.
#[derive(Clone, Copy, Debug)]
pub(super) enum Event {
    /// A value begins at `at`.
    Begin { kind: Kind, at: usize },
    /// A key has been read: what of it is in this piece.
    Key { from: usize, to: usize },
    /// A value has ended before `at`.
    End { at: usize },
}

type Step = Result<Option<Event>, (Problem, usize)>;

impl Json {
    pub(super) fn new() -> Self {
        Self {
            state: State::Value,
            role: Role::Value,
            text: Text::default(),
            depth: 0,
            objects: [0; MAX_DEPTH / 64],
            watched_depth: 0,
            key_from: 0,
            key_before: SmallVec::new(),
            offset: 0,
            line: 1,
            line_offset: 0,
            failed: None,
        }
    }

    /// Open containers.
    pub(super) fn depth(&self) -> usize {
        self.depth
    }

    /// From now on values and keys within more than `depth` containers are checked and not told.
    pub(super) fn watch(&mut self, depth: usize) {
        self.watched_depth = depth;
    }

    /// Reads on at `at` until something is to be told, or the piece ends.
    pub(super) fn next(&mut self, piece: &[u8], at: &mut usize) -> Result<Option<Event>, SyntaxError> {
        if let Some(error) = self.failed {
            return Err(error);
        }
        while let Some(&byte) = piece.get(*at) {
            match self.step(piece, byte, at) {
                Ok(None) => {}
                Ok(event) => return Ok(event),
                Err((problem, offset)) => return Err(self.fail(problem, offset)),
            }
        }
        Ok(None)
    }

    /// Must be called between two pieces.
    pub(super) fn end_piece(&mut self, piece: &[u8]) {
        self.offset += piece.len();
        if self.state == State::InText && self.role == Role::Key && self.depth <= self.watched_depth {
            let part = piece.get(self.key_from..).unwrap_or_default();
            let room = MAX_KEY_BYTES - self.key_before.len();
            self.key_before.extend_from_slice(&part[..part.len().min(room)]);
        }
        self.key_from = 0;
    }

    /// The key that an event told of, as it stands between its quotes. Cut off if it is longer than any that is looked for.
    pub(super) fn key<'a>(&'a mut self, piece: &'a [u8], from: usize, to: usize) -> &'a [u8] {
        if self.key_before.is_empty() {
            return &piece[from..to];
        }
        let room = MAX_KEY_BYTES - self.key_before.len();
        self.key_before.extend_from_slice(&piece[from..to.min(from + room)]);
        &self.key_before
    }

    /// The body has ended.
    pub(super) fn finish(&mut self) -> Result<(), SyntaxError> {
        if let Some(error) = self.failed {
            return Err(error);
        }
        let complete = match self.state {
            State::AfterValue => true,
            State::InNumber(number) => number.is_complete(),
            _ => false,
        };
        if complete && self.depth == 0 {
            return Ok(());
        }
        let problem = Problem::Ends(self.expected());
        // The last byte there is, if any.
        Err(self.fail(problem, self.offset.wrapping_sub(1)))
    }

    fn fail(&mut self, problem: Problem, offset: usize) -> SyntaxError {
        let column = offset.wrapping_add(1) - self.line_offset;
        let error = SyntaxError { problem, line: self.line, column };
        self.failed = Some(error);
        error
    }

    fn step(&mut self, piece: &[u8], byte: u8, at: &mut usize) -> Step {
        match self.state {
            State::InText => return self.read_text(piece, at),
            State::InNumber(number) => return self.read_number(number, piece, at),
            State::InWord(word, read) => return self.read_word((word, read), byte, at),
            _ => {}
        }
        match (byte, self.state) {
            (b' ' | b'\r' | b'\t', _) => {}
            (b'\n', _) => {
                self.line += 1;
                self.line_offset = self.offset + *at + 1;
            }
            (_, State::Value | State::ValueOrEnd) => return self.begin_value(byte, at),
            (b'"', State::Key | State::KeyOrEnd) => self.begin_key(*at),
            (b':', State::Colon) => self.state = State::Value,
            (b',', State::AfterValue) if self.depth > 0 => {
                self.state = if self.in_object() { State::Key } else { State::Value };
            }
            (b'}', State::KeyOrEnd) => return self.close(at),
            (b'}', State::AfterValue) if self.in_object() => return self.close(at),
            (b']', State::AfterValue) if self.depth > 0 && !self.in_object() => return self.close(at),
            _ => return Err((Problem::Expected(self.expected()), self.offset + *at)),
        }
        *at += 1;
        Ok(None)
    }

    fn begin_value(&mut self, byte: u8, at: &mut usize) -> Step {
        let depth = self.depth;
        let (kind, state) = match byte {
            b'"' => {
                (self.text, self.role) = (Text::default(), Role::Value);
                (Kind::String, State::InText)
            }
            b'{' => (Kind::Object, State::KeyOrEnd),
            b'[' => (Kind::Array, State::ValueOrEnd),
            b't' => (Kind::Boolean, State::InWord("true", 1)),
            b'f' => (Kind::Boolean, State::InWord("false", 1)),
            b'n' => (Kind::Null, State::InWord("null", 1)),
            b']' if self.state == State::ValueOrEnd => return self.close(at),
            _ => match Number::begin(byte) {
                Some(number) => (Kind::Number, State::InNumber(number)),
                None => return Err((Problem::Expected(self.expected()), self.offset + *at)),
            },
        };
        if matches!(kind, Kind::Object | Kind::Array) {
            self.open(kind).map_err(|problem| (problem, self.offset + *at))?;
        }
        self.state = state;
        let begin = *at;
        *at += 1;
        Ok((depth <= self.watched_depth).then_some(Event::Begin { kind, at: begin }))
    }

    fn begin_key(&mut self, at: usize) {
        (self.text, self.role, self.state) = (Text::default(), Role::Key, State::InText);
        self.key_from = at + 1;
        self.key_before.clear();
    }

    fn open(&mut self, kind: Kind) -> Result<(), Problem> {
        let (word, bit) = (self.depth / 64, 1 << (self.depth % 64));
        let Some(objects) = self.objects.get_mut(word) else { return Err(Problem::TooDeep(MAX_DEPTH)) };
        match kind {
            Kind::Object => *objects |= bit,
            _ => *objects &= !bit,
        }
        self.depth += 1;
        Ok(())
    }

    /// Whether the innermost container is an object.
    fn in_object(&self) -> bool {
        let Some(at) = self.depth.checked_sub(1) else { return false };
        self.objects[at / 64] & (1 << (at % 64)) != 0
    }

    fn close(&mut self, at: &mut usize) -> Step {
        self.depth -= 1;
        *at += 1;
        Ok(self.end_value(*at))
    }

    fn end_value(&mut self, at: usize) -> Option<Event> {
        self.state = State::AfterValue;
        (self.depth <= self.watched_depth).then_some(Event::End { at })
    }

    fn read_text(&mut self, piece: &[u8], at: &mut usize) -> Step {
        let Some(quote) = self.text.advance(piece, *at, self.offset)? else {
            *at = piece.len();
            return Ok(None);
        };
        *at = quote + 1;
        if self.role == Role::Value {
            return Ok(self.end_value(quote + 1));
        }
        self.state = State::Colon;
        let event = Event::Key { from: self.key_from, to: quote };
        Ok((self.depth <= self.watched_depth).then_some(event))
    }

    fn read_number(&mut self, mut number: Number, piece: &[u8], at: &mut usize) -> Step {
        while let Some(&byte) = piece.get(*at) {
            match number.next(byte).map_err(|problem| (problem, self.offset + *at))? {
                Some(next) => number = next,
                None => return Ok(self.end_value(*at)),
            }
            *at += 1;
        }
        self.state = State::InNumber(number);
        Ok(None)
    }

    fn read_word(&mut self, (word, read): (&'static str, usize), byte: u8, at: &mut usize) -> Step {
        if word.as_bytes()[read] != byte {
            return Err((Problem::Expected(self.expected()), self.offset + *at));
        }
        *at += 1;
        if read + 1 == word.len() {
            return Ok(self.end_value(*at));
        }
        self.state = State::InWord(word, read + 1);
        Ok(None)
    }

    fn expected(&self) -> &'static str {
        match self.state {
            State::Value => "a value",
            State::ValueOrEnd => "a value or `]`",
            State::Key => "a key in quotes",
            State::KeyOrEnd => "a key in quotes or `}`",
            State::Colon => "`:`",
            State::InNumber(number) if !number.is_complete() => "a digit",
            State::AfterValue | State::InNumber(_) if self.depth == 0 => "nothing after the body's value",
            State::AfterValue | State::InNumber(_) if self.in_object() => "`,` or `}`",
            State::AfterValue | State::InNumber(_) => "`,` or `]`",
            State::InText => self.text.expected(),
            State::InWord(word, _) => word,
        }
    }
}
