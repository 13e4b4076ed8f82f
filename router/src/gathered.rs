//! Short writes in one piece.
//!
//! `writev` takes locks of the file and checks each of its parts; for a token's chunk, which is three short parts, a copy and a
//! plain `send` cost less. Used on both sides, by [`listener`](crate::listener) and [`transport`](crate::transport).

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::AsyncWrite;
use tokio::net::TcpStream;

/// Up to this many bytes are copied together.
const SHORT_BYTES: usize = 2 << 10;

/// Writes the beginning of `buffers`, and returns how many bytes that were.
pub(crate) fn poll_write_gathered(
    stream: &mut TcpStream,
    cx: &mut Context<'_>,
    buffers: &[IoSlice<'_>],
) -> Poll<io::Result<usize>> {
    let mut gathered = [0; SHORT_BYTES];
    match gather(buffers, &mut gathered) {
        Some(bytes) => Pin::new(stream).poll_write(cx, bytes),
        None => Pin::new(stream).poll_write_vectored(cx, buffers),
    }
}

/// All of `buffers` in one, if there is room.
fn gather<'a>(buffers: &[IoSlice<'_>], room: &'a mut [u8]) -> Option<&'a [u8]> {
    let mut length = 0;
    for buffer in buffers {
        room.get_mut(length..length + buffer.len())?.copy_from_slice(buffer);
        length += buffer.len();
    }
    Some(&room[..length])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fits_is_one_piece_and_what_does_not_is_left_as_it_is() {
        let parts = [&b"5\r\n"[..], b"hello", b"", b"\r\n"].map(IoSlice::new);
        assert_eq!(gather(&parts, &mut [0; 10]), Some(&b"5\r\nhello\r\n"[..]));
        assert_eq!(gather(&parts, &mut [0; 9]), None);
        assert_eq!(gather(&[], &mut [0; 9]), Some(&b""[..]));
    }
}
