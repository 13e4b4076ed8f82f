//! gRPC's frames: messages, each with its length before it, out of data that is cut anywhere, and into it. Knows neither who sends them nor what they say.

use std::marker::PhantomData;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use prost::Message;
use roundhouse_wire::FRAME_BYTES;

/// Largest message that is taken unless told otherwise: far more than is sent at once, far less than would harm.
const MAX_MESSAGE_BYTES: usize = 16 << 20;

/// Messages as they come.
pub struct Messages<M> {
    /// What the messages are.
    kind: PhantomData<fn() -> M>,
    /// How long they may be.
    most_bytes: usize,
    /// Whole messages, and maybe the beginning of one.
    ready: Bytes,
    /// The beginning of a message whose rest has not come.
    partial: BytesMut,
}

impl<M> Default for Messages<M> {
    fn default() -> Self {
        Self::of_at_most(MAX_MESSAGE_BYTES)
    }
}

impl<M> Messages<M> {
    /// None of which is longer.
    #[must_use]
    pub fn of_at_most(most_bytes: usize) -> Self {
        Self { kind: PhantomData, most_bytes, ready: Bytes::new(), partial: BytesMut::new() }
    }
}

impl<M: Message + Default> Messages<M> {
    /// Takes in what came, once [`Messages::take_next`] has nothing more to give. Nothing is copied unless a message is cut.
    pub fn push(&mut self, data: Bytes) {
        if self.partial.is_empty() {
            self.ready = data;
            return;
        }
        self.partial.extend_from_slice(&data);
        if self.partial.len() >= FRAME_BYTES && self.partial.len() >= FRAME_BYTES + length(&self.partial) {
            self.ready = self.partial.split().freeze();
        }
    }

    /// The next message; `None` if it has not come whole.
    ///
    /// # Errors
    /// What is wrong, as it follows "the answer".
    pub fn take_next(&mut self) -> Result<Option<M>, &'static str> {
        if self.ready.is_empty() {
            return Ok(None);
        }
        let has_frame = self.ready.len() >= FRAME_BYTES;
        if has_frame && self.ready[0] != 0 {
            return Err("is compressed, which was not asked for");
        }
        if has_frame && length(&self.ready) > self.most_bytes {
            return Err("has a message that is too long");
        }
        if !has_frame || self.ready.len() < FRAME_BYTES + length(&self.ready) {
            self.partial.extend_from_slice(&self.ready);
            self.ready.clear();
            return Ok(None);
        }
        let len = length(&self.ready);
        self.ready.advance(FRAME_BYTES);
        let message = self.ready.split_to(len);
        M::decode(message).map(Some).map_err(|_| "has a message that is none")
    }

    /// Whether what came ends with a message.
    #[must_use]
    pub fn ends_whole(&self) -> bool {
        self.ready.is_empty() && self.partial.is_empty()
    }
}

/// Length of the message that begins `framed`, which has its whole frame.
fn length(framed: &[u8]) -> usize {
    framed[1..FRAME_BYTES].iter().fold(0, |length, byte| length << 8 | usize::from(*byte))
}

/// A message in its frame; `None` if it is too long for one.
#[must_use]
pub fn framed(message: &impl Message) -> Option<Bytes> {
    u32::try_from(message.encoded_len()).ok()?;
    let mut framed = BytesMut::new();
    frame_into(&mut framed, message);
    Some(framed.freeze())
}

/// Adds a message in its frame, which is one of some MiB at most.
///
/// # Panics
/// When it is one of 4 GiB.
pub fn frame_into(framed: &mut BytesMut, message: &impl Message) {
    let length = message.encoded_len();
    framed.reserve(FRAME_BYTES + length);
    framed.put_u8(0);
    framed.put_u32(u32::try_from(length).expect("messages are short"));
    message.encode_raw(framed);
}
