//! A request's head: request line and fields, and what they say of the body (RFC 9112, sections 2 to 6).

use memchr::{memchr, memrchr};

use super::{Framing, Violation};
use crate::http1::{Fault, FieldFault, Lines, MAX_FIELDS, TOKEN, byte_table, count_controls, field};

/// What can be held of a target.
const MAX_TARGET_BYTES: usize = 65_534;

impl From<Fault> for Violation {
    fn from(fault: Fault) -> Self {
        match fault {
            Fault::TooLong => Self::HeadTooLarge,
            Fault::BareLf => Self::BareLf,
            Fault::BareCr => Self::BareCr,
            Fault::Control => Self::Control,
        }
    }
}

impl From<FieldFault> for Violation {
    fn from(fault: FieldFault) -> Self {
        match fault {
            FieldFault::Folded => Self::Folded,
            FieldFault::SpaceBeforeColon => Self::SpaceBeforeColon,
            FieldFault::Name => Self::FieldName,
        }
    }
}

/// The head that is being read.
#[derive(Debug)]
pub(super) struct Head {
    lines: Lines,
    max_bytes: usize,
    facts: Facts,
}

impl Head {
    pub(super) fn new(max_bytes: usize) -> Self {
        Self { lines: Lines::new(max_bytes), max_bytes, facts: Facts::default() }
    }

    pub(super) fn has_begun(&self) -> bool {
        self.lines.seen_bytes() > 0
    }

    /// Takes bytes up to the end of the head: how many, and the framing if that end has come. `first` is whether nothing has
    /// come before it on its connection.
    pub(super) fn push(&mut self, bytes: &[u8], first: bool) -> Result<(usize, Option<Framing>), Violation> {
        if !self.has_begun()
            && let Some((taken, framing)) = self.whole(bytes, first)
        {
            return Ok((taken, Some(framing)));
        }
        let mut next = 0;
        while next < bytes.len() {
            let (taken, line) = self.lines.read(&bytes[next..])?;
            next += taken;
            let Some(line) = line else { break };
            if let Some(framing) = self.facts.line(line, first)? {
                self.lines.restart(self.max_bytes);
                self.facts = Facts::default();
                return Ok((next, Some(framing)));
            }
        }
        Ok((next, None))
    }

    /// The same for a head that is whole and in order, as most are. Of any other the way of lines finds out what is wrong.
    #[inline]
    fn whole(&self, bytes: &[u8], first: bool) -> Option<(usize, Framing)> {
        let mut facts = Facts::default();
        let (mut next, mut lines) = (0, 0);
        loop {
            let line = &bytes[next..];
            let line = line[..memchr(b'\n', line)?].strip_suffix(b"\r")?;
            next += line.len() + 2;
            lines += 1;
            if next > self.max_bytes {
                return None;
            }
            if let Some(framing) = facts.line(line, first).ok()? {
                // The ends of the lines must be the only controls.
                return (count_controls(&bytes[..next]) == 2 * lines).then_some((next, framing));
            }
        }
    }
}

/// What is known of a head.
#[derive(Debug, Default)]
struct Facts {
    version: Option<Version>,
    /// The empty line that some clients send after a body has been skipped.
    skipped: bool,
    fields: usize,
    has_host: bool,
    chunked: bool,
    content_length: Option<u64>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Version {
    Http10,
    Http11,
}

impl Facts {
    /// The next line; the framing once it was the last.
    #[inline]
    fn line(&mut self, line: &[u8], first: bool) -> Result<Option<Framing>, Violation> {
        let Some(version) = self.version else {
            if line.is_empty() && !self.skipped {
                self.skipped = true;
            } else {
                self.version = Some(request_line(line, first)?);
            }
            return Ok(None);
        };
        if line.is_empty() {
            return self.end(version).map(Some);
        }
        self.fields += 1;
        if self.fields > MAX_FIELDS {
            return Err(Violation::TooManyFields);
        }
        let (name, value) = field(line)?;
        match name.len() {
            4 if name.eq_ignore_ascii_case(b"host") => self.host(value.trim_ascii())?,
            14 if name.eq_ignore_ascii_case(b"content-length") => self.content_length(value.trim_ascii())?,
            17 if name.eq_ignore_ascii_case(b"transfer-encoding") => {
                self.coding(value.trim_ascii(), version)?;
            }
            _ => {}
        }
        Ok(None)
    }

    fn end(&self, version: Version) -> Result<Framing, Violation> {
        if !self.has_host && version == Version::Http11 {
            return Err(Violation::HostMissing);
        }
        if self.chunked {
            return Ok(Framing::Chunked);
        }
        Ok(Framing::Length(self.content_length.unwrap_or(0)))
    }

    fn host(&mut self, value: &[u8]) -> Result<(), Violation> {
        if std::mem::replace(&mut self.has_host, true) {
            return Err(Violation::HostRepeated);
        }
        if value.iter().all(|byte| HOST[usize::from(*byte)]) { Ok(()) } else { Err(Violation::HostInvalid) }
    }

    fn content_length(&mut self, value: &[u8]) -> Result<(), Violation> {
        if self.content_length.is_some() {
            return Err(Violation::ContentLengthRepeated);
        }
        if self.chunked {
            return Err(Violation::LengthAndCoding);
        }
        let add = |length: u64, digit: &u8| {
            let digit = digit.is_ascii_digit().then(|| u64::from(digit - b'0'))?;
            length.checked_mul(10)?.checked_add(digit).filter(|length| *length <= i64::MAX as u64)
        };
        let length = value.iter().try_fold(0, add).filter(|_| !value.is_empty());
        self.content_length = Some(length.ok_or(Violation::ContentLength)?);
        Ok(())
    }

    fn coding(&mut self, value: &[u8], version: Version) -> Result<(), Violation> {
        if version == Version::Http10 {
            return Err(Violation::CodingInHttp10);
        }
        if self.content_length.is_some() {
            return Err(Violation::LengthAndCoding);
        }
        if std::mem::replace(&mut self.chunked, true) {
            return Err(Violation::TransferEncoding);
        }
        if value.eq_ignore_ascii_case(b"chunked") {
            return Ok(());
        }
        let mut codings = value.split(|byte| *byte == b',').map(<[u8]>::trim_ascii);
        let unknown = |coding: &[u8]| {
            !coding.eq_ignore_ascii_case(b"chunked") && !coding.is_empty() && is_token(coding)
        };
        Err(if codings.any(unknown) { Violation::UnknownCoding } else { Violation::TransferEncoding })
    }
}

fn request_line(line: &[u8], first: bool) -> Result<Version, Violation> {
    let (Some(space), Some(last_space)) = (memchr(b' ', line), memrchr(b' ', line)) else {
        return Err(Violation::RequestLine);
    };
    if space == last_space {
        return Err(Violation::RequestLine);
    }
    let (method, target, version) = (&line[..space], &line[space + 1..last_space], &line[last_space + 1..]);
    if first && line == b"PRI * HTTP/2.0" {
        return Err(Violation::Http2Preface);
    }
    if !is_token(method) {
        return Err(Violation::Method);
    }
    let version = match version {
        b"HTTP/1.1" => Version::Http11,
        b"HTTP/1.0" => Version::Http10,
        [b'H', b'T', b'T', b'P', b'/', major, b'.', minor]
            if major.is_ascii_digit() && minor.is_ascii_digit() =>
        {
            return Err(Violation::Version);
        }
        _ => return Err(Violation::RequestLine),
    };
    if method == b"CONNECT" {
        return Err(Violation::Connect);
    }
    if target.len() > MAX_TARGET_BYTES {
        return Err(Violation::TargetTooLong);
    }
    if is_target(method, target) { Ok(version) } else { Err(Violation::Target) }
}

/// A path, an absolute URL, or `*` for OPTIONS (RFC 9112, section 3.2).
fn is_target(method: &[u8], target: &[u8]) -> bool {
    if !target.iter().all(|byte| TARGET[usize::from(*byte)]) {
        return false;
    }
    match target {
        [b'/', ..] => true,
        b"*" => method == b"OPTIONS",
        // A server must take it, though only proxies are sent it.
        _ => http::Uri::try_from(target).is_ok_and(|uri| {
            matches!(uri.scheme_str(), Some("http" | "https"))
                && uri.host().is_some_and(|host| !host.is_empty())
        }),
    }
}

#[inline]
fn is_token(bytes: &[u8]) -> bool {
    !bytes.is_empty() && bytes.iter().all(|byte| TOKEN[usize::from(*byte)])
}

/// What the crate `http` takes in paths and in queries alike. No `#`: a fragment is never sent.
const TARGET: [bool; 256] = byte_table(b"!$%&'()*+,-./:;=?@[\\]^_{|}~");
/// RFC 3986, section 3.2.2, less the comma, which would make a list.
const HOST: [bool; 256] = byte_table(b"-._~!$&'()*+;=:[]%");
