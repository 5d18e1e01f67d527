//! How a process ended.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// End of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// It returned this.
    Code(i32),
    /// This signal killed it.
    Signal(i32),
}

impl Exit {
    /// From a status word of `wait`. `None` when it is not about an end.
    #[must_use]
    pub fn from_wait_status(status: i32) -> Option<Self> {
        if libc::WIFEXITED(status) {
            Some(Self::Code(libc::WEXITSTATUS(status)))
        } else if libc::WIFSIGNALED(status) {
            Some(Self::Signal(libc::WTERMSIG(status)))
        } else {
            None
        }
    }

    /// The code as shells count: 128 + signal for a death by signal.
    #[must_use]
    pub fn code(self) -> i32 {
        match self {
            Self::Code(code) => code,
            Self::Signal(signal) => 128 + signal,
        }
    }

    /// The signal, if one killed it.
    #[must_use]
    pub fn signal(self) -> Option<i32> {
        match self {
            Self::Code(_) => None,
            Self::Signal(signal) => Some(signal),
        }
    }

    /// `exit status 3`, `signal: killed`: the words that clients know.
    #[must_use]
    pub fn words(self) -> String {
        match self {
            Self::Code(code) => format!("exit status {code}"),
            Self::Signal(signal) => match signal_name(signal) {
                Some(name) => format!("signal: {name}"),
                None => format!("signal: signal {signal}"),
            },
        }
    }
}

/// The usual English word for a signal.
#[must_use]
pub fn signal_name(signal: i32) -> Option<&'static str> {
    Some(match signal {
        libc::SIGHUP => "hangup",
        libc::SIGINT => "interrupt",
        libc::SIGQUIT => "quit",
        libc::SIGILL => "illegal instruction",
        libc::SIGTRAP => "trace/breakpoint trap",
        libc::SIGABRT => "aborted",
        libc::SIGBUS => "bus error",
        libc::SIGFPE => "floating point exception",
        libc::SIGKILL => "killed",
        libc::SIGUSR1 => "user defined signal 1",
        libc::SIGSEGV => "segmentation fault",
        libc::SIGUSR2 => "user defined signal 2",
        libc::SIGPIPE => "broken pipe",
        libc::SIGALRM => "alarm clock",
        libc::SIGTERM => "terminated",
        libc::SIGXCPU => "CPU time limit exceeded",
        libc::SIGXFSZ => "file size limit exceeded",
        libc::SIGSYS => "bad system call",
        _ => return None,
    })
}

/// What a process has used, and all that it and its descendants have waited for. What was left behind, or was waited
/// for by somebody else, is not in it: the kernel counts along `wait`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Consumed {
    /// CPU time in programs.
    pub user: Duration,
    /// CPU time in the kernel on their behalf.
    pub system: Duration,
    /// Largest resident set of any one of these processes, in bytes. A child that is about to execute its program
    /// stands in the memory of this process, so that it is never less than the peak of this one.
    pub peak_memory: u64,
}

impl Consumed {
    fn from_rusage(usage: &libc::rusage) -> Self {
        let time = |time: &libc::timeval| {
            let micros = u64::try_from(time.tv_usec).unwrap_or(0);
            Duration::from_secs(u64::try_from(time.tv_sec).unwrap_or(0)) + Duration::from_micros(micros)
        };
        let peak = u64::try_from(usage.ru_maxrss).unwrap_or(0).saturating_mul(1024);
        Self { user: time(&usage.ru_utime), system: time(&usage.ru_stime), peak_memory: peak }
    }
}

/// A peak of this process this much above what it needs is forgotten before a child is started.
const OWN_PEAK: u64 = 8 << 20;

/// Forgets a high peak of this process's own memory, which its children would otherwise show as theirs. Costs one
/// system call as long as there is none.
pub fn forget_own_peak() {
    /// What was left when it was forgotten last.
    static FLOOR: AtomicU64 = AtomicU64::new(0);
    if own_peak() > FLOOR.load(Ordering::Relaxed) + OWN_PEAK {
        // Where that cannot be written, small programs look larger than they are, and nothing else.
        let _ = std::fs::write("/proc/self/clear_refs", "5");
        FLOOR.store(own_peak(), Ordering::Relaxed);
    }
}

fn own_peak() -> u64 {
    // SAFETY: all zero bytes are a valid `rusage`, which the call fills.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &raw mut usage);
        usage
    };
    Consumed::from_rusage(&usage).peak_memory
}

/// Collects the status of a child that has ended. `None` while it runs. Works on the child alone, so it cannot
/// take the status of another one.
pub fn reap(pidfd: &impl AsFd) -> io::Result<Option<Exit>> {
    Ok(reap_counted(pidfd)?.map(|(exit, _)| exit))
}

/// As [`reap`], with what the child has used.
pub fn reap_counted(pidfd: &impl AsFd) -> io::Result<Option<(Exit, Consumed)>> {
    wait(pidfd, libc::WEXITED | libc::WNOHANG)
}

/// Waits for a child's end and collects its status.
pub fn wait_blocking(pidfd: &impl AsFd) -> io::Result<Option<Exit>> {
    Ok(wait(pidfd, libc::WEXITED)?.map(|(exit, _)| exit))
}

fn wait(pidfd: &impl AsFd, options: i32) -> io::Result<Option<(Exit, Consumed)>> {
    let fd = pidfd.as_fd().as_raw_fd();
    loop {
        // SAFETY: all zero bytes are a valid `siginfo_t` and a valid `rusage`.
        let (mut info, mut usage): (libc::siginfo_t, libc::rusage) = unsafe { std::mem::zeroed() };
        // SAFETY: both are valid for writing during the call. The C library's wrapper has no place for the usage.
        let result = unsafe {
            libc::syscall(libc::SYS_waitid, libc::P_PIDFD, fd, &raw mut info, options, &raw mut usage)
        };
        if result != 0 {
            let error = io::Error::last_os_error();
            if error.kind() == io::ErrorKind::Interrupted {
                continue;
            }
            return Err(error);
        }
        // SAFETY: `waitid` succeeded, so the fields of SIGCHLD are set; they stay zero when nobody has ended.
        let (pid, status) = unsafe { (info.si_pid(), info.si_status()) };
        let exit = if info.si_code == libc::CLD_EXITED { Exit::Code(status) } else { Exit::Signal(status) };
        return Ok((pid != 0).then(|| (exit, Consumed::from_rusage(&usage))));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_have_shell_codes_and_words() {
        assert_eq!(Exit::from_wait_status(3 << 8), Some(Exit::Code(3)));
        assert_eq!(Exit::from_wait_status(9), Some(Exit::Signal(9)));
        assert_eq!(Exit::from_wait_status(0x137f), None);
        assert_eq!((Exit::Signal(11).code(), Exit::Code(7).code()), (139, 7));
        assert_eq!(Exit::Signal(15).words(), "signal: terminated");
        assert_eq!(Exit::Signal(40).words(), "signal: signal 40");
        assert_eq!(Exit::Code(2).words(), "exit status 2");
    }
}
