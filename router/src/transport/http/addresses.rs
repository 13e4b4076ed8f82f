//! Where a worker's name leads: remembered for all threads, and asked for again in the background while it is in use.
//!
//! That a name cannot be looked up says nothing about the worker: what was known last serves on, however old. Knows no
//! connections; [`connect`](super::connect) says when one was not to be had.

use std::io::{Error, ErrorKind};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;

use crate::transport::TransportError;

/// Addresses older than this are used, and asked for again beside it: a thousand named workers are a hundred lookups a second at
/// most, and one that moves while its old address still answers is followed within ten seconds.
const FRESH: Duration = Duration::from_secs(10);
/// Older ones may be another's by now: they are asked for first.
const OLD: Duration = Duration::from_secs(60);
/// So long a connection waits for that where something is known. A name server takes milliseconds, or seconds if it fails; tests do not
/// depend on how fast a machine is.
const PATIENCE: Duration = Duration::from_secs(if cfg!(test) { 20 } else { 1 });
/// Between two lookups, however many connections fail.
const LEAST_INTERVAL: Duration = Duration::from_secs(1);

/// Some addresses of one worker.
pub(super) type List = Arc<[SocketAddr]>;

/// A name, and what is known of it.
pub(super) struct Addresses {
    host: String,
    port: u16,
    book: watch::Sender<Book>,
}

#[derive(Default)]
struct Book {
    known: Option<Known>,
    /// When the last lookup began.
    asked: Option<Instant>,
    /// Whether it is going on.
    asking: bool,
    /// What it said, if it has failed.
    failure: Option<(ErrorKind, String)>,
}

struct Known {
    list: List,
    since: Instant,
    /// A connection could not be made: the worker may be elsewhere.
    doubted: bool,
}

impl Addresses {
    pub(super) fn new(host: &str, port: u16) -> Arc<Self> {
        Arc::new(Self { host: host.to_owned(), port, book: watch::Sender::new(Book::default()) })
    }

    /// Where to connect to.
    ///
    /// # Errors
    /// When it has never been known.
    pub(super) async fn get(self: &Arc<Self>) -> Result<List, TransportError> {
        let known = {
            let book = self.book.borrow();
            let of = |known: &Known| (Arc::clone(&known.list), known.since.elapsed(), known.doubted);
            book.known.as_ref().map(of)
        };
        match known {
            Some((list, age, false)) if age < FRESH => Ok(list),
            Some((list, age, false)) if age < OLD => {
                self.ask();
                Ok(list)
            }
            Some((list, ..)) => Ok(self.ask_patiently().await.unwrap_or(list)),
            None => {
                self.ask();
                let mut book = self.book.subscribe();
                // Whoever waits has a limit for the whole connection.
                drop(book.wait_for(|book| !book.asking).await);
                self.known().ok_or_else(|| self.failure())
            }
        }
    }

    /// Other addresses than those that have just failed, if a lookup gives any.
    pub(super) async fn instead_of(self: &Arc<Self>, failed: &List) -> Option<List> {
        self.doubt();
        self.ask_patiently().await.filter(|list| list != failed)
    }

    /// No connection came about in time: the next one asks before it tries.
    pub(super) fn doubt(&self) {
        self.book.send_if_modified(|book| {
            if let Some(known) = &mut book.known {
                known.doubted = true;
            }
            false
        });
    }

    /// What is known once a lookup has ended, or has taken too long.
    async fn ask_patiently(self: &Arc<Self>) -> Option<List> {
        self.ask();
        let mut book = self.book.subscribe();
        // From when it began: while name servers hang, few connections wait for them.
        let until = book.borrow().asked.unwrap_or_else(Instant::now) + PATIENCE;
        let _ = tokio::time::timeout_at(until.into(), book.wait_for(|book| !book.asking)).await;
        self.known()
    }

    /// Begins a lookup, unless there has just been one. It goes on whoever stops waiting.
    fn ask(self: &Arc<Self>) {
        let begins = |book: &mut Book| {
            let just_asked = book.asked.is_some_and(|asked| asked.elapsed() < LEAST_INTERVAL);
            if book.asking || just_asked {
                return false;
            }
            (book.asking, book.asked) = (true, Some(Instant::now()));
            true
        };
        if self.book.send_if_modified(begins) {
            let asking = Asking(Arc::clone(self));
            tokio::spawn(async move {
                let found = tokio::net::lookup_host((asking.0.host.as_str(), asking.0.port)).await;
                asking.0.learn(found.map(Iterator::collect));
            });
        }
    }

    fn learn(&self, found: Result<List, Error>) {
        self.book.send_modify(|book| match found {
            Ok(list) if list.is_empty() => {
                book.failure = Some((ErrorKind::NotFound, "the name has no address".to_owned()));
            }
            Ok(list) => book.known = Some(Known { list, since: Instant::now(), doubted: false }),
            Err(error) => book.failure = Some((error.kind(), error.to_string())),
        });
    }

    fn known(&self) -> Option<List> {
        self.book.borrow().known.as_ref().map(|known| Arc::clone(&known.list))
    }

    fn failure(&self) -> TransportError {
        let (kind, message) = self.book.borrow().failure.clone().unwrap_or((ErrorKind::Other, String::new()));
        TransportError::Resolve { host: self.host.clone(), source: Error::new(kind, message) }
    }
}

/// A lookup that is going on, until dropped: with its runtime, if that ends first.
struct Asking(Arc<Addresses>);

impl Drop for Asking {
    fn drop(&mut self) {
        self.0.book.send_modify(|book| book.asking = false);
    }
}

#[cfg(test)]
impl Addresses {
    /// As if a lookup had given these so long ago.
    pub(super) fn pretend(&self, list: &[SocketAddr], age: Duration) {
        self.learn(Ok(list.into()));
        self.book.send_modify(|book| {
            if let Some(known) = &mut book.known {
                known.since -= age;
            }
        });
    }

    /// A name with addresses that a lookup gave so long ago.
    pub(super) fn known_for(host: &str, list: &[SocketAddr], age: Duration) -> Arc<Self> {
        let addresses = Self::new(host, 80);
        addresses.pretend(list, age);
        addresses
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where nobody listens; only compared.
    const ELSEWHERE: &str = "192.0.2.1:80";
    const NO_NAME: &str = "no-such-host.invalid";

    fn list() -> List {
        [ELSEWHERE.parse().unwrap()].into()
    }

    #[tokio::test]
    async fn a_name_that_was_never_known_says_why() {
        let error = Addresses::new(NO_NAME, 80).get().await.unwrap_err();
        assert!(matches!(&error, TransportError::Resolve { host, .. } if host == NO_NAME), "{error}");
    }

    #[tokio::test]
    async fn what_was_known_serves_however_long_the_name_cannot_be_looked_up() {
        for age in [Duration::ZERO, FRESH, OLD, 10 * OLD] {
            let addresses = Addresses::known_for(NO_NAME, &list(), age);
            for _ in 0..3 {
                assert_eq!(addresses.get().await.unwrap(), list(), "{age:?}");
            }
            addresses.doubt();
            assert_eq!(addresses.get().await.unwrap(), list(), "{age:?}");
            assert_eq!(addresses.instead_of(&list()).await, None);
        }
    }

    #[tokio::test]
    async fn what_is_fresh_is_not_asked_for() {
        let addresses = Addresses::known_for("localhost", &list(), Duration::ZERO);
        assert_eq!(addresses.get().await.unwrap(), list());
        assert!(addresses.book.borrow().asked.is_none());
    }

    #[tokio::test]
    async fn what_is_older_serves_while_it_is_asked_for() {
        let addresses = Addresses::known_for("localhost", &list(), FRESH);
        let mut book = addresses.book.subscribe();
        assert_eq!(addresses.get().await.unwrap(), list(), "nobody waits");
        book.wait_for(|book| !book.asking).await.unwrap();
        assert_ne!(addresses.get().await.unwrap(), list());
    }

    #[tokio::test]
    async fn what_is_old_or_doubted_is_asked_for_first() {
        let old = Addresses::known_for("localhost", &list(), OLD);
        assert_ne!(old.get().await.unwrap(), list());
        let doubted = Addresses::known_for("localhost", &list(), Duration::ZERO);
        doubted.doubt();
        assert_ne!(doubted.get().await.unwrap(), list());
        let failed = Addresses::known_for("localhost", &list(), Duration::ZERO);
        let others = failed.instead_of(&list()).await.unwrap();
        assert_eq!(failed.instead_of(&others).await, None, "asked a moment ago");
    }
}
