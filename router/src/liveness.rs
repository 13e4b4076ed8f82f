//! What every TCP connection of the router asks of the system, on either side.
//!
//! A host that loses power or its network says nothing when it goes. Without these, what waits there for its first byte would wait
//! until the request's own time limit, and a stream until its idle limit; with them it breaks within half a minute, and what
//! waited is tried elsewhere as after any other break.

use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::net::TcpStream;

/// How long a connection is quiet before the other side is asked whether it is there.
const QUIET: Duration = Duration::from_secs(10);
/// Between two such questions, of which so many stay without an answer before the connection is given up.
const BETWEEN: Duration = Duration::from_secs(5);
const QUESTIONS: u32 = 3;
/// How long a worker may take nothing of what it is sent.
pub const WORKER_STALL: Duration = Duration::from_secs(20);

/// Small writes do not wait for the acknowledgement of those before, and a peer that has vanished is noticed: by what it does not
/// acknowledge for `stall`, or if nothing was sent, by its not answering whether it is there.
///
/// The system takes a peer that is there and reads nothing for `stall` as gone too, so a client's must not be shorter than the time it
/// has for that.
pub fn configure(stream: &TcpStream, stall: Duration) {
    if let Err(error) = configured(stream, stall) {
        tracing::debug!(%error, "a socket option could not be set");
    }
}

fn configured(stream: &TcpStream, stall: Duration) -> std::io::Result<()> {
    let socket = SockRef::from(stream);
    socket.set_tcp_nodelay(true)?;
    #[cfg(target_os = "linux")]
    socket.set_tcp_user_timeout(Some(stall))?;
    #[cfg(not(target_os = "linux"))]
    let _ = stall;
    let keepalive = TcpKeepalive::new().with_time(QUIET).with_interval(BETWEEN).with_retries(QUESTIONS);
    socket.set_tcp_keepalive(&keepalive)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_connection_does_not_delay_and_notices_a_peer_that_has_vanished() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        configured(&stream, WORKER_STALL).unwrap();
        let socket = SockRef::from(&stream);
        assert!(socket.tcp_nodelay().unwrap() && socket.keepalive().unwrap());
        assert_eq!(socket.tcp_keepalive_time().unwrap(), QUIET);
        #[cfg(target_os = "linux")]
        assert_eq!(socket.tcp_user_timeout().unwrap(), Some(WORKER_STALL));
    }
}
