//! The first process of a session, and the shell that it starts.
//!
//! It has the session's shell as its child and so is the one that may signal it: the shell's number is its own until
//! this process has collected it. It ends when the shell ends or nobody holds the other end of its socket, and the
//! kernel ends everything else of the session with it.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CString, c_char};
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use osb_confine::seccomp::Filter;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::thread::{CapabilitySet, CapabilitySets, UnshareFlags};

use super::wire::{self, Answer, Fault, FaultKind, Plan, Who};

/// Asks the run in the foreground to end.
pub(in crate::isolated) const INTERRUPT: u8 = b'I';
/// Kills it, but not the shell, nor what descends from the processes whose numbers follow.
pub(in crate::isolated) const KILL: u8 = b'K';
/// Processes that can be spared at a time.
pub(in crate::isolated) const MOST_SPARED: usize = 256;

/// What root in a session may do with its files and processes, if the sandbox may.
const KEPT: [u32; 10] = [
    0,  // CHOWN
    1,  // DAC_OVERRIDE
    3,  // FOWNER
    4,  // FSETID
    5,  // KILL
    6,  // SETGID
    7,  // SETUID
    8,  // SETPCAP
    10, // NET_BIND_SERVICE
    31, // SETFCAP
];
const LAST_CAPABILITY: u32 = 63;
const AMBIENT_CLEAR_ALL: libc::c_ulong = 4;

/// The shell's process.
#[derive(Debug)]
pub(super) struct Shell {
    pid: i32,
}

/// What the first process of a session holds.
#[derive(Debug)]
pub(super) struct Inside {
    /// To the daemon.
    pub(super) control: OwnedFd,
    /// To the isolator.
    pub(super) report: OwnedFd,
    pub(super) shell: Shell,
    /// For the daemon.
    pub(super) fds: Vec<OwnedFd>,
}

/// Takes away what sessions have no use for, for good.
pub(super) fn confine(filter: &Filter, capabilities: u64) -> Result<(), Fault> {
    restrict(kept(capabilities)).map_err(Fault::doing("give capabilities up"))?;
    rustix::thread::set_no_new_privs(true).map_err(Fault::doing("forbid new privileges"))?;
    filter.install().map_err(Fault::doing("install the system call filter"))
}

/// Takes all but these out of the bounding set, for which a capability is needed.
fn bound(kept: u64) -> io::Result<()> {
    for number in 0..=LAST_CAPABILITY {
        // SAFETY: no memory is involved.
        let held = unsafe { libc::prctl(libc::PR_CAPBSET_READ, libc::c_ulong::from(number), 0, 0, 0) };
        // Beyond the kernel's last one.
        if held < 0 {
            break;
        }
        if kept >> number & 1 != 0 || held == 0 {
            continue;
        }
        // SAFETY: no memory is involved.
        if unsafe { libc::prctl(libc::PR_CAPBSET_DROP, libc::c_ulong::from(number), 0, 0, 0) } != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

fn restrict(kept: u64) -> io::Result<()> {
    bound(kept)?;
    // SAFETY: no memory is involved.
    if unsafe { libc::prctl(libc::PR_CAP_AMBIENT, AMBIENT_CLEAR_ALL, 0, 0, 0) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let own = CapabilitySet::from_bits_retain(kept) & rustix::thread::capabilities(None)?.permitted;
    let sets = CapabilitySets { effective: own, permitted: own, inheritable: CapabilitySet::empty() };
    Ok(rustix::thread::set_capabilities(None, sets)?)
}

/// What of these a session may have.
fn kept(capabilities: u64) -> u64 {
    KEPT.iter().fold(0, |set, number| set | 1 << number) & capabilities
}

/// Starts the shell; returns when it has been executed.
pub(super) fn start_shell(
    plan: &Plan,
    workspace: &Path,
    feed: &OwnedFd,
    filter: &Filter,
    capabilities: u64,
) -> Result<Shell, Fault> {
    let c_string = |bytes: &[u8]| {
        CString::new(bytes).map_err(|_| Fault::request("a variable or a path holds a NUL byte"))
    };
    let program = c_string(plan.shell.as_bytes())?;
    let argv = plan.argv.iter().map(|word| c_string(word.as_bytes())).collect::<Result<Vec<_>, _>>()?;
    let env = plan.env.iter().map(|entry| c_string(entry)).collect::<Result<Vec<_>, _>>()?;
    let pointers = |strings: &[CString]| -> Vec<*const c_char> {
        strings.iter().map(|string| string.as_ptr()).chain(std::iter::once(std::ptr::null())).collect()
    };
    let (argv, env) = (pointers(&argv), pointers(&env));
    let workspace = c_string(workspace.as_os_str().as_bytes())?;
    let null = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/null")
        .map_err(Fault::doing("open /dev/null"))?;
    let pipe =
        || rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).map_err(Fault::doing("make a pipe"));
    let (heard, told) = pipe()?;
    let (mapped, map) = pipe()?;
    // SAFETY: one thread, so the child finds every lock free and every structure whole.
    let pid = unsafe { libc::fork() };
    if pid < 0 {
        return Err(Fault::doing("start the shell")(io::Error::last_os_error()));
    }
    if pid == 0 {
        drop((heard, map));
        let fault = (|| -> Result<(), Fault> {
            rustix::process::setsid().map_err(Fault::doing("start a session"))?;
            for (number, fd) in [feed.as_raw_fd(), null.as_raw_fd(), null.as_raw_fd()].into_iter().enumerate()
            {
                // SAFETY: plain duplication onto the standard numbers, which no value here owns.
                if unsafe { libc::dup2(fd, number as i32) } < 0 {
                    return Err(Fault::doing("set the standard descriptors")(io::Error::last_os_error()));
                }
            }
            if matches!(plan.who, Who::Real { .. }) {
                // As a user it could not any more.
                bound(kept(capabilities)).map_err(Fault::doing("give capabilities up"))?;
            }
            become_user(plan.who, &told, &mapped)?;
            // Entered as the one who runs; a directory that he may not enter is no reason not to run.
            // SAFETY: a string that outlives the call.
            if unsafe { libc::chdir(workspace.as_ptr()) } != 0 {
                let _ = rustix::process::chdir("/");
            }
            let capabilities = if matches!(plan.who, Who::Seeming { .. }) { 0 } else { capabilities };
            confine(filter, capabilities)?;
            // SAFETY: three pointers to strings and null-terminated arrays that outlive the call.
            unsafe { libc::execve(program.as_ptr(), argv.as_ptr(), env.as_ptr()) };
            Err(Fault::request(format!(
                "the shell '{}' cannot be executed: {}",
                plan.shell,
                io::Error::last_os_error()
            )))
        })();
        if let Err(fault) = fault
            && let Ok(text) = serde_json::to_vec(&fault)
        {
            let _ = rustix::io::write(&told, &text);
        }
        // SAFETY: leaves without running anything of the parent's.
        unsafe { libc::_exit(127) }
    }
    drop((told, mapped));
    let mut text = Vec::new();
    loop {
        let mut piece = [0; 1024];
        match rustix::io::retry_on_intr(|| rustix::io::read(&heard, &mut piece)) {
            Ok(1) if text.is_empty() && piece[0] == b'm' => {
                if let Who::Seeming { uid, gid } = plan.who {
                    seem(pid, uid, gid).map_err(|error| Fault {
                        kind: FaultKind::Identity,
                        message: format!("the daemon's user cannot seem to be {uid}:{gid}: {error}"),
                    })?;
                }
                let _ = rustix::io::write(&map, &[0]);
            }
            Ok(length @ 1..) => text.extend_from_slice(&piece[..length]),
            _ => break,
        }
    }
    if text.is_empty() {
        Ok(Shell { pid })
    } else {
        Err(serde_json::from_slice(&text).unwrap_or_else(|_| Fault::request("the shell cannot be started")))
    }
}

fn become_user(who: Who, told: &OwnedFd, mapped: &OwnedFd) -> Result<(), Fault> {
    let refused = |action: &'static str| {
        move |error: rustix::io::Errno| Fault {
            kind: FaultKind::Identity,
            message: match error {
                rustix::io::Errno::INVAL => {
                    format!("{action}: not all of the ids are among those that the sandbox has")
                }
                error => format!("{action}: {}", io::Error::from(error)),
            },
        }
    };
    match who {
        Who::Daemon => Ok(()),
        Who::Real { uid, gid } => {
            let (user, group) = (rustix::process::Uid::from_raw(uid), rustix::process::Gid::from_raw(gid));
            rustix::thread::set_thread_groups(&[]).map_err(refused("clear the groups"))?;
            rustix::thread::set_thread_res_gid(group, group, group).map_err(refused("become the group"))?;
            rustix::thread::set_thread_res_uid(user, user, user).map_err(refused("become the user"))
        }
        Who::Seeming { .. } => {
            // SAFETY: one thread, and nothing in it relies on the old namespace.
            unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWUSER) }
                .map_err(refused("make a user namespace"))?;
            let _ = rustix::io::write(told, b"m");
            match rustix::io::retry_on_intr(|| rustix::io::read(mapped, &mut [0])) {
                Ok(1) => Ok(()),
                // The other side says why.
                // SAFETY: leaves without running anything of the parent's.
                _ => unsafe { libc::_exit(127) },
            }
        }
    }
}

/// Gives the new user namespace of `pid` its one user and group.
fn seem(pid: i32, uid: u32, gid: u32) -> io::Result<()> {
    let file = |name: &str| format!("/proc/{pid}/{name}");
    let (own, group) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    // Without the capability for it this is what lets a group be set at all.
    let _ = std::fs::write(file("setgroups"), "deny");
    std::fs::write(file("uid_map"), format!("{uid} {own} 1\n"))?;
    std::fs::write(file("gid_map"), format!("{gid} {group} 1\n"))
}

impl Inside {
    /// Is the session's first process until its end; gives the exit code.
    pub(super) fn run(self, filter: &Filter, capabilities: u64) -> i32 {
        let Self { control, report, shell, fds } = self;
        if let Err(fault) = confine(filter, capabilities) {
            let _ = wire::send(&report, &Answer::Failed(fault), &[]);
            return 1;
        }
        let signals = match crate::start::signal_descriptor(&[libc::SIGCHLD]) {
            Ok(signals) => signals,
            Err(error) => {
                let _ = wire::send(&report, &Answer::Failed(Fault::doing("watch children")(error)), &[]);
                return 1;
            }
        };
        let beside: Vec<_> = fds.iter().map(std::os::fd::AsFd::as_fd).collect();
        if wire::send(&report, &Answer::Made { pid: 1 }, &beside).is_err() {
            return 1;
        }
        drop(beside);
        drop((fds, report));
        crate::process::inherited::close_all_but(&[control.as_raw_fd(), signals.as_raw_fd()]);
        // The shell may have ended before anybody listened.
        loop {
            if let Some(status) = collect(shell.pid) {
                let _ = rustix::io::write(&control, &status.to_ne_bytes());
                return 0;
            }
            let mut fds = [PollFd::new(&control, PollFlags::IN), PollFd::new(&signals, PollFlags::IN)];
            let _ = poll(&mut fds, None);
            let (asked, signalled) = (!fds[0].revents().is_empty(), !fds[1].revents().is_empty());
            if signalled {
                let mut info = [0; size_of::<libc::signalfd_siginfo>()];
                let _ = rustix::io::read(&signals, &mut info);
            }
            if asked {
                let mut word = [0; 1 + 4 * MOST_SPARED];
                match rustix::io::read(&control, &mut word) {
                    Ok(length @ 1..) => {
                        shell.signal(word[0], &word[1..length]);
                        // The daemon starts nothing before it knows that no signal is on its way.
                        let _ = rustix::io::write(&control, &word[..1]);
                    }
                    Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => {}
                    _ => return 0,
                }
            }
        }
    }
}

/// Collects everybody who has ended; the wait status of the shell, if it is among them.
fn collect(shell: i32) -> Option<i32> {
    let mut end = None;
    loop {
        let mut status = 0;
        // SAFETY: writes to a local. Nobody else in this process waits for children.
        let pid = unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG) };
        if pid <= 0 {
            return end;
        }
        if pid == shell {
            end = Some(status);
        }
    }
}

impl Shell {
    fn signal(&self, word: u8, spared: &[u8]) {
        match word {
            // SAFETY: a signal to the shell's group, whose number is the shell's: it is not collected yet.
            INTERRUPT => drop(unsafe { libc::kill(-self.pid, libc::SIGINT) }),
            KILL => {
                let spared = spared
                    .chunks_exact(4)
                    .map(|word| i32::from_ne_bytes([word[0], word[1], word[2], word[3]]));
                self.kill_others(&spared.collect());
            }
            _ => {}
        }
    }

    /// Kills what descends from the shell, but not from one of `spared`.
    fn kill_others(&self, spared: &BTreeSet<i32>) {
        let Ok(entries) = std::fs::read_dir("/proc") else { return };
        let parents: BTreeMap<i32, i32> = entries
            .flatten()
            .filter_map(|entry| {
                let pid = entry.file_name().to_str()?.parse().ok()?;
                let stat = std::fs::read_to_string(entry.path().join("stat")).ok()?;
                // The name, which may hold anything, is in parentheses; the state follows, then the parent.
                let parent = stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(1)?.parse().ok()?;
                Some((pid, parent))
            })
            .collect();
        for &pid in parents.keys() {
            let mut above = Some(&pid);
            let mut steps = 0;
            while let Some(&now) = above.filter(|&&now| now > 1 && steps < 1000) {
                if spared.contains(&now) || (now == self.pid && now == pid) {
                    break;
                }
                if now == self.pid {
                    // SAFETY: a process of this session; if it has ended meanwhile, its number is not given again
                    // before all others were.
                    unsafe { libc::kill(pid, libc::SIGKILL) };
                    break;
                }
                above = parents.get(&now);
                steps += 1;
            }
        }
    }
}
