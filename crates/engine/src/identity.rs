//! Telling whether a process is the one it was: process ids come round again.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde::{Deserialize, Serialize};

/// File system of pidfds on kernels where each process has an inode of its own.
const PIDFS_MAGIC: u64 = 0x5049_4446;

/// A process, for all time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Identity {
    pid: i32,
    /// Number that no other process has until the machine boots again; absent on kernels before 6.9.
    inode: Option<u64>,
    /// Start in clock ticks since boot; read only where there is no inode, for it costs twenty times as much.
    start: Option<u64>,
    /// Which boot.
    boot: String,
}

/// The kernel's name for the time since the last boot.
pub(crate) fn boot_id() -> io::Result<String> {
    Ok(std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

impl Identity {
    /// Of a process that is alive, or dead and not yet waited for.
    pub(crate) fn of(pid: i32, pidfd: impl AsFd, boot: &str) -> io::Result<Self> {
        let inode = inode(&pidfd)?;
        let start = if inode.is_none() { Some(start(pid)?) } else { None };
        Ok(Self { pid, inode, start, boot: boot.to_owned() })
    }

    pub(crate) fn pid(&self) -> i32 {
        self.pid
    }

    pub(crate) fn is_of_boot(&self, boot: &str) -> bool {
        self.boot == boot
    }

    /// Opens the process, if it still lives.
    pub(crate) fn find(&self, boot: &str) -> Option<OwnedFd> {
        if self.boot != boot {
            return None;
        }
        let pidfd = pidfd_open(Pid::from_raw(self.pid)?, PidfdFlags::empty()).ok()?;
        // Compared after opening: from here on the descriptor cannot come to mean another process.
        let found = Self::of(self.pid, &pidfd, boot).ok()?;
        (found == *self).then_some(pidfd)
    }
}

fn inode(pidfd: impl AsFd) -> io::Result<Option<u64>> {
    let is_pidfs = u64::try_from(rustix::fs::fstatfs(&pidfd)?.f_type).is_ok_and(|magic| magic == PIDFS_MAGIC);
    if is_pidfs { Ok(Some(rustix::fs::fstat(&pidfd)?.st_ino)) } else { Ok(None) }
}

fn start(pid: i32) -> io::Result<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The name in parentheses may hold anything; the start is the twentieth field after it.
    text.rsplit_once(')')
        .and_then(|(_, rest)| rest.split_whitespace().nth(19))
        .and_then(|field| field.parse().ok())
        .ok_or_else(|| io::Error::other("the process's stat file has an unknown form"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_found_until_it_is_gone_and_never_mistaken() {
        let boot = boot_id().unwrap();
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let pidfd = pidfd_open(Pid::from_raw(pid).unwrap(), PidfdFlags::empty()).unwrap();
        let identity = Identity::of(pid, &pidfd, &boot).unwrap();
        assert!(identity.find(&boot).is_some());
        assert!(identity.find("another boot").is_none());
        let other =
            Identity { inode: identity.inode.map(|inode| inode + 1), start: Some(1), ..identity.clone() };
        assert!(other.find(&boot).is_none());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(identity.find(&boot).is_none());
        assert!(start(std::process::id().try_into().unwrap()).unwrap() > 0);
    }
}
