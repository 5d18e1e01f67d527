//! One run of a terminal's program: start, input, output, end.
//!
//! A run ends when its program ends. Output that it has written by then is delivered; what it has left behind in
//! the background loses the terminal, as it would with any other terminal that is closed.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf as _, Bytes};
use rustix::io::Errno;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until};

use super::device::{self, Size};
use super::ring::Source;
use super::terminal::{Live, Mode, Outcome, Terminal};
use crate::app::App;
use crate::command::output::QUIET;
use crate::command::pipe;
use crate::command::prepare::{Env, c_string, script, shell, usual_identity};
use crate::command::stop::blocking;
use crate::process::exit;
use crate::process::spawn::{self, Program, Spawned, Stdio};
use crate::process::{tree, watch};

/// Bytes taken by one read.
const READ: usize = 16 << 10;
/// Reads in a row before others get their turn.
const READS: usize = 8;
/// Pieces of input on their way to the program.
const INPUT: usize = 8;
/// Pause before input that the program does not take is tried again, should the kernel not say when; doubled up to
/// the second one.
const RETRY: Duration = Duration::from_millis(5);
const SLOWEST_RETRY: Duration = Duration::from_secs(1);
/// More than a terminal or pipes hold: what comes after so much is not the program's that has ended.
const DRAIN: usize = 256 << 10;
/// …and so is what comes after so long, beside the time that a slow reader takes.
const DRAIN_LIMIT: Duration = Duration::from_secs(1);
/// What a program is told of its terminal when nobody has said anything else.
const TERM: &str = "xterm-256color";

/// How the program is to be started.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wanted {
    pub(super) mode: Mode,
    pub(super) size: Size,
    /// Number of the byte from which its holder wants to read.
    pub(super) since: Option<u64>,
}

/// Starts the program and follows it to its end.
pub(super) async fn live(app: App, terminal: Arc<Terminal>, run: u64, wanted: Wanted) {
    let mode = wanted.mode;
    let started = {
        let (app, terminal) = (app.clone(), Arc::clone(&terminal));
        blocking(move || launch(&app, &terminal, wanted)).await
    };
    let (pidfd, result) = match started {
        Err(error) => (None, Err(error.message)),
        Ok(Started { spawned, devices }) => {
            let failed = |error: io::Error| format!("the program cannot be followed and was killed: {error}");
            match watch::readable(spawned.pidfd) {
                Err((pidfd, error)) => (Some(pidfd), Err(failed(error))),
                Ok(pidfd) => match Pump::new(Arc::clone(&terminal), devices) {
                    Err(error) => (Some(pidfd.into_inner()), Err(failed(error))),
                    Ok((pump, input)) => (None, Ok((spawned.pid, pidfd, pump, input))),
                },
            }
        }
    };
    match result {
        Ok((pid, pidfd, mut pump, input)) => {
            let master = pump.out.as_ref().filter(|_| mode == Mode::Terminal).cloned();
            terminal.running(Live { mode, pid, master, input });
            pump.follow(&pidfd).await;
            pump.drain().await;
            terminal.ended(mode, || {
                let exit = exit::reap(&pidfd).ok().flatten();
                Outcome::Exit(exit.unwrap_or(exit::Exit::Signal(libc::SIGKILL)).code())
            });
            pump.forget();
        }
        Err(message) => {
            tracing::warn!(terminal = terminal.id, run, message, "a terminal's program was not started");
            let tag = terminal.tag;
            let _ = blocking(move || {
                tree::kill(tag)?;
                pidfd.map_or(Ok(None), |pidfd| exit::wait_blocking(&pidfd))
            })
            .await;
            terminal.ended(mode, || Outcome::NotStarted(message));
        }
    }
}

struct Started {
    spawned: Spawned,
    devices: Devices,
}

/// This side of what the program reads and writes.
enum Devices {
    Terminal(device::Pair),
    Pipes { stdin: OwnedFd, stdout: OwnedFd, stderr: OwnedFd },
}

/// Looks up all that the start needs and starts. Blocks until the program's exec.
fn launch(app: &App, terminal: &Terminal, wanted: Wanted) -> io::Result<Started> {
    let other = |error: crate::http::ApiError| io::Error::other(error.message);
    let accounts = app.accounts.get();
    let identity = usual_identity(app, &accounts).map_err(other)?;
    let owner = identity.as_ref().map(|identity| identity.uid);
    let mut env = Env::new(app, &BTreeMap::new(), &accounts, identity.as_ref());
    env.0.insert("PWD".into(), terminal.cwd.clone().into_os_string());
    if wanted.mode == Mode::Terminal {
        let term = env.0.entry("TERM".into()).or_default();
        if term.is_empty() {
            *term = TERM.into();
        }
    }
    let (path, name) = shell(env.path());
    let words = |words: &[&str]| words.iter().map(|&word| word.to_owned()).collect::<Vec<_>>();
    let argv = match &terminal.command {
        Some(command) => script(name, command),
        None if name == "bash" => words(&["bash", "--noprofile", "--norc"]),
        None => words(&[name]),
    };
    let program = Program {
        candidates: vec![c_string(path.into_os_string()).map_err(other)?],
        argv: argv.into_iter().map(|arg| c_string(arg.into())).collect::<Result<_, _>>().map_err(other)?,
        env: env.into_strings().map_err(other)?,
        cwd: c_string(terminal.cwd.clone().into_os_string()).map_err(other)?,
        identity,
        tag: Some(terminal.tag),
    };
    let cgroup = &app.limits.work_cgroup;
    let failed = |error: spawn::SpawnError| io::Error::other(error.message);
    match wanted.mode {
        Mode::Terminal => {
            let pair = device::open(wanted.size, owner).map_err(|error| {
                io::Error::other(format!("no terminal from {}: {error}", device::MULTIPLEXER))
            })?;
            let spawned = spawn::spawn_on_terminal(&program, pair.slave.as_fd(), cgroup).map_err(failed)?;
            Ok(Started { spawned, devices: Devices::Terminal(pair) })
        }
        Mode::Pipes => {
            let pair = || {
                pipe::pair().map_err(|error| io::Error::other(format!("no pipes for the program: {error}")))
            };
            let ((input, stdin), (stdout, output), (stderr, errors)) = (pair()?, pair()?, pair()?);
            // Of this pipe the other end is ours.
            rustix::io::ioctl_fionbio(&input, false)?;
            rustix::io::ioctl_fionbio(&stdin, true)?;
            let stdio = Stdio { stdin: input.as_fd(), stdout: output.as_fd(), stderr: errors.as_fd() };
            let spawned = spawn::spawn(&program, stdio, cgroup).map_err(failed)?;
            Ok(Started { spawned, devices: Devices::Pipes { stdin, stdout, stderr } })
        }
    }
}

/// Moves input and output.
struct Pump {
    terminal: Arc<Terminal>,
    /// Held so that the terminal stays while programs close and open it as they like.
    slave: Option<OwnedFd>,
    stdin: Option<Arc<AsyncFd<OwnedFd>>>,
    out: Option<Arc<AsyncFd<OwnedFd>>>,
    err: Option<Arc<AsyncFd<OwnedFd>>>,
    input: mpsc::Receiver<Bytes>,
    /// Input that the program has not taken yet.
    pending: Bytes,
    pause: Duration,
}

impl Pump {
    fn new(terminal: Arc<Terminal>, devices: Devices) -> io::Result<(Self, mpsc::Sender<Bytes>)> {
        let (slave, stdin, out, err) = match devices {
            Devices::Terminal(device::Pair { master, slave }) => {
                let master = Arc::new(device::watch(master, Interest::READABLE | Interest::WRITABLE)?);
                (Some(slave), Arc::clone(&master), master, None)
            }
            Devices::Pipes { stdin, stdout, stderr } => (
                None,
                Arc::new(device::watch(stdin, Interest::WRITABLE)?),
                Arc::new(device::watch(stdout, Interest::READABLE)?),
                Some(Arc::new(device::watch(stderr, Interest::READABLE)?)),
            ),
        };
        let (sender, input) = mpsc::channel(INPUT);
        let (stdin, out) = (Some(stdin), Some(out));
        Ok((Self { terminal, slave, stdin, out, err, input, pending: Bytes::new(), pause: RETRY }, sender))
    }

    /// Moves both until the program ends.
    async fn follow(&mut self, pidfd: &AsyncFd<OwnedFd>) {
        let terminal = Arc::clone(&self.terminal);
        let mut killed = false;
        loop {
            let room = terminal.has_room();
            tokio::select! {
                // An error cannot be told from an end, and there is nobody who would end a wait for ever.
                _ = pidfd.readable() => return,
                () = terminal.gone.cancelled(), if !killed => {
                    // Whoever deletes has killed already, unless the program came up too late for that.
                    killed = true;
                    let tag = terminal.tag;
                    tokio::spawn(blocking(move || tree::kill(tag)));
                }
                fed = feed(self.stdin.as_deref(), &mut self.pending, &mut self.pause),
                    if !self.pending.is_empty() =>
                {
                    if fed.is_err() {
                        self.stdin = None;
                        self.pending.clear();
                        // Whoever sends more is told.
                        self.input.close();
                        while self.input.try_recv().is_ok() {}
                    }
                }
                Some(input) = self.input.recv(), if self.pending.is_empty() => {
                    self.pending = input;
                }
                _ = turn(&terminal, &mut self.out, Source::Out), if room && self.out.is_some() => {}
                _ = turn(&terminal, &mut self.err, Source::Err), if room && self.err.is_some() => {}
                () = terminal.room.notified(), if !room => {}
            }
            tokio::task::consume_budget().await;
        }
    }

    /// Takes what the program has written before its end. Who else holds the terminal may write for ever.
    async fn drain(&mut self) {
        let terminal = Arc::clone(&self.terminal);
        self.slave = None;
        let mut left = DRAIN;
        let mut quiet = Instant::now() + QUIET;
        let mut spent = Duration::ZERO;
        while (self.out.is_some() || self.err.is_some()) && left > 0 && spent < DRAIN_LIMIT {
            let room = terminal.has_room();
            let began = Instant::now();
            let taken = tokio::select! {
                biased;
                () = terminal.gone.cancelled() => return,
                taken = turn(&terminal, &mut self.out, Source::Out), if room && self.out.is_some() => taken,
                taken = turn(&terminal, &mut self.err, Source::Err), if room && self.err.is_some() => taken,
                () = terminal.room.notified(), if !room => 0,
                () = sleep_until(quiet), if room => return,
            };
            left = left.saturating_sub(taken);
            if room {
                spent += began.elapsed();
            }
            quiet = Instant::now() + QUIET;
        }
    }

    /// What others write to pipes from now on is read and forgotten, so that it does not end them.
    fn forget(self) {
        if self.stdin.is_some_and(|stdin| self.out.as_ref().is_some_and(|out| Arc::ptr_eq(&stdin, out))) {
            return;
        }
        for mut output in [self.out, self.err].into_iter().flatten().map(Some) {
            tokio::spawn(async move {
                while let Some(fd) = &output {
                    let Ok(mut guard) = fd.readable().await else { return };
                    match read(fd.get_ref(), |_| {}) {
                        Found::Closed => output = None,
                        Found::Idle => guard.clear_ready(),
                        Found::More => {}
                    }
                    tokio::task::consume_budget().await;
                }
            });
        }
    }
}

/// Waits for output and takes it; gives how much it was. `None` is left of an output that has ended. Cancel safe.
async fn turn(terminal: &Terminal, output: &mut Option<Arc<AsyncFd<OwnedFd>>>, source: Source) -> usize {
    let Some(fd) = output else { return std::future::pending().await };
    let mut taken = 0;
    let found = match fd.readable().await {
        Ok(mut guard) => {
            let found = read(fd.get_ref(), |piece| {
                taken += piece.len();
                terminal.write(source, piece);
            });
            if found == Found::Idle {
                guard.clear_ready();
            }
            found
        }
        Err(_) => Found::Closed,
    };
    if found == Found::Closed {
        *output = None;
    }
    if taken > 0 {
        terminal.written();
    }
    taken
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Found {
    /// There may be more at hand.
    More,
    /// Everything at hand has been read.
    Idle,
    /// Nobody has the other end any more.
    Closed,
}

thread_local! {
    /// One buffer for all reads of the thread: it is never held over an await.
    static SCRATCH: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Reads what is at hand, a few buffers at most.
fn read(fd: &OwnedFd, mut take: impl FnMut(&[u8])) -> Found {
    SCRATCH.with_borrow_mut(|buffer| {
        for _ in 0..READS {
            buffer.clear();
            buffer.reserve_exact(READ);
            // A short read says nothing: a terminal hands out a few kilobytes at a time.
            match rustix::io::read(fd, rustix::buffer::spare_capacity(buffer)) {
                Ok(0) => return Found::Closed,
                Ok(_) => take(buffer),
                Err(Errno::AGAIN) => return Found::Idle,
                Err(Errno::INTR) => {}
                // A terminal that nobody has open says EIO.
                Err(_) => return Found::Closed,
            }
        }
        Found::More
    })
}

/// Gives the program the pending input, as fast as it takes it. Cancel safe.
async fn feed(stdin: Option<&AsyncFd<OwnedFd>>, pending: &mut Bytes, pause: &mut Duration) -> io::Result<()> {
    let stdin = stdin.ok_or(io::ErrorKind::BrokenPipe)?;
    let write = |fd: &OwnedFd, pending: &Bytes| rustix::io::write(fd, pending).map_err(io::Error::from);
    let mut result = write(stdin.get_ref(), pending);
    loop {
        match result {
            Ok(length) => {
                pending.advance(length);
                *pause = RETRY;
                if pending.is_empty() {
                    return Ok(());
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
        // A terminal in line mode throws away what is too much for a line without waking whoever waits for room.
        result = tokio::select! {
            ready = stdin.writable() => match ready?.try_io(|fd| write(fd.get_ref(), pending)) {
                Ok(result) => result,
                Err(_) => continue_waiting(),
            },
            () = sleep(*pause) => {
                *pause = (*pause * 2).min(SLOWEST_RETRY);
                write(stdin.get_ref(), pending)
            }
        };
    }
}

fn continue_waiting() -> io::Result<usize> {
    Err(io::ErrorKind::WouldBlock.into())
}
