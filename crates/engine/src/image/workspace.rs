//! Directories for work in progress, and the locks that processes and threads tell each other by.

use super::error::{Error, Result};
use rustix::fs::{FlockOperation, Mode, OFlags};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use uuid::Uuid;

/// File in a workspace that names the layers its owner counts on.
const PINS: &str = "pins";

/// A lock between processes and threads. The kernel drops it with the process.
#[derive(Debug)]
pub(super) struct Lock {
    _file: File,
}

impl Lock {
    /// Waits for the lock on a file, which is made when it is not there.
    pub(super) fn wait(path: &Path, operation: FlockOperation) -> Result<Self> {
        let file = File::options().create(true).truncate(false).write(true).open(path);
        let file = file.map_err(|error| Error::io("open", path, error))?;
        match Self::on(file, path, operation)? {
            Some(lock) => Ok(lock),
            // A waiting lock call only returns with the lock.
            None => Err(Error::io("lock", path, io::Error::from(io::ErrorKind::WouldBlock))),
        }
    }

    /// Locks an open file or directory; `None` when somebody else has it and the operation does not wait.
    fn on(file: File, path: &Path, operation: FlockOperation) -> Result<Option<Self>> {
        loop {
            match rustix::fs::flock(&file, operation) {
                Ok(()) => return Ok(Some(Self { _file: file })),
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
                Err(errno) => return Err(Error::io("lock", path, errno)),
            }
        }
    }

    /// Whether somebody has a lock on the file; what is not there nobody has locked.
    pub(super) fn is_held(path: &Path) -> Result<bool> {
        let file = match File::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            Err(error) => return Err(Error::io("open", path, error)),
        };
        Ok(Self::on(file, path, FlockOperation::NonBlockingLockExclusive)?.is_none())
    }
}

/// The lock that those who begin to count on layers share, each for a moment, and that those who delete have alone
/// while they take things out of sight.
pub(super) fn lock_layers(images: &Path, operation: FlockOperation) -> Result<Lock> {
    Lock::wait(&images.join("gc.lock"), operation)
}

/// A directory for work in progress on the file system of the store. It is removed when dropped, and after a crash
/// by whoever opens the store next.
#[derive(Debug)]
pub struct Workspace {
    path: PathBuf,
    /// On the directory: whoever cleans up leaves locked ones alone.
    _lock: Lock,
}

impl Workspace {
    /// Makes one below `tmp` of the store.
    pub(super) fn new(images: &Path) -> Result<Self> {
        // Nobody may meet the directory between its making and its lock.
        let _shared = lock_layers(images, FlockOperation::LockShared)?;
        let path = images.join("tmp").join(Uuid::new_v4().to_string());
        std::fs::create_dir(&path).map_err(|error| Error::io("create", &path, error))?;
        match lock_directory(&path) {
            Ok(Some(lock)) => Ok(Self { path, _lock: lock }),
            Ok(None) => Err(Error::io("lock", &path, io::Error::from(io::ErrorKind::WouldBlock))),
            Err(error) => Err(error),
        }
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Keeps these layers too from being deleted as long as the workspace is there. The caller holds the shared lock
    /// of the layers since before it looked for them.
    pub(super) fn pin(&self, layers: &[String]) -> Result<()> {
        use std::io::Write as _;
        let path = self.path.join(PINS);
        let lines: String = layers.iter().map(|layer| format!("{layer}\n")).collect();
        File::options()
            .create(true)
            .append(true)
            .open(&path)
            .and_then(|mut file| file.write_all(lines.as_bytes()))
            .map_err(|error| Error::io("write", path, error))
    }

    /// Takes all pins back.
    pub(super) fn unpin(&self) -> Result<()> {
        let path = self.path.join(PINS);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(Error::io("remove", path, error)),
            _ => Ok(()),
        }
    }
}

impl Drop for Workspace {
    fn drop(&mut self) {
        if let Err(error) = remove_tree(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "cannot remove temporary files");
        }
    }
}

fn lock_directory(path: &Path) -> Result<Option<Lock>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(fd) => Lock::on(File::from(fd), path, FlockOperation::NonBlockingLockExclusive),
        Err(rustix::io::Errno::NOENT) => Ok(None),
        Err(errno) => Err(Error::io("open", path, errno)),
    }
}

/// What lies in `tmp` of the store.
#[derive(Debug, Default)]
pub(super) struct Temporary {
    /// Layers that somebody's work counts on.
    pub(super) pinned: std::collections::BTreeSet<String>,
    /// Things that nobody works with, and the locks that say so.
    rubbish: Vec<(PathBuf, Option<Lock>)>,
}

impl Temporary {
    /// Looks through it. The caller has the layers' lock alone.
    pub(super) fn look(images: &Path) -> Result<Self> {
        let mut found = Self::default();
        let tmp = images.join("tmp");
        let failed = |error| Error::io("read", &tmp, error);
        for entry in std::fs::read_dir(&tmp).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let path = entry.path();
            if !entry.file_type().map_err(failed)?.is_dir() {
                found.rubbish.push((path, None));
                continue;
            }
            match lock_directory(&path)? {
                Some(lock) => found.rubbish.push((path, Some(lock))),
                None => match std::fs::read_to_string(path.join(PINS)) {
                    Ok(pins) => found.pinned.extend(pins.lines().map(str::to_owned)),
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    Err(error) => return Err(Error::io("read", path.join(PINS), error)),
                },
            }
        }
        Ok(found)
    }

    /// Takes a directory out of sight at once, to be deleted with the rest.
    pub(super) fn discard(&mut self, images: &Path, path: &Path) -> Result<()> {
        let trash = images.join("tmp").join(Uuid::new_v4().to_string());
        match std::fs::rename(path, &trash) {
            Ok(()) => self.rubbish.push((trash, None)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(Error::io("remove", path, error)),
        }
        Ok(())
    }

    /// Deletes what nobody works with. This may take long, and the layers' lock is not needed any more.
    pub(super) fn delete(self) -> Result<()> {
        for (path, _lock) in self.rubbish {
            remove_tree(&path).map_err(|error| Error::io("remove", &path, error))?;
        }
        Ok(())
    }
}

/// Removes a file or a directory with all it holds, perhaps together with others who do the same.
fn remove_tree(path: &Path) -> io::Result<()> {
    const ATTEMPTS: usize = 5;
    let mut attempt = 0;
    loop {
        let removed = match path.symlink_metadata() {
            Ok(metadata) if metadata.is_dir() => std::fs::remove_dir_all(path),
            Ok(_) => std::fs::remove_file(path),
            Err(error) => Err(error),
        };
        attempt += 1;
        match removed {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty && attempt < ATTEMPTS => {}
            other => return other,
        }
    }
}
