//! An answer as it comes out of an HTTP/1 connection: first its head, then its body, wherever what came was cut.
//!
//! Does no I/O: it is pushed pieces, and what it makes of them does not depend on where they were cut. Next:
//! [`reply_head`](super::reply_head) and [`framing`](super::framing), which know the grammar.

use bytes::{Bytes, BytesMut};

use super::framing::Framing;
use super::link::Failed;
use super::reply_head::{MAX_HEAD_BYTES, Read, ReplyHead, read_head};
use crate::transport::Broken;

/// A head that has not come whole.
#[derive(Default)]
pub(super) struct IncomingHead {
    bytes: BytesMut,
    heard: Heard,
}

/// Whether anything has come of an answer.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Heard {
    #[default]
    Nothing,
    Something,
}

impl IncomingHead {
    /// Takes in the next piece, which is not empty. Returns the head if it is whole, and what came after it.
    pub(super) fn push(&mut self, piece: Bytes) -> Result<Option<(ReplyHead, Bytes)>, Failed> {
        self.heard = Heard::Something;
        let bytes = if self.bytes.is_empty() {
            piece
        } else {
            self.bytes.extend_from_slice(&piece);
            // A head ends with a line: before the next end of one there is nothing to find that was not there before.
            if memchr::memchr(b'\n', &piece).is_none() && self.bytes.len() < MAX_HEAD_BYTES {
                return Ok(None);
            }
            std::mem::take(&mut self.bytes).freeze()
        };
        match read_head(bytes)? {
            Read::Whole(head, rest) => Ok(Some((head, rest))),
            Read::Part(bytes) => {
                self.bytes = BytesMut::from(bytes);
                Ok(None)
            }
        }
    }

    /// The connection has ended. What is wrong: with what came last, if anything, and otherwise that it has ended.
    pub(super) fn end(&mut self) -> Broken {
        match read_head(std::mem::take(&mut self.bytes).freeze()) {
            Err(Failed::Broken(broken)) => broken,
            _ => Broken::Closed,
        }
    }

    /// Whether anything has come.
    pub(super) fn heard(&self) -> Heard {
        self.heard
    }
}

/// A body of which not all has been handed out.
pub(super) struct IncomingBody {
    framing: Framing,
    /// What has come and is not handed out yet.
    rest: Bytes,
}

impl IncomingBody {
    /// A body that ends as `framing` says, and what of it came with the head.
    pub(super) fn new(framing: Framing, rest: Bytes) -> Self {
        Self { framing, rest }
    }

    /// Takes the next piece out of what has come; `None` if there is no more of it.
    pub(super) fn next(&mut self) -> Result<Option<Bytes>, Broken> {
        self.framing.next(&mut self.rest).map_err(Broken::Chunk)
    }

    /// Takes in what comes next, after everything before has been handed out; nothing is the end of the connection. Returns
    /// the next piece if that is all there is in it: most tokens come so, and then what is copied is what goes on.
    pub(super) fn push(&mut self, come: &[u8]) -> Result<Option<Bytes>, Broken> {
        if let Some(data) = self.framing.only_chunk(come) {
            return Ok(Some(Bytes::copy_from_slice(data)));
        }
        match &self.framing {
            _ if !come.is_empty() => self.rest = Bytes::copy_from_slice(come),
            Framing::ToTheEnd => self.framing = Framing::Done,
            _ => return Err(Broken::Closed),
        }
        Ok(None)
    }

    /// Nothing more is to be expected, or wanted.
    pub(super) fn give_up(&mut self) {
        self.framing = Framing::Done;
    }

    /// Whether all of it has been handed out.
    pub(super) fn is_over(&self) -> bool {
        self.framing == Framing::Done
    }

    /// What has come and is not of this answer, once it is over.
    pub(super) fn surplus(&self) -> &Bytes {
        &self.rest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is found in `pieces`: how many bytes come after a head, or what is wrong.
    fn read(pieces: &[&[u8]]) -> Result<Option<usize>, String> {
        let mut incoming = IncomingHead::default();
        for piece in pieces {
            match incoming.push(Bytes::copy_from_slice(piece)) {
                Ok(Some((_, rest))) => return Ok(Some(rest.len())),
                Ok(None) => {}
                Err(Failed::Broken(broken)) => return Err(broken.to_string()),
                Err(_) => return Err("another failure".to_owned()),
            }
        }
        Ok(None)
    }

    #[test]
    fn a_head_in_two_parts_may_have_a_long_body_behind_it() {
        let body = vec![b'x'; MAX_HEAD_BYTES];
        let head = b"HTTP/1.1 200 OK\r\ncontent-length: 65536\r\n\r\n";
        let rest = [&head[20..], &body].concat();
        assert_eq!(read(&[&head[..20], &rest]), Ok(Some(body.len())));
    }

    #[test]
    fn a_head_of_more_than_64_kib_is_refused_wherever_it_is_cut() {
        let field = [&b"x: "[..], &vec![b'y'; MAX_HEAD_BYTES], b"\r\n\r\n"].concat();
        let whole = [&b"HTTP/1.1 200 OK\r\n"[..], &field].concat();
        for length in [whole.len(), MAX_HEAD_BYTES, 10_000] {
            let said = read(&whole.chunks(length).collect::<Vec<_>>()).unwrap_err();
            assert!(said.contains("64 KiB"), "{length}: {said}");
        }
        assert_eq!(
            read(&[&whole[..20], &vec![b'y'; MAX_HEAD_BYTES - 21]]),
            Ok(None),
            "there is room for its end"
        );
    }

    #[test]
    fn what_is_no_head_is_called_so_when_no_line_ends_it() {
        for pieces in [&[&b"HTTP/1.1 2x"[..]][..], &[&b"HTTP/1.1 2"[..], b"x"]] {
            let mut incoming = IncomingHead::default();
            let pushed =
                pieces.iter().try_for_each(|piece| incoming.push(Bytes::copy_from_slice(piece)).map(drop));
            let said = match pushed {
                Err(Failed::Broken(broken)) => broken.to_string(),
                _ => incoming.end().to_string(),
            };
            assert!(said.contains("is not HTTP/1"), "{said}");
        }
        let mut cut = IncomingHead::default();
        assert!(matches!(cut.push(Bytes::from_static(b"HTTP/1.1 2")), Ok(None)));
        assert_eq!(cut.end().to_string(), "the worker closed it");
    }
}
