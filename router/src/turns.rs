//! How long one request may keep its thread from all others: the connections of a core take turns.
//!
//! A task that wakes itself runs again before the runtime looks at sockets, up to 61 times in a row. So who ends a turn waits until it has.

use std::future::Future;
use std::pin::pin;
use std::task::Context;

/// After so much of a body its sender ends its turn: some 100 µs of copying into a socket.
pub const TURN_BYTES: usize = 128 << 10;

/// Ends a turn: whoever polls with `cx` is woken once others of the thread have run and its sockets have been looked at. To be called before
/// returning `Pending`.
pub fn end_turn(cx: &mut Context<'_>) {
    // Polled once it has taken the waker; nothing is left to be done by it.
    let _ = pin!(tokio::task::yield_now()).poll(cx);
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::task::Poll;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test]
    async fn sockets_are_looked_at_between_two_turns() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut client = tokio::net::TcpStream::connect(address).await.unwrap();
        let (mut server, _) = listener.accept().await.unwrap();
        let mut turns = 0;
        let busy = poll_fn(|cx| {
            turns += 1;
            end_turn(cx);
            // Far more than anybody needs who is let through at all.
            if turns < 10_000 { Poll::Pending } else { Poll::Ready(()) }
        });
        let others = async {
            for _ in 0..100 {
                client.write_u8(1).await.unwrap();
                server.read_u8().await.unwrap();
            }
        };
        tokio::select! {
            biased;
            () = busy => panic!("nobody else was let through"),
            () = others => {}
        }
    }
}
