//! The shell process of a session and how it is started and fed.

use std::ffi::{CString, OsString};
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::PathBuf;

use tokio::io::unix::AsyncFd;

use super::feeder::Feeder;
use super::place::Place;
use super::script::{Kind, LONGEST_FED, Text};
use crate::app::App;
use crate::command::output::ended;
use crate::command::pipe;
use crate::command::prepare::{Env, c_string, file_variables, shell, usual_identity, variables_file};
use crate::files::attributes::Attributes;
use crate::files::dir;
use crate::files::path::Requested;
use crate::http::ApiError;
use crate::process::exit::Exit;
use crate::process::spawn::{self, Program, SpawnError, Spawned, Stdio};
use crate::process::watch;
use crate::remote::is_local;

/// How the shells of a session are started.
#[derive(Debug)]
pub(super) struct Recipe {
    program: Program,
    /// Where the session began.
    pub(super) start: PathBuf,
    pub(super) kind: Kind,
    /// Mark whose family are all processes of the session.
    pub(super) tag: u64,
    /// Variables of the sandbox's file that the shell knows of.
    pub(super) variables: Vec<(OsString, OsString)>,
    /// What a run touches lies in memory or on a disk of this machine, so that it never waits for a network.
    pub(super) is_local: bool,
}

/// A shell that has just been started, not watched yet.
#[derive(Debug)]
pub(super) struct Born {
    spawned: Spawned,
    feed: OwnedFd,
    /// First text for it.
    begin: Vec<u8>,
}

/// A running shell.
#[derive(Debug)]
pub(super) struct Shell {
    pub(super) pid: i32,
    pub(super) pidfd: AsyncFd<OwnedFd>,
    feeder: Feeder,
}

impl Recipe {
    /// Looks up all that a start needs and makes the working directory where it is missing. Touches the file system.
    ///
    /// # Errors
    /// 400 when the working directory cannot be one, 500 when the sandbox's user is unknown.
    pub(super) fn new(app: &App, cwd: Option<&str>, tag: u64) -> Result<Self, ApiError> {
        let accounts = app.accounts.get();
        let identity = usual_identity(app, &accounts)?;
        let mut env = Env::new(app, &std::collections::BTreeMap::new(), &accounts, identity.as_ref());
        let start = match cwd.filter(|cwd| !cwd.is_empty()) {
            None => app.cwd.clone(),
            Some(cwd) => {
                let path = env.expand(app, cwd)?;
                let owner = identity.as_ref();
                let attributes = Attributes {
                    mode: None,
                    uid: owner.map(|identity| identity.uid),
                    gid: owner.map(|identity| identity.gid),
                };
                let shown = path.display().to_string();
                dir::make_all(&path, &attributes, &shown)
                    .map_err(|error| ApiError::invalid(format!("'cwd': {error}")))?;
                path
            }
        };
        env.0.insert("PWD".into(), start.clone().into_os_string());
        let (path, name) = shell(env.path());
        let kind = if name == "bash" { Kind::Bash } else { Kind::Sh };
        let argv = kind.argv().iter().map(|&word| c_string(word.into()));
        let program = Program {
            candidates: vec![c_string(path.into_os_string())?],
            argv: argv.collect::<Result<_, _>>()?,
            env: env.into_strings()?,
            cwd: c_string(start.clone().into_os_string())?,
            identity,
            tag: Some(tag),
        };
        let variables = file_variables(app);
        let is_local = variables_file(app).is_none_or(|path| is_local(&path));
        Ok(Self { program, start, kind, tag, variables, is_local })
    }

    /// The user its shells run as.
    pub(super) fn identity(&self) -> Option<&crate::accounts::Identity> {
        self.program.identity.as_ref()
    }

    /// The directory that a run asks for. One that is relative is left to the shell, which knows where it is.
    ///
    /// # Errors
    /// 400 when it is no directory.
    pub(super) fn enter(&self, app: &App, cwd: &str) -> Result<OsString, ApiError> {
        if !cwd.starts_with(['/', '~', '$']) {
            return Ok(cwd.into());
        }
        let path = Requested::new(cwd.as_bytes(), app)
            .map_err(|error| ApiError::invalid(format!("'cwd': {error}")))?
            .path;
        match std::fs::metadata(&path) {
            Ok(found) if found.is_dir() => Ok(path.into_os_string()),
            Ok(_) => Err(ApiError::invalid(format!("'cwd': {} is not a directory", path.display()))),
            Err(error) => Err(ApiError::invalid(format!("'cwd': {}: {error}", path.display()))),
        }
    }

    /// Starts a shell; `state` is what the one before has left behind. Blocks until its exec.
    ///
    /// # Errors
    /// It cannot be started.
    pub(super) fn start(&self, app: &App, place: &Place, state: Option<&[u8]>) -> Result<Born, SpawnError> {
        let failed = |error: io::Error| SpawnError {
            errno: error.raw_os_error().unwrap_or(0),
            message: format!("cannot prepare a shell: {error}"),
        };
        // The shell opens it by its name, too.
        let null = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null").map_err(|error| {
            failed(io::Error::new(
                error.kind(),
                format!("sessions need /dev/null, which cannot be opened: {error}"),
            ))
        })?;
        let (read, feed) = pipe::pair().map_err(failed)?;
        // Of this pipe the other end is ours.
        rustix::io::ioctl_fionbio(&read, false).map_err(|error| failed(error.into()))?;
        rustix::io::ioctl_fionbio(&feed, true).map_err(|error| failed(error.into()))?;
        let stdio = Stdio { stdin: read.as_fd(), stdout: null.as_fd(), stderr: null.as_fd() };
        let gone = !self.start.is_dir();
        let program = Program {
            candidates: self.program.candidates.clone(),
            argv: self.program.argv.clone(),
            env: if state.is_some() { linker_only(&self.program.env) } else { self.program.env.clone() },
            cwd: if gone { c"/".to_owned() } else { self.program.cwd.clone() },
            identity: self.program.identity.clone(),
            tag: Some(self.tag),
        };
        let spawned = spawn::spawn(&program, stdio, &app.limits.work_cgroup)?;
        let names = place.names();
        let left =
            state.filter(|state| state.len() > LONGEST_FED).and_then(|state| place.leave("state", state));
        let text = left.as_deref().map(Text::File).or_else(|| state.map(Text::Fed));
        let begin = self.kind.begin(&names, text, self.start.as_os_str());
        Ok(Born { spawned, feed, begin })
    }
}

/// The saved state brings all variables; only what the shell's own start needs comes before it.
fn linker_only(env: &[CString]) -> Vec<CString> {
    env.iter().filter(|entry| entry.as_bytes().starts_with(b"LD_")).cloned().collect()
}

impl Born {
    pub(super) fn pid(&self) -> i32 {
        self.spawned.pid
    }

    /// Lets the runtime watch it. One that cannot be watched is killed.
    pub(super) fn watch(self) -> io::Result<Shell> {
        let pid = self.spawned.pid;
        match (Feeder::new(self.feed, self.begin), watch::readable(self.spawned.pidfd)) {
            (Ok(feeder), Ok(pidfd)) => Ok(Shell { pid, pidfd, feeder }),
            (feeder, pidfd) => {
                let (pidfd, error) = match pidfd {
                    Ok(pidfd) => (pidfd.into_inner(), None),
                    Err((pidfd, error)) => (pidfd, Some(error)),
                };
                let _ = rustix::process::pidfd_send_signal(&pidfd, rustix::process::Signal::KILL);
                let _ = crate::process::exit::wait_blocking(&pidfd);
                Err(error.or_else(|| feeder.err()).unwrap_or_else(|| io::ErrorKind::Other.into()))
            }
        }
    }
}

impl Shell {
    /// Adds to what it reads next.
    pub(super) fn tell(&mut self, text: &[u8]) {
        self.feeder.tell(text);
    }

    /// Waits for its end, and feeds it meanwhile; `None` when it was fed. Cancel safe.
    pub(super) async fn turn(&mut self) -> Option<Exit> {
        tokio::select! {
            exit = ended(&self.pidfd) => Some(exit),
            () = self.feeder.turn() => None,
        }
    }

    /// Whether it has read all there is.
    pub(super) fn has_read_all(&self) -> bool {
        self.feeder.has_read_all()
    }
}
