//! The directory of a session: named pipes, and a file while a long text is handed over.
//!
//! A named pipe is the only pipe that a running shell can be given afresh for each run, so that what earlier runs
//! have left in the background does not write into later ones. The directory belongs to the daemon: nobody else can
//! put something of his in the place of a pipe that the daemon is about to open.

use std::fs;
use std::io::{self, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FileType, Gid, Mode, OFlags, Uid};

use super::script::Names;
use crate::accounts::Identity;
use crate::app::App;
use crate::command::run::temp_dir;

/// Memory that every container has; a named pipe takes no space in it.
const SHARED_MEMORY: &str = "/dev/shm";

/// The directory, removed on drop.
#[derive(Debug)]
pub(super) struct Place {
    dir: PathBuf,
    owner: Option<(u32, u32)>,
}

/// What a run needs of it.
#[derive(Debug)]
pub(super) struct Opened {
    /// The control pipe, when it had to be made anew.
    pub(super) control: Option<OwnedFd>,
    /// Reading end of the run's output.
    pub(super) output: OwnedFd,
}

impl Place {
    /// Makes the directory and its control pipe, of which the reading end comes back.
    ///
    /// # Errors
    /// Neither place for temporary things takes it.
    pub(super) fn new(app: &App, identity: Option<&Identity>) -> io::Result<(Self, OwnedFd)> {
        let name = format!(".execd-session-{}", uuid::Uuid::new_v4().simple());
        let owner = identity.map(|identity| (identity.uid, identity.gid));
        let mut parents = vec![PathBuf::from(SHARED_MEMORY), temp_dir(app)];
        // A place that was asked for comes first, unless the shell's user may have no way to it.
        if app.binding().var("TMPDIR").is_some_and(|dir| !dir.is_empty())
            && owner.is_none_or(|(uid, _)| uid == 0)
        {
            parents.swap(0, 1);
        }
        let mut result = Err(io::ErrorKind::NotFound.into());
        for parent in parents {
            let place = Self { dir: parent.join(&name), owner };
            match place.make() {
                Ok(control) => return Ok((place, control)),
                Err(error) => {
                    result = Err(io::Error::new(error.kind(), format!("{}: {error}", parent.display())));
                }
            }
        }
        result
    }

    fn make(&self) -> io::Result<OwnedFd> {
        fs::DirBuilder::new().mode(0o711).create(&self.dir)?;
        self.pipe("control", OFlags::RDWR)
    }

    /// Names for the shell.
    pub(super) fn names(&self) -> Names {
        let name = |name: &str| self.dir.join(name).as_os_str().as_bytes().to_vec();
        Names { control: name("control"), output: name("output") }
    }

    /// Makes a new output pipe. What somebody has removed is made again.
    pub(super) fn open_output(&self) -> io::Result<Opened> {
        let mut control = None;
        if rustix::fs::lstat(self.dir.join("control")).is_err() {
            let _ = fs::remove_dir_all(&self.dir);
            control = Some(self.make()?);
        }
        self.close_output();
        Ok(Opened { control, output: self.pipe("output", OFlags::RDONLY)? })
    }

    /// Takes the names of the output pipe and of the texts away; who has them open keeps them.
    pub(super) fn close_output(&self) {
        for name in ["output", "text", "state"] {
            let _ = fs::remove_file(self.dir.join(name));
        }
    }

    fn pipe(&self, name: &str, how: OFlags) -> io::Result<OwnedFd> {
        let path = self.dir.join(name);
        rustix::fs::mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
        let flags = how | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let pipe = rustix::fs::open(&path, flags, Mode::empty())?;
        if let Some((uid, gid)) = self.owner {
            rustix::fs::fchown(&pipe, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)))?;
        }
        Ok(pipe)
    }

    /// Leaves a text for the shell. `None` when there is no room for it.
    pub(super) fn leave(&self, name: &str, text: &[u8]) -> Option<PathBuf> {
        let path = self.dir.join(name);
        let write = || -> io::Result<()> {
            let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
            file.write_all(text)?;
            if let Some((uid, gid)) = self.owner {
                rustix::fs::fchown(&file, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)))?;
            }
            Ok(())
        };
        if write().is_err() {
            let _ = fs::remove_file(&path);
            return None;
        }
        Some(path)
    }

    /// Where it is.
    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.dir);
    }
}
