//! To any OpenAI-speaking engine over HTTP/1.1, with an own connection pool for each worker and thread.
//!
//! A pool is a thread's own: no lock, and a connection stays on the core that serves its client. Engines close idle
//! connections on their own (uvicorn after 5 s), so ours are given up a little earlier; one that turns out closed when
//! a request is written to it is replaced, once, by a fresh one.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::uri::Authority;
use http::{HeaderValue, Request, Response, header};
use http_body::{Body, Frame};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use crate::payload::{Payload, PayloadBody};

use super::{Answer, Transport, TransportError, UpstreamBody};

/// Idle connections kept for a worker by each thread.
const MAX_IDLE: usize = 256;
/// Idle connections are given up after this; uvicorn's own limit is 5 s.
const IDLE_LIMIT: Duration = Duration::from_secs(4);

type Sender = SendRequest<PayloadBody>;

struct Idle {
    sender: Sender,
    since: Instant,
}

thread_local! {
    /// This thread's idle connections, by pool; most recently used last.
    static POOLS: RefCell<HashMap<u64, VecDeque<Idle>>> = RefCell::default();
}

/// HTTP/1.1 to one address.
pub struct HttpTransport {
    authority: Authority,
    host: HeaderValue,
    connect_timeout: Duration,
    /// Names the pool; never used again, so that a worker that comes back under the same address begins afresh.
    pool: u64,
}

impl HttpTransport {
    /// A way to `authority`, `host:port`; the name is resolved at each connect.
    #[must_use]
    pub fn new(authority: Authority, connect_timeout: Duration) -> Self {
        static POOL_IDS: AtomicU64 = AtomicU64::new(0);
        let host = HeaderValue::from_str(authority.as_str()).expect("an authority is visible ASCII");
        Self { authority, host, connect_timeout, pool: POOL_IDS.fetch_add(1, Ordering::Relaxed) }
    }

    async fn attempt(&self, mut request: Request<Payload>) -> Result<Response<UpstreamBody>, TransportError> {
        request.headers_mut().insert(header::HOST, self.host.clone());
        let mut request = request.map(PayloadBody::from);
        while let Some(mut sender) = self.take_idle() {
            // Waits for the end of the last exchange, which has been read; fails at once on a closed connection.
            if sender.ready().await.is_err() {
                continue;
            }
            match sender.try_send_request(request).await {
                Ok(response) => return Ok(self.pooled(response, sender)),
                Err(mut error) => match error.take_message() {
                    // It was closed before anything was written: nobody has seen the request.
                    Some(unsent) => request = unsent,
                    None => return Err(TransportError::Broken(error.into_error())),
                },
            }
        }
        let mut sender = self.connect().await?;
        let response = sender.send_request(request).await.map_err(TransportError::Broken)?;
        Ok(self.pooled(response, sender))
    }

    fn pooled(&self, response: Response<Incoming>, sender: Sender) -> Response<UpstreamBody> {
        let pool = self.pool;
        response.map(|incoming| UpstreamBody::Http(PooledBody { incoming, sender: Some(sender), pool }))
    }

    fn take_idle(&self) -> Option<Sender> {
        POOLS.with_borrow_mut(|pools| {
            let idle = pools.get_mut(&self.pool)?;
            while idle
                .front()
                .is_some_and(|idle| idle.since.elapsed() > IDLE_LIMIT || idle.sender.is_closed())
            {
                idle.pop_front();
            }
            idle.pop_back().map(|idle| idle.sender)
        })
    }

    async fn connect(&self) -> Result<Sender, TransportError> {
        let limit = self.connect_timeout;
        let stream = tokio::time::timeout(limit, self.open())
            .await
            .map_err(|_| TransportError::ConnectTimeout { limit })??;
        let (sender, connection) =
            http1::handshake(TokioIo::new(stream)).await.map_err(TransportError::Broken)?;
        // Ends when the sender is dropped and the exchange over, or when the worker closes.
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "connection to worker ended");
            }
        });
        Ok(sender)
    }

    async fn open(&self) -> Result<TcpStream, TransportError> {
        let host = self.authority.host().trim_start_matches('[').trim_end_matches(']');
        let port = self.authority.port_u16().unwrap_or(80);
        let addresses = tokio::net::lookup_host((host, port))
            .await
            .map_err(|source| TransportError::Resolve { host: host.to_owned(), source })?;
        let mut failure = std::io::Error::from(std::io::ErrorKind::NotFound);
        for address in addresses {
            match TcpStream::connect(address).await {
                Ok(stream) => {
                    // Without it, small writes wait for the acknowledgement of those before.
                    if let Err(error) = stream.set_nodelay(true) {
                        tracing::debug!(%error, "no TCP_NODELAY");
                    }
                    return Ok(stream);
                }
                Err(source) => failure = source,
            }
        }
        Err(TransportError::Connect { address: self.authority.to_string(), source: failure })
    }
}

impl Transport for HttpTransport {
    fn send(&self, request: Request<Payload>) -> Answer<'_> {
        Box::pin(self.attempt(request))
    }
}

/// A body that gives its connection back when it has been read to its end; dropped earlier, it closes the connection,
/// which is how an engine learns that nobody waits any more.
pub struct PooledBody {
    incoming: Incoming,
    sender: Option<Sender>,
    pool: u64,
}

impl PooledBody {
    fn give_back(&mut self) {
        let Some(sender) = self.sender.take().filter(|sender| !sender.is_closed()) else { return };
        POOLS.with_borrow_mut(|pools| {
            let idle = pools.entry(self.pool).or_default();
            if idle.len() < MAX_IDLE {
                idle.push_back(Idle { sender, since: Instant::now() });
            }
        });
    }
}

impl Body for PooledBody {
    type Data = Bytes;
    type Error = TransportError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, TransportError>>> {
        let frame = Pin::new(&mut self.incoming).poll_frame(cx);
        if matches!(frame, Poll::Ready(None)) || self.incoming.is_end_stream() {
            self.give_back();
        }
        frame.map_err(TransportError::Broken)
    }

    fn is_end_stream(&self) -> bool {
        self.incoming.is_end_stream()
    }
}

impl Drop for PooledBody {
    fn drop(&mut self) {
        // A body that was empty from the start is never polled.
        if self.incoming.is_end_stream() {
            self.give_back();
        }
    }
}
