//! Daemon and command beside each other: the command ends the container, and the daemon tells whether it may begin.

use std::ffi::OsString;
use std::fs::DirBuilder;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{set, stopping, warn};
use crate::hooks::{CONFIG_FILE, TRANSPORT};
use crate::process::exit::Exit;
use crate::runtime_init::SECRET;

/// How long the daemon may take to say a first word…
const FIRST_WORD: Duration = Duration::from_secs(10);
/// …and longer than the hook may, to say the last.
const LAST_WORD: Duration = Duration::from_secs(10);
/// Between a request to stop and the kill.
const STOP_GRACE: Duration = Duration::from_secs(10);
/// How often the daemon's report is looked at.
const LOOK: Duration = Duration::from_millis(20);

/// Runs the command with the daemon beside it, and gives the command's status.
pub(super) fn run(
    mut daemon: Command,
    execd: &Path,
    argv: Vec<OsString>,
    changes: &[(OsString, OsString)],
) -> io::Result<ExitCode> {
    let status = has_hooks().then(Report::new).transpose()?;
    if let Some(report) = &status {
        daemon.arg("--lifecycle-startup-status-file").arg(&report.file);
    }
    // Blocked before there are children, so that no end is missed. They set their own.
    let signals = stopping()?;
    let named =
        |error: io::Error, what: &Path| io::Error::new(error.kind(), format!("{}: {error}", what.display()));
    let daemon = unblocked(&mut daemon).spawn().map_err(|error| named(error, execd))?;
    let mut both = Both { signals, daemon: Some(pid(&daemon)), command: None, kill_at: None, stopped: None };
    if let Some(report) = status
        && let Some(code) = both.await_begin(&report)
    {
        return Ok(both.leave(code));
    }
    if let Some(signal) = both.stopped {
        return Ok(both.leave(Exit::Signal(signal).code()));
    }
    let mut words = argv.into_iter();
    let program = words.next().unwrap_or_default();
    let mut command = Command::new(&program);
    command.args(words).envs(changes.iter().cloned()).env_remove(super::SOURCED);
    for ours in [TRANSPORT, CONFIG_FILE, "EXECD_ACCESS_TOKEN", SECRET] {
        command.env_remove(ours);
    }
    let code = match unblocked(&mut command).spawn() {
        Ok(command) => {
            both.command = Some(pid(&command));
            both.await_end()
        }
        Err(error) => {
            warn(format_args!("{}: {error}", program.display()));
            if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 }
        }
    };
    Ok(both.leave(code))
}

fn pid(child: &std::process::Child) -> i32 {
    child.id().cast_signed()
}

/// Signals that we hold back are not to be held back in a child.
fn unblocked(command: &mut Command) -> &mut Command {
    use std::os::unix::process::CommandExt as _;
    let unblock = || {
        // SAFETY: a set on the stack, made empty before it is read; both calls may be made after a fork.
        unsafe {
            let mut none: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&raw mut none);
            libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
        }
        Ok(())
    };
    // SAFETY: the function makes system calls only.
    unsafe { command.pre_exec(unblock) }
}

fn has_hooks() -> bool {
    let text = set(TRANSPORT).is_some_and(|text| !text.as_encoded_bytes().trim_ascii().is_empty());
    let kept = || set("HOME").is_some_and(|home| Path::new(&home).join(".execd/lifecycle.toml").exists());
    text || set(CONFIG_FILE).is_some() || kept()
}

/// The file in which the daemon reports.
struct Report {
    dir: PathBuf,
    file: PathBuf,
}

impl Report {
    fn new() -> io::Result<Self> {
        let mut result = Err(io::ErrorKind::NotFound.into());
        for parent in [set("TMPDIR").unwrap_or_else(|| "/tmp".into()), "/tmp".into()] {
            let dir = Path::new(&parent).join(format!("execd-lifecycle.{}", crate::random::uuid().simple()));
            let file = dir.join("status");
            result = DirBuilder::new().mode(0o700).create(&dir).and_then(|()| {
                std::fs::File::options().write(true).create_new(true).mode(0o600).open(&file).map(drop)
            });
            if result.is_ok() {
                return Ok(Self { dir, file });
            }
        }
        result.map_err(|error| {
            io::Error::new(error.kind(), format!("no place for the report of the start: {error}"))
        })?;
        Err(io::ErrorKind::NotFound.into())
    }

    /// The last whole line; `None` when the file cannot be read.
    fn last(&self) -> Option<String> {
        let text = std::fs::read_to_string(&self.file).ok()?;
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        Some(whole.lines().next_back().unwrap_or_default().to_owned())
    }
}

impl Drop for Report {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

struct Both {
    signals: OwnedFd,
    daemon: Option<i32>,
    command: Option<i32>,
    kill_at: Option<Instant>,
    /// The signal that asked us to end.
    stopped: Option<i32>,
}

/// Who has ended, and how.
enum Ended {
    Daemon(Exit),
    Command(Exit),
}

impl Both {
    /// Waits until the daemon lets the command begin; otherwise the code with which all ends.
    fn await_begin(&mut self, report: &Report) -> Option<i32> {
        let mut until = Instant::now() + FIRST_WORD;
        let mut running = false;
        loop {
            if let Some(Ended::Daemon(exit)) = self.wait(Some(LOOK)) {
                warn(format_args!("execd ended before the start was done ({})", exit.words()));
                return Some(if exit == Exit::Code(0) { 1 } else { exit.code() });
            }
            if self.stopped.is_some() {
                return None;
            }
            let Some(word) = report.last() else {
                warn(format_args!("the report of the start has gone"));
                return Some(1);
            };
            match word.split_once(' ') {
                None if word.is_empty() => {}
                Some(("running", seconds)) => {
                    let Some(seconds) = seconds.parse().ok().filter(|&seconds: &u32| seconds > 0) else {
                        warn(format_args!("the report of the start is not understood: {word:?}"));
                        return Some(1);
                    };
                    if !std::mem::replace(&mut running, true) {
                        until = Instant::now() + Duration::from_secs(u64::from(seconds)) + LAST_WORD;
                    }
                }
                Some(("done", "0")) => return None,
                Some(("done", code)) => {
                    warn(format_args!("the preStart hook has failed"));
                    return Some(code.parse().ok().filter(|code| (1..=255).contains(code)).unwrap_or(1));
                }
                _ => {
                    warn(format_args!("the report of the start is not understood: {word:?}"));
                    return Some(1);
                }
            }
            if Instant::now() >= until {
                warn(format_args!("execd did not report in time how the start went"));
                return Some(1);
            }
        }
    }

    /// Waits for the command's end.
    fn await_end(&mut self) -> i32 {
        loop {
            if let Some(Ended::Command(exit)) = self.wait(None) {
                return exit.code();
            }
        }
    }

    /// Ends the daemon, and everybody of whom we are the first process by ending.
    fn leave(mut self, code: i32) -> ExitCode {
        if let Some(daemon) = self.daemon {
            send(daemon, libc::SIGTERM);
            self.kill_at.get_or_insert_with(|| Instant::now() + STOP_GRACE);
        }
        while self.daemon.is_some() {
            self.wait(None);
        }
        ExitCode::from(u8::try_from(code & 0xff).unwrap_or(1))
    }

    /// Waits for something, at most so long. Passes signals on and collects everybody who has ended.
    fn wait(&mut self, limit: Option<Duration>) -> Option<Ended> {
        let left = self.kill_at.map(|at| at.saturating_duration_since(Instant::now()));
        let limit = [limit, left].into_iter().flatten().min();
        let timeout = limit.and_then(|limit| Timespec::try_from(limit).ok());
        let mut fds = [PollFd::from_borrowed_fd(self.signals.as_fd(), PollFlags::IN)];
        // An interruption looks like a time-out: everything is looked at again.
        let _ = poll(&mut fds, timeout.as_ref());
        while let Some(signal) = crate::process::inherited::next_signal(&self.signals) {
            if signal != libc::SIGCHLD {
                self.stop(signal);
            }
        }
        if self.kill_at.is_some_and(|at| at <= Instant::now()) {
            self.kill_at = None;
            for pid in [self.command, self.daemon].into_iter().flatten() {
                send(pid, libc::SIGKILL);
            }
        }
        self.reap()
    }

    fn stop(&mut self, signal: i32) {
        self.stopped.get_or_insert(signal);
        self.kill_at.get_or_insert_with(|| Instant::now() + STOP_GRACE);
        for pid in [self.command, self.daemon].into_iter().flatten() {
            send(pid, signal);
        }
    }

    /// Collects everybody who has ended up to the first that matters.
    fn reap(&mut self) -> Option<Ended> {
        loop {
            let mut status = 0;
            // SAFETY: `status` is valid for writing; all children are ours alone to collect.
            let pid = unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG) };
            if pid <= 0 {
                return None;
            }
            let Some(exit) = Exit::from_wait_status(status) else { continue };
            if self.command == Some(pid) {
                self.command = None;
                return Some(Ended::Command(exit));
            }
            if self.daemon == Some(pid) {
                self.daemon = None;
                return Some(Ended::Daemon(exit));
            }
        }
    }
}

fn send(pid: i32, signal: i32) {
    // SAFETY: a child that has not been collected, so the number is its.
    unsafe { libc::kill(pid, signal) };
}
