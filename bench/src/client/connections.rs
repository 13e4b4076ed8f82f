//! Kept-alive connections to one server. The last one given back is the first taken again.

use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use super::RequestError;

/// One connection's sending half.
pub type Sender = SendRequest<Full<Bytes>>;

/// The pool. It never holds more connections than were in use at once.
#[derive(Debug)]
pub struct Connections {
    addresses: Vec<SocketAddr>,
    authority: String,
    idle: Mutex<Vec<Sender>>,
}

impl Connections {
    /// An empty pool.
    pub fn new(addresses: Vec<SocketAddr>, authority: String) -> Self {
        Self { addresses, authority, idle: Mutex::default() }
    }

    /// Sends on an idle connection, or on a new one. A connection that the server had closed meanwhile is replaced as
    /// long as nothing of the request was written; a request is never sent twice.
    ///
    /// # Errors
    /// No connection, or one that broke before the response.
    pub async fn send(
        &self,
        request: Request<Full<Bytes>>,
    ) -> Result<(Sender, Response<Incoming>), RequestError> {
        let mut request = request;
        while let Some(mut sender) = self.take_idle() {
            if sender.ready().await.is_err() {
                continue;
            }
            match sender.try_send_request(request).await {
                Ok(response) => return Ok((sender, response)),
                Err(mut error) => match error.take_message() {
                    Some(unsent) => request = unsent,
                    None => return Err(RequestError::NoResponse(error.into_error())),
                },
            }
        }
        let mut sender = self.connect().await?;
        let response = sender.send_request(request).await.map_err(RequestError::NoResponse)?;
        Ok((sender, response))
    }

    /// Takes a connection back whose response was read to its end.
    pub fn give_back(&self, sender: Sender) {
        if !sender.is_closed() {
            self.lock().push(sender);
        }
    }

    fn take_idle(&self) -> Option<Sender> {
        self.lock().pop()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Sender>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn connect(&self) -> Result<Sender, RequestError> {
        let failed = |source| RequestError::Connect { authority: self.authority.clone(), source };
        let stream = TcpStream::connect(self.addresses.as_slice()).await.map_err(failed)?;
        stream.set_nodelay(true).map_err(failed)?;
        let (sender, connection) =
            http1::handshake(TokioIo::new(stream)).await.map_err(RequestError::NoResponse)?;
        // Ends when the sender is dropped or the server closes; its errors reach whoever waits for a response.
        tokio::spawn(async move {
            let _ = connection.await;
        });
        Ok(sender)
    }
}
