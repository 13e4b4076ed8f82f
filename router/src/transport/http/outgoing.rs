//! A request on its way into an HTTP/1 connection.

use std::io::IoSlice;
use std::pin::Pin;
use std::task::{Context, Poll};

use http::{HeaderValue, header};
use smallvec::SmallVec;
use tokio::io::AsyncWrite;

use super::socket::Stream;
use crate::hop_by_hop;
use crate::payload::Payload;
use crate::transport::WorkerRequest;
use crate::turns::{end_turn, turn_bytes};

/// Pieces that go into one write.
const MAX_SLICES: usize = 16;

/// What is still to be written. It keeps the space of its head for the next request.
#[derive(Default)]
pub(super) struct Outgoing {
    head: Vec<u8>,
    body: Payload,
    sent_bytes: usize,
    /// Of the body: how many pieces are out, and how much of the next.
    piece: usize,
    piece_bytes: usize,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq, Default)]
enum State {
    Writing,
    /// Written, but TLS may hold some of it back.
    Flushing,
    /// All of it is out.
    #[default]
    Over,
    /// A write has failed. A worker that answers early, a 413 in the middle of a long body say, and closes, makes our writes
    /// fail while its answer is still to be read; so the failure is kept back, and reading brings the answer, or an end.
    Stuck,
}

impl Outgoing {
    /// Begins with a request. `host` and the length of the body are added, and `authorization` if the request has none.
    pub(super) fn begin(
        &mut self,
        request: &WorkerRequest,
        host: &HeaderValue,
        authorization: Option<&HeaderValue>,
    ) {
        let WorkerRequest { method, path, headers, body, underway: _, leaves: _, gateway: _ } = request;
        self.head.clear();
        for part in [method.as_str(), " ", path.as_str(), " HTTP/1.1\r\n"] {
            self.head.extend_from_slice(part.as_bytes());
        }
        self.field(header::HOST.as_str(), host.as_bytes());
        for (name, value) in hop_by_hop::end_to_end(headers) {
            self.field(name.as_str(), value.as_bytes());
        }
        if let Some(value) = authorization.filter(|_| !headers.contains_key(header::AUTHORIZATION)) {
            self.field(header::AUTHORIZATION.as_str(), value.as_bytes());
        }
        let mut digits = itoa::Buffer::new();
        self.field(header::CONTENT_LENGTH.as_str(), digits.format(body.len()).as_bytes());
        self.head.extend_from_slice(b"\r\n");
        (self.sent_bytes, self.piece, self.piece_bytes) = (0, 0, 0);
        self.body = body.clone();
        self.state = State::Writing;
    }

    fn field(&mut self, name: &str, value: &[u8]) {
        for part in [name.as_bytes(), b": ", value, b"\r\n"] {
            self.head.extend_from_slice(part);
        }
    }

    /// Whether not one byte has been written.
    pub(super) fn is_untouched(&self) -> bool {
        self.sent_bytes == 0
    }

    /// Whether everything has been written.
    pub(super) fn is_over(&self) -> bool {
        self.state == State::Over
    }

    /// Writes what the socket takes. After a [turn](turn_bytes) others of the thread come first.
    pub(super) fn poll_send(&mut self, stream: &mut Stream, cx: &mut Context<'_>) {
        let mut left_bytes = turn_bytes(self.body.len());
        while self.state == State::Writing {
            if left_bytes == 0 {
                end_turn(cx);
                return;
            }
            if self.sent_bytes == self.head.len() + self.body.len() {
                self.state = State::Flushing;
                self.body = Payload::default();
                break;
            }
            let written = Pin::new(&mut *stream).poll_write_vectored(cx, &self.slices());
            match written {
                Poll::Pending => return,
                Poll::Ready(Ok(bytes)) if bytes > 0 => {
                    left_bytes = left_bytes.saturating_sub(bytes);
                    self.advance(bytes);
                }
                Poll::Ready(_) => self.state = State::Stuck,
            }
        }
        if self.state == State::Flushing {
            match Pin::new(stream).poll_flush(cx) {
                Poll::Pending => {}
                Poll::Ready(Ok(())) => self.state = State::Over,
                Poll::Ready(Err(_)) => self.state = State::Stuck,
            }
        }
    }

    /// What comes next, of no more than a turn's length.
    fn slices(&self) -> SmallVec<[IoSlice<'_>; MAX_SLICES]> {
        let mut slices = SmallVec::new();
        let mut room = turn_bytes(self.body.len());
        let head = &self.head[self.sent_bytes.min(self.head.len())..];
        if !head.is_empty() {
            slices.push(IoSlice::new(head));
        }
        let mut skip = self.piece_bytes;
        for piece in &self.body.pieces()[self.piece..] {
            let rest = &piece[skip..];
            skip = 0;
            if rest.is_empty() {
                continue;
            }
            if room == 0 || slices.len() == MAX_SLICES {
                break;
            }
            let part = &rest[..rest.len().min(room)];
            room -= part.len();
            slices.push(IoSlice::new(part));
        }
        slices
    }

    fn advance(&mut self, mut bytes: usize) {
        let of_head = self.head.len().saturating_sub(self.sent_bytes).min(bytes);
        self.sent_bytes += bytes;
        bytes -= of_head;
        while bytes > 0 {
            let left = self.body.pieces()[self.piece].len() - self.piece_bytes;
            if bytes < left {
                self.piece_bytes += bytes;
                return;
            }
            bytes -= left;
            self.piece += 1;
            self.piece_bytes = 0;
        }
    }
}
