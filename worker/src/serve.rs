//! The worker's own listener: connections in, [`Worker::handle`] for each request, streams out, within limits.

use std::convert::Infallible;
use std::future::Future;
use std::time::Duration;

use http::{Request, Response};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::error::RequestError;
use crate::{Worker, WorkerBody};

/// Largest request body.
const MAX_BODY_BYTES: usize = 64 << 20;
/// Time for a client to send its head, and again for its body.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(60);

/// Serves `worker` until `stop` resolves, then lets streams finish for at most `grace`.
pub async fn serve(worker: &Worker, listener: TcpListener, grace: Duration, stop: impl Future<Output = ()>) {
    let (drain, draining) = watch::channel(false);
    let mut connections = JoinSet::new();
    tokio::pin!(stop);
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    connections.spawn(serve_connection(worker.clone(), stream, draining.clone()));
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept");
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

async fn serve_connection(worker: Worker, stream: TcpStream, mut draining: watch::Receiver<bool>) {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "no TCP_NODELAY");
    }
    let service = service_fn(move |request| {
        let worker = worker.clone();
        async move { Ok::<_, Infallible>(answer(&worker, request).await) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(CLIENT_TIMEOUT)
        .serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    let outcome = tokio::select! {
        outcome = connection.as_mut() => outcome,
        _ = async { draining.wait_for(|draining| *draining).await.is_ok() } => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = outcome {
        tracing::debug!(%error, "client connection ended");
    }
}

async fn answer(worker: &Worker, request: Request<Incoming>) -> Response<WorkerBody> {
    let (head, body) = request.into_parts();
    let whole = tokio::time::timeout(CLIENT_TIMEOUT, Limited::new(body, MAX_BODY_BYTES).collect()).await;
    let body = match whole {
        Ok(Ok(body)) => body.to_bytes(),
        Ok(Err(error)) if error.is::<LengthLimitError>() => {
            return RequestError::BodyTooLarge { limit_bytes: MAX_BODY_BYTES }.response();
        }
        Ok(Err(error)) => return RequestError::Body(error.to_string()).response(),
        Err(_) => return RequestError::Body("not in time".to_owned()).response(),
    };
    worker.handle(Request::from_parts(head, body)).await
}
