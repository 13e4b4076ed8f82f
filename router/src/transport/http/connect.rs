//! From a worker's address to a connected stream of bytes: names, TCP, TLS.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::Arc;

use http::uri::{self, Authority, Scheme};
use http::{HeaderValue, Uri};
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::pool::{Pool, Protocol};
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

/// Where a worker listens.
pub(super) struct Origin {
    /// As the operator wrote it, for messages.
    address: String,
    authority: Authority,
    port: u16,
    /// Known without asking, if the host is an IP address.
    literal: Option<SocketAddr>,
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
            literal: bare.parse().ok().map(|ip| SocketAddr::new(ip, port)),
            authority: authority.clone(),
            port,
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

    /// Connects; `pool` remembers addresses for a moment.
    pub(super) async fn connect(&self, pool: &Pool) -> Result<(Stream, Protocol), TransportError> {
        let stream = self.connect_tcp(pool).await?;
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

    /// Tries the addresses in turn.
    async fn connect_tcp(&self, pool: &Pool) -> Result<TcpStream, TransportError> {
        let mut failure = std::io::Error::new(ErrorKind::NotFound, "the name has no address");
        let known;
        let addresses = if let Some(literal) = &self.literal {
            std::slice::from_ref(literal)
        } else {
            known = self.resolve(pool).await?;
            &known[..]
        };
        for address in addresses {
            match TcpStream::connect(address).await {
                Ok(stream) => return Ok(stream),
                Err(source) => failure = source,
            }
        }
        Err(TransportError::Connect { address: self.address.clone(), source: failure })
    }

    async fn resolve(&self, pool: &Pool) -> Result<Arc<[SocketAddr]>, TransportError> {
        if let Some(known) = pool.addresses() {
            return Ok(known);
        }
        let host = self.authority.host();
        let found: Arc<[_]> = match tokio::net::lookup_host((host, self.port)).await {
            Ok(found) => found.collect(),
            // That names cannot be looked up for a while says nothing about the worker.
            Err(source) => {
                pool.last_addresses().ok_or(TransportError::Resolve { host: host.to_owned(), source })?
            }
        };
        pool.remember(Arc::clone(&found));
        Ok(found)
    }
}

/// The host without the brackets of an IPv6 address.
fn bare_host(authority: &Authority) -> &str {
    authority.host().trim_start_matches('[').trim_end_matches(']')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(address: &str) -> Result<Origin, AddressError> {
        Origin::parse(address, || crate::transport::http::tls::client_config(&[]))
    }

    #[test]
    fn ip_addresses_need_no_lookup() {
        for (address, literal) in
            [("http://127.0.0.1:80", "127.0.0.1:80"), ("h2c://[::1]:9000", "[::1]:9000")]
        {
            assert_eq!(origin(address).unwrap().literal, literal.parse().ok());
        }
        assert_eq!(origin("https://gpu.example:443").unwrap().literal, None);
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

    #[tokio::test]
    async fn a_name_is_looked_up_once_and_all_its_addresses_are_tried() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let closed = {
            let other = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            other.local_addr().unwrap()
        };
        let (pool, _alive) = Pool::new();
        let origin = origin(&format!("http://no-such-host.invalid:{}", address.port())).unwrap();
        pool.remember([closed, address].into());
        assert!(origin.connect(&pool).await.is_ok());
    }

    #[tokio::test]
    async fn while_names_cannot_be_looked_up_the_last_addresses_serve() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (pool, _alive) = Pool::new();
        let origin = origin(&format!("http://no-such-host.invalid:{}", address.port())).unwrap();
        assert!(matches!(origin.connect(&pool).await, Err(TransportError::Resolve { .. })));
        pool.remember([address].into());
        pool.outdate_addresses();
        assert!(pool.addresses().is_none());
        assert!(origin.connect(&pool).await.is_ok());
    }
}
