//! A pair of pseudo-terminal devices.

use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};

use rustix::fs::{Gid, Uid};
use rustix::pty::OpenptFlags;
use rustix::termios::{Winsize, tcsetwinsize};
use tokio::io::Interest;
use tokio::io::unix::{AsyncFd, AsyncFdRegisterError};

/// Columns and rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Size {
    pub(crate) cols: u16,
    pub(crate) rows: u16,
}

impl Size {
    /// Of a terminal that nobody has set.
    pub(super) const USUAL: Self = Self { cols: 80, rows: 24 };
}

/// Both ends: the one that is read and written here, and the one that programs see.
#[derive(Debug)]
pub(super) struct Pair {
    pub(super) master: OwnedFd,
    pub(super) slave: OwnedFd,
}

/// Where the system hands out terminals.
pub(super) const MULTIPLEXER: &str = "/dev/ptmx";

/// Opens a pair. The programs' end belongs to `owner`, who may open it again by its name.
pub(super) fn open(size: Size, owner: Option<u32>) -> io::Result<Pair> {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let master = rustix::pty::openpt(flags)?;
    rustix::pty::unlockpt(&master)?;
    // By way of the other end: names below /dev may have been changed from inside.
    let slave = rustix::pty::ioctl_tiocgptpeer(&master, flags)?;
    if let Some(uid) = owner {
        rustix::fs::fchown(&slave, Some(Uid::from_raw(uid)), None::<Gid>)?;
    }
    resize(&master, size)?;
    rustix::io::ioctl_fionbio(&master, true)?;
    Ok(Pair { master, slave })
}

/// Changes the size. Programs in the foreground hear of it by SIGWINCH, if it is another one.
pub(super) fn resize(master: &OwnedFd, size: Size) -> io::Result<()> {
    let size = Winsize { ws_col: size.cols, ws_row: size.rows, ws_xpixel: 0, ws_ypixel: 0 };
    Ok(tcsetwinsize(master, size)?)
}

/// Sends SIGINT or SIGQUIT to the foreground, whoever that is at this moment.
pub(super) fn signal_foreground(master: &OwnedFd, signal: i32) {
    // SAFETY: an ioctl that takes a number. It fails for signals that a terminal does not send.
    unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCSIG, signal) };
}

/// The process group in the foreground.
pub(super) fn foreground(master: &OwnedFd) -> Option<i32> {
    let mut group: libc::pid_t = 0;
    // SAFETY: the pointer is to a local that lives during the call.
    let result = unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCGPGRP, &raw mut group) };
    (result == 0 && group > 0).then_some(group)
}

/// Lets the runtime watch `fd` in these directions.
pub(super) fn watch(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` is open, gives the same descriptor at every call, and stays open until the `AsyncFd`
    // that owns it lets it go.
    unsafe { AsyncFd::register_with_interest(fd, interest) }
        .map_err(AsyncFdRegisterError::into_parts)
        .map_err(|(_, error)| error)
}
