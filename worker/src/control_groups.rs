//! Which control groups this process is in, and where their files lie.
//!
//! Knows no controller's files. Next: [`memory`](crate::memory) and [`cpu_quota`](crate::cpu_quota) read them.

use std::fs;
use std::path::{Path, PathBuf};

/// Where control groups are mounted.
const CGROUPS: &str = "sys/fs/cgroup";

/// The two versions of control groups, which call their files differently.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Version {
    /// A hierarchy for each controller.
    One,
    /// One hierarchy for all.
    Two,
}

/// The directories of the groups that a controller has this process in, and of those around them, with the system's files
/// below `root`. Not all of them need to be there.
pub(crate) fn groups(root: &Path, controller: &str) -> Vec<(Version, PathBuf)> {
    let lines = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    lines.lines().filter_map(|line| groups_of(root, line, controller)).flatten().collect()
}

/// The groups of a line of `/proc/self/cgroup`; `None` for a hierarchy that is not about the controller.
fn groups_of(root: &Path, line: &str, controller: &str) -> Option<Vec<(Version, PathBuf)>> {
    let mut fields = line.splitn(3, ':');
    let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
    let (version, mount) = match controllers {
        "" => (Version::Two, ""),
        _ if controllers.split(',').any(|name| name == controller) => (Version::One, controller),
        _ => return None,
    };
    let mount = root.join(CGROUPS).join(mount);
    let path = Path::new(path.trim_start_matches('/'));
    // Within a container the path may be the host's, which is not there; its own group is then the mount itself.
    Some(path.ancestors().map(|group| (version, mount.join(group))).collect())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A system of files, removed with the value.
    pub(crate) struct System(pub(crate) PathBuf);

    impl System {
        pub(crate) fn new(name: &str, files: &[(&str, &str)]) -> Self {
            let root = std::env::temp_dir().join(format!("worker-system-{}-{name}", std::process::id()));
            for (path, content) in files {
                let path = root.join(path);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, content).unwrap();
            }
            Self(root)
        }
    }

    impl Drop for System {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_group_comes_with_those_around_it_of_both_versions() {
        let lines = "5:cpu,cpuacct:/pod/x\n4:cpuset:/pod/x\n0::/y\n";
        let system = System::new("groups", &[("proc/self/cgroup", lines)]);
        let expected = [
            (Version::One, "sys/fs/cgroup/cpu/pod/x"),
            (Version::One, "sys/fs/cgroup/cpu/pod"),
            (Version::One, "sys/fs/cgroup/cpu"),
            (Version::Two, "sys/fs/cgroup/y"),
            (Version::Two, "sys/fs/cgroup"),
        ];
        let expected = expected.map(|(version, path)| (version, system.0.join(path)));
        assert_eq!(groups(&system.0, "cpu"), expected);
        assert_eq!(groups(Path::new("/nowhere"), "cpu"), []);
    }
}
