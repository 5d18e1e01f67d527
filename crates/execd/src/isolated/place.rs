//! The directory of a session's pipes, of which daemon and shell have different names.

use std::io::{self, Write as _};
use std::os::fd::OwnedFd;

use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Uid};

/// The directory. It is the session's memory and ends with it.
#[derive(Debug)]
pub(super) struct Place {
    dir: OwnedFd,
    /// Whom the pipes belong to, if not to the daemon.
    owner: Option<(u32, u32)>,
}

impl Place {
    pub(super) fn new(dir: OwnedFd, owner: Option<(u32, u32)>) -> Self {
        Self { dir, owner }
    }

    /// Makes a named pipe and opens it. A new one has no earlier writers.
    pub(super) fn pipe(&self, name: &str, how: OFlags) -> io::Result<OwnedFd> {
        self.remove(name);
        rustix::fs::mknodat(&self.dir, name, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
        let flags = how | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let pipe = rustix::fs::openat(&self.dir, name, flags, Mode::empty())?;
        self.own(&pipe)?;
        Ok(pipe)
    }

    /// Leaves a text for the shell.
    pub(super) fn leave(&self, name: &str, text: &[u8]) -> io::Result<()> {
        self.remove(name);
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&self.dir, name, flags, Mode::RUSR | Mode::WUSR)?;
        self.own(&file)?;
        std::fs::File::from(file).write_all(text)
    }

    /// Takes a name away; who has it open keeps it.
    pub(super) fn remove(&self, name: &str) {
        let _ = rustix::fs::unlinkat(&self.dir, name, AtFlags::empty());
    }

    fn own(&self, fd: &OwnedFd) -> io::Result<()> {
        if let Some((uid, gid)) = self.owner {
            rustix::fs::fchown(fd, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)))?;
        }
        Ok(())
    }
}
