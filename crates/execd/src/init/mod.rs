//! PID 1 of a sandbox: of the embedded engine's ([`boot`]), or of a container ([`supervise`]).
//!
//! The process forks once, before any runtime or thread: the child is the daemon, the parent stays here, small and
//! asleep. It starts the entrypoint, reaps every orphan, passes signals on, starts the daemon again when it dies, and
//! leaves word of the end. It wakes for events only.
//!
//! Under the engine both are started before anybody has asked for the sandbox and wait for its order. Hooks are the
//! daemon's to run; with one before the entrypoint, init waits for the daemon's word.

mod daemon;
mod descendants;
mod entrypoint;
mod log_file;
mod orders;
mod run;
mod superior;

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixListener;

use osb_confine::seccomp::Filter;
use osb_protocol::boot::Boot;
use osb_protocol::execd::EXECD_PORT;

use crate::serve::Listener;
use crate::{listen, start};
use daemon::{Config, Daemon};
use log_file::LogFile;
use orders::Orders;
use run::{FORWARDED, Init, Outlet, Work};

pub use superior::Superior;

/// Runs as init with the document behind `fd`. Returns only when it could not begin.
///
/// # Errors
/// The document cannot be read, or the kernel refuses what init needs.
pub fn boot(fd: i32) -> io::Result<()> {
    start::prepare_process()?;
    let boot = read_document(fd)?;
    let in_own_namespace = shield()?;
    let Boot { listen_tcp, may_build, fds } = boot;
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
    let outlet = Outlet::Engine { log, ended, output: None, hooks: None };
    let daemon = Daemon::new(Config::Boot(fds), listeners, may_build.then(Filter::rest));
    let mut init = Init::new(daemon, outlet, signals, in_own_namespace);
    init.start_daemon(&[orders.as_raw_fd()]);
    let (order, document) = init.wait_for(&orders)?;
    init.begin(order, &document, orders);
    init.run()
}

/// Runs `argv` as a container's init, or as the reaper of what descends from it when it is not the first process.
/// Returns only when it could not begin.
///
/// # Errors
/// The port is taken, the hooks are wrong, or the kernel refuses what init needs.
pub fn supervise(plain: crate::args::Plain, argv: Vec<OsString>) -> io::Result<()> {
    start::prepare_process()?;
    let in_own_namespace = shield()?;
    let (prepared, listener) = start::prepare(plain)?;
    let signals = start::signal_descriptor(&[&FORWARDED[..], &[libc::SIGCHLD]].concat())?;
    let daemon = Daemon::new(Config::Plain(prepared), vec![listener], None);
    let mut init = Init::new(daemon, Outlet::Inherited, signals, in_own_namespace);
    init.work = Work::Given { argv, env: std::env::vars_os().collect() };
    init.run()
}

/// Keeps others from looking into this process. Tells whether it is the first of its namespace, to which all orphans
/// come; otherwise those that descend from it do.
fn shield() -> io::Result<bool> {
    rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable)?;
    let is_init = rustix::process::getpid().is_init();
    if !is_init {
        rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
    }
    Ok(is_init)
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
