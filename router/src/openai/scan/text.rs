//! The inside of a JSON string, at memory speed: looks for its end, and checks what lies before it in one go.
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
    partial_bytes: usize,
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

/// Something wrong, and the offset in the body where.
pub(super) type Fault = (Problem, usize);

/// What follows a run of plain characters.
#[derive(Clone, Copy, PartialEq, Eq)]
enum RunEnd {
    /// A quote or a backslash.
    Ascii,
    /// The next piece.
    Piece,
}

impl Text {
    /// Goes on at `at` in `piece`, which begins at `offset` in the body. Returns where the closing quote is, or `None` if
    /// it is not in this piece.
    pub(super) fn advance(
        &mut self,
        piece: &[u8],
        mut at: usize,
        offset: usize,
    ) -> Result<Option<usize>, Fault> {
        if self.partial_bytes > 0 && !self.complete_character(piece, &mut at, offset)? {
            return Ok(None);
        }
        loop {
            while self.escape != Escape::No {
                let Some(&byte) = piece.get(at) else { return Ok(None) };
                self.escape(byte).map_err(|problem| (problem, offset + at))?;
                at += 1;
            }
            let rest = &piece[at..];
            let Some(run_bytes) = memchr2(b'"', b'\\', rest) else {
                self.check(rest, offset + at, RunEnd::Piece)?;
                return Ok(None);
            };
            self.check(&rest[..run_bytes], offset + at, RunEnd::Ascii)?;
            at += run_bytes;
            if piece[at] == b'"' {
                return Ok(Some(at));
            }
            self.escape = Escape::Begun;
            at += 1;
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

    fn escape(&mut self, byte: u8) -> Result<(), Problem> {
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

    /// Checks characters that need no escape. Most runs are ASCII, and for those this is one vectorised loop.
    fn check(&mut self, run: &[u8], offset: usize, end: RunEnd) -> Result<(), Fault> {
        let plain = |byte: u8| byte.wrapping_sub(b' ') < 0x60;
        if run.iter().fold(0, |odd, &byte| odd | u8::from(!plain(byte))) == 0 {
            return Ok(());
        }
        self.check_odd(run, offset, end)
    }

    fn check_odd(&mut self, run: &[u8], offset: usize, end: RunEnd) -> Result<(), Fault> {
        let control = |byte: u8| byte < b' ';
        let has_control = run.iter().fold(0, |any, &byte| any | u8::from(control(byte))) != 0;
        let control_at = if has_control { run.iter().position(|&byte| control(byte)) } else { None };
        // Whichever comes first is the error, so that cuts make no difference to it.
        let characters = &run[..control_at.unwrap_or(run.len())];
        match (std::str::from_utf8(characters), control_at) {
            (Ok(_), None) => Ok(()),
            (Ok(_), Some(at)) => Err((Problem::ControlCharacter, offset + at)),
            (Err(error), None) if error.error_len().is_none() && end == RunEnd::Piece => {
                let begun = &run[error.valid_up_to()..];
                self.partial[..begun.len()].copy_from_slice(begun);
                self.partial_bytes = begun.len();
                Ok(())
            }
            (Err(error), _) => Err((Problem::Utf8, offset + error.valid_up_to())),
        }
    }

    /// Whether the character that the last piece ended in is complete now.
    fn complete_character(&mut self, piece: &[u8], at: &mut usize, offset: usize) -> Result<bool, Fault> {
        let begun_at = offset + *at - self.partial_bytes;
        while let Some(&byte) = piece.get(*at) {
            self.partial[self.partial_bytes] = byte;
            let character = std::str::from_utf8(&self.partial[..=self.partial_bytes]);
            match character.map_err(|error| error.error_len()) {
                Ok(_) => {
                    self.partial_bytes = 0;
                    *at += 1;
                    return Ok(true);
                }
                Err(None) => {
                    self.partial_bytes += 1;
                    *at += 1;
                }
                Err(Some(_)) => return Err((Problem::Utf8, begun_at)),
            }
        }
        Ok(false)
    }
}

const HEX_DIGIT: &str = "a hexadecimal digit";
