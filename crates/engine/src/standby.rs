//! A sandbox that nobody has asked for yet: its init and its daemon run and wait for the order.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::mount::{FsPickFlags, fsconfig_reconfigure, fsconfig_set_string, fspick};
use rustix::process::{Signal, pidfd_send_signal};

use crate::identity::Identity;
use crate::sys::scm;

/// How long a killed init may take to die before that counts as failed.
const DEAD_WITHIN: Duration = Duration::from_secs(5);

/// Init as the engine holds it. It ends by itself when the other end of `orders` is closed.
#[derive(Debug)]
pub(crate) struct Standby {
    pub(crate) init: Identity,
    pub(crate) pidfd: OwnedFd,
    /// The engine's end, see [`osb_protocol::boot::BootFds::orders`].
    pub(crate) orders: OwnedFd,
    pub(crate) shm_bytes: u64,
    /// Whether it has been told to rehearse.
    pub(crate) rehearsed: bool,
}

impl Standby {
    /// Gives `/dev/shm` another size.
    pub(crate) fn resize_shm(&mut self, bytes: u64) -> io::Result<()> {
        if self.shm_bytes == bytes {
            return Ok(());
        }
        let path = format!("/proc/{}/root/dev/shm", self.init.pid());
        let mount = fspick(rustix::fs::CWD, path, FsPickFlags::FSPICK_CLOEXEC)?;
        // What was found by number is this sandbox's only if it still lives.
        if !self.is_alive()? {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        fsconfig_set_string(mount.as_fd(), "size", bytes.to_string())?;
        fsconfig_reconfigure(mount.as_fd())?;
        self.shm_bytes = bytes;
        Ok(())
    }

    /// Has it go the way of an order ahead, see [`osb_protocol::boot::BootFds::orders`].
    pub(crate) fn rehearse(&mut self) {
        self.rehearsed = true;
        // Whoever is dead is found out when it gets its order.
        let _ = scm::send(self.orders.as_fd(), &[0], &[], false);
    }

    /// Sends the order. `BrokenPipe` means that init is dead.
    pub(crate) fn order(&self, document: &OwnedFd) -> io::Result<()> {
        scm::send(self.orders.as_fd(), &[0], &[document.as_fd()], false).map_err(|error| match error.kind() {
            // It died with a word to rehearse unread.
            io::ErrorKind::ConnectionReset => io::ErrorKind::BrokenPipe.into(),
            _ => error,
        })
    }

    /// Asks it to die at once.
    pub(crate) fn kill(&self) {
        // The only failure for a descriptor of ours is that it is dead already.
        let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
    }

    /// Kills it and waits until everything in it is dead. False: it does not die. Blocks for a millisecond.
    pub(crate) fn end(&self) -> bool {
        self.kill();
        let deadline = Instant::now() + DEAD_WITHIN;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match wait(&self.pidfd, left) {
                Ok(true) => return true,
                Ok(false) if left.is_zero() => return false,
                Ok(false) | Err(_) => {}
            }
        }
    }

    fn is_alive(&self) -> io::Result<bool> {
        wait(&self.pidfd, Duration::ZERO).map(|dead| !dead)
    }
}

/// Whether a process ends within that time.
pub(crate) fn wait(pidfd: &OwnedFd, time: Duration) -> io::Result<bool> {
    let time = Timespec::try_from(time).map_err(|_| io::ErrorKind::InvalidInput)?;
    let mut fds = [PollFd::new(pidfd, PollFlags::IN)];
    Ok(rustix::io::retry_on_intr(|| poll(&mut fds, Some(&time)))? > 0)
}
