//! A body in chunks (RFC 9112, section 7.1).

use super::head::field;
use super::lines::{Fault, Lines};
use super::{MAX_CHUNK_LINE_BYTES, MAX_EXTENSION_BYTES, MAX_FIELDS, MAX_TRAILER_BYTES, Violation};

/// The chunked body that is being read.
#[derive(Debug)]
pub(super) struct Chunks {
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
    /// Takes what it can of `bytes`: how many, and whether the body has ended.
    pub(super) fn push(&mut self, bytes: &[u8]) -> Result<(usize, bool), Violation> {
        match self.at {
            At::Size => {
                let (taken, line) = self.lines.read(bytes).map_err(|fault| match fault {
                    Fault::TooLong => Violation::ChunkExtension,
                    _ => Violation::ChunkEnd,
                })?;
                let Some(line) = line else { return Ok((taken, false)) };
                let (size, extension_bytes) = chunk_line(line)?;
                self.extension_bytes += extension_bytes;
                if self.extension_bytes > MAX_EXTENSION_BYTES {
                    return Err(Violation::ChunkExtension);
                }
                self.lines.restart(if size == 0 { MAX_TRAILER_BYTES } else { MAX_CHUNK_LINE_BYTES });
                self.at = if size == 0 { At::Trailers } else { At::Data(size) };
                Ok((taken, false))
            }
            At::Data(left) => {
                let taken = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len());
                let left = left - taken as u64;
                self.at = if left == 0 { At::Cr } else { At::Data(left) };
                Ok((taken, false))
            }
            At::Cr => self.expect(bytes, b'\r', At::Lf),
            At::Lf => self.expect(bytes, b'\n', At::Size),
            At::Trailers => self.trailer(bytes),
        }
    }

    fn expect(&mut self, bytes: &[u8], byte: u8, then: At) -> Result<(usize, bool), Violation> {
        if bytes.first() != Some(&byte) {
            return Err(Violation::ChunkEnd);
        }
        self.at = then;
        Ok((1, false))
    }

    fn trailer(&mut self, bytes: &[u8]) -> Result<(usize, bool), Violation> {
        let (taken, line) = self.lines.read(bytes).map_err(|fault| match fault {
            Fault::TooLong => Violation::TrailersTooLarge,
            _ => Violation::ChunkEnd,
        })?;
        let Some(line) = line else { return Ok((taken, false)) };
        if line.is_empty() {
            return Ok((taken, true));
        }
        self.trailers += 1;
        if self.trailers > MAX_FIELDS {
            return Err(Violation::TrailersTooLarge);
        }
        field(line).map_err(|_| Violation::ChunkEnd)?;
        Ok((taken, false))
    }
}

/// A chunk's size, and how many bytes of extensions come after it.
fn chunk_line(line: &[u8]) -> Result<(u64, usize), Violation> {
    let digits = line.iter().take_while(|byte| byte.is_ascii_hexdigit()).count();
    if digits == 0 || digits > 16 {
        return Err(Violation::ChunkSize);
    }
    let text = std::str::from_utf8(&line[..digits]).map_err(|_| Violation::ChunkSize)?;
    let size = u64::from_str_radix(text, 16).map_err(|_| Violation::ChunkSize)?;
    let extensions = &line[digits..];
    match extensions.trim_ascii_start().first() {
        None if extensions.is_empty() => Ok((size, 0)),
        Some(b';') => Ok((size, extensions.len())),
        _ => Err(Violation::ChunkSize),
    }
}
