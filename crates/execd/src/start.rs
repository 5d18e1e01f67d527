//! From `main` to a running daemon.

use std::ffi::{OsStr, OsString};
use std::io::{self, Write as _};
use std::os::fd::{FromRawFd, OwnedFd};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use osb_protocol::execd::RuntimeInitRequest;
use rustix::fs::Mode;

use crate::account_cache::AccountCache;
use crate::app::{App, Shared};
use crate::args::{self, Args, Listen, Plain};
use crate::binding::{Access, Binding, Current};
use crate::command::registry::Registry;
use crate::command::{run, spool};
use crate::hooks::{self, Plan};
use crate::init::Superior;
use crate::isolated::{self, config};
use crate::lifecycle::{Lifecycle, Setup};
use crate::process::inherited;
use crate::serve::{self, Listener};
use crate::{bootstrap, clone3, init, listen, log, runtime_init, telemetry};

/// Variables that are the daemon's own business: what it starts must not see them.
const PRIVATE: [&str; 9] = [
    "EXECD_ACCESS_TOKEN",
    "JUPYTER_HOST",
    "JUPYTER_TOKEN",
    config::VARIABLE,
    "EXECD_RUNTIME_INIT",
    runtime_init::SECRET,
    hooks::TRANSPORT,
    hooks::CONFIG_FILE,
    clone3::APPLIED,
];

/// Whether a variable is kept from what the API starts.
#[must_use]
pub fn is_private(name: &OsStr) -> bool {
    PRIVATE.iter().any(|private| name == *private)
}

/// The program.
pub fn main() -> ExitCode {
    if let Some(args) = bootstrap::arguments(std::env::args_os()) {
        return bootstrap::run(args).unwrap_or_else(|error| {
            // Nobody is left to tell when standard error is closed.
            let _ = writeln!(io::stderr(), "bootstrap: {error}");
            ExitCode::FAILURE
        });
    }
    let result = match args::parse(std::env::args_os().skip(1), |name| std::env::var_os(name)) {
        Ok(Args::Boot(fd)) => init::boot(fd),
        Ok(Args::Plain(plain)) => compatible(&plain).and_then(|()| run_plain(plain)),
        Ok(Args::Init(plain, argv)) => compatible(&plain).and_then(|()| init::supervise(plain, argv)),
        Ok(Args::FileWorker(uid, gid)) => {
            prepare_process().and_then(|()| crate::files::identity::run(uid, gid))
        }
        Ok(Args::Isolator) => prepare_process().and_then(|()| crate::isolated::isolator::run_plain()),
        Ok(Args::Help) => io::stdout().write_all(args::HELP.as_bytes()),
        Err(message) => Err(io::Error::other(message)),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Nobody is left to tell when standard error is closed.
            let _ = writeln!(io::stderr(), "execd: {error}");
            ExitCode::FAILURE
        }
    }
}

/// What every form of the daemon does first, while it has one thread.
pub(crate) fn prepare_process() -> io::Result<()> {
    inherited::reserve_standard()?;
    inherited::close_on_exec()?;
    rustix::process::umask(Mode::WGRP | Mode::WOTH);
    Ok(())
}

fn compatible(plain: &Plain) -> io::Result<()> {
    clone3::apply(plain.clone3).map_err(|error| {
        io::Error::new(error.kind(), format!("EXECD_CLONE3_COMPAT: the filter cannot be installed: {error}"))
    })
}

fn run_plain(plain: Plain) -> io::Result<()> {
    prepare_process()?;
    // Before anybody can connect, and then send one of them.
    let stop = signal_descriptor(&FORWARDED)?;
    let (prepared, listener) = prepare(plain)?;
    let socket = match &prepared.plain.listen {
        Listen::Socket(path) => Some(path.clone()),
        Listen::Port(_) => None,
    };
    let result = serve_prepared(&prepared, None, None, false, Arc::default(), vec![listener], stop);
    if let Some(path) = socket {
        let _ = std::fs::remove_file(path);
    }
    result
}

/// Signals that an ordinary daemon passes on to commands that somebody waits for. [`serve::STOPPING`] end it too.
const FORWARDED: [i32; 7] =
    [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT, libc::SIGUSR1, libc::SIGUSR2, libc::SIGWINCH];

/// An ordinary daemon that may begin.
pub(crate) struct Prepared {
    plain: Plain,
    plan: Arc<Plan>,
    env: Vec<(OsString, OsString)>,
    cwd: PathBuf,
    isolation: Box<config::Config>,
}

impl Prepared {
    /// Whether it waits for its binding.
    pub(crate) fn is_gated(&self) -> bool {
        self.plain.runtime_init
    }
}

/// Reads the hooks and the settings of isolated sessions, and opens the port.
///
/// # Errors
/// One of these fails.
pub(crate) fn prepare(plain: Plain) -> io::Result<(Prepared, Listener)> {
    let plan = hooks::load(|name| std::env::var_os(name))?;
    let isolation = match &plain.isolation_config {
        None => config::Config::default(),
        Some(path) => {
            let config = config::Config::read(path).map_err(io::Error::other)?;
            let made = config.make_root();
            made.map_err(|error| io::Error::other(format!("isolation config {}: {error}", path.display())))?;
            config
        }
    };
    let listener = match &plain.listen {
        Listen::Port(port) => listen::tcp(*port).map(Listener::Tcp),
        Listen::Socket(path) => listen::unix(path).map(Listener::Unix),
    }
    .map_err(|error| io::Error::new(error.kind(), format!("cannot listen on {:?}: {error}", plain.listen)))?;
    let env = std::env::vars_os().filter(|(name, _)| !is_private(name)).collect();
    let cwd = std::env::current_dir().unwrap_or_else(|_| "/".into());
    Ok((Prepared { plain, plan: Arc::new(plan), env, cwd, isolation: Box::new(isolation) }, listener))
}

/// Serves as an ordinary daemon until `stop` becomes readable. Under an init of ours it replaces one that has died
/// when `begun` says so, and is bound as `kept` says.
///
/// # Errors
/// The log or the listener cannot be used, or the hook before the entrypoint has failed.
pub(crate) fn serve_prepared(
    prepared: &Prepared,
    superior: Option<Superior>,
    kept: Option<RuntimeInitRequest>,
    begun: bool,
    accounts: Arc<AccountCache>,
    listeners: Vec<Listener>,
    stop: OwnedFd,
) -> io::Result<()> {
    let Prepared { plain, plan, env, cwd, isolation } = prepared;
    log::install(log::level(plain.log_level), log::open(&plain.log)?);
    isolation.warn();
    let access = Access::of_token(plain.access_token.clone());
    let begun = begun || kept.is_some();
    let forwards = superior.is_none();
    let (binding, brought) = match kept {
        Some(request) => {
            crate::runtime_init::restore(request, env.clone(), access).map_err(io::Error::other)?
        }
        None => (Binding::at_start(env.clone(), access), None),
    };
    let lifecycle = Lifecycle::new(Setup {
        plan: brought.map_or_else(|| Arc::clone(plan), Arc::new),
        begun,
        status_file: plain.status_file.clone(),
        superior,
        env: env.clone(),
        keeper: None,
        init_access: Some(Access::of_token(plain.runtime_init_token.clone())),
        gated: plain.runtime_init,
        forwards,
    });
    let app = App::new(Shared {
        binding: Current::new(binding),
        cwd: cwd.clone(),
        line_endings: plain.line_endings,
        commands: Registry::new(plain.retention),
        telemetry: telemetry::of_variables(|name| std::env::var_os(name)),
        accounts,
        lifecycle,
        isolated: isolated::registry::Registry::new(isolated::Source::Own, (**isolation).clone()),
        ..Shared::default()
    });
    spool::remove_leftovers_aside(run::temp_dir(&app));
    tracing::info!(listen = ?plain.listen, "execd listens");
    serve::run(app, listeners, stop)
}

/// Turns these signals into something to read, for this thread and those it starts later; all others get through.
pub(crate) fn signal_descriptor(signals: &[i32]) -> io::Result<OwnedFd> {
    // SAFETY: the set is made by `sigemptyset` before anything reads it, and lives during the calls.
    let fd = unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for &signal in signals {
            libc::sigaddset(&raw mut set, signal);
        }
        if libc::pthread_sigmask(libc::SIG_SETMASK, &raw const set, std::ptr::null_mut()) != 0 {
            return Err(io::Error::last_os_error());
        }
        libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK)
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made the descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
