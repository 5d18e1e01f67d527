//! The process that makes isolated sessions.
//!
//! It has one thread and does as it is told by the daemon over a socket, whose end is its own end and that of all
//! sessions. Under the embedded engine init forks it, because init alone may still make namespaces; elsewhere the
//! daemon executes itself. It is not dumpable, and in a user namespace of its own: nothing in the sandbox can trace it
//! or look into it.

mod base;
mod build;
mod inside;
mod session;
pub(super) mod wire;

pub(super) use build::PIPES;

/// What the daemon says to a session's first process.
pub(super) mod word {
    pub(in crate::isolated) use super::inside::{INTERRUPT, KILL, MOST_SPARED};
}

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use osb_confine::seccomp::Filter;
use rustix::process::DumpableBehavior;

use self::base::Base;
use self::wire::{Answer, Fault, Hello, Request};

/// The flag that makes this program the isolator of an ordinary daemon.
pub(crate) const FLAG: &str = "isolator";

/// What the isolator is given.
#[derive(Debug)]
pub(crate) struct Start {
    /// To the daemon.
    pub(crate) socket: OwnedFd,
    /// Directory of upper layers on a file system that can hold them.
    pub(crate) uppers: Option<OwnedFd>,
    /// Files into which a process writes `0` to move under the limits of the work.
    pub(crate) work_cgroup: Vec<i32>,
}

/// All that making a session takes.
#[derive(Debug)]
struct Isolator {
    base: Base,
    work_cgroup: Vec<i32>,
    /// For the programs of sessions, and for what serves their files.
    filter: Filter,
}

/// As the daemon's own child: socket on standard input, directory of upper layers, if any, on standard output.
///
/// # Errors
/// The socket fails; nobody is left to be told more.
pub(crate) fn run_plain() -> io::Result<()> {
    let socket = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3)?;
    let uppers = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdout(), 3)?;
    let is_dir = rustix::fs::fstat(&uppers).is_ok_and(|stat| {
        rustix::fs::FileType::from_raw_mode(stat.st_mode) == rustix::fs::FileType::Directory
    });
    let null = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null")?;
    for number in 0..2 {
        // SAFETY: plain duplication onto the standard numbers, which no value here owns.
        unsafe { libc::dup2(std::os::fd::AsRawFd::as_raw_fd(&null), number) };
    }
    drop(null);
    run(Start { socket, uppers: is_dir.then_some(uppers), work_cgroup: Vec::new() })
}

/// Serves until the daemon is gone.
///
/// # Errors
/// The socket fails; nobody is left to be told more.
pub(crate) fn run(start: Start) -> io::Result<()> {
    let Start { socket, uppers, work_cgroup } = start;
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    let _ = rustix::thread::set_name(c"isolator");
    default_signals()?;
    let isolator = base::enter(uppers.as_ref().map(OwnedFd::as_fd)).and_then(|base| {
        let isolator = Isolator { base, work_cgroup, filter: Filter::session() };
        children_are_not_waited_for().map_err(Fault::doing("set signals"))?;
        isolator.try_out()?;
        Ok(isolator)
    });
    drop(uppers);
    let isolator = match isolator {
        Ok(isolator) => isolator,
        Err(fault) => {
            let hello = Hello { unavailable: Some(fault.message), ..Hello::default() };
            return wire::send(&socket, &hello, &[]);
        }
    };
    let disk: Vec<BorrowedFd<'_>> = isolator.base.disk.iter().map(OwnedFd::as_fd).collect();
    let hello = Hello {
        unavailable: None,
        no_other_users: (!isolator.base.other_users).then(|| {
            "execd may not become other users here; start it as root, with CAP_SETUID, CAP_SETGID and CAP_SETFCAP"
                .to_owned()
        }),
        disk: !disk.is_empty(),
    };
    wire::send(&socket, &hello, &disk)?;
    while let Some((request, fds)) = wire::receive::<Request>(&socket)? {
        let made = match request {
            Request::Make(plan) => isolator.make(*plan, fds, &socket),
            Request::Serve { trees } => isolator.serve(&trees, fds, &socket),
        };
        match made {
            Ok((pid, fds)) => {
                let fds: Vec<_> = fds.iter().map(OwnedFd::as_fd).collect();
                wire::send(&socket, &Answer::Made { pid }, &fds)?;
            }
            Err(fault) => wire::send(&socket, &Answer::Failed(fault), &[])?,
        }
    }
    Ok(())
}

type Made = Result<(i32, Vec<OwnedFd>), Fault>;

/// Nothing blocked, nothing ignored.
fn default_signals() -> io::Result<()> {
    // SAFETY: `sigaction` and `sigset_t` are plain data for which all zeroes are valid; the calls get pointers to
    // locals. Nothing here relies on handlers.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = libc::SIG_DFL;
        for signal in 1..=31 {
            libc::sigaction(signal, &raw const action, std::ptr::null_mut());
        }
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        if libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut()) != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// The daemon has their pidfds. The flag for that, unlike an ignored `SIGCHLD`, does not survive an exec.
fn children_are_not_waited_for() -> io::Result<()> {
    // SAFETY: as above.
    let result = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = libc::SIG_DFL;
        action.sa_flags = libc::SA_NOCLDWAIT;
        libc::sigaction(libc::SIGCHLD, &raw const action, std::ptr::null_mut())
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
