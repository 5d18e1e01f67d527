//! Starts the entrypoint.

use std::collections::BTreeMap;
use std::ffi::{CString, OsStr, OsString};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::ffi::OsStringExt as _;

use osb_confine::seccomp::Filter;
use osb_protocol::boot::{BootFds, Order};

use crate::account_cache::AccountCache;
use crate::command::prepare::{DEFAULT_PATH, candidates};
use crate::hooks::{CONFIG_FILE, TRANSPORT};
use crate::process::spawn::{self, Program, SpawnError, Stdio};

/// The daemon's secrets and orders; all else of the environment is meant for the entrypoint.
const OURS: [&str; 5] =
    ["EXECD_ACCESS_TOKEN", crate::runtime_init::SECRET, TRANSPORT, CONFIG_FILE, crate::clone3::APPLIED];

/// What clients name to keep a sandbox alive until it is deleted. Init waits anyway, so no process does it a second
/// time: it would cost more memory than all the rest of an idle sandbox, and small images have no `tail`.
const IDLE: [&str; 3] = ["tail", "-f", "/dev/null"];

/// A program that init has started.
pub(super) struct Entrypoint {
    pub(super) pid: i32,
    /// Output of it and of whom it passed it to, until all have closed it.
    pub(super) output: OwnedFd,
}

/// Starts it; `None` when there is nothing to do but to wait.
///
/// # Errors
/// It cannot be executed; the message names it.
pub(super) fn start(
    order: &Order,
    fds: &BootFds,
    accounts: &AccountCache,
    filter: Option<&Filter>,
) -> Result<Option<Entrypoint>, SpawnError> {
    let program = program(order, accounts)?;
    if order.entrypoint == IDLE {
        return Ok(None);
    }
    let null = crate::process::null::open().map_err(|error| failed("make an empty input", &error))?;
    let (read, write) = crate::command::pipe::pair().map_err(|error| failed("make a pipe", &error))?;
    let stdio = Stdio { stdin: null.as_fd(), stdout: write.as_fd(), stderr: write.as_fd() };
    let spawned = spawn::spawn_under(filter, &program, stdio, &fds.work_cgroup)?;
    Ok(Some(Entrypoint { pid: spawned.pid, output: read }))
}

/// Starts a program in the place of this one: on its input and outputs, in its directory, as its user.
///
/// # Errors
/// It cannot be executed; the message names it.
pub(super) fn start_inherited(
    argv: &[OsString],
    env: Vec<(OsString, OsString)>,
    tag: u64,
) -> Result<i32, SpawnError> {
    let mut env: BTreeMap<OsString, OsString> = env.into_iter().collect();
    for name in OURS {
        env.remove(OsStr::new(name));
    }
    let name =
        argv.first().ok_or_else(|| failed("find the entrypoint", &std::io::ErrorKind::NotFound.into()))?;
    let path = env.get(OsStr::new("PATH")).map_or_else(|| OsStr::new(DEFAULT_PATH), OsString::as_os_str);
    let candidates = match name.to_str() {
        Some(name) => candidates(name, path),
        None => vec![name.into()],
    };
    let bytes = |text: OsString| {
        CString::new(text.into_vec())
            .map_err(|_| failed("use a NUL byte", &std::io::ErrorKind::InvalidInput.into()))
    };
    let cwd = std::env::current_dir().unwrap_or_else(|_| "/".into());
    let program = Program {
        candidates: candidates.into_iter().map(|path| bytes(path.into())).collect::<Result<_, _>>()?,
        argv: argv.iter().cloned().map(bytes).collect::<Result<_, _>>()?,
        env: env
            .into_iter()
            .map(|(mut name, value)| {
                name.push("=");
                name.push(value);
                bytes(name)
            })
            .collect::<Result<_, _>>()?,
        cwd: bytes(cwd.into())?,
        identity: None,
        tag: Some(tag),
    };
    let copies = [rustix::stdio::stdin(), rustix::stdio::stdout(), rustix::stdio::stderr()]
        .map(|fd| rustix::io::fcntl_dupfd_cloexec(fd, 3));
    let [Ok(stdin), Ok(stdout), Ok(stderr)] = &copies else {
        return Err(failed("pass on input and outputs", &std::io::Error::last_os_error()));
    };
    let stdio = Stdio { stdin: stdin.as_fd(), stdout: stdout.as_fd(), stderr: stderr.as_fd() };
    Ok(spawn::spawn_in_group(&program, stdio)?.pid)
}

/// Goes the way of [`start`] with a program that cannot be executed, so that nothing on it is done for the first time
/// when somebody waits. See [`crate::serve::warm`].
pub(super) fn rehearse(accounts: &AccountCache, filter: Option<&Filter>) {
    const ORDER: &str = r#"{"sandbox_id":"","entrypoint":["/proc"],"env":[["PATH","/bin"],["LANG","C.UTF-8"]],
        "volumes":[],"line_endings":"keep"}"#;
    if let Ok(order) = serde_json::from_str(ORDER) {
        // Fails as it should.
        let _ = start(&order, &BootFds::default(), accounts, filter);
    }
}

fn program(order: &Order, accounts: &AccountCache) -> Result<Program, SpawnError> {
    let identity = accounts
        .get()
        .resolve(order.user.as_deref().unwrap_or_default())
        .map_err(|error| SpawnError { errno: 0, message: format!("the user of the image: {error}") })?;

    let mut env: BTreeMap<&str, &str> =
        order.env.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    for name in OURS {
        env.remove(name);
    }
    env.entry("HOME").or_insert(&identity.home);
    if let Some(name) = &identity.name {
        env.entry("USER").or_insert(name);
    }
    let path = *env.entry("PATH").or_insert(DEFAULT_PATH);

    let cwd = order.cwd.as_deref().filter(|cwd| !cwd.is_empty()).unwrap_or("/");
    std::fs::create_dir_all(cwd).map_err(|error| failed(&format!("make the directory {cwd:?}"), &error))?;
    for volume in &order.volumes {
        // One that cannot be made is missed by whoever needs it, not by everybody.
        let _ = std::fs::create_dir_all(volume);
    }

    let name = order.entrypoint.first().filter(|name| !name.is_empty()).ok_or_else(|| SpawnError {
        errno: libc::EINVAL,
        message: "the entrypoint is empty; name a program".to_owned(),
    })?;
    let candidates = candidates(name, OsStr::new(path));
    Ok(Program {
        candidates: candidates
            .into_iter()
            .map(|path| c_string(path.to_string_lossy().into_owned()))
            .collect::<Result<_, _>>()?,
        argv: order.entrypoint.iter().cloned().map(c_string).collect::<Result<_, _>>()?,
        env: env
            .iter()
            .filter(|(name, _)| !name.is_empty() && !name.contains('='))
            .map(|(name, value)| c_string(format!("{name}={value}")))
            .collect::<Result<_, _>>()?,
        cwd: c_string(cwd.to_owned())?,
        identity: Some(identity),
        tag: None,
    })
}

fn c_string(text: String) -> Result<CString, SpawnError> {
    CString::new(text).map_err(|_| SpawnError {
        errno: libc::EINVAL,
        message: "entrypoint, environment and directory cannot hold NUL bytes".to_owned(),
    })
}

fn failed(what: &str, error: &std::io::Error) -> SpawnError {
    SpawnError { errno: error.raw_os_error().unwrap_or(0), message: format!("cannot {what}: {error}") }
}
