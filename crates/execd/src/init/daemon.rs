//! The daemon beside init: forked ahead of the order, and forked again when it dies.

use std::io::{self, Write as _};
use std::os::fd::{OwnedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use osb_protocol::boot::{BootFds, Order};
use rustix::process::Signal;

use super::orders::{Orders, Told};
use crate::account_cache::AccountCache;
use crate::app::{App, Limits, Shared};
use crate::binding::{Access, Binding, Current};
use crate::command::registry::Registry;
use crate::command::retention::Retention;
use crate::command::{run as command, spool};
use crate::serve::{self, Listener};
use crate::{log, start, telemetry};

/// A daemon that lives this long has not died of its start.
const SETTLED: Duration = Duration::from_secs(10);
/// First pause before a start after a death in quick succession; doubled up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Init's view of the daemon.
pub(super) struct Daemon {
    fds: BootFds,
    /// Read before the first fork, for both.
    accounts: Arc<AccountCache>,
    order: Option<Order>,
    /// To a daemon that was forked before the order came.
    waiting: Option<Orders>,
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
    pub(super) fn new(fds: BootFds, listeners: Vec<Listener>) -> Self {
        let now = Instant::now();
        let accounts = Arc::new(AccountCache::default());
        let _ = accounts.get();
        Self {
            fds,
            accounts,
            order: None,
            waiting: None,
            listeners,
            pid: None,
            started: now,
            quick_deaths: 0,
            start_at: Some(now),
            restarts: true,
        }
    }

    pub(super) fn fds(&self) -> &BootFds {
        &self.fds
    }

    /// The image's accounts.
    pub(super) fn accounts(&self) -> &AccountCache {
        &self.accounts
    }

    /// Says what the sandbox is: to a daemon that waits, and to those forked from now on.
    pub(super) fn order(&mut self, order: Order, document: OwnedFd) {
        self.order = Some(order);
        if let Some(waiting) = self.waiting.take() {
            waiting.pass_on(&document);
        }
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

    /// Whether that child was the daemon; if so its successor is planned.
    pub(super) fn ended(&mut self, pid: i32) {
        if self.pid != Some(pid) {
            return;
        }
        self.pid = None;
        self.waiting = None;
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
        let (ours, theirs) = match self.order {
            None => Orders::pair().map(|(ours, theirs)| (Some(ours), Some(theirs)))?,
            Some(_) => (None, None),
        };
        // SAFETY: init has one thread, so the child finds every lock free and every structure whole.
        match unsafe { libc::fork() } {
            -1 => Err(io::Error::last_os_error()),
            0 => {
                for &fd in private {
                    // SAFETY: copies of init's descriptors; nothing in the child uses them.
                    unsafe { libc::close(fd) };
                }
                drop(ours);
                let listeners = std::mem::take(&mut self.listeners);
                let accounts = Arc::clone(&self.accounts);
                std::process::exit(match run(&self.fds, accounts, self.order.take(), theirs, listeners) {
                    Ok(()) => 0,
                    Err(error) => {
                        let _ = writeln!(io::stderr(), "execd: {error}");
                        1
                    }
                })
            }
            pid => {
                self.pid = Some(pid);
                self.waiting = ours;
                self.started = Instant::now();
                Ok(())
            }
        }
    }
}

/// The daemon's process. It has the order, or gets it from `orders`.
fn run(
    fds: &BootFds,
    accounts: Arc<AccountCache>,
    order: Option<Order>,
    orders: Option<Orders>,
    listeners: Vec<Listener>,
) -> io::Result<()> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    let stop = start::signal_descriptor(&[libc::SIGTERM])?;
    log::install(log::level(4), log::open(&["stderr".into()])?);
    let mut runtime = None;
    let is_successor = order.is_some();
    let order = match (order, orders) {
        (Some(order), _) => order,
        (None, Some(orders)) => loop {
            match orders.take()? {
                Told::Rehearse => runtime = Some(serve::warm(&accounts)?),
                Told::Order(order, _) => break *order,
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
    for mistake in mistakes {
        tracing::warn!(mistake, "a variable of the sandbox's environment has no effect");
    }
    let telemetry = telemetry::of_variables(variable);
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
        telemetry,
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
