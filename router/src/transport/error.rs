//! Why an attempt at a worker failed. Who is to blame and what is tried next is decided by those who asked.

use std::io::ErrorKind;
use std::time::Duration;

use crate::http1::ChunkFault;

/// Why an attempt failed.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    /// The worker's host name has no address.
    #[error("{host} cannot be resolved: {source}")]
    Resolve {
        /// The name.
        host: String,
        /// What the resolver said.
        #[source]
        source: std::io::Error,
    },
    /// Nobody listens there.
    #[error("no connection to {address}: {source}")]
    Connect {
        /// Where.
        address: String,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// The connection took too long, its TLS handshake included.
    #[error("no connection within {} s", limit.as_secs_f64())]
    ConnectTimeout {
        /// The limit.
        limit: Duration,
    },
    /// The TLS handshake failed: a certificate that is not trusted, or something that does not speak TLS.
    #[error("no TLS with {address}: {source}")]
    Tls {
        /// Where.
        address: String,
        /// What rustls said.
        #[source]
        source: std::io::Error,
    },
    /// The connection broke, and the worker may have seen the request.
    #[error("connection broke: {0}")]
    Broken(#[source] Broken),
    /// The connection broke before a byte of the request had gone out.
    #[error("connection broke before anything was sent: {0}")]
    Unsent(#[source] Broken),
    /// An HTTP/2 worker said that it has not processed the request, on a second connection as well. Safe to send elsewhere.
    #[error("the worker refused the stream: {0}")]
    Refused(#[source] hyper::Error),
    /// The answer's head breaks the rules in a way that leaves open where its body ends.
    #[error("the worker's answer {what}")]
    Protocol {
        /// What is wrong with it.
        what: &'static str,
    },
    /// There was no connection to send on when the reply should have begun: nothing has been processed, and the worker may be well.
    #[error("no connection to send on within {} s, the time for a first byte", limit.as_secs_f64())]
    NotSent {
        /// The limit.
        limit: Duration,
    },
    /// The reply did not begin in time.
    #[error("no first byte within {} s", limit.as_secs_f64())]
    FirstByte {
        /// The limit.
        limit: Duration,
    },
    /// The reply stood still for too long.
    #[error("nothing came for {} s", limit.as_secs_f64())]
    Idle {
        /// The limit.
        limit: Duration,
    },
    /// It has generated nothing for anybody, and does not answer a question of one token either.
    #[error("it stands still: nothing has come of it for {} s", silence.as_secs())]
    Stalled {
        /// For how long it has generated nothing.
        silence: Duration,
    },
    /// The request as a whole took too long.
    #[error("not answered within {} s", limit.as_secs_f64())]
    Total {
        /// The limit.
        limit: Duration,
    },
    /// The body does not fit into one gRPC message.
    #[error("a body of {body_bytes} bytes is too long for gRPC")]
    TooLong {
        /// Its length.
        body_bytes: usize,
    },
    /// The gateway that is to send the request does not.
    #[error("the gateway {what}")]
    Gateway {
        /// What it does or does not.
        what: &'static str,
    },
    /// A gateway was told of it and of others, and another has answered.
    #[error("the gateway went on to another worker")]
    PassedOver,
    /// The worker left the fleet between pick and dispatch.
    #[error("the worker has left")]
    Left,
    /// In the middle of a stream of events came one that says so.
    #[error("the engine says in its stream that it has failed")]
    EngineFailed,
    /// A stream ended as one that is whole does, and is not: it says nothing, or not that it is over.
    #[error("its stream ended before it was whole")]
    Unfinished,
    /// Asked for the rest of a stream that had broken off, a worker answered something else.
    #[error("it broke off, and who was asked for the rest answered {status}")]
    NotGoneOn {
        /// The answer's status.
        status: http::StatusCode,
    },
    /// Nobody could be asked for the rest of a stream that had broken off.
    #[error("it broke off, and {why}")]
    NobodyGoesOn {
        /// Why not.
        why: String,
    },
    /// The router could not wait for the rest: its own time was over.
    #[error("the router is shutting down")]
    ShuttingDown,
}

/// How a connection broke.
#[derive(Debug, thiserror::Error)]
pub enum Broken {
    /// What the system, or TLS, said.
    #[error("{0}")]
    Io(#[source] std::io::Error),
    /// The worker ended it before its answer was whole.
    #[error("the worker closed it")]
    Closed,
    /// What came is no answer.
    #[error("the worker's answer {0}")]
    Malformed(&'static str),
    /// What came is no body in chunks.
    #[error("the worker's answer: {0}")]
    Chunk(#[source] ChunkFault),
    /// What the HTTP/2 connection said.
    #[error("{0}")]
    Http2(#[source] hyper::Error),
    /// The worker ended a gRPC call in another way than well.
    #[error("the worker ended the call with gRPC status {code}: {message}")]
    Grpc {
        /// The status's number.
        code: String,
        /// What the worker says of it.
        message: String,
    },
}

impl Broken {
    /// Whether the other side has closed the connection: it is there, or its host is.
    pub(super) fn is_close(&self) -> bool {
        const CLOSES: [ErrorKind; 3] =
            [ErrorKind::ConnectionReset, ErrorKind::BrokenPipe, ErrorKind::UnexpectedEof];
        match self {
            Self::Closed => true,
            Self::Io(source) => CLOSES.contains(&source.kind()),
            _ => false,
        }
    }
}

impl TransportError {
    /// Whether it was a limit that ran out.
    #[must_use]
    pub fn is_timeout(&self) -> bool {
        matches!(
            self,
            Self::ConnectTimeout { .. }
                | Self::NotSent { .. }
                | Self::FirstByte { .. }
                | Self::Idle { .. }
                | Self::Stalled { .. }
                | Self::Total { .. }
        )
    }

    /// What clients may know of it: where workers are is not theirs to know.
    #[must_use]
    pub fn for_clients(&self) -> String {
        match self {
            Self::Resolve { .. } => "its name cannot be resolved".to_owned(),
            Self::Connect { source, .. } => format!("no connection: {source}"),
            Self::Tls { .. } => "no TLS connection".to_owned(),
            _ => self.to_string(),
        }
    }

    /// Whether there was no connection to send on, so that nothing has been processed.
    #[must_use]
    pub fn is_unreachable(&self) -> bool {
        matches!(
            self,
            Self::Resolve { .. } | Self::Connect { .. } | Self::ConnectTimeout { .. } | Self::Tls { .. }
        )
    }

    /// Whether it means that the worker is not there at all. One packet that was lost, or a name server that has a bad moment,
    /// does not: those who probe it find out.
    #[must_use]
    pub fn takes_worker_out(&self) -> bool {
        matches!(self, Self::Connect { .. } | Self::Tls { .. }) && !self.is_routers_own()
    }

    /// Whether it means that the worker's process has ended, and all it had in its memory is lost: its host says that nobody
    /// listens. An engine listens again only when it has loaded its model, so a restart is always seen by some probe.
    #[must_use]
    pub fn ends_caches(&self) -> bool {
        matches!(self, Self::Connect { source, .. } if source.kind() == ErrorKind::ConnectionRefused)
    }

    /// Whether it is the router that has run out of something: that says nothing of the worker.
    #[must_use]
    pub fn is_routers_own(&self) -> bool {
        // ENOMEM, ENFILE, EMFILE, EADDRNOTAVAIL and ENOBUFS, as Linux numbers them.
        const EXHAUSTED: [i32; 5] = [12, 23, 24, 99, 105];
        match self {
            Self::Connect { source, .. } => {
                source.raw_os_error().is_some_and(|code| EXHAUSTED.contains(&code))
            }
            Self::Gateway { .. } => true,
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn system_says(code: i32) -> TransportError {
        let source = std::io::Error::from_raw_os_error(code);
        TransportError::Connect { address: "a:1".into(), source }
    }

    #[test]
    fn what_the_router_has_run_out_of_is_not_the_workers_fault() {
        for (code, own) in [(24, true), (99, true), (111, false)] {
            let error = system_says(code);
            assert_eq!((error.is_routers_own(), error.takes_worker_out()), (own, !own), "{error}");
        }
    }

    #[test]
    fn only_a_refused_connection_ends_caches() {
        let (limit, source) = (Duration::from_secs(1), std::io::Error::other("the name server is busy"));
        let (refused, no_route) = (system_says(111), system_says(113));
        for (error, takes_out, ends_caches) in [
            (refused, true, true),
            (no_route, true, false),
            (TransportError::ConnectTimeout { limit }, false, false),
            (TransportError::Resolve { host: "a".into(), source }, false, false),
        ] {
            assert!(error.is_unreachable(), "{error}");
            assert_eq!((error.takes_worker_out(), error.ends_caches()), (takes_out, ends_caches), "{error}");
        }
    }
}
