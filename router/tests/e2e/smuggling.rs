//! Requests that two readers could understand differently, and others that are none: each gets the answer it should, the worker
//! sees what it should and nothing else, and nothing hangs.

use crate::harness::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const ONE: &str = r#"{"prompt":"one"}"#;
const TWO: &str = r#"{"prompt":"two"}"#;
const MAX_BODY_BYTES: usize = 10_000;

/// What becomes of the connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum After {
    /// It serves another request.
    Open,
    /// The router closes it.
    Closed,
    /// The client ends its side, then the router closes it.
    HalfClosed,
    /// Either is right.
    Either,
}

struct Case {
    name: &'static str,
    bytes: Vec<u8>,
    /// The answers, in order.
    statuses: &'static [u16],
    /// The bodies that the worker gets, in order.
    bodies: Vec<String>,
    after: After,
}

fn post(fields: &str, body: &str) -> String {
    format!("POST /v1/completions HTTP/1.1\r\nHost: a\r\n{fields}\r\n{body}")
}

fn sized(body: &str) -> String {
    post(&format!("Content-Length: {}\r\n", body.len()), body)
}

fn chunked(chunks: &str) -> String {
    post("Transfer-Encoding: chunked\r\n", chunks)
}

fn get(line: &str, fields: &str) -> String {
    format!("{line}\r\n{fields}\r\n")
}

fn case(
    name: &'static str,
    bytes: impl Into<Vec<u8>>,
    statuses: &'static [u16],
    bodies: &[&str],
    after: After,
) -> Case {
    let bodies = bodies.iter().map(|body| (*body).to_owned()).collect();
    Case { name, bytes: bytes.into(), statuses, bodies, after }
}

/// A head that is refused, after a good request and without one; a good request behind it is not looked at.
fn refused(name: &'static str, bytes: impl Into<Vec<u8>>, statuses: &'static [u16]) -> Case {
    let bytes = [bytes.into(), sized(TWO).into_bytes()].concat();
    case(name, bytes, statuses, &[], After::Closed)
}

fn good_requests() -> Vec<Case> {
    let one_in_chunks = "10;name=value;x=\"y\"\r\n{\"prompt\":\"one\"}\r\n0\r\nx-trailer: y\r\n\r\n";
    let smuggled = sized(TWO);
    let embedded = format!(
        "POST /v1/embeddings HTTP/1.1\r\nHost: a\r\nContent-Length: {}\r\n\r\n{smuggled}",
        smuggled.len()
    );
    let many = format!("Content-Length: 16\r\n{}", "x: y\r\n".repeat(98));
    let absolute = sized(ONE).replace(" /v1", " http://a.example:80/v1");
    let old = sized(ONE).replace("HTTP/1.1", "HTTP/1.0");
    let kept = old.replace("Host: a\r\n", "Connection: keep-alive\r\n");
    vec![
        case("content-length", sized(ONE), &[200], &[ONE], After::Open),
        case(
            "content-length among whitespace",
            post("CONTENT-length:\t 16 \t\r\n", ONE),
            &[200],
            &[ONE],
            After::Open,
        ),
        case(
            "content-length with zeros in front",
            post("Content-Length: 0016\r\n", ONE),
            &[200],
            &[ONE],
            After::Open,
        ),
        case(
            "chunked",
            chunked("8\r\n{\"prompt\r\n8\r\n\":\"one\"}\r\n0\r\n\r\n"),
            &[200],
            &[ONE],
            After::Open,
        ),
        case("chunked with extensions and trailers", chunked(one_in_chunks), &[200], &[ONE], After::Open),
        case(
            "chunked in capitals",
            post("TRANSFER-ENCODING: CHUNKED\r\n", one_in_chunks),
            &[200],
            &[ONE],
            After::Open,
        ),
        case(
            "pipelined",
            format!("{}{}{}", sized(ONE), chunked(one_in_chunks), sized(TWO)),
            &[200, 200, 200],
            &[ONE, ONE, TWO],
            After::Open,
        ),
        case("an empty line in front", format!("\r\n{}", sized(ONE)), &[200], &[ONE], After::Open),
        case(
            "an empty line between",
            format!("{}\r\n{}", sized(ONE), sized(TWO)),
            &[200, 200],
            &[ONE, TWO],
            After::Open,
        ),
        case("a request in a body", embedded, &[200], &[&smuggled], After::Open),
        case("as many fields as allowed", post(&many, ONE), &[200], &[ONE], After::Open),
        case("absolute form", absolute, &[200], &[ONE], After::Open),
        case("HTTP/1.0", old, &[200], &[ONE], After::Closed),
        case("HTTP/1.0 kept alive", kept, &[200], &[ONE], After::Open),
        case(
            "connection: close",
            post("Connection: close\r\nContent-Length: 16\r\n", ONE),
            &[200],
            &[ONE],
            After::Closed,
        ),
        case("asterisk form", get("OPTIONS * HTTP/1.1", "Host: a\r\n"), &[404], &[], After::Open),
        case("an empty host", get("GET /livez HTTP/1.1", "Host:\r\n"), &[200], &[], After::Open),
        case(
            "upgrade to websocket",
            get("GET /livez HTTP/1.1", "Host: a\r\nConnection: upgrade\r\nUpgrade: websocket\r\n"),
            &[200],
            &[],
            After::Open,
        ),
        case(
            "upgrade to h2c",
            post(
                "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\nContent-Length: 16\r\n",
                ONE,
            ),
            &[200],
            &[ONE],
            After::Open,
        ),
        case(
            "connection names content-length",
            post("Connection: content-length, host\r\nContent-Length: 16\r\n", ONE),
            &[200],
            &[ONE],
            After::Open,
        ),
        case(
            "connection names transfer-encoding",
            post("Connection: transfer-encoding\r\nTransfer-Encoding: chunked\r\n", one_in_chunks),
            &[200],
            &[ONE],
            After::Open,
        ),
    ]
}

fn bad_lengths() -> Vec<Case> {
    let length = |value: &str| post(&format!("Content-Length: {value}\r\n"), ONE);
    let coding = |value: &str| post(&format!("Transfer-Encoding: {value}\r\n"), "0\r\n\r\n");
    vec![
        refused(
            "content-length and transfer-encoding",
            post("Content-Length: 16\r\nTransfer-Encoding: chunked\r\n", "0\r\n\r\n"),
            &[400],
        ),
        refused(
            "transfer-encoding and content-length",
            post("Transfer-Encoding: chunked\r\nContent-Length: 5\r\n", "0\r\n\r\n"),
            &[400],
        ),
        refused(
            "content-length 0 and transfer-encoding",
            post("Content-Length: 0\r\nTransfer-Encoding: chunked\r\n", "0\r\n\r\n"),
            &[400],
        ),
        refused("equal content-lengths", post("Content-Length: 16\r\nContent-Length: 16\r\n", ONE), &[400]),
        refused(
            "different content-lengths",
            post("Content-Length: 16\r\nContent-Length: 0\r\n", ONE),
            &[400],
        ),
        refused("a list of content-lengths", length("16, 16"), &[400]),
        refused("a signed content-length", length("+16"), &[400]),
        refused("a negative content-length", length("-1"), &[400]),
        refused("a hexadecimal content-length", length("0x10"), &[400]),
        refused("a content-length of two words", length("1 6"), &[400]),
        refused("an empty content-length", length(""), &[400]),
        refused("a content-length beyond 64 bits", length("18446744073709551632"), &[400]),
        refused("a content-length beyond 63 bits", length("9223372036854775808"), &[400]),
        refused("xchunked", coding("xchunked"), &[501]),
        refused("gzip", coding("gzip"), &[501]),
        refused("identity", coding("identity"), &[501]),
        refused("gzip, chunked", coding("gzip, chunked"), &[501]),
        refused("chunked, gzip", coding("chunked, gzip"), &[501]),
        refused("chunked, chunked", coding("chunked, chunked"), &[400]),
        refused("chunked with a parameter", coding("chunked;a=b"), &[400]),
        refused("chunked in quotes", coding("\"chunked\""), &[400]),
        refused("an empty coding", coding(""), &[400]),
        refused(
            "two codings",
            post("Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", "0\r\n\r\n"),
            &[400],
        ),
        refused("a folded coding", post("Transfer-Encoding:\r\n chunked\r\n", "0\r\n\r\n"), &[400]),
        refused("a coding after a vertical tab", coding("\u{b}chunked"), &[400]),
        refused(
            "whitespace before the colon of a coding",
            post("Transfer-Encoding : chunked\r\n", "0\r\n\r\n"),
            &[400],
        ),
        refused("a coding in HTTP/1.0", coding("chunked").replace("HTTP/1.1", "HTTP/1.0"), &[400]),
    ]
}

fn bad_heads() -> Vec<Case> {
    let field = |field: &[u8]| [b"GET /livez HTTP/1.1\r\nHost: a\r\n", field, b"\r\n\r\n"].concat();
    let line = |line: &str| get(line, "Host: a\r\n");
    vec![
        refused("bare LF after a field", "GET /livez HTTP/1.1\r\nHost: a\nx: y\r\n\r\n", &[400]),
        refused("bare LF everywhere", "GET /livez HTTP/1.1\nHost: a\n\n", &[400]),
        refused("bare LF at the end", "GET /livez HTTP/1.1\r\nHost: a\r\n\n", &[400]),
        refused("bare CR in a value", field(b"x: a\rContent-Length: 5"), &[400]),
        refused("bare CR as a line end", "GET /livez HTTP/1.1\rHost: a\r\r", &[400]),
        refused("NUL in a value", field(b"x: a\0b"), &[400]),
        refused("DEL in a value", field(b"x: a\x7fb"), &[400]),
        refused("a folded field", field(b"x: a\r\n b"), &[400]),
        refused("whitespace before the first field", "GET /livez HTTP/1.1\r\n Host: a\r\n\r\n", &[400]),
        refused("whitespace before a colon", field(b"x : a"), &[400]),
        refused("a name with an at sign", field(b"x@y: a"), &[400]),
        refused("a name beyond ASCII", field(b"x\xc3\xa9: a"), &[400]),
        refused("a field without a name", field(b": a"), &[400]),
        refused("a field without a colon", field(b"GET /smuggled HTTP/1.1"), &[400]),
        refused("no host", "GET /livez HTTP/1.1\r\n\r\n", &[400]),
        refused("no host in absolute form", "GET http://a/livez HTTP/1.1\r\n\r\n", &[400]),
        refused("two hosts", field(b"Host: a"), &[400]),
        refused("a host with a path", "GET /livez HTTP/1.1\r\nHost: a/b\r\n\r\n", &[400]),
        refused("a list of hosts", "GET /livez HTTP/1.1\r\nHost: a, b\r\n\r\n", &[400]),
        refused("HTTP/0.9", "GET /livez\r\n", &[400]),
        refused("HTTP/1.2", line("GET /livez HTTP/1.2"), &[505]),
        refused("HTTP/2.0 in words", line("GET /livez HTTP/2.0"), &[505]),
        refused("a version in small letters", line("GET /livez http/1.1"), &[400]),
        refused("a version of two digits", line("GET /livez HTTP/1.10"), &[400]),
        refused("two spaces", line("GET  /livez HTTP/1.1"), &[400]),
        refused("tabs for spaces", line("GET\t/livez\tHTTP/1.1"), &[400]),
        refused("a space at the end of the request line", line("GET /livez HTTP/1.1 "), &[400]),
        refused("a space within the target", line("GET /livez /x HTTP/1.1"), &[400]),
        refused("a method with a bracket", line("G(T /livez HTTP/1.1"), &[400]),
        refused("a target with a fragment", line("GET /livez#x HTTP/1.1"), &[400]),
        refused("a target beyond ASCII", line("GET /livez\u{e9} HTTP/1.1"), &[400]),
        refused("a target without a slash", line("GET livez HTTP/1.1"), &[400]),
        refused("an asterisk for GET", line("GET * HTTP/1.1"), &[400]),
        refused("another scheme", line("GET ftp://a/livez HTTP/1.1"), &[400]),
        refused("CONNECT", line("CONNECT a:443 HTTP/1.1"), &[501]),
        refused("two empty lines in front", "\r\n\r\n", &[400]),
        refused("too many fields", field(&b"x: y\r\n".repeat(100)), &[431]),
        refused("a long field", field(&[b"x: ".as_slice(), &b"y".repeat(70_000)].concat()), &[431]),
        refused("a long target", line(&format!("GET /{} HTTP/1.1", "x".repeat(70_000))), &[431]),
        refused("a head without an end", b"x".repeat(70_000), &[431]),
        refused("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".to_vec(), &[400]),
        case(
            "the preface of HTTP/2 after a request",
            format!("{}PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", sized(ONE)),
            &[200, 505],
            &[ONE],
            After::Closed,
        ),
        case(
            "a bad head after a good request",
            format!("{}GET /livez HTTP/1.1\r\nHost : a\r\n\r\n", sized(ONE)),
            &[200, 400],
            &[ONE],
            After::Closed,
        ),
        case(
            "a bad head after two",
            format!("{}{}POST\r\n", sized(ONE), sized(TWO)),
            &[200, 200, 400],
            &[ONE, TWO],
            After::Closed,
        ),
        case(
            "more than content-length says",
            format!("{}more\r\n", sized(ONE)),
            &[200, 400],
            &[ONE],
            After::Closed,
        ),
        case(
            "no more after connection: close",
            post("Connection: close\r\nContent-Length: 16\r\n", &format!("{ONE}{}", sized(TWO))),
            &[200],
            &[ONE],
            After::Closed,
        ),
        case(
            "garbage after connection: close",
            post("Connection: close\r\nContent-Length: 16\r\n", &format!("{ONE}\0\0\r\n")),
            &[200],
            &[ONE],
            After::Closed,
        ),
    ]
}

fn bad_bodies() -> Vec<Case> {
    let bad = |name, chunks: &str| {
        case(name, chunked(&format!("{chunks}{}", sized(TWO))), &[400], &[], After::Closed)
    };
    let long_extension = format!("1;{}\r\nx\r\n0\r\n\r\n", "x".repeat(2_000));
    let extensions = format!("{}0\r\n\r\n", format!("1;{}\r\nx\r\n", "x".repeat(500)).repeat(20));
    let trailers = format!("10\r\n{ONE}\r\n0\r\n{}\r\n", "x: y\r\n".repeat(2_000));
    let large = "x".repeat(1_000_000);
    let large_chunks = format!("{}0\r\n\r\n", format!("1000\r\n{}\r\n", "x".repeat(4_096)).repeat(100));
    vec![
        bad("a chunk size that is no number", "x\r\n"),
        bad("a negative chunk size", "-1\r\n"),
        bad("a chunk size with a prefix", "0x10\r\n"),
        bad("a chunk size beyond 64 bits", "10000000000000010\r\n"),
        bad("a chunk size with a space behind", "10 \r\n"),
        bad("a chunk size with a space in front", " 10\r\n"),
        bad("no chunk size", "\r\n"),
        bad("bare LF after a chunk size", &format!("10\n{ONE}\r\n0\r\n\r\n")),
        bad("bare LF after a chunk", &format!("10\r\n{ONE}\n0\r\n\r\n")),
        bad("a chunk longer than its size", &format!("f\r\n{ONE}\r\n0\r\n\r\n")),
        bad("a chunk shorter than its size", &format!("11\r\n{ONE}\r\n0\r\n\r\n")),
        bad("bare LF after the last chunk", &format!("10\r\n{ONE}\r\n0\n\r\n")),
        bad("bare LF after the trailers", &format!("10\r\n{ONE}\r\n0\r\nx: y\n\r\n")),
        bad("a trailer without a colon", &format!("10\r\n{ONE}\r\n0\r\nx\r\n\r\n")),
        bad("bare CR in an extension", &format!("10;a\rb\r\n{ONE}\r\n0\r\n\r\n")),
        bad("bare LF in an extension", &format!("10;a\nb\r\n{ONE}\r\n0\r\n\r\n")),
        bad("a long extension", &long_extension),
        bad("many extensions", &extensions),
        bad("long trailers", &trailers),
        case("a large body, all of it sent", sized(&large), &[413], &[], After::Closed),
        case("large chunks, all of them sent", chunked(&large_chunks), &[413], &[], After::Closed),
        case(
            "a body that nobody reads",
            sized(TWO).replace("/v1/completions", "/nowhere"),
            &[404],
            &[],
            After::Either,
        ),
        case(
            "a large body that nobody reads",
            sized(&large).replace("/v1/completions", "/nowhere"),
            &[404],
            &[],
            After::Closed,
        ),
        case("a body that is no JSON", sized("{"), &[400], &[], After::Open),
        case("chunks of nothing", chunked("0\r\n\r\n"), &[400], &[], After::Open),
        case("half a head", "POST /v1/completions HTT", &[], &[], After::HalfClosed),
        case("half a body", post("Content-Length: 100\r\n", ONE), &[400], &[], After::HalfClosed),
        case("half a chunk", chunked("100\r\n{\"prompt\""), &[400], &[], After::HalfClosed),
        case("chunks without an end", chunked(&format!("10\r\n{ONE}\r\n")), &[400], &[], After::HalfClosed),
        case("nothing at all", "", &[], &[], After::HalfClosed),
    ]
}

/// A preface that is none, and frames that are none: no answer that HTTP/1 would know.
fn bad_prefaces() -> Vec<Case> {
    let preface = "PRI * HTTP/2.0\r\n\r\n";
    vec![
        case("a preface with another end", format!("{preface}XX\r\n\r\n"), &[], &[], After::Closed),
        case(
            "a preface and no settings",
            format!("{preface}SM\r\n\r\n{}", sized(ONE)),
            &[],
            &[],
            After::Closed,
        ),
        case("half a preface", "PRI * HTTP/2", &[], &[], After::HalfClosed),
    ]
}

/// Reads answers until as many have come as `statuses` has, and says what came instead if they differ.
async fn answers(stream: &mut TcpStream, raw: &mut Vec<u8>, statuses: &[u16]) -> Result<(), String> {
    for expected in statuses {
        let head_end = loop {
            if let Some(at) = find(raw, b"\r\n\r\n") {
                break at + 4;
            }
            read(stream, raw).await?;
        };
        let head = String::from_utf8(raw[..head_end].to_vec()).unwrap().to_ascii_lowercase();
        let length = head.split("content-length: ").nth(1).and_then(|rest| rest.split("\r\n").next());
        let length: usize = length.ok_or(format!("no length: {head}"))?.parse().unwrap();
        while raw.len() < head_end + length {
            read(stream, raw).await?;
        }
        let body = String::from_utf8(raw.drain(..head_end + length).skip(head_end).collect()).unwrap();
        if head.split(' ').nth(1) != Some(expected.to_string().as_str()) {
            return Err(format!("{expected} expected, not {head}{body}"));
        }
        if *expected >= 400 {
            let json: serde_json::Value =
                serde_json::from_str(&body).map_err(|error| format!("{error}: {body:?}"))?;
            assert!(json["error"]["message"].is_string() && json["error"]["type"].is_string(), "{body}");
        }
    }
    Ok(())
}

async fn read(stream: &mut TcpStream, raw: &mut Vec<u8>) -> Result<(), String> {
    match stream.read_buf(raw).await {
        Ok(0) => Err(format!("closed after {:?}", String::from_utf8_lossy(raw))),
        Ok(_) => Ok(()),
        Err(error) => Err(format!("{error} after {:?}", String::from_utf8_lossy(raw))),
    }
}

async fn play(case: &Case, router: &Router, piece_bytes: usize) -> Result<(), String> {
    let mut stream = TcpStream::connect(router.address).await.unwrap();
    stream.set_nodelay(true).unwrap();
    for piece in case.bytes.chunks(piece_bytes) {
        if stream.write_all(piece).await.is_err() {
            // The router has seen enough.
            break;
        }
    }
    if case.after == After::HalfClosed {
        stream.shutdown().await.unwrap();
    }
    let mut raw = Vec::new();
    answers(&mut stream, &mut raw, case.statuses).await?;
    match case.after {
        After::Either => {}
        After::Open => {
            stream.write_all(get("GET /livez HTTP/1.1", "Host: a\r\n").as_bytes()).await.unwrap();
            answers(&mut stream, &mut raw, &[200]).await?;
        }
        After::Closed | After::HalfClosed => {
            while read(&mut stream, &mut raw).await.is_ok() {}
            if find(&raw, b"HTTP/1.").is_some() {
                return Err(format!("more answers than requests: {:?}", String::from_utf8_lossy(&raw)));
            }
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn every_case_gets_its_answer_and_the_worker_sees_no_other_request() {
    let worker = MockWorker::answering(&["m"], json_reply(200, "{}")).await;
    let max_body = format!("--max-body-bytes={MAX_BODY_BYTES}");
    let router = Router::start(&[&workers(&[&worker]), &max_body]).await;
    let cases: Vec<_> = [good_requests(), bad_lengths(), bad_heads(), bad_bodies(), bad_prefaces()]
        .into_iter()
        .flatten()
        .collect();
    assert!(cases.len() >= 60, "{}", cases.len());
    let mut seen = 0;
    for case in &cases {
        // Whole, in pieces, and byte by byte unless that is very many.
        for piece_bytes in [usize::MAX, case.bytes.len() / 2 + 1, case.bytes.len() / 500 + 1] {
            let played = tokio::time::timeout(LIMIT, play(case, &router, piece_bytes)).await;
            let outcome = played.unwrap_or_else(|_| Err("it hangs".to_owned()));
            assert_eq!(outcome, Ok(()), "{} in pieces of {piece_bytes}", case.name);
            let all = worker.seen();
            let bodies: Vec<_> =
                all[seen..].iter().map(|seen| String::from_utf8(seen.body.clone()).unwrap()).collect();
            assert_eq!(bodies, case.bodies, "{} in pieces of {piece_bytes}", case.name);
            seen = all.len();
        }
    }
    assert_eq!(router.metric("router_requests_in_flight").await, 0.0);
    assert!(router.metric("router_protocol_errors_total{status=\"400\"}").await > 0.0);
}
