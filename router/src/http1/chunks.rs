//! A body in chunks (RFC 9112, section 7.1).

use super::field::field;
use super::lines::{Fault, Lines};
use super::{MAX_CHUNK_LINE_BYTES, MAX_EXTENSION_BYTES, MAX_FIELDS, MAX_TRAILER_BYTES};

/// What is wrong with a chunked body.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ChunkFault {
    /// A chunk's size is no number, or too large.
    #[error("the size of a chunk is not a hexadecimal number of at most 16 digits")]
    Size,
    /// A chunk's line is too long.
    #[error("the extensions of chunks are too long")]
    Extension,
    /// A line between chunks is not as it must be.
    #[error("a chunk does not end in CR LF")]
    End,
    /// Trailers too large or too many.
    #[error("the trailers of the body are too long")]
    Trailers,
}

/// What some bytes of a chunked body were.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Taken {
    /// How many of them.
    pub(crate) bytes: usize,
    /// What.
    pub(crate) part: Part,
}

impl Taken {
    fn framing(bytes: usize) -> Self {
        Self { bytes, part: Part::Framing }
    }
}

/// A part of a chunked body.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Part {
    /// Sizes, ends of lines, trailers.
    Framing,
    /// What the body is about.
    Data,
    /// The last of its framing.
    End,
}

/// The chunked body that is being read.
#[derive(Debug)]
pub(crate) struct Chunks {
    lines: Lines,
    at: At,
    extension_bytes: usize,
    trailers: usize,
}

#[derive(Clone, Copy, Debug)]
enum At {
    Size,
    Data(u64),
    Cr,
    Lf,
    Trailers,
}

impl Default for Chunks {
    fn default() -> Self {
        Self { lines: Lines::new(MAX_CHUNK_LINE_BYTES), at: At::Size, extension_bytes: 0, trailers: 0 }
    }
}

impl Chunks {
    /// Takes what it can of `bytes`, which are not empty.
    ///
    /// # Errors
    /// When they are no chunks; then nothing more may be pushed.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> Result<Taken, ChunkFault> {
        match self.at {
            At::Size => {
                let (taken, line) = self.lines.read(bytes).map_err(|fault| match fault {
                    Fault::TooLong => ChunkFault::Extension,
                    _ => ChunkFault::End,
                })?;
                let Some(line) = line else { return Ok(Taken::framing(taken)) };
                let (size, extension_bytes) = chunk_line(line)?;
                self.extension_bytes += extension_bytes;
                if self.extension_bytes > MAX_EXTENSION_BYTES {
                    return Err(ChunkFault::Extension);
                }
                self.lines.restart(if size == 0 { MAX_TRAILER_BYTES } else { MAX_CHUNK_LINE_BYTES });
                self.at = if size == 0 { At::Trailers } else { At::Data(size) };
                Ok(Taken::framing(taken))
            }
            At::Data(left) => {
                let taken = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len());
                let left = left - taken as u64;
                self.at = if left == 0 { At::Cr } else { At::Data(left) };
                Ok(Taken { bytes: taken, part: Part::Data })
            }
            At::Cr => self.expect(bytes, b'\r', At::Lf),
            At::Lf => self.expect(bytes, b'\n', At::Size),
            At::Trailers => self.trailer(bytes),
        }
    }

    /// The data of `bytes`, if they are one whole chunk and nothing else, with nothing before it: what a token mostly is, and
    /// then there is no more to do. Otherwise they are to be [pushed](Self::push).
    #[inline]
    pub(crate) fn only_chunk<'a>(&self, bytes: &'a [u8]) -> Option<&'a [u8]> {
        if !matches!(self.at, At::Size) || self.lines.seen_bytes() > 0 {
            return None;
        }
        let mut size = 0;
        let mut digits = 0;
        while let Some(digit) = bytes.get(digits).and_then(|byte| char::from(*byte).to_digit(16)) {
            size = size << 4 | digit as usize;
            digits += 1;
            if size > bytes.len() {
                return None;
            }
        }
        if digits == 0 || digits > 16 || size == 0 {
            return None;
        }
        let data = bytes[digits..].strip_prefix(b"\r\n")?.strip_suffix(b"\r\n")?;
        (data.len() == size).then_some(data)
    }

    /// Whether the next byte is data.
    pub(crate) fn is_at_data(&self) -> bool {
        matches!(self.at, At::Data(_))
    }

    fn expect(&mut self, bytes: &[u8], byte: u8, then: At) -> Result<Taken, ChunkFault> {
        if bytes.first() != Some(&byte) {
            return Err(ChunkFault::End);
        }
        self.at = then;
        Ok(Taken::framing(1))
    }

    fn trailer(&mut self, bytes: &[u8]) -> Result<Taken, ChunkFault> {
        let (taken, line) = self.lines.read(bytes).map_err(|fault| match fault {
            Fault::TooLong => ChunkFault::Trailers,
            _ => ChunkFault::End,
        })?;
        let Some(line) = line else { return Ok(Taken::framing(taken)) };
        if line.is_empty() {
            return Ok(Taken { bytes: taken, part: Part::End });
        }
        self.trailers += 1;
        if self.trailers > MAX_FIELDS {
            return Err(ChunkFault::Trailers);
        }
        field(line).map_err(|_| ChunkFault::End)?;
        Ok(Taken::framing(taken))
    }
}

/// A chunk's size, and how many bytes of extensions come after it.
fn chunk_line(line: &[u8]) -> Result<(u64, usize), ChunkFault> {
    let digits = line.iter().take_while(|byte| byte.is_ascii_hexdigit()).count();
    if digits == 0 || digits > 16 {
        return Err(ChunkFault::Size);
    }
    let text = std::str::from_utf8(&line[..digits]).map_err(|_| ChunkFault::Size)?;
    let size = u64::from_str_radix(text, 16).map_err(|_| ChunkFault::Size)?;
    let extensions = &line[digits..];
    match extensions.trim_ascii_start().first() {
        None if extensions.is_empty() => Ok((size, 0)),
        Some(b';') => Ok((size, extensions.len())),
        _ => Err(ChunkFault::Size),
    }
}
