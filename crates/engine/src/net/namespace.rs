//! Going into a network namespace and coming back.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{CWD, Mode, OFlags};
use rustix::thread::{LinkNameSpaceType, UnshareFlags};

/// The calling thread's network namespace.
pub(super) fn current() -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(CWD, "/proc/thread-self/ns/net", flags, Mode::empty())?)
}

/// Brings the calling thread home when dropped.
struct Return<'a>(BorrowedFd<'a>);

impl Drop for Return<'_> {
    fn drop(&mut self) {
        if let Err(error) = set(self.0) {
            // The same call with the same right has just succeeded. A thread of the server that stays in a sandbox's
            // namespace would open its next sockets there, so nothing may go on.
            tracing::error!(%error, "cannot come back from a sandbox's network namespace");
            std::process::abort();
        }
    }
}

fn set(namespace: BorrowedFd<'_>) -> io::Result<()> {
    Ok(rustix::thread::move_into_link_name_space(namespace, Some(LinkNameSpaceType::Network))?)
}

/// Runs `work` on this thread inside `namespace`, then returns to `home`, where the thread must be now.
pub(super) fn within<T>(
    namespace: BorrowedFd<'_>,
    home: BorrowedFd<'_>,
    work: impl FnOnce() -> T,
) -> io::Result<T> {
    set(namespace)?;
    let _return = Return(home);
    Ok(work())
}

/// Makes a namespace and runs `work` in it on this thread, then returns to `home`.
pub(super) fn create<T>(
    home: BorrowedFd<'_>,
    work: impl FnOnce() -> io::Result<T>,
) -> io::Result<(OwnedFd, T)> {
    // SAFETY: only the network namespace is left; the table of descriptors stays shared.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }?;
    let _return = Return(home);
    Ok((current()?, work()?))
}

/// Are both the same namespace?
pub(super) fn same(a: impl AsFd, b: impl AsFd) -> io::Result<bool> {
    let (a, b) = (rustix::fs::fstat(a)?, rustix::fs::fstat(b)?);
    Ok((a.st_dev, a.st_ino) == (b.st_dev, b.st_ino))
}
