//! Calls about mounts that no other crate wraps.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// What is changed of a mount.
#[derive(Debug, Clone, Copy, Default)]
pub struct Change {
    /// `MOUNT_ATTR_…` to set.
    pub set: u64,
    /// `MOUNT_ATTR_…` to take away.
    pub clear: u64,
    /// All mounts below as well.
    pub recursive: bool,
}

/// Changes the mount at `path` below `dir`; an empty path is what `dir` itself refers to.
///
/// # Errors
/// The kernel refuses.
pub fn set_attributes(dir: BorrowedFd<'_>, path: &CStr, change: Change) -> io::Result<()> {
    let attributes =
        libc::mount_attr { attr_set: change.set, attr_clr: change.clear, propagation: 0, userns_fd: 0 };
    call(dir, path, &attributes, change.recursive)
}

/// Has a detached mount show its files with the ids that the user namespace maps them to.
///
/// # Errors
/// The kernel or the file system refuses.
pub fn map_ids(tree: BorrowedFd<'_>, namespace: impl AsFd) -> io::Result<()> {
    let attributes = libc::mount_attr {
        attr_set: libc::MOUNT_ATTR_IDMAP,
        attr_clr: 0,
        propagation: 0,
        userns_fd: namespace.as_fd().as_raw_fd().unsigned_abs().into(),
    };
    call(tree, c"", &attributes, false)
}

fn call(dir: BorrowedFd<'_>, path: &CStr, attributes: &libc::mount_attr, recursive: bool) -> io::Result<()> {
    let empty = if path.is_empty() { libc::AT_EMPTY_PATH } else { 0 };
    // SAFETY: path and attributes are complete and outlive the call, which only reads them.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            dir.as_raw_fd(),
            path.as_ptr(),
            empty | if recursive { libc::AT_RECURSIVE } else { 0 },
            std::ptr::from_ref(attributes),
            size_of::<libc::mount_attr>(),
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
