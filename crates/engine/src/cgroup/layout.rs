//! Which cgroup hierarchies the host has, and where.

use std::io;
use std::path::{Path, PathBuf};

/// Mount points of what we use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Layout {
    /// A hierarchy per controller (some may be one and the same), perhaps with the unified one beside, which
    /// then has no controllers but can freeze and kill.
    V1 { memory: PathBuf, cpu: PathBuf, cpuacct: PathBuf, pids: PathBuf, unified: Option<PathBuf> },
    /// One hierarchy with all controllers.
    V2 { root: PathBuf },
}

impl Layout {
    /// Every hierarchy once.
    pub(crate) fn roots(&self) -> Vec<&Path> {
        match self {
            Self::V1 { unified, .. } => self.v1_roots().into_iter().chain(unified.as_deref()).collect(),
            Self::V2 { root } => vec![root],
        }
    }

    /// The version 1 hierarchies, each once.
    pub(crate) fn v1_roots(&self) -> Vec<&Path> {
        let Self::V1 { memory, cpu, cpuacct, pids, .. } = self else { return Vec::new() };
        let mut roots: Vec<&Path> = Vec::new();
        for root in [memory, cpu, cpuacct, pids] {
            if !roots.contains(&root.as_path()) {
                roots.push(root);
            }
        }
        roots
    }

    /// For people.
    pub(crate) fn describe(&self) -> &'static str {
        match self {
            Self::V1 { unified: Some(_), .. } => "version 1 with the unified hierarchy beside (hybrid)",
            Self::V1 { unified: None, .. } => "version 1",
            Self::V2 { .. } => "version 2",
        }
    }
}

/// Finds the host's layout. The error names the controllers that are missing, and what to do.
pub(crate) fn discover() -> io::Result<Layout> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo")?;
    let controllers =
        |root: &Path| std::fs::read_to_string(root.join("cgroup.controllers")).unwrap_or_default();
    let table = std::fs::read_to_string("/proc/cgroups").unwrap_or_default();
    from_mounts(&mounts, controllers, &table).map_err(io::Error::other)
}

/// `table` is what `/proc/cgroups` says.
fn from_mounts(mounts: &str, controllers: impl Fn(&Path) -> String, table: &str) -> Result<Layout, String> {
    let mut unified = None;
    let mut v1: Vec<(Vec<&str>, PathBuf)> = Vec::new();
    for line in mounts.lines() {
        let Some((left, right)) = line.split_once(" - ") else { continue };
        let Some(place) = left.split(' ').nth(4) else { continue };
        let place = PathBuf::from(place);
        let mut right = right.split(' ');
        match right.next() {
            Some("cgroup2") => {
                unified.get_or_insert(place);
            }
            Some("cgroup") => v1.push((right.next_back().unwrap_or_default().split(',').collect(), place)),
            _ => {}
        }
    }
    let of =
        |name: &str| v1.iter().find(|(options, _)| options.contains(&name)).map(|(_, place)| place.clone());
    if let (Some(memory), Some(cpu), Some(cpuacct), Some(pids)) =
        (of("memory"), of("cpu"), of("cpuacct"), of("pids"))
    {
        return Ok(Layout::V1 { memory, cpu, cpuacct, pids, unified });
    }
    let Some(root) = unified else {
        return Err(
            "no cgroup hierarchy with memory, cpu and pids is mounted: mount the unified one with 'mount \
             -t cgroup2 cgroup2 /sys/fs/cgroup'"
                .to_owned(),
        );
    };
    let available = controllers(&root);
    let missing: Vec<&str> = ["memory", "cpu", "pids"]
        .into_iter()
        .filter(|name| !available.split_whitespace().any(|word| word == *name))
        .collect();
    if missing.is_empty() { Ok(Layout::V2 { root }) } else { Err(lacking(&missing, &root, table)) }
}

/// Why controllers are missing below `root`, and what to do. Each has a line in `table`: name, number of its version 1
/// hierarchy or 0, groups, whether it is on.
fn lacking(missing: &[&str], root: &Path, table: &str) -> String {
    let line = |name: &str| {
        let line = table.lines().find(|line| line.split_whitespace().next() == Some(name))?;
        let mut words = line.split_whitespace().skip(1);
        Some((words.next()? != "0", words.nth(1)? == "1"))
    };
    let reasons = missing.iter().map(|name| {
        let reason = match line(name) {
            Some((_, false)) => format!(
                "the kernel has it switched off; take 'cgroup_disable={name}' from its command line, or add \
                 'cgroup_enable={name}', and boot again"
            ),
            Some((true, true)) => {
                "it belongs to a hierarchy of version 1; boot with 'cgroup_no_v1=all' on the kernel's command line"
                    .to_owned()
            }
            Some((false, true)) => format!(
                "it is not passed on to '{}'; add it to 'cgroup.subtree_control' of the group above, or start the \
                 server outside of this container",
                root.display()
            ),
            // Kernels without version 1 have no such table.
            None => "the kernel was built without it, or does not pass it on to this container".to_owned(),
        };
        format!("{name} ({reason})")
    });
    format!("cgroup controllers are missing: {}", reasons.collect::<Vec<_>>().join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hybrid_co_mounted_and_unified_hosts_are_told_apart() {
        let hybrid = "\
31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory
39 31 0:36 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
";
        let layout = from_mounts(hybrid, |_| String::new(), "").unwrap();
        assert_eq!(
            layout.roots(),
            ["memory", "cpu,cpuacct", "pids", "unified"].map(|name| Path::new("/sys/fs/cgroup").join(name))
        );
        let unified = "29 23 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
        assert_eq!(
            from_mounts(unified, |_| "cpuset cpu io memory pids\n".into(), ""),
            Ok(Layout::V2 { root: "/sys/fs/cgroup".into() })
        );
        assert!(from_mounts("", |_| String::new(), "").is_err());
    }

    #[test]
    fn a_missing_controller_is_named_with_its_reason() {
        let unified = "29 23 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
        for (row, word) in [
            ("memory\t0\t1\t0", "cgroup_disable=memory"),
            ("memory\t7\t93\t1", "cgroup_no_v1=all"),
            ("memory\t0\t93\t1", "cgroup.subtree_control"),
            ("cpu\t0\t93\t1", "built without it"),
        ] {
            let table = format!("#subsys_name\thierarchy\tnum_cgroups\tenabled\n{row}\n");
            let error = from_mounts(unified, |_| "cpu pids".into(), &table).unwrap_err();
            assert!(error.starts_with("cgroup controllers are missing: memory ("), "{error}");
            assert!(error.contains(word), "{error}");
        }
    }
}
