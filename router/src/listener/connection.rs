//! One client's connection: finds out what it speaks, and has that served.
//!
//! Next: [`http1`](super::http1) or [`http2`](super::http2).

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;

use tokio::net::TcpStream;

use super::client_stream::ClientStream;
use super::cores::{OpenConnection, OpenStream};
use super::socket::Socket;
use super::tls::Tls;
use super::{http1, http2};
use crate::app::App;
use crate::liveness;

/// Who connects to a listener.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Callers {
    /// Those whose requests are to be answered.
    Clients,
    /// Those that ask where a request of theirs is to go, in gRPC: see [`gateway`](crate::gateway).
    Gateways,
}

/// What all connections of a listener share.
pub struct Clients {
    /// The router.
    pub app: Arc<App>,
    /// Who they are.
    pub callers: Callers,
    /// TLS, if the listener has it.
    pub tls: Option<Arc<Tls>>,
}

/// Serves one connection. It counts as one stream until it turns out to be HTTP/2, whose streams count each.
pub async fn serve(
    clients: Arc<Clients>,
    stream: std::net::TcpStream,
    connection: OpenConnection,
    open: OpenStream,
) {
    let Ok(stream) = TcpStream::from_std(stream) else { return };
    let limit = clients.app.settings.client_timeout;
    liveness::configure(&stream, limit);
    let socket = match &clients.tls {
        None => Socket::from(stream),
        Some(tls) => match tokio::time::timeout(limit, tls.accept(stream)).await {
            Ok(Ok(stream)) => Socket::from(stream),
            Ok(Err(error)) => {
                tracing::debug!(%error, "no TLS handshake");
                return;
            }
            Err(_) => return,
        },
    };
    // Gateways speak nothing else.
    let http2 = clients.callers == Callers::Gateways || socket.agreed_on_http2();
    let stream = ClientStream::new(socket, limit);
    // Without TLS nothing is agreed upon, so HTTP/1 is what is spoken until the first line says otherwise.
    let stream =
        if http2 { Some(stream) } else { http1::serve(&clients.app, stream, connection.closing()).await };
    if let Some(stream) = stream {
        drop(open);
        http2::serve(&clients, stream, connection).await;
    }
}

/// Drives `connection` until `event`; what it ended with, if it has ended.
pub(super) async fn drive_until<C: Future + Unpin>(
    connection: &mut C,
    event: impl Future<Output = ()>,
) -> Option<C::Output> {
    let mut event = pin!(event);
    poll_fn(|cx| {
        if let Poll::Ready(outcome) = Pin::new(&mut *connection).poll(cx) {
            return Poll::Ready(Some(outcome));
        }
        event.as_mut().poll(cx).map(|()| None)
    })
    .await
}
