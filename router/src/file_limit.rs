//! The number of files that the process may have open: a connection of a client is one, and its worker's another.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Files that the process may have open once [`raise`] has been called; the most there are where there is no limit.
#[must_use]
pub fn most() -> usize {
    getrlimit(Resource::Nofile).maximum.map_or(usize::MAX, |files| files.try_into().unwrap_or(usize::MAX))
}

/// Raises the soft limit to the hard one, and says so if that is too low for `max_connections`.
pub fn raise(max_connections: usize) {
    let limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
        if let Err(error) = setrlimit(Resource::Nofile, raised) {
            tracing::warn!(%error, "cannot raise the limit of open files");
        }
    }
    let wanted = max_connections.saturating_mul(2) as u64;
    // None is no limit at all.
    if let Some(files) = getrlimit(Resource::Nofile).current.filter(|files| *files < wanted) {
        tracing::warn!(
            files,
            max_connections,
            "the limit of open files (ulimit -n) is below two for each of --max-connections"
        );
    }
}
