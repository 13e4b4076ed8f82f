//! Which core: one of those that the thread may run on, and one that no other worker has taken, if there is one.
//!
//! Workers know nothing of each other. Who takes something holds a socket of its name (an abstract one, which has no
//! file): the system gives out one of a name, and takes it back with the process, however that ends. Workers of different
//! network namespaces do not see each other's names; they begin to look at a core drawn by chance. Knows no threads.

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use rustix::thread::{CpuSet, sched_getaffinity};

/// How many workers share a core and are still counted. The next one takes a core by chance.
const MOST_SHARERS: usize = 64;

/// What the name of a core with such a worker begins with.
const TAKEN: &str = "roundhouse-worker-core";

/// The name of a core while somebody keeps it awake: one is enough.
pub(super) fn awake(core: usize) -> String {
    format!("roundhouse-worker-awake-{core}")
}

/// A name that nobody else has.
#[derive(Debug)]
pub(super) struct Name {
    _socket: UnixDatagram,
}

impl Name {
    /// Takes it; `None` while somebody else has it.
    ///
    /// # Errors
    /// When the system gives out none.
    pub(super) fn take(name: &str) -> io::Result<Option<Self>> {
        let address = SocketAddr::from_abstract_name(name)?;
        match UnixDatagram::bind_addr(&address) {
            Ok(socket) => Ok(Some(Self { _socket: socket })),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// A core, and the place that its owner has among those who share it.
#[derive(Debug)]
pub(super) struct CoreClaim {
    number: usize,
    /// `None` where names are not to be had.
    _name: Option<Name>,
}

impl CoreClaim {
    /// The core with the fewest workers of those that the calling thread may run on.
    ///
    /// # Errors
    /// When the system does not say which these are.
    pub(super) fn take() -> io::Result<Self> {
        let cores = sched_getaffinity(None)?;
        let mut cores: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|core| cores.is_set(*core)).collect();
        if !cores.is_empty() {
            let first = rand::random_range(0..cores.len());
            cores.rotate_left(first);
        }
        Self::among(&cores, TAKEN).ok_or_else(|| io::Error::other("it may run on no core"))
    }

    /// The first of the cores with the fewest workers whose names begin like this; `None` of none.
    fn among(cores: &[usize], names: &str) -> Option<Self> {
        for place in 0..MOST_SHARERS {
            for number in cores.iter().copied() {
                match Name::take(&format!("{names}-{number}-{place}")) {
                    Ok(None) => {}
                    Ok(name) => return Some(Self { number, _name: name }),
                    Err(_) => return Some(Self { number, _name: None }),
                }
            }
        }
        cores.first().map(|number| Self { number: *number, _name: None })
    }

    pub(super) fn number(&self) -> usize {
        self.number
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names that no other process and no other test takes.
    fn names(test: &str) -> String {
        format!("roundhouse-test-{}-{test}", std::process::id())
    }

    #[test]
    fn a_name_has_one_owner_at_a_time() {
        let name = names("name");
        let owner = Name::take(&name).unwrap();
        assert!(owner.is_some());
        assert!(Name::take(&name).unwrap().is_none());
        drop(owner);
        assert!(Name::take(&name).unwrap().is_some());
    }

    #[test]
    fn workers_spread_over_the_cores_they_may_run_on() {
        let names = names("cores");
        let take = || CoreClaim::among(&[7, 3, 5], &names).unwrap();
        let mut claims: Vec<CoreClaim> = (0..6).map(|_| take()).collect();
        let numbers: Vec<usize> = claims.iter().map(CoreClaim::number).collect();
        assert_eq!(numbers, [7, 3, 5, 7, 3, 5]);
        drop(claims.remove(1));
        assert_eq!(take().number(), 3, "the one that has become free");
        assert!(CoreClaim::among(&[], &names).is_none());
    }

    #[test]
    fn a_core_may_have_more_workers_than_are_counted() {
        let names = names("crowd");
        let claims: Vec<_> = (0..MOST_SHARERS + 1).filter_map(|_| CoreClaim::among(&[4], &names)).collect();
        assert_eq!(claims.len(), MOST_SHARERS + 1);
        assert!(claims.iter().all(|claim| claim.number() == 4));
    }
}
