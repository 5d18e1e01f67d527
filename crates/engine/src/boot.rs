//! Starting a sandbox's init: its descriptors, its boot document, the spawner; then its order and its answer.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use osb_confine::mount::{Change, set_attributes};
use osb_protocol::boot::{Boot, BootFds, Started, UsageFds};
use rustix::fs::{CWD, MemfdFlags, SealFlags};
use rustix::mount::{OpenTreeFlags, open_tree};
use rustix::net::RecvFlags;
use serde::Serialize;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::helper::child::STAGES;
use crate::helper::message::{Outcome, Spawn};
use crate::helper::preparer::SESSIONS;
use crate::helper::spawners::{Lost, Spawners};
use crate::identity::Identity;
use crate::slot::{Maker, Ready};
use crate::standby::Standby;
use crate::sys::scm;

/// Number that the first descriptor gets; the boot document is the first.
const FIRST: i32 = 3;
/// Least size of `/dev/shm`.
const SHM_LEAST: u64 = 64 << 20;

/// Descriptors for the daemon, in the order of their numbers.
struct Kept<'a> {
    fds: Vec<BorrowedFd<'a>>,
}

impl<'a> Kept<'a> {
    /// The first is left out: it is the document that names the others.
    fn number(&mut self, fd: BorrowedFd<'a>) -> i32 {
        self.fds.push(fd);
        FIRST + i32::try_from(self.fds.len()).unwrap_or(i32::MAX)
    }

    /// All of them behind the document.
    fn behind(self, document: BorrowedFd<'a>) -> Vec<BorrowedFd<'a>> {
        let mut all = Vec::with_capacity(self.fds.len() + 12);
        all.push(document);
        all.extend(self.fds);
        all
    }
}

/// Lays out the daemon's descriptors.
fn lay_out<'a>(
    ready: &'a Ready,
    orders: BorrowedFd<'a>,
    uppers: Option<BorrowedFd<'a>>,
) -> (BootFds, Kept<'a>) {
    let mut kept = Kept { fds: Vec::with_capacity(16) };
    let listen = kept.number(ready.listener.as_fd());
    let orders = kept.number(orders);
    let ended = kept.number(ready.ended.as_fd());
    let log = kept.number(ready.log.as_fd());
    let cgroups = &ready.slot.cgroups;
    let work_cgroup = cgroups.work.iter().map(|fd| kept.number(fd.as_fd())).collect();
    let [cpuacct_usage, cpu_stat, memory_current, memory_stat, oom_events] =
        cgroups.usage_fds().map(|fd| fd.map(|fd| kept.number(fd)));
    let usage = UsageFds { cpuacct_usage, cpu_stat, memory_current, memory_stat, oom_events };
    let uppers = uppers.map(|fd| kept.number(fd));
    (BootFds { listen, orders, ended, log, work_cgroup, uppers, usage }, kept)
}

/// A document in memory that nobody can change.
pub(crate) fn document(content: &impl Serialize) -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("boot", flags | MemfdFlags::NOEXEC_SEAL)
        .or_else(|_| rustix::fs::memfd_create("boot", flags))?;
    let mut file = File::from(fd);
    file.write_all(&serde_json::to_vec(content)?)?;
    rustix::fs::fcntl_add_seals(
        &file,
        SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE,
    )?;
    Ok(file.into())
}

/// Size of `/dev/shm` in a sandbox with that memory.
pub(crate) fn shm_bytes(memory_bytes: u64) -> u64 {
    (memory_bytes / 2).max(SHM_LEAST)
}

/// Waits for init's answer to its order. `None`: it died without one.
pub(crate) async fn started(orders: &AsyncFd<OwnedFd>) -> io::Result<Option<Started>> {
    // Not cleared: the answer takes one of these pages.
    let mut text = Vec::with_capacity(scm::MAX_BYTES);
    let receive = |socket: &OwnedFd| {
        let received = rustix::io::retry_on_intr(|| {
            rustix::net::recv(socket, rustix::buffer::spare_capacity(&mut text), RecvFlags::DONTWAIT)
        });
        Ok(received.map(drop)?)
    };
    match orders.async_io(Interest::READABLE, receive).await {
        Ok(_) if text.is_empty() => Ok(None),
        Ok(_) => Ok(Some(serde_json::from_slice(&text)?)),
        Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Ok(None),
        Err(error) => Err(error),
    }
}

/// Why there is no init.
#[derive(Debug)]
pub(crate) enum NotBooted {
    /// This could not be done; no process is left.
    Machine(&'static str, io::Error),
    /// This stage of the start failed with that error number; no process is left.
    Stage(String, i32),
    /// A spawner died meanwhile. Processes may be in the slot.
    Unknown,
}

/// Starts inits.
#[derive(Debug)]
pub(crate) struct Booter {
    pub(crate) maker: Arc<Maker>,
    pub(crate) spawners: Arc<Spawners>,
    pub(crate) boot_id: String,
    pub(crate) listen_tcp: bool,
}

impl Booter {
    /// A mount of the directory for changes of isolated sessions, attached nowhere.
    fn uppers(&self, ready: &Ready) -> io::Result<OwnedFd> {
        let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
        let tree = open_tree(CWD, self.maker.dir(ready.id).join(SESSIONS), flags)?;
        let quiet = libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV;
        set_attributes(tree.as_fd(), c"", Change { set: quiet, ..Change::default() })?;
        Ok(tree)
    }

    /// Starts init in a ready slot. Adds to `stages` where the time went: name and microseconds.
    pub(crate) async fn boot(
        &self,
        ready: &mut Ready,
        shm_bytes: u64,
        stages: &mut Vec<(&'static str, u32)>,
    ) -> Result<Standby, NotBooted> {
        let machine = |action| move |error| NotBooted::Machine(action, error);
        let (orders, theirs) = scm::pair().map_err(machine("make a socket"))?;
        let uppers =
            self.uppers(ready).map_err(machine("open the place for changes of isolated sessions"))?;
        let (fds, kept) = lay_out(ready, theirs.as_fd(), Some(uppers.as_fd()));
        let number = fds.uppers;
        let document = document(&Boot { listen_tcp: self.listen_tcp, may_build: true, fds })
            .map_err(machine("write the boot document"))?;
        let mut all = kept.behind(document.as_fd());
        let keep = all.len();
        let slot = &ready.slot;
        all.push(slot.net.netns.as_fd());
        all.extend(slot.user_namespace.iter().map(AsFd::as_fd));
        all.extend(ready.overlays.iter().map(AsFd::as_fd));
        all.extend(slot.cgroups.attach.iter().map(AsFd::as_fd));
        all.extend(slot.cgroups.born_in.iter().map(AsFd::as_fd));
        let spawn = Spawn {
            seq: 0,
            hostname: ready.id.short(),
            shm_bytes,
            root_id: self.maker.root_id(slot),
            keep,
            mounts: ready.image.roots.iter().map(|root| root.mountpoint.clone()).collect(),
            attach: slot.cgroups.attach.len(),
            born_in: slot.cgroups.born_in.is_some(),
            uppers: number,
        };
        let sent = Instant::now();
        let (spawned, pidfd) = match self.spawners.request(spawn, &all).await {
            Ok(reply) => reply,
            Err(Lost::NotSent(error)) => return Err(NotBooted::Machine("ask a spawner", error)),
            Err(Lost::Unknown) => return Err(NotBooted::Unknown),
        };
        let (pid, pidfd) = match (spawned.outcome, pidfd) {
            (Outcome::Running { pid }, Some(pidfd)) => (pid, pidfd),
            (Outcome::Failed { step, errno }, None) => return Err(NotBooted::Stage(step, errno)),
            // It contradicts itself.
            _ => return Err(NotBooted::Unknown),
        };
        let inside: u32 = spawned.nanos.iter().sum::<u32>() / 1000;
        stages.push(("spawner", micros(sent).saturating_sub(inside)));
        stages.extend(STAGES.iter().zip(&spawned.nanos).map(|(name, nanos)| (*name, nanos / 1000)));
        let Ok(init) = Identity::of(pid, &pidfd, &self.boot_id) else { return Err(NotBooted::Unknown) };
        // The overlays live in the sandbox now, and must end with it.
        ready.overlays = Vec::new();
        Ok(Standby { init, pidfd, orders, shm_bytes, rehearsed: false })
    }
}

/// Time since then, for the table of stages.
pub(crate) fn micros(since: Instant) -> u32 {
    u32::try_from(since.elapsed().as_micros()).unwrap_or(u32::MAX)
}
