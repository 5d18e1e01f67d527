//! Control groups of sandboxes.
//!
//! Each slot has one group per hierarchy, `opensandbox-INSTANCE/SLOT`, in which init and the daemon live, and
//! below it `work`, with the limits of memory and processes, for entrypoint and commands. So what happens in the
//! work (a fork bomb, running out of memory) does not take the daemon. Groups are kept when a slot is used again.

mod layout;

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

pub(crate) use layout::{Layout, discover};

use crate::config::Limits;

/// What init and the daemon may take beyond the limit of the work.
const MEMORY_RESERVE: u64 = 256 << 20;
const PIDS_RESERVE: u32 = 64;
/// Period over which CPU time is shared out, in microseconds, and the least the kernel takes of it.
const CPU_PERIOD: u64 = 100_000;
const CPU_LEAST: u64 = 1_000;

/// Memory that groups may still be charged with when they are used again.
const MEMORY_LEFT: u64 = 4 << 20;

const WORK: &str = "work";
/// On version 2 processes may only be in leaves.
const INIT: &str = "init";

/// The groups of all slots of one engine.
#[derive(Debug, Clone)]
pub(crate) struct Cgroups {
    layout: Layout,
    /// Name of the directory in each hierarchy.
    name: String,
}

/// The groups of one slot, with everything open that a start needs.
#[derive(Debug)]
pub(crate) struct CgroupSet {
    /// The child writes `0` into each.
    pub(crate) attach: Vec<OwnedFd>,
    /// The child is born in this group.
    pub(crate) born_in: Option<OwnedFd>,
    /// Entrypoint and commands write `0` into each.
    pub(crate) work: Vec<OwnedFd>,
    pub(crate) usage: Usage,
    /// What the files say, if we know.
    limits: Option<Limits>,
    /// Whether all in them have been killed at once.
    killed: bool,
}

/// Statistics files, see [`osb_protocol::boot::UsageFds`].
#[derive(Debug)]
pub(crate) struct Usage {
    pub(crate) cpuacct_usage: Option<OwnedFd>,
    pub(crate) cpu_stat: Option<OwnedFd>,
    pub(crate) memory_current: Option<OwnedFd>,
    pub(crate) memory_stat: Option<OwnedFd>,
    pub(crate) oom_events: Option<OwnedFd>,
}

impl Cgroups {
    /// Makes this engine's directories; nothing of them is left on an error.
    pub(crate) fn new(layout: Layout, instance: &str) -> io::Result<Self> {
        let groups = Self { layout, name: format!("opensandbox-{instance}") };
        groups.make_bases().inspect_err(|_| groups.remove_bases())?;
        Ok(groups)
    }

    fn make_bases(&self) -> io::Result<()> {
        for base in self.bases() {
            make_dir(&base).map_err(explain)?;
        }
        if let Layout::V2 { root } = &self.layout {
            // From the top down: a group can only pass on what it has been given.
            enable(root).map_err(explain)?;
            enable(&root.join(&self.name))?;
        }
        Ok(())
    }

    /// Does what a sandbox needs, in groups that are gone afterwards.
    pub(crate) fn try_out(layout: Layout) -> io::Result<()> {
        let groups = Self::new(layout, &format!("check-{}", std::process::id()))?;
        let tried = groups.make(0).and_then(|mut set| groups.limit(0, &mut set, Limits::default()));
        let removed = groups.remove(0);
        groups.remove_bases();
        tried.and(removed)
    }

    fn bases(&self) -> Vec<PathBuf> {
        self.layout.roots().into_iter().map(|root| root.join(&self.name)).collect()
    }

    fn base(&self, root: &Path) -> PathBuf {
        root.join(&self.name)
    }

    /// Makes, or finds, the groups of a slot.
    pub(crate) fn make(&self, slot: u32) -> io::Result<CgroupSet> {
        let name = slot.to_string();
        let dir = |root: &Path| self.base(root).join(&name);
        let set = match &self.layout {
            Layout::V1 { memory, cpuacct, pids, unified, .. } => {
                for root in self.layout.roots() {
                    make_dir(&dir(root))?;
                }
                make_dir(&dir(memory).join(WORK))?;
                make_dir(&dir(pids).join(WORK))?;
                let mut attach = Vec::new();
                for root in self.layout.v1_roots() {
                    attach.push(open_write(&dir(root).join("tasks"))?);
                }
                let mut work = vec![open_write(&dir(memory).join(WORK).join("tasks"))?];
                if pids != memory {
                    work.push(open_write(&dir(pids).join(WORK).join("tasks"))?);
                }
                CgroupSet {
                    attach,
                    born_in: unified.as_ref().map(|root| open_dir(&dir(root))).transpose()?,
                    work,
                    usage: Usage {
                        cpuacct_usage: Some(open_read(&dir(cpuacct).join("cpuacct.usage"))?),
                        cpu_stat: None,
                        memory_current: Some(open_read(
                            &dir(memory).join(WORK).join("memory.usage_in_bytes"),
                        )?),
                        memory_stat: Some(open_read(&dir(memory).join(WORK).join("memory.stat"))?),
                        oom_events: Some(open_read(&dir(memory).join(WORK).join("memory.oom_control"))?),
                    },
                    limits: None,
                    killed: false,
                }
            }
            Layout::V2 { root } => {
                let dir = dir(root);
                make_dir(&dir)?;
                enable(&dir)?;
                for leaf in [INIT, WORK] {
                    make_dir(&dir.join(leaf))?;
                }
                CgroupSet {
                    attach: Vec::new(),
                    born_in: Some(open_dir(&dir.join(INIT))?),
                    work: vec![open_write(&dir.join(WORK).join("cgroup.procs"))?],
                    usage: Usage {
                        cpuacct_usage: None,
                        cpu_stat: Some(open_read(&dir.join("cpu.stat"))?),
                        memory_current: Some(open_read(&dir.join(WORK).join("memory.current"))?),
                        memory_stat: Some(open_read(&dir.join(WORK).join("memory.stat"))?),
                        oom_events: Some(open_read(&dir.join(WORK).join("memory.events"))?),
                    },
                    limits: None,
                    killed: false,
                }
            }
        };
        Ok(set)
    }

    /// Writes limits, unless they are as they should be.
    pub(crate) fn limit(&self, slot: u32, set: &mut CgroupSet, limits: Limits) -> io::Result<()> {
        if set.limits == Some(limits) {
            return Ok(());
        }
        set.limits = None;
        let name = slot.to_string();
        let dir = |root: &Path| self.base(root).join(&name);
        let quota = (limits.cpu_nanos / (1_000_000_000 / CPU_PERIOD)).max(CPU_LEAST);
        let whole_memory = limits.memory_bytes.saturating_add(MEMORY_RESERVE);
        let whole_pids = limits.pids.saturating_add(PIDS_RESERVE);
        match &self.layout {
            Layout::V1 { memory, cpu, pids, .. } => {
                memory_v1(&dir(memory), whole_memory)?;
                memory_v1(&dir(memory).join(WORK), limits.memory_bytes)?;
                write(&dir(cpu).join("cpu.cfs_period_us"), CPU_PERIOD)?;
                write(&dir(cpu).join("cpu.cfs_quota_us"), quota)?;
                write(&dir(pids).join("pids.max"), whole_pids)?;
                write(&dir(pids).join(WORK).join("pids.max"), limits.pids)?;
            }
            Layout::V2 { root } => {
                let dir = dir(root);
                write(&dir.join("cpu.max"), format!("{quota} {CPU_PERIOD}"))?;
                for (dir, memory, pids) in [
                    (dir.clone(), whole_memory, whole_pids),
                    (dir.join(WORK), limits.memory_bytes, limits.pids),
                ] {
                    write(&dir.join("memory.max"), memory)?;
                    // Absent where the kernel has no swap.
                    optional(write(&dir.join("memory.swap.max"), 0))?;
                    write(&dir.join("pids.max"), pids)?;
                }
            }
        }
        set.limits = Some(limits);
        Ok(())
    }

    /// Makes the groups fit for another sandbox. False: they must be made anew.
    pub(crate) fn recycle(&self, slot: u32, set: &mut CgroupSet) -> bool {
        if set.killed {
            // Kernels take what is born into a group that was ever killed for a fork that escaped, and kill it too.
            return false;
        }
        if set.oom_kills() != Some(0) {
            // The count cannot be set back, and the daemon reads it as this sandbox's.
            return false;
        }
        if set.memory().is_none_or(|bytes| bytes > MEMORY_LEFT) {
            // What is cached on account of the last sandbox would count against the next one, and be seen by it.
            return false;
        }
        match &self.layout {
            Layout::V1 { cpuacct, .. } => {
                write(&self.base(cpuacct).join(slot.to_string()).join("cpuacct.usage"), 0).is_ok()
            }
            Layout::V2 { .. } => true,
        }
    }

    /// Kills what is in the groups of a slot, all at once where the kernel can.
    pub(crate) fn kill(&self, slot: u32, set: &mut CgroupSet) {
        set.killed = true;
        let name = slot.to_string();
        let group = |root: &Path| self.base(root).join(&name);
        match &self.layout {
            Layout::V1 { unified: Some(root), .. } | Layout::V2 { root } => kill_all(&group(root)),
            // Init and daemon are in the upper one.
            Layout::V1 { pids, unified: None, .. } => {
                for dir in [group(pids).join(WORK), group(pids)] {
                    kill_all(&dir);
                }
            }
        }
    }

    /// Kills what is in the groups of a slot and removes them. Blocks until all is gone, at most ten seconds.
    pub(crate) fn remove(&self, slot: u32) -> io::Result<()> {
        let name = slot.to_string();
        let deadline = Instant::now() + Duration::from_secs(10);
        let dirs: Vec<PathBuf> = self
            .bases()
            .into_iter()
            .flat_map(|base| [base.join(&name).join(WORK), base.join(&name).join(INIT), base.join(&name)])
            .collect();
        loop {
            let mut busy = None;
            for dir in &dirs {
                match std::fs::remove_dir(dir) {
                    Ok(()) => {}
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    Err(error) => busy = Some(error),
                }
            }
            let Some(error) = busy else { return Ok(()) };
            if Instant::now() > deadline {
                return Err(error);
            }
            for dir in &dirs {
                kill_all(dir);
            }
            // The kernel tells nobody when a v1 group has become empty.
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Slots that have a group.
    pub(crate) fn slots(&self) -> Vec<u32> {
        let mut slots = Vec::new();
        for base in self.bases() {
            let Ok(entries) = std::fs::read_dir(base) else { continue };
            slots.extend(
                entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok()),
            );
        }
        slots.sort_unstable();
        slots.dedup();
        slots
    }

    /// Removes the engine's own directories; succeeds only when no slot is left.
    pub(crate) fn remove_bases(&self) {
        for base in self.bases() {
            let _ = std::fs::remove_dir(base);
        }
    }
}

impl CgroupSet {
    /// Bytes that the work's group is charged with.
    fn memory(&self) -> Option<u64> {
        let mut buffer = [0; 32];
        let len = rustix::io::pread(self.usage.memory_current.as_ref()?, &mut buffer, 0).ok()?;
        std::str::from_utf8(&buffer[..len]).ok()?.trim().parse().ok()
    }

    /// Kills by the out-of-memory killer in this sandbox's work: groups with any are not used again.
    pub(crate) fn oom_kills(&self) -> Option<u64> {
        let mut buffer = [0; 1024];
        let len = rustix::io::pread(self.usage.oom_events.as_ref()?, &mut buffer, 0).ok()?;
        let text = std::str::from_utf8(&buffer[..len]).ok()?;
        text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
    }

    /// The descriptors for the daemon, in the order of [`Usage`], with a note of which are there.
    pub(crate) fn usage_fds(&self) -> [Option<BorrowedFd<'_>>; 5] {
        let usage = &self.usage;
        [&usage.cpuacct_usage, &usage.cpu_stat, &usage.memory_current, &usage.memory_stat, &usage.oom_events]
            .map(|fd| fd.as_ref().map(AsFd::as_fd))
    }
}

/// The kernel wants limit ≤ limit with swap at every moment, so the order depends on the direction.
fn memory_v1(dir: &Path, bytes: u64) -> io::Result<()> {
    let (plain, with_swap) = (dir.join("memory.limit_in_bytes"), dir.join("memory.memsw.limit_in_bytes"));
    if !with_swap.exists() {
        return write(&plain, bytes);
    }
    if write(&plain, bytes).is_ok() {
        return write(&with_swap, bytes);
    }
    write(&with_swap, bytes)?;
    write(&plain, bytes)
}

/// Passes the controllers on to the children of a version 2 group.
fn enable(dir: &Path) -> io::Result<()> {
    write(&dir.join("cgroup.subtree_control"), "+cpu +memory +pids")
}

/// Says what to do about what stands in the way of the first groups.
fn explain(error: io::Error) -> io::Error {
    let remedy = match error.kind() {
        io::ErrorKind::ReadOnlyFilesystem => {
            ": make it writable with 'mount -o remount,rw'; in a container, run that privileged"
        }
        io::ErrorKind::ResourceBusy => {
            ": processes of this container are in its topmost group, where the kernel wants none; move them into one \
             below it, or start the server outside of the container"
        }
        _ => return error,
    };
    io::Error::new(error.kind(), format!("{error}{remedy}"))
}

fn kill_all(dir: &Path) {
    if write(&dir.join("cgroup.kill"), 1).is_ok() {
        return;
    }
    let Ok(text) = std::fs::read_to_string(dir.join("cgroup.procs")) else { return };
    for pid in text.lines().filter_map(|line| line.parse().ok()).filter_map(rustix::process::Pid::from_raw) {
        // Between reading and killing the number may pass to another process only after ours is gone, and the
        // kernel gives numbers out in a circle; a pidfd would have the same gap.
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }
}

fn make_dir(path: &Path) -> io::Result<()> {
    match std::fs::create_dir(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(with_path(error, path)),
        _ => Ok(()),
    }
}

fn write(path: &Path, value: impl ToString) -> io::Result<()> {
    let mut file = File::options().write(true).open(path).map_err(|error| with_path(error, path))?;
    file.write_all(value.to_string().as_bytes()).map_err(|error| with_path(error, path))
}

fn optional(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

fn open_write(path: &Path) -> io::Result<OwnedFd> {
    Ok(File::options().write(true).open(path).map_err(|error| with_path(error, path))?.into())
}

fn open_read(path: &Path) -> io::Result<OwnedFd> {
    Ok(File::open(path).map_err(|error| with_path(error, path))?.into())
}

fn open_dir(path: &Path) -> io::Result<OwnedFd> {
    open_read(path)
}

fn with_path(error: io::Error, path: &Path) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}
