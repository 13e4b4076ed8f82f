//! Stage 1: connections and their requests.
//!
//! One acceptor hands each connection to the core with the fewest open ones; each core is a thread with a runtime of its
//! own, so that a request never changes threads. Next: [`admit`](super::admit).

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use http::{HeaderValue, Request, Response};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};

use super::dispatch::{REQUEST_ID, dispatch};
use super::parse::Understanding;
use super::record::Recorder;
use super::relay::{RelayBody, relay};
use crate::answers;
use crate::app::App;
use crate::client_stream::ClientStream;
use crate::error::RequestError;
use crate::routes::Routes;

/// A thread that serves connections.
struct Core {
    inbox: mpsc::UnboundedSender<std::net::TcpStream>,
    open: Arc<AtomicUsize>,
}

/// The threads that serve clients.
pub struct Cores {
    cores: Vec<Core>,
    threads: Vec<std::thread::JoinHandle<()>>,
    drain: watch::Sender<bool>,
}

impl Cores {
    /// Starts `count` threads.
    ///
    /// # Errors
    /// When the system has no thread or runtime for us.
    pub fn start(app: &Arc<App>, count: usize) -> std::io::Result<Self> {
        let (drain, draining) = watch::channel(false);
        let (mut cores, mut threads) = (Vec::new(), Vec::new());
        for index in 0..count {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            let (inbox, connections) = mpsc::unbounded_channel();
            let open = Arc::new(AtomicUsize::new(0));
            let serving =
                serve_connections(Arc::clone(app), connections, Arc::clone(&open), draining.clone());
            let thread = std::thread::Builder::new().name(format!("core-{index}"));
            threads.push(thread.spawn(move || runtime.block_on(serving))?);
            cores.push(Core { inbox, open });
        }
        Ok(Self { cores, threads, drain })
    }

    /// Accepts connections for ever.
    pub async fn accept(&self, listener: &TcpListener) {
        loop {
            match listener.accept().await.and_then(|(stream, _)| stream.into_std()) {
                Ok(stream) => self.hand_out(stream),
                Err(error) => {
                    // Most likely out of file descriptors; connections that end will free some.
                    tracing::warn!(%error, "cannot accept");
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            }
        }
    }

    fn hand_out(&self, stream: std::net::TcpStream) {
        let emptiest = self.cores.iter().min_by_key(|core| core.open.load(Ordering::Relaxed));
        if let Some(core) = emptiest {
            core.open.fetch_add(1, Ordering::Relaxed);
            if core.inbox.send(stream).is_err() {
                core.open.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }

    /// Lets every connection finish what it has in flight and waits for that until `limit` has passed. Returns how many
    /// connections were cut off.
    pub async fn drain(self, limit: Duration) -> usize {
        let Self { cores, threads, drain } = self;
        // Nobody listens only if no core has a connection.
        let _ = drain.send(true);
        let open: Vec<_> = cores.iter().map(|core| Arc::clone(&core.open)).collect();
        drop(cores);
        let left = || open.iter().map(|open| open.load(Ordering::Relaxed)).sum::<usize>();
        let finished = async {
            while !threads.iter().all(std::thread::JoinHandle::is_finished) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        match tokio::time::timeout(limit, finished).await {
            Ok(()) => 0,
            Err(_) => left(),
        }
    }
}

async fn serve_connections(
    app: Arc<App>,
    mut connections: mpsc::UnboundedReceiver<std::net::TcpStream>,
    open: Arc<AtomicUsize>,
    draining: watch::Receiver<bool>,
) {
    let mut tasks = tokio::task::JoinSet::new();
    loop {
        tokio::select! {
            connection = connections.recv() => match connection {
                Some(stream) => {
                    let (app, open, draining) = (Arc::clone(&app), Open(Arc::clone(&open)), draining.clone());
                    tasks.spawn(async move {
                        let _open = open;
                        serve_connection(app, stream, draining).await;
                    });
                }
                None => break,
            },
            Some(_) = tasks.join_next() => {}
        }
    }
    while tasks.join_next().await.is_some() {}
}

/// Counts a connection until it ends, however it ends.
struct Open(Arc<AtomicUsize>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

async fn serve_connection(app: Arc<App>, stream: std::net::TcpStream, mut draining: watch::Receiver<bool>) {
    let Ok(stream) = TcpStream::from_std(stream) else { return };
    // Without it, small pieces wait for the acknowledgement of those before.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "no TCP_NODELAY");
    }
    let client_timeout = app.settings.client_timeout;
    let service = service_fn(move |request| {
        let app = Arc::clone(&app);
        async move { Ok::<_, Infallible>(serve(&app, request).await) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(client_timeout)
        .serve_connection(TokioIo::new(ClientStream::new(stream, client_timeout)), service);
    tokio::pin!(connection);
    let outcome = tokio::select! {
        outcome = connection.as_mut() => outcome,
        // Also when the sender is gone: then the process ends.
        _ = async { draining.wait_for(|draining| *draining).await.is_ok() } => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = outcome {
        tracing::debug!(%error, "client connection ended");
    }
}

/// One request, from its head to the head of its answer.
pub async fn serve(app: &Arc<App>, mut request: Request<Incoming>) -> Response<RelayBody> {
    let endpoint = app.routes.find(request.uri().path());
    let understanding = endpoint.understanding();
    if !request.headers().contains_key(REQUEST_ID) {
        let id = format!("{:032x}", rand::random::<u128>());
        request.headers_mut().extend(HeaderValue::try_from(id).ok().map(|id| (REQUEST_ID, id)));
    }
    let id = request.headers().get(REQUEST_ID).cloned();
    let mut recorder = Recorder::new(app, endpoint, request.method().clone(), id);
    if let Err(error) = app.keys.authorize(endpoint, request.headers_mut()) {
        let error = RequestError::from(error);
        recorder.fail(&error);
        return error.response();
    }
    let outcome = match understanding {
        _ if !Routes::takes(endpoint, request.method()) => Err(wrong_method(endpoint, &request)),
        Some(understanding) => match forward(app, request, understanding, &mut recorder).await {
            Ok(dispatched) => return relay(app, dispatched, recorder),
            Err(error) => Err(error),
        },
        None => answers::answer(app, endpoint, request.uri().path()),
    };
    match outcome {
        Ok(response) => {
            recorder.served(response.status());
            response
        }
        Err(error) => {
            recorder.fail(&error);
            error.response()
        }
    }
}

/// The middle of the path. What is left after it is to relay the answer, and to record.
async fn forward(
    app: &Arc<App>,
    request: Request<Incoming>,
    understanding: Understanding,
    recorder: &mut Recorder,
) -> Result<super::dispatch::Dispatched, RequestError> {
    let admitted = app.admission.admit(request).await?;
    let parsed = app.parser.parse(admitted, understanding, &app.ratios)?;
    dispatch(app, parsed, recorder).await
}

fn wrong_method(endpoint: crate::routes::Endpoint, request: &Request<Incoming>) -> RequestError {
    let path = request.uri().path().to_owned();
    if endpoint == crate::routes::Endpoint::Unknown {
        return RequestError::NotFound { path };
    }
    RequestError::MethodNotAllowed { path, method: request.method().to_string(), allowed: endpoint.method() }
}
