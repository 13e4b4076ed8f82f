//! What shows of each frame that it is the sender's, and the next one: whoever is on the way can neither change, add, leave out nor repeat one.
//!
//! Others' words go into the ledger and the tree as they are, which takes them for what an honest router says.

use prost::Message as _;
use ring::hmac;
use roundhouse_wire::replica::Words;
use tokio::io::{AsyncRead, AsyncReadExt as _};

use super::handshake::{MOST_BYTES, ReplicaError, read_message};

/// Behind each frame.
pub(super) const SEAL_BYTES: usize = 32;

/// One connection's, on either side.
#[derive(Debug)]
pub(super) struct Seals {
    key: hmac::Key,
    frames: u64,
}

impl Seals {
    /// Those of a connection that began with these nonces.
    pub(super) fn new(key: &hmac::Key, connects: &[u8], accepts: &[u8]) -> Self {
        let of_connection = hmac::sign(key, &[b"words", connects, accepts].concat());
        Self { key: hmac::Key::new(hmac::HMAC_SHA256, of_connection.as_ref()), frames: 0 }
    }

    /// That of the next frame, whose message is this.
    pub(super) fn next(&mut self, message: &[u8]) -> [u8; SEAL_BYTES] {
        let mut context = hmac::Context::with_key(&self.key);
        context.update(&self.frames.to_le_bytes());
        context.update(message);
        self.frames += 1;
        let mut seal = [0; SEAL_BYTES];
        seal.copy_from_slice(context.sign().as_ref());
        seal
    }

    /// The next words; `None` if the other side has hung up between two frames.
    ///
    /// # Errors
    /// When they break off, or are not the other router's next.
    pub(super) async fn read(
        &mut self,
        stream: &mut (impl AsyncRead + Unpin),
    ) -> Result<Option<Words>, ReplicaError> {
        let Some(message) = read_message(stream, MOST_BYTES).await? else { return Ok(None) };
        let mut seal = [0; SEAL_BYTES];
        stream.read_exact(&mut seal).await?;
        // How long this takes may tell how much of a seal is right. There is one try for each: a wrong one ends the connection.
        if seal != self.next(&message) {
            return Err(ReplicaError::Forged);
        }
        Ok(Some(Words::decode(&message[..])?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replicas::handshake::{LENGTH_BYTES, framed};

    fn seals(accepts: &[u8]) -> Seals {
        Seals::new(&hmac::Key::new(hmac::HMAC_SHA256, b"key"), b"one", accepts)
    }

    fn sealed(seals: &mut Seals, are_known: bool) -> Vec<u8> {
        let frame = framed(&Words { words: Vec::new(), are_known });
        let seal = seals.next(&frame[LENGTH_BYTES..]);
        [&frame[..], &seal].concat()
    }

    #[tokio::test]
    async fn frames_are_read_as_they_were_sent_and_in_order() {
        let mut sender = seals(b"two");
        let (first, second) = (sealed(&mut sender, true), sealed(&mut sender, false));
        let all = [first.clone(), second.clone()].concat();
        let (mut receiver, mut stream) = (seals(b"two"), &all[..]);
        assert!(receiver.read(&mut stream).await.unwrap().unwrap().are_known);
        assert!(!receiver.read(&mut stream).await.unwrap().unwrap().are_known);
        assert!(receiver.read(&mut stream).await.unwrap().is_none());
        let mut changed = first.clone();
        changed[LENGTH_BYTES] ^= 16;
        for wrong in [second, changed, [first.clone(), first.clone()].concat()] {
            let (mut receiver, mut stream) = (seals(b"two"), &wrong[..]);
            let mut read = receiver.read(&mut stream).await;
            if read.is_ok() {
                read = receiver.read(&mut stream).await;
            }
            assert!(matches!(read, Err(ReplicaError::Forged)), "{read:?}");
        }
        let read = seals(b"three").read(&mut &first[..]).await;
        assert!(matches!(read, Err(ReplicaError::Forged)), "of another connection");
    }
}
