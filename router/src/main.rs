//! The router's command line.

use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use router::app::App;
use router::config::{Cli, Command, Config, ConfigErrors, LogFormat};
use router::logs::LogQueue;
use router::serve::{Addresses, Signals, serve};
use tracing_subscriber::EnvFilter;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// How long the end of the process waits for its last lines to be read.
const LAST_LINES: Duration = Duration::from_secs(1);

fn main() -> ExitCode {
    let cli = Cli::parse();
    if let Some(Command::CheckConfig { file }) = &cli.command {
        return match Cli::configure(&[], Some(file)) {
            Ok(config) => {
                let sources = match config.sources.len() {
                    0 => String::new(),
                    count => format!(" and {count} sources of others"),
                };
                println!(
                    "{}: good, {} workers{sources}, policy {}",
                    file.display(),
                    config.workers.len(),
                    config.settings.policy
                );
                ExitCode::SUCCESS
            }
            Err(errors) => complain(&errors),
        };
    }
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let config = match Cli::configure(&arguments, cli.settings.config.as_deref()) {
        Ok(config) => config,
        Err(errors) => return complain(&errors),
    };
    let logs = match start_logging(&config) {
        Ok(logs) => logs,
        Err(error) => {
            eprintln!("router: cannot start a thread for the log: {error}");
            return ExitCode::FAILURE;
        }
    };
    let code = run(config).unwrap_or_else(|error| {
        // After the lines before it, and not waiting for a reader any more than they do.
        logs.push(format!("router: {error:#}\n").as_bytes());
        ExitCode::FAILURE
    });
    logs.flush(LAST_LINES);
    code
}

fn complain(errors: &ConfigErrors) -> ExitCode {
    for error in &errors.0 {
        eprintln!("router: {error}");
    }
    ExitCode::from(2)
}

fn start_logging(config: &Config) -> std::io::Result<Arc<LogQueue>> {
    let report = |dropped| tracing::warn!(dropped, "log lines left out: stderr was not read fast enough");
    let queue = LogQueue::start(std::io::stderr(), report)?;
    let filter = EnvFilter::new(config.settings.log_filter());
    let logs = tracing_subscriber::fmt().with_env_filter(filter).with_writer(Arc::clone(&queue));
    match config.settings.log_format {
        LogFormat::Text => logs.with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr())).init(),
        LogFormat::Json => logs.json().flatten_event(true).init(),
    }
    Ok(queue)
}

/// Serves until a signal comes, then drains; a second one ends that at once.
fn run(config: Config) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let outcome = runtime.block_on(async {
        let mut signals = Signals::take()?;
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let serving = serve(config, introduce, async { drop(stopped.await) });
        tokio::select! {
            outcome = serving => outcome.map(|()| ExitCode::SUCCESS),
            code = async {
                signals.next().await;
                drop(stop);
                signals.next().await
            } => Ok(ExitCode::from(code)),
        }
    });
    runtime.shutdown_background();
    outcome
}

/// Says what has been started, and how to try it. Whether anybody reads it makes no difference: stdout may be closed.
fn introduce(app: &Arc<App>, addresses: Addresses) {
    if app.settings.workers.is_empty() {
        tracing::warn!("--workers names nobody: two embedded workers run a toy model inside this process");
    }
    let _ = std::io::stdout().write_all(introduction(app, addresses).as_bytes());
}

fn introduction(app: &App, addresses: Addresses) -> String {
    let roster = app.fleet.roster();
    let scheme = if app.settings.tls_cert.is_some() { "https" } else { "http" };
    let clients = format!("{scheme}://{}", addresses.clients);
    let mut lines = vec![
        format!("Roundhouse router {} on {clients}", env!("CARGO_PKG_VERSION")),
        format!("  policy   {}", app.decider.policy().name()),
    ];
    for worker in roster.snapshot.workers() {
        let state = if worker.is_usable() { "up" } else { "not up yet" };
        let rank = worker.spec.dp_rank.map(|rank| format!(" rank {}", rank.number)).unwrap_or_default();
        lines.push(format!("  worker   {:<6} {}{rank} ({state})", worker.id().as_str(), worker.spec.address));
    }
    for source in &app.sources {
        let state =
            if source.is_known() { format!("{} workers", source.workers()) } else { "not known yet".into() };
        lines.push(format!("  source   {} ({state})", source.name));
    }
    lines.extend(addresses.admin.map(|admin| format!("  admin    http://{admin}/metrics /workers /explain")));
    lines.extend(addresses.metrics.map(|metrics| format!("  metrics  http://{metrics}/metrics")));
    lines.extend(addresses.gateways.map(|gateways| format!("  gateways {gateways} (ext_proc)")));
    let models = roster.snapshot.workers().iter().find_map(|worker| worker.models());
    let model = models.and_then(|models| models.first().cloned()).unwrap_or_else(|| "MODEL".to_owned());
    lines.push(format!(
        "\nTry it:\n\n  curl -N {clients}/v1/chat/completions -H 'content-type: application/json' \\"
    ));
    lines.push(format!(
        "    -d '{{\"model\": \"{model}\", \"stream\": true, \"messages\": [{{\"role\": \"user\", \"content\": \
         \"Who is Mr. Darcy?\"}}]}}'\n\n"
    ));
    lines.join("\n")
}
