//! User namespaces and acting as a user of one.

use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;

use rustix::process::{Signal, pidfd_send_signal};
use rustix::thread::{CapabilitySet, CapabilitySets};

use crate::sys::clone::{Stack, clone_shared};

/// A user namespace in which the ids 0 … `count` − 1 are `first` … outside.
pub(super) fn make(first: u32, count: u32) -> io::Result<OwnedFd> {
    let stack = Stack::new(16 << 10)?;
    // SAFETY: `wait_for_death` only makes system calls and never returns; it gets no argument. The stack is kept
    // until the child is dead: the pidfd is waited for below on every path.
    let child =
        unsafe { clone_shared(libc::CLONE_NEWUSER, None, &stack, wait_for_death, std::ptr::null_mut()) }
            .map_err(explain)?;
    let map = format!("0 {first} {count}");
    let write_and_open = || -> io::Result<OwnedFd> {
        let of = |name: &str| format!("/proc/{}/{name}", child.pid);
        std::fs::write(of("uid_map"), &map)?;
        std::fs::write(of("gid_map"), &map)?;
        Ok(File::open(of("ns/user"))?.into())
    };
    let result = write_and_open();
    // Cannot fail for a child of ours that nobody else waits for.
    let _ = pidfd_send_signal(&child.pidfd, Signal::KILL);
    let mut poll = [rustix::event::PollFd::new(&child.pidfd, rustix::event::PollFlags::IN)];
    rustix::io::retry_on_intr(|| rustix::event::poll(&mut poll, None))?;
    result
}

/// The kernel's word for "no more of them" is that for a full disk.
fn explain(error: io::Error) -> io::Error {
    if error.raw_os_error() != Some(libc::ENOSPC) {
        return error;
    }
    io::Error::other(
        "there are as many as user.max_user_namespaces allows: 'sysctl user.max_user_namespaces=65536'",
    )
}

/// # Safety
/// An entry for [`clone_shared`].
unsafe extern "C" fn wait_for_death(_: *mut c_void) -> ! {
    loop {
        // SAFETY: no arguments matter; sleeps until a signal ends the process.
        unsafe { libc::syscall(libc::SYS_ppoll, 0, 0, 0, 0, 0) };
    }
}

/// Runs `action` with the file-system ids of `id`, and with all capabilities, which changing those ids takes away.
pub(super) fn as_user<T>(id: u32, action: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    if id == 0 {
        return action();
    }
    let full = rustix::thread::capabilities(None)?;
    set_fs_ids(id);
    let raised = rustix::thread::set_capabilities(
        None,
        CapabilitySets {
            effective: full.permitted,
            permitted: full.permitted,
            inheritable: CapabilitySet::empty(),
        },
    );
    let result = raised.map_err(io::Error::from).and_then(|()| action());
    set_fs_ids(0);
    rustix::thread::set_capabilities(None, full)?;
    result
}

fn set_fs_ids(id: u32) {
    // SAFETY: change the calling thread's file-system ids; no memory is involved. They report no errors.
    unsafe {
        libc::setfsgid(id);
        libc::setfsuid(id);
    }
}
