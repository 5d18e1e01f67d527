//! Descriptors that this process was started with.

use std::io;
use std::os::fd::{AsFd, AsRawFd as _, RawFd};

/// Marks everything above standard error to be closed on exec, whoever opened it.
pub fn close_on_exec() -> io::Result<()> {
    // SAFETY: changes a flag of descriptors; none is closed now.
    let marked = unsafe { libc::syscall(libc::SYS_close_range, 3u32, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) };
    if marked == 0 {
        return Ok(());
    }
    // Kernels before 5.11 do not know the flag.
    for entry in std::fs::read_dir("/proc/self/fd")? {
        let name = entry?.file_name();
        if let Some(fd) = name.to_str().and_then(|name| name.parse::<RawFd>().ok()).filter(|&fd| fd > 2) {
            // SAFETY: as above; a number that is gone gives an error.
            unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) };
        }
    }
    Ok(())
}

/// Opens what is empty and makes sure that 0, 1 and 2 are taken, so that no other descriptor gets these numbers.
pub fn reserve_standard() -> io::Result<()> {
    loop {
        let null = super::null::open()?;
        if null.as_raw_fd() > 2 {
            return Ok(());
        }
        // Stays open for good under the number that was free.
        let _ = std::os::fd::IntoRawFd::into_raw_fd(null);
    }
}

/// The next signal of a signal descriptor that does not block; `None` when none waits. What is no signal descriptor
/// counts as one that is asked to end.
pub fn next_signal(signals: &impl AsFd) -> Option<i32> {
    let mut info = [0u8; size_of::<libc::signalfd_siginfo>()];
    match rustix::io::read(signals, &mut info) {
        // The signal's number is the first member of the structure.
        Ok(length) if length == info.len() => {
            i32::try_from(u32::from_ne_bytes([info[0], info[1], info[2], info[3]])).ok()
        }
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => None,
        _ => Some(libc::SIGTERM),
    }
}

/// Lets all signals through again.
pub fn unblock_signals() {
    // SAFETY: a set on the stack, made empty before it is read.
    unsafe {
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
    }
}

/// Closes all descriptors but these and the standard ones, whatever owns them: for a process that goes on with a part of
/// another's memory and leaves the rest alone.
pub fn close_all_but(kept: &[RawFd]) {
    let mut kept: Vec<u32> = kept.iter().filter_map(|&fd| u32::try_from(fd).ok()).collect();
    kept.sort_unstable();
    let mut first = 3;
    for fd in kept.into_iter().chain([u32::MAX]) {
        if fd > first {
            let last = if fd == u32::MAX { fd } else { fd - 1 };
            // SAFETY: what owns the descriptors is never used or dropped in this process; the caller's promise.
            unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
        }
        first = fd.saturating_add(1).max(first);
    }
}
