//! The daemon beside init: forked ahead of the order, and forked again when it dies.

use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use osb_confine::seccomp::Filter;
use osb_protocol::boot::{BootFds, Order};
use rustix::process::Signal;

use super::orders::{self, Orders, Told};
use super::superior::{Done, Superior, Word, document};
use crate::account_cache::AccountCache;
use crate::app::{App, Limits, Shared};
use crate::binding::{Access, Binding, Current};
use crate::command::registry::Registry;
use crate::command::retention::Retention;
use crate::command::{run as command, spool};
use crate::hooks::Plan;
use crate::isolated::{self, config, isolator};
use crate::lifecycle::{Lifecycle, Setup};
use crate::serve::{self, Listener};
use crate::start::Prepared;
use crate::{log, start, telemetry};

/// A daemon that lives this long has not died of its start.
const SETTLED: Duration = Duration::from_secs(10);
/// First pause before a start after a death in quick succession; doubled up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// What the daemon is to be.
pub(super) enum Config {
    /// That of the embedded engine, which gets its order.
    Boot(BootFds),
    /// An ordinary one.
    Plain(Prepared),
}

/// Init's view of the daemon.
pub(super) struct Daemon {
    config: Config,
    /// Read before the first fork, for both.
    accounts: Arc<AccountCache>,
    order: Option<Order>,
    /// To a daemon that was forked before the order came.
    waiting: Option<Orders>,
    /// To a daemon that has words for init.
    link: Option<Orders>,
    /// Where the output of hooks goes.
    keeper: Option<OwnedFd>,
    /// Whether the hook before the entrypoint is done with.
    begun: bool,
    /// What a runtime init has said, for the next daemon.
    kept: Option<OwnedFd>,
    /// From the engine's daemon: a socket on it is to be served by a new isolator.
    isolation: Option<OwnedFd>,
    /// For all that init starts but isolators.
    filter: Option<Filter>,
    /// Held here too, so that connections wait while there is no daemon.
    listeners: Vec<Listener>,
    pid: Option<i32>,
    started: Instant,
    quick_deaths: u32,
    start_at: Option<Instant>,
    restarts: bool,
}

impl Daemon {
    /// The first start is due at once.
    pub(super) fn new(config: Config, listeners: Vec<Listener>, filter: Option<Filter>) -> Self {
        let now = Instant::now();
        let accounts = Arc::new(AccountCache::default());
        let _ = accounts.get();
        Self {
            config,
            accounts,
            order: None,
            waiting: None,
            link: None,
            keeper: None,
            begun: false,
            kept: None,
            isolation: None,
            filter,
            listeners,
            pid: None,
            started: now,
            quick_deaths: 0,
            start_at: Some(now),
            restarts: true,
        }
    }

    /// Descriptors of the engine's; none elsewhere.
    pub(super) fn fds(&self) -> Option<&BootFds> {
        match &self.config {
            Config::Boot(fds) => Some(fds),
            Config::Plain(_) => None,
        }
    }

    /// The socket on which the daemon's words come.
    pub(super) fn link(&self) -> Option<BorrowedFd<'_>> {
        self.link.as_ref().map(|link| link.as_fd())
    }

    /// The next word of the daemon, with its document. `None`: it has gone.
    pub(super) fn word(&mut self) -> Option<OwnedFd> {
        let received = self.link.as_ref()?.receive();
        let document = received.ok().flatten().and_then(|fds| fds.into_iter().next());
        if document.is_none() {
            self.link = None;
        }
        document
    }

    /// Answers the daemon's last word.
    pub(super) fn answer(&self, done: &Done) {
        if let (Some(link), Ok(document)) = (&self.link, document(done)) {
            link.pass_on(&document, None);
        }
    }

    /// The entrypoint has been started, or need not be: a daemon that comes later goes straight to work.
    pub(super) fn begun(&mut self) {
        self.begun = true;
    }

    /// For the daemon that comes when this one dies.
    pub(super) fn keep(&mut self, request: OwnedFd) {
        self.kept = Some(request);
    }

    /// The image's accounts.
    pub(super) fn accounts(&self) -> &AccountCache {
        &self.accounts
    }

    /// What is taken from all that init starts.
    pub(super) fn filter(&self) -> Option<&Filter> {
        self.filter.as_ref()
    }

    /// Readable when the daemon wants an isolator.
    pub(super) fn isolation(&self) -> Option<BorrowedFd<'_>> {
        self.isolation.as_ref().map(|socket| socket.as_fd())
    }

    /// Starts an isolator on the socket that the daemon has sent. It ends when the daemon's end is closed.
    pub(super) fn start_isolator(&mut self) {
        let (Some(isolation), Config::Boot(fds)) = (&self.isolation, &self.config) else { return };
        let Ok(Some(socket)) = orders::descriptor(isolation) else {
            // The daemon is gone, or talks nonsense.
            self.isolation = None;
            return;
        };
        // SAFETY: init has one thread, so the child finds every lock free and every structure whole.
        let pid = unsafe { libc::fork() };
        if pid != 0 {
            // The daemon sees a socket that is closed when it could not be forked. Init reaps it as it does orphans.
            return;
        }
        let mut kept: Vec<RawFd> = fds.work_cgroup.clone();
        kept.extend(fds.uppers);
        kept.push(socket.as_raw_fd());
        crate::process::inherited::close_all_but(&kept);
        let start = isolator::Start {
            socket,
            // SAFETY: the boot document's descriptor; this process has its own copy and owns it once.
            uppers: fds.uppers.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }),
            work_cgroup: fds.work_cgroup.clone(),
        };
        let code = if isolator::run(start).is_ok() { 0 } else { 1 };
        // SAFETY: leaves without running anything of init's.
        unsafe { libc::_exit(code) }
    }

    /// Says what the sandbox is: to a daemon that waits, and to those forked from now on.
    ///
    /// With hooks the daemon runs them, and their output goes to `keeper`.
    pub(super) fn order(&mut self, order: Order, document: &OwnedFd, keeper: Option<OwnedFd>) {
        if let Some(waiting) = self.waiting.take() {
            waiting.pass_on(document, keeper.as_ref());
            if order.lifecycle.is_some() {
                self.link = Some(waiting);
            }
        }
        self.order = Some(order);
        self.keeper = keeper;
    }

    /// Has a daemon that waits go the way of its first requests.
    pub(super) fn rehearse(&self) {
        if let Some(waiting) = &self.waiting {
            waiting.rehearse();
        }
    }

    /// When the next start is due.
    pub(super) fn start_at(&self) -> Option<Instant> {
        self.start_at
    }

    /// Whether that child is the daemon.
    pub(super) fn is(&self, pid: i32) -> bool {
        self.pid == Some(pid)
    }

    /// Whether the hook before the entrypoint is still to be done with.
    pub(super) fn must_begin(&self) -> bool {
        let waits_for_binding = matches!(&self.config, Config::Plain(prepared) if prepared.is_gated());
        !self.begun && !waits_for_binding
    }

    /// It has died; its successor is planned.
    pub(super) fn ended(&mut self) {
        self.pid = None;
        self.waiting = None;
        self.link = None;
        self.isolation = None;
        if self.started.elapsed() >= SETTLED {
            self.quick_deaths = 0;
        }
        let pause = match self.quick_deaths {
            0 => Duration::ZERO,
            deaths => FIRST_PAUSE.saturating_mul(1 << (deaths - 1).min(10)).min(LONGEST_PAUSE),
        };
        self.quick_deaths = self.quick_deaths.saturating_add(1);
        self.start_at = self.restarts.then(|| Instant::now() + pause);
    }

    /// Starts a successor when its time has come. `private` are init's own descriptors.
    pub(super) fn start_if_due(&mut self, private: &[RawFd]) {
        if self.start_at.is_none_or(|at| at > Instant::now()) {
            return;
        }
        // Without memory or process numbers now: tried again later.
        self.start_at = self.fork(private).is_err().then(|| Instant::now() + LONGEST_PAUSE);
    }

    /// From now on a daemon that ends stays away.
    pub(super) fn stop_restarting(&mut self) {
        self.restarts = false;
        self.start_at = None;
    }

    pub(super) fn signal(&self, signal: i32) {
        if let Some(pid) = self.pid {
            // SAFETY: our own child, which is not reaped yet.
            unsafe { libc::kill(pid, signal) };
        }
    }

    pub(super) fn kill(&self) {
        self.signal(libc::SIGKILL);
    }

    fn fork(&mut self, private: &[RawFd]) -> io::Result<()> {
        let waits = matches!(self.config, Config::Boot(_)) && self.order.is_none();
        let talks = match &self.config {
            Config::Boot(_) => self.order.as_ref().is_none_or(|order| order.lifecycle.is_some()),
            Config::Plain(_) => true,
        };
        let (ours, theirs) = if talks {
            Orders::pair().map(|(ours, theirs)| (Some(ours), Some(theirs)))?
        } else {
            (None, None)
        };
        let (asked, asks) = rustix::net::socketpair(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::SEQPACKET,
            rustix::net::SocketFlags::CLOEXEC,
            None,
        )?;
        // SAFETY: init has one thread, so the child finds every lock free and every structure whole.
        match unsafe { libc::fork() } {
            -1 => Err(io::Error::last_os_error()),
            0 => {
                for &fd in private {
                    // SAFETY: copies of init's descriptors; nothing in the child uses them.
                    unsafe { libc::close(fd) };
                }
                drop((ours, asked));
                std::process::exit(match self.become_daemon(theirs, asks) {
                    Ok(()) => 0,
                    Err(error) => {
                        let _ = writeln!(io::stderr(), "execd: {error}");
                        1
                    }
                })
            }
            pid => {
                self.pid = Some(pid);
                (self.waiting, self.link) = if waits { (ours, None) } else { (None, ours) };
                self.isolation = matches!(self.config, Config::Boot(_)).then_some(asked);
                self.started = Instant::now();
                Ok(())
            }
        }
    }
}

/// The daemon's process.
impl Daemon {
    fn become_daemon(&mut self, socket: Option<Orders>, isolation: OwnedFd) -> io::Result<()> {
        self.filter.as_ref().map_or(Ok(()), Filter::install)?;
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
        let stop = start::signal_descriptor(&[libc::SIGTERM])?;
        let listeners = std::mem::take(&mut self.listeners);
        let accounts = Arc::clone(&self.accounts);
        match &self.config {
            Config::Boot(fds) => {
                let order = self.order.take();
                run_ordered(
                    fds,
                    accounts,
                    order,
                    socket,
                    self.keeper.take(),
                    self.begun,
                    listeners,
                    stop,
                    isolation,
                )
            }
            Config::Plain(prepared) => {
                let superior = socket.map(|socket| Superior::new(socket, self.begun));
                let kept = match self.kept.take().map(|kept| super::orders::read(&kept)).transpose()? {
                    Some(Word::Remember(request)) => Some(*request),
                    _ => None,
                };
                start::serve_prepared(prepared, superior, kept, self.begun, accounts, listeners, stop)
            }
        }
    }
}

/// The daemon of the embedded engine. It has the order, or gets it from the socket.
#[allow(clippy::too_many_arguments)]
fn run_ordered(
    fds: &BootFds,
    accounts: Arc<AccountCache>,
    order: Option<Order>,
    socket: Option<Orders>,
    keeper: Option<OwnedFd>,
    begun: bool,
    listeners: Vec<Listener>,
    stop: OwnedFd,
    isolation: OwnedFd,
) -> io::Result<()> {
    log::install(log::level(4), log::open(&["stderr".into()])?);
    let mut runtime = None;
    let is_successor = order.is_some();
    let (order, keeper) = match (order, &socket) {
        (Some(order), _) => (order, keeper),
        (None, Some(orders)) => loop {
            match orders.take()? {
                Told::Rehearse => runtime = Some(serve::warm(&accounts)?),
                Told::Order(order, _, keeper) => break (*order, keeper),
                Told::Leave => return Ok(()),
            }
        },
        (None, None) => return Err(io::Error::other("a daemon without an order")),
    };
    let variable =
        |name: &str| order.env.iter().rfind(|(known, _)| known == name).map(|(_, value)| value.into());
    let (retention, mistakes) = Retention::from_variables(variable);
    // Who names a place for the log wants more of it than the engine does.
    if let Some(places) = log::places(variable) {
        match log::open(&places) {
            Ok(out) => log::install(log::level(6), out),
            Err(error) => tracing::warn!(%error, "the log goes where it went"),
        }
    }
    let mut mistakes = mistakes;
    let isolated_by = variable(config::VARIABLE).filter(|path: &std::ffi::OsString| !path.is_empty());
    let config =
        isolated_by.map_or_else(|| Ok(config::Config::default()), |path| config::Config::read(path.as_ref()));
    let config = config.unwrap_or_else(|mistake| {
        mistakes.push(mistake);
        config::Config::default()
    });
    config.warn();
    for mistake in mistakes {
        tracing::warn!(mistake, "a variable of the sandbox's environment has no effect");
    }
    let telemetry = telemetry::of_variables(variable);
    let runtime = match runtime {
        Some(runtime) => Some(runtime),
        None if order.lifecycle.is_some() => Some(serve::build()?),
        None => None,
    };
    let lifecycle = match &order.lifecycle {
        None => Lifecycle::default(),
        Some(hooks) => {
            let _entered = runtime.as_ref().map(tokio::runtime::Runtime::enter);
            Lifecycle::new(Setup {
                // The server has checked them, so this is a matter of versions.
                plan: Arc::new(Plan::new(hooks).map_err(io::Error::other)?),
                begun,
                superior: socket.map(|socket| Superior::new(socket, begun)),
                keeper: keeper.map(keeper_of).transpose()?,
                ..Setup::default()
            })
        }
    };
    let env = order.env.into_iter().map(|(name, value)| (name.into(), value.into()));
    let env = env.filter(|(name, _): &(std::ffi::OsString, _)| !start::is_private(name)).collect();
    let app = App::new(Shared {
        binding: Current::new(Binding::at_start(env, Access::of_token(order.access_token))),
        user: order.user,
        cwd: order.cwd.filter(|cwd| !cwd.is_empty()).map_or_else(|| "/".into(), Into::into),
        line_endings: order.line_endings,
        limits: Limits {
            memory_bytes: order.memory_limit_bytes,
            cpu_millis: order.cpu_limit_millis,
            usage: fds.usage.clone(),
            work_cgroup: fds.work_cgroup.clone(),
        },
        accounts,
        commands: Registry::new(retention),
        isolated: isolated::registry::Registry::new(isolated::Source::Init(isolation), config),
        telemetry,
        lifecycle,
        ..Shared::default()
    });
    if is_successor {
        spool::remove_leftovers_aside(command::temp_dir(&app));
    }
    match runtime {
        Some(runtime) => serve::run_on(runtime, app, listeners, stop),
        None => serve::run(app, listeners, stop),
    }
}

fn keeper_of(pipe: OwnedFd) -> io::Result<tokio::sync::Mutex<tokio::net::unix::pipe::Sender>> {
    rustix::io::ioctl_fionbio(&pipe, true)?;
    Ok(tokio::sync::Mutex::new(tokio::net::unix::pipe::Sender::from_owned_fd(pipe)?))
}
