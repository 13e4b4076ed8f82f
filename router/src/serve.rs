//! The life of the process: listen, say so, serve, drain.

use std::future::Future;
use std::io::IsTerminal as _;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use futures_util::future::join_all;
use socket2::{Domain, Socket, Type};
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::admin::{self, Scope};
use crate::app::App;
use crate::config::Config;
use crate::engine_load;
use crate::file_limit;
use crate::listener::acceptor::Acceptor;
use crate::listener::connection::{Callers, Clients};
use crate::listener::cores::Cores;
use crate::listener::tls::Tls;
use crate::replicas;

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 4_096;

/// Where the router came to listen.
#[derive(Clone, Copy, Debug)]
pub struct Addresses {
    /// Clients.
    pub clients: SocketAddr,
    /// Operators.
    pub admin: Option<SocketAddr>,
    /// Scrapers.
    pub metrics: Option<SocketAddr>,
    /// Other routers.
    pub replicas: Option<SocketAddr>,
    /// Gateways.
    pub gateways: Option<SocketAddr>,
}

/// Serves until `stop` resolves, and then for `--drain-delay` while saying that it goes; then drains. `ready` is called
/// once everything listens. Must run on a tokio runtime, which then does the accepting, the probing and the admin API.
///
/// # Errors
/// When an address is taken, or a worker cannot be set up.
pub async fn serve(
    config: Config,
    ready: impl FnOnce(&Arc<App>, Addresses),
    stop: impl Future<Output = ()>,
) -> anyhow::Result<()> {
    let settings = &config.settings;
    file_limit::raise(settings.max_connections);
    let tls = match (&settings.tls_cert, &settings.tls_key) {
        (Some(certificate), Some(key)) => Some(Arc::new(Tls::load(certificate, key)?)),
        _ => None,
    };
    let listener = listen(settings.listen())?;
    let admin = config.admin_listen.map(listen).transpose()?;
    let metrics = settings.metrics_listen.map(listen).transpose()?;
    let replicas = settings.replica_listen.map(listen).transpose()?;
    let gateways = settings.gateway_listen.map(listen).transpose()?;
    let app = App::build(&config)?;
    let addresses = Addresses {
        clients: listener.local_addr()?,
        admin: admin.as_ref().map(TcpListener::local_addr).transpose()?,
        metrics: metrics.as_ref().map(TcpListener::local_addr).transpose()?,
        replicas: replicas.as_ref().map(TcpListener::local_addr).transpose()?,
        gateways: gateways.as_ref().map(TcpListener::local_addr).transpose()?,
    };
    if let Some(listener) = replicas {
        replicas::start(&app, &config, listener).map_err(anyhow::Error::msg)?;
    }
    if let Some(every) = settings.engine_load.limit() {
        tokio::spawn(engine_load::run(Arc::clone(&app), every));
    }
    if let Some(listener) = admin {
        tokio::spawn(admin::serve(Arc::clone(&app), listener, Scope::Admin));
    }
    if let Some(listener) = metrics {
        tokio::spawn(admin::serve(Arc::clone(&app), listener, Scope::MetricsOnly));
    }
    if let Some(tls) = &tls {
        tokio::spawn(Arc::clone(tls).reload());
    }
    let threads = settings
        .threads
        .unwrap_or_else(|| std::thread::available_parallelism().map_or(1, std::num::NonZero::get));
    let cores = Cores::start(threads, &app.metrics.listener).context("cannot start threads")?;
    let acceptor = |callers| {
        let clients = Clients { app: Arc::clone(&app), callers, tls: tls.clone() };
        Acceptor::new(cores.spread().clone(), Arc::new(clients))
    };
    let mut doors = vec![(acceptor(Callers::Clients), listener)];
    doors.extend(gateways.map(|listener| (acceptor(Callers::Gateways), listener)));
    wait_for_sources(&app).await;
    wait_for_workers(&app).await;
    ready(&app, addresses);
    accept_until(&doors, stop).await;
    app.begin_draining();
    tracing::info!(delay = ?settings.drain_delay, "not ready any more, accepting for a while");
    // Balancers need a moment to see that it is not ready; until then they send requests.
    accept_until(&doors, tokio::time::sleep(settings.drain_delay)).await;
    for (acceptor, listener) in doors {
        acceptor.close(listener);
    }
    tracing::info!("draining");
    let cut_off = cores.drain(settings.grace_period, || app.begin_cutting_off()).await;
    if let Some(recording) = &app.recording {
        recording.flush();
    }
    app.leave_prefixes();
    if let Some(spans) = &app.spans {
        spans.end().await;
    }
    if cut_off > 0 {
        tracing::warn!(connections = cut_off, "grace period over, connections cut off");
    }
    Ok(())
}

async fn accept_until(doors: &[(Acceptor, TcpListener)], event: impl Future<Output = ()>) {
    let accepting = join_all(doors.iter().map(|(acceptor, listener)| acceptor.accept(listener)));
    tokio::select! {
        _ = accepting => {}
        () = event => {}
    }
}

/// Gives sources a moment to say what their workers are. One that says nothing does not keep the router from serving.
async fn wait_for_sources(app: &App) {
    for _ in 0..200 {
        if app.sources.iter().all(|source| source.is_known()) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Gives workers that are there already a moment to be found, so that the first request does not come too early.
async fn wait_for_workers(app: &App) {
    for _ in 0..50 {
        if app.fleet.roster().snapshot.workers().iter().all(|worker| worker.is_usable()) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

fn listen(address: SocketAddr) -> anyhow::Result<TcpListener> {
    let open = || -> std::io::Result<TcpListener> {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
        socket.set_reuse_address(true)?;
        socket.set_nonblocking(true)?;
        socket.bind(&address.into())?;
        socket.listen(BACKLOG)?;
        TcpListener::from_std(socket.into())
    };
    open().with_context(|| format!("cannot listen on {address}"))
}

/// SIGTERM, SIGINT and SIGHUP, as they come.
pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    /// Takes them over from the system, which would end the process.
    ///
    /// # Errors
    /// When the handlers cannot be set.
    pub fn take() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    /// The exit status that a shell gives to a process which ends by the next signal: 143 for SIGTERM, 130 for SIGINT. SIGHUP ends it, with
    /// 129, where it says that a terminal is gone; services are sent it by those who want files to be read again.
    pub async fn next(&mut self) -> u8 {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => return 143,
                _ = self.interrupt.recv() => return 130,
                _ = self.hangup.recv() => {
                    if std::io::stderr().is_terminal() {
                        return 129;
                    }
                    tracing::info!("SIGHUP: nothing to do, keys and certificates are read again when their files change");
                }
            }
        }
    }
}
