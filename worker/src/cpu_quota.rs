//! Whether control groups bound the time that this process may compute, as they do in most containers.
//!
//! Whoever has a quota is stopped when it is used up, so that time spent on waiting is taken from the work. Next:
//! [`engine`](crate::engine) keeps a core awake only without one.

use std::fs;
use std::path::Path;

use crate::control_groups::{Version, groups};

/// The time that a process may compute.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum CpuQuota {
    /// As much as there is.
    Unlimited,
    /// So much in each period.
    Limited,
}

impl CpuQuota {
    /// This process's.
    pub(crate) fn of_this_process() -> Self {
        Self::under(Path::new("/"))
    }

    /// The same with the system's files below `root`.
    fn under(root: &Path) -> Self {
        let quotas = groups(root, "cpu").into_iter().filter_map(|(version, group)| {
            let file = match version {
                Version::One => "cpu.cfs_quota_us",
                Version::Two => "cpu.max",
            };
            fs::read_to_string(group.join(file)).ok()
        });
        if quotas.into_iter().any(|quota| is_bound(&quota)) { Self::Limited } else { Self::Unlimited }
    }
}

/// Whether a group's file names a time. Version 2 writes `max 100000` where there is no bound, version 1 `-1`.
fn is_bound(quota: &str) -> bool {
    let micros = quota.split_whitespace().next().and_then(|first| first.parse::<i64>().ok());
    micros.is_some_and(|micros| micros > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control_groups::tests::System;

    #[test]
    fn a_quota_is_a_time_above_0() {
        for (text, bound) in [
            ("max 100000\n", false),
            ("50000 100000\n", true),
            ("-1\n", false),
            ("200000\n", true),
            ("0\n", false),
            ("", false),
        ] {
            assert_eq!(is_bound(text), bound, "{text:?}");
        }
    }

    #[test]
    fn a_group_is_bound_by_those_around_it() {
        let files = |around: &'static str| {
            [
                ("proc/self/cgroup", "0::/pod/worker\n"),
                ("sys/fs/cgroup/pod/worker/cpu.max", "max 100000\n"),
                ("sys/fs/cgroup/pod/cpu.max", around),
            ]
        };
        let quota = |name, around| CpuQuota::under(&System::new(name, &files(around)).0);
        assert_eq!(quota("quota-v2", "150000 100000\n"), CpuQuota::Limited);
        assert_eq!(quota("quota-v2-none", "max 100000\n"), CpuQuota::Unlimited);
        assert_eq!(CpuQuota::under(Path::new("/nowhere")), CpuQuota::Unlimited);
    }

    #[test]
    fn version_1_says_it_in_a_file_of_its_own() {
        let files = |quota: &'static str| {
            [
                ("proc/self/cgroup", "3:cpuset:/\n2:cpu,cpuacct:/host/x\n"),
                ("sys/fs/cgroup/cpu/cpu.cfs_quota_us", quota),
            ]
        };
        let quota = |name, quota| CpuQuota::under(&System::new(name, &files(quota)).0);
        assert_eq!(quota("quota-v1", "200000\n"), CpuQuota::Limited);
        assert_eq!(quota("quota-v1-none", "-1\n"), CpuQuota::Unlimited);
    }
}
