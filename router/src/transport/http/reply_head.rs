//! The head of a worker's answer (RFC 9112, sections 4 to 6): what it says of its body, and of the connection.

use std::mem::MaybeUninit;

use bytes::{Buf, Bytes};
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode};

use super::framing::{Framing, KeepAlive};
use super::link::Failed;
use crate::http1::MAX_FIELDS;
use crate::transport::Broken;

/// A reply's head; engines send a few hundred bytes.
pub(super) const MAX_HEAD_BYTES: usize = 64 << 10;

/// A head, read.
pub(super) struct ReplyHead {
    pub(super) response: Response<()>,
    pub(super) framing: Framing,
    pub(super) keep_alive: KeepAlive,
}

/// What was found at the beginning of an answer.
pub(super) enum Read {
    /// Its head, and what comes after it.
    Whole(ReplyHead, Bytes),
    /// A part of it.
    Part(Bytes),
}

/// Reads the head at the beginning of `bytes`. What comes before it to say that one should wait (100, 103) is left out.
pub(super) fn read_head(mut bytes: Bytes) -> Result<Read, Failed> {
    loop {
        let Some((head_bytes, head)) = parse(&bytes)? else { return Ok(Read::Part(bytes)) };
        bytes.advance(head_bytes);
        match head.response.status() {
            StatusCode::SWITCHING_PROTOCOLS => {
                return Err(Failed::Ambiguous("switches protocols, which nobody asked for"));
            }
            status if status.is_informational() => {}
            _ => return Ok(Read::Whole(head, bytes)),
        }
    }
}

/// The head at the beginning of `bytes`, and its length; `None` if there is more of it to come.
fn parse(bytes: &Bytes) -> Result<Option<(usize, ReplyHead)>, Failed> {
    const NO_HEAD: Failed = Failed::Broken(Broken::Malformed("is not HTTP/1"));
    let mut fields = [const { MaybeUninit::uninit() }; MAX_FIELDS];
    let mut parsed = httparse::Response::new(&mut []);
    let config = httparse::ParserConfig::default();
    // What comes after a head may be as long as it will, and may have come along with it.
    let within = &bytes[..bytes.len().min(MAX_HEAD_BYTES)];
    let head_bytes = match config.parse_response_with_uninit_headers(&mut parsed, within, &mut fields) {
        Ok(httparse::Status::Complete(head_bytes)) => head_bytes,
        Ok(httparse::Status::Partial) if within.len() < MAX_HEAD_BYTES => return Ok(None),
        Ok(httparse::Status::Partial) => {
            return Err(Failed::Broken(Broken::Malformed("has a head of more than 64 KiB")));
        }
        Err(httparse::Error::TooManyHeaders) => {
            return Err(Failed::Broken(Broken::Malformed("has more than 100 fields")));
        }
        Err(_) => return Err(NO_HEAD),
    };
    let status = parsed.code.and_then(|code| StatusCode::from_u16(code).ok()).ok_or(NO_HEAD)?;
    let version = if parsed.version == Some(0) { Version::Http10 } else { Version::Http11 };
    let mut facts = Facts::default();
    let mut headers = HeaderMap::with_capacity(parsed.headers.len() + 4);
    for field in &*parsed.headers {
        if facts.take(field.name, field.value)? == Takes::Whole {
            continue;
        }
        let name = HeaderName::from_bytes(field.name.as_bytes()).map_err(|_| NO_HEAD)?;
        // Shares the bytes, and looks at each once more: there is no other way without `unsafe`.
        let value = HeaderValue::from_maybe_shared(bytes.slice_ref(field.value)).map_err(|_| NO_HEAD)?;
        headers.append(name, value);
    }
    let (framing, keep_alive) = facts.end(version, status)?;
    let mut response = Response::new(());
    *response.status_mut() = status;
    *response.headers_mut() = headers;
    Ok(Some((head_bytes, ReplyHead { response, framing, keep_alive })))
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Version {
    Http10,
    Http11,
}

/// What a head says of its body and its connection.
#[derive(Default)]
struct Facts {
    codings: usize,
    chunked: bool,
    content_length: Option<u64>,
    close: bool,
    keep_alive: bool,
}

/// Whether a field is of interest to anyone else.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Takes {
    /// It belongs to this connection alone.
    Whole,
    /// The client gets it, too.
    Note,
}

impl Facts {
    /// The next field.
    fn take(&mut self, name: &str, value: &[u8]) -> Result<Takes, Failed> {
        match name.len() {
            17 if name.eq_ignore_ascii_case("transfer-encoding") => {
                self.codings += 1;
                self.chunked = value.eq_ignore_ascii_case(b"chunked");
                Ok(Takes::Whole)
            }
            14 if name.eq_ignore_ascii_case("content-length") => {
                self.length(value)?;
                Ok(Takes::Note)
            }
            10 if name.eq_ignore_ascii_case("connection") => Ok(self.connection(value)),
            10 if name.eq_ignore_ascii_case("keep-alive") => Ok(Takes::Whole),
            _ => Ok(Takes::Note),
        }
    }

    /// Once, or several times the same.
    fn length(&mut self, value: &[u8]) -> Result<(), Failed> {
        let digits =
            std::str::from_utf8(value).ok().filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
        let bytes = digits.and_then(|digits| digits.parse().ok());
        let bytes =
            bytes.ok_or(Failed::Broken(Broken::Malformed("has a content-length that is no length")))?;
        if self.content_length.replace(bytes).is_some_and(|other| other != bytes) {
            return Err(Failed::Broken(Broken::Malformed("has two content-lengths")));
        }
        Ok(())
    }

    /// Goes on only if it names other fields, which are taken out with it.
    fn connection(&mut self, value: &[u8]) -> Takes {
        let mut takes = Takes::Whole;
        for token in value.split(|byte| *byte == b',').map(<[u8]>::trim_ascii) {
            if token.eq_ignore_ascii_case(b"close") {
                self.close = true;
            } else if token.eq_ignore_ascii_case(b"keep-alive") {
                self.keep_alive = true;
            } else {
                takes = Takes::Note;
            }
        }
        takes
    }

    /// Where the body ends, and whether the connection goes on. Refuses what two readers could understand differently.
    fn end(self, version: Version, status: StatusCode) -> Result<(Framing, KeepAlive), Failed> {
        if self.codings > 0 && version == Version::Http10 {
            return Err(Failed::Broken(Broken::Malformed("has a transfer-encoding in HTTP/1.0")));
        }
        if self.codings > 0 && self.content_length.is_some() {
            return Err(Failed::Ambiguous("has both transfer-encoding and content-length"));
        }
        if self.codings > 1 || (self.codings == 1 && !self.chunked) {
            return Err(Failed::Ambiguous("has a transfer-encoding other than chunked"));
        }
        let framing = match self.content_length {
            _ if status.is_informational() => Framing::Done,
            _ if matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED) => Framing::Done,
            _ if self.chunked => Framing::Chunks(Box::default()),
            Some(bytes) => Framing::length(bytes),
            None => Framing::ToTheEnd,
        };
        // HTTP/1.1 keeps it open unless it says otherwise, 1.0 only if it says so.
        let stays = !self.close && (version == Version::Http11 || self.keep_alive);
        let keep_alive = if stays && framing != Framing::ToTheEnd { KeepAlive::Yes } else { KeepAlive::No };
        Ok((framing, keep_alive))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(bytes: &str) -> (ReplyHead, Bytes) {
        match read_head(Bytes::copy_from_slice(bytes.as_bytes())) {
            Ok(Read::Whole(head, rest)) => (head, rest),
            Ok(Read::Part(_)) => panic!("{bytes:?} is not whole"),
            Err(_) => panic!("{bytes:?} is refused"),
        }
    }

    #[test]
    fn heads_say_where_bodies_end_and_whether_connections_stay() {
        use KeepAlive::{No, Yes};
        let chunks = || Framing::Chunks(Box::default());
        for (head, framing, keep_alive) in [
            ("HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n", Framing::Length(3), Yes),
            ("HTTP/1.1 200 OK\r\ncontent-length: 3\r\ncontent-length: 3\r\n\r\n", Framing::Length(3), Yes),
            ("HTTP/1.1 200\r\ncontent-length: 0\r\n\r\n", Framing::Done, Yes),
            ("HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n", chunks(), Yes),
            ("HTTP/1.1 200 OK\r\nconnection: x, Close\r\ncontent-length: 3\r\n\r\n", Framing::Length(3), No),
            ("HTTP/1.1 200 OK\r\n\r\n", Framing::ToTheEnd, No),
            ("HTTP/1.0 200 OK\r\ncontent-length: 3\r\n\r\n", Framing::Length(3), No),
            (
                "HTTP/1.0 200 OK\r\nconnection: keep-alive\r\ncontent-length: 3\r\n\r\n",
                Framing::Length(3),
                Yes,
            ),
            ("HTTP/1.1 204 No Content\r\n\r\n", Framing::Done, Yes),
            ("HTTP/1.1 304 Not Modified\r\ncontent-length: 9\r\n\r\n", Framing::Done, Yes),
            ("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 x\r\n\r\n", Framing::Done, Yes),
        ] {
            let (read, rest) = read(&format!("{head}rest"));
            assert_eq!((read.framing, read.keep_alive), (framing, keep_alive), "{head}");
            assert_eq!(rest, "rest");
        }
    }

    #[test]
    fn values_keep_their_bytes() {
        let (head, _) = read("HTTP/1.1 418 x\r\nx-a:  b c \r\nx-a: d\r\ncontent-length: 0\r\n\r\n");
        assert_eq!(head.response.status(), 418);
        let values: Vec<_> = head.response.headers().get_all("x-a").iter().collect();
        assert_eq!(values, ["b c", "d"]);
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = read_head(Bytes::from(bytes));
        }

        #[test]
        fn a_head_is_whole_with_its_last_byte(at in 0_usize..60) {
            let head = "HTTP/1.1 200 OK\r\ncontent-length: 3\r\nx: y\r\n\r\n";
            let cut = at.min(head.len() - 1);
            prop_assert!(matches!(read_head(Bytes::copy_from_slice(&head.as_bytes()[..cut])), Ok(Read::Part(_))));
        }
    }
}
