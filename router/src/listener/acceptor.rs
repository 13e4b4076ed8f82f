//! Takes connections, as many as there is room for.
//!
//! Next: [`cores`](super::cores), one of which serves each.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;

use super::connection::{self, Callers, Clients};
use super::cores::Spread;
use super::refusal;

/// Pause after the system had no connection for us: most likely file descriptors are used up, and connections that end free some.
const BACK_OFF: Duration = Duration::from_millis(20);

/// Accepts connections.
pub struct Acceptor {
    spread: Spread,
    clients: Arc<Clients>,
    max_connections: usize,
}

impl Acceptor {
    /// Hands connections to the cores of `spread`.
    #[must_use]
    pub fn new(spread: Spread, clients: Arc<Clients>) -> Self {
        let max_connections = clients.app.settings.max_connections;
        Self { spread, clients, max_connections }
    }

    /// Accepts for ever.
    pub async fn accept(&self, listener: &TcpListener) {
        loop {
            match listener.accept().await.and_then(|(stream, _)| stream.into_std()) {
                Ok(stream) => self.hand_out(stream),
                Err(error) => {
                    if self.clients.app.failure_logs.allow(&"accept") {
                        tracing::warn!(%error, "cannot accept");
                    }
                    tokio::time::sleep(BACK_OFF).await;
                }
            }
        }
    }

    /// Closes the listener, having accepted all that wait in its queue: those that it still holds when it closes are reset.
    pub fn close(&self, listener: TcpListener) {
        let Ok(listener) = listener.into_std() else { return };
        while let Ok((stream, _)) = listener.accept() {
            if stream.set_nonblocking(true).is_ok() {
                self.hand_out(stream);
            }
        }
    }

    fn hand_out(&self, stream: std::net::TcpStream) {
        if self.spread.connections() >= self.max_connections {
            self.refuse(stream);
            return;
        }
        let clients = Arc::clone(&self.clients);
        self.spread.spawn_connection(|connection, open| connection::serve(clients, stream, connection, open));
    }

    /// Says why, if the socket takes it at once, and closes. Nothing here waits for the client.
    fn refuse(&self, mut stream: std::net::TcpStream) {
        self.clients.app.metrics.listener.connections_refused.inc();
        if self.clients.app.failure_logs.allow(&"connections") {
            tracing::warn!(limit = self.max_connections, "too many connections");
        }
        if self.clients.tls.is_some() || self.clients.callers == Callers::Gateways {
            return;
        }
        // What is unread when a socket closes resets the connection, and takes the answer with it.
        let read = stream.read(&mut [0; 4_096]);
        let written = stream.write(&refusal::too_many_connections(self.max_connections));
        let shut = stream.shutdown(Shutdown::Write);
        tracing::trace!(?read, ?written, ?shut, "connection refused");
    }
}
