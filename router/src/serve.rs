//! The life of the process: listen, say so, serve, drain.

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use socket2::{Domain, Socket, Type};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

use crate::admin::{self, Scope};
use crate::app::App;
use crate::config::Config;
use crate::stages::accept::Cores;

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
}

/// Serves until `stop` resolves, then drains. `ready` is called once everything listens. Must run on a current-thread or
/// other tokio runtime, which then does the accepting, the probing and the admin API.
///
/// # Errors
/// When an address is taken, or a worker cannot be set up.
pub async fn serve(
    config: Config,
    ready: impl FnOnce(&Arc<App>, Addresses),
    stop: impl Future<Output = ()>,
) -> anyhow::Result<()> {
    let clients = listen(config.settings.listen())?;
    let admin = config.admin_listen.map(listen).transpose()?;
    let metrics = config.settings.metrics_listen.map(listen).transpose()?;
    let app = App::build(&config)?;
    let addresses = Addresses {
        clients: clients.local_addr()?,
        admin: admin.as_ref().map(TcpListener::local_addr).transpose()?,
        metrics: metrics.as_ref().map(TcpListener::local_addr).transpose()?,
    };
    if let Some(listener) = admin {
        tokio::spawn(admin::serve(Arc::clone(&app), listener, Scope::Admin));
    }
    if let Some(listener) = metrics {
        tokio::spawn(admin::serve(Arc::clone(&app), listener, Scope::MetricsOnly));
    }
    let threads = config
        .settings
        .threads
        .unwrap_or_else(|| std::thread::available_parallelism().map_or(1, std::num::NonZero::get));
    let cores = Cores::start(&app, threads).context("cannot start threads")?;
    wait_for_workers(&app).await;
    ready(&app, addresses);
    tokio::select! {
        () = cores.accept(&clients) => {}
        () = stop => {}
    }
    app.begin_draining();
    drop(clients);
    tracing::info!("draining");
    let cut_off = cores.drain(config.settings.grace_period).await;
    if cut_off > 0 {
        tracing::warn!(connections = cut_off, "grace period over, connections cut off");
    }
    Ok(())
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

/// Resolves on SIGTERM or SIGINT.
///
/// # Errors
/// When the handlers cannot be set.
pub fn stop_signal() -> std::io::Result<impl Future<Output = ()>> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}
