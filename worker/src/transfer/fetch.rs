//! The way of KV over the network: a GET of the other worker's port, whose answer is the blocks' bytes and nothing else.
//!
//! Next: [`super`] says what is fetched and what becomes of it.

use std::future::Future;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, StatusCode, header};
use http_body_util::{BodyExt, Empty};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use super::room::Place;
use crate::openai::kv_transfer::Remote;

/// Where KV is asked for; the ticket follows.
pub(crate) const PATH: &str = "/kv_transfer/";
/// The query that says how many blocks are not wanted, since they are there.
pub(crate) const FROM_BLOCK: &str = "from_block=";
/// To connect, and to get the head of the answer: what is asked for lies ready.
const BEGIN_WITHIN: Duration = Duration::from_secs(2);
/// Between two pieces.
const PIECE_WITHIN: Duration = Duration::from_secs(2);
/// Whatever comes more slowly is not waited for: it is sooner computed.
const LEAST_BYTES_PER_S: f64 = 50e6;

/// Why KV did not come.
#[derive(Debug, thiserror::Error)]
pub(super) enum FetchError {
    #[error("cannot connect to {0}: {1}")]
    Connect(String, std::io::Error),
    #[error("the exchange failed: {0}")]
    Exchange(#[from] hyper::Error),
    #[error("it cannot be asked for: {0}")]
    Ask(#[from] http::Error),
    #[error("it was answered with status {0}")]
    Refused(StatusCode),
    #[error("{found} bytes came, not {expected}")]
    Length { expected: usize, found: usize },
    #[error("it did not come within {0:?}")]
    Late(Duration),
}

/// Fetches `expected` bytes of blocks, from the `from_block`th on, into `place`.
pub(super) async fn fetch(
    remote: &Remote,
    from_block: usize,
    (expected, place): (usize, Place),
) -> Result<Bytes, FetchError> {
    let limit = BEGIN_WITHIN + Duration::from_secs_f64(expected as f64 / LEAST_BYTES_PER_S);
    within(limit, fetch_all(remote, from_block, (expected, place))).await
}

async fn fetch_all(
    remote: &Remote,
    from_block: usize,
    (expected, place): (usize, Place),
) -> Result<Bytes, FetchError> {
    // A v6 address is in brackets where a port follows.
    let host = if remote.host.contains(':') { format!("[{}]", remote.host) } else { remote.host.clone() };
    let address = format!("{host}:{}", remote.port);
    let connecting = async { Ok(TcpStream::connect(&address).await) };
    let stream = within(BEGIN_WITHIN, connecting).await?;
    let stream = stream.map_err(|error| FetchError::Connect(address.clone(), error))?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    // It ends with the answer, or when that is dropped.
    tokio::spawn(connection);
    let request = Request::get(format!("{PATH}{}?{FROM_BLOCK}{from_block}", remote.ticket))
        .header(header::HOST, address)
        .body(Empty::<Bytes>::new())?;
    let asking = async { Ok(sender.send_request(request).await?) };
    let response = within(BEGIN_WITHIN, asking).await?;
    if response.status() != StatusCode::OK {
        return Err(FetchError::Refused(response.status()));
    }
    let mut body = response.into_body();
    let mut bytes = Vec::with_capacity(expected);
    while let Some(frame) = within(PIECE_WITHIN, async { Ok(body.frame().await.transpose()?) }).await? {
        let piece = frame.into_data().unwrap_or_default();
        if bytes.len() + piece.len() > expected {
            return Err(FetchError::Length { expected, found: bytes.len() + piece.len() });
        }
        bytes.extend_from_slice(&piece);
    }
    if bytes.len() < expected {
        return Err(FetchError::Length { expected, found: bytes.len() });
    }
    Ok(place.hold(bytes))
}

async fn within<T>(
    limit: Duration,
    what: impl Future<Output = Result<T, FetchError>>,
) -> Result<T, FetchError> {
    tokio::time::timeout(limit, what).await.map_err(|_| FetchError::Late(limit))?
}
