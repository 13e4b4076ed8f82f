//! The clients' side, before there is a request: sockets, cores, TLS, and the two versions of HTTP.
//!
//! [`acceptor`] takes a connection and hands it to one of the [`cores`]; there [`connection`] finds out what it speaks:
//! [`tls`], then HTTP/1 ([`http1`], whose bytes pass the [`guard`]) or HTTP/2 ([`http2`], whose streams are spread over all
//! cores). Either way every request ends up in [`stages::accept`](crate::stages::accept), which knows nothing of this.

pub mod acceptor;
pub mod client_stream;
pub mod connection;
pub mod cores;
pub mod guard;
pub mod http1;
pub mod http1_stream;
pub mod http2;
pub mod http2_body;
mod http2_writes;
pub mod metrics;
pub mod refusal;
pub mod socket;
pub mod tls;
