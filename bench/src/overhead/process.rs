//! What a process and all that it started have cost: CPU time and memory, from `/proc`.
//!
//! A router may be a launcher with the real one beneath it, so a tree of processes is read, never one. CPU time comes
//! from the scheduler's nanoseconds of each task; where those are missing, or a task has ended since and taken its share
//! along, from the ticks of `stat`, which remember ended threads, if they tell of more than the tasks that are left. Knows
//! nothing of routers. Next: [`super::rig`].

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::time::Duration;

/// A process and its descendants.
#[derive(Debug, Clone, Copy)]
pub struct ProcessTree {
    root: u32,
}

/// CPU time so far.
#[derive(Debug, Clone, Default)]
pub struct CpuReading {
    /// Nanoseconds on a CPU of each task, by process and task; none where the kernel does not tell.
    task_ns: BTreeMap<(u32, u32), u64>,
    /// User and system ticks of the processes.
    ticks: u64,
    /// Nanoseconds that the tasks were ready to run and did not, all together.
    waited_ns: u64,
}

/// Memory of the tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// Resident now.
    pub rss_kb: u64,
    /// The most that each process ever had resident, summed up.
    pub peak_kb: u64,
}

impl ProcessTree {
    /// The tree under a process.
    pub fn of(root: u32) -> Self {
        Self { root }
    }

    /// The tree under this process.
    pub fn of_this_process() -> Self {
        Self::of(std::process::id())
    }

    /// Its CPU time so far.
    ///
    /// # Errors
    /// The process is not there.
    pub fn cpu(&self) -> io::Result<CpuReading> {
        CpuReading::of(self.root, &self.descendants()?)
    }

    /// The CPU time of the root alone.
    ///
    /// # Errors
    /// The process is not there.
    pub fn cpu_of_root(&self) -> io::Result<CpuReading> {
        CpuReading::of(self.root, &[])
    }

    /// Its memory.
    ///
    /// # Errors
    /// The process is not there.
    pub fn memory(&self) -> io::Result<Memory> {
        let mut sum = memory_of(self.root)?;
        for pid in self.descendants()? {
            if let Ok(memory) = memory_of(pid) {
                sum.rss_kb += memory.rss_kb;
                sum.peak_kb += memory.peak_kb;
            }
        }
        Ok(sum)
    }

    /// Children and children's children.
    fn descendants(&self) -> io::Result<Vec<u32>> {
        let mut parents = Vec::new();
        for pid in numbers_in("/proc")? {
            // Processes end while we read; those are not ours to count.
            if let Some(parent) = stat_of(pid).ok().and_then(|stat| stat.parent) {
                parents.push((pid, parent));
            }
        }
        let mut found = vec![self.root];
        let mut at = 0;
        while at < found.len() {
            let of = found[at];
            found.extend(parents.iter().filter(|(_, parent)| *parent == of).map(|(pid, _)| *pid));
            at += 1;
        }
        found.remove(0);
        Ok(found)
    }
}

impl CpuReading {
    fn of(root: u32, descendants: &[u32]) -> io::Result<Self> {
        let mut reading = Self::default();
        reading.add(root)?;
        for pid in descendants {
            let _ = reading.add(*pid); // may have ended since it was listed
        }
        Ok(reading)
    }

    fn add(&mut self, pid: u32) -> io::Result<()> {
        self.ticks += stat_of(pid)?.ticks;
        for task in numbers_in(&format!("/proc/{pid}/task"))? {
            let schedstat =
                fs::read_to_string(format!("/proc/{pid}/task/{task}/schedstat")).unwrap_or_default();
            let mut numbers = schedstat.split_ascii_whitespace().map_while(|number| number.parse().ok());
            if let Some(ns) = numbers.next() {
                self.task_ns.insert((pid, task), ns);
                self.waited_ns += numbers.next().unwrap_or(0);
            }
        }
        Ok(())
    }

    /// Time between an earlier reading and this one in which tasks were ready to run and something else had their core.
    #[must_use]
    pub fn waited_since(&self, earlier: &Self) -> Duration {
        Duration::from_nanos(self.waited_ns.saturating_sub(earlier.waited_ns))
    }

    /// CPU time between an earlier reading and this one.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Duration {
        let of_tasks = Duration::from_nanos(
            self.task_ns
                .iter()
                .map(|(task, ns)| ns.saturating_sub(earlier.task_ns.get(task).copied().unwrap_or(0)))
                .sum(),
        );
        let is_whole =
            !earlier.task_ns.is_empty() && earlier.task_ns.keys().all(|task| self.task_ns.contains_key(task));
        if is_whole {
            return of_tasks;
        }
        let ticks = self.ticks.saturating_sub(earlier.ticks);
        of_tasks.max(Duration::from_secs_f64(ticks as f64 / rustix::param::clock_ticks_per_second() as f64))
    }
}

/// What is read of `/proc/PID/stat`.
#[derive(Debug, PartialEq, Eq)]
struct Stat {
    parent: Option<u32>,
    ticks: u64,
}

fn stat_of(pid: u32) -> io::Result<Stat> {
    parse_stat(&fs::read_to_string(format!("/proc/{pid}/stat"))?).ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidData, format!("/proc/{pid}/stat is not understood"))
    })
}

/// The name in parentheses may hold anything, parentheses and spaces too: fields are counted from its end.
fn parse_stat(text: &str) -> Option<Stat> {
    let (_, fields) = text.rsplit_once(") ")?;
    let fields: Vec<&str> = fields.split_ascii_whitespace().collect();
    let number = |field: usize| fields.get(field - 3)?.parse::<u64>().ok(); // numbered from 1; the third comes first
    Some(Stat { parent: u32::try_from(number(4)?).ok(), ticks: number(14)? + number(15)? })
}

fn memory_of(pid: u32) -> io::Result<Memory> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    // A process that has ended and waits for its parent has no such lines.
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|line| line.split_ascii_whitespace().next()?.parse().ok()).unwrap_or(0)
    };
    Ok(Memory { rss_kb: field("VmRSS:"), peak_kb: field("VmHWM:") })
}

fn numbers_in(directory: &str) -> io::Result<Vec<u32>> {
    let entries = fs::read_dir(directory)?;
    Ok(entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_stat_behind_any_name() {
        let text = "7 (a) b (c) S 3 7 7 0 -1 4194560 100 0 0 0 21 9 0 0 20 0 1 0 100 0 0";
        assert_eq!(parse_stat(text), Some(Stat { parent: Some(3), ticks: 30 }));
        assert_eq!(parse_stat("7 (a) S x"), None);
    }

    #[test]
    fn a_task_that_ended_is_counted_by_ticks() {
        let reading = |tasks: &[(u32, u64)], ticks| CpuReading {
            task_ns: tasks.iter().map(|(task, ns)| ((1, *task), *ns)).collect(),
            ticks,
            waited_ns: 0,
        };
        let before = reading(&[(1, 1_000), (2, 500)], 100);
        assert_eq!(reading(&[(1, 4_000), (2, 500), (3, 7)], 100).since(&before), Duration::from_nanos(3_007));
        let per_tick = 1.0 / rustix::param::clock_ticks_per_second() as f64;
        assert_eq!(reading(&[(1, 4_000)], 103).since(&before), Duration::from_secs_f64(3.0 * per_tick));
        // Ticks are coarse: less than one has passed, and yet it has worked.
        assert_eq!(reading(&[(1, 4_000), (3, 7)], 100).since(&before), Duration::from_nanos(3_007));
    }

    #[test]
    fn sees_this_process_and_its_children() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let tree = ProcessTree::of_this_process();
        assert!(tree.descendants().unwrap().contains(&child.id()));
        let memory = tree.memory().unwrap();
        assert!(memory.rss_kb > 0 && memory.peak_kb >= memory.rss_kb);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(ProcessTree::of(child.id()).cpu().is_err(), "a process that is gone is no zero");
    }
}
