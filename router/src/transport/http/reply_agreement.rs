//! Any bytes as a worker's answer: wherever they are cut the same is made of them, no more is handed out than their head
//! says, and what is taken for a whole answer hyper reads as the same. For the test below, and for the fuzz target `reply`.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use http::{HeaderMap, Request, StatusCode, header};
use http_body_util::{BodyExt, Empty};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::framing::{Framing, KeepAlive};
use super::incoming::{IncomingBody, IncomingHead};
use super::link::Failed;

/// As much as a connection reads at once.
const PIECE_BYTES: usize = 64 << 10;

/// What was made of an answer.
#[derive(PartialEq, Debug)]
struct Made {
    head: Option<Head>,
    body: Vec<u8>,
    end: End,
}

#[derive(PartialEq, Debug)]
struct Head {
    status: StatusCode,
    headers: HeaderMap,
    framing: Framing,
    keep_alive: KeepAlive,
}

/// How it ended.
#[derive(PartialEq, Debug)]
enum End {
    /// With its last byte, after which so many more came.
    Whole { surplus_bytes: usize },
    /// Too early, or with something that is no answer.
    Failed(String),
}

/// Reads `bytes` whole, in pieces of `lengths` and by hyper, and panics where the three differ.
pub fn check(bytes: &[u8], lengths: &[usize]) {
    let whole = read(&mut pieces(bytes, &[]));
    assert_eq!(read(&mut pieces(bytes, lengths)), whole, "the answer depends on cuts");
    let Some(head) = &whole.head else {
        assert!(whole.body.is_empty() && matches!(whole.end, End::Failed(_)));
        return;
    };
    let length =
        head.headers.get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
    let is_whole = matches!(whole.end, End::Whole { .. });
    match (&head.framing, length) {
        (Framing::Done, _) => assert!(whole.body.is_empty() && is_whole),
        (Framing::Length(_), Some(length)) => {
            assert!(whole.body.len() == length || (!is_whole && whole.body.len() < length));
        }
        (Framing::Length(_), None) => panic!("a length that nobody said"),
        (Framing::Chunks(_) | Framing::ToTheEnd | Framing::Faulty(_), _) => {}
    }
    if is_whole {
        assert_eq!(by_hyper(bytes), Some((head.status, whole.body)), "hyper reads another answer");
    }
}

/// Pieces of the given lengths, and then as long as they may be; none is empty.
fn pieces<'a>(mut bytes: &'a [u8], lengths: &'a [usize]) -> impl Iterator<Item = Bytes> + 'a {
    let lengths = lengths.iter().map(|length| *length.clamp(&1, &PIECE_BYTES));
    let mut lengths = lengths.chain(std::iter::repeat(PIECE_BYTES));
    std::iter::from_fn(move || {
        let (piece, rest) = bytes.split_at(lengths.next()?.min(bytes.len()));
        bytes = rest;
        (!piece.is_empty()).then(|| Bytes::copy_from_slice(piece))
    })
}

/// Does with `pieces` what a connection does with what it receives, and ends after them.
fn read(pieces: &mut dyn Iterator<Item = Bytes>) -> Made {
    let mut incoming = IncomingHead::default();
    let mut made = Made { head: None, body: Vec::new(), end: End::Whole { surplus_bytes: 0 } };
    let (head, rest) = loop {
        let Some(piece) = pieces.next() else {
            made.end = End::Failed(incoming.end().to_string());
            return made;
        };
        match incoming.push(piece) {
            Ok(Some(whole)) => break whole,
            Ok(None) => {}
            Err(failed) => {
                made.end = End::Failed(said(failed));
                return made;
            }
        }
    };
    let (parts, ()) = head.response.into_parts();
    let kind = match &head.framing {
        Framing::Length(bytes) => Framing::Length(*bytes),
        Framing::Chunks(_) => Framing::Chunks(Box::default()),
        Framing::Faulty(fault) => Framing::Faulty(*fault),
        Framing::ToTheEnd => Framing::ToTheEnd,
        Framing::Done => Framing::Done,
    };
    let (status, headers) = (parts.status, parts.headers);
    made.head = Some(Head { status, headers, framing: kind, keep_alive: head.keep_alive });
    made.end = read_body(IncomingBody::new(head.framing, rest), pieces, &mut made.body);
    made
}

fn read_body(mut incoming: IncomingBody, pieces: &mut dyn Iterator<Item = Bytes>, body: &mut Vec<u8>) -> End {
    loop {
        match incoming.next() {
            Ok(None) if incoming.is_over() => {
                let later: usize = pieces.map(|piece| piece.len()).sum();
                return End::Whole { surplus_bytes: incoming.surplus().len() + later };
            }
            Ok(None) => {
                assert!(incoming.surplus().is_empty(), "what was not handed out was lost");
                match incoming.push(&pieces.next().unwrap_or_default()) {
                    Ok(None) => {}
                    Ok(Some(data)) => {
                        assert!(!data.is_empty(), "a piece of nothing");
                        body.extend_from_slice(&data);
                    }
                    Err(broken) => return End::Failed(broken.to_string()),
                }
            }
            Ok(Some(data)) => {
                assert!(!data.is_empty(), "a piece of nothing");
                body.extend_from_slice(&data);
            }
            Err(broken) => return End::Failed(broken.to_string()),
        }
    }
}

fn said(failed: Failed) -> String {
    match failed {
        Failed::Unsent(broken) | Failed::Silent { broken, .. } => panic!("something came: {broken}"),
        Failed::Broken(broken) => broken.to_string(),
        Failed::Ambiguous(reason) => reason.to_owned(),
    }
}

/// What hyper makes of it; `None` if it finds it wrong.
fn by_hyper(bytes: &[u8]) -> Option<(StatusCode, Vec<u8>)> {
    let canned = Canned { reply: Bytes::copy_from_slice(bytes), asked: Asked::NotYet(None) };
    let exchange = async {
        let (mut sender, connection) = http1::handshake(TokioIo::new(canned)).await.ok()?;
        let request = Request::get("/").body(Empty::<Bytes>::new()).ok()?;
        let reply = async {
            let reply = sender.send_request(request).await.ok()?;
            let status = reply.status();
            Some((status, reply.into_body().collect().await.ok()?.to_bytes().to_vec()))
        };
        // The connection ends with an error where there is more than an answer.
        let (mut connection, mut reply) = (std::pin::pin!(connection), std::pin::pin!(reply));
        let mut has_ended = false;
        poll_fn(|cx| {
            has_ended = has_ended || connection.as_mut().poll(cx).is_ready();
            reply.as_mut().poll(cx)
        })
        .await
    };
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    runtime.expect("a runtime without drivers needs nothing").block_on(exchange)
}

/// A worker that answers the same whatever it is asked, and closes.
struct Canned {
    reply: Bytes,
    asked: Asked,
}

/// Whether it has been asked. It says nothing before: hyper takes what comes without a question for a fault.
enum Asked {
    NotYet(Option<Waker>),
    Already,
}

impl AsyncRead for Canned {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Asked::NotYet(waker) = &mut self.asked {
            *waker = Some(cx.waker().clone());
            return Poll::Pending;
        }
        let count = self.reply.len().min(buffer.remaining());
        buffer.put_slice(&self.reply.split_to(count));
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Canned {
    fn poll_write(mut self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if let Asked::NotYet(Some(waker)) = std::mem::replace(&mut self.asked, Asked::Already) {
            waker.wake();
        }
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Lines and bodies of answers, good and bad, in any order.
    fn likely() -> impl Strategy<Value = Vec<u8>> {
        let parts: Vec<&[u8]> = vec![
            b"HTTP/1.1 200 OK\r\n",
            b"HTTP/1.1 200 OK\r\n",
            b"HTTP/1.0 503 x\r\n",
            b"HTTP/1.1 204\r\n",
            b"HTTP/1.1 100 Continue\r\n\r\n",
            b"HTTP/1.1 101 x\r\n\r\n",
            b"content-length: 4\r\n",
            b"Content-Length: 0\r\n",
            b"transfer-encoding: chunked\r\n",
            b"Transfer-Encoding: gzip, chunked\r\n",
            b"connection: close\r\n",
            b"x-a:  b c \r\n",
            b"x\0",
            b"\r\n",
            b"\n",
            b"4\r\nabcd\r\n",
            b"1;a=\"b\"\r\nz\r\n",
            b"0\r\n\r\n",
            b"0\r\nx: y\r\n\r\n",
            b"abcd",
        ];
        prop::collection::vec(prop::sample::select(parts), 0..9).prop_map(|parts| parts.concat())
    }

    proptest! {
        #[test]
        fn an_answer_is_the_same_wherever_it_is_cut_and_to_hyper(
            bytes in likely(),
            lengths in prop::collection::vec(1_usize..30, 0..40),
        ) {
            check(&bytes, &lengths);
        }

        #[test]
        fn no_bytes_are_read_in_two_ways(
            bytes in prop::collection::vec(any::<u8>(), 0..80),
            lengths in prop::collection::vec(1_usize..9, 0..40),
        ) {
            check(&bytes, &lengths);
            check(&[&b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"[..], &bytes].concat(), &lengths);
        }
    }
}
