//! What init does all its life: wait for signals, output and the daemon's words.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, AsRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use osb_protocol::boot::{Ended, Order, Started};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::daemon::Daemon;
use super::descendants;
use super::entrypoint::{self, Entrypoint};
use super::log_file::LogFile;
use super::orders::{self, Orders, Told};
use super::superior::{Done, Word};
use crate::process::exit::Exit;
use crate::process::inherited::next_signal;
use crate::process::tree;
use crate::usage;

/// Signals that go on to the entrypoint's process group.
pub(super) const FORWARDED: [i32; 7] =
    [libc::SIGTERM, libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGUSR1, libc::SIGUSR2, libc::SIGWINCH];
/// Time between a request to stop and the kill.
const STOP_GRACE: Duration = Duration::from_secs(10);
/// Time for an entrypoint that is replaced to end by itself.
const REPLACE_GRACE: Duration = Duration::from_secs(3);

/// The entrypoint as init sees it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Entry {
    /// Not started yet.
    Awaited,
    /// A process of this number.
    Process(i32),
    /// No process: to wait is all there is to do.
    Idle,
}

/// Where output and last words go.
pub(super) enum Outlet {
    /// To files of the engine's.
    Engine {
        /// The entrypoint's newest output.
        log: LogFile,
        /// How it ended.
        ended: File,
        /// Output of the entrypoint and of whom it passed it to, until all have closed it.
        output: Option<OwnedFd>,
        /// Output of hooks, from the daemon.
        hooks: Option<OwnedFd>,
    },
    /// To wherever our own goes.
    Inherited,
}

/// What the entrypoint is.
pub(super) enum Work {
    /// Not known yet.
    Unknown,
    /// Ordered by the engine, which waits for an answer on the socket.
    Ordered(Box<Order>, Orders),
    /// Ordered and answered.
    Answered,
    /// Given on the command line.
    Given {
        /// Program and arguments.
        argv: Vec<OsString>,
        /// Its environment, before anything is taken out.
        env: Vec<(OsString, OsString)>,
    },
}

pub(super) struct Init {
    daemon: Daemon,
    outlet: Outlet,
    signals: OwnedFd,
    pub(super) work: Work,
    entrypoint: Entry,
    /// Mark of an entrypoint that may be replaced.
    tag: Option<u64>,
    /// Set by a request to stop.
    kill_at: Option<Instant>,
    /// How we end when everybody else has.
    ending: Option<i32>,
    in_own_namespace: bool,
}

impl Init {
    pub(super) fn new(daemon: Daemon, outlet: Outlet, signals: OwnedFd, in_own_namespace: bool) -> Self {
        Self {
            daemon,
            outlet,
            signals,
            work: Work::Unknown,
            entrypoint: Entry::Awaited,
            tag: None,
            kill_at: None,
            ending: None,
            in_own_namespace,
        }
    }

    /// Sleeps until the order comes. Does not return when nobody wants the sandbox.
    pub(super) fn wait_for(&mut self, orders: &Orders) -> io::Result<(Order, OwnedFd)> {
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
                    Told::Order(order, document, _) => return Ok((*order, document)),
                    Told::Leave => std::process::exit(0),
                    Told::Rehearse => {
                        self.daemon.rehearse();
                        entrypoint::rehearse(self.daemon.accounts(), self.daemon.filter());
                    }
                }
            }
        }
    }

    /// Carries an order out, or lets the daemon run the hook before the entrypoint first.
    pub(super) fn begin(&mut self, order: Order, document: &OwnedFd, orders: Orders) {
        let first = order.lifecycle.as_ref().is_some_and(|hooks| hooks.pre_start.is_some());
        let keeper = order.lifecycle.as_ref().and_then(|_| self.hook_output());
        if first {
            self.work = Work::Ordered(Box::new(order.clone()), orders);
        } else {
            // The entrypoint first: the create is answered as soon as it has been executed.
            self.work = Work::Answered;
            self.start_ordered(&order, orders);
        }
        self.daemon.order(order, document, keeper);
    }

    /// A pipe to us for the output of hooks. Without one there is the daemon's log.
    fn hook_output(&mut self) -> Option<OwnedFd> {
        let (read, write) = crate::command::pipe::pair().ok()?;
        if let Outlet::Engine { hooks, .. } = &mut self.outlet {
            *hooks = Some(read);
        }
        Some(write)
    }

    /// Starts the engine's entrypoint and answers. Does not return when it cannot be executed.
    fn start_ordered(&mut self, order: &Order, orders: Orders) {
        self.daemon.begun();
        let none = osb_protocol::boot::BootFds::default();
        let fds = self.daemon.fds().unwrap_or(&none);
        match entrypoint::start(order, fds, self.daemon.accounts(), self.daemon.filter()) {
            Ok(None) => {
                self.entrypoint = Entry::Idle;
                orders.answer(&Started::Running { pid: None });
            }
            Ok(Some(Entrypoint { pid, output })) => {
                self.entrypoint = Entry::Process(pid);
                if let Outlet::Engine { output: kept, .. } = &mut self.outlet {
                    *kept = Some(output);
                }
                orders.answer(&Started::Running { pid: Some(pid) });
            }
            Err(error) => {
                orders.answer(&Started::Failed {
                    errno: Some(error.errno).filter(|errno| *errno != 0),
                    message: error.message,
                });
                std::process::exit(not_started(error.errno));
            }
        }
    }

    pub(super) fn run(mut self) -> ! {
        loop {
            self.start_daemon(&[]);
            let timeout = self.timeout();
            // The order of this list is that of the looks below.
            let (mut signalled, mut written, mut hooked, mut told, mut unwanted, mut asked) =
                (false, false, false, false, false, false);
            {
                let (output, hooks) = match &self.outlet {
                    Outlet::Engine { output, hooks, .. } => (output.as_ref(), hooks.as_ref()),
                    Outlet::Inherited => (None, None),
                };
                let orders = match &self.work {
                    Work::Ordered(_, orders) => Some(orders.as_fd()),
                    _ => None,
                };
                let mut fds = Vec::with_capacity(6);
                let mut seen = Vec::with_capacity(6);
                let mut watch = |fd, found| {
                    fds.push(PollFd::from_borrowed_fd(fd, PollFlags::IN));
                    seen.push(found);
                };
                watch(self.signals.as_fd(), &mut signalled);
                for (fd, found) in [
                    (output.map(|fd| fd.as_fd()), &mut written),
                    (hooks.map(|fd| fd.as_fd()), &mut hooked),
                    (self.daemon.link(), &mut told),
                    (orders, &mut unwanted),
                    (self.daemon.isolation(), &mut asked),
                ] {
                    if let Some(fd) = fd {
                        watch(fd, found);
                    }
                }
                // An interruption or a failure looks like a time-out: everything is looked at again.
                let _ = poll(&mut fds, timeout.as_ref());
                for (fd, found) in fds.iter().zip(seen) {
                    *found = !fd.revents().is_empty();
                }
            }
            if unwanted {
                // The engine has nothing more to say before our answer: it has gone, or given the sandbox up.
                std::process::exit(0);
            }
            if hooked {
                self.keep_hooks();
            }
            if written {
                self.keep_output();
            }
            if told {
                self.listen();
            }
            if asked {
                self.daemon.start_isolator();
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

    /// Takes the daemon's word.
    fn listen(&mut self) {
        let Some(document) = self.daemon.word() else { return self.unheard() };
        match orders::read::<Word>(&document) {
            Ok(Word::Start(env)) => {
                let done = match self.start_entrypoint(env) {
                    Ok(()) => Done::Well,
                    Err(error) => Done::Badly(error),
                };
                self.daemon.answer(&done);
            }
            Ok(Word::End) => {
                self.end_entrypoint();
                self.daemon.answer(&Done::Well);
            }
            Ok(Word::Refuse(why)) => self.refuse(why),
            Ok(Word::Remember(_)) => self.daemon.keep(document),
            Err(error) => drop(writeln!(io::stderr(), "execd: the daemon is not understood: {error}")),
        }
    }

    /// The daemon has died. If that was before the entrypoint, the hook before it cannot have succeeded.
    fn unheard(&mut self) {
        if self.entrypoint == Entry::Awaited && self.daemon.must_begin() {
            self.refuse("preStart hook: the daemon died while it ran".to_owned());
        }
    }

    fn start_entrypoint(&mut self, with: Option<Vec<(OsString, OsString)>>) -> Result<(), String> {
        let Work::Given { argv, env } = &self.work else {
            if let Work::Ordered(order, orders) = std::mem::replace(&mut self.work, Work::Answered) {
                self.start_ordered(&order, orders);
            }
            return Ok(());
        };
        let is_first = with.is_none();
        let mut env = env.clone();
        env.extend(with.into_iter().flatten());
        let tag = tree::tag(crate::random::uuid().as_u64_pair().1);
        match entrypoint::start_inherited(argv, env, tag) {
            Ok(pid) => {
                self.entrypoint = Entry::Process(pid);
                self.tag = Some(tag);
                self.daemon.begun();
                Ok(())
            }
            Err(error) => {
                if is_first {
                    let _ = writeln!(io::stderr(), "execd: {}", error.message);
                    self.finish(not_started(error.errno));
                }
                Err(error.message)
            }
        }
    }

    /// Ends the entrypoint with all it has started, which is not the end of the sandbox.
    fn end_entrypoint(&mut self) {
        self.entrypoint = Entry::Awaited;
        let Some(tag) = self.tag.take() else { return };
        let ended = tree::terminate(tag).and_then(|members| tree::wait(&members, REPLACE_GRACE));
        if !matches!(ended, Ok(true)) {
            let _ = tree::kill(tag);
        }
        let _ = tree::kill(tag);
    }

    /// The sandbox must not work.
    fn refuse(&mut self, why: String) {
        if let Work::Ordered(_, orders) = std::mem::replace(&mut self.work, Work::Answered) {
            self.keep_hooks();
            orders.answer(&Started::Refused { message: why });
            std::process::exit(1);
        }
        let _ = writeln!(io::stderr(), "execd: {why}");
        self.finish(1);
    }

    /// Time left until something is to be done.
    fn timeout(&self) -> Option<Timespec> {
        let next = [self.kill_at, self.daemon.start_at()].into_iter().flatten().min()?;
        Timespec::try_from(next.saturating_duration_since(Instant::now())).ok()
    }

    /// `others` are descriptors of init's beside those it always has.
    pub(super) fn start_daemon(&mut self, others: &[RawFd]) {
        let mut private = vec![self.signals.as_raw_fd()];
        if let Outlet::Engine { log, ended, output, hooks } = &self.outlet {
            private.extend([ended.as_raw_fd(), log.as_raw_fd()]);
            private.extend(output.iter().chain(hooks).map(AsRawFd::as_raw_fd));
        }
        if let Work::Ordered(_, orders) = &self.work {
            private.push(orders.as_raw_fd());
        }
        private.extend(others);
        self.daemon.start_if_due(&private);
    }

    fn take_signals(&mut self) {
        let mut children = false;
        while let Some(signal) = next_signal(&self.signals) {
            match signal {
                libc::SIGCHLD => children = true,
                libc::SIGTERM => self.stop(),
                signal => self.signal_entrypoint(signal),
            }
        }
        if children {
            self.reap();
        }
    }

    /// Asks everything to end, and makes it after a while.
    fn stop(&mut self) {
        if self.entrypoint == Entry::Idle {
            self.end(Exit::Signal(libc::SIGTERM));
        }
        if self.entrypoint == Entry::Awaited && matches!(self.outlet, Outlet::Inherited) {
            return self.finish(Exit::Signal(libc::SIGTERM).code());
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
            Entry::Idle if signal != libc::SIGWINCH => self.end(Exit::Signal(signal)),
            Entry::Awaited if signal == libc::SIGINT && matches!(self.outlet, Outlet::Inherited) => {
                self.finish(Exit::Signal(signal).code());
            }
            Entry::Idle | Entry::Awaited => {}
        }
    }

    fn signal_all(&self, signal: i32) {
        if self.in_own_namespace {
            return send(-1, signal);
        }
        if matches!(self.outlet, Outlet::Inherited) {
            // Our own are last, so that none of theirs comes to us unseen.
            for pid in descendants::of(rustix::process::getpid().as_raw_nonzero().get()) {
                send(pid, signal);
            }
            return;
        }
        if let Entry::Process(pid) = self.entrypoint {
            send(-pid, signal);
        }
        self.daemon.signal(signal);
    }

    /// Collects everybody who has ended: one signal may stand for many.
    fn reap(&mut self) {
        let mut end = None;
        loop {
            let mut status = 0;
            // SAFETY: `status` is valid for writing. Nobody else in this process waits for children by now: the
            // start of the entrypoint is over.
            let pid = unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG) };
            if pid < 0
                && io::Error::last_os_error().raw_os_error() == Some(libc::ECHILD)
                && let Some(code) = self.ending
            {
                std::process::exit(code);
            }
            if pid <= 0 {
                break;
            }
            if self.entrypoint == Entry::Process(pid) {
                end = Exit::from_wait_status(status);
            } else if self.daemon.is(pid) {
                // Its last words count.
                while self.daemon.link().is_some() {
                    self.listen();
                }
                self.daemon.ended();
            }
        }
        if let Some(end) = end {
            self.end(end);
        }
    }

    /// The entrypoint has ended, and with it the sandbox.
    fn end(&mut self, end: Exit) {
        self.keep_output();
        let oom = self.daemon.fds().and_then(|fds| fds.usage.oom_events);
        let Outlet::Engine { ended, .. } = &self.outlet else {
            self.entrypoint = Entry::Awaited;
            return self.finish(end.code());
        };
        let oom_kills = oom.and_then(usage::oom_kills);
        tell(ended, &Ended { exit_code: end.code(), signal: end.signal(), oom_kills });
        self.daemon.kill();
        std::process::exit(end.code())
    }

    /// Ends what else runs, then ourselves with this code. The first one counts.
    fn finish(&mut self, code: i32) {
        if self.ending.is_none() {
            self.ending = Some(code);
            self.daemon.stop_restarting();
            self.kill_at.get_or_insert_with(|| Instant::now() + STOP_GRACE);
            self.signal_all(libc::SIGTERM);
            // There may be nobody left whose end could tell us.
            self.reap();
        }
    }

    /// Moves what is in the entrypoint's pipe to the log, at most one pipe full.
    fn keep_output(&mut self) {
        if let Outlet::Engine { log, output, .. } = &mut self.outlet {
            drain(output, log);
        }
    }

    /// Moves what hooks have said to the log.
    fn keep_hooks(&mut self) {
        if let Outlet::Engine { log, hooks, .. } = &mut self.outlet {
            drain(hooks, log);
        }
    }
}

fn drain(pipe: &mut Option<OwnedFd>, log: &mut LogFile) {
    let Some(output) = pipe else { return };
    let mut piece = [0u8; 16 << 10];
    for _ in 0..8 {
        match rustix::io::read(&*output, &mut piece) {
            Ok(length) if length > 0 => log.append(&piece[..length]),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return,
            Ok(_) | Err(_) => {
                *pipe = None;
                return;
            }
        }
    }
}

/// The exit code of shells for a program that cannot be executed.
fn not_started(errno: i32) -> i32 {
    if errno == libc::ENOENT { 127 } else { 126 }
}

/// Writes one line. The reader may have gone, which is its own affair.
fn tell(mut file: &File, word: &impl serde::Serialize) {
    if let Ok(mut line) = serde_json::to_vec(word) {
        line.push(b'\n');
        let _ = file.write_all(&line);
    }
}

/// Sends a signal to a process or, negative, to a group. Whoever is gone needs none.
fn send(pid: i32, signal: i32) {
    if pid == 0 || (pid == -1 && !rustix::process::getpid().is_init()) {
        // The own group, or everybody outside a sandbox: never meant.
        return;
    }
    // SAFETY: sends a signal to processes of the sandbox. The entrypoint's number cannot have been given to
    // another process: it is reaped only in `reap`, after which it is not sent to any more.
    unsafe { libc::kill(pid, signal) };
}
