//! Which mounts a sandbox has beside its root.

use std::ffi::{CStr, CString};
use std::io;

use super::child::Mount;

/// Where the spawner has its own `null`.
pub(crate) const SPAWNER_DEV: &str = "/dev";
/// Where a sandbox's root is assembled.
pub(crate) const STAGE: &str = "/root";
/// Where the spawner's root is seen, relative to the sandbox's, until `/sys` covers it.
pub(crate) const OLD_ROOT: &str = "sys";
/// In the spawner's root, and so out of everybody's sight: a `/proc` without masks, without which the kernel lets
/// nobody inside have a new one, and the place for the changes of isolated sessions, which has to be somewhere.
pub(crate) const HIDDEN_PROC: &str = "/proc";
pub(crate) const HIDDEN_UPPERS: &str = "/uppers";

const QUIET: libc::c_ulong = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;

/// Readable by everybody, and telling about the host or other sandboxes. With a user namespace the rest of
/// `/proc` and `/sys` belongs to the host's root, whom nobody inside is.
const MASKED: [&CStr; 6] =
    [c"proc/interrupts", c"proc/kallsyms", c"proc/iomem", c"proc/keys", c"proc/config.gz", c"proc/cmdline"];

/// What must be masked in addition when root inside is root outside.
const MASKED_FROM_ROOT: [&CStr; 9] = [
    c"proc/kcore",
    c"proc/kmsg",
    c"proc/timer_list",
    c"proc/sched_debug",
    c"proc/latency_stats",
    c"proc/timer_stats",
    c"proc/slabinfo",
    c"proc/vmallocinfo",
    c"proc/kpagecount",
];

/// Directories that root outside must find empty.
const EMPTIED_FROM_ROOT: [(&CStr, Group); 4] = [
    (c"proc/acpi", Group::Proc),
    (c"proc/scsi", Group::Proc),
    (c"sys/firmware", Group::Sys),
    (c"sys/devices/virtual/powercap", Group::Sys),
];

/// What root outside must not write.
const READ_ONLY_FOR_ROOT: [&CStr; 5] =
    [c"proc/bus", c"proc/fs", c"proc/irq", c"proc/sys", c"proc/sysrq-trigger"];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Group {
    Proc,
    Sys,
}

/// Character devices by name, major and minor number.
const DEVICES: [(&CStr, u32, u32); 6] = [
    (c"dev/null", 1, 3),
    (c"dev/zero", 1, 5),
    (c"dev/full", 1, 7),
    (c"dev/random", 1, 8),
    (c"dev/urandom", 1, 9),
    (c"dev/tty", 5, 0),
];

const DEV_LINKS: [(&CStr, &CStr); 5] = [
    (c"/proc/self/fd", c"dev/fd"),
    (c"/proc/self/fd/0", c"dev/stdin"),
    (c"/proc/self/fd/1", c"dev/stdout"),
    (c"/proc/self/fd/2", c"dev/stderr"),
    (c"pts/ptmx", c"dev/ptmx"),
];

const DEV_DIRECTORIES: [&CStr; 3] = [c"dev/pts", c"dev/shm", c"dev/mqueue"];

/// `/dev` of one sandbox. No two have it in common: whoever can open a node can lock it for all others and be told
/// (inotify) when somebody uses it.
#[derive(Debug)]
pub(crate) struct Dev {
    pub(crate) mount: Mount,
    pub(crate) devices: [(&'static CStr, libc::dev_t); 6],
    /// Target and name.
    pub(crate) links: [(&'static CStr, &'static CStr); 5],
    pub(crate) directories: [&'static CStr; 3],
    /// Makes it read-only.
    pub(crate) close: Mount,
}

impl Dev {
    pub(crate) fn new() -> io::Result<Self> {
        let flags = libc::MS_NOSUID | libc::MS_NOEXEC | libc::MS_NOATIME;
        let again = libc::MS_BIND | libc::MS_REMOUNT | libc::MS_RDONLY | flags;
        Ok(Self {
            mount: Mount::new(c"tmpfs", c"dev", flags, "size=64k,mode=755")?,
            devices: DEVICES.map(|(name, major, minor)| (name, libc::makedev(major, minor))),
            links: DEV_LINKS,
            directories: DEV_DIRECTORIES,
            close: Mount { flags: again, ..bind(c"dev", c"dev") },
        })
    }
}

/// The `/proc` that nobody sees.
pub(crate) fn hidden_proc() -> io::Result<Mount> {
    Mount::new(c"proc", &CString::new(HIDDEN_PROC)?, QUIET, "")
}

/// `/proc` and what covers parts of it. `/dev` is there already.
pub(crate) fn proc(user_namespace: bool) -> io::Result<Vec<Mount>> {
    let mut mounts = vec![Mount::new(c"proc", c"proc", QUIET, "")?];
    let masked = MASKED.iter().chain(if user_namespace { &[][..] } else { &MASKED_FROM_ROOT[..] });
    mounts.extend(masked.map(|target| bind(c"dev/null", target)));
    if !user_namespace {
        emptied(&mut mounts, Group::Proc)?;
        for target in READ_ONLY_FOR_ROOT {
            mounts.push(bind(target, target));
            let flags = libc::MS_BIND | libc::MS_REMOUNT | libc::MS_RDONLY | QUIET;
            mounts.push(Mount { flags, ..bind(target, target) });
        }
    }
    Ok(mounts)
}

/// `/sys`, read-only.
pub(crate) fn sys(user_namespace: bool) -> io::Result<Vec<Mount>> {
    let mut mounts = vec![Mount::new(c"sysfs", c"sys", QUIET | libc::MS_RDONLY, "")?];
    if !user_namespace {
        emptied(&mut mounts, Group::Sys)?;
    }
    Ok(mounts)
}

/// What is mounted in `/dev`. `root_id` is the host id of root inside.
pub(crate) fn dev(root_id: u32, shm_bytes: u64) -> io::Result<[Mount; 3]> {
    // The group of terminals is 5 everywhere. The kernel's pool of terminals is shared by all sandboxes and the
    // host, so each gets a bounded part.
    let pts = format!("newinstance,ptmxmode=0666,mode=0620,gid={},max=256", root_id.saturating_add(5));
    let shm = format!("mode=1777,size={shm_bytes},uid={root_id},gid={root_id}");
    Ok([
        Mount::new(c"devpts", c"dev/pts", libc::MS_NOSUID | libc::MS_NOEXEC, pts)?,
        Mount::new(c"tmpfs", c"dev/shm", QUIET, shm)?,
        Mount::new(c"mqueue", c"dev/mqueue", QUIET, "")?,
    ])
}

fn bind(source: &CStr, target: &CStr) -> Mount {
    Mount {
        source: source.to_owned(),
        target: target.to_owned(),
        fstype: CString::default(),
        flags: libc::MS_BIND,
        data: CString::default(),
        optional: true,
    }
}

fn emptied(mounts: &mut Vec<Mount>, group: Group) -> io::Result<()> {
    for (target, of) in EMPTIED_FROM_ROOT {
        if of == group {
            let empty = Mount::new(c"tmpfs", target, QUIET | libc::MS_RDONLY, "size=4k")?;
            mounts.push(Mount { optional: true, ..empty });
        }
    }
    Ok(())
}
