//! PID 1 of a sandbox of the embedded engine.
//!
//! The process forks once, before any runtime or thread: the child is the daemon, the parent stays here, small and
//! asleep. Both are started before anybody has asked for the sandbox and wait for its order. Then init starts the
//! entrypoint, keeps its newest output, reaps every orphan, passes signals on, starts the daemon again when it dies,
//! and leaves word of the end. It wakes for events only.

mod daemon;
mod entrypoint;
mod log_file;
mod orders;

use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use osb_protocol::boot::{Boot, Ended, Order, Started};
use osb_protocol::execd::EXECD_PORT;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::process::exit::Exit;
use crate::serve::Listener;
use crate::{listen, start, usage};
use daemon::Daemon;
use entrypoint::Entrypoint;
use log_file::LogFile;
use orders::{Orders, Told};

/// Signals that go on to the entrypoint's process group.
const FORWARDED: [i32; 7] =
    [libc::SIGTERM, libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGUSR1, libc::SIGUSR2, libc::SIGWINCH];
/// Time between a request to stop and the kill.
const STOP_GRACE: Duration = Duration::from_secs(10);

/// Runs as init with the document behind `fd`. Returns only when it could not begin.
///
/// # Errors
/// The document cannot be read, or the kernel refuses what init needs.
pub fn boot(fd: i32) -> io::Result<()> {
    start::prepare_process()?;
    let boot = read_document(fd)?;
    rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable)?;
    let in_own_namespace = rustix::process::getpid().is_init();
    if !in_own_namespace {
        // Only in tests and by hand: orphans come here in a PID namespace of ours by themselves.
        rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
    }
    let Boot { listen_tcp, fds } = boot;
    // SAFETY: the document names descriptors that were inherited for this process alone; each is owned once.
    let (listener, orders, ended, log) = unsafe {
        (
            Listener::Unix(UnixListener::from_raw_fd(fds.listen)),
            Orders::new(OwnedFd::from_raw_fd(fds.orders)),
            File::from_raw_fd(fds.ended),
            LogFile::new(File::from_raw_fd(fds.log)),
        )
    };
    let mut listeners = vec![listener];
    if listen_tcp {
        // The Unix socket still serves when the port cannot be had.
        match listen::tcp(EXECD_PORT) {
            Ok(tcp) => listeners.push(Listener::Tcp(tcp)),
            Err(error) => drop(writeln!(io::stderr(), "execd: port {EXECD_PORT}: {error}")),
        }
    }
    // Blocked before the fork, so that nothing is lost between; the daemon sets its own.
    let signals = start::signal_descriptor(&[&FORWARDED[..], &[libc::SIGCHLD]].concat())?;
    let daemon = Daemon::new(fds, listeners);
    let mut init = Init {
        daemon,
        log,
        ended,
        signals,
        output: None,
        entrypoint: Entry::Awaited,
        kill_at: None,
        in_own_namespace,
    };
    init.start_daemon(&[orders.as_raw_fd()]);
    let (order, document) = init.wait_for(&orders)?;
    // The entrypoint first: the create is answered as soon as it has been executed.
    match entrypoint::start(&order, init.daemon.fds(), init.daemon.accounts()) {
        Ok(None) => {
            init.entrypoint = Entry::Idle;
            orders.answer(&Started::Running { pid: None });
        }
        Ok(Some(Entrypoint { pid, output })) => {
            init.entrypoint = Entry::Process(pid);
            init.output = Some(output);
            orders.answer(&Started::Running { pid: Some(pid) });
        }
        Err(error) => {
            orders.answer(&Started::Failed {
                errno: Some(error.errno).filter(|errno| *errno != 0),
                message: error.message,
            });
            std::process::exit(if error.errno == libc::ENOENT { 127 } else { 126 });
        }
    }
    init.daemon.order(order, document);
    init.run()
}

/// Reads and parses the boot document.
fn read_document(fd: i32) -> io::Result<Boot> {
    if fd <= 2 {
        return Err(io::Error::other("--boot-fd: the number of an inherited descriptor above 2 is expected"));
    }
    // SAFETY: the number was inherited for this purpose; a wrong one gives an error when read.
    let file = unsafe { OwnedFd::from_raw_fd(fd) };
    orders::read(&file).map_err(|error| io::Error::other(format!("--boot-fd: {error}")))
}

/// Writes one line. The reader may have gone, which is its own affair.
fn tell(mut file: &File, word: &impl serde::Serialize) {
    if let Ok(mut line) = serde_json::to_vec(word) {
        line.push(b'\n');
        let _ = file.write_all(&line);
    }
}

/// The entrypoint as init sees it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Entry {
    /// Not ordered yet.
    Awaited,
    /// A process of this number.
    Process(i32),
    /// No process: to wait is all there is to do.
    Idle,
}

struct Init {
    daemon: Daemon,
    log: LogFile,
    ended: File,
    signals: OwnedFd,
    /// Output of the entrypoint and of whom it passed it to, until all have closed it.
    output: Option<OwnedFd>,
    entrypoint: Entry,
    /// Set by a request to stop.
    kill_at: Option<Instant>,
    in_own_namespace: bool,
}

impl Init {
    /// Sleeps until the order comes. Does not return when nobody wants the sandbox.
    fn wait_for(&mut self, orders: &Orders) -> io::Result<(Order, OwnedFd)> {
        loop {
            self.start_daemon(&[orders.as_raw_fd()]);
            let (asked, signalled) = {
                let mut fds = [PollFd::new(orders, PollFlags::IN), PollFd::new(&self.signals, PollFlags::IN)];
                // An interruption or a failure looks like a time-out: everything is looked at again.
                let _ = poll(&mut fds, self.timeout().as_ref());
                (!fds[0].revents().is_empty(), !fds[1].revents().is_empty())
            };
            if signalled {
                self.take_signals();
                if self.kill_at.is_some() {
                    std::process::exit(0);
                }
            }
            if asked {
                match orders.take()? {
                    Told::Order(order, document) => return Ok((*order, document)),
                    Told::Leave => std::process::exit(0),
                    Told::Rehearse => {
                        self.daemon.rehearse();
                        entrypoint::rehearse(self.daemon.accounts());
                    }
                }
            }
        }
    }

    fn run(mut self) -> ! {
        loop {
            self.start_daemon(&[]);
            let timeout = self.timeout();
            let (signalled, written) = {
                let mut fds = vec![PollFd::new(&self.signals, PollFlags::IN)];
                fds.extend(self.output.as_ref().map(|output| PollFd::new(output, PollFlags::IN)));
                // An interruption or a failure looks like a time-out: everything is looked at again.
                let _ = poll(&mut fds, timeout.as_ref());
                (!fds[0].revents().is_empty(), fds.get(1).is_some_and(|output| !output.revents().is_empty()))
            };
            if written {
                self.keep_output();
            }
            if signalled {
                self.take_signals();
            }
            if self.kill_at.is_some_and(|at| at <= Instant::now()) {
                self.kill_at = None;
                self.signal_all(libc::SIGKILL);
            }
        }
    }

    /// Time left until something is to be done.
    fn timeout(&self) -> Option<Timespec> {
        let next = [self.kill_at, self.daemon.start_at()].into_iter().flatten().min()?;
        Timespec::try_from(next.saturating_duration_since(Instant::now())).ok()
    }

    /// `others` are descriptors of init's beside those it always has.
    fn start_daemon(&mut self, others: &[RawFd]) {
        let mut private = vec![self.signals.as_raw_fd(), self.ended.as_raw_fd(), self.log.as_raw_fd()];
        private.extend(others);
        private.extend(self.output.as_ref().map(AsRawFd::as_raw_fd));
        self.daemon.start_if_due(&private);
    }

    fn take_signals(&mut self) {
        let mut children = false;
        loop {
            let mut info = [0u8; size_of::<libc::signalfd_siginfo>()];
            match rustix::io::read(&self.signals, &mut info) {
                Ok(length) if length == info.len() => {}
                _ => break,
            }
            // The signal's number is the first member of the structure.
            let number = u32::from_ne_bytes([info[0], info[1], info[2], info[3]]);
            match i32::try_from(number) {
                Ok(libc::SIGCHLD) => children = true,
                Ok(libc::SIGTERM) => self.stop(),
                Ok(signal) => self.signal_entrypoint(signal),
                Err(_) => {}
            }
        }
        if children {
            self.reap();
        }
    }

    /// Asks everything to end, and makes it after a while.
    fn stop(&mut self) {
        if self.entrypoint == Entry::Idle {
            self.finish(Exit::Signal(libc::SIGTERM));
        }
        if self.kill_at.is_none() {
            self.kill_at = Some(Instant::now() + STOP_GRACE);
            self.daemon.stop_restarting();
        }
        self.signal_all(libc::SIGTERM);
    }

    /// Passes a signal on to the entrypoint's process group. None of [`FORWARDED`] is one that a program without a
    /// handler survives, but `SIGWINCH`.
    fn signal_entrypoint(&mut self, signal: i32) {
        match self.entrypoint {
            Entry::Process(pid) => send(-pid, signal),
            Entry::Idle if signal != libc::SIGWINCH => self.finish(Exit::Signal(signal)),
            Entry::Idle | Entry::Awaited => {}
        }
    }

    fn signal_all(&self, signal: i32) {
        if self.in_own_namespace {
            send(-1, signal);
        } else {
            if let Entry::Process(pid) = self.entrypoint {
                send(-pid, signal);
            }
            self.daemon.signal(signal);
        }
    }

    /// Collects everybody who has ended: one signal may stand for many.
    fn reap(&mut self) {
        let mut end = None;
        loop {
            let mut status = 0;
            // SAFETY: `status` is valid for writing. Nobody else in this process waits for children by now: the
            // start of the entrypoint is over.
            let pid = unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG) };
            if pid <= 0 {
                break;
            }
            if self.entrypoint == Entry::Process(pid) {
                end = Exit::from_wait_status(status);
            } else {
                self.daemon.ended(pid);
            }
        }
        if let Some(end) = end {
            self.finish(end);
        }
    }

    /// The entrypoint has ended, and with it the sandbox.
    fn finish(&mut self, end: Exit) -> ! {
        self.keep_output();
        let oom_kills = self.daemon.fds().usage.oom_events.and_then(usage::oom_kills);
        tell(&self.ended, &Ended { exit_code: end.code(), signal: end.signal(), oom_kills });
        self.daemon.kill();
        std::process::exit(end.code())
    }

    /// Moves what is in the pipe to the log, at most one pipe full.
    fn keep_output(&mut self) {
        let Some(output) = &self.output else { return };
        let mut piece = [0u8; 16 << 10];
        for _ in 0..8 {
            match rustix::io::read(output, &mut piece) {
                Ok(0) => {
                    self.output = None;
                    return;
                }
                Ok(length) => self.log.append(&piece[..length]),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                Err(_) => {
                    self.output = None;
                    return;
                }
            }
        }
    }
}

/// Sends a signal to a process or, negative, to a group. Whoever is gone needs none.
fn send(pid: i32, signal: i32) {
    if pid == 0 || (pid == -1 && !rustix::process::getpid().is_init()) {
        // The own group, or everybody outside a sandbox: never meant.
        return;
    }
    // SAFETY: sends a signal to processes of the sandbox. The entrypoint's number cannot have been given to
    // another process: it is reaped only in `reap`, after which init ends.
    unsafe { libc::kill(pid, signal) };
}
