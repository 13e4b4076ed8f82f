//! Reads and writes messages without a buffer for each connection.
//!
//! All connections of the thread read into the same room and parse at once what came, so that 10,000 idle ones cost
//! no memory and the bytes are still warm in the cache. Knows no meaning of a message. Next on the path:
//! [`super::message`].

use std::cell::RefCell;
use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Poll, ready};

use rustix::net::sockopt::set_tcp_congestion;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use super::message::{Malformed, MessageReader, Progress, StartLine};

/// Most that one read takes: a 200-KB body comes in a few pieces.
const READ_BYTES: usize = 128 << 10;
/// Up to this size the pieces of a request are put together first, since copying them costs less than a vectored write.
const COPIED_BYTES: usize = 16 << 10;
/// The cheapest congestion control there is: on loopback nothing is lost, and bbr's clockwork takes a tenth of the core.
const CONGESTION_CONTROL: &str = "reno";

thread_local! {
    static ROOM: RefCell<Box<[u8]>> = RefCell::new(vec![0; READ_BYTES].into_boxed_slice());
}

/// Why there is no message.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The other side closed before the first byte.
    #[error("connection closed before an answer")]
    Closed,
    /// The other side closed after the first byte and before the last.
    #[error("connection closed in the middle of an answer")]
    CutOff,
    /// The socket failed.
    #[error("read failed: {}", .0.kind())]
    Io(#[from] io::Error),
    /// The bytes are no message.
    #[error("malformed answer: {0}")]
    Malformed(#[from] Malformed),
}

/// Reads one message to its end and hands on the pieces of its body.
///
/// # Errors
/// [`ReadError`], after which the connection is of no use.
pub async fn read_message(
    stream: &mut TcpStream,
    reader: &mut MessageReader,
    mut on_body: impl FnMut(&StartLine, &[u8]),
) -> Result<(), ReadError> {
    reader.reset();
    while read_some(stream, reader, &mut on_body).await? == Progress::Partial {}
    Ok(())
}

/// Reads what has come and hands on the pieces of the body among it. The caller resets `reader` before each message.
///
/// # Errors
/// [`ReadError`], after which the connection is of no use.
pub async fn read_some(
    stream: &mut TcpStream,
    reader: &mut MessageReader,
    mut on_body: impl FnMut(&StartLine, &[u8]),
) -> Result<Progress, ReadError> {
    poll_fn(|context| {
        ROOM.with_borrow_mut(|room| {
            let mut room = ReadBuf::new(room);
            ready!(Pin::new(&mut *stream).poll_read(context, &mut room))?;
            Poll::Ready(match room.filled() {
                [] if reader.is_untouched() => Err(ReadError::Closed),
                [] if reader.ends_with_connection() => Ok(Progress::Complete),
                [] => Err(ReadError::CutOff),
                bytes => Ok(reader.feed(bytes, &mut on_body)?),
            })
        })
    })
    .await
}

/// Small messages at once, and as little work as possible in the kernel.
///
/// # Errors
/// The socket is no longer one.
pub fn set_options(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let _ = set_tcp_congestion(stream, CONGESTION_CONTROL); // a kernel without it keeps its own
    Ok(())
}

/// Writes pieces one behind the other.
///
/// # Errors
/// The socket fails.
pub async fn write_pieces<const N: usize>(
    stream: &mut TcpStream,
    mut pieces: [IoSlice<'_>; N],
) -> io::Result<()> {
    let mut rest = &mut pieces[..];
    while !rest.is_empty() {
        let bytes: usize = rest.iter().map(|piece| piece.len()).sum();
        let written = poll_fn(|context| {
            if bytes > COPIED_BYTES {
                return Pin::new(&mut *stream).poll_write_vectored(context, rest);
            }
            ROOM.with_borrow_mut(|room| {
                let mut at = 0;
                for piece in rest.iter() {
                    room[at..at + piece.len()].copy_from_slice(piece);
                    at += piece.len();
                }
                Pin::new(&mut *stream).poll_write(context, &room[..at])
            })
        })
        .await?;
        if written == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        IoSlice::advance_slices(&mut rest, written);
    }
    Ok(())
}
