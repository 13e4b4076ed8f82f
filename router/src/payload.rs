//! A request body as it came: pieces that are never joined, kept until the request has been answered.
//!
//! A long prompt is held once, and sent as often as there are attempts. Knows no JSON. Next: the transports, which send it.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use http_body::{Body, Frame, SizeHint};

use crate::turns::{TURN_BYTES, end_turn};

/// Pieces below this are copied together: a client that sends byte by byte must not cost a piece of bookkeeping for each.
const SMALL_PIECE_BYTES: usize = 4 << 10;

/// A body, cheap to clone.
#[derive(Clone, Debug)]
pub struct Payload {
    pieces: Pieces,
    len_bytes: usize,
}

/// Most bodies come in one piece, and need no list.
#[derive(Clone, Debug)]
enum Pieces {
    One(Bytes),
    Many(Arc<[Bytes]>),
}

impl Default for Payload {
    fn default() -> Self {
        Bytes::new().into()
    }
}

impl From<Bytes> for Payload {
    fn from(whole: Bytes) -> Self {
        Self { len_bytes: whole.len(), pieces: Pieces::One(whole) }
    }
}

impl Payload {
    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len_bytes
    }

    /// Whether there is nothing in it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len_bytes == 0
    }

    /// The pieces, in order.
    #[must_use]
    pub fn pieces(&self) -> &[Bytes] {
        match &self.pieces {
            Pieces::One(whole) => std::slice::from_ref(whole),
            Pieces::Many(pieces) => pieces,
        }
    }

    /// All of it in one piece; copies if it has several.
    #[must_use]
    pub fn joined(&self) -> Bytes {
        match &self.pieces {
            Pieces::One(whole) => whole.clone(),
            Pieces::Many(pieces) => {
                let mut whole = BytesMut::with_capacity(self.len_bytes);
                pieces.iter().for_each(|piece| whole.extend_from_slice(piece));
                whole.freeze()
            }
        }
    }
}

/// Puts a payload together from pieces as they arrive.
#[derive(Debug, Default)]
pub struct PayloadBuilder {
    pieces: Vec<Bytes>,
    /// Small pieces, not yet in `pieces`.
    small: BytesMut,
    len_bytes: usize,
}

impl PayloadBuilder {
    /// Length of what has come, in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len_bytes
    }

    /// Whether nothing has come.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len_bytes == 0
    }

    /// Adds the next piece.
    pub fn push(&mut self, piece: Bytes) {
        self.len_bytes += piece.len();
        let first = self.len_bytes == piece.len();
        if piece.len() >= SMALL_PIECE_BYTES || first {
            self.flush();
            self.pieces.push(piece);
            return;
        }
        self.small.extend_from_slice(&piece);
        if self.small.len() >= SMALL_PIECE_BYTES {
            self.flush();
        }
    }

    /// The payload.
    #[must_use]
    pub fn finish(mut self) -> Payload {
        self.flush();
        let pieces = match self.pieces.len() {
            0 | 1 => Pieces::One(self.pieces.pop().unwrap_or_default()),
            _ => Pieces::Many(self.pieces.into()),
        };
        Payload { pieces, len_bytes: self.len_bytes }
    }

    fn flush(&mut self) {
        if !self.small.is_empty() {
            self.pieces.push(self.small.split().freeze());
        }
    }
}

/// A payload on its way to a worker. Lets others of its thread run after each [`TURN_BYTES`].
#[derive(Clone, Debug)]
pub struct PayloadBody {
    left: VecDeque<Bytes>,
    left_bytes: usize,
    turn_bytes: usize,
}

impl From<Payload> for PayloadBody {
    fn from(payload: Payload) -> Self {
        let left_bytes = payload.len();
        let left = payload.pieces().iter().filter(|piece| !piece.is_empty()).cloned().collect();
        Self { left, left_bytes, turn_bytes: 0 }
    }
}

impl Body for PayloadBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if self.turn_bytes >= TURN_BYTES {
            self.turn_bytes = 0;
            end_turn(cx);
            return Poll::Pending;
        }
        let Some(piece) = self.left.front_mut() else { return Poll::Ready(None) };
        let part = if piece.len() > TURN_BYTES { piece.split_to(TURN_BYTES) } else { std::mem::take(piece) };
        if piece.is_empty() {
            self.left.pop_front();
        }
        self.left_bytes -= part.len();
        self.turn_bytes += part.len();
        Poll::Ready(Some(Ok(Frame::data(part))))
    }

    fn is_end_stream(&self) -> bool {
        self.left_bytes == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left_bytes as u64)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn build(pieces: &[Vec<u8>]) -> Payload {
        let mut builder = PayloadBuilder::default();
        pieces.iter().for_each(|piece| builder.push(Bytes::copy_from_slice(piece)));
        builder.finish()
    }

    /// What comes out, and the longest run between two pauses.
    fn drain(payload: Payload) -> (Vec<u8>, usize) {
        let mut body = PayloadBody::from(payload);
        let mut cx = Context::from_waker(std::task::Waker::noop());
        let (mut all, mut run, mut longest) = (Vec::new(), 0, 0);
        loop {
            match Pin::new(&mut body).poll_frame(&mut cx) {
                Poll::Pending => run = 0,
                Poll::Ready(None) => return (all, longest),
                Poll::Ready(Some(Ok(frame))) => {
                    let data = frame.into_data().unwrap();
                    run += data.len();
                    longest = longest.max(run);
                    all.extend_from_slice(&data);
                }
                Poll::Ready(Some(Err(never))) => match never {},
            }
        }
    }

    proptest! {
        #[test]
        fn what_goes_in_comes_out(pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..9_000), 0..8)) {
            let payload = build(&pieces);
            let whole = pieces.concat();
            prop_assert_eq!(payload.len(), whole.len());
            prop_assert_eq!(&payload.joined()[..], &whole[..]);
            prop_assert_eq!(drain(payload).0, whole);
        }
    }

    #[test]
    fn a_long_body_is_sent_in_turns() {
        let payload = build(&[vec![1; 5 << 20], vec![2; 100], vec![3; 300 << 10]]);
        let len = payload.len();
        let (all, longest) = drain(payload);
        assert_eq!(all.len(), len);
        assert!(longest < 2 * TURN_BYTES, "{longest}");
    }

    #[test]
    fn single_bytes_are_kept_together() {
        let pieces = vec![vec![7]; 10_000];
        assert!(build(&pieces).pieces().len() < 10);
    }
}
