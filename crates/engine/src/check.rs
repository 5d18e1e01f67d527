//! Whether this machine can run sandboxes, in words that say what to do.

use std::path::Path;

use crate::cgroup::{self, Cgroups};
use crate::config::EngineConfig;
use osb_confine::seccomp::Filter;

/// How a check came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CheckResult {
    /// Good.
    Ok,
    /// It works, with a drawback.
    Warn,
    /// It does not work.
    Fail,
}

/// One check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckItem {
    /// What was looked at.
    pub name: &'static str,
    /// How it came out.
    pub result: CheckResult,
    /// What was found and, unless it is good, what to do.
    pub message: String,
}

fn item(name: &'static str, result: CheckResult, message: impl Into<String>) -> CheckItem {
    CheckItem { name, result, message: message.into() }
}

/// Looks at everything the engine needs. Changes nothing that lasts, but that the kernel may load modules and the topmost
/// control group pass its controllers on; blocks for some 100 milliseconds.
#[must_use]
pub fn check(config: &EngineConfig) -> Vec<CheckItem> {
    use CheckResult::{Fail, Ok, Warn};
    let root = rustix::process::geteuid().is_root();
    let mut items = vec![if root {
        item("root", Ok, "running as root")
    } else {
        item("root", Fail, "not root: run this with sudo; the other checks are then complete too")
    }];
    items.push(kernel());
    items.push(namespaces());
    // First, since the kernel loads what is needed for it.
    let user_namespace = root.then(|| user_namespace(config));
    items.push(overlay(root));
    items.push(filesystem("mqueue", "mqueue", "the kernel needs CONFIG_POSIX_MQUEUE"));
    items.push(cgroups(root));
    items.push(seccomp());
    items.push(out_of_memory());
    items.push(data_dir(config));
    items.extend(user_namespace);
    if root {
        for (name, result) in crate::net::check() {
            items.push(match result {
                Result::Ok(message) => item(name, Ok, message),
                Err(message) => item(name, Fail, message),
            });
        }
    }
    if rustix::fs::access("/dev/kvm", rustix::fs::Access::EXISTS).is_ok() {
        items.push(item("kvm", Ok, "/dev/kvm is there"));
    } else {
        items.push(item("kvm", Warn, "no /dev/kvm: only the tiers without virtual machines can be used"));
    }
    items
}

fn kernel() -> CheckItem {
    let (release, version) = release();
    if let Some(text) = too_old() {
        item("kernel", CheckResult::Fail, text)
    } else if version >= (6, 15) {
        item("kernel", CheckResult::Ok, format!("Linux {release}"))
    } else {
        let drawback = "sandboxes are prepared somewhat slower than with Linux 6.15";
        item("kernel", CheckResult::Warn, format!("Linux {release}: {drawback}"))
    }
}

/// What to say where the kernel cannot do what the engine needs.
pub(crate) fn too_old() -> Option<String> {
    let (release, version) = release();
    let text = format!("Linux {release} is too old: 5.19 is the least, 6.15 is best");
    (version < (5, 19)).then_some(text)
}

fn release() -> (String, (u32, u32)) {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned();
    let mut numbers =
        release.split(|c: char| !c.is_ascii_digit()).map(|part| part.parse::<u32>().unwrap_or(0));
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    (release, version)
}

fn namespaces() -> CheckItem {
    let missing: Vec<&str> = ["mnt", "pid", "net", "ipc", "uts", "user", "cgroup"]
        .into_iter()
        .filter(|name| !Path::new("/proc/self/ns").join(name).exists())
        .collect();
    if missing.is_empty() {
        item("namespaces", CheckResult::Ok, "all there")
    } else {
        let text = format!("the kernel lacks these namespaces: {}", missing.join(", "));
        item("namespaces", CheckResult::Fail, text)
    }
}

/// Root has tried one already, so that it is loaded if it is there.
fn overlay(root: bool) -> CheckItem {
    let mut item = filesystem(
        "overlay",
        "overlay",
        "'modprobe overlay' says why; it is part of the distribution's kernel or of a package with more modules for it",
    );
    if !root && item.result == CheckResult::Fail {
        item.result = CheckResult::Warn;
        item.message = "not loaded; run this as root to have it loaded".to_owned();
    }
    item
}

fn filesystem(name: &'static str, word: &str, remedy: &str) -> CheckItem {
    let known = std::fs::read_to_string("/proc/filesystems").unwrap_or_default();
    if known.split_whitespace().any(|known| known == word) {
        item(name, CheckResult::Ok, "known to the kernel")
    } else {
        item(name, CheckResult::Fail, format!("the kernel does not know the file system '{word}': {remedy}"))
    }
}

fn cgroups(root: bool) -> CheckItem {
    let name = "cgroups";
    let found = cgroup::discover().and_then(|layout| {
        let described = layout.describe();
        if root { Cgroups::try_out(layout).map(|()| described) } else { Ok(described) }
    });
    match found {
        Ok(layout) => item(name, CheckResult::Ok, format!("{layout} with memory, cpu and pids")),
        Err(error) => item(name, CheckResult::Fail, error.to_string()),
    }
}

fn seccomp() -> CheckItem {
    let actions = std::fs::read_to_string("/proc/sys/kernel/seccomp/actions_avail").unwrap_or_default();
    if actions.contains("errno") {
        item(
            "seccomp",
            CheckResult::Ok,
            format!("filter of {} instructions", Filter::builder().instructions()),
        )
    } else {
        item("seccomp", CheckResult::Fail, "the kernel needs CONFIG_SECCOMP_FILTER")
    }
}

/// With the usual setting the kernel lists every process of the group at each kill, under a lock of the whole machine:
/// a fork bomb that runs out of memory again and again holds up the kills in all other sandboxes.
fn out_of_memory() -> CheckItem {
    let name = "out of memory";
    match std::fs::read_to_string("/proc/sys/vm/oom_dump_tasks") {
        Ok(text) if text.trim() != "0" => item(
            name,
            CheckResult::Warn,
            "each out-of-memory kill lists all processes of its sandbox in the kernel's log: \
             'sysctl vm.oom_dump_tasks=0' keeps hostile sandboxes from slowing others",
        ),
        _ => item(name, CheckResult::Ok, "kills are logged in one line"),
    }
}

fn data_dir(config: &EngineConfig) -> CheckItem {
    let name = "data directory";
    let Some(existing) = config.data_dir.ancestors().find(|path| path.exists()) else {
        return item(name, CheckResult::Fail, "no part of its path exists");
    };
    let (Ok(disk), Ok(kind)) = (rustix::fs::statvfs(existing), rustix::fs::statfs(existing)) else {
        return item(name, CheckResult::Fail, format!("'{}' cannot be examined", existing.display()));
    };
    let free = disk.f_bavail.saturating_mul(disk.f_frsize);
    let path = config.data_dir.display();
    if free < config.disk_floor_bytes {
        let text = format!(
            "'{path}' has {} MiB free, below the floor of {} MiB: make room",
            free >> 20,
            config.disk_floor_bytes >> 20
        );
        return item(name, CheckResult::Fail, text);
    }
    let free = format!("{} GiB free", free >> 30);
    match u32::try_from(kind.f_type).unwrap_or(0) {
        0x9123_683e => item(name, CheckResult::Ok, format!("'{path}' is on btrfs, {free}")),
        0xef53 => {
            item(name, CheckResult::Ok, format!("'{path}' is on ext4, {free}; snapshots are faster on btrfs"))
        }
        0x5846_5342 => {
            item(name, CheckResult::Ok, format!("'{path}' is on xfs, {free}; snapshots are faster on btrfs"))
        }
        0x0102_1994 => item(
            name,
            CheckResult::Warn,
            format!("'{path}' is in memory, {free}: nothing in it survives a reboot"),
        ),
        0x794c_7630 => item(
            name,
            CheckResult::Fail,
            format!("'{path}' is on an overlay, on which no other overlay can write: choose another disk"),
        ),
        other => item(
            name,
            CheckResult::Warn,
            format!("'{path}' is on a file system not tried before ({other:#x}), {free}"),
        ),
    }
}

/// Does what the engine does at its start, in a directory of its own.
fn user_namespace(config: &EngineConfig) -> CheckItem {
    use crate::helper::handle::Recipe;
    use crate::helper::message::Hello;
    let name = "user namespaces";
    let Some(existing) = config.data_dir.ancestors().find(|path| path.is_dir()) else {
        return item(name, CheckResult::Fail, "there is no directory to try overlays in");
    };
    let dir = existing.join(format!(".osb-check-{}", std::process::id()));
    if let Err(error) = std::fs::create_dir(&dir) {
        return item(name, CheckResult::Fail, format!("'{}' cannot be made: {error}", dir.display()));
    }
    let hello = Hello {
        caps: 0,
        user_namespace: true,
        id_base: config.id_base,
        probe_dir: dir.to_string_lossy().into_owned(),
    };
    let recipe = Recipe::new(config.helper.as_deref(), crate::helper::PREPARER_ARG, "osb-preparer");
    let started = recipe.start(&hello, None);
    let _ = crate::tree::remove(&dir);
    match started {
        Ok((_, ready)) => match ready.no_user_namespace {
            None => {
                item(name, CheckResult::Ok, "a file written by root of a sandbox keeps its owner on the disk")
            }
            Some(reason) => item(
                name,
                CheckResult::Warn,
                format!("id-mapped overlays do not work ({reason}): root inside will be root outside"),
            ),
        },
        Err(error) => item(name, CheckResult::Fail, format!("overlays do not work: {error}")),
    }
}
