//! Cache events over ZeroMQ, as vLLM publishes them: a PUB socket with every batch as it happens, and a ROUTER socket that
//! gives out again what a subscriber has missed. Routers that follow vLLM can follow us.
//!
//! Three frames make a batch: topic, sequence number (8 bytes, big-endian), msgpack. Sequence numbers begin at 0 with the
//! process. A subscriber that falls behind the buffer misses batches and sees it by their numbers. We always bind, whatever
//! the host in the endpoint; vLLM connects to a concrete one. ZMTP is spoken by a crate of our own: no library in C. Knows no
//! engine. Next: [`publish`], [`replay`].

mod endpoint;
mod payload;
mod publish;
mod replay;

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

pub use self::endpoint::{Endpoint, EndpointError};
use super::{KvLog, Published};

/// Subscribers at once, and as many who ask for a replay; one more is turned away. A router has one of each.
const MAX_PEERS: usize = 64;

/// Where and how events are published.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ZmqConfig {
    /// Of the PUB socket.
    pub publish: Endpoint,
    /// Of the ROUTER socket, if there is to be one.
    pub replay: Option<Endpoint>,
    /// First frame of every batch; may be empty.
    pub topic: String,
}

/// Sockets that are bound and not served yet.
pub struct Publisher {
    log: Arc<KvLog>,
    topic: Arc<[u8]>,
    publish: TcpListener,
    replay: Option<TcpListener>,
}

impl Publisher {
    /// Binds the sockets, and has the log say where.
    ///
    /// # Errors
    /// When an endpoint cannot be bound; names it.
    pub async fn bind(log: Arc<KvLog>, config: &ZmqConfig) -> io::Result<Self> {
        let replay = match &config.replay {
            Some(endpoint) => Some(endpoint.bind().await?),
            None => None,
        };
        let publish = config.publish.bind().await?;
        let bound = Self { log, topic: config.topic.as_bytes().into(), publish, replay };
        let ((publish, replay), topic) = (bound.addresses()?, config.topic.clone());
        bound.log.set_published(Published { publish, replay, topic });
        Ok(bound)
    }

    /// Where it publishes, and where it replays.
    ///
    /// # Errors
    /// What the system says.
    pub fn addresses(&self) -> io::Result<(SocketAddr, Option<SocketAddr>)> {
        let replay = self.replay.as_ref().map(TcpListener::local_addr).transpose()?;
        Ok((self.publish.local_addr()?, replay))
    }

    /// Serves until it is dropped.
    pub async fn run(self) {
        let Self { log, topic, publish, replay } = self;
        let publishing =
            accept(publish, |stream| publish::serve(stream, Arc::clone(&log), Arc::clone(&topic)));
        let replaying = async {
            match replay {
                Some(replay) => {
                    accept(replay, |stream| replay::serve(stream, Arc::clone(&log), Arc::clone(&topic)))
                        .await;
                }
                None => std::future::pending().await,
            }
        };
        tokio::join!(publishing, replaying);
    }
}

/// Serves each peer in a task that ends with this.
async fn accept<F>(listener: TcpListener, serve: impl Fn(TcpStream) -> F)
where
    F: Future<Output = io::Result<()>> + Send + 'static,
{
    let mut peers = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((_, peer)) if peers.len() >= MAX_PEERS => {
                    tracing::warn!(%peer, "turned away: {MAX_PEERS} ZeroMQ peers are served already");
                }
                Ok((stream, _)) => drop(peers.spawn(serve(stream))),
                Err(error) => {
                    tracing::warn!(%error, "cannot accept");
                    tokio::time::sleep(std::time::Duration::from_millis(10)).await;
                }
            },
            Some(ended) = peers.join_next() => {
                if let Ok(Err(error)) = ended {
                    tracing::debug!(%error, "ZeroMQ peer left");
                }
            }
        }
    }
}
