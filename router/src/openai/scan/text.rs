//! The inside of a JSON string, at memory speed: runs over plain characters several at a time, and looks at the others.
//!
//! Lone surrogates (`\ud800`) are accepted, as Python's parser does; the engine has the last word on them.

use memchr::memchr2;

use super::error::Problem;

/// Where in a string the scanner stands, between two pieces.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Text {
    escape: Escape,
    /// The beginning of a character that the last piece ended in.
    partial: [u8; 4],
    partial_bytes: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Escape {
    #[default]
    No,
    /// The backslash has been read.
    Begun,
    /// So many of the four digits after `\u` are missing.
    Hex(u8),
}

/// Something wrong, and where: counted from the piece's beginning, modulo 2^64 if it lies before.
pub(super) type Fault = (Problem, usize);

const HEX_DIGIT: &str = "a hexadecimal digit";

impl Text {
    /// Goes on at `at` in `piece`. Returns where the closing quote is, or `None` if it is not in this piece.
    #[inline]
    pub(super) fn advance(
        &mut self,
        piece: &[u8],
        mut at: usize,
        bytes: Bytes,
    ) -> Result<Option<usize>, Fault> {
        let mut begun = self.escape != Escape::No || self.partial_bytes > 0;
        loop {
            if begun {
                let Some(next) = self.go_on(piece, at)? else { return Ok(None) };
                (at, begun) = (next, false);
            }
            at = end_of_plain(piece, at, bytes);
            match piece.get(at) {
                None => return Ok(None),
                Some(b'"') => return Ok(Some(at)),
                Some(b'\\') => match piece.get(at + 1) {
                    Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => at += 2,
                    _ => {
                        (self.escape, begun) = (Escape::Begun, true);
                        at += 1;
                    }
                },
                Some(0..b' ') => return Err((Problem::ControlCharacter, at)),
                Some(_) => at = self.characters(piece, at)?,
            }
        }
    }

    /// What is missing if the body ends here.
    pub(super) fn expected(self) -> &'static str {
        match self.escape {
            Escape::No => "the closing quote of a string",
            Escape::Begun => "an escape after the backslash",
            Escape::Hex(_) => HEX_DIGIT,
        }
    }

    /// Completes an escape or a character that has begun. Returns where it ends, or `None` if that is not in this piece.
    fn go_on(&mut self, piece: &[u8], mut at: usize) -> Result<Option<usize>, Fault> {
        while let Some(&byte) = piece.get(at) {
            if self.partial_bytes > 0 {
                self.add_to_character(byte).map_err(|problem| {
                    // Where the character began.
                    (problem, at.wrapping_sub(self.partial_bytes.into()))
                })?;
            } else if self.escape != Escape::No {
                self.add_to_escape(byte).map_err(|problem| (problem, at))?;
            } else {
                break;
            }
            at += 1;
        }
        let complete = self.escape == Escape::No && self.partial_bytes == 0;
        Ok(complete.then_some(at))
    }

    fn add_to_escape(&mut self, byte: u8) -> Result<(), Problem> {
        self.escape = match (self.escape, byte) {
            (Escape::Hex(left), b'0'..=b'9' | b'a'..=b'f' | b'A'..=b'F') => match left {
                1 => Escape::No,
                _ => Escape::Hex(left - 1),
            },
            (Escape::Hex(_), _) => return Err(Problem::Expected(HEX_DIGIT)),
            (_, b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => Escape::No,
            (_, b'u') => Escape::Hex(4),
            _ => return Err(Problem::Escape),
        };
        Ok(())
    }

    fn add_to_character(&mut self, byte: u8) -> Result<(), Problem> {
        let last = usize::from(self.partial_bytes);
        self.partial[last] = byte;
        match std::str::from_utf8(&self.partial[..=last]).map_err(|error| error.error_len()) {
            Ok(_) => self.partial_bytes = 0,
            Err(None) => self.partial_bytes += 1,
            Err(Some(_)) => return Err(Problem::Utf8),
        }
        Ok(())
    }

    /// Checks what begins at `at` with a character that is not ASCII, up to the next quote or backslash.
    #[inline(never)]
    fn characters(&mut self, piece: &[u8], at: usize) -> Result<usize, Fault> {
        let rest = &piece[at..];
        let end = memchr2(b'"', b'\\', rest);
        let run = &rest[..end.unwrap_or(rest.len())];
        let control = |byte: u8| byte < b' ';
        let has_control = run.iter().fold(0, |any, &byte| any | u8::from(control(byte))) != 0;
        let control_at = if has_control { run.iter().position(|&byte| control(byte)) } else { None };
        // Whichever comes first is the error, so that cuts make no difference to it.
        match (std::str::from_utf8(&run[..control_at.unwrap_or(run.len())]), control_at) {
            (Ok(_), None) => Ok(at + run.len()),
            (Ok(_), Some(fault)) => Err((Problem::ControlCharacter, at + fault)),
            (Err(error), None) if error.error_len().is_none() && end.is_none() => {
                let begun = &run[error.valid_up_to()..];
                self.partial[..begun.len()].copy_from_slice(begun);
                self.partial_bytes = begun.len() as u8;
                Ok(at + run.len())
            }
            (Err(error), _) => Err((Problem::Utf8, at + error.valid_up_to())),
        }
    }
}

/// What a piece is made of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Bytes {
    /// Neither control characters nor anything but ASCII, as most bodies: in strings only quotes and backslashes count.
    Printable,
    /// Anything.
    Any,
}

impl Bytes {
    /// Looks at all of `piece` once, which costs less than to look at each of its strings.
    pub(super) fn of(piece: &[u8]) -> Self {
        let odd = piece.iter().fold(0, |odd, &byte| odd | not_printable(byte));
        if odd & HIGH_BIT == 0 { Self::Printable } else { Self::Any }
    }
}

/// Bytes that are looked at together; compilers make vectors of it.
const STRIDE_BYTES: usize = 32;

/// Where the first byte from `at` on is that is a quote, a backslash, a control character or not ASCII; or the end.
#[inline]
fn end_of_plain(piece: &[u8], mut at: usize, bytes: Bytes) -> usize {
    // Keys and roles end within the first word.
    while let Some((word, rest)) = piece.get(at..).and_then(|left| left.split_first_chunk::<8>()) {
        let word = u64::from_le_bytes(*word);
        let special = match bytes {
            Bytes::Printable => quotes(word),
            Bytes::Any => special_bytes(word),
        };
        if special != 0 {
            return at + special.trailing_zeros() as usize / 8;
        }
        if bytes == Bytes::Printable {
            return at + 8 + memchr2(b'"', b'\\', rest).unwrap_or(rest.len());
        }
        at += 8 + plain_strides(rest);
    }
    let left = piece.get(at..).unwrap_or_default();
    at + left.iter().position(|&byte| not_plain(byte) & HIGH_BIT != 0).unwrap_or(left.len())
}

/// Length of the whole strides of plain bytes at the beginning of `bytes`.
#[inline(always)]
fn plain_strides(bytes: &[u8]) -> usize {
    let special = |stride: &[u8; STRIDE_BYTES]| stride.iter().fold(0, |any, &byte| any | not_plain(byte));
    let plain = |stride: &&[u8; STRIDE_BYTES]| special(stride) & HIGH_BIT == 0;
    bytes.as_chunks().0.iter().take_while(plain).count() * STRIDE_BYTES
}

const HIGH_BIT: u8 = 0x80;

/// Its highest bit says whether `byte` is a control character or not ASCII. No comparison, so that whole vectors of bytes
/// take three instructions.
fn not_printable(byte: u8) -> u8 {
    byte | byte.wrapping_sub(b' ')
}

/// Its highest bit says whether `byte` is not printable, a quote or a backslash.
fn not_plain(byte: u8) -> u8 {
    not_printable(byte) | (byte ^ b'"').wrapping_sub(1) | (byte ^ b'\\').wrapping_sub(1)
}

const ONES: u64 = u64::MAX / 0xff;
const HIGH_BITS: u64 = ONES * HIGH_BIT as u64;

/// The highest bit of each byte that is a quote or a backslash; bytes above the first such one may be marked wrongly
/// (Mycroft's test for zero bytes, from a borrow of the one below).
fn quotes(word: u64) -> u64 {
    let equal = |byte: u8| below(word ^ (ONES * u64::from(byte)), 1);
    equal(b'"') | equal(b'\\')
}

/// The same of each byte that is not plain.
fn special_bytes(word: u64) -> u64 {
    quotes(word) | below(word, b' ') | (word & HIGH_BITS)
}

/// The highest bit of each byte below `bound`, and maybe of bytes above the first such one.
fn below(word: u64, bound: u8) -> u64 {
    word.wrapping_sub(ONES * u64::from(bound)) & !word & HIGH_BITS
}
