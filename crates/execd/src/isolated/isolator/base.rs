//! The namespaces that all sessions of a sandbox begin in: users of their own, in which the isolator has every
//! capability and nobody else is, and a copy of the sandbox's mounts.

use std::ffi::{CStr, CString};
use std::io::{self, Write as _};
use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::Path;

use osb_confine::mount::{Change, set_attributes};
use rustix::fs::{CWD, Mode, OFlags};
use rustix::mount::{
    MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, mount, mount_change, move_mount,
    open_tree,
};
use rustix::thread::UnshareFlags;

use super::wire::Fault;

/// Where upper layers are, until a session covers it with shared memory of its own.
pub(super) const HIDDEN: &str = "/dev/shm";
/// Those on disk.
pub(super) const ON_DISK: &str = "/dev/shm/disk";
/// Those in memory.
pub(super) const IN_MEMORY: &str = "/dev/shm/memory";

const DEVICES: [&str; 6] = ["null", "zero", "full", "random", "urandom", "tty"];
const LINKS: [(&str, &str); 5] = [
    ("/proc/self/fd", "fd"),
    ("/proc/self/fd/0", "stdin"),
    ("/proc/self/fd/1", "stdout"),
    ("/proc/self/fd/2", "stderr"),
    ("pts/ptmx", "ptmx"),
];

pub(super) const CLONE: OpenTreeFlags =
    OpenTreeFlags::OPEN_TREE_CLONE.union(OpenTreeFlags::OPEN_TREE_CLOEXEC);

/// What is known of the namespaces once they are made.
#[derive(Debug)]
pub(super) struct Base {
    /// Capabilities that the sandbox has, as a bit mask: no session gets others.
    pub(super) capabilities: u64,
    /// Whether there are more users than the daemon's.
    pub(super) other_users: bool,
    /// The directory of upper layers on disk.
    pub(super) disk: Option<OwnedFd>,
    /// What covers parts of `/proc`.
    pub(super) masks: Vec<Mask>,
}

/// A cover of something below `/proc`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Mask {
    /// Nothing can be read from it.
    File(CString),
    /// It is empty.
    Directory(CString),
    /// It cannot be written.
    ReadOnly(CString),
}

/// Enters the namespaces, for good. Call it while the process has one thread.
pub(super) fn enter(uppers: Option<BorrowedFd<'_>>) -> Result<Base, Fault> {
    let capabilities = permitted().map_err(Fault::doing("read the capabilities"))?;
    let masks = masks().map_err(Fault::doing("read the mounts of /proc"))?;
    // What is mounted where no path leads can be reached from the namespace's copy of it, if that is where one stands
    // when it is made.
    let disk = match uppers {
        Some(uppers) => rustix::process::fchdir(uppers).is_ok(),
        None => false,
    };
    let other_users = own_users()?;
    let doing = |action: &'static str| {
        move |error: rustix::io::Errno| Fault::doing::<rustix::io::Errno>(action)(error)
    };
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
        .map_err(doing("part the mounts from the sandbox's"))?;
    let disk = if disk { open_tree(CWD, ".", CLONE).ok() } else { None };
    rustix::process::chdir("/").map_err(doing("go to /"))?;
    devices().map_err(Fault::doing("make /dev"))?;
    let disk = match disk {
        Some(tree) => {
            std::fs::create_dir(ON_DISK).map_err(Fault::doing("make a place for upper layers"))?;
            move_mount(&tree, "", CWD, ON_DISK, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
                .map_err(doing("attach the place of upper layers"))?;
            let dir = rustix::fs::open(
                ON_DISK,
                OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
                Mode::empty(),
            );
            Some(dir.map_err(doing("open the place of upper layers"))?)
        }
        None => None,
    };
    std::fs::create_dir(IN_MEMORY).map_err(Fault::doing("make a place for upper layers"))?;
    Ok(Base { capabilities, other_users, disk, masks })
}

/// New user and mount namespaces. Tells whether more than one user is in it.
fn own_users() -> Result<bool, Fault> {
    let all = |map: &str| -> io::Result<String> {
        let text = std::fs::read_to_string(map)?;
        let lines = text.lines().filter_map(|line| {
            let mut numbers = line.split_ascii_whitespace();
            let (first, _, count) = (numbers.next()?, numbers.next()?, numbers.next()?);
            Some(format!("{first} {first} {count}\n"))
        });
        Ok(lines.collect())
    };
    let maps = all("/proc/self/uid_map").and_then(|uids| Ok((uids, all("/proc/self/gid_map")?)));
    let (uids, gids) = maps.map_err(Fault::doing("read the ids of the sandbox"))?;
    let own = |id: u32| format!("{id} {id} 1\n");
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    // Only a process of the sandbox's namespace can say which of its ids are in the new one.
    let (ready, wait) = rustix::pipe::pipe().map_err(Fault::doing("make a pipe"))?;
    let pid = rustix::process::getpid().as_raw_nonzero();
    // SAFETY: this process has one thread, so the child finds every lock free and every structure whole.
    let child = unsafe { libc::fork() };
    if child < 0 {
        return Err(Fault::doing("start a helper")(io::Error::last_os_error()));
    }
    if child == 0 {
        drop(wait);
        let mut byte = [0];
        let asked = matches!(rustix::io::read(&ready, &mut byte), Ok(1));
        let file = |name: &str| format!("/proc/{pid}/{name}");
        let code = if !asked {
            2
        } else if std::fs::write(file("uid_map"), &uids)
            .and_then(|()| std::fs::write(file("gid_map"), &gids))
            .is_ok()
        {
            0
        } else {
            // Without the capabilities for it, a user may still give himself.
            let _ = std::fs::write(file("setgroups"), "deny");
            let single = std::fs::write(file("uid_map"), own(uid))
                .and_then(|()| std::fs::write(file("gid_map"), own(gid)));
            if single.is_ok() { 1 } else { 2 }
        };
        // SAFETY: leaves without running anything of the parent's.
        unsafe { libc::_exit(code) }
    }
    drop(ready);
    // SAFETY: this process has one thread, and nothing in it relies on the old namespaces.
    let unshared = unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWUSER | UnshareFlags::NEWNS) };
    if unshared.is_ok() {
        let _ = rustix::io::write(&wait, &[0]);
    }
    drop(wait);
    let mut status = 0;
    // SAFETY: waits for our own child and writes to a local.
    while unsafe { libc::waitpid(child, &raw mut status, 0) } < 0
        && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted
    {}
    unshared.map_err(Fault::doing(
        "make a user namespace (the container needs CAP_SYS_ADMIN, or a kernel and a seccomp profile that let users make them)",
    ))?;
    match libc::WEXITSTATUS(status) {
        0 if libc::WIFEXITED(status) => Ok(uids.lines().count() > 1 || !uids.trim_end().ends_with(" 1")),
        1 if libc::WIFEXITED(status) => Ok(false),
        _ => Err(Fault {
            kind: super::wire::FaultKind::Machine,
            message: "the ids of the sandbox cannot be given to a user namespace".to_owned(),
        }),
    }
}

/// A `/dev` with devices that the sandbox has, for all sessions, and the hidden place in it.
fn devices() -> io::Result<()> {
    let mut found = Vec::new();
    for name in DEVICES {
        if let Ok(tree) = open_tree(CWD, format!("/dev/{name}"), CLONE) {
            found.push((name, tree));
        }
    }
    let quiet = MountFlags::NOSUID | MountFlags::NOEXEC;
    mount("tmpfs", "/dev", "tmpfs", quiet, Some(c"size=64k,mode=755"))?;
    for (name, tree) in &found {
        let path = Path::new("/dev").join(name);
        std::fs::File::create(&path)?.flush()?;
        move_mount(tree, "", CWD, &path, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?;
    }
    for (target, name) in LINKS {
        std::os::unix::fs::symlink(target, Path::new("/dev").join(name))?;
    }
    for name in ["pts", "shm"] {
        std::fs::create_dir(Path::new("/dev").join(name))?;
    }
    set_attributes(CWD, c"/dev", Change { set: libc::MOUNT_ATTR_RDONLY, ..Change::default() })?;
    mount("tmpfs", HIDDEN, "tmpfs", quiet | MountFlags::NODEV, Some(c"size=64k,mode=700"))?;
    Ok(())
}

/// Capabilities of this process.
fn permitted() -> io::Result<u64> {
    let sets = rustix::thread::capabilities(None)?;
    Ok(sets.permitted.bits())
}

/// Of these the files belong to root of the host, who is root here where users have no namespace of their own. He may
/// write them without any capability.
const HOSTS: [&CStr; 5] = [c"/proc/bus", c"/proc/fs", c"/proc/irq", c"/proc/sys", c"/proc/sysrq-trigger"];

/// What covers parts of the sandbox's `/proc`: a session's own shall not show more.
fn masks() -> io::Result<Vec<Mask>> {
    let text = std::fs::read("/proc/self/mountinfo")?;
    let mut masks =
        parse_masks(&text, |path| std::fs::symlink_metadata(path).is_ok_and(|meta| meta.is_dir()));
    let map = std::fs::read_to_string("/proc/self/uid_map")?;
    if map.split_ascii_whitespace().eq(["0", "0", "4294967295"]) {
        masks.extend(HOSTS.map(|path| Mask::ReadOnly(path.to_owned())));
    }
    Ok(masks)
}

fn parse_masks(mountinfo: &[u8], is_dir: impl Fn(&Path) -> bool) -> Vec<Mask> {
    use std::os::unix::ffi::OsStrExt as _;
    let mut masks = Vec::new();
    for line in mountinfo.split(|&byte| byte == b'\n') {
        let fields: Vec<&[u8]> = line.split(|&byte| byte == b' ').collect();
        let (Some(point), Some(options)) = (fields.get(4), fields.get(5)) else { continue };
        if !point.starts_with(b"/proc/") || point.contains(&b'\\') {
            continue;
        }
        let kind = fields.iter().position(|field| *field == b"-").and_then(|at| fields.get(at + 1));
        let Ok(path) = CString::new(*point) else { continue };
        let read_only = options.split(|&byte| byte == b',').any(|option| option == b"ro");
        masks.push(match kind {
            Some(&b"proc") if read_only => Mask::ReadOnly(path),
            Some(&b"proc") => continue,
            _ if is_dir(Path::new(std::ffi::OsStr::from_bytes(point))) => Mask::Directory(path),
            _ => Mask::File(path),
        });
    }
    masks
}

/// The descriptor's number as a path that leads to what it refers to.
pub(super) fn by_number(fd: impl std::os::fd::AsFd) -> String {
    format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn covers_of_proc_are_found() {
        let text = b"22 1 0:1 / / rw - overlay overlay rw\n\
            30 22 0:2 / /proc rw,nosuid - proc proc rw\n\
            31 30 0:3 /null /proc/keys rw - tmpfs tmpfs rw\n\
            32 30 0:4 / /proc/acpi ro shared:3 - tmpfs tmpfs ro\n\
            33 30 0:2 /sys /proc/sys ro,nosuid - proc proc rw\n\
            34 22 0:5 / /procs rw - tmpfs tmpfs rw\n";
        let masks = parse_masks(text, |path| path.ends_with("acpi"));
        assert_eq!(
            masks,
            [
                Mask::File(c"/proc/keys".to_owned()),
                Mask::Directory(c"/proc/acpi".to_owned()),
                Mask::ReadOnly(c"/proc/sys".to_owned())
            ]
        );
    }
}
