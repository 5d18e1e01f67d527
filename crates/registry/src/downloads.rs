//! The directory of downloads: `<registry>/<sha256>`, one file per blob, locked while it is written.
//!
//! Parted by registry, so that none can spoil or hold up what comes from another.

use std::fs::{DirBuilder, File, OpenOptions, TryLockError};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use osb_protocol::image::is_hex_digest;

use crate::error::{Error, Result};
use crate::manifest::Part;
use crate::partial::{self, Found};

/// Between two looks at a lock that another process holds.
const LOCK_INTERVAL: Duration = Duration::from_millis(50);

/// What a collection removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Collected {
    /// Files.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
}

#[derive(Clone, Debug)]
pub(crate) struct Downloads {
    root: PathBuf,
    reserve: u64,
}

impl Downloads {
    pub(crate) fn new(root: &Path, reserve: u64) -> Result<Self> {
        make_dir(root)?;
        Ok(Self { root: root.into(), reserve })
    }

    /// Bytes that may be written.
    pub(crate) fn available(&self) -> Result<u64> {
        partial::available(&self.root, self.reserve)
    }

    /// What there is of a blob, locked. Waits while somebody else downloads it; `received` tells how far they are.
    pub(crate) async fn claim(&self, registry: &str, part: &Part, received: &AtomicU64) -> Result<Found> {
        let path = self.root.join(registry).join(part.digest.hex());
        loop {
            let file = open(&path)?;
            loop {
                match file.try_lock() {
                    Ok(()) => break,
                    Err(TryLockError::WouldBlock) => {
                        let len = file.metadata().map_or(0, |metadata| metadata.len());
                        received.store(len.min(part.size), Ordering::Relaxed);
                        tokio::time::sleep(LOCK_INTERVAL).await;
                    }
                    Err(TryLockError::Error(error)) => return Err(Error::disk("lock", &path, error)),
                }
            }
            let (path, part, reserve) = (path.clone(), part.clone(), self.reserve);
            match blocking(move || partial::examine(file, path, &part, reserve)).await? {
                Found::Rubbish => {}
                found => return Ok(found),
            }
        }
    }

    /// Removes what nobody downloads and nobody has touched for that long.
    pub(crate) fn collect(&self, age: Duration) -> Result<Collected> {
        let mut collected = Collected::default();
        for registry in entries(&self.root)? {
            for path in entries(&registry).unwrap_or_default() {
                let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
                if let Some(bytes) = is_hex_digest(name).then(|| remove_old(&path, age)).flatten() {
                    collected.files += 1;
                    collected.bytes += bytes;
                }
            }
            // Fails while something is in it.
            let _ = std::fs::remove_dir(&registry);
        }
        Ok(collected)
    }
}

/// Runs what may block for long on a thread for such work.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| {
        let reason = if error.is_panic() { "a task failed" } else { "the program is ending" };
        Err(Error::disk("work in", "the directory of downloads", std::io::Error::other(reason)))
    })
}

fn make_dir(path: &Path) -> Result<()> {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(path);
    made.map_err(|error| Error::disk("create", path, error))
}

fn open(path: &Path) -> Result<File> {
    const MOST_TRIES: usize = 100;
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    options.custom_flags(rustix::fs::OFlags::NOFOLLOW.bits().cast_signed());
    for _ in 0..MOST_TRIES {
        match options.open(path) {
            // A collection removes empty directories.
            Err(error) if error.kind() == ErrorKind::NotFound => {
                make_dir(path.parent().unwrap_or(path))?;
            }
            opened => return opened.map_err(|error| Error::disk("open", path, error)),
        }
    }
    Err(Error::disk("open", path, std::io::Error::from(ErrorKind::NotFound)))
}

fn entries(directory: &Path) -> Result<Vec<PathBuf>> {
    let read = std::fs::read_dir(directory).map_err(|error| Error::disk("read", directory, error))?;
    Ok(read.filter_map(|entry| Some(entry.ok()?.path())).collect())
}

fn remove_old(path: &Path, age: Duration) -> Option<u64> {
    let metadata = path.symlink_metadata().ok().filter(std::fs::Metadata::is_file)?;
    let untouched = SystemTime::now().duration_since(metadata.modified().ok()?).unwrap_or_default();
    if untouched < age {
        return None;
    }
    // The lock is held over the removal: whoever waits for it sees that the file is gone and begins anew.
    let file = File::open(path).ok()?;
    file.try_lock().ok()?;
    std::fs::remove_file(path).ok()?;
    Some(metadata.len())
}
