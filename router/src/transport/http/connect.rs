//! From a worker's address to a connected stream of bytes: names, TCP, TLS.

use std::net::SocketAddr;
use std::sync::Arc;

use http::uri::{self, Authority, Scheme};
use http::{HeaderValue, Uri};
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::addresses::Addresses;
use super::pool::Protocol;
use super::socket::Stream;
use crate::liveness;
use crate::transport::TransportError;

/// What a scheme asks for.
#[derive(Clone)]
enum Security {
    /// `http://`: HTTP/1.1 in plain text.
    Plain,
    /// `h2c://`: HTTP/2 in plain text, known beforehand.
    PlainHttp2,
    /// `grpc://`: the same, and gRPC over it.
    PlainGrpc,
    /// `https://`: what is agreed upon in the handshake.
    Tls { config: Arc<ClientConfig>, name: ServerName<'static> },
}

/// Why an address is none that can be connected to.
#[derive(Debug, thiserror::Error)]
#[error("{address:?} {wrong}")]
pub struct AddressError {
    address: String,
    wrong: &'static str,
}

/// What the host of an address is.
enum Place {
    /// An IP address: known without asking.
    Literal(SocketAddr),
    /// A name.
    Named(Arc<Addresses>),
}

/// Where a worker listens.
pub(super) struct Origin {
    /// As the operator wrote it, for messages.
    address: String,
    place: Place,
    security: Security,
    /// `host` of every request.
    pub(super) host: HeaderValue,
    /// Scheme and authority of every HTTP/2 request.
    pub(super) parts: uri::Parts,
}

impl Origin {
    /// Reads an address in its normal form: scheme, host and port. `tls` is asked for if the scheme is `https`.
    pub(super) fn parse(
        address: &str,
        tls: impl FnOnce() -> Arc<ClientConfig>,
    ) -> Result<Self, AddressError> {
        let error = |wrong| AddressError { address: address.to_owned(), wrong };
        let uri: Uri = address.parse().map_err(|_| error("is no address"))?;
        let authority = uri.authority().ok_or_else(|| error("has no host"))?;
        let port = authority.port_u16().ok_or_else(|| error("has no port"))?;
        let bare = bare_host(authority);
        let security = match uri.scheme_str() {
            Some("http") => Security::Plain,
            Some("h2c") => Security::PlainHttp2,
            Some("grpc") => Security::PlainGrpc,
            Some("https") => {
                let name = ServerName::try_from(bare.to_owned());
                Security::Tls {
                    config: tls(),
                    name: name.map_err(|_| error("has a host that no certificate can be for"))?,
                }
            }
            _ => return Err(error("has a scheme that is not http, https, h2c or grpc")),
        };
        let mut parts = uri::Parts::default();
        parts.scheme =
            Some(if matches!(security, Security::Tls { .. }) { Scheme::HTTPS } else { Scheme::HTTP });
        parts.authority = Some(authority.clone());
        Ok(Self {
            address: address.to_owned(),
            host: HeaderValue::from_str(authority.as_str()).map_err(|_| error("is no address"))?,
            place: match bare.parse() {
                Ok(ip) => Place::Literal(SocketAddr::new(ip, port)),
                Err(_) => Place::Named(Addresses::new(authority.host(), port)),
            },
            security,
            parts,
        })
    }

    /// What will be spoken, if that is known without asking.
    pub(super) fn protocol(&self) -> Option<Protocol> {
        match self.security {
            Security::Plain => Some(Protocol::Http1),
            Security::PlainHttp2 | Security::PlainGrpc => Some(Protocol::Http2),
            Security::Tls { .. } => None,
        }
    }

    /// Whether what is spoken is gRPC.
    pub(super) fn speaks_grpc(&self) -> bool {
        matches!(self.security, Security::PlainGrpc)
    }

    /// Connects.
    pub(super) async fn connect(&self) -> Result<(Stream, Protocol), TransportError> {
        let stream = self.connect_tcp().await?;
        liveness::configure(&stream, liveness::WORKER_STALL);
        let Security::Tls { config, name } = &self.security else {
            return Ok((Stream::Plain(stream), self.protocol().unwrap_or(Protocol::Http1)));
        };
        let connector = TlsConnector::from(Arc::clone(config));
        let stream = connector
            .connect(name.clone(), stream)
            .await
            .map_err(|source| TransportError::Tls { address: self.address.clone(), source })?;
        let protocol = match stream.get_ref().1.alpn_protocol() {
            Some(b"h2") => Protocol::Http2,
            _ => Protocol::Http1,
        };
        Ok((Stream::Tls(Box::new(stream)), protocol))
    }

    /// Where it is, for those who connect by themselves: the first of a name's addresses.
    pub(super) async fn address(&self) -> Result<SocketAddr, TransportError> {
        match &self.place {
            Place::Literal(address) => Ok(*address),
            Place::Named(addresses) => {
                let list = addresses.get().await?;
                list.first().copied().ok_or_else(|| TransportError::Connect {
                    address: self.address.clone(),
                    source: std::io::ErrorKind::NotFound.into(),
                })
            }
        }
    }

    /// No connection came about in time.
    pub(super) fn doubt(&self) {
        if let Place::Named(addresses) = &self.place {
            addresses.doubt();
        }
    }

    /// Where a name leads may have changed: if no connection can be made, it is asked for once more.
    async fn connect_tcp(&self) -> Result<TcpStream, TransportError> {
        let stream = match &self.place {
            Place::Literal(address) => TcpStream::connect(address).await,
            Place::Named(addresses) => {
                let known = addresses.get().await?;
                match connect_to_one_of(&known).await {
                    Ok(stream) => Ok(stream),
                    Err(failure) => match addresses.instead_of(&known).await {
                        Some(others) => connect_to_one_of(&others).await,
                        None => Err(failure),
                    },
                }
            }
        };
        stream.map_err(|source| TransportError::Connect { address: self.address.clone(), source })
    }
}

/// Tries the addresses in turn.
async fn connect_to_one_of(addresses: &[SocketAddr]) -> std::io::Result<TcpStream> {
    let mut failure = None;
    for address in addresses {
        match TcpStream::connect(address).await {
            Ok(stream) => return Ok(stream),
            Err(source) => failure = Some(source),
        }
    }
    Err(failure.unwrap_or_else(|| std::io::ErrorKind::NotFound.into()))
}

/// The host without the brackets of an IPv6 address.
fn bare_host(authority: &Authority) -> &str {
    authority.host().trim_start_matches('[').trim_end_matches(']')
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    fn origin(address: &str) -> Result<Origin, AddressError> {
        Origin::parse(address, || crate::transport::http::tls::client_config(&[]))
    }

    #[test]
    fn ip_addresses_need_no_lookup() {
        for (address, literal) in
            [("http://127.0.0.1:80", "127.0.0.1:80"), ("h2c://[::1]:9000", "[::1]:9000")]
        {
            let place = origin(address).unwrap().place;
            assert!(matches!(place, Place::Literal(found) if found == literal.parse().unwrap()));
        }
        assert!(matches!(origin("https://gpu.example:443").unwrap().place, Place::Named(_)));
    }

    #[test]
    fn the_scheme_says_what_is_spoken() {
        assert_eq!(origin("http://a:1").unwrap().protocol(), Some(Protocol::Http1));
        assert_eq!(origin("h2c://a:1").unwrap().protocol(), Some(Protocol::Http2));
        assert_eq!(origin("grpc://a:1").unwrap().protocol(), Some(Protocol::Http2));
        assert_eq!(origin("https://a:1").unwrap().protocol(), None);
    }

    #[test]
    fn what_is_no_address_says_why() {
        for (address, expected) in [("http://a", "port"), ("ftp://a:1", "h2c or grpc"), ("a b", "no address")]
        {
            let error = origin(address).err().unwrap().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    /// A listener, and an address where nobody listens.
    async fn open_and_closed() -> (TcpListener, SocketAddr) {
        let (open, closed) = (TcpListener::bind("127.0.0.1:0").await, TcpListener::bind("127.0.0.1:0").await);
        (open.unwrap(), closed.unwrap().local_addr().unwrap())
    }

    fn known(host: &str, list: &[SocketAddr]) -> Origin {
        let place = Place::Named(Addresses::known_for(host, list, std::time::Duration::ZERO));
        Origin { place, ..origin("http://elsewhere:1").unwrap() }
    }

    #[tokio::test]
    async fn all_addresses_are_tried_and_every_thread_knows_them() {
        let (open, closed) = open_and_closed().await;
        let origin = known("no-such-host.invalid", &[closed, open.local_addr().unwrap()]);
        assert!(origin.connect().await.is_ok());
        let elsewhere = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(origin.connect()).is_ok()
        });
        assert!(elsewhere.join().unwrap());
    }

    #[tokio::test]
    async fn a_worker_that_has_moved_is_found_as_soon_as_its_old_address_refuses() {
        let (open, closed) = open_and_closed().await;
        let addresses = Addresses::new("localhost", open.local_addr().unwrap().port());
        addresses.pretend(&[closed], std::time::Duration::ZERO);
        let origin = Origin { place: Place::Named(addresses), ..origin("http://elsewhere:1").unwrap() };
        assert!(origin.connect().await.is_ok());
    }
}
