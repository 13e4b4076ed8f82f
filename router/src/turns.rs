//! How long one request may keep its thread from all others: the connections of a core take turns.
//!
//! A task that wakes itself runs again before the runtime looks at sockets, up to 61 times in a row. So who ends a turn waits until it has.

use std::future::Future;
use std::pin::pin;
use std::task::Context;

/// After so much of a body others get their turn: some 50 µs of copying from or into a socket; the slowest JSON we know takes some 260 µs to
/// be scanned (`benches/parse.rs`).
pub const TURN_BYTES: usize = 64 << 10;

/// A body of more is long: its turns are shorter, at the price of more of them.
pub const LONG_BODY_BYTES: usize = 1 << 20;

/// A turn of a long body. The kernel may stretch a call that moves this much tenfold: it sends for other sockets within.
pub const LONG_BODY_TURN_BYTES: usize = 32 << 10;

/// How long a turn of a body is of which `bytes` have come, or are known to come.
#[must_use]
pub fn turn_bytes(bytes: usize) -> usize {
    if bytes > LONG_BODY_BYTES { LONG_BODY_TURN_BYTES } else { TURN_BYTES }
}

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

    const ROUND_TRIPS: u32 = 100;

    #[tokio::test]
    async fn sockets_are_looked_at_between_two_turns() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut client = tokio::net::TcpStream::connect(address).await.unwrap();
        let (mut server, _) = listener.accept().await.unwrap();
        let mut turns = 0;
        let busy = poll_fn(move |cx| {
            turns += 1;
            end_turn(cx);
            // Ten turns a round trip are plenty where sockets are looked at after each; where that is after 61 of them, too few.
            if turns < 10 * ROUND_TRIPS { Poll::Pending } else { Poll::Ready(()) }
        });
        let others = async move {
            for _ in 0..ROUND_TRIPS {
                // Who reads before anything is there waits for the runtime to look.
                let (read, written) = tokio::join!(biased; server.read_u8(), client.write_u8(1));
                read.unwrap();
                written.unwrap();
            }
        };
        // In a task of its own: the runtime looks at sockets after each turn of the main one.
        let both = tokio::spawn(async {
            tokio::select! {
                biased;
                () = busy => panic!("nobody else was let through"),
                () = others => {}
            }
        });
        both.await.unwrap();
    }
}
