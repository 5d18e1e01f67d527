//! Finds and ends everything that a command has started, also what has left its process group and session.
//!
//! A process that calls `setsid` and loses its parent has no visible tie to the command any more, and a cgroup
//! per command cannot be made from inside a sandbox. So a command carries a mark that every descendant inherits
//! over fork, exec and change of user, and that anybody may read: its soft limit of real-time CPU time
//! (`RLIMIT_RTTIME`), set to a number far beyond any use. Processes are held by descriptor, never by number
//! alone: a number may be taken by another process at any moment.

use std::collections::HashSet;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Signal, pidfd_send_signal};

use super::spawn::open_pidfd;

/// All marks have this bit: about 146,000 years of CPU time, in microseconds.
const MARK: u64 = 1 << 62;

/// How long [`kill`] waits for processes that have been told to end and do not: only one inside a system call that
/// cannot be interrupted, or on a machine with far too much to do, needs more than an instant.
const KILL_PATIENCE: Duration = Duration::from_secs(5);
/// How long [`kill`] goes on altogether while processes end and others come in their place.
const KILL_LIMIT: Duration = Duration::from_secs(60);
/// At most this many descriptors of processes are held at a time; the daemon needs some for itself.
const MOST_HELD: usize = 512;

/// No process has a larger number.
const MOST_PROCESSES: i32 = 1 << 22;

/// Low bits of a mark in which the members of a family differ.
const FAMILY: u64 = (1 << 20) - 1;

/// Which marks are meant: one, or a family of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Marks {
    value: u64,
    mask: u64,
}

impl Marks {
    /// All marks that [`member`] makes of this one.
    #[must_use]
    pub fn family(tag: u64) -> Self {
        Self { value: tag & !FAMILY, mask: !FAMILY }
    }

    fn holds(self, mark: u64) -> bool {
        mark & self.mask == self.value
    }
}

impl From<u64> for Marks {
    fn from(tag: u64) -> Self {
        Self { value: tag, mask: u64::MAX }
    }
}

/// The mark of a family's member of that number. Numbers begin again after a million.
#[must_use]
pub fn member(tag: u64, number: u64) -> u64 {
    (tag & !FAMILY) | (number & FAMILY)
}

/// Gives a child that has not been reaped another mark, which what it starts from then on inherits.
///
/// # Errors
/// The child runs as somebody else and this process may not set others' limits.
pub fn retag(pid: i32, tag: u64) -> io::Result<()> {
    let mut limit = libc::rlimit64 { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the pointers are to a local that lives during the calls.
    let result = unsafe {
        let (resource, none) = (libc::RLIMIT_RTTIME, std::ptr::null::<libc::rlimit64>());
        libc::syscall(libc::SYS_prlimit64, pid, resource, none, &raw mut limit);
        limit.rlim_cur = tag;
        let none = std::ptr::null_mut::<libc::rlimit64>();
        libc::syscall(libc::SYS_prlimit64, pid, resource, &raw const limit, none)
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

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

/// Sends a signal to every living process with the mark and hands their descriptors back, though not more than
/// [`MOST_HELD`]. Reads `/proc`: call it where that may block.
pub fn signal(marks: impl Into<Marks>, signal: Signal) -> io::Result<Vec<OwnedFd>> {
    let mut held = Vec::new();
    each(marks.into(), |_, process| {
        // One that has just ended needs no signal.
        let _ = pidfd_send_signal(&process, signal);
        if held.len() < MOST_HELD {
            held.push(process);
        }
    })?;
    Ok(held)
}

/// Asks every process with the mark to end. One that is stopped is continued, or it could not follow.
pub fn terminate(marks: impl Into<Marks>) -> io::Result<Vec<OwnedFd>> {
    let members = signal(marks, Signal::TERM)?;
    for member in &members {
        let _ = pidfd_send_signal(member, Signal::CONT);
    }
    Ok(members)
}

/// Kills every process with the mark and returns when none is left. Blocks.
///
/// # Errors
/// The list of processes cannot be read, or some processes are left after all.
pub fn kill(marks: impl Into<Marks>) -> io::Result<()> {
    let marks = marks.into();
    let end = Instant::now() + KILL_LIMIT;
    let mut forking = false;
    loop {
        // Programs that fork as fast as they are killed are held first. One that is held forks no more, but keeps
        // its place under the limit of processes, so that soon nothing can be forked at all.
        if forking {
            hold(marks, end)?;
        }
        let killed = signal(marks, Signal::KILL)?;
        let ended = wait(&killed, KILL_PATIENCE)?;
        // Commonly this look finds nothing; what it finds came up behind the first one.
        forking = count(marks)? > 0;
        if !forking {
            return Ok(());
        }
        if !ended || Instant::now() >= end {
            let message = "some processes of the command cannot be killed";
            return Err(io::Error::new(io::ErrorKind::TimedOut, message));
        }
    }
}

fn count(marks: impl Into<Marks>) -> io::Result<usize> {
    let mut count = 0;
    each(marks.into(), |_, _| count += 1)?;
    Ok(count)
}

/// Stops every process with the mark, until no new ones come up.
fn hold(marks: Marks, end: Instant) -> io::Result<()> {
    let mut known = HashSet::new();
    loop {
        let mut new = false;
        each(marks, |pid, process| {
            let _ = pidfd_send_signal(&process, Signal::STOP);
            new |= known.insert(pid);
        })?;
        if !new || Instant::now() >= end {
            return Ok(());
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

/// Hands over every living process with the mark.
fn each(marks: Marks, mut take: impl FnMut(i32, OwnedFd)) -> io::Result<()> {
    let mut look = |pid| {
        // Cheap look first; only what carries the mark is opened and looked at again.
        if !mark_of(pid).is_some_and(|mark| marks.holds(mark)) {
            return;
        }
        let Ok(process) = open_pidfd(pid) else { return };
        if mark_of(pid).is_some_and(|mark| marks.holds(mark)) && !has_ended(&process) {
            take(pid, process);
        }
    };
    let mut listed = false;
    if let Ok(entries) = std::fs::read_dir("/proc") {
        for entry in entries {
            let name = entry?.file_name();
            let Some(pid) = name.to_str().and_then(|name| name.parse::<i32>().ok()) else { continue };
            listed = true;
            look(pid);
        }
    }
    if !listed {
        // Not mounted: there is no list of processes but all numbers, which takes half a second.
        (1..=MOST_PROCESSES).for_each(look);
    }
    Ok(())
}

/// Whether the process is a zombie already: it then cannot do or be told anything.
fn has_ended(process: &OwnedFd) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut [PollFd::new(&process.as_fd(), PollFlags::IN)], Some(&now)).is_ok_and(|ready| ready > 0)
}

/// The mark of a process. Asked by a system call, which is much faster than a read of `/proc` and so leaves a process that is about to fork
/// and go the less time. For processes of other users that may not be allowed; the file may be read by all.
pub(crate) fn mark_of(pid: i32) -> Option<u64> {
    let mut limit = libc::rlimit64 { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the pointer is to a local that lives during the call, and nothing is set.
    let result = unsafe {
        let none = std::ptr::null::<libc::rlimit64>();
        libc::syscall(libc::SYS_prlimit64, pid, libc::RLIMIT_RTTIME, none, &raw mut limit)
    };
    match result {
        0 => Some(limit.rlim_cur),
        _ if io::Error::last_os_error().raw_os_error() == Some(libc::EPERM) => {
            let limits = std::fs::read_to_string(format!("/proc/{pid}/limits")).ok()?;
            let line = limits.lines().find_map(|line| line.strip_prefix("Max realtime timeout"))?;
            line.split_whitespace().next()?.parse().ok()
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::spawn::{Program, Stdio, spawn};
    use std::ffi::CString;

    fn start(script: &str) -> (u64, crate::process::spawn::Spawned) {
        let tag = tag(crate::random::uuid().as_u64_pair().1);
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
        (tag, spawn(&program, stdio, &[]).unwrap())
    }

    fn wait_for(tag: u64, least: usize) {
        let deadline = Instant::now() + Duration::from_secs(10);
        while count(tag).unwrap() < least {
            assert!(Instant::now() < deadline, "{} processes have come up", count(tag).unwrap());
            std::thread::yield_now();
        }
    }

    #[test]
    fn nothing_escapes_the_mark() {
        let script = "sleep 300 & (setsid sleep 301 &) ; setsid sh -c 'sleep 302 & exec sleep 303' & \
                      env -i setsid sleep 304 & echo ready; wait";
        let (tag, spawned) = start(script);
        wait_for(tag, 6);
        assert_eq!(count(tag).unwrap(), 6);
        kill(tag).unwrap();
        assert_eq!(count(tag).unwrap(), 0);
        let exit = crate::process::exit::wait_blocking(&spawned.pidfd).unwrap();
        assert_eq!(exit, Some(crate::process::exit::Exit::Signal(libc::SIGKILL)));
    }

    #[test]
    fn a_family_is_found_whole_and_its_members_apart() {
        let (first, spawned) = start("sleep 311 & read never < /dev/zero & wait");
        wait_for(first, 3);
        let second = member(first, 7);
        retag(spawned.pid, second).unwrap();
        assert_eq!((count(first).unwrap(), count(second).unwrap()), (2, 1));
        assert_eq!(count(Marks::family(second)).unwrap(), 3);
        kill(second).unwrap();
        assert_eq!(count(first).unwrap(), 2);
        kill(Marks::family(first)).unwrap();
        assert_eq!(count(Marks::family(first)).unwrap(), 0);
        let _ = crate::process::exit::wait_blocking(&spawned.pidfd).unwrap();
    }

    #[test]
    fn programs_that_fork_while_they_are_killed_are_all_killed() {
        // Eight loops that leave one process after another behind, each in a session of its own.
        let script = "for i in 1 2 3 4 5 6 7 8; do \
                      setsid sh -c 'while :; do setsid sleep 300 & sleep 0.002; done' & done; exec sleep 300";
        let (tag, spawned) = start(script);
        wait_for(tag, 30);
        // A busy machine may need more than one try; none of it may be left to fill the machine.
        assert!((0..5).any(|_| kill(tag).is_ok()));
        assert_eq!(count(tag).unwrap(), 0);
        let _ = crate::process::exit::wait_blocking(&spawned.pidfd).unwrap();
    }
}
