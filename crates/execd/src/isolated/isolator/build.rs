//! What the child of the isolator makes of its new namespaces.

use std::ffi::{CString, OsStr};
use std::fs;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use osb_confine::mount::{Change, set_attributes};
use osb_confine::seccomp::Filter;
use rustix::fs::{CWD, Mode as FileMode, OFlags};
use rustix::mount::{
    MountFlags, MoveMountFlags, OpenTreeFlags, mount, mount_bind, mount_remount, move_mount, open_tree,
};
use rustix::thread::{LinkNameSpaceType, UnshareFlags};

use super::base::{Base, CLONE, HIDDEN, IN_MEMORY, Mask, ON_DISK, by_number};
use super::inside::{self, Shell};
use super::session::{Source, open_here};
use super::wire::{Fault, Mode, Plan};

/// What `uname` says inside.
const HOSTNAME: &[u8] = b"sandbox";
/// Directory of the pipes by which shell and daemon talk.
pub(in crate::isolated) const PIPES: &str = "/dev/shm/.execd";

const QUIET: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV).union(MountFlags::NOEXEC);
const ATTACH: MoveMountFlags =
    MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH.union(MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH);

/// A session on its way.
#[derive(Debug)]
pub(super) struct Build<'a> {
    pub(super) plan: &'a Plan,
    pub(super) base: &'a Base,
    pub(super) work_cgroup: &'a [i32],
    /// What lies in another comes after it.
    pub(super) trees: Vec<(Source, Mode)>,
    pub(super) binds: Vec<(Source, PathBuf)>,
    /// The sandbox's `/tmp`, if the session shall have it.
    pub(super) tmp: Option<Source>,
    pub(super) workspace: PathBuf,
    pub(super) filter: &'a Filter,
}

/// What has become of it.
#[derive(Debug)]
pub(super) struct Made {
    pub(super) shell: Shell,
    /// For the daemon: the directory of pipes and the mount namespace.
    pub(super) fds: Vec<OwnedFd>,
}

impl Build<'_> {
    /// Does everything, to the shell's exec.
    pub(super) fn make(self, feed: &OwnedFd) -> Result<Made, Fault> {
        for &group in self.work_cgroup {
            // SAFETY: writes one byte of a static string to a descriptor that was inherited for this.
            if unsafe { libc::write(group, c"0".as_ptr().cast(), 1) } < 0 {
                return Err(Fault::doing("move under the sandbox's limits")(io::Error::last_os_error()));
            }
        }
        // The root of the group namespace is the group at this moment. Kernels without have nothing to hide.
        // SAFETY: one thread, and nothing in it relies on the old namespace.
        let _ = unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWCGROUP) };
        let _ = rustix::process::setpriority_process(None, 0);
        rustix::system::sethostname(HOSTNAME).map_err(Fault::doing("set the host name"))?;
        first_mounts(self.base)?;
        self.volatile_places()?;
        self.trees()?;
        self.devices()?;
        self.binds()?;
        if !self.plan.share_net {
            loopback().map_err(Fault::doing("bring the loopback interface up"))?;
        }
        let pipes = self.pipes()?;
        let namespace =
            fs::File::open("/proc/self/ns/mnt").map_err(Fault::doing("open the mount namespace"))?;
        let shell =
            inside::start_shell(self.plan, &self.workspace, feed, self.filter, self.base.capabilities)?;
        Ok(Made { shell, fds: vec![pipes, namespace.into()] })
    }

    fn tmpfs(&self, path: &str, flags: MountFlags, options: &str, bytes: u64) -> Result<(), Fault> {
        let options = CString::new(format!("{options},size={bytes}")).unwrap_or_default();
        match mount("tmpfs", path, "tmpfs", flags, Some(options.as_c_str())) {
            // An image without the directory.
            Ok(()) | Err(rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR) => Ok(()),
            Err(error) => Err(Fault::doing(format!("mount {path}"))(error)),
        }
    }

    fn volatile_places(&self) -> Result<(), Fault> {
        let flags = MountFlags::NOSUID | MountFlags::NODEV;
        let bytes = self.plan.memory_bytes;
        match &self.tmp {
            None => self.tmpfs("/tmp", flags, "mode=1777", bytes)?,
            Some(tmp) => attach(&tmp.tree, &tmp.real, true)?,
        }
        self.tmpfs("/run", flags, "mode=755", bytes)
    }

    fn trees(&self) -> Result<(), Fault> {
        let overlays = self.trees.iter().filter(|(_, mode)| matches!(mode, Mode::Overlay { .. })).count();
        if overlays > 0 {
            // All mounts were made read-only; only of these somebody knows.
            let change = Change { clear: libc::MOUNT_ATTR_RDONLY, recursive: true, ..Change::default() };
            set_attributes(CWD, &c_path(Path::new(HIDDEN))?, change)
                .map_err(Fault::doing("open the place of upper layers"))?;
        }
        let in_memory = |mode: &Mode| match mode {
            Mode::Overlay { on_disk } => !on_disk || self.base.disk.is_none(),
            Mode::ReadOnly | Mode::ReadWrite => false,
        };
        if self.trees.iter().any(|(_, mode)| in_memory(mode)) {
            self.tmpfs(IN_MEMORY, QUIET, "mode=700", self.plan.upper_bytes)?;
        }
        let on_disk = Path::new(ON_DISK).join(&self.plan.id);
        for (number, (source, mode)) in self.trees.iter().enumerate() {
            attach(&source.tree, &source.real, true)?;
            if matches!(mode, Mode::Overlay { .. }) {
                let place = if in_memory(mode) { PathBuf::from(IN_MEMORY) } else { on_disk.clone() };
                overlay(source, &place.join(number.to_string()))
                    .map_err(Fault::doing(format!("make an overlay of '{}'", source.real.display())))?;
            }
        }
        Ok(())
    }

    fn devices(&self) -> Result<(), Fault> {
        let options = if self.base.other_users {
            c"newinstance,ptmxmode=0666,mode=0620,gid=5,max=256"
        } else {
            c"newinstance,ptmxmode=0666,mode=0620,max=256"
        };
        let flags = MountFlags::NOSUID | MountFlags::NOEXEC;
        mount("devpts", "/dev/pts", "devpts", flags, Some(options))
            .map_err(Fault::doing("mount /dev/pts"))?;
        self.tmpfs(HIDDEN, QUIET, "mode=1777", self.plan.memory_bytes)
    }

    fn binds(&self) -> Result<(), Fault> {
        for (source, dest) in &self.binds {
            attach(&source.tree, dest, source.is_dir())?;
        }
        Ok(())
    }

    fn pipes(&self) -> Result<OwnedFd, Fault> {
        fs::DirBuilder::new()
            .mode(0o711)
            .create(PIPES)
            .map_err(Fault::doing("make a directory for pipes"))?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        rustix::fs::open(PIPES, flags, FileMode::empty()).map_err(Fault::doing("open the directory of pipes"))
    }
}

/// What every session has: the sandbox's files read-only, and a `/proc` of its own that shows no more.
pub(super) fn first_mounts(base: &Base) -> Result<(), Fault> {
    let change = Change { set: libc::MOUNT_ATTR_RDONLY, recursive: true, ..Change::default() };
    set_attributes(CWD, c"/", change).map_err(Fault::doing("make the sandbox's files read-only"))?;
    mount("proc", "/proc", "proc", QUIET, None).map_err(Fault::doing(
        "mount /proc (all of the container's own must be visible: start it without masked and read-only paths)",
    ))?;
    for mask in &base.masks {
        let done = match mask {
            Mask::File(path) => mount_bind("/dev/null", path.as_c_str()),
            Mask::Directory(path) => {
                mount("tmpfs", path.as_c_str(), "tmpfs", QUIET | MountFlags::RDONLY, Some(c"size=4k"))
            }
            Mask::ReadOnly(path) => mount_bind(path.as_c_str(), path.as_c_str()).and_then(|()| {
                mount_remount(path.as_c_str(), MountFlags::BIND | MountFlags::RDONLY | QUIET, c"")
            }),
        };
        match done {
            Ok(()) | Err(rustix::io::Errno::NOENT) => {}
            Err(error) => return Err(Fault::doing("cover a part of /proc")(error)),
        }
    }
    Ok(())
}

fn c_path(path: &Path) -> Result<CString, Fault> {
    CString::new(path.as_os_str().as_bytes()).map_err(|_| Fault::request("a path holds a NUL byte"))
}

/// Attaches a mount; the directory is made where the session has nothing there, which is in its own places only.
fn attach(tree: &OwnedFd, target: &Path, is_dir: bool) -> Result<(), Fault> {
    let shown = target.display();
    let place = match open_here(target) {
        Err(rustix::io::Errno::NOENT) => {
            let made = if is_dir {
                fs::create_dir_all(target)
            } else {
                target
                    .parent()
                    .map_or(Ok(()), fs::create_dir_all)
                    .and_then(|()| fs::File::create_new(target).map(drop))
            };
            made.map_err(|error| {
                Fault::request(format!("'{shown}' does not exist and cannot be made: {error}"))
            })?;
            open_here(target)
        }
        result => result,
    };
    let place = place.map_err(|error| {
        Fault::request(format!("'{shown}' cannot be mounted on: {}", io::Error::from(error)))
    })?;
    move_mount(tree, "", &place, "", ATTACH).map_err(|error| match error {
        rustix::io::Errno::NOTDIR | rustix::io::Errno::INVAL => Fault::request(format!(
            "'{shown}' cannot be mounted on: one of the two is a directory, the other is not"
        )),
        error => Fault::doing(format!("mount on '{shown}'"))(error),
    })
}

/// Mounts an overlay over its own lower layer, which is attached.
fn overlay(source: &Source, place: &Path) -> io::Result<()> {
    let (upper, work) = (place.join("upper"), place.join("work"));
    fs::create_dir_all(&upper)?;
    fs::create_dir(&work)?;
    // The overlay's first directory has the upper one's owner and mode.
    let stat = &source.stat;
    // An owner that nobody here is stays nobody.
    let _ = std::os::unix::fs::chown(&upper, Some(stat.st_uid), Some(stat.st_gid));
    fs::set_permissions(&upper, fs::Permissions::from_mode(stat.st_mode & 0o7777))?;
    let upper = open_here(&upper)?;
    let work = open_here(&work)?;
    let target = open_here(&source.real)?;
    // By number, so that no name needs quoting.
    let options = format!(
        "userxattr,volatile,lowerdir={},upperdir={},workdir={}",
        by_number(&source.tree),
        by_number(&upper),
        by_number(&work)
    );
    let options = CString::new(options).unwrap_or_default();
    let flags = MountFlags::NOSUID | MountFlags::NODEV;
    mount("overlay", by_number(&target), "overlay", flags, Some(options.as_c_str()))?;
    Ok(())
}

/// Brings `lo` up.
fn loopback() -> io::Result<()> {
    let socket = rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::DGRAM, None)?;
    // SAFETY: `ifreq` is plain data; the name fits and is terminated by the zeroes around it.
    let result = unsafe {
        let mut request: libc::ifreq = std::mem::zeroed();
        for (to, from) in request.ifr_name.iter_mut().zip(b"lo") {
            *to = from.cast_signed() as libc::c_char;
        }
        request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
        libc::ioctl(std::os::fd::AsRawFd::as_raw_fd(&socket), libc::SIOCSIFFLAGS as _, &raw const request)
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Enters a session's mounts and leaves of them only `trees`, each where it is.
pub(super) fn view(trees: &[(String, String)], namespace: &OwnedFd) -> Result<(), Fault> {
    crate::files::session::own_links().map_err(Fault::doing("open /proc/self/fd"))?;
    rustix::thread::move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Mount))
        .map_err(Fault::doing("enter the session's mounts"))?;
    // SAFETY: one thread, and nothing in it relies on the old namespace.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) }
        .map_err(Fault::doing("part from the session's mounts"))?;
    let mut open = Vec::with_capacity(trees.len());
    for (_, path) in trees {
        // The session cannot have put something else there: a mount point stays what it is.
        let tree = open_tree(CWD, OsStr::new(path), CLONE | OpenTreeFlags::AT_RECURSIVE)
            .map_err(Fault::doing(format!("open '{path}'")))?;
        open.push((path.trim_matches('/'), tree));
    }
    open.sort_by_key(|(path, _)| path.len());
    mount("tmpfs", HIDDEN, "tmpfs", QUIET, Some(c"size=64k,mode=755"))
        .map_err(Fault::doing("mount a place for files"))?;
    for (path, tree) in &open {
        let place = Path::new(HIDDEN).join(path);
        match attach(tree, &place, true) {
            Ok(()) => {}
            Err(fault) => return Err(fault),
        }
    }
    set_attributes(
        CWD,
        &c_path(Path::new(HIDDEN))?,
        Change { set: libc::MOUNT_ATTR_RDONLY, ..Change::default() },
    )
    .map_err(Fault::doing("close the place for files"))?;
    rustix::process::chroot(HIDDEN).map_err(Fault::doing("enter the place for files"))?;
    rustix::process::chdir("/").map_err(Fault::doing("enter the place for files"))
}

/// The kernel's word for "no more of them" is that for a full disk.
pub(super) fn explain(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::ENOSPC) => "there are as many namespaces as user.max_*_namespaces allows".to_owned(),
        Some(libc::EAGAIN) => "the sandbox has as many processes as it may have".to_owned(),
        _ => error.to_string(),
    }
}
