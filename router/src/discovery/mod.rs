//! Where workers come from that nobody has named: from a Kubernetes Service, or from a name with many addresses.
//!
//! A source says all of its workers whenever something has changed, and the latest word counts. What it does not say it does not change: while
//! it fails, the workers that were known serve on. Knows no policies, health or requests. Next: [`desired`](crate::desired), which joins all sources
//! with what operators have named.

pub mod dns;
pub mod kubernetes;
pub mod source;
pub mod state;

use std::future::Future;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use self::dns::Dns;
use self::kubernetes::Kubernetes;
use self::kubernetes::api::{Api, ApiAddress};
use self::source::{Place, SourceSpec};
use self::state::SourceState;
use crate::app::App;
use crate::back_off::BackOff;
use crate::config::Config;
use crate::desired::Found;
use crate::fleet::FleetError;

/// A source that has failed is asked again after this, then after twice as long, and so on.
const FIRST_BACK_OFF: Duration = Duration::from_millis(200);
/// The longest of these waits: a source that works again is heard within it.
const LONGEST_BACK_OFF: Duration = Duration::from_secs(10);
/// So long without a failure, and waits begin anew.
const CALM: Duration = Duration::from_secs(60);
/// Between two log lines about failures of one source, if they are of one kind.
const BETWEEN_COMPLAINTS: Duration = Duration::from_secs(60);

/// A source of workers.
pub trait Discovery: Send {
    /// Waits for the next word of it, and gives all workers that there should be: others than before, or still the same.
    ///
    /// # Errors
    /// When nothing is known of what they are now. It can be asked again.
    fn next(&mut self) -> impl Future<Output = Result<Vec<Found>, DiscoveryError>> + Send;
}

/// Why a source has not said what its workers are.
#[derive(Debug, thiserror::Error)]
pub enum DiscoveryError {
    /// A name could not be looked up, or has no address.
    #[error("{host} cannot be resolved: {source}")]
    Lookup {
        /// The name.
        host: String,
        /// What the resolver said.
        #[source]
        source: std::io::Error,
    },
    /// There is no connection to the Kubernetes API.
    #[error("no connection to the Kubernetes API at {address}: {source}")]
    Connect {
        /// Where.
        address: String,
        /// What the system, or TLS, said.
        #[source]
        source: std::io::Error,
    },
    /// What the router shows to the API cannot be read.
    #[error("{why}")]
    Credentials {
        /// Which file, and why; never what is in it.
        why: String,
    },
    /// Something took too long.
    #[error("{what} within {} s", limit.as_secs_f64())]
    Late {
        /// What has not come.
        what: &'static str,
        /// The limit.
        limit: Duration,
    },
    /// The connection broke, or what came is no HTTP.
    #[error("the answer of the Kubernetes API broke off: {0}")]
    Broken(#[from] hyper::Error),
    /// A watch ended; a failure if it was as soon as it had begun.
    #[error("the Kubernetes API ended a watch")]
    Ended,
    /// The API refuses.
    #[error("the Kubernetes API says {status}: {message}")]
    Refused {
        /// As of HTTP.
        status: u16,
        /// In its own words.
        message: String,
    },
    /// What the API says is too long.
    #[error("the Kubernetes API says more than {most_bytes} bytes at once")]
    TooLong {
        /// The limit.
        most_bytes: usize,
    },
    /// What the API says is not what was asked for.
    #[error("the Kubernetes API gave a {what} that is none: {source}")]
    Malformed {
        /// What was asked for.
        what: &'static str,
        /// What is wrong with it.
        #[source]
        source: serde_json::Error,
    },
    /// The fleet could not be made what the source wants.
    #[error("the fleet stays as it is: {0}")]
    Fleet(#[from] FleetError),
    /// Making the fleet so did not end well.
    #[error("the fleet could not be changed: {0}")]
    Change(#[from] tokio::task::JoinError),
}

impl DiscoveryError {
    /// Whether the version from which a watch should go on is too old: all has to be listed anew, and nothing is wrong.
    fn is_expired(&self) -> bool {
        matches!(self, Self::Refused { status: 410, .. })
    }
}

/// Follows all sources of workers in `config` for as long as the runtime lives, and tells the fleet of `app`. Must be called within a tokio runtime.
///
/// # Errors
/// When it is not known where the Kubernetes API is, or which namespace is meant.
pub fn start(app: &Arc<App>, config: &Config) -> Result<(), String> {
    for (spec, state) in config.sources.iter().zip(&app.sources) {
        let (app, name) = (Arc::clone(app), Arc::clone(&state.name));
        begin(config, spec, Arc::clone(state), move |found| {
            tell(Arc::clone(&app), Arc::clone(&name), found)
        })?;
    }
    Ok(())
}

/// Follows one source for as long as the runtime lives: `publish` is given what it says, if that is news. Must be called within a tokio runtime.
///
/// # Errors
/// When it is not known where the Kubernetes API is, or which namespace is meant.
pub(crate) fn begin<P>(
    config: &Config,
    spec: &SourceSpec,
    state: Arc<SourceState>,
    publish: impl FnMut(Vec<Found>) -> P + Send + 'static,
) -> Result<(), String>
where
    P: Future<Output = Result<(), DiscoveryError>> + Send + 'static,
{
    let SourceSpec { name, place, workers } = spec.clone();
    match place {
        Place::Kubernetes { namespace, service, port } => {
            let api = api_of(config).map_err(|error| format!("{name}: {error}"))?;
            let namespace = match namespace {
                Some(namespace) => namespace,
                None => namespace_of(&api.credentials)
                    .map_err(|error| format!("{name}: {error}; name one, as in k8s://NAMESPACE/{service}"))?,
            };
            let source = Kubernetes::new(api, (&namespace, &service), port, workers);
            tokio::spawn(follow(source, state, publish));
        }
        Place::Dns { host, port } => {
            tokio::spawn(follow(Dns::new(host, port, workers), state, publish));
        }
    }
    Ok(())
}

fn api_of(config: &Config) -> Result<Api, String> {
    Ok(Api {
        address: config.kubernetes_api.clone().map_or_else(ApiAddress::of_pod, Ok)?,
        credentials: config.settings.kubernetes_credentials.clone(),
        connect_timeout: config.settings.connect_timeout,
    })
}

/// The namespace of the router's own pod.
fn namespace_of(credentials: &Path) -> Result<String, String> {
    let path = credentials.join("namespace");
    let read = std::fs::read_to_string(&path);
    let read = read.map_err(|error| format!("{} cannot be read: {error}", path.display()))?;
    let namespace = read.trim();
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    if namespace.is_empty() || !namespace.bytes().all(is_plain) {
        return Err(format!("{} has no namespace", path.display()));
    }
    Ok(namespace.to_owned())
}

/// Makes the fleet what a source says.
async fn tell(app: Arc<App>, source: Arc<str>, found: Vec<Found>) -> Result<(), DiscoveryError> {
    // A thousand workers take a while to be compared, and this thread accepts and probes.
    let published =
        tokio::task::spawn_blocking(move || app.fleet.publish(&source, found, &app.decider)).await;
    Ok(published??)
}

/// Follows a source for ever: `publish` is given what it says, if that is news.
async fn follow<P>(
    mut source: impl Discovery,
    state: Arc<SourceState>,
    mut publish: impl FnMut(Vec<Found>) -> P + Send,
) where
    P: Future<Output = Result<(), DiscoveryError>> + Send,
{
    let mut back_off = BackOff::between(FIRST_BACK_OFF, LONGEST_BACK_OFF);
    let (mut failed, mut complained) = (None::<Instant>, None);
    let mut known = None;
    loop {
        let published = match source.next().await {
            Ok(found) if known.as_ref() == Some(&found) => Ok(found.len()),
            Ok(found) => {
                let published = publish(found.clone()).await;
                published.map(|()| known.insert(found).len())
            }
            Err(error) => Err(error),
        };
        let error = match published {
            Ok(workers) => {
                if state.hear(workers) {
                    tracing::info!(source = &*state.name, workers, "workers are known again");
                }
                continue;
            }
            Err(error) => error,
        };
        state.fail(&error);
        let kind = std::mem::discriminant(&error);
        let is_news = |(at, known): (Instant, _)| known != kind || at.elapsed() >= BETWEEN_COMPLAINTS;
        if complained.is_none_or(is_news) {
            complained = Some((Instant::now(), kind));
            let is_known = state.is_known();
            tracing::warn!(source = &*state.name, %error, is_known, "workers cannot be found; those that are known serve on");
        }
        if failed.replace(Instant::now()).is_none_or(|at| at.elapsed() >= CALM) {
            back_off.begin_anew();
        }
        tokio::time::sleep(back_off.pause()).await;
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::sync::Mutex;

    use prometheus::IntCounter;
    use router_core::Role;
    use tokio::sync::Notify;

    use super::source::Kind;
    use super::*;
    use crate::desired::NewRequests;

    /// Says what it is told to, and then nothing any more.
    struct Script {
        words: Vec<Result<Vec<Found>, DiscoveryError>>,
        is_over: Arc<Notify>,
    }

    impl Discovery for Script {
        async fn next(&mut self) -> Result<Vec<Found>, DiscoveryError> {
            if self.words.is_empty() {
                self.is_over.notify_one();
                std::future::pending::<()>().await;
            }
            self.words.remove(0)
        }
    }

    fn at(port: u16) -> Found {
        let kind =
            Kind { scheme: "http", prefix: None, role: Role::Generate, bootstrap_port: None, dp_ranks: None };
        kind.workers(None, SocketAddr::from(([10, 0, 0, 1], port)), NewRequests::Taken).remove(0)
    }

    /// What is published of these words, if the fleet refuses everything on port 9 the first time; and the state of the source.
    async fn follow_all(
        words: Vec<Result<Vec<Found>, DiscoveryError>>,
    ) -> (Vec<Vec<Found>>, Arc<SourceState>) {
        let state = SourceState::new("script".into(), IntCounter::new("failures", "Failures.").unwrap());
        let (state, published, is_over) = (Arc::new(state), Mutex::new(Vec::new()), Arc::new(Notify::new()));
        let script = Script { words, is_over: Arc::clone(&is_over) };
        let publish = |found: Vec<Found>| {
            let mut published = published.lock().unwrap();
            let refused = found == [at(9)] && published.last() != Some(&found);
            published.push(found);
            async move { if refused { Err(DiscoveryError::Ended) } else { Ok(()) } }
        };
        tokio::select! {
            () = follow(script, Arc::clone(&state), publish) => unreachable!("it never ends"),
            () = is_over.notified() => {}
        }
        (published.into_inner().unwrap(), state)
    }

    #[tokio::test]
    async fn what_is_news_is_published_and_failures_change_nothing() {
        let words = vec![
            Err(DiscoveryError::Ended),
            Ok(vec![at(1), at(2)]),
            Err(DiscoveryError::Ended),
            Ok(vec![at(1), at(2)]),
            Ok(vec![]),
            Ok(vec![at(1)]),
        ];
        let (published, state) = follow_all(words).await;
        assert_eq!(published, [vec![at(1), at(2)], vec![], vec![at(1)]]);
        let told = state.told();
        assert_eq!((&told["failures"], state.workers(), state.is_known()), (&2.into(), 1, true));
        assert!(told["failure"].is_null());
    }

    #[tokio::test]
    async fn what_the_fleet_refused_is_told_to_it_again() {
        let (published, state) = follow_all(vec![Ok(vec![at(9)]), Ok(vec![at(9)])]).await;
        assert_eq!(published, [[at(9)], [at(9)]]);
        assert!(state.is_known());
    }

    #[tokio::test]
    async fn a_source_that_has_only_failed_is_not_known() {
        let (published, state) = follow_all(vec![Err(DiscoveryError::Ended)]).await;
        assert!(published.is_empty() && !state.is_known());
        assert!(state.told()["failure"].as_str().unwrap().contains("ended a watch"));
    }
}
