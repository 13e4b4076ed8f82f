//! The endpoints of a Kubernetes Service: listed once, and watched from there.
//!
//! A watch says what has changed since a version. It ends after a time that the router asks for, and goes on from the last version; where that is
//! too old by then, or anything is not understood, all is listed anew. Whatever fails, what was known last serves on. Knows no fleet.

pub mod api;
mod slices;

use std::time::Duration;

use bytes::BytesMut;
use tokio::time::{Instant, sleep_until, timeout_at};

use self::api::{Answer, Api};
use self::slices::{Event, Slices, Told};
use super::source::{Kind, PortChoice};
use super::{Discovery, DiscoveryError};
use crate::desired::Found;

/// Time for a whole list.
const LIST_LIMIT: Duration = Duration::from_secs(30);
/// Longest list: some 30,000 endpoints.
const MOST_LIST_BYTES: usize = 16 << 20;
/// Longest line of a watch. A slice has at most 1,000 endpoints, of half a kilobyte each.
const MOST_LINE_BYTES: usize = 4 << 20;
/// How long a watch is asked to last: so long a connection may be dead without anybody noticing it.
const WATCH_SECONDS: u64 = 60;
/// How much longer it may last before the server is taken to be silent.
const WATCH_GRACE: Duration = Duration::from_secs(15);
/// Between the beginnings of two lists, or two watches, whatever the server says.
const LEAST_INTERVAL: Duration = Duration::from_secs(1);

/// Follows one Service.
pub struct Kubernetes {
    api: Api,
    /// Of the slices, with a query that says of which Service.
    path: String,
    port: PortChoice,
    workers: Kind,
    slices: Slices,
    stage: Stage,
    listed: Pace,
    watched: Pace,
    /// What has been complained of, so that it is once.
    complaint: Option<String>,
}

/// What is to be done next.
enum Stage {
    /// Nothing is known for certain.
    List,
    /// What is known is of this version, and may be old.
    Watch { version: String },
    /// A watch is running.
    Watching { version: String, watch: Watch },
}

/// A running watch.
struct Watch {
    lines: Lines,
    began: Instant,
    /// When the server must have ended it.
    until: Instant,
    /// Whether it has said anything.
    is_heard: bool,
}

impl Kubernetes {
    /// Follows the endpoints of `service`. Names were checked when the configuration was read.
    #[must_use]
    pub fn new(api: Api, (namespace, service): (&str, &str), port: PortChoice, workers: Kind) -> Self {
        Self {
            api,
            path: format!(
                "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices?labelSelector=kubernetes.io%2Fservice-name%3D{service}"
            ),
            port,
            workers,
            slices: Slices::default(),
            stage: Stage::List,
            listed: Pace::default(),
            watched: Pace::default(),
            complaint: None,
        }
    }

    async fn list(&mut self) -> Result<String, DiscoveryError> {
        self.listed.keep().await;
        let list = self.api.get(&self.path).await?.whole(MOST_LIST_BYTES, LIST_LIMIT).await?;
        self.slices.replace(&list).map_err(|source| DiscoveryError::Malformed { what: "list", source })
    }

    async fn watch(&mut self, version: &str) -> Result<Watch, DiscoveryError> {
        self.watched.keep().await;
        let path = format!(
            "{}&watch=true&allowWatchBookmarks=true&timeoutSeconds={WATCH_SECONDS}&resourceVersion={version}",
            self.path
        );
        let answer = self.api.get(&path).await?;
        let began = Instant::now();
        let until = began + Duration::from_secs(WATCH_SECONDS) + WATCH_GRACE;
        Ok(Watch { lines: Lines::of(answer), began, until, is_heard: false })
    }

    /// What is known now.
    fn told(&mut self) -> Vec<Found> {
        let Told { found, without_port } = self.slices.told(&self.workers, &self.port);
        let complaint = if self.slices.is_empty() {
            Some("the Service has no EndpointSlices; is that its name?".to_owned())
        } else if without_port > 0 {
            Some(format!("{without_port} endpoints left out: which port is meant? Name one of the Service's"))
        } else {
            None
        };
        if let Some(complaint) =
            complaint.as_ref().filter(|complaint| self.complaint.as_ref() != Some(complaint))
        {
            tracing::warn!(path = self.path, "{complaint}");
        }
        self.complaint = complaint;
        found
    }
}

impl Discovery for Kubernetes {
    async fn next(&mut self) -> Result<Vec<Found>, DiscoveryError> {
        loop {
            // What fails below leaves a list to be done.
            match std::mem::replace(&mut self.stage, Stage::List) {
                Stage::List => {
                    let version = self.list().await?;
                    self.stage = Stage::Watch { version };
                    return Ok(self.told());
                }
                Stage::Watch { version } => match self.watch(&version).await {
                    Ok(watch) => self.stage = Stage::Watching { version, watch },
                    Err(error) if error.is_expired() => tracing::debug!(%error, "listing anew"),
                    Err(error) => return Err(error),
                },
                Stage::Watching { version, mut watch } => {
                    let line = match watch.next().await? {
                        Word::Line(line) => line,
                        Word::End(why) => {
                            tracing::debug!(reason = %why, "a watch has ended, and goes on with another");
                            self.stage = Stage::Watch { version };
                            // Who ends a watch in time is there, and had nothing to say.
                            if matches!(why, DiscoveryError::Ended) && watch.has_lasted() {
                                return Ok(self.told());
                            }
                            continue;
                        }
                    };
                    let event = self.slices.apply(&line);
                    match event.map_err(|source| DiscoveryError::Malformed { what: "event", source })? {
                        Event::Changed(version) | Event::Bookmark(version) => {
                            self.stage = Stage::Watching { version, watch };
                            return Ok(self.told());
                        }
                        Event::Unknown => self.stage = Stage::Watching { version, watch },
                        Event::Failed { code, message } => {
                            let error = DiscoveryError::Refused { status: code, message };
                            if !error.is_expired() {
                                return Err(error);
                            }
                            tracing::debug!(%error, "listing anew");
                        }
                    }
                }
            }
        }
    }
}

/// What comes of a watch.
enum Word {
    /// It says something.
    Line(BytesMut),
    /// It has ended for this reason, and another may go on where it was.
    End(DiscoveryError),
}

impl Watch {
    /// The next word of it.
    ///
    /// # Errors
    /// When it ended at once, or was silent for too long: then it may be that none ever says anything.
    async fn next(&mut self) -> Result<Word, DiscoveryError> {
        let why = match timeout_at(self.until, self.lines.next()).await {
            Ok(Ok(Some(line))) => {
                self.is_heard = true;
                return Ok(Word::Line(line));
            }
            Ok(Ok(None)) => DiscoveryError::Ended,
            Ok(Err(error @ DiscoveryError::TooLong { .. })) => return Err(error),
            Ok(Err(error)) => error,
            Err(_) => {
                return Err(DiscoveryError::Late {
                    what: "no end of a watch",
                    limit: self.until - self.began,
                });
            }
        };
        if self.is_heard || self.has_lasted() { Ok(Word::End(why)) } else { Err(why) }
    }

    /// Whether it has lasted for about as long as it was asked to.
    fn has_lasted(&self) -> bool {
        self.began.elapsed() >= Duration::from_secs(WATCH_SECONDS / 2)
    }
}

/// An answer in lines.
struct Lines {
    answer: Answer,
    /// What has come of the next ones.
    rest: BytesMut,
    /// Bytes of `rest` in which no line ends.
    searched: usize,
}

impl Lines {
    fn of(answer: Answer) -> Self {
        Self { answer, rest: BytesMut::new(), searched: 0 }
    }

    /// The next whole line; `None` at the end. What comes after the last line break is half a line, and is left out.
    async fn next(&mut self) -> Result<Option<BytesMut>, DiscoveryError> {
        loop {
            if let Some(at) = memchr::memchr(b'\n', &self.rest[self.searched..]) {
                let line = self.rest.split_to(self.searched + at + 1);
                self.searched = 0;
                if line.trim_ascii().is_empty() {
                    continue;
                }
                return Ok(Some(line));
            }
            self.searched = self.rest.len();
            if self.rest.len() > MOST_LINE_BYTES {
                return Err(DiscoveryError::TooLong { most_bytes: MOST_LINE_BYTES });
            }
            match self.answer.piece().await.transpose()? {
                Some(piece) => self.rest.extend_from_slice(&piece),
                None => return Ok(None),
            }
        }
    }
}

/// Keeps something from being done more often than it should be.
#[derive(Default)]
struct Pace(Option<Instant>);

impl Pace {
    /// Waits until it may be done, which it then is.
    async fn keep(&mut self) {
        if let Some(last) = self.0 {
            sleep_until(last + LEAST_INTERVAL).await;
        }
        self.0 = Some(Instant::now());
    }
}
