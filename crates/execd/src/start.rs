//! From `main` to a running daemon.

use std::ffi::{OsStr, OsString};
use std::io::{self, Write as _};
use std::os::fd::{FromRawFd, OwnedFd};
use std::process::ExitCode;

use rustix::fs::Mode;

use crate::app::{App, Shared};
use crate::args::{self, Args, Listen, Plain};
use crate::binding::{Access, Binding, Current};
use crate::command::registry::Registry;
use crate::command::{run, spool};
use crate::process::inherited;
use crate::serve::{self, Listener};
use crate::{init, listen, log, telemetry};

/// Variables that are the daemon's own business: what it starts must not see them.
const PRIVATE: [&str; 5] =
    ["EXECD_ACCESS_TOKEN", "JUPYTER_HOST", "JUPYTER_TOKEN", "EXECD_ISOLATION_CONFIG", "EXECD_RUNTIME_INIT"];

/// Whether a variable is kept from what the API starts.
#[must_use]
pub fn is_private(name: &OsStr) -> bool {
    PRIVATE.iter().any(|private| name == *private)
}

/// The program.
pub fn main() -> ExitCode {
    let result = match args::parse(std::env::args_os().skip(1), |name| std::env::var_os(name)) {
        Ok(Args::Boot(fd)) => init::boot(fd),
        Ok(Args::Plain(plain)) => run_plain(plain),
        Ok(Args::FileWorker(uid, gid)) => {
            prepare_process().and_then(|()| crate::files::identity::run(uid, gid))
        }
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

fn run_plain(plain: Plain) -> io::Result<()> {
    prepare_process()?;
    log::install(log::level(plain.log_level), log::open(&plain.log)?);
    let listener = match &plain.listen {
        Listen::Port(port) => listen::tcp(*port).map(Listener::Tcp),
        Listen::Socket(path) => listen::unix(path).map(Listener::Unix),
    }
    .map_err(|error| io::Error::new(error.kind(), format!("cannot listen on {:?}: {error}", plain.listen)))?;
    let env: Vec<(OsString, OsString)> = std::env::vars_os().filter(|(name, _)| !is_private(name)).collect();
    let app = App::new(Shared {
        binding: Current::new(Binding::at_start(env, Access::of_token(plain.access_token))),
        cwd: std::env::current_dir().unwrap_or_else(|_| "/".into()),
        line_endings: plain.line_endings,
        commands: Registry::new(plain.retention),
        telemetry: telemetry::of_variables(|name| std::env::var_os(name)),
        ..Shared::default()
    });
    let stop = signal_descriptor(&[libc::SIGTERM, libc::SIGINT])?;
    spool::remove_leftovers_aside(run::temp_dir(&app));
    tracing::info!(listen = ?plain.listen, "execd listens");
    serve::run(app, vec![listener], stop)?;
    if let Listen::Socket(path) = &plain.listen {
        let _ = std::fs::remove_file(path);
    }
    Ok(())
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
