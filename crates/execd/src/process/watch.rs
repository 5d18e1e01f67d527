//! Waiting for descriptors in the runtime.

use std::io;
use std::os::fd::OwnedFd;

use tokio::io::Interest;
use tokio::io::unix::{AsyncFd, AsyncFdRegisterError};

/// Lets the runtime watch `fd` for something to read. The descriptor comes back when it cannot be watched.
///
/// # Errors
/// The kernel has no room for another watch.
pub fn readable(fd: OwnedFd) -> Result<AsyncFd<OwnedFd>, (OwnedFd, io::Error)> {
    // SAFETY: an `OwnedFd` is open, gives the same descriptor at every call, and stays open until the `AsyncFd`
    // that owns it lets it go.
    unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }
        .map_err(AsyncFdRegisterError::into_parts)
}
