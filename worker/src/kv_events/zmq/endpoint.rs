//! Where a ZeroMQ socket listens, as vLLM writes it.

use std::io;
use std::str::FromStr;

use tokio::net::TcpListener;

/// An address to bind.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Endpoint {
    host: String,
    port: u16,
}

/// Why a text is no endpoint.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{given:?} is no endpoint; write tcp://127.0.0.1:5557, or tcp://*:5557 for all addresses")]
pub struct EndpointError {
    given: String,
}

impl FromStr for Endpoint {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Self, EndpointError> {
        let parts = text.strip_prefix("tcp://").and_then(|rest| rest.rsplit_once(':'));
        let read = parts.and_then(|(host, port)| Some((host, port.parse().ok()?)));
        let (host, port) = read
            .filter(|(host, _)| !host.is_empty() && !host.contains('/'))
            .ok_or_else(|| EndpointError { given: text.to_owned() })?;
        let host = if host == "*" { "0.0.0.0" } else { host };
        // Brackets of an IPv6 address are for texts only.
        let host = host.trim_start_matches('[').trim_end_matches(']');
        Ok(Self { host: host.to_owned(), port })
    }
}

impl Endpoint {
    pub(super) async fn bind(&self) -> io::Result<TcpListener> {
        let Self { host, port } = self;
        TcpListener::bind((host.as_str(), *port)).await.map_err(|error| {
            io::Error::new(error.kind(), format!("cannot bind tcp://{host}:{port}: {error}"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_written_as_for_vllm() {
        for (text, host, port) in [
            ("tcp://*:5557", "0.0.0.0", 5557),
            ("tcp://127.0.0.1:0", "127.0.0.1", 0),
            ("tcp://[::1]:5557", "::1", 5557),
            ("tcp://worker-0:5558", "worker-0", 5558),
        ] {
            assert_eq!(text.parse(), Ok(Endpoint { host: host.to_owned(), port }), "{text}");
        }
        for bad in
            ["", "5557", "tcp://", "tcp://*", "tcp://:5557", "tcp://a:b", "ipc:///tmp/x", "tcp://a/b:1"]
        {
            let error = bad.parse::<Endpoint>().unwrap_err().to_string();
            assert!(error.contains("tcp://127.0.0.1:5557"), "{bad}: {error}");
        }
    }
}
