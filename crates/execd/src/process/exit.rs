//! How a process ended.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

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

/// Collects the status of a child that has ended. `None` while it runs. Works on the child alone, so it cannot
/// take the status of another one.
pub fn reap(pidfd: &impl AsFd) -> io::Result<Option<Exit>> {
    wait(pidfd, libc::WEXITED | libc::WNOHANG)
}

/// Waits for a child's end and collects its status.
pub fn wait_blocking(pidfd: &impl AsFd) -> io::Result<Option<Exit>> {
    wait(pidfd, libc::WEXITED)
}

fn wait(pidfd: &impl AsFd, options: i32) -> io::Result<Option<Exit>> {
    let fd = pidfd.as_fd().as_raw_fd().unsigned_abs();
    loop {
        // SAFETY: all zero bytes are a valid `siginfo_t`.
        let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
        // SAFETY: `info` is valid for writing during the call.
        if unsafe { libc::waitid(libc::P_PIDFD, fd, &raw mut info, options) } != 0 {
            let error = io::Error::last_os_error();
            if error.kind() == io::ErrorKind::Interrupted {
                continue;
            }
            return Err(error);
        }
        // SAFETY: `waitid` succeeded, so the fields of SIGCHLD are set; they stay zero when nobody has ended.
        let (pid, status) = unsafe { (info.si_pid(), info.si_status()) };
        let exit = if info.si_code == libc::CLD_EXITED { Exit::Code(status) } else { Exit::Signal(status) };
        return Ok(Some(exit).filter(|_| pid != 0));
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
