//! Who else wants a core: how long this thread was kept waiting for its own, and whether somebody waits for any.
//!
//! The second is needed since the system spreads its threads by their number: two that compute may be left on one core while
//! the thread that keeps another awake has that one to itself. It counts the whole machine, so it says nothing of a few cores
//! that others are confined to as well. Knows no engine. Reading allocates nothing and takes some microseconds.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::time::Duration;

/// What the system counts, of a thread and of the machine.
#[derive(Debug)]
pub(super) struct Demand {
    schedstat: File,
    loadavg: File,
    cores: usize,
}

impl Demand {
    /// As seen by the calling thread.
    ///
    /// # Errors
    /// When the system does not count it.
    pub(super) fn of_this_thread() -> io::Result<Self> {
        let uncounted = || io::Error::other("the system does not count who waits for a core");
        let cores = cores(&fs::read_to_string("/sys/devices/system/cpu/online")?).ok_or_else(uncounted)?;
        let (schedstat, loadavg) = (File::open("/proc/thread-self/schedstat")?, File::open("/proc/loadavg")?);
        read(&schedstat, waited).and(read(&loadavg, runnable)).ok_or_else(uncounted)?;
        Ok(Self { schedstat, loadavg, cores })
    }

    /// For how long the thread was ready to run while others did, in all.
    pub(super) fn waited(&self) -> Duration {
        read(&self.schedstat, waited).expect("what was counted is counted")
    }

    /// Whether more threads are ready to run than there are cores, this one included.
    pub(super) fn is_beyond_cores(&self) -> bool {
        read(&self.loadavg, runnable).expect("what was counted is counted") > self.cores
    }
}

fn read<T>(file: &File, parse: fn(&str) -> Option<T>) -> Option<T> {
    let mut text = [0; 64];
    let bytes = file.read_at(&mut text, 0).ok()?;
    parse(std::str::from_utf8(&text[..bytes]).ok()?)
}

/// Of the three numbers of a `schedstat` (nanoseconds run, nanoseconds waited, turns) the second; `None` where nothing is
/// counted, not even the turn that the thread has.
fn waited(schedstat: &str) -> Option<Duration> {
    let mut numbers = schedstat.split_whitespace().map(str::parse::<u64>);
    let (_ran, waited, turns) = (numbers.next()?.ok()?, numbers.next()?.ok()?, numbers.next()?.ok()?);
    (turns > 0).then(|| Duration::from_nanos(waited))
}

/// How many threads are ready to run: `1/80` of `0.20 0.18 0.12 1/80 11206` is one of 80.
fn runnable(loadavg: &str) -> Option<usize> {
    loadavg.split_whitespace().nth(3)?.split_once('/')?.0.parse().ok()
}

/// How many there are in a list such as `0-3,8`.
fn cores(list: &str) -> Option<usize> {
    let of_range = |range: &str| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last) = (first.parse::<usize>().ok()?, last.parse::<usize>().ok()?);
        last.checked_sub(first).map(|more| more + 1)
    };
    list.trim().split(',').map(of_range).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_system_counts_is_read() {
        assert_eq!(waited("176800 65834 1\n"), Some(Duration::from_nanos(65_834)));
        for text in ["0 0 0\n", "", "1 2", "1 x 3"] {
            assert_eq!(waited(text), None, "{text:?}");
        }
        assert_eq!(runnable("0.20 0.18 0.12 3/80 11206\n"), Some(3));
        for text in ["", "0.20 0.18 0.12", "0.20 0.18 0.12 x/80 1"] {
            assert_eq!(runnable(text), None, "{text:?}");
        }
        for (list, count) in [("0\n", Some(1)), ("0-1\n", Some(2)), ("0-3,8,10-11", Some(7))] {
            assert_eq!(cores(list), count, "{list:?}");
        }
        for list in ["", "3-1", "x", "0,"] {
            assert_eq!(cores(list), None, "{list:?}");
        }
    }

    #[test]
    fn this_machine_counts_it() {
        let demand = Demand::of_this_thread().unwrap();
        let before = demand.waited();
        assert!(demand.waited() >= before);
        let everyone = Demand { cores: 0, ..Demand::of_this_thread().unwrap() };
        assert!(everyone.is_beyond_cores(), "this thread is ready to run");
        let many = Demand { cores: usize::MAX, ..demand };
        assert!(!many.is_beyond_cores());
    }
}
