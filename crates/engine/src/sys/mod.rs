//! System calls that no crate of ours wraps, and messages with descriptors between our own processes.

pub(crate) mod clone;
pub(crate) mod scm;

use std::io;
use std::os::fd::OwnedFd;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// How much the work behind gives way to requests.
const BEHIND: i32 = 10;

/// Lets this thread give way to others: for work that nobody waits for. Where it is refused the work goes on as it is.
pub(crate) fn thread_gives_way() {
    let _ = rustix::process::setpriority_process(None, BEHIND);
}

/// As [`thread_gives_way`], for a process with a session of its own: with autogroups the scheduler weighs sessions
/// first, and a thread's own niceness counts within its session only.
pub(crate) fn process_gives_way() {
    thread_gives_way();
    let _ = std::fs::write("/proc/self/autogroup", BEHIND.to_string());
}

/// A descriptor whose readiness the runtime watches. Must be called within a tokio runtime.
pub(crate) fn watched(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` is open, is always the same descriptor, and is closed only by its own drop, which comes
    // after that of the `AsyncFd` that takes it.
    unsafe { AsyncFd::register_with_interest(fd, interest) }.map_err(|error| error.into_parts().1)
}
