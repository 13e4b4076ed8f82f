//! How a connection between two routers begins: each shows that it knows what is in the common seed file, without saying it.
//!
//! What follows is sealed and not encrypted, and no prompt is in it: what is said are lengths, hashes under a secret seed, and times. Knows no requests. `proto/replica.proto` says what is on the wire.

use std::io;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use prost::Message;
use ring::hmac::{self, HMAC_SHA256};
use roundhouse_wire::replica::{Hello, Proof};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

use super::seal::Seals;

/// The protocol's.
const VERSION: u32 = 1;
const NONCE_BYTES: usize = 16;
/// The longest message.
pub(super) const MOST_BYTES: usize = 1 << 20;
/// The longest message of one that has not shown yet that it knows the key.
const MOST_STRANGE_BYTES: usize = 256;
/// Of a message's length, before it.
pub(super) const LENGTH_BYTES: usize = 4;
/// Time for all of the beginning.
pub(super) const LIMIT: Duration = Duration::from_secs(5);

/// Why a connection between routers is of no use, or has ended.
#[derive(Debug, thiserror::Error)]
pub enum ReplicaError {
    /// There is none, or it broke.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// What came is none of the protocol.
    #[error("what listens there is no router of this kind: {0}")]
    Malformed(#[from] prost::DecodeError),
    /// The same.
    #[error("what listens there is no router of this kind: it announces {0} bytes")]
    TooLong(u32),
    /// Another release.
    #[error("it speaks version {0} of the protocol, and this router {VERSION}")]
    Version(u32),
    /// It cannot show that it has the same file.
    #[error("it does not have the same --prefix-seed-file")]
    Stranger,
    /// It has hung up where it should have shown that.
    #[error("it has refused: most likely its --prefix-seed-file is another one")]
    Refused,
    /// What came is not what the other router says next.
    #[error("somebody has changed what it says")]
    Forged,
    /// What it has drawn is none of the protocol.
    #[error("what listens there is no router of this kind: its nonce has {0} bytes")]
    Nonce(usize),
    /// It is told by another way.
    #[error("the router there is told already, at another of its addresses")]
    Twice,
    /// The router itself is there.
    #[error("this router itself listens there")]
    Itself,
    /// Something took too long.
    #[error("{0} is late")]
    Late(&'static str),
    /// It could not be told all that there was to tell.
    #[error("it takes too long to take what it is told")]
    Slow,
    /// The other side has ended it, or has come back with another one.
    #[error("the connection was ended")]
    Ended,
}

/// A router, as others know it.
#[derive(Clone, Debug)]
pub(super) struct Identity {
    /// Drawn anew by each process.
    pub(super) router: u64,
    /// Common to all.
    pub(super) key: hmac::Key,
}

impl Identity {
    pub(super) fn new(router: u64, key: &[u8]) -> Self {
        Self { router, key: hmac::Key::new(HMAC_SHA256, key) }
    }

    /// What shows that whoever drew `own` knows the key.
    fn text(router: u64, own: &[u8], others: &[u8]) -> Vec<u8> {
        [own, others, &router.to_le_bytes()].concat()
    }
}

/// Which side one is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Side {
    /// It tells.
    Connects,
    /// It hears.
    Accepts,
}

/// A connection that has begun.
#[derive(Debug)]
pub(super) struct Begun<T> {
    /// The other router's number.
    pub(super) router: u64,
    /// What `meets` says of it.
    pub(super) met: T,
    /// Of what is said from now on.
    pub(super) seals: Seals,
}

/// Begins a connection on either side. `meets` is asked for the other router before that one can know that it is to be connected.
///
/// # Errors
/// When the other one is none that may know what is told, or `meets` says so.
pub(super) async fn begin<S, T>(
    stream: &mut S,
    identity: &Identity,
    side: Side,
    meets: impl FnOnce(u64) -> Result<T, ReplicaError>,
) -> Result<Begun<T>, ReplicaError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let own: [u8; NONCE_BYTES] = rand::random();
    let nonce = Bytes::copy_from_slice(&own);
    write(stream, &Hello { version: VERSION, router: identity.router, nonce }).await?;
    let hello: Hello = read(stream, MOST_STRANGE_BYTES).await?.ok_or(ReplicaError::Ended)?;
    if hello.version != VERSION {
        return Err(ReplicaError::Version(hello.version));
    }
    if hello.router == identity.router {
        return Err(ReplicaError::Itself);
    }
    if hello.nonce.len() != NONCE_BYTES {
        return Err(ReplicaError::Nonce(hello.nonce.len()));
    }
    let met = meets(hello.router)?;
    let signed = hmac::sign(&identity.key, &Identity::text(identity.router, &own, &hello.nonce));
    let proof = Proof { proof: Bytes::copy_from_slice(signed.as_ref()) };
    if side == Side::Connects {
        write(stream, &proof).await?;
    }
    let theirs: Proof = match read(stream, MOST_STRANGE_BYTES).await {
        Ok(Some(theirs)) => theirs,
        Ok(None) if side == Side::Connects => return Err(ReplicaError::Refused),
        Ok(None) => return Err(ReplicaError::Ended),
        Err(error) => return Err(error),
    };
    // One that only sends back what it was sent would have this side's number, or a proof over the nonces the other way around.
    let text = Identity::text(hello.router, &hello.nonce, &own);
    hmac::verify(&identity.key, &text, &theirs.proof).map_err(|_| ReplicaError::Stranger)?;
    if side == Side::Accepts {
        write(stream, &proof).await?;
    }
    let seals = match side {
        Side::Connects => Seals::new(&identity.key, &own, &hello.nonce),
        Side::Accepts => Seals::new(&identity.key, &hello.nonce, &own),
    };
    Ok(Begun { router: hello.router, met, seals })
}

/// A message with its length before it.
pub(super) fn framed(message: &impl Message) -> Bytes {
    let mut frame = BytesMut::with_capacity(LENGTH_BYTES + message.encoded_len());
    let bytes = u32::try_from(message.encoded_len()).unwrap_or(u32::MAX);
    frame.extend_from_slice(&bytes.to_le_bytes());
    // A BytesMut grows as far as there is memory.
    let _ = message.encode(&mut frame);
    frame.freeze()
}

async fn write(stream: &mut (impl AsyncWrite + Unpin), message: &impl Message) -> io::Result<()> {
    stream.write_all(&framed(message)).await?;
    stream.flush().await
}

/// The next message, of at most so many bytes; `None` if the other side has hung up between two.
///
/// # Errors
/// When it breaks off, or is no such message.
async fn read<M: Message + Default>(
    stream: &mut (impl AsyncRead + Unpin),
    most_bytes: usize,
) -> Result<Option<M>, ReplicaError> {
    let message = read_message(stream, most_bytes).await?;
    Ok(message.map(|message| M::decode(&message[..])).transpose()?)
}

/// The same as it came.
///
/// # Errors
/// When it breaks off, or is longer.
pub(super) async fn read_message(
    stream: &mut (impl AsyncRead + Unpin),
    most_bytes: usize,
) -> Result<Option<Vec<u8>>, ReplicaError> {
    let mut length = [0; LENGTH_BYTES];
    match stream.read_exact(&mut length).await {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        read => read?,
    };
    let bytes = u32::from_le_bytes(length);
    let count = usize::try_from(bytes).ok().filter(|count| *count <= most_bytes);
    let mut message = vec![0; count.ok_or(ReplicaError::TooLong(bytes))?];
    stream.read_exact(&mut message).await?;
    Ok(Some(message))
}

#[cfg(test)]
mod tests {
    use tokio::io::duplex;

    use super::*;

    /// What either side makes of the other: the one that connects, and the one that accepts.
    async fn both(
        connects: &Identity,
        accepts: &Identity,
    ) -> (Result<u64, ReplicaError>, Result<u64, ReplicaError>) {
        let (mut one, mut other) = duplex(4_096);
        let connecting = async {
            let begun = begin(&mut one, connects, Side::Connects, |_| Ok(())).await;
            drop(one);
            begun.map(|begun| begun.router)
        };
        let accepting = async {
            let begun = begin(&mut other, accepts, Side::Accepts, |_| Ok(())).await;
            drop(other);
            begun.map(|begun| begun.router)
        };
        tokio::join!(connecting, accepting)
    }

    #[tokio::test]
    async fn routers_with_the_same_key_know_each_other() {
        let (one, other) = (Identity::new(1, b"key"), Identity::new(2, b"key"));
        let (connected, accepted) = both(&one, &other).await;
        assert_eq!((connected.unwrap(), accepted.unwrap()), (2, 1));
    }

    #[tokio::test]
    async fn a_stranger_and_the_router_itself_are_refused() {
        let (one, stranger) = (Identity::new(1, b"key"), Identity::new(2, b"other"));
        let (connected, accepted) = both(&stranger, &one).await;
        assert!(matches!(connected, Err(ReplicaError::Refused)), "{connected:?}");
        assert!(matches!(accepted, Err(ReplicaError::Stranger)), "{accepted:?}");
        let (connected, accepted) = both(&one, &one).await;
        assert!(matches!((connected, accepted), (Err(ReplicaError::Itself), Err(ReplicaError::Itself))));
    }

    #[tokio::test]
    async fn who_sends_back_what_it_was_sent_is_a_stranger() {
        let (mut one, mut mirror) = duplex(4_096);
        let identity = Identity::new(1, b"key");
        let mirroring = async {
            let mut hello: Hello = read(&mut mirror, MOST_BYTES).await.unwrap().unwrap();
            hello.router = 2;
            write(&mut mirror, &hello).await.unwrap();
            let proof: Proof = read(&mut mirror, MOST_BYTES).await.unwrap().unwrap();
            write(&mut mirror, &proof).await.unwrap();
        };
        let beginning = begin(&mut one, &identity, Side::Connects, |_| Ok(()));
        let (begun, ()) = tokio::join!(beginning, mirroring);
        assert!(matches!(begun, Err(ReplicaError::Stranger)), "{begun:?}");
    }

    #[tokio::test]
    async fn one_that_is_not_to_be_met_does_not_learn_that_it_was() {
        let (mut one, mut other) = duplex(4_096);
        write(&mut other, &Hello { version: VERSION, router: 2, nonce: Bytes::from_static(&[0; 16]) })
            .await
            .unwrap();
        let identity = Identity::new(1, b"key");
        let begun = begin(&mut one, &identity, Side::Connects, |_| Err::<(), _>(ReplicaError::Twice)).await;
        assert!(matches!(begun, Err(ReplicaError::Twice)), "{begun:?}");
        drop(one);
        let _: Hello = read(&mut other, MOST_BYTES).await.unwrap().unwrap();
        assert!(read::<Proof>(&mut other, MOST_BYTES).await.unwrap().is_none());
    }

    #[tokio::test]
    async fn garbage_is_refused_before_it_is_held() {
        for (garbage, expected) in [
            (&b"GET / HTTP/1.1\r\n\r\n"[..], "bytes"),
            (&[0, 4, 0, 0], "1024 bytes"),
            (&[2, 0, 0, 0, 0xff, 0xff], "no router"),
        ] {
            let (mut one, mut other) = duplex(4_096);
            other.write_all(garbage).await.unwrap();
            let error =
                begin(&mut one, &Identity::new(1, b"key"), Side::Accepts, |_| Ok(())).await.unwrap_err();
            assert!(error.to_string().contains(expected), "{error}");
        }
    }
}
