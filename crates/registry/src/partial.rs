//! A blob that is being downloaded: a locked file and the digest of what it holds.

use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use sha2::{Digest as _, Sha256};

use crate::error::{Error, Result};
use crate::manifest::{Digest, Part};

/// Bytes between two looks at the free space.
const SPACE_INTERVAL: u64 = 16 << 20;

/// What lies under a digest, once it is locked.
#[derive(Debug)]
pub(crate) enum Found {
    /// Everything, and it is right.
    Complete(Blob),
    /// Nothing or a beginning.
    Beginning(Partial),
    /// Something of no use, removed by now: lock again.
    Rubbish,
}

/// A beginning. Only ever appended to; complete blobs may be linked elsewhere and are never written again.
#[derive(Debug)]
pub(crate) struct Partial {
    file: File,
    path: PathBuf,
    part: Part,
    /// Boxed, since a partial is handed around by value.
    hasher: Box<Sha256>,
    len: u64,
    space_seen_at: u64,
    reserve: u64,
}

/// A complete blob whose bytes were held against their digest.
#[derive(Debug)]
pub(crate) struct Blob {
    file: File,
    path: PathBuf,
    size: u64,
    /// Its image is complete: the next one who pulls it finds it unpacked, not here.
    done: AtomicBool,
}

/// Looks at a file that is locked. Reads all of it.
pub(crate) fn examine(file: File, path: PathBuf, part: &Part, reserve: u64) -> Result<Found> {
    let len = file.metadata().map_err(|error| Error::disk("read", &path, error))?.len();
    let is_linked = is_at(&file, &path);
    if len <= part.size {
        let hasher = hash(&file, len).map_err(|error| Error::disk("read", &path, error))?;
        if Digest::finish(hasher.clone()) == part.digest {
            if len == part.size {
                return Ok(Found::Complete(Blob::new(file, path, part.size)));
            }
            return Err(Error::Malformed {
                registry: "the registry".into(),
                what: format!("layer {}", part.digest.short()),
                reason: format!("its manifest declares {} bytes, it has {len}", part.size),
            });
        }
        if len < part.size && is_linked {
            let part = part.clone();
            return Ok(Found::Beginning(Partial {
                file,
                path,
                part,
                hasher: Box::new(hasher),
                len,
                space_seen_at: len,
                reserve,
            }));
        }
    }
    if is_linked {
        std::fs::remove_file(&path).map_err(|error| Error::disk("remove", &path, error))?;
    }
    Ok(Found::Rubbish)
}

/// Whether the path leads to this very file.
fn is_at(file: &File, path: &Path) -> bool {
    match (file.metadata(), path.symlink_metadata()) {
        (Ok(open), Ok(there)) => (open.dev(), open.ino()) == (there.dev(), there.ino()),
        _ => false,
    }
}

fn hash(file: &File, len: u64) -> std::io::Result<Sha256> {
    let mut hasher = Sha256::new();
    for_each_piece(file, len, |bytes| {
        hasher.update(bytes);
        Ok(())
    })?;
    Ok(hasher)
}

fn for_each_piece(
    file: &File,
    len: u64,
    mut take: impl FnMut(&[u8]) -> std::io::Result<()>,
) -> std::io::Result<()> {
    let mut buffer = vec![0; 1 << 20];
    let mut at = 0;
    while at < len {
        let most = usize::try_from(len - at).unwrap_or(usize::MAX).min(buffer.len());
        let count = file.read_at(&mut buffer[..most], at)?;
        if count == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        take(&buffer[..count])?;
        at += count as u64;
    }
    Ok(())
}

/// Bytes that may still be written to the file system of a path.
pub(crate) fn available(path: &Path, reserve: u64) -> Result<u64> {
    let stat = rustix::fs::statvfs(path).map_err(|error| Error::disk("look at", path, error))?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize).saturating_sub(reserve))
}

impl Partial {
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Whether all bytes are there, right or wrong.
    pub(crate) fn is_full(&self) -> bool {
        self.len == self.part.size
    }

    /// Adds bytes.
    pub(crate) fn append(&mut self, bytes: &[u8]) -> Result<()> {
        if self.len - self.space_seen_at >= SPACE_INTERVAL {
            self.space_seen_at = self.len;
            if available(&self.path, self.reserve)? == 0 {
                return Err(self.no_space());
            }
        }
        let written = self.file.seek(SeekFrom::Start(self.len)).and_then(|_| self.file.write_all(bytes));
        written.map_err(|error| match error.kind() {
            std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => self.no_space(),
            _ => Error::disk("write to", &self.path, error),
        })?;
        self.hasher.update(bytes);
        self.len += bytes.len() as u64;
        Ok(())
    }

    fn no_space(&self) -> Error {
        let available = available(&self.path, self.reserve).unwrap_or(0);
        Error::NoSpace { path: self.path.clone(), needed: self.part.size - self.len, available }
    }

    /// Forgets everything.
    pub(crate) fn clear(&mut self) -> Result<()> {
        self.file.set_len(0).map_err(|error| Error::disk("write to", &self.path, error))?;
        (*self.hasher, self.len, self.space_seen_at) = (Sha256::new(), 0, 0);
        Ok(())
    }

    /// The blob, if all bytes are there and right; else what it was and the digest found.
    pub(crate) fn finish(self) -> Result<Blob, (Self, Digest)> {
        let found = Digest::finish(Sha256::clone(&self.hasher));
        if !self.is_full() || found != self.part.digest {
            return Err((self, found));
        }
        Ok(Blob::new(self.file, self.path, self.part.size))
    }
}

impl Blob {
    fn new(file: File, path: PathBuf, size: u64) -> Self {
        // Others may look at it now. An unlock that failed would only make them wait for the end of this pull.
        let _ = file.unlock();
        Self { file, path, size, done: AtomicBool::new(false) }
    }

    /// Makes it appear at `target`, by a link where that is possible.
    pub(crate) fn place(&self, target: &Path) -> Result<()> {
        if std::fs::hard_link(&self.path, target).is_ok() {
            if is_at(&self.file, target) {
                return Ok(());
            }
            // Somebody removed it and began anew.
            std::fs::remove_file(target).map_err(|error| Error::disk("remove", target, error))?;
        }
        let failed = |error| Error::disk("create", target, error);
        let mut copy = File::create_new(target).map_err(failed)?;
        for_each_piece(&self.file, self.size, |bytes| copy.write_all(bytes)).map_err(failed)
    }

    /// Its image is complete: it is removed with its last holder.
    pub(crate) fn set_done(&self) {
        self.done.store(true, Ordering::Relaxed);
    }
}

impl Drop for Blob {
    fn drop(&mut self) {
        if self.done.load(Ordering::Relaxed) && is_at(&self.file, &self.path) {
            // What remains is removed by age.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}
