//! To any OpenAI-speaking engine over HTTP: 1.1 or 2, plain or TLS.
//!
//! A request takes a connection of its own thread's pool, or makes one. What has certainly not been processed is sent again
//! on another connection, and once what was lost with a connection that had been idle; whatever else fails is reported, and the
//! stages decide. Knows no policies and no clients.

mod addresses;
mod connect;
mod framing;
mod incoming;
mod link;
mod mux;
mod outgoing;
mod pool;
#[cfg(any(test, fuzzing))]
mod reply_agreement;
mod reply_head;
mod socket;
pub(super) mod tls;

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use http::{HeaderValue, Method, Request, Response, Version, header};
use router_core::WorkerSpec;
use rustls::ClientConfig;
use rustls::pki_types::CertificateDer;

use self::connect::Origin;
use self::link::{Bodiless, Link};
use self::mux::Mux;
use self::outgoing::Outgoing;
use self::pool::{Alive, Line, Pool, Protocol};
use super::{
    Answer, Broken, Connections, GrpcTransport, HandingOver, Handover, RankedTransport, Transport,
    TransportError, UpstreamBody, WorkerRequest,
};
use crate::hop_by_hop;
use crate::keys::WorkerKeys;
use crate::payload::PayloadBody;

pub use connect::AddressError;
pub(super) use link::LinkBody;
pub(super) use mux::MuxBody;
#[cfg(any(test, fuzzing))]
pub use reply_agreement::check as check_reply;

/// Times that a request is sent again to the same worker, after an HTTP/2 connection said that it was not processed.
const MAX_REFUSALS: usize = 2;

/// What all ways to workers share.
pub struct Connector {
    connect_timeout: Duration,
    authorities: Vec<CertificateDer<'static>>,
    keys: WorkerKeys,
    /// Made for the first `https` worker: reading the system's authorities takes milliseconds.
    tls: OnceLock<Arc<ClientConfig>>,
}

impl Connector {
    /// Gives up connecting after `connect_timeout`; trusts `authorities` besides the system's; shows workers their `keys`.
    #[must_use]
    pub fn new(
        connect_timeout: Duration,
        authorities: Vec<CertificateDer<'static>>,
        keys: WorkerKeys,
    ) -> Self {
        Self { connect_timeout, authorities, keys, tls: OnceLock::new() }
    }

    /// A way to the worker, whose address is `http://host:port`, `https://host:port`, `h2c://host:port` or `grpc://host:port`.
    ///
    /// # Errors
    /// When it is no such address.
    pub fn way(&self, worker: &WorkerSpec) -> Result<Arc<dyn Transport>, AddressError> {
        let http = self.transport(worker)?;
        Ok(match worker.dp_rank {
            _ if http.origin.speaks_grpc() => Arc::new(GrpcTransport::new(http)),
            Some(rank) => Arc::new(RankedTransport::new(http, rank)),
            None => Arc::new(http),
        })
    }

    /// gRPC to the worker apart from its requests, on connections of its own; `None` if it does not speak that in plain text.
    ///
    /// # Errors
    /// When its address is none.
    pub fn grpc(&self, worker: &WorkerSpec) -> Result<Option<GrpcTransport>, AddressError> {
        let http = self.transport(worker)?;
        Ok(http.origin.speaks_grpc().then(|| GrpcTransport::new(http)))
    }

    /// HTTP to the worker, whatever is to be spoken over it. Requests that carry no `authorization` get the worker's key.
    ///
    /// # Errors
    /// When its address is none.
    pub fn transport(&self, worker: &WorkerSpec) -> Result<HttpTransport, AddressError> {
        let tls = || Arc::clone(self.tls.get_or_init(|| tls::client_config(&self.authorities)));
        let origin = Origin::parse(&worker.address, tls)?;
        let (pool, alive) = Pool::new();
        Ok(HttpTransport {
            origin,
            authorization: self.keys.of(worker),
            connect_timeout: self.connect_timeout,
            pool,
            _alive: alive,
        })
    }
}

/// HTTP to one address.
pub struct HttpTransport {
    origin: Origin,
    authorization: Option<HeaderValue>,
    connect_timeout: Duration,
    pool: Arc<Pool>,
    /// Closes idle connections when the transport is dropped.
    _alive: Alive,
}

/// What became of one try on one connection.
enum Tried {
    Answered(Response<UpstreamBody>),
    /// Not processed: may be tried again.
    Unsent(TransportError),
    /// A connection that had served before, and was idle since then, ended without a byte of an answer. Most likely the worker has
    /// closed it for being idle at that very moment; it may have died.
    Stale {
        broken: Broken,
        idle_since: Instant,
    },
    Failed(TransportError),
}

/// Whether a connection has served before.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Age {
    New,
    Used,
}

impl HttpTransport {
    pub(super) async fn attempt(
        &self,
        request: &WorkerRequest,
    ) -> Result<Response<UpstreamBody>, TransportError> {
        let (mut refusals, mut stale) = (0, None);
        loop {
            // After a stale connection the worker is asked once more, on a new one. It may have seen the request twice then, as two
            // workers would have otherwise.
            let taken = if stale.is_none() { self.pool.take() } else { None };
            let (line, age) = match taken {
                Some(line) => (line, Age::Used),
                // Boxed, as is HTTP/2: what most requests do not need should not make them larger.
                None => match Box::pin(self.connect()).await {
                    Ok(line) => (line, Age::New),
                    Err(error) => return Err(unless_stale(stale, error)),
                },
            };
            let multiplexed = matches!(line, Line::Mux(_));
            request.sets_out();
            let tried = match line {
                Line::Link(link) => self.over_http1(link, age, request).await,
                Line::Mux(mux) => Box::pin(self.over_http2(mux, request)).await,
            };
            match tried {
                Tried::Answered(response) => return Ok(response),
                Tried::Failed(error) => return Err(error),
                Tried::Stale { broken, idle_since } => {
                    self.pool.discard_idle_since(idle_since);
                    stale = Some(broken);
                }
                // A used HTTP/1 connection costs nothing to give up, and there are only so many of them.
                Tried::Unsent(_) if age == Age::Used && !multiplexed => {}
                Tried::Unsent(_) if multiplexed && refusals < MAX_REFUSALS => refusals += 1,
                Tried::Unsent(error) => return Err(unless_stale(stale, error)),
            }
        }
    }

    /// The request as the worker is to get it from a gateway.
    pub(super) async fn handover(&self, request: &WorkerRequest) -> Result<Handover, TransportError> {
        let mut headers = hop_by_hop::end_to_end_map(&request.headers);
        if let Some(authorization) = &self.authorization {
            headers.entry(header::AUTHORIZATION).or_insert_with(|| authorization.clone());
        }
        Ok(Handover { to: vec![self.origin.address().await?], headers, body: request.body.clone() })
    }

    async fn over_http1(&self, link: Box<Link>, age: Age, request: &WorkerRequest) -> Tried {
        let bodiless = if request.method == Method::HEAD { Bodiless::Yes } else { Bodiless::No };
        let write = |outgoing: &mut Outgoing| {
            outgoing.begin(request, &self.origin.host, self.authorization.as_ref());
        };
        match link.exchange(write, bodiless, Arc::clone(&self.pool)).await {
            Ok(response) => Tried::Answered(response.map(UpstreamBody::Http1)),
            Err(link::Failed::Unsent(broken)) => Tried::Unsent(TransportError::Unsent(broken)),
            Err(link::Failed::Silent { broken, idle_since }) if age == Age::Used && broken.is_close() => {
                Tried::Stale { broken, idle_since }
            }
            Err(link::Failed::Silent { broken, .. } | link::Failed::Broken(broken)) => {
                Tried::Failed(TransportError::Broken(broken))
            }
            Err(link::Failed::Ambiguous(what)) => Tried::Failed(TransportError::Protocol { what }),
        }
    }

    async fn over_http2(&self, mux: Mux, request: &WorkerRequest) -> Tried {
        let mut sent = Request::new(PayloadBody::from(request.body.clone()));
        sent.method_mut().clone_from(&request.method);
        *sent.uri_mut() = mux::absolute(&self.origin.parts, &request.path);
        *sent.version_mut() = Version::HTTP_2;
        *sent.headers_mut() = hop_by_hop::end_to_end_map(&request.headers);
        let headers = sent.headers_mut();
        if let Some(authorization) = &self.authorization {
            headers.entry(header::AUTHORIZATION).or_insert_with(|| authorization.clone());
        }
        headers.insert(header::CONTENT_LENGTH, HeaderValue::from(request.body.len()));
        if self.origin.speaks_grpc() {
            // gRPC wants it said that its status at the end will be read.
            headers.insert(header::TE, HeaderValue::from_static("trailers"));
        }
        match mux.clone().exchange(sent).await {
            Ok(mut response) => {
                // What the client is answered in is its own connection's business.
                *response.version_mut() = Version::HTTP_11;
                Tried::Answered(response.map(UpstreamBody::Http2))
            }
            Err(mux::Failed::Refused(error)) => {
                self.pool.abandon(&mux);
                Tried::Unsent(TransportError::Refused(error))
            }
            Err(mux::Failed::Broken(error)) => Tried::Failed(TransportError::Broken(Broken::Http2(error))),
        }
    }

    /// A new connection, or one that another request of this thread has made meanwhile.
    async fn connect(&self) -> Result<Line, TransportError> {
        let limit = self.connect_timeout;
        let protocol = self.origin.protocol().or_else(|| self.pool.protocol());
        let connecting = async {
            if protocol == Some(Protocol::Http1) {
                return self.open().await;
            }
            // Others wait, since they can share what comes of it.
            let permit = self.pool.connecting().acquire_owned().await;
            if self.pool.protocol() == Some(Protocol::Http1) {
                // Meanwhile known to be of use to one only.
                drop(permit);
                return self.open().await;
            }
            let line = match self.pool.take() {
                Some(line) => line,
                None => self.open().await?,
            };
            drop(permit);
            Ok(line)
        };
        tokio::time::timeout(limit, connecting).await.unwrap_or_else(|_| {
            self.origin.doubt();
            Err(TransportError::ConnectTimeout { limit })
        })
    }

    async fn open(&self) -> Result<Line, TransportError> {
        let (stream, protocol) = self.origin.connect().await?;
        self.pool.learn(protocol);
        let counts = self.pool.counts();
        Ok(match protocol {
            Protocol::Http1 => Line::Link(Link::open(stream, counts)),
            Protocol::Http2 => {
                let mux = Mux::open(stream, counts).await?;
                self.pool.share(&mux);
                Line::Mux(mux)
            }
        })
    }
}

/// Why a request came to nothing. What was sent over a connection that broke counts, whatever became of the attempt to send it again: the
/// worker may have died of it.
fn unless_stale(stale: Option<Broken>, error: TransportError) -> TransportError {
    stale.map_or(error, TransportError::Broken)
}

impl Transport for HttpTransport {
    fn send<'a>(&'a self, request: &'a WorkerRequest) -> Answer<'a> {
        Box::pin(self.attempt(request))
    }

    fn hand_over<'a>(&'a self, request: &'a WorkerRequest) -> HandingOver<'a> {
        Box::pin(self.handover(request))
    }

    fn connections(&self) -> Connections {
        self.pool.connections()
    }
}
