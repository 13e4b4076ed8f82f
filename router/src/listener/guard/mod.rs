//! Watches the framing of everything a client sends over HTTP/1, and refuses what two readers could understand differently.
//!
//! hyper is liberal in what it takes: a request with both `Content-Length` and `Transfer-Encoding`, or with bare line feeds.
//! A proxy in front of the router that reads such bytes in another way would see other requests than the router does, which
//! is how requests are smuggled. So the guard sees each byte before hyper and follows RFC 9112 to the letter: head, body by
//! length or by chunks, next head. It is a state machine that is pushed bytes; it does no I/O, holds none of the bytes
//! (except for the beginning of a line that was cut), and its verdict does not depend on where they were cut.
//! Next: [`http1_stream`](super::http1_stream), which reads through it.

mod head;

use head::Head;

use crate::http1::{ChunkFault, Chunks, Part};

/// How large a head may be.
#[derive(Clone, Copy, Debug)]
pub struct HeadLimits {
    /// Bytes of request line and fields, line ends included.
    pub max_head_bytes: usize,
}

/// What is wrong with what a client sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Violation {
    /// No HTTP/1 at all: the preface of HTTP/2.
    #[error("the connection begins with the preface of HTTP/2")]
    Http2Preface,
    /// The request line has not three parts.
    #[error("the request line is not METHOD TARGET HTTP/1.1")]
    RequestLine,
    /// The method is no token.
    #[error("the method has characters that no method has")]
    Method,
    /// The target is none of the known forms, or has characters that must be percent-encoded.
    #[error(
        "the request target is no path and no absolute URL, or has characters that must be percent-encoded"
    )]
    Target,
    /// The target is longer than can be held.
    #[error("the request target is longer than 65534 bytes")]
    TargetTooLong,
    /// The version is not 1.0 or 1.1.
    #[error("this listener speaks HTTP/1.0, HTTP/1.1 and HTTP/2")]
    Version,
    /// CONNECT.
    #[error("CONNECT is not served here")]
    Connect,
    /// A line ends in LF alone.
    #[error("a line ends without a carriage return")]
    BareLf,
    /// A CR that ends no line.
    #[error("a carriage return stands alone")]
    BareCr,
    /// A control character.
    #[error("there is a control character in the head")]
    Control,
    /// A field continues on the next line.
    #[error("a header field is continued on the next line")]
    Folded,
    /// A field's name is no token, or is missing.
    #[error("a header field has no valid name")]
    FieldName,
    /// Whitespace between a field's name and its colon.
    #[error("there is whitespace between the name of a header field and its colon")]
    SpaceBeforeColon,
    /// Head too large.
    #[error("the head is larger than --max-header-bytes allows")]
    HeadTooLarge,
    /// Too many fields.
    #[error("there are more than 100 header fields")]
    TooManyFields,
    /// No `Host` in HTTP/1.1.
    #[error("HTTP/1.1 needs a host header")]
    HostMissing,
    /// More than one `Host`.
    #[error("there is more than one host header")]
    HostRepeated,
    /// `Host` is no host.
    #[error("the host header has characters that no host has")]
    HostInvalid,
    /// `Content-Length` is no number.
    #[error("content-length is not one decimal number")]
    ContentLength,
    /// `Content-Length` more than once.
    #[error("there is more than one content-length header")]
    ContentLengthRepeated,
    /// Both ways to say where the body ends.
    #[error("there are both content-length and transfer-encoding")]
    LengthAndCoding,
    /// `Transfer-Encoding` is not `chunked`, once.
    #[error("transfer-encoding is not chunked, once")]
    TransferEncoding,
    /// A transfer coding that is not `chunked`.
    #[error("the only transfer coding served here is chunked")]
    UnknownCoding,
    /// `Transfer-Encoding` in HTTP/1.0.
    #[error("HTTP/1.0 has no transfer-encoding")]
    CodingInHttp10,
    /// The head took too long.
    #[error("the request head did not arrive within --client-timeout")]
    HeadTimeout,
    /// A fault in a chunked body.
    #[error(transparent)]
    Chunk(#[from] ChunkFault),
}

impl Violation {
    /// Whether it was found in a body. Its request has been passed on by then, and is the one to answer.
    #[must_use]
    pub fn is_in_body(self) -> bool {
        matches!(self, Self::Chunk(_))
    }
}

/// The end of what may be passed on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Refused {
    /// How many of the bytes pushed come before the message at fault (or before its fault, in a body).
    pub good_bytes: usize,
    /// What is wrong.
    pub violation: Violation,
}

/// Where in its stream of messages a client is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Position {
    /// A message has ended, or none has begun.
    Between,
    /// Within a head.
    Head,
    /// Within a body.
    Body,
}

/// How the body after a head ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Framing {
    /// After so many bytes, which may be none.
    Length(u64),
    /// With a chunk of size 0.
    Chunked,
}

/// The guard of one connection.
#[derive(Debug)]
pub struct HeadGuard {
    at: At,
    head: Head,
    messages: u64,
    refused: Option<Violation>,
}

#[derive(Debug)]
enum At {
    Head,
    Length(u64),
    Chunks(Box<Chunks>),
}

impl HeadGuard {
    /// The guard of a new connection.
    #[must_use]
    pub fn new(limits: HeadLimits) -> Self {
        Self { at: At::Head, head: Head::new(limits.max_head_bytes), messages: 0, refused: None }
    }

    /// Where the bytes pushed so far end.
    #[must_use]
    pub fn position(&self) -> Position {
        match &self.at {
            At::Head if self.head.has_begun() => Position::Head,
            At::Head => Position::Between,
            At::Length(_) | At::Chunks(_) => Position::Body,
        }
    }

    /// Messages that have come whole.
    #[must_use]
    pub fn messages(&self) -> u64 {
        self.messages
    }

    /// Judges the next bytes of the connection. Returns how many of them come before the head that is not whole yet, if there is
    /// one.
    ///
    /// # Errors
    /// When they are refused; then nothing after [`Refused::good_bytes`] may be read as a message, now or later.
    pub fn push(&mut self, bytes: &[u8]) -> Result<usize, Refused> {
        if let Some(violation) = self.refused {
            return Err(Refused { good_bytes: 0, violation });
        }
        // Bytes before `good` belong to messages (or parts of bodies) that are in order.
        let (mut next, mut good) = (0, 0);
        while next < bytes.len() {
            match self.step(&bytes[next..]) {
                Ok(taken) => next += taken,
                Err(violation) => {
                    self.refused = Some(violation);
                    return Err(Refused { good_bytes: good, violation });
                }
            }
            if !matches!(self.at, At::Head) || !self.head.has_begun() {
                good = next;
            }
        }
        Ok(good)
    }

    /// Takes what it can of `bytes`, at least one.
    fn step(&mut self, bytes: &[u8]) -> Result<usize, Violation> {
        let (taken, ended) = match &mut self.at {
            At::Head => {
                let (taken, framing) = self.head.push(bytes, self.messages == 0)?;
                match framing {
                    None => return Ok(taken),
                    Some(Framing::Length(0)) => (taken, true),
                    Some(Framing::Length(length)) => {
                        self.at = At::Length(length);
                        (taken, false)
                    }
                    Some(Framing::Chunked) => {
                        self.at = At::Chunks(Box::default());
                        (taken, false)
                    }
                }
            }
            At::Length(left) => {
                let taken = usize::try_from(*left).unwrap_or(usize::MAX).min(bytes.len());
                *left -= taken as u64;
                (taken, *left == 0)
            }
            At::Chunks(chunks) => {
                let taken = chunks.push(bytes)?;
                (taken.bytes, taken.part == Part::End)
            }
        };
        if ended {
            self.at = At::Head;
            self.messages += 1;
        }
        Ok(taken)
    }
}

#[cfg(test)]
mod tests;
