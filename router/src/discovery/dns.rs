//! The addresses of a name: all of them are workers. Asked for again every few seconds.
//!
//! Answers are not to be trusted to be whole: a name server may give some of many addresses, others each time. So an address leaves once several
//! answers have been without it. Knows no fleet.

use std::collections::BTreeMap;
use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::time::Duration;

use tokio::time::{sleep, timeout};

use super::source::Kind;
use super::{Discovery, DiscoveryError};
use crate::desired::{Found, NewRequests};

/// Between an answer and the next question.
const INTERVAL: Duration = Duration::from_secs(5);
/// Time for an answer. One that takes longer is waited for further on, and nothing else is asked meanwhile.
const LIMIT: Duration = Duration::from_secs(10);
/// Answers, one after the other, that an address must be missing from before it leaves.
const ANSWERS_TO_LEAVE: u32 = 3;

/// A lookup that is going on.
type Asking = Pin<Box<dyn Future<Output = io::Result<Vec<SocketAddr>>> + Send>>;
/// Begins a lookup of a name, with a port.
type Lookup = Box<dyn Fn(&str, u16) -> Asking + Send + Sync>;

/// Follows one name.
pub struct Dns {
    host: String,
    port: u16,
    workers: Kind,
    lookup: Lookup,
    /// [`INTERVAL`] and [`LIMIT`], but for tests.
    times: (Duration, Duration),
    asking: Option<Asking>,
    /// Each address, and how many answers have been without it since the last that had it.
    known: BTreeMap<SocketAddr, u32>,
    /// Whether the next question waits for the interval.
    is_answered: bool,
}

impl Dns {
    /// Follows `host`, whose addresses are workers at `port`.
    #[must_use]
    pub fn new(host: String, port: u16, workers: Kind) -> Self {
        let lookup: Lookup = Box::new(|host, port| {
            let host = host.to_owned();
            Box::pin(async move { Ok(tokio::net::lookup_host((host, port)).await?.collect()) })
        });
        let (asking, known, is_answered) = (None, BTreeMap::new(), false);
        Self { host, port, workers, lookup, times: (INTERVAL, LIMIT), asking, known, is_answered }
    }

    /// The answer to the question that has been asked, or to a new one.
    async fn ask(&mut self) -> Result<Vec<SocketAddr>, DiscoveryError> {
        let (interval, limit) = self.times;
        if std::mem::take(&mut self.is_answered) {
            sleep(interval).await;
        }
        let asking = self.asking.get_or_insert_with(|| (self.lookup)(&self.host, self.port));
        let late = DiscoveryError::Late { what: "no answer of a name server", limit };
        let answer = timeout(limit, asking).await.map_err(|_| late)?;
        self.asking = None;
        answer.map_err(|source| DiscoveryError::Lookup { host: self.host.clone(), source })
    }

    /// Takes an answer in.
    fn learn(&mut self, answer: &[SocketAddr]) -> Result<(), DiscoveryError> {
        // Where a host has addresses of both families it would be two workers. What it was first it stays, so that half an answer, which
        // resolvers give when a server fails, does not change every worker.
        let is_first = |ip: IpAddr| match self.known.keys().next() {
            Some(known) => ip.is_ipv4() == known.is_ipv4(),
            None => ip.is_ipv4() || !answer.iter().any(SocketAddr::is_ipv4),
        };
        let found: Vec<_> = answer.iter().copied().filter(|address| is_first(address.ip())).collect();
        if found.is_empty() {
            let source =
                io::Error::new(io::ErrorKind::NotFound, "the name has no address of the family it had");
            return Err(DiscoveryError::Lookup { host: self.host.clone(), source });
        }
        self.known.values_mut().for_each(|missed| *missed += 1);
        self.known.extend(found.into_iter().map(|address| (address, 0)));
        self.known.retain(|_, missed| *missed < ANSWERS_TO_LEAVE);
        Ok(())
    }
}

impl Discovery for Dns {
    async fn next(&mut self) -> Result<Vec<Found>, DiscoveryError> {
        let answer = self.ask().await?;
        self.learn(&answer)?;
        self.is_answered = true;
        let workers = |address: &SocketAddr| self.workers.workers(None, *address, NewRequests::Taken);
        Ok(self.known.keys().flat_map(workers).collect())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, Mutex};

    use router_core::Role;
    use tokio::sync::Notify;

    use super::*;

    /// A name that is looked up to these, one after the other, without a pause. What cannot be read as an address is a failure.
    fn dns(answers: &[&[&'static str]]) -> Dns {
        let answers: Mutex<Vec<Vec<&str>>> =
            Mutex::new(answers.iter().rev().map(|list| list.to_vec()).collect());
        let workers =
            Kind { scheme: "http", prefix: None, role: Role::Generate, bootstrap_port: None, dp_ranks: None };
        let lookup: Lookup = Box::new(move |host, port| {
            assert_eq!(host, "workers");
            let answer = answers.lock().unwrap().pop().expect("no more is asked than was answered");
            let parsed: Result<_, _> =
                answer.iter().map(|ip| ip.parse().map(|ip| SocketAddr::new(ip, port))).collect();
            Box::pin(async { parsed.map_err(io::Error::other) })
        });
        let times = (Duration::ZERO, LIMIT);
        Dns { lookup, times, ..Dns::new("workers".to_owned(), 8_000, workers) }
    }

    /// The ids that come of each answer; `None` where it is a failure.
    async fn told(answers: &[&[&'static str]]) -> Vec<Option<Vec<String>>> {
        let mut dns = dns(answers);
        let mut told = Vec::new();
        for _ in answers {
            let ids = |found: Vec<Found>| found.into_iter().map(|found| found.spec.id.to_string()).collect();
            told.push(dns.next().await.ok().map(ids));
        }
        told
    }

    fn ids(list: &[&str]) -> Option<Vec<String>> {
        Some(list.iter().map(|id| (*id).to_owned()).collect())
    }

    #[tokio::test]
    async fn every_address_is_a_worker() {
        let told = told(&[&["10.0.0.2", "10.0.0.1", "10.0.0.2"]]).await;
        assert_eq!(told, [ids(&["10.0.0.1-8000", "10.0.0.2-8000"])]);
    }

    #[tokio::test]
    async fn an_address_leaves_when_three_answers_are_without_it() {
        let (both, one) = (&["10.0.0.1", "10.0.0.2"][..], &["10.0.0.1"][..]);
        let told = told(&[both, one, one, both, one, one, one]).await;
        let (both, one) = (ids(&["10.0.0.1-8000", "10.0.0.2-8000"]), ids(&["10.0.0.1-8000"]));
        assert_eq!(told, [&both, &both, &both, &both, &both, &both, &one].map(Clone::clone));
    }

    #[tokio::test]
    async fn failures_and_empty_answers_say_nothing_of_the_workers() {
        let told = told(&[&["10.0.0.1"], &["servfail"], &[], &["servfail"], &[], &["10.0.0.1"]]).await;
        let known = ids(&["10.0.0.1-8000"]);
        assert_eq!(told, [known.clone(), None, None, None, None, known]);
    }

    #[tokio::test]
    async fn a_host_with_both_families_is_one_worker_and_stays_the_same() {
        let told = told(&[&["fd00::1", "10.0.0.1"], &["fd00::1"], &["10.0.0.1"]]).await;
        assert_eq!(told, [ids(&["10.0.0.1-8000"]), None, ids(&["10.0.0.1-8000"])]);
        let told = self::told(&[&["fd00::1"], &["fd00::1", "10.0.0.1"]]).await;
        assert_eq!(told, [ids(&["fd00--1-8000"]), ids(&["fd00--1-8000"])]);
    }

    #[tokio::test]
    async fn a_late_answer_is_waited_for_and_nothing_else_is_asked() {
        let (answers, begun) = (Arc::new(Notify::new()), Arc::new(AtomicUsize::new(0)));
        let (waits, counted) = (Arc::clone(&answers), Arc::clone(&begun));
        let lookup: Lookup = Box::new(move |_, port| {
            counted.fetch_add(1, Ordering::SeqCst);
            let waits = Arc::clone(&waits);
            Box::pin(async move {
                waits.notified().await;
                Ok(vec![SocketAddr::from(([10, 0, 0, 1], port))])
            })
        });
        let mut dns = Dns { lookup, times: (Duration::ZERO, Duration::ZERO), ..dns(&[]) };
        for _ in 0..3 {
            assert!(matches!(dns.next().await, Err(DiscoveryError::Late { .. })));
        }
        answers.notify_one();
        assert_eq!((dns.next().await.unwrap().len(), begun.load(Ordering::SeqCst)), (1, 1));
    }

    #[tokio::test]
    async fn the_systems_resolver_knows_localhost() {
        let workers =
            Kind { scheme: "http", prefix: None, role: Role::Generate, bootstrap_port: None, dp_ranks: None };
        let found = Dns::new("localhost".to_owned(), 8_000, workers).next().await.unwrap();
        assert_eq!(found.len(), 1, "{found:?}");
    }
}
