//! System calls that no crate of ours wraps, and messages with descriptors between our own processes.

pub(crate) mod clone;
pub(crate) mod scm;

use std::io;
use std::os::fd::OwnedFd;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// A descriptor whose readiness the runtime watches. Must be called within a tokio runtime.
pub(crate) fn watched(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` is open, is always the same descriptor, and is closed only by its own drop, which comes
    // after that of the `AsyncFd` that takes it.
    unsafe { AsyncFd::register_with_interest(fd, interest) }.map_err(|error| error.into_parts().1)
}
