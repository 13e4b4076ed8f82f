//! The head of a worker's answer (RFC 9112, sections 4 to 6): what it says of its body, and of the connection.

use std::mem::MaybeUninit;

use bytes::{Buf, Bytes};
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header};

use super::framing::{Framing, KeepAlive};
use super::link::Failed;
use crate::http1::MAX_FIELDS;
use crate::transport::Broken;

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
    let head_bytes = match config.parse_response_with_uninit_headers(&mut parsed, bytes, &mut fields) {
        Ok(httparse::Status::Complete(head_bytes)) => head_bytes,
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(httparse::Error::TooManyHeaders) => {
            return Err(Failed::Broken(Broken::Malformed("has more than 100 fields")));
        }
        Err(_) => return Err(NO_HEAD),
    };
    let status = parsed.code.and_then(|code| StatusCode::from_u16(code).ok()).ok_or(NO_HEAD)?;
    let mut headers = HeaderMap::with_capacity(parsed.headers.len() + 4);
    for field in &*parsed.headers {
        let name = HeaderName::from_bytes(field.name.as_bytes()).map_err(|_| NO_HEAD)?;
        // Shares the bytes, and looks at each once more: there is no other way without `unsafe`.
        let value = HeaderValue::from_maybe_shared(bytes.slice_ref(field.value)).map_err(|_| NO_HEAD)?;
        headers.append(name, value);
    }
    let version = if parsed.version == Some(0) { Version::Http10 } else { Version::Http11 };
    let framing = framing(version, status, &headers)?;
    let keep_alive = match framing {
        Framing::ToTheEnd => KeepAlive::No,
        _ => keep_alive(version, &headers),
    };
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

/// Where the body ends. Refuses what two readers could understand differently.
fn framing(version: Version, status: StatusCode, headers: &HeaderMap) -> Result<Framing, Failed> {
    let coded = headers.contains_key(header::TRANSFER_ENCODING);
    if coded && version == Version::Http10 {
        return Err(Failed::Broken(Broken::Malformed("has a transfer-encoding in HTTP/1.0")));
    }
    if coded {
        if headers.contains_key(header::CONTENT_LENGTH) {
            return Err(Failed::Ambiguous("has both transfer-encoding and content-length"));
        }
        let mut codings = headers.get_all(header::TRANSFER_ENCODING).iter();
        let only = codings.next().filter(|_| codings.next().is_none());
        if !only.is_some_and(|coding| coding.as_bytes().eq_ignore_ascii_case(b"chunked")) {
            return Err(Failed::Ambiguous("has a transfer-encoding other than chunked"));
        }
    }
    let length = content_length(headers)?;
    if status.is_informational() || matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED) {
        return Ok(Framing::Done);
    }
    Ok(match length {
        _ if coded => Framing::Chunks(Box::default()),
        Some(bytes) => Framing::length(bytes),
        None => Framing::ToTheEnd,
    })
}

/// What `Content-Length` says, once or several times the same.
fn content_length(headers: &HeaderMap) -> Result<Option<u64>, Failed> {
    let mut length = None;
    for value in headers.get_all(header::CONTENT_LENGTH) {
        let digits = value.to_str().ok().filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
        let bytes = digits.and_then(|digits| digits.parse::<u64>().ok());
        let bytes =
            bytes.ok_or(Failed::Broken(Broken::Malformed("has a content-length that is no length")))?;
        if length.replace(bytes).is_some_and(|other| other != bytes) {
            return Err(Failed::Broken(Broken::Malformed("has two content-lengths")));
        }
    }
    Ok(length)
}

/// Whether the connection stays open: in HTTP/1.1 unless it says otherwise, in 1.0 only if it says so.
fn keep_alive(version: Version, headers: &HeaderMap) -> KeepAlive {
    let says = |wanted: &str| {
        let values = headers.get_all(header::CONNECTION).iter();
        let mut tokens = values.flat_map(|value| value.to_str().unwrap_or("close").split(','));
        tokens.any(|token| token.trim().eq_ignore_ascii_case(wanted))
    };
    if says("close") || (version == Version::Http10 && !says("keep-alive")) {
        KeepAlive::No
    } else {
        KeepAlive::Yes
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
