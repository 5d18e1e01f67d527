//! What a starting daemon is handed: its boot document, its descriptors, and the pipe it reports through.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use osb_protocol::boot::{Boot, BootFds, Started, UsageFds};
use rustix::fs::{MemfdFlags, SealFlags};
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;

use crate::slot::Ready;

/// Number that the first descriptor gets; the boot document is the first.
const FIRST: i32 = 3;
/// Longest first word of init.
const STARTED_BYTES: u64 = 64 << 10;

/// Descriptors for the daemon, in the order of their numbers.
pub(crate) struct Kept<'a> {
    fds: Vec<BorrowedFd<'a>>,
}

impl<'a> Kept<'a> {
    /// The first is left out: it is the document that names the others.
    fn number(&mut self, fd: BorrowedFd<'a>) -> i32 {
        self.fds.push(fd);
        FIRST + i32::try_from(self.fds.len()).unwrap_or(i32::MAX)
    }

    /// All of them behind the document.
    pub(crate) fn behind(self, document: BorrowedFd<'a>) -> Vec<BorrowedFd<'a>> {
        let mut all = Vec::with_capacity(self.fds.len() + 12);
        all.push(document);
        all.extend(self.fds);
        all
    }
}

/// Lays out the daemon's descriptors.
pub(crate) fn lay_out<'a>(ready: &'a Ready, started: BorrowedFd<'a>) -> (BootFds, Kept<'a>) {
    let mut kept = Kept { fds: Vec::with_capacity(16) };
    let listen = kept.number(ready.listener.as_fd());
    let started = kept.number(started);
    let ended = kept.number(ready.ended.as_fd());
    let log = kept.number(ready.log.as_fd());
    let cgroups = &ready.slot.cgroups;
    let work_cgroup = cgroups.work.iter().map(|fd| kept.number(fd.as_fd())).collect();
    let [cpuacct_usage, cpu_stat, memory_current, memory_stat, oom_events] =
        cgroups.usage_fds().map(|fd| fd.map(|fd| kept.number(fd)));
    let usage = UsageFds { cpuacct_usage, cpu_stat, memory_current, memory_stat, oom_events };
    (BootFds { listen, started, ended, log, work_cgroup, usage }, kept)
}

/// The document in memory that nobody can change.
pub(crate) fn document(boot: &Boot) -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("boot", flags | MemfdFlags::NOEXEC_SEAL)
        .or_else(|_| rustix::fs::memfd_create("boot", flags))?;
    let mut file = File::from(fd);
    file.write_all(&serde_json::to_vec(boot)?)?;
    rustix::fs::seek(&file, rustix::fs::SeekFrom::Start(0))?;
    rustix::fs::fcntl_add_seals(
        &file,
        SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE,
    )?;
    Ok(file.into())
}

/// The pipe for init's first word. Must be called within a tokio runtime.
pub(crate) fn started_pipe() -> io::Result<(pipe::Receiver, OwnedFd)> {
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    rustix::io::ioctl_fionbio(&read, true)?;
    Ok((pipe::Receiver::from_owned_fd_unchecked(read)?, write))
}

/// Waits for init's first word. `None`: it died without one.
pub(crate) async fn started(pipe: pipe::Receiver) -> io::Result<Option<Started>> {
    let mut pipe = pipe.take(STARTED_BYTES);
    let mut text = Vec::with_capacity(128);
    // Init closes its end behind the line, but a descriptor might linger in a child of its: the line end counts.
    while !text.contains(&b'\n') {
        if pipe.read_buf(&mut text).await? == 0 {
            break;
        }
    }
    if text.is_empty() {
        return Ok(None);
    }
    let line = text.split(|byte| *byte == b'\n').next().unwrap_or_default();
    Ok(Some(serde_json::from_slice(line)?))
}
