//! JSON as a machine that is pushed along, and stops wherever a piece ends: no recursion, nothing kept of what went by, a
//! bit for each open container.
//!
//! It checks everything, and tells of what is asked for: where values of the watched container begin, where it ends, and
//! where a certain value ends. It does not know what they mean; the [`Reader`] does, which is next.

use smallvec::SmallVec;

use super::error::{Problem, SyntaxError};
use super::number::Number;
use super::reader::Reader;
use super::text::{Bytes, Fault, Text};

/// Containers that may be open at once. Engines stop earlier; a tool's schema needs some ten.
pub const MAX_DEPTH: usize = 256;
/// How much of a key is kept over the end of a piece: the longest that is looked for, each letter escaped.
const MAX_KEY_BYTES: usize = 64;

/// The machine.
pub(super) struct Json {
    state: State,
    /// What follows a value where the machine stands.
    after: State,
    /// Of the current piece.
    bytes: Bytes,
    text: Text,
    number: Number,
    /// In `true`, `false` or `null`: what of it is missing.
    word: &'static [u8],
    depth: usize,
    /// A bit for each open container, whether it is an object.
    objects: [u64; MAX_DEPTH / 64],
    key: Key,
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
    AfterMember,
    AfterElement,
    AfterDocument,
    // Only between two pieces:
    InKey,
    InString,
    InNumber,
    InWord,
}

/// The last key.
#[derive(Default)]
pub(super) struct Key {
    /// Where in the piece it begins and ends; `None` while it has not ended.
    from: usize,
    to: Option<usize>,
    /// What came of it in earlier pieces.
    before: SmallVec<[u8; MAX_KEY_BYTES]>,
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

/// Where the machine stands after some bytes.
type Step = Result<(State, usize), Fault>;

impl Json {
    #[inline]
    pub(super) fn new() -> Self {
        Self {
            state: State::Value,
            after: State::AfterDocument,
            bytes: Bytes::Any,
            text: Text::default(),
            number: Number::Zero,
            word: &[],
            depth: 0,
            objects: [0; MAX_DEPTH / 64],
            key: Key::default(),
            offset: 0,
            line: 1,
            line_offset: 0,
            failed: None,
        }
    }

    /// Reads the next piece, and tells `reader` of what it asks for.
    pub(super) fn push(&mut self, piece: &[u8], reader: &mut Reader) -> Result<(), SyntaxError> {
        if let Some(error) = self.failed {
            return Err(error);
        }
        self.bytes = Bytes::of(piece);
        match self.read(piece, reader) {
            Ok(state) => self.state = state,
            Err((problem, at)) => {
                // `at` is modulo 2^64: a character may have begun in an earlier piece.
                let column = self.offset.wrapping_add(at) + 1 - self.line_offset;
                return self.fail(problem, column);
            }
        }
        self.offset += piece.len();
        if self.depth == reader.watched_depth() {
            self.key.end_piece(piece);
        }
        Ok(())
    }

    /// The body has ended.
    pub(super) fn finish(&mut self) -> Result<(), SyntaxError> {
        let complete = match self.state {
            State::AfterDocument => true,
            State::InNumber => self.number.is_complete() && self.depth == 0,
            _ => false,
        };
        match self.failed {
            Some(error) => Err(error),
            None if complete => Ok(()),
            None => self.fail(Problem::Ends(self.expected(self.state)), self.offset - self.line_offset),
        }
    }

    #[cold]
    fn fail(&mut self, problem: Problem, column: usize) -> Result<(), SyntaxError> {
        let error = SyntaxError { problem, line: self.line, column };
        self.failed = Some(error);
        Err(error)
    }

    fn read(&mut self, piece: &[u8], reader: &mut Reader) -> Result<State, Fault> {
        let (mut state, mut at) = self.resume(piece, reader)?;
        while let Some(&byte) = piece.get(at) {
            let next = at + 1;
            (state, at) = match (state, byte) {
                (State::Value | State::ValueOrEnd, b'"') => self.string(piece, at, reader)?,
                (State::Key | State::KeyOrEnd, b'"') => {
                    self.key.begin(next);
                    self.key(piece, next)?
                }
                (State::AfterMember, b',') => (State::Key, next),
                (State::AfterElement, b',') | (State::Colon, b':') => (State::Value, next),
                (_, b' ' | b'\r' | b'\t') => (state, next),
                (_, b'\n') => {
                    self.line += 1;
                    self.line_offset = self.offset + next;
                    (state, next)
                }
                (State::KeyOrEnd | State::AfterMember, b'}')
                | (State::ValueOrEnd | State::AfterElement, b']') => {
                    self.close();
                    self.end_value(piece, next, reader)
                }
                (State::Value | State::ValueOrEnd, _) => self.value(state, byte, piece, at, reader)?,
                _ => return Err((Problem::Expected(self.expected(state)), at)),
            };
        }
        Ok(state)
    }

    /// Goes on with what the last piece ended in.
    fn resume(&mut self, piece: &[u8], reader: &mut Reader) -> Step {
        match self.state {
            State::InKey => self.key(piece, 0),
            State::InString => self.rest_of_string(piece, 0, reader),
            State::InNumber => self.rest_of_number(piece, 0, reader),
            State::InWord => self.rest_of_word(piece, 0, reader),
            state => Ok((state, 0)),
        }
    }

    /// A key, from after its quote or from where the last piece ended, and the colon if it is right behind it.
    #[inline]
    fn key(&mut self, piece: &[u8], at: usize) -> Step {
        let Some(quote) = self.text.advance(piece, at, self.bytes)? else {
            return Ok((State::InKey, piece.len()));
        };
        self.key.to = Some(quote);
        Ok(match piece.get(quote + 1) {
            Some(b':') => (State::Value, quote + 2),
            _ => (State::Colon, quote + 1),
        })
    }

    #[inline]
    fn string(&mut self, piece: &[u8], at: usize, reader: &mut Reader) -> Step {
        self.begin_value(Kind::String, piece, at, reader);
        self.rest_of_string(piece, at + 1, reader)
    }

    fn value(&mut self, state: State, byte: u8, piece: &[u8], at: usize, reader: &mut Reader) -> Step {
        let next = at + 1;
        let (kind, word): (_, &'static [u8]) = match byte {
            b'{' | b'[' => return self.open(byte, piece, at, reader),
            b't' => (Kind::Boolean, b"rue"),
            b'f' => (Kind::Boolean, b"alse"),
            b'n' => (Kind::Null, b"ull"),
            _ => {
                let expected = |_| (Problem::Expected(self.expected(state)), at);
                self.number = Number::begin(byte).ok_or(()).map_err(expected)?;
                self.begin_value(Kind::Number, piece, at, reader);
                return self.rest_of_number(piece, next, reader);
            }
        };
        self.begin_value(kind, piece, at, reader);
        self.word = word;
        self.rest_of_word(piece, next, reader)
    }

    #[inline]
    fn begin_value(&mut self, kind: Kind, piece: &[u8], at: usize, reader: &mut Reader) {
        if self.depth == reader.watched_depth() {
            reader.begin(kind, &mut self.key, piece, at);
        }
    }

    /// A value has ended before `at`. If a comma is right behind it, it is read along.
    #[inline]
    fn end_value(&self, piece: &[u8], at: usize, reader: &mut Reader) -> (State, usize) {
        if reader.awaits_end(self.depth) {
            reader.end(self.depth, piece, at);
        }
        match (self.after, piece.get(at)) {
            (State::AfterMember, Some(b',')) => (State::Key, at + 1),
            (State::AfterElement, Some(b',')) => (State::Value, at + 1),
            (after, _) => (after, at),
        }
    }

    fn open(&mut self, byte: u8, piece: &[u8], at: usize, reader: &mut Reader) -> Step {
        let (word, bit) = (self.depth / 64, 1 << (self.depth % 64));
        let Some(objects) = self.objects.get_mut(word) else {
            return Err((Problem::TooDeep(MAX_DEPTH), at));
        };
        let (kind, state) = if byte == b'{' {
            *objects |= bit;
            self.after = State::AfterMember;
            (Kind::Object, State::KeyOrEnd)
        } else {
            *objects &= !bit;
            self.after = State::AfterElement;
            (Kind::Array, State::ValueOrEnd)
        };
        self.begin_value(kind, piece, at, reader);
        self.depth += 1;
        Ok((state, at + 1))
    }

    fn close(&mut self) {
        self.depth -= 1;
        self.after = match self.depth.checked_sub(1) {
            None => State::AfterDocument,
            Some(at) if self.objects[at / 64] & (1 << (at % 64)) != 0 => State::AfterMember,
            Some(_) => State::AfterElement,
        };
    }

    #[inline]
    fn rest_of_string(&mut self, piece: &[u8], at: usize, reader: &mut Reader) -> Step {
        Ok(match self.text.advance(piece, at, self.bytes)? {
            Some(quote) => self.end_value(piece, quote + 1, reader),
            None => (State::InString, piece.len()),
        })
    }

    fn rest_of_number(&mut self, piece: &[u8], mut at: usize, reader: &mut Reader) -> Step {
        let mut number = self.number;
        while let Some(&byte) = piece.get(at) {
            // Most bytes of numbers are digits among digits, or end them.
            if !(byte.is_ascii_digit() && number.takes_digits()) {
                if Number::ends_at(byte) && number.is_complete() {
                    return Ok(self.end_value(piece, at, reader));
                }
                number = number.next(byte).map_err(|problem| (problem, at))?;
            }
            at += 1;
        }
        self.number = number;
        Ok((State::InNumber, at))
    }

    fn rest_of_word(&mut self, piece: &[u8], mut at: usize, reader: &mut Reader) -> Step {
        while let [expected, rest @ ..] = self.word {
            match piece.get(at) {
                None => return Ok((State::InWord, at)),
                Some(byte) if byte == expected => self.word = rest,
                Some(_) => return Err((Problem::Expected(self.expected(State::InWord)), at)),
            }
            at += 1;
        }
        Ok(self.end_value(piece, at, reader))
    }

    #[cold]
    fn expected(&self, state: State) -> &'static str {
        match state {
            State::InNumber if self.number.is_complete() => self.expected(self.after),
            State::InNumber => "a digit",
            State::InString | State::InKey => self.text.expected(),
            State::InWord => "`true`, `false` or `null`",
            State::Value => "a value",
            State::ValueOrEnd => "a value or `]`",
            State::Key => "a key in quotes",
            State::KeyOrEnd => "a key in quotes or `}`",
            State::Colon => "`:`",
            State::AfterMember => "`,` or `}`",
            State::AfterElement => "`,` or `]`",
            State::AfterDocument => "nothing after the body's value",
        }
    }
}

impl Key {
    fn begin(&mut self, from: usize) {
        (self.from, self.to) = (from, None);
        self.before.clear();
    }

    fn end_piece(&mut self, piece: &[u8]) {
        self.keep(piece.get(self.from..self.to.unwrap_or(piece.len())).unwrap_or_default());
        self.from = 0;
        self.to = self.to.map(|_| 0);
    }

    /// The key as it stands between its quotes. Cut off if it is longer than any that is looked for.
    pub(super) fn whole<'a>(&'a mut self, piece: &'a [u8]) -> &'a [u8] {
        let here = piece.get(self.from..self.to.unwrap_or_default()).unwrap_or_default();
        if self.before.is_empty() {
            return here;
        }
        self.keep(here);
        &self.before
    }

    fn keep(&mut self, part: &[u8]) {
        let room = MAX_KEY_BYTES - self.before.len();
        self.before.extend_from_slice(&part[..part.len().min(room)]);
    }
}
