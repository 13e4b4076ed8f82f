//! Verdicts, wherever the bytes are cut, and beside what hyper's own parser makes of them.

use proptest::prelude::*;

use super::*;
use crate::http1::MAX_FIELDS;

const LIMITS: HeadLimits = HeadLimits { max_head_bytes: 2_048 };

/// Messages that came whole, and what ended them.
fn judge(bytes: &[u8], cuts: &[usize]) -> (u64, Position, Option<Violation>) {
    let mut guard = HeadGuard::new(LIMITS);
    let (mut rest, mut refused) = (bytes, None);
    for cut in cuts.iter().copied().chain([usize::MAX]) {
        let (piece, later) = rest.split_at(cut.min(rest.len()));
        rest = later;
        if let Err(refusal) = guard.push(piece) {
            assert!(refusal.good_bytes <= piece.len());
            refused = Some(refusal.violation);
            break;
        }
    }
    // Of what was refused, there is no more to say.
    let position = if refused.is_some() { Position::Between } else { guard.position() };
    (guard.messages(), position, refused)
}

fn violation(bytes: &str) -> Option<Violation> {
    let whole = judge(bytes.as_bytes(), &[]);
    let single = judge(bytes.as_bytes(), &vec![1; bytes.len()]);
    assert_eq!(whole, single, "{bytes:?}");
    whole.2
}

#[test]
fn good_requests_pass() {
    for (bytes, messages) in [
        ("GET / HTTP/1.1\r\nHost: a\r\n\r\n", 1),
        ("\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n", 1),
        ("GET / HTTP/1.0\r\n\r\n", 1),
        ("GET /a?b=c&d=%20{} HTTP/1.1\r\nHost:\r\n\r\n", 1),
        ("GET http://a:80/b?c HTTP/1.1\r\nHost: a\r\n\r\n", 1),
        ("OPTIONS * HTTP/1.1\r\nHost: [::1]:80\r\n\r\n", 1),
        ("POST / HTTP/1.1\r\nhost: a\r\nCONTENT-LENGTH: \t3 \r\n\r\nabcGET / HTTP/1.1\r\nHost: a\r\n\r\n", 2),
        (
            "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: Chunked\r\n\r\n3;x=y\r\nabc\r\n00\r\nx: y\r\n\r\n",
            1,
        ),
        ("GET / HTTP/1.1\r\nHost: a\r\nx: \u{e9}\t~\r\nempty:\r\n\r\n", 1),
    ] {
        assert_eq!(violation(bytes), None, "{bytes:?}");
        assert_eq!(judge(bytes.as_bytes(), &[]).0, messages, "{bytes:?}");
        assert_eq!(judge(bytes.as_bytes(), &[]).1, Position::Between, "{bytes:?}");
    }
}

#[test]
fn bad_heads_are_told_apart() {
    use Violation as V;
    for (bytes, expected) in [
        ("PRI * HTTP/2.0\r\n", V::Http2Preface),
        ("GET /\r\n", V::RequestLine),
        ("GET / HTTP/1.1 \r\n", V::RequestLine),
        ("GET  / HTTP/1.1\r\n", V::Target),
        ("GET / x HTTP/1.1\r\n", V::Target),
        ("G(T / HTTP/1.1\r\n", V::Method),
        (" GET / HTTP/1.1\r\n", V::Method),
        ("GET a HTTP/1.1\r\n", V::Target),
        ("GET * HTTP/1.1\r\n", V::Target),
        ("GET /#a HTTP/1.1\r\n", V::Target),
        ("GET ftp://a/ HTTP/1.1\r\n", V::Target),
        ("GET http:///a HTTP/1.1\r\n", V::Target),
        ("CONNECT a:1 HTTP/1.1\r\n", V::Connect),
        ("GET / HTTP/2.0\r\n", V::Version),
        ("GET / HTTP/1.2\r\n", V::Version),
        ("GET / HTTP/1.11\r\n", V::RequestLine),
        ("GET / http/1.1\r\n", V::RequestLine),
        ("GET / HTTP/1.1\n", V::BareLf),
        ("GET / HTTP/1.1\r\nHost: a\n", V::BareLf),
        ("GET / HTTP/1.1\rHost: a\r\n", V::BareCr),
        ("GET / HTTP/1.1\r\r\n", V::BareCr),
        ("GET / HTTP/1.1\r\nx: a\0b\r\n", V::Control),
        ("\u{16}\u{3}\u{1}", V::Control),
        ("GET / HTTP/1.1\r\nx: a\r\n b\r\n", V::Folded),
        ("GET / HTTP/1.1\r\n x: a\r\n", V::Folded),
        ("GET / HTTP/1.1\r\nx\r\n", V::FieldName),
        ("GET / HTTP/1.1\r\n: a\r\n", V::FieldName),
        ("GET / HTTP/1.1\r\nx@: a\r\n", V::FieldName),
        ("GET / HTTP/1.1\r\nx : a\r\n", V::SpaceBeforeColon),
        ("GET / HTTP/1.1\r\n\r\n", V::HostMissing),
        ("GET / HTTP/1.1\r\nHost: a\r\nhost: a\r\n", V::HostRepeated),
        ("GET / HTTP/1.1\r\nHost: a b\r\n", V::HostInvalid),
        ("GET / HTTP/1.1\r\nHost: a/b\r\n", V::HostInvalid),
        ("POST / HTTP/1.1\r\nContent-Length: +3\r\n", V::ContentLength),
        ("POST / HTTP/1.1\r\nContent-Length:\r\n", V::ContentLength),
        ("POST / HTTP/1.1\r\nContent-Length: 3, 3\r\n", V::ContentLength),
        ("POST / HTTP/1.1\r\nContent-Length: 9223372036854775808\r\n", V::ContentLength),
        ("POST / HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 3\r\n", V::ContentLengthRepeated),
        ("POST / HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n", V::LengthAndCoding),
        ("POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n", V::LengthAndCoding),
        ("POST / HTTP/1.1\r\nTransfer-Encoding: chunked, chunked\r\n", V::TransferEncoding),
        ("POST / HTTP/1.1\r\nTransfer-Encoding:\r\n", V::TransferEncoding),
        (
            "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
            V::TransferEncoding,
        ),
        ("POST / HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n", V::UnknownCoding),
        ("POST / HTTP/1.1\r\nTransfer-Encoding: xchunked\r\n", V::UnknownCoding),
        ("POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n", V::CodingInHttp10),
    ] {
        assert_eq!(violation(bytes), Some(expected), "{bytes:?}");
    }
}

#[test]
fn bad_chunks_are_told_apart() {
    use ChunkFault as F;
    let long = format!("1;{}\r\n", "x".repeat(2_000));
    let many = "1;aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\r\nx\r\n".repeat(400);
    let trailers = format!("0\r\n{}", "a: b\r\n".repeat(2_000));
    for (body, expected) in [
        ("x\r\n", F::Size),
        ("\r\n", F::Size),
        ("-1\r\n", F::Size),
        ("0x1\r\n", F::Size),
        ("1 \r\n", F::Size),
        ("11111111111111111\r\n", F::Size),
        ("1\nx", F::End),
        ("1\r\nxy\r\n", F::End),
        ("1\r\nx\n", F::End),
        ("1\r\nx\rx", F::End),
        ("1;a\rb\r\n", F::End),
        ("0\r\nx\r\n\r\n", F::End),
        ("0\r\n x: y\r\n\r\n", F::End),
        (long.as_str(), F::Extension),
        (many.as_str(), F::Extension),
        (trailers.as_str(), F::Trailers),
    ] {
        let bytes = format!("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n{body}");
        let expected = Violation::Chunk(expected);
        assert_eq!(violation(&bytes), Some(expected), "{body:?}");
        assert!(expected.is_in_body());
    }
}

#[test]
fn heads_are_bounded() {
    let fields = |count| format!("GET / HTTP/1.1\r\nHost: a\r\n{}\r\n", "a: b\r\n".repeat(count));
    assert_eq!(violation(&fields(MAX_FIELDS - 1)), None);
    assert_eq!(violation(&fields(MAX_FIELDS)), Some(Violation::TooManyFields));
    let head = |value: usize| format!("GET / HTTP/1.1\r\nHost: a\r\nx: {}\r\n\r\n", "y".repeat(value));
    let frame = head(0).len();
    assert_eq!(violation(&head(2_048 - frame)), None);
    assert_eq!(violation(&head(2_049 - frame)), Some(Violation::HeadTooLarge));
}

#[test]
fn what_came_before_a_bad_message_is_good() {
    let good = "GET / HTTP/1.1\r\nHost: a\r\n\r\n";
    let refused = HeadGuard::new(LIMITS).push(format!("{good}{good}GET / HTTP/1.1\r\nx : y\r\n").as_bytes());
    let expected = Refused { good_bytes: 2 * good.len(), violation: Violation::SpaceBeforeColon };
    assert_eq!(refused, Err(expected));
    let begun = HeadGuard::new(LIMITS).push(format!("{good}GET").as_bytes());
    assert_eq!(begun, Ok(good.len()));
    let mut guard = HeadGuard::new(LIMITS);
    assert_eq!(guard.push(b"GET / HT"), Ok(0));
    assert_eq!(guard.position(), Position::Head);
    assert_eq!(guard.push(b"TP/1.1\n").unwrap_err().good_bytes, 0);
    assert_eq!(guard.push(good.as_bytes()).unwrap_err().violation, Violation::BareLf);
}

/// Bytes that look like requests more often than not.
fn likely() -> impl Strategy<Value = Vec<u8>> {
    let parts = prop::sample::select(vec![
        "GET / HTTP/1.1\r\n",
        "POST /a HTTP/1.1\r\n",
        "Host: a\r\n",
        "Content-Length: 4\r\n",
        "Transfer-Encoding: chunked\r\n",
        "x: y\r\n",
        "\r\n",
        "4\r\nabcd\r\n",
        "0\r\n\r\n",
        "abcd",
        "\n",
        "\r",
        " ",
        ":",
        "\0",
        "1;a=b\r\nz\r\n",
        "PRI * HTTP/2.0\r\n",
    ]);
    prop::collection::vec(parts, 0..14).prop_map(|parts| parts.concat().into_bytes())
}

proptest! {
    #[test]
    fn cuts_do_not_matter(bytes in likely(), cuts in prop::collection::vec(0_usize..12, 0..40)) {
        prop_assert_eq!(judge(&bytes, &cuts), judge(&bytes, &[]));
        prop_assert_eq!(judge(&bytes, &vec![1; bytes.len()]), judge(&bytes, &[]));
    }

    #[test]
    fn any_bytes_at_all(bytes in prop::collection::vec(any::<u8>(), 0..200), cuts in prop::collection::vec(0_usize..12, 0..40)) {
        prop_assert_eq!(judge(&bytes, &cuts), judge(&bytes, &[]));
    }
}
