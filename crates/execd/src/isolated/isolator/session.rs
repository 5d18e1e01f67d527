//! Making a session, as the isolator does it: what it is made of is opened here, put together by the child.

use std::ffi::c_void;
use std::io;
use std::os::fd::{AsFd as _, FromRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};

use osb_confine::mount::{Change, set_attributes};
use osb_confine::seccomp::Filter;
use rustix::fs::{CWD, Mode as FileMode, OFlags};
use rustix::mount::{OpenTreeFlags, open_tree};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::base::{CLONE, by_number};
use super::build::{self, Build};
use super::wire::{self, Answer, Fault, FaultKind, Mode, Plan, Who};
use super::{Isolator, Made, inside};

/// Stack of a child. Only the touched pages cost memory.
const STACK: usize = 256 << 10;
/// Where nothing of the sandbox's is: sessions have their own.
const NOT_THE_SANDBOXS: [&str; 3] = ["/dev", "/proc", "/sys"];

/// Something of the sandbox that goes into a session, wherever its name leads meanwhile.
#[derive(Debug)]
pub(super) struct Source {
    /// A mount of it, attached nowhere.
    pub(super) tree: OwnedFd,
    /// Its path without symlinks.
    pub(super) real: PathBuf,
    pub(super) stat: rustix::fs::Stat,
}

impl Source {
    /// Opens it. `within` are the directories that it has to be in.
    fn open(path: &str, within: Option<&[String]>, recursive: bool) -> Result<Self, Fault> {
        let fd =
            rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, FileMode::empty()).map_err(|error| {
                Fault::request(format!("'{path}' cannot be used: {}", io::Error::from(error)))
            })?;
        let real = rustix::fs::readlink(by_number(&fd), Vec::new())
            .map_err(Fault::doing(format!("find '{path}'")))?;
        let real = PathBuf::from(<std::ffi::OsString as std::os::unix::ffi::OsStringExt>::from_vec(
            real.into_bytes(),
        ));
        if NOT_THE_SANDBOXS.iter().any(|place| real.starts_with(place)) {
            return Err(Fault::request(format!(
                "'{path}' cannot be used: sessions have /dev, /proc and /sys of their own"
            )));
        }
        if let Some(within) = within
            && !within.iter().any(|dir| std::fs::canonicalize(dir).is_ok_and(|dir| real.starts_with(dir)))
        {
            return Err(Fault::request(format!(
                "'{path}' (in fact '{}') is not in the allow list: {}",
                real.display(),
                within.join(", ")
            )));
        }
        let stat = rustix::fs::fstat(&fd).map_err(Fault::doing(format!("look at '{path}'")))?;
        let deep = if recursive { OpenTreeFlags::AT_RECURSIVE } else { OpenTreeFlags::empty() };
        let tree = open_tree(&fd, "", CLONE | OpenTreeFlags::AT_EMPTY_PATH | deep).map_err(|error| match error {
            rustix::io::Errno::INVAL if !recursive => Fault::request(format!(
                "'{path}' cannot be an overlay: other file systems are mounted below it; name a directory without"
            )),
            error => Fault::doing(format!("take '{path}'"))(error),
        })?;
        Ok(Self { tree, real, stat })
    }

    pub(super) fn is_dir(&self) -> bool {
        rustix::fs::FileType::from_raw_mode(self.stat.st_mode) == rustix::fs::FileType::Directory
    }

    fn close_for_writing(&self) -> Result<(), Fault> {
        let change = Change { set: libc::MOUNT_ATTR_RDONLY, recursive: true, ..Change::default() };
        set_attributes(self.tree.as_fd(), c"", change)
            .map_err(Fault::doing(format!("make '{}' read-only", self.real.display())))
    }
}

impl Isolator {
    /// Makes a session. Gives its process, and beside it the descriptors that the daemon gets.
    pub(super) fn make(&self, plan: Plan, fds: Vec<OwnedFd>, socket: &OwnedFd) -> Made {
        let mut fds = fds.into_iter();
        let (Some(control), Some(feed)) = (fds.next(), fds.next()) else {
            return Err(machine("descriptors are missing"));
        };
        if !self.base.other_users && plan.who != Who::Daemon {
            return Err(Fault {
                kind: FaultKind::Identity,
                message: "execd may not become other users here".to_owned(),
            });
        }
        let mut trees = Vec::with_capacity(plan.trees.len());
        for tree in &plan.trees {
            let overlay = matches!(tree.mode, Mode::Overlay { .. });
            let source = Source::open(&tree.path, None, !overlay)?;
            if !source.is_dir() {
                return Err(Fault::request(format!("'{}' is not a directory", tree.path)));
            }
            if tree.mode != Mode::ReadWrite {
                source.close_for_writing()?;
            }
            trees.push((source, tree.mode));
        }
        // What lies in another comes after it.
        trees.sort_by_key(|(source, _)| source.real.components().count());
        let workspace = plan.trees.first().map_or_else(|| "/".into(), |tree| PathBuf::from(&tree.path));
        let mut binds = Vec::with_capacity(plan.binds.len());
        for bind in &plan.binds {
            let source = Source::open(&bind.source, Some(&plan.allowed), true)?;
            if bind.readonly {
                source.close_for_writing()?;
            }
            let dest = if bind.dest == bind.source { source.real.clone() } else { PathBuf::from(&bind.dest) };
            binds.push((source, dest));
        }
        let tmp = if plan.own_tmp { None } else { Source::open("/tmp", None, true).ok() };
        let chosen = plan.refused_calls.as_deref().map(Filter::session_refusing);
        let build = Build {
            plan: &plan,
            base: &self.base,
            work_cgroup: &self.work_cgroup,
            trees,
            binds,
            tmp,
            workspace,
            filter: chosen.as_ref().unwrap_or(&self.filter),
        };
        let mut flags = libc::CLONE_NEWNS | libc::CLONE_NEWPID | libc::CLONE_NEWIPC | libc::CLONE_NEWUTS;
        if !plan.share_net {
            flags |= libc::CLONE_NEWNET;
        }
        self.start(
            flags,
            |report| {
                let made = build.make(&feed)?;
                Ok(inside::Inside { control, report, shell: made.shell, fds: made.fds })
            },
            socket,
        )
    }

    /// Clones a child that makes a session and becomes its first process.
    fn start(
        &self,
        flags: i32,
        make: impl FnOnce(OwnedFd) -> Result<inside::Inside, Fault>,
        socket: &OwnedFd,
    ) -> Made {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .map_err(Fault::doing("make a socket"))?;
        let mut theirs = Some(theirs);
        let mut make = Some(make);
        let (pid, pidfd) = clone(flags, &mut || {
            let (Some(make), Some(report)) = (make.take(), theirs.take()) else { return 1 };
            // Nobody's session survives the isolator.
            let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
            // SAFETY: copies of the isolator's descriptors; nothing in the child uses them.
            unsafe { libc::close(std::os::fd::AsRawFd::as_raw_fd(socket)) };
            let copy = report.try_clone();
            // This process has a child to wait for.
            let _ = super::default_signals();
            match make(report) {
                Ok(inside) => inside.run(&self.filter, self.base.capabilities),
                Err(fault) => {
                    if let Ok(report) = copy {
                        let _ = wire::send(&report, &Answer::Failed(fault), &[]);
                    }
                    1
                }
            }
        })
        .map_err(|error| machine(format!("a process cannot be started: {}", build::explain(&error))))?;
        drop(theirs);
        match wire::receive::<Answer>(&ours) {
            Ok(Some((Answer::Made { .. }, fds))) => Ok((pid, std::iter::once(pidfd).chain(fds).collect())),
            answer => {
                let _ = rustix::process::pidfd_send_signal(&pidfd, rustix::process::Signal::KILL);
                let mut poll = [rustix::event::PollFd::new(&pidfd, rustix::event::PollFlags::IN)];
                let _ = rustix::io::retry_on_intr(|| rustix::event::poll(&mut poll, None));
                Err(match answer {
                    Ok(Some((Answer::Failed(fault), _))) => fault,
                    Ok(_) => machine("its first process was killed; the sandbox may be short of memory"),
                    Err(error) => machine(error.to_string()),
                })
            }
        }
    }

    /// Whether a session can be made at all.
    pub(super) fn try_out(&self) -> Result<(), Fault> {
        let mut failed = None;
        let flags = libc::CLONE_NEWNS | libc::CLONE_NEWPID | libc::CLONE_NEWIPC | libc::CLONE_NEWUTS;
        let (ours, theirs) =
            rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).map_err(Fault::doing("make a pipe"))?;
        let mut theirs = Some(theirs);
        let (_, pidfd) = clone(flags, &mut || {
            let Some(report) = theirs.take() else { return 1 };
            if let Err(fault) = build::first_mounts(&self.base) {
                let _ = rustix::io::write(&report, fault.message.as_bytes());
            }
            0
        })
        .map_err(Fault::doing("make namespaces"))?;
        drop(theirs);
        let mut text = [0; 512];
        if let Ok(length @ 1..) = rustix::io::retry_on_intr(|| rustix::io::read(&ours, &mut text)) {
            failed = Some(machine(String::from_utf8_lossy(&text[..length]).into_owned()));
        }
        let mut poll = [rustix::event::PollFd::new(&pidfd, rustix::event::PollFlags::IN)];
        let _ = rustix::io::retry_on_intr(|| rustix::event::poll(&mut poll, None));
        failed.map_or(Ok(()), Err)
    }

    /// Starts a process that serves the files of a session.
    pub(super) fn serve(&self, trees: &[(String, String)], fds: Vec<OwnedFd>, socket: &OwnedFd) -> Made {
        let mut fds = fds.into_iter();
        let (Some(connection), Some(namespace)) = (fds.next(), fds.next()) else {
            return Err(machine("descriptors are missing"));
        };
        let mut connection = Some(connection);
        let (pid, pidfd) = clone(0, &mut || {
            let Some(connection) = connection.take() else { return 1 };
            let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
            let _ = rustix::process::setpriority_process(None, 0);
            // SAFETY: as above.
            unsafe { libc::close(std::os::fd::AsRawFd::as_raw_fd(socket)) };
            let view = build::view(trees, &namespace)
                .and_then(|()| inside::confine(&self.filter, self.base.capabilities));
            let view = view.map_err(|fault| fault.message);
            match crate::files::session::run(connection, view, trees) {
                Ok(()) => 0,
                Err(_) => 1,
            }
        })
        .map_err(|error| machine(format!("a process cannot be started: {}", build::explain(&error))))?;
        Ok((pid, vec![pidfd]))
    }
}

fn machine(message: impl Into<String>) -> Fault {
    Fault { kind: FaultKind::Machine, message: message.into() }
}

/// As `fork`, into new namespaces. The child runs `child` and ends.
fn clone(flags: i32, child: &mut dyn FnMut() -> i32) -> io::Result<(i32, OwnedFd)> {
    extern "C" fn entry(child: *mut c_void) -> i32 {
        // SAFETY: the caller's pointer to a reference that lives in its frame, of which this process has a copy.
        let child = unsafe { &mut *child.cast::<&mut dyn FnMut() -> i32>() };
        let code = child();
        // SAFETY: leaves without running anything of the parent's.
        unsafe { libc::_exit(code) }
    }
    let mut stack: Vec<u8> = Vec::with_capacity(STACK);
    // SAFETY: the offset is the end of the allocation.
    let top = unsafe { stack.as_mut_ptr().add(STACK) };
    let top = top.wrapping_sub(top.addr() % 16);
    let mut child = child;
    let mut pidfd: i32 = -1;
    // SAFETY: without CLONE_VM the child has a copy of everything; this process has one thread, so it finds every
    // lock free and every structure whole.
    let pid = unsafe {
        libc::clone(
            entry,
            top.cast(),
            flags | libc::CLONE_PIDFD | libc::SIGCHLD,
            (&raw mut child).cast(),
            &raw mut pidfd,
            std::ptr::null_mut::<c_void>(),
            std::ptr::null_mut::<c_void>(),
        )
    };
    if pid < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made the descriptor for us.
    Ok((pid, unsafe { OwnedFd::from_raw_fd(pidfd) }))
}

/// Opens what is there now; the session's own name for it.
pub(super) fn open_here(path: &Path) -> rustix::io::Result<OwnedFd> {
    rustix::fs::openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, FileMode::empty())
}
