//! How much memory this process can still take: what the machine has available, or what its control groups leave it where
//! that is less.
//!
//! Knows no models. Next: [`kv_size`](crate::kv_size) takes a share of it.

use std::fs;
use std::path::Path;

use crate::control_groups::{Version, groups};

/// Bytes that can be taken without swapping or being killed; `None` where the system does not say.
#[must_use]
pub(crate) fn available_bytes() -> Option<u64> {
    available_under(Path::new("/"))
}

/// The same with the system's files below `root`.
fn available_under(root: &Path) -> Option<u64> {
    let machine = meminfo_available(&fs::read_to_string(root.join("proc/meminfo")).ok()?)?;
    let groups = groups(root, "memory").into_iter();
    Some(groups.filter_map(|(version, group)| Files::of(version).available(&group)).fold(machine, u64::min))
}

/// `MemAvailable` in bytes: what is free, and what of the page cache can be dropped.
fn meminfo_available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// What the two versions of control groups call the same.
struct Files {
    limit: &'static str,
    usage: &'static str,
    /// In `memory.stat`: pages of files that can be dropped, which count as used.
    droppable: &'static str,
}

impl Files {
    fn of(version: Version) -> Self {
        let (limit, usage, droppable) = match version {
            Version::One => ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
            Version::Two => ("memory.max", "memory.current", "inactive_file"),
        };
        Self { limit, usage, droppable }
    }

    /// `None` for a group that is not there or has no limit, which version 2 writes as `max`.
    fn available(&self, group: &Path) -> Option<u64> {
        let number = |file: &str| fs::read_to_string(group.join(file)).ok()?.trim().parse::<u64>().ok();
        let (limit, usage) = (number(self.limit)?, number(self.usage)?);
        let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
        let droppable = stat.lines().find_map(|line| line.strip_prefix(self.droppable)?.trim().parse().ok());
        Some(limit.saturating_sub(usage.saturating_sub(droppable.unwrap_or(0))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control_groups::tests::System;

    const MIB: u64 = 1 << 20;

    const MEMINFO: (&str, &str) = ("proc/meminfo", "MemTotal: 2097152 kB\nMemAvailable:    1048576 kB\n");

    #[test]
    fn without_groups_it_is_what_the_machine_has() {
        let system = System::new("machine", &[MEMINFO]);
        assert_eq!(available_under(&system.0), Some(1024 * MIB));
        assert_eq!(available_under(Path::new("/nowhere")), None);
    }

    #[test]
    fn the_tightest_group_around_it_counts_less_what_is_used_and_cannot_be_dropped() {
        let (limit, usage) = ((512 * MIB).to_string(), (200 * MIB).to_string());
        let stat = format!("anon 5\ninactive_file {}\n", 50 * MIB);
        let files = [
            MEMINFO,
            ("proc/self/cgroup", "0::/pod/worker\n"),
            ("sys/fs/cgroup/pod/worker/memory.max", "max\n"),
            ("sys/fs/cgroup/pod/worker/memory.current", "1\n"),
            ("sys/fs/cgroup/pod/memory.max", &limit),
            ("sys/fs/cgroup/pod/memory.current", &usage),
            ("sys/fs/cgroup/pod/memory.stat", &stat),
        ];
        assert_eq!(available_under(&System::new("v2", &files).0), Some((512 - 200 + 50) * MIB));
    }

    #[test]
    fn version_1_and_a_path_that_is_the_hosts() {
        let files = [
            MEMINFO,
            ("proc/self/cgroup", "5:cpu:/host/x\n4:memory,hugetlb:/host/x\n0::/\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "1000\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "700\n"),
            ("sys/fs/cgroup/memory/memory.stat", "inactive_file 5\ntotal_inactive_file 100\n"),
        ];
        assert_eq!(available_under(&System::new("v1", &files).0), Some(400));
        // No limit is a very large one.
        let unlimited: Vec<_> = files
            .into_iter()
            .map(|(path, text)| (path, if text == "1000\n" { "9223372036854771712" } else { text }))
            .collect();
        assert_eq!(available_under(&System::new("v1-unlimited", &unlimited).0), Some(1024 * MIB));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn this_machine_says_how_much_it_has() {
        assert!(available_bytes().is_some_and(|bytes| bytes > MIB));
    }
}
