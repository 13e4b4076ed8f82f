//! The number of files that the process may have open: a connection is one, and a router's thread has several.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the soft limit, which systems keep at 1024 for the sake of old programs, to the hard one. Returns the limit then;
/// `None` is none at all.
///
/// Says so in the log if it cannot.
pub fn raise() -> Option<u64> {
    let limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
        if let Err(error) = setrlimit(Resource::Nofile, raised) {
            tracing::warn!(%error, "cannot raise the limit of open files");
        }
    }
    getrlimit(Resource::Nofile).current
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_soft_limit_becomes_the_hard_one() {
        let limit = getrlimit(Resource::Nofile);
        let lowered = limit.maximum.map_or(1_024, |maximum| maximum.min(1_024));
        setrlimit(Resource::Nofile, Rlimit { current: Some(lowered), maximum: limit.maximum }).unwrap();
        assert_eq!(raise(), limit.maximum);
    }
}
