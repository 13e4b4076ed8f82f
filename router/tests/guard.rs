//! Whatever the guard lets pass, hyper reads as the same requests: the guard may be stricter, never of another opinion.

#[path = "guard/agreement.rs"]
mod agreement;

use proptest::prelude::*;

/// Lines and bodies of requests, good and bad, in any order.
fn likely() -> impl Strategy<Value = Vec<u8>> {
    let parts: Vec<&[u8]> = vec![
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        b"POST /v1/a?b=c HTTP/1.1\r\n",
        b"GET http://a/ HTTP/1.0\r\n",
        b"OPTIONS * HTTP/1.1\r\n",
        b"Host: a\r\n",
        b"Content-Length: 4\r\n",
        b"Content-Length: 00\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"transfer-encoding:\tChunked \r\n",
        b"Connection: close\r\n",
        b"Upgrade: h2c\r\n",
        b"Expect: 100-continue\r\n",
        b"x-\x80: \x80\r\n",
        b"x: \x80~\t\r\n",
        b"x:\r\n",
        b"\r\n",
        b"4\r\nabcd\r\n",
        b"1;a=\"b\"\r\nz\r\n",
        b"2 ;a\r\nzz\r\n",
        b"0\r\n\r\n",
        b"00\r\nx: y\r\n\r\n",
        b"abcd",
        b"\n",
        b"\r",
        b" ",
        b"\0",
        b"PRI * HTTP/2.0\r\n",
    ];
    prop::collection::vec(prop::sample::select(parts), 0..16).prop_map(|parts| parts.concat())
}

/// A request with one byte put in, taken out or replaced.
fn nearly() -> impl Strategy<Value = Vec<u8>> {
    let whole: Vec<&[u8]> = vec![
        b"GET /a?b HTTP/1.1\r\nHost: a.b:1\r\nX: y\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc",
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3;a=b\r\nabc\r\n0\r\nx: y\r\n\r\n",
    ];
    (prop::sample::select(whole), any::<prop::sample::Index>(), any::<u8>(), 0..3_u8).prop_map(
        |(whole, at, byte, change)| {
            let at = at.index(whole.len());
            let kept = &whole[at + usize::from(change > 0)..];
            let new: &[u8] = if change < 2 { &[byte] } else { &[] };
            [&whole[..at], new, kept, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"].concat()
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn lines_in_any_order(bytes in likely(), cuts in prop::collection::vec(0_usize..20, 0..20)) {
        agreement::check(&bytes, &cuts);
    }

    #[test]
    fn requests_with_one_fault(bytes in nearly(), cuts in prop::collection::vec(0_usize..20, 0..20)) {
        agreement::check(&bytes, &cuts);
    }
}
