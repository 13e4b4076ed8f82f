//! A request body as it came: pieces that are never joined, kept until the request has been answered.
//!
//! A long prompt is held once, and sent as often as there are attempts. Knows no JSON. Next: the transports, which send it.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::{Buf, Bytes, BytesMut};
use http_body::{Body, Frame, SizeHint};

use crate::body_chunks::{BodyChunks, Chunk};
use crate::turns::{LONG_BODY_BYTES, end_turn, turn_bytes};

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

    /// The same in memory of its own if it is short: what came in one piece with a request's head keeps the buffer of its connection.
    #[must_use]
    pub fn compact(self) -> Self {
        match self.pieces {
            Pieces::One(whole) if whole.len() <= SMALL_PIECE_BYTES => Bytes::copy_from_slice(&whole).into(),
            pieces => Self { pieces, ..self },
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
    /// What is being filled of a long body.
    chunk: Option<Chunk>,
    chunks: Option<Arc<BodyChunks>>,
    len_bytes: usize,
}

impl PayloadBuilder {
    /// A long body is kept in `chunks`.
    #[must_use]
    pub fn in_chunks(chunks: &Arc<BodyChunks>) -> Self {
        Self { chunks: Some(Arc::clone(chunks)), ..Self::default() }
    }

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
        if self.len_bytes > LONG_BODY_BYTES && self.chunks.is_some() {
            // Chunks cost no turn much when they are freed.
            self.push_long(piece);
            return;
        }
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

    fn push_long(&mut self, mut piece: Bytes) {
        while !piece.is_empty() {
            let chunk = match self.chunk.take() {
                Some(chunk) => Some(chunk),
                None => self.chunks.as_ref().and_then(|chunks| chunks.take().ok()),
            };
            self.flush();
            // Where there is no memory for it, it stays where it is.
            let Some(mut chunk) = chunk else { return self.pieces.push(piece) };
            piece.advance(chunk.fill(&piece));
            if chunk.is_full() {
                self.pieces.push(chunk.freeze());
            } else {
                self.chunk = Some(chunk);
            }
        }
    }

    /// The payload.
    #[must_use]
    pub fn finish(mut self) -> Payload {
        self.flush();
        self.pieces.extend(self.chunk.take().map(Chunk::freeze));
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

/// A payload on its way to a worker. Lets others of its thread run after each [turn](turn_bytes).
#[derive(Clone, Debug)]
pub struct PayloadBody {
    left: VecDeque<Bytes>,
    left_bytes: usize,
    /// Of a turn.
    most_bytes: usize,
    turn_bytes: usize,
}

impl From<Payload> for PayloadBody {
    fn from(payload: Payload) -> Self {
        let left_bytes = payload.len();
        let left = payload.pieces().iter().filter(|piece| !piece.is_empty()).cloned().collect();
        Self { left, left_bytes, most_bytes: turn_bytes(left_bytes), turn_bytes: 0 }
    }
}

impl Body for PayloadBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let most_bytes = self.most_bytes;
        if self.turn_bytes >= most_bytes {
            self.turn_bytes = 0;
            end_turn(cx);
            return Poll::Pending;
        }
        let Some(piece) = self.left.front_mut() else { return Poll::Ready(None) };
        let part = if piece.len() > most_bytes { piece.split_to(most_bytes) } else { std::mem::take(piece) };
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
    use crate::body_chunks::CHUNK_BYTES;

    /// Memory that can be seen to be held.
    struct Held {
        bytes: Vec<u8>,
        _held: Arc<()>,
    }

    impl AsRef<[u8]> for Held {
        fn as_ref(&self) -> &[u8] {
            &self.bytes
        }
    }

    fn build(pieces: &[Vec<u8>]) -> Payload {
        build_with(PayloadBuilder::default(), pieces)
    }

    fn build_with(mut builder: PayloadBuilder, pieces: &[Vec<u8>]) -> Payload {
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
        assert!(longest < 2 * turn_bytes(len), "{longest}");
    }

    #[test]
    fn a_long_body_holds_nothing_of_what_it_came_in() {
        let pieces: Vec<Vec<u8>> = (0..600_u32).map(|n| vec![n as u8; 5_000 + n as usize]).collect();
        let (held, chunks) = (Arc::new(()), Arc::new(BodyChunks::default()));
        let mut builder = PayloadBuilder::in_chunks(&chunks);
        for piece in &pieces {
            builder.push(Bytes::from_owner(Held { bytes: piece.clone(), _held: Arc::clone(&held) }));
        }
        let payload = builder.finish();
        assert_eq!(&payload.joined()[..], &pieces.concat()[..]);
        let short: usize = pieces
            .iter()
            .scan(0, |sum, piece| {
                *sum += piece.len();
                (*sum <= LONG_BODY_BYTES).then_some(())
            })
            .count();
        assert_eq!(Arc::strong_count(&held), 1 + short);
        assert!(payload.pieces().len() <= short + payload.len() / CHUNK_BYTES + 1);
    }

    #[test]
    fn single_bytes_are_kept_together() {
        let pieces = vec![vec![7]; 10_000];
        assert!(build(&pieces).pieces().len() < 10);
    }
}
