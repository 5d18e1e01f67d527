//! What all helpers do first.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use rustix::net::RecvFlags;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::message::{Hello, Ready};
use crate::sys::scm;

/// Descriptors that a helper keeps for itself live from here on. Those of a request land below, in the order
/// sent, because the kernel gives the lowest free numbers.
pub(crate) const KEPT_FROM: RawFd = 64;

const LAST_SIGNAL: i32 = 64;
const NOFILE_SOFT: u64 = 65_536;
const NOFILE_HARD: u64 = 1_048_576;
/// Sandboxes die before the server when the machine runs out of memory.
const OOM_SCORE: i32 = 200;

/// The server's end of the conversation.
#[derive(Debug)]
pub(crate) struct Link {
    socket: OwnedFd,
    buffer: Vec<u8>,
}

/// Brings the process into a known state and reads the first message. Whatever a sandbox inherits from its
/// spawner is set here once, not at each start.
pub(crate) fn begin(name: &CStr) -> io::Result<(Link, Hello, Vec<OwnedFd>)> {
    // Whoever started the server may have left descriptors open in it that are inherited on and on.
    // SAFETY: nothing of this process has opened anything yet.
    if unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // The program's own name would be `exe`.
    rustix::thread::set_name(name)?;
    signals()?;
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    limits();
    raise_oom_score();

    // The socket is inherited as standard input, which stays open until `standard_to` replaces it.
    let socket = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), KEPT_FROM)?;
    let mut link = Link { socket, buffer: vec![0; scm::MAX_BYTES] };
    let mut fds = Vec::new();
    let hello = link
        .receive(&mut fds, RecvFlags::CMSG_CLOEXEC)?
        .ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof))?;
    let fds = fds
        .into_iter()
        .map(|fd| rustix::io::fcntl_dupfd_cloexec(&fd, KEPT_FROM))
        .collect::<Result<_, _>>()?;
    Ok((link, hello, fds))
}

/// Tells the server that the helper works, or why not.
pub(crate) fn answer(link: &mut Link, result: &io::Result<Option<String>>) -> io::Result<()> {
    let ready = match result {
        Ok(finding) => Ready { error: None, no_user_namespace: finding.clone() },
        Err(error) => Ready { error: Some(error.to_string()), no_user_namespace: None },
    };
    link.send(&ready, &[])
}

/// Adds what was tried to an error.
pub(crate) fn while_doing(action: &str) -> impl FnOnce(io::Error) -> io::Error {
    move |error| io::Error::new(error.kind(), format!("{action}: {error}"))
}

impl Link {
    /// The next message; `None` when the server is gone.
    pub(crate) fn receive<M: DeserializeOwned>(
        &mut self,
        fds: &mut Vec<OwnedFd>,
        flags: RecvFlags,
    ) -> io::Result<Option<M>> {
        match scm::receive(self.socket.as_fd(), &mut self.buffer, fds, flags)? {
            None => Ok(None),
            Some(len) => Ok(Some(serde_json::from_slice(&self.buffer[..len])?)),
        }
    }

    pub(crate) fn send<M: Serialize>(&mut self, message: &M, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        scm::send(self.socket.as_fd(), &serde_json::to_vec(message)?, fds, true)
    }
}

/// Replaces the three standard descriptors, which come from the server's terminal or log and must not reach a
/// sandbox.
pub(crate) fn standard_to(null: &File) -> io::Result<()> {
    for number in 0..3 {
        // SAFETY: plain duplication onto the standard numbers, which no value here owns.
        if unsafe { libc::dup2(null.as_raw_fd(), number) } < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Default actions and nothing blocked, as the daemon shall find them. Children are not waited for: the server
/// holds their pidfds. The flag for that, unlike an ignored `SIGCHLD`, does not survive an exec.
fn signals() -> io::Result<()> {
    // SAFETY: `sigaction` and `sigset_t` are plain data for which all zeroes are valid; the calls get pointers
    // to locals. Nothing in a helper relies on handlers.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = libc::SIG_DFL;
        // Whatever the server ignores, or was started with ignored. Past libc, which hides two signals that can be
        // inherited as ignored all the same. SIGKILL and SIGSTOP cannot be set and are never ignored.
        let default = KernelAction { handler: 0, flags: 0, restorer: 0, mask: 0 };
        for signal in 1..=LAST_SIGNAL {
            libc::syscall(libc::SYS_rt_sigaction, signal, &raw const default, 0, size_of::<u64>());
        }
        action.sa_flags = libc::SA_NOCLDWAIT;
        if libc::sigaction(libc::SIGCHLD, &raw const action, std::ptr::null_mut()) != 0 {
            return Err(io::Error::last_os_error());
        }
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        if libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut()) != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    // Ctrl-C in the server's terminal goes to its process group; sandboxes and helpers are not part of it.
    rustix::process::setsid()?;
    Ok(())
}

/// What the system call takes, unlike libc's function.
#[repr(C)]
struct KernelAction {
    handler: usize,
    flags: libc::c_ulong,
    restorer: usize,
    mask: u64,
}

/// A kernel with a smaller maximum keeps its own.
fn limits() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let wanted = Rlimit { current: Some(NOFILE_SOFT), maximum: Some(NOFILE_HARD) };
    if setrlimit(Resource::Nofile, wanted).is_err() {
        let hard = getrlimit(Resource::Nofile).maximum;
        let soft = hard.map_or(NOFILE_SOFT, |hard| hard.min(NOFILE_SOFT));
        let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(soft), maximum: hard });
    }
    let _ = setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) });
    let _ = setrlimit(Resource::Nproc, Rlimit { current: None, maximum: None });
}

fn raise_oom_score() {
    let path = "/proc/self/oom_score_adj";
    let current = std::fs::read_to_string(path).ok().and_then(|text| text.trim().parse::<i32>().ok());
    if current.is_some_and(|score| score < OOM_SCORE) {
        // Only a preference; the limits of the cgroups are what protects the host.
        let _ = std::fs::write(path, OOM_SCORE.to_string());
    }
}
