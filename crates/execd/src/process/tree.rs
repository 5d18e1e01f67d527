//! Finds and ends everything that a command has started, also what has left its process group and session.
//!
//! A process that calls `setsid` and loses its parent has no visible tie to the command any more, and a cgroup
//! per command cannot be made from inside a sandbox. So a command carries a mark that every descendant inherits
//! over fork, exec and change of user, and that anybody may read: its soft limit of real-time CPU time
//! (`RLIMIT_RTTIME`), set to a number far beyond any use. Processes are held by descriptor, never by number
//! alone: a number may be taken by another process at any moment.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Signal, pidfd_send_signal};

use super::spawn::open_pidfd;

/// All marks have this bit: about 146,000 years of CPU time, in microseconds.
const MARK: u64 = 1 << 62;

/// How long [`kill`] tries. Each pass catches what was forked while the one before went on; only a process inside
/// a system call that cannot be interrupted needs more than an instant.
const KILL_LIMIT: Duration = Duration::from_secs(5);

/// A mark made of an id's random bits.
#[must_use]
pub fn tag(random: u64) -> u64 {
    MARK | (random & (MARK - 1))
}

/// Marks the calling process. Only a system call; used between clone and exec.
pub(super) fn apply_tag(tag: u64) {
    // SAFETY: both pointers are to a local that lives during the calls. The hard limit stays as it is.
    unsafe {
        let mut limit = libc::rlimit64 { rlim_cur: 0, rlim_max: 0 };
        let resource = libc::RLIMIT_RTTIME;
        libc::syscall(libc::SYS_prlimit64, 0, resource, std::ptr::null::<libc::rlimit64>(), &raw mut limit);
        limit.rlim_cur = tag;
        libc::syscall(
            libc::SYS_prlimit64,
            0,
            resource,
            &raw const limit,
            std::ptr::null_mut::<libc::rlimit64>(),
        );
    }
}

/// Sends a signal to every living process with the mark and hands their descriptors back. Reads `/proc`: call it
/// where that may block.
pub fn signal(tag: u64, signal: Signal) -> io::Result<Vec<OwnedFd>> {
    let members = members(tag)?;
    for member in &members {
        // One that has just ended needs no signal.
        let _ = pidfd_send_signal(member, signal);
    }
    Ok(members)
}

/// Asks every process with the mark to end. One that is stopped is continued, or it could not follow.
pub fn terminate(tag: u64) -> io::Result<Vec<OwnedFd>> {
    let members = signal(tag, Signal::TERM)?;
    for member in &members {
        let _ = pidfd_send_signal(member, Signal::CONT);
    }
    Ok(members)
}

/// Kills every process with the mark and returns when none is left. Blocks.
pub fn kill(tag: u64) -> io::Result<()> {
    let end = Instant::now() + KILL_LIMIT;
    loop {
        let killed = signal(tag, Signal::KILL)?;
        if killed.is_empty() {
            return Ok(());
        }
        wait(&killed, end.saturating_duration_since(Instant::now()))?;
        if Instant::now() >= end {
            return Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "processes of the command keep coming back or cannot be killed",
            ));
        }
    }
}

/// Waits until all have ended; `false` when some have not after `limit`. Blocks.
pub fn wait(processes: &[OwnedFd], limit: Duration) -> io::Result<bool> {
    let end = Instant::now() + limit;
    for process in processes {
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let timeout = Timespec::try_from(left).map_err(io::Error::other)?;
            match poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&timeout)) {
                Ok(0) => return Ok(false),
                Ok(_) => break,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(true)
}

fn members(tag: u64) -> io::Result<Vec<OwnedFd>> {
    let mut members = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse::<i32>().ok()) else { continue };
        // Cheap look first; only what carries the mark is opened and looked at again.
        if mark_of(pid) != Some(tag) {
            continue;
        }
        let Ok(process) = open_pidfd(pid) else { continue };
        if mark_of(pid) == Some(tag) && !has_ended(&process) {
            members.push(process);
        }
    }
    Ok(members)
}

/// Whether the process is a zombie already: it then cannot do or be told anything.
fn has_ended(process: &OwnedFd) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut [PollFd::new(&process.as_fd(), PollFlags::IN)], Some(&now)).is_ok_and(|ready| ready > 0)
}

fn mark_of(pid: i32) -> Option<u64> {
    let limits = std::fs::read_to_string(format!("/proc/{pid}/limits")).ok()?;
    let line = limits.lines().find_map(|line| line.strip_prefix("Max realtime timeout"))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::spawn::{Program, Stdio, spawn};
    use std::ffi::CString;

    #[test]
    fn nothing_escapes_the_mark() {
        let tag = tag(uuid::Uuid::new_v4().as_u64_pair().1);
        let script = "sleep 300 & (setsid sleep 301 &) ; setsid sh -c 'sleep 302 & exec sleep 303' & \
                      env -i setsid sleep 304 & echo ready; wait";
        let text = |text: &str| CString::new(text).unwrap();
        let program = Program {
            candidates: vec![text("/bin/sh")],
            argv: vec![text("sh"), text("-c"), text(script)],
            env: vec![text("PATH=/usr/bin:/bin")],
            cwd: text("/"),
            identity: None,
            tag: Some(tag),
        };
        let null = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null").unwrap();
        let stdio = Stdio { stdin: null.as_fd(), stdout: null.as_fd(), stderr: null.as_fd() };
        let spawned = spawn(&program, stdio, &[]).unwrap();
        let deadline = Instant::now() + Duration::from_secs(10);
        while members(tag).unwrap().len() < 6 && Instant::now() < deadline {
            std::thread::yield_now();
        }
        assert_eq!(members(tag).unwrap().len(), 6);
        kill(tag).unwrap();
        assert_eq!(members(tag).unwrap().len(), 0);
        let exit = crate::process::exit::wait_blocking(&spawned.pidfd).unwrap();
        assert_eq!(exit, Some(crate::process::exit::Exit::Signal(libc::SIGKILL)));
    }
}
