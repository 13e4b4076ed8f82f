//! The worker's own listener: connections in, [`Worker::handle`] for each request, streams out, within limits. HTTP/1, HTTP/2
//! in plain text and gRPC share a port: who connects says by its first bytes what it speaks.

mod answer;

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::time::{Duration, Instant};

use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

use self::answer::Answerer;
use crate::Worker;

/// Time for a client to say what it speaks, to send its head, and again for its body.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(60);
/// How an HTTP/2 connection begins; no HTTP/1 method does.
const HTTP2_BEGINS: [u8; 3] = *b"PRI";
/// Between two looks at a client that has sent less than that.
const LOOK_INTERVAL: Duration = Duration::from_millis(10);
/// Between two complaints about connections that cannot be accepted.
const COMPLAINT_INTERVAL: Duration = Duration::from_secs(10);
/// Streams of one HTTP/2 connection: a router's thread puts its requests on few connections. What is too much for the engine
/// it refuses itself.
const MAX_STREAMS: u32 = 1_024;
/// What may be on the way of one body, and of all bodies of a connection: long prompts should not wait for acknowledgements.
const STREAM_WINDOW_BYTES: u32 = 1 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 16 << 20;
/// A client that vanished without a word is noticed within twice this, and what was generated for it is cancelled.
const PING_INTERVAL: Duration = Duration::from_secs(20);

/// Serves `worker` until `stop` resolves, then lets streams finish for at most `grace`.
pub async fn serve(worker: &Worker, listener: TcpListener, grace: Duration, stop: impl Future<Output = ()>) {
    let (drain, draining) = watch::channel(false);
    let mut connections = JoinSet::new();
    let mut complaint = Complaint::default();
    let answerer = Answerer::new(worker, &draining);
    tokio::pin!(stop);
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    connections.spawn(serve_connection(answerer.of(&stream), stream, draining.clone()));
                }
                Err(error) => {
                    if let Some(failures) = complaint.is_due(Instant::now()) {
                        tracing::warn!(%error, failures, "cannot accept connections");
                    }
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            },
            Some(_) = connections.join_next() => {}
            () = &mut stop => break,
        }
    }
    drop(listener);
    // Without connections nobody listens to this.
    let _ = drain.send(true);
    let finished = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(grace, finished).await.is_err() {
        tracing::warn!("grace period over, connections cut off");
    }
}

/// Says rarely what would happen a hundred times a second, as long as there are no files left for connections.
#[derive(Debug, Default)]
struct Complaint {
    last: Option<Instant>,
    /// Failures since then.
    failures: u64,
}

impl Complaint {
    /// Takes in a failure. Whether it is time to complain, and of how many.
    fn is_due(&mut self, now: Instant) -> Option<u64> {
        self.failures += 1;
        if self.last.is_some_and(|last| now.saturating_duration_since(last) < COMPLAINT_INTERVAL) {
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.failures))
    }
}

/// What a client speaks.
enum Protocol {
    Http1,
    Http2,
}

async fn serve_connection(answerer: Answerer, stream: TcpStream, mut draining: watch::Receiver<bool>) {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "no TCP_NODELAY");
    }
    let protocol = tokio::select! {
        // First: who has said something is answered, and told to go with the answer.
        biased;
        protocol = tokio::time::timeout(CLIENT_TIMEOUT, protocol_of(&stream)) => protocol,
        // It has asked for nothing yet.
        _ = async { draining.wait_for(|draining| *draining).await.is_ok() } => return,
    };
    let outcome = match protocol {
        Ok(Ok(Protocol::Http1)) => serve_http1(answerer, stream, draining).await,
        Ok(Ok(Protocol::Http2)) => serve_http2(answerer, stream, draining).await,
        // It has left, or says nothing.
        Ok(Err(_)) | Err(_) => return,
    };
    if let Err(error) = outcome {
        tracing::debug!(%error, "client connection ended");
    }
}

/// Looks at the first bytes, and leaves them where they are.
async fn protocol_of(stream: &TcpStream) -> io::Result<Protocol> {
    let mut begins = [0; HTTP2_BEGINS.len()];
    loop {
        let count = stream.peek(&mut begins).await?;
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if begins[..count] != HTTP2_BEGINS[..count] {
            return Ok(Protocol::Http1);
        }
        if count == begins.len() {
            return Ok(Protocol::Http2);
        }
        // What has come can be seen at once, and again: nothing wakes us when there is more.
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
}

/// Runs a connection; once the worker drains, until its streams have ended.
macro_rules! until_drained {
    ($connection:expr, $draining:expr) => {{
        let connection = $connection;
        tokio::pin!(connection);
        tokio::select! {
            outcome = connection.as_mut() => outcome,
            _ = async { $draining.wait_for(|draining| *draining).await.is_ok() } => {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
        }
    }};
}

async fn serve_http1(
    answerer: Answerer,
    stream: TcpStream,
    mut draining: watch::Receiver<bool>,
) -> hyper::Result<()> {
    let service = service_fn(move |request| {
        let answerer = answerer.clone();
        async move { Ok::<_, Infallible>(answerer.http(request).await) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(CLIENT_TIMEOUT)
        .serve_connection(TokioIo::new(stream), service);
    until_drained!(connection, draining)
}

async fn serve_http2(
    answerer: Answerer,
    stream: TcpStream,
    mut draining: watch::Receiver<bool>,
) -> hyper::Result<()> {
    let service = service_fn(move |request| {
        let answerer = answerer.clone();
        async move { Ok::<_, Infallible>(answerer.http_or_grpc(request).await) }
    });
    let connection = http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .max_concurrent_streams(MAX_STREAMS)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_INTERVAL)
        .serve_connection(TokioIo::new(stream), service);
    until_drained!(connection, draining)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn complaints_are_rare_and_count_what_they_left_out() {
        let mut complaint = Complaint::default();
        let begin = Instant::now();
        assert_eq!(complaint.is_due(begin), Some(1));
        for early in 1..1_000 {
            assert_eq!(complaint.is_due(begin + Duration::from_millis(early * 10)), None, "{early}");
        }
        assert_eq!(complaint.is_due(begin + COMPLAINT_INTERVAL), Some(1_000));
        assert_eq!(complaint.is_due(begin + COMPLAINT_INTERVAL * 2), Some(1));
    }
}
